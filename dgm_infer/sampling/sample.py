"""``sample()``: starting points, warm-up and the main loop."""

import dataclasses
import warnings
from typing import Literal

import torch
from torch import Tensor

from ..arguments import choice, flag, fraction, numbers, random_seed, whole_number
from ..conditioning.fibre import Fibre
from ..conditioning.soft import InputPosterior
from ..errors import ArgumentError, StartError, cause
from ..kernels import HMC, ConstrainedHMC, EllipticalSlice, Info, Kernel, RiemannianHMC
from ..kernels.tuning import Tunable
from ..progress import Progress
from ..target import Target, as_target, reference
from .draws import Draws
from .pilot import pick_kernel
from .preflight import check_energy, check_latents, check_size
from .starts import starting_points
from .verdict import verdict
from .warmup import WarmUp

__all__ = ["sample"]

# Prior draws that say how narrow a tolerance is, and the ratio from which the default follows the ridge: steps of HMC
# per step of RiemannianHMC, against what that costs, which grows with the rows of its Jacobian.
_DRAWN, _STEP, _ROW = 8, 5, 2


def sample(
    problem,
    kernel: Kernel | None = None,
    *,
    chains: int = 4,
    warmup: int = 300,
    draws: int = 500,
    thin: int = 1,
    seed: int | None = None,
    keep: Literal["inputs", "latents"] = "inputs",
    initial=None,
    target_acceptance: float = 0.8,
    progress: bool = True,
) -> Draws:
    """Draw from a conditioned problem with many chains at once.

    Args:
        problem: a :class:`Fibre`, a :class:`Target`, or anything with ``energy``, ``dim`` and ``batch_shape``.
        kernel: None for :class:`HMC` on a target (:class:`EllipticalSlice` if it has no gradient,
            :class:`RiemannianHMC` where a Gaussian tolerance is small beside the slope of the outputs), and on a fibre
            :class:`ConstrainedHMC`, or :class:`LiftedHMC` if the model's noise is additive and normal and a short pilot
            finds it cheaper per effective draw (:func:`~dgm_infer.sampling.pilot.pick_kernel`); the pilot has its own
            random numbers, so that the draws are those of the kernel that it picks, which is in ``Draws.kernel``.
        chains: chains per problem of the batch.
        warmup: iterations that adapt the kernel and are not kept. With 0, an open step size is only searched for at the
            starting points.
        draws: draws kept per chain.
        thin: iterations per kept draw.
        seed: seed of all randomness; None draws one and records it in ``Draws.seed``.
        keep: ``"latents"`` drops the inputs to save memory, which disables ``generate()``.
        initial: starting positions ``[chains, *batch, D]``; None finds them near prior draws and, on the fibre of a
            model with normal noise and with a warm-up, anneals the noise until they are typical of the posterior.
            Stranded chains restart from surviving ones: ``Draws.ancestors`` records which.
        target_acceptance: mean acceptance probability that step sizes are adapted to, unless the kernel names its own.
        progress: show a bar with acceptance, failures and constraint error on the standard error stream.

    Returns:
        :class:`Draws`. An interrupt (Ctrl-C), or an exception of the model, after the first draw returns the draws made
        so far, with ``interrupted`` set and a warning that names the cause. A run whose draws are of no use says so
        in warnings (:func:`~dgm_infer.sampling.verdict.verdict`), and so does one whose chains form groups that never
        overlap, over all of which no mean is the posterior's (``Draws.components``).

    Raises:
        ArgumentError: an argument is outside its range.
        StartError: no starting points were found.
    """
    if not isinstance(problem, Fibre | Target):
        problem = as_target(problem)
    # without a warm-up, or with given starts, there is nothing for a pilot to go by
    undecided = problem if kernel is None and warmup != 0 and initial is None and isinstance(problem, Fibre) else None
    kernel = default_kernel(problem) if kernel is None else kernel
    if isinstance(kernel, type) or not isinstance(kernel, Kernel):
        name = kernel.__name__ if isinstance(kernel, type) else repr(kernel)
        raise ArgumentError(
            f"kernel={name}: expected an instance, for example {type(default_kernel(problem)).__name__}()"
        )
    kernel.check(problem)
    chains = whole_number("sample", "chains", chains, 1)
    warmup, draws, thin = (
        whole_number("sample", "warmup", warmup, 0),
        whole_number("sample", "draws", draws, 1),
        whole_number("sample", "thin", thin, 1),
    )
    seed = random_seed("sample", seed)
    choice("sample", "keep", keep, ("inputs", "latents"))
    fraction("sample", "target_acceptance", target_acceptance)
    flag("sample", "progress", progress)
    if initial is not None:
        initial = numbers("sample", "initial", initial)
    check_size(problem, chains=chains, warmup=warmup, draws=draws, thin=thin, keep=keep)
    if isinstance(problem, Target) and initial is None:
        check_energy(problem, _device(problem, initial))
    rng = torch.Generator(_device(problem, initial)).manual_seed(seed)
    kept: dict[str, Tensor] = {}
    count = 0
    stopped_by: str | None = None
    with Progress(progress, _diagnostics, warmup + draws * thin) as bar:
        if undecided is not None and undecided.marginal is not None:
            picked = pick_kernel(
                undecided,
                chains,
                transitions=warmup + draws * thin,
                target_acceptance=target_acceptance,
                report=bar.say,
            )
            kernel = picked.kernel
            bar.note(picked.reason)
        start = starting_points(
            problem,
            kernel,
            chains,
            rng,
            initial,
            anneal=warmup > 0,
            target_acceptance=target_acceptance,
            report=bar.say,
        )
        if isinstance(problem, Target) and initial is not None:
            check_energy(problem, start.position.device, start.position)
        check_latents(problem, start.position, draws if keep == "latents" else 0)
        state = kernel.init(problem, start.position)
        lost = int((~state.energy.isfinite()).sum())
        if lost:
            raise StartError(
                f"the energy is not finite at {lost} of {state.energy.numel()} starting points: check the density "
                "there, or pass initial="
            )
        adapted = isinstance(kernel, Tunable) and kernel.tuning(problem).step_size
        stayed = torch.ones_like(state.energy, dtype=torch.bool)
        # a machine without room for the draws says so before the warm-up, not after it
        _make_room(kept, _positions(problem, state.position, keep), draws)
        try:
            warm = WarmUp(
                kernel,
                problem,
                state,
                rng,
                iterations=warmup,
                target_acceptance=target_acceptance,
                typical=start.typical,
            )
            for _ in range(warmup):
                state, info = warm.kernel.step(problem, state, rng)
                _make_room(kept, _statistics(info), draws)
                warm.update(info, state)
                bar.update("warm-up", _without_ends(info))
            kernel, first = warm.frozen(), state.position
            for i in range(draws * thin):
                state, info = kernel.step(problem, state, rng)
                if (i + 1) % thin == 0:
                    record = {**_positions(problem, state.position, keep), **_statistics(info)}
                    _make_room(kept, record, draws)
                    for name, value in record.items():
                        kept[name][:, count] = value
                    count += 1
                    stayed &= (state.position == first).all(-1)
                bar.update("sampling", _without_ends(info))
        except (KeyboardInterrupt, Exception) as error:
            if count == 0:
                raise
            stopped_by = "interrupted" if isinstance(error, KeyboardInterrupt) else _named(error)
    if stopped_by is not None:
        warnings.warn(f"{stopped_by}: {count} of {draws} draws were made and are kept", stacklevel=2)
    kept = {name: value[:, :count] for name, value in kept.items()}
    result = Draws(
        inputs=kept.get("inputs"),
        latents=_strip("latents.", kept) or None,
        stats=_strip("stats.", kept),
        kernel=kernel,
        seed=seed,
        problem=problem,
        interrupted=stopped_by is not None,
        ancestors=start.ancestors,
    )
    try:
        lines = [str(each) for each in verdict(result, problem, stayed, count * thin, adapted)]
    except KeyboardInterrupt:
        result.interrupted, lines = True, ["interrupted after the last draw: all of them are kept"]
    except Exception as error:
        # the draws are there, whatever becomes of the look at them
        lines = [f"the draws could not be checked: {_named(error)}"]
    for line in lines:
        warnings.warn(f"sample(): {line}", stacklevel=2)
    return result


def default_kernel(problem: Fibre | Target) -> Kernel:
    """The default kernel for this kind of problem."""
    if isinstance(problem, Fibre):
        return ConstrainedHMC()
    if not problem.has_gradient:
        return EllipticalSlice()
    return RiemannianHMC() if isinstance(problem, InputPosterior) and _is_narrow(problem) else HMC()


def _is_narrow(problem: InputPosterior) -> bool:
    """Whether a tolerance is so small that its steps cost HMC more than Jacobians cost :class:`RiemannianHMC`."""
    if problem.graph is None:
        return False
    u = problem.initial_draws(_DRAWN, torch.Generator(problem.values.device).manual_seed(0))
    rows = min(problem.graph.fibre.values.shape[-1], problem.dim)
    # a simulator may overflow at prior draws, which says nothing
    return problem.graph.stretch(u).nanmedian().item() > _STEP + _ROW * rows


def _named(error: Exception) -> str:
    """An exception of the model in a line."""
    return f"stopped by {type(error).__name__} ({cause(error)})"


def _device(problem, initial) -> torch.device:
    values = reference(problem)
    like = initial if values is None else values
    return like.device if isinstance(like, Tensor) else torch.device("cpu")


def _positions(problem, position: Tensor, keep: str) -> dict[str, Tensor]:
    if keep == "inputs":
        return {"inputs": position}
    return _prefix("latents.", problem.latents(position))


def _statistics(info: Info) -> dict[str, Tensor]:
    return _prefix("stats.", info.all_stats())


def _make_room(kept: dict[str, Tensor], record: dict[str, Tensor], draws: int) -> None:
    """Add ``[chains, draws, ...]`` for every per-iteration value ``[chains, ...]`` that has none yet."""
    for name, value in record.items():
        if name not in kept:
            kept[name] = value.new_empty(value.shape[0], draws, *value.shape[1:])


def _prefix(prefix: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in values.items()}


def _strip(prefix: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _diagnostics(news: list[Info]) -> str:
    """Means over these transitions, for the progress bar."""
    acceptance = torch.stack([i.acceptance_rate.mean() for i in news]).mean().item()
    failures = torch.stack([(i.status != 0).double().mean() for i in news]).mean().item()
    text = f"accept {acceptance:.2f}, failed {100 * failures:.1f} %"
    errors = [i.stats["constraint_error"].max() for i in news if "constraint_error" in i.stats]
    if errors:
        text += f", constraint {torch.stack(errors).max().item():.0e}"
    return text


def _without_ends(info: Info) -> Info:
    """What the bar keeps: diagnostics are small, the ends of trajectories are not."""
    return dataclasses.replace(info, tuning=None)
