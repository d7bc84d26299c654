"""Operations of torch in programs compute what torch computes, in its types."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dgm_infer.autodiff import xla_lowering
from dgm_infer.autodiff.programs import Program
from dgm_infer.autodiff.xla import Machine
from dgm_infer.autodiff.xla_lowering import known_operations
from dgm_infer.errors import ModelError
from tests.quick import marks

from .xla_cases import CASES as PLAIN_CASES
from .xla_cases import FLOATS
from .xla_layer_cases import LAYER_CASES

CASES = {**PLAIN_CASES, **LAYER_CASES}
# Plain cases that one program has: compiling as many programs takes more than twice as long. Layers gain nothing.
TOGETHER = 16
# What a layer's type adds to the law of the other is the tolerance: the quick run has the one that networks compute in,
# and the long one the other type of the first case of every layer, whose code its other cases share.
FIRST_CASES = {name.split()[0]: name for name in reversed(LAYER_CASES)}.values()
TYPED = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=marks(name in PLAIN_CASES or dtype == torch.float32))
    for name in CASES
    for dtype in FLOATS
    if name in PLAIN_CASES or dtype == torch.float32 or name in FIRST_CASES
]

# What rounding makes of a result, in units of its size.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for t in found if t is not None]


@cache
def graph(name: str, dtype: torch.dtype) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    case = CASES[name]
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.inputs)
    return make_fx(lambda *x: [t.clone() for t in tensors(case.function(*x))], tracing_mode="fake")(*inputs), inputs


@cache
def results(names: tuple[str, ...], dtype: torch.dtype) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """What one program of all these cases computes, and what torch does, by case."""
    inputs, counts, sizes = [], [], []
    for name in names:
        own = [t.to(dtype) if t.is_floating_point() else t for t in CASES[name].inputs]
        inputs += own
        counts.append(len(own))

    def function(*x: Tensor) -> list[Tensor]:
        sizes.clear()
        found = []
        for name, part in zip(names, _parts(x, counts), strict=True):
            own = [t.clone() for t in tensors(CASES[name].function(*part))]
            sizes.append(len(own))
            found += own
        return found

    module = make_fx(function, tracing_mode="fake")(*inputs)
    with torch.no_grad():
        both = zip(_parts(by_xla(module, *inputs), sizes), _parts(module(*inputs), sizes), strict=True)
    return dict(zip(names, both, strict=True))


def _parts(values: Sequence[Tensor], counts: list[int]) -> Iterator[list[Tensor]]:
    """Runs of as many values."""
    rest = iter(values)
    return (list(islice(rest, n)) for n in counts)


def computed(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """By XLA and by torch, of plain cases among others."""
    if name not in PLAIN_CASES:
        return results((name,), dtype)[name]
    names = list(PLAIN_CASES)
    first = names.index(name) // TOGETHER * TOGETHER
    try:
        return results(tuple(names[first : first + TOGETHER]), dtype)[name]
    except Exception:
        # one case without a program is no failure of the others
        return results((name,), dtype)[name]


def by_xla(module: fx.GraphModule, *inputs: Tensor) -> list[Tensor]:
    machine = Machine(module, inputs, 0, 0, 0, 1)
    return [t[0] for t in machine(inputs, lambda: [], 1)]


def assert_same(found: list[Tensor], expected: list[Tensor], times: float = 1.0) -> None:
    assert len(found) == len(expected)
    for k, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own.shape == other.shape, k
        assert own.dtype == other.dtype, k
        if not other.is_floating_point():
            assert torch.equal(own, other), (k, own, other)
            continue
        usual = other[other.isfinite()].abs()
        size = float(usual.mean()) if usual.numel() else 0.0
        rounding = min(times * TOLERANCE[other.dtype], 1e-3)
        torch.testing.assert_close(own, other, rtol=rounding, atol=rounding * min(1.0, size), equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_an_operation_computes_what_torch_does(name, dtype):
    found, expected = computed(name, dtype)
    assert_same(found, expected, CASES[name].rtol)


# Of the graphs of models, which tracing of a case leaves out.
PASSED_ON = ("detach", "lift_fresh")


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_is_passed_on_is_the_same(name):
    x = torch.tensor([1.0, 2.0])
    own = fx.Graph()
    place = own.placeholder("x")
    place.meta["val"] = x
    found = own.call_function(getattr(torch.ops.aten, name).default, (place,))
    found.meta["val"] = x
    own.output([found])
    assert torch.equal(by_xla(fx.GraphModule({}, own), x)[0], x)


# torch advises against some of them
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_operation_that_is_known_is_among_the_cases():
    seen = set(PASSED_ON)

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            own = func.overloadpacket.__name__
            seen.add(own if func.namespace == "aten" else f"prims.{own}")
            return func(*args, **(kwargs or {}))

    with Seeing():
        for case in CASES.values():
            case.function(*(t.double() if t.is_floating_point() else t for t in case.inputs))
    assert set(known_operations()) - seen == set()


def test_control_a_wrong_operation_is_seen(monkeypatch):
    known = known_operations()
    wrong = {**known, "sin": known["cos"], "remainder": known["fmod"], "floor": known["trunc"]}
    monkeypatch.setattr(xla_lowering, "known_operations", lambda: wrong)
    for name in ("sin", "remainder", "floor"):
        module, inputs = graph(name, torch.float64)
        with pytest.raises(AssertionError):
            assert_same(by_xla(module, *inputs), module(*inputs), CASES[name].rtol)
    program = Program(lambda x, rng: x.sin(), torch.ones(3, dtype=torch.float64))
    with pytest.raises(ModelError, match="computes something else"):
        program.compile()
