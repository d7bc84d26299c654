"""``dgm-infer bench steps``: what a leapfrog step takes, from its matrix products alone to machine code, and in JAX.

Posteriors of half images by the shipped decoders, the noise integrated out, with a dense metric per image. Each time is
processor time of a step, from the difference of transitions of many and of few steps; the best of several rounds.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.autodiff.captured import CapturedTarget
from dgm_infer.sampling.execution import Execution

from ..reports.records import write_record
from ..reports.tables import markdown
from .image_problems import PROBLEMS
from .publishing import new_record, publish, versions
from .settings import check_counts, names_of, writable_folder

__all__ = ["bench", "page"]

# Steps of the transitions that are compared, and seconds and rounds in which each is timed.
_FEW, _MANY = 4, 36
_SECONDS, _ROUNDS = 0.5, 4
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def bench(
    problems: str = "digits,mnist_vae",
    chains: str = "4,64",
    images: int = 2,
    output: str = "evaluation/results",
) -> Path:
    """Time leapfrog steps on one core.

    Args:
        problems: names, separated by commas: digits, mnist_vae.
        chains: numbers of chains per image, separated by commas.
        images: held-out images, sampled together.
        output: folder for ``steps.json`` and ``steps.md``.

    Returns:
        path of the JSON file.
    """
    check_counts(images=images)
    numbers = [int(part) for part in chains.split(",")]
    folder = writable_folder(output)
    settings = {"problems": problems, "chains": chains, "images": images}
    record = new_record("steps", settings, ["dgm-infer", "torch", "jax"], problems={})
    path = folder / "steps.json"
    torch.set_num_threads(1)
    for name in names_of("problems", problems, PROBLEMS):
        given = PROBLEMS[name].conditioned(images)
        fibre = given.fibre()
        draws = dgm.sample(fibre, dgm.LiftedHMC(), chains=max(numbers), draws=2, seed=0, progress=False)
        assert draws.inputs is not None
        for n in numbers:
            row = {**_ours(fibre, draws.kernel, draws.inputs[:n, -1]), **_theirs(given, draws.kernel, n)}
            record["problems"].setdefault(name, {})[str(n)] = row
            write_record(path, record)
            print(f"{name}, {n} chains: " + ", ".join(f"{key} {value:.1f}" for key, value in row.items()), flush=True)
    publish(path, "steps", page(record))
    return path


def _best(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    call()
    rounds = []
    for _ in range(_ROUNDS):
        calls, began = 0, time.process_time()
        while time.process_time() - began < _SECONDS:
            call()
            calls += 1
        rounds.append((time.process_time() - began) / calls)
    return 1e6 * min(rounds)


def _ours(fibre: Any, kernel: Any, position: Tensor) -> dict[str, float]:
    marginal = fibre.marginal
    u1 = position[..., : marginal.dim]
    own = CapturedTarget(marginal)
    graph = own._of(u1).gradient
    with torch.no_grad():
        found = {
            "matrix products": sum(_products(graph, u1)),  # type: ignore[arg-type]
            "as captured": _best(lambda: own.gradient(u1)),
        }
    found["by autograd"] = _best(lambda: marginal.gradient(u1))
    for key, coarse in (("compiled, float64", False), ("compiled", None)):
        times = [_transition(fibre, kernel.replace(float32_gradients=coarse), position, n) for n in (_FEW, _MANY)]
        found[key] = (times[1] - times[0]) / (_MANY - _FEW)
    found["around the steps"] = times[0] - _FEW * found["compiled"]
    return found


def _products(graph: Any, x: Tensor) -> list[float]:
    """Microseconds of each matrix product of a graph."""
    sizes: list[tuple[Tensor, Tensor]] = []

    class Seen(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in _PRODUCTS:
                sizes.append(args[-2:])
            return super().call_function(target, args, kwargs)

    Seen(graph.module).run(*graph.constants, x)
    return [_best(lambda a=a, b=b, out=a @ b: torch.mm(a, b, out=out)) for a, b in sizes]


def _transition(fibre: Any, kernel: Any, position: Tensor, n: int) -> float:
    """Microseconds of a compiled transition of so many steps."""
    kernel = kernel.replace(compile=True, trajectory_length=None, n_steps=n)
    execution, rng = Execution(fibre, 10**9), torch.Generator().manual_seed(0)
    state = kernel.init(fibre, position)
    made = execution.several(kernel, state, rng, 32)[3]
    return _best(lambda: execution.several(kernel, state, rng, 32)) / made


def _theirs(given: Any, kernel: Any, chains: int) -> dict[str, float]:
    try:
        from .jax_images import precision
    except ImportError:
        return {}
    found = {}
    for dtype in ("float32", "float64"):
        with precision(dtype):
            found[f"JAX, {dtype}"] = _step_in_jax(given, kernel, chains)
    return found


def _step_in_jax(given: Any, kernel: Any, chains: int) -> float:
    from .jax_images import images_posterior, jax, jnp

    posterior = images_posterior(given)
    root = jnp.asarray(kernel.metric.factor.double().numpy())
    step = jnp.asarray(kernel.step_size.numpy())[:, None]
    slope = jax.grad(lambda z: jax.vmap(posterior.energies)(z).sum())

    def once(_: Any, point: Any) -> Any:
        z, p = point
        z = z + step * jnp.einsum("bij,cbj->cbi", root, p)
        return z, p - step * jnp.einsum("bij,cbi->cbj", root, slope(z))

    rng = torch.Generator().manual_seed(0)
    shape = (chains, *posterior.shape)
    start = [jnp.asarray(torch.randn(shape, generator=rng).double().numpy()) for _ in range(2)]
    run = jax.jit(lambda z, p, n: jax.lax.fori_loop(0, n, once, (z, p)))
    # a call of JAX takes as long as dozens of steps
    few, many = (_best(lambda n=n: jax.block_until_ready(run(*start, n))) for n in (_FEW, 50 * _MANY))
    return (many - few) / (50 * _MANY - _FEW)


def page(record: Mapping[str, Any]) -> str:
    """Markdown: a line per problem and number of chains."""
    names = [
        "matrix products", "as captured", "by autograd", "compiled, float64", "compiled", "around the steps",
        "JAX, float32", "JAX, float64",
    ]  # fmt: skip
    lines = [
        [PROBLEMS[name].title, chains, *(f"{row[key]:.1f}" if key in row else "-" for key in names)]
        for name, rows in record["problems"].items()
        for chains, row in rows.items()
    ]
    return "\n".join(
        [
            "# A leapfrog step\n",
            f"Microseconds of one core, {record['settings']['images']} images, dense metrics. Compiled: gradients in "
            "float32, energies in float64. Around the steps: what a transition takes besides.\n",
            markdown(["problem", "chains", *names], lines),
            "",
            f"`dgm-infer bench steps`, {versions(record)}.",
            "",
        ]
    )
