"""A run of a program as straight-line code: the torch calls that it made, without the program around them."""

from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Function = Callable[[Tensor], tuple[Tensor, ...]]
_NoFactor: type[RuntimeError] = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


class Parts(NamedTuple):
    """What a run at one input makes."""

    output: list[Tensor]
    latents: list[Tensor]
    factors: list[Tensor]


class _Call(NamedTuple):
    """One call of torch, and the tensors it made."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    made: list[Tensor]
    picks: list[int] | None
    """Where they are in a result that is a tuple; None for a tensor."""
    changed: Tensor | None
    """The tensor that it writes to."""
    fixed: Tensor | None
    """Its result, if that does not depend on the values of the inputs."""

    @property
    def parts(self) -> list[Tensor]:
        return [*self.made, *([] if self.changed is None else [self.changed])]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


class Recording(TorchFunctionMode):
    """While active, notes every torch call that an input takes part in; :meth:`code` repeats them.

    What does not depend on the inputs becomes a constant, as do shapes and whatever Python computes. Calls that torch
    does not show to a mode (``torch.func``, an ``autograd.Function``) are missed: the result is then another function,
    so whoever records must compare the two.

    Args:
        u: the input of the run, ``[D]``.

    Attributes:
        decided: whether Python was given a value that depends on the input, by which it may have branched.
    """

    def __init__(self, u: Tensor):
        super().__init__()
        self._u = u
        self._calls: list[_Call] = []
        # by identity; the tensors are held, so that no other takes theirs
        self._known: dict[int, Tensor] = {id(u): u}
        # memory of values that do not depend on the input, only their being one per chain does
        self._fixed: set[int] = set()
        self.decided = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = [self._known[id(leaf)] for leaf in _leaves((args, kwargs)) if id(leaf) in self._known]
        if not known:
            return result
        self.decided |= func in LEAVING and any(_memory(tensor) not in self._fixed for tensor in known)
        changed = args[0] if writes(func) and args and isinstance(args[0], Tensor) else None
        made, picks = _made(result)
        if not made and changed is None:
            return result
        is_fixed = func in _FIXED or all(_memory(tensor) in self._fixed for tensor in known)
        if is_fixed:
            self._fixed.update(map(_memory, made))
        elif changed is not None:
            self._fixed.discard(_memory(changed))
        # what is fixed may be written to later, as may lists of the program
        value = made[0].clone() if is_fixed and made else None
        self._calls.append(_Call(func, _copied(args), _copied(kwargs), made, picks, changed, value))
        self._known.update({id(part): part for part in self._calls[-1].parts})
        return result

    def code(self, outputs: Sequence[Tensor]) -> Function:
        """The calls that these tensors of the run need, as a function of the input."""
        written = {_memory(call.changed) for call in self._calls if call.changed is not None}
        writer = _Writer(self._u)
        for call in self._needed(outputs, written):
            writer.write(call)
        return writer.code(outputs)

    def _needed(self, outputs: Sequence[Tensor], written: set[int]) -> list[_Call]:
        """The calls that the outputs depend on, in order: also writes to memory that is read later."""
        memory = {_memory(output) for output in outputs}
        needed = []
        for call in reversed(self._calls):
            if not any(_memory(part) in memory for part in call.parts):
                continue
            # what is fixed, and stays so, is a constant
            if call.fixed is not None and not any(_memory(part) in written for part in call.parts):
                continue
            needed.append(call)
            memory.update(map(_memory, call.tensors))
        return needed[::-1]


class _Writer:
    """Writes calls as the source of a function.

    Args:
        u: its argument.
    """

    def __init__(self, u: Tensor):
        self._names: dict[int, str] = {id(u): "u"}
        self._constant_names: dict[int, str] = {}
        self._constants: dict[str, Any] = {"own": _own}
        # each with the variables that it uses or makes
        self._lines: list[tuple[str, list[str]]] = []

    def write(self, call: _Call) -> None:
        if call.fixed is not None and call.changed is None and not _shares_memory(call):
            # memory that is written to: each chain has its own
            name = self._named(call.made[0])
            self._lines.append((f"{name} = own({self._constant(call.fixed)}, u)", [name]))
            return
        args = [self._expression(value) for value in call.args]
        args += [
            f"**{{{name!r}: {self._expression(value)}}}" if iskeyword(name) else f"{name}={self._expression(value)}"
            for name, value in call.kwargs.items()
        ]
        made = [self._named(tensor) for tensor in call.made]
        line = f"{self._constant(call.func)}({', '.join(args)})"
        if call.picks is not None:
            line = "; ".join(
                [f"r = {line}", *(f"{v} = r[{i}]" for v, i in zip(made, call.picks, strict=True)), "del r"]
            )
        elif made:
            line = f"{made[0]} = {line}"
        used = [name for tensor in call.tensors if (name := self._name(tensor))]
        self._lines.append((line, made + used))

    def code(self, outputs: Sequence[Tensor]) -> Function:
        # constants too, as numbers of the input's kind
        values = [self._name(output) or f"own({self._constant(output)}, u)" for output in outputs]
        body = [f"return ({', '.join(values)}{',' if values else ''})"]
        later = {"u", *filter(None, map(self._name, outputs))}
        for line, variables in reversed(self._lines):
            # memory is freed where the program would have freed it
            dead = sorted(set(variables) - later)
            body.append(f"{line}; del {', '.join(dead)}" if dead else line)
            later.update(variables)
        names = dict(self._constants)
        exec(compile("\n    ".join(["def run(u):", *reversed(body)]), "<recorded run>", "exec"), names)
        return names["run"]

    def _named(self, tensor: Tensor) -> str:
        return self._names.setdefault(id(tensor), f"v{len(self._names)}")

    def _name(self, value: Any) -> str | None:
        return self._names.get(id(value))

    def _constant(self, value: Any) -> str:
        name = self._constant_names.setdefault(id(value), f"c{len(self._constant_names)}")
        if name not in self._constants:
            self._constants[name] = _kept(value)
        return name

    def _expression(self, value: Any) -> str:
        name = self._name(value)
        if name is not None:
            return name
        if not any(self._name(leaf) for leaf in _leaves(value)):
            return self._constant(value)
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._expression, (value.start, value.stop, value.step)))})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._expression(each)}" for key, each in value.items()) + "}"
        inner = ", ".join(self._expression(each) for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"


def _kept(tree: Any) -> Any:
    """What a program read from outside, with memory of its own: the program's data may be written to later."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, slice):
        return slice(*(_kept(each) for each in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, dict):
        return {name: _kept(value) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_kept, tree))
    return tree


def _own(constant: Tensor, u: Tensor) -> Tensor:
    """Memory that each chain writes to for itself."""
    return constant + u.new_zeros((), dtype=constant.dtype)


def _shares_memory(call: _Call) -> bool:
    return _memory(call.made[0]) in map(_memory, call.tensors)


# what makes a number or an array of a tensor
LEAVING = {Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.item, Tensor.tolist}
LEAVING |= {Tensor.numpy, Tensor.__array__, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose}
# new tensors that take no more than type and shape from their first argument
SHAPED = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}
SHAPED |= {torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
_FIXED = {*SHAPED, Tensor.new}


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, slice):
        return _leaves((tree.start, tree.stop, tree.step))
    if isinstance(tree, tuple | list):
        return [leaf for each in tree for leaf in _leaves(each)]
    if isinstance(tree, dict):
        return _leaves(list(tree.values()))
    return [tree]


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(value) for value in tree]
    return tuple(_copied(value) for value in tree) if type(tree) is tuple else tree


def _made(result: Any) -> tuple[list[Tensor], list[int] | None]:
    if isinstance(result, Tensor):
        return [result], None
    if isinstance(result, tuple | list):
        picks = [i for i, each in enumerate(result) if isinstance(each, Tensor)]
        return [result[i] for i in picks], picks
    return [], None


def _memory(tensor: Tensor) -> int:
    """Tensors that share memory have the same number."""
    return tensor.untyped_storage()._cdata


def writes(func: Callable[..., Any]) -> bool:
    """Whether a call changes its first argument in place."""
    name = func.__name__
    if name.startswith("__"):
        return name in _WRITES
    return name.endswith("_")


_WRITES = {"__setitem__", "__set__"}
_WRITES |= {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}
_WRITES |= {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}


@torch.inference_mode(False)
def straight_line_code(run: Callable[[Tensor], Parts], probes: Tensor) -> tuple[Function, ...] | None:
    """Code of each part of a run; None if it does not do what the run does, and the program must run as it is.

    Args:
        run: at one input ``[D]``.
        probes: inputs at which values and derivatives must be the same, ``[n, D]``, n at least 2.
    """
    try:
        v = probes[0].clone()
        with torch.no_grad(), Recording(v) as recording:
            parts = run(v)
        if recording.decided:
            return None
        codes = tuple(recording.code(part) for part in parts)
        same = all(_is_same(code, lambda v, i=i: tuple(run(v)[i]), probes) for i, code in enumerate(codes))
    except Exception:
        # whatever torch refuses: the program itself is sure to work
        return None
    return codes if same else None


def _is_same(code: Function, part: Function, probes: Tensor) -> bool:
    """Whether values and gradients agree, of each input alone and of all at once."""
    together = _with_gradients(lambda v: torch.func.vmap(lambda row: _flat(code, row))(v), probes)
    for probe, *many in zip(probes, *together, strict=True):
        alone = _with_gradients(lambda v: _flat(code, v), probe)
        expected = _by_autograd(lambda v: _flat(part, v), probe)
        for e, a, m in zip(expected, alone, many, strict=True):
            # numbers that are not finite agree with anything
            if not (e.isfinite().all() and _agree(a, e) and _agree(m, e)):
                return False
    return True


def _flat(function: Function, v: Tensor) -> Tensor:
    """All outputs of one input, ``[N]``."""
    return torch.cat([v.new_zeros(0), *(x.reshape(-1).to(v.dtype) for x in function(v))])


def _with_gradients(outputs: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[..., N]``, and the gradients ``[..., D]`` of a weighted sum of them."""
    value, pull, *_ = torch.func.vjp(outputs, v.clone())
    weights = torch.linspace(1, 2, value.shape[-1], dtype=value.dtype, device=value.device)
    return value, pull(weights.expand_as(value))[0]


def _by_autograd(outputs: Callable[[Tensor], Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """The same of what need not be a function for ``torch.func``."""
    with torch.enable_grad():
        value = outputs(v := v.clone().requires_grad_())
        weights = torch.linspace(1, 2, value.shape[-1], dtype=value.dtype, device=value.device)
        total = (value * weights).sum()
        gradient = torch.autograd.grad(total, v)[0] if total.requires_grad else torch.zeros_like(v)
    return value.detach(), gradient


def _agree(a: Tensor, b: Tensor) -> bool:
    tolerance = 1000 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, tolerance, tolerance)


def _one_by_one(function: Function, rows: Tensor) -> tuple[Tensor, ...]:
    """A function of every row; NaN of those that have no factor, as of a matrix far out where a solver tries."""
    made: list[tuple[Tensor, ...] | None] = []
    for row in rows:
        try:
            made.append(function(row))
        except _NoFactor:
            made.append(None)
    like = next((own for own in made if own is not None), None)
    if like is None:
        # names what fails
        return torch.func.vmap(function)(rows)
    lost = tuple(torch.full_like(each, torch.nan) for each in like)
    return tuple(torch.stack(each) for each in zip(*(lost if own is None else own for own in made), strict=True))


class Rows:
    """A run at every row of inputs, vectorised over them; once recorded, its torch calls without the run around them.

    Args:
        run: at one input ``[D]``.
    """

    def __init__(self, run: Callable[[Tensor], Parts]):
        self._run = run
        self._codes: tuple[Function, ...] | None = None
        self._like = torch.empty(0)
        self._is_copy = False

    def each(self, part: int, u: Tensor) -> tuple[Tensor, ...]:
        """One of :class:`Parts` at every row ``[..., D]``, each tensor ``[..., *shape]``."""
        codes = self._codes if self.has_code(u) else None
        function = (lambda v: tuple(self._run(v)[part])) if codes is None else codes[part]
        if u.ndim == 1:
            return function(u)
        rows = u.reshape(-1, u.shape[-1])
        try:
            values = torch.func.vmap(function)(rows)
        except _NoFactor:
            values = _one_by_one(function, rows)
        return tuple(value.reshape((*u.shape[:-1], *value.shape[1:])) for value in values)

    def record(self, probes: Tensor) -> None:
        """Note the calls, if they give the same at some inputs ``[n, D]``: see :func:`straight_line_code`."""
        self._like, self._codes = probes, straight_line_code(self._run, probes)

    def forget(self) -> None:
        self._codes, self._is_copy = None, False

    def has_code(self, u: Tensor) -> bool:
        """Whether calls were noted for inputs of this type and on this device."""
        if self._is_copy:
            self._is_copy = False
            self.record(self._like)
        return self._codes is not None and (u.dtype, u.device) == (self._like.dtype, self._like.device)

    def __getstate__(self) -> dict[str, Any]:
        # generated functions have no pickle: a copy makes its own
        return {**vars(self), "_codes": None, "_is_copy": self._codes is not None}
