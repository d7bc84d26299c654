"""``sample()``, stage by stage: choose a kernel, check, find starting points, warm up, draw, report."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import torch

from ..arguments import context, digits, flag, numbers
from ..conditioning.fibre import Fibre
from ..kernels import Kernel
from ..kernels.kernel import check_kernel
from ..progress import Progress
from ..target import Target, as_target
from .draws import Draws
from .plan import Keeping, RunInputs, RunPlan, default_kernel
from .preflight import check_energy, check_size, fitting_threads, trial
from .run import SamplingRun, device_of, diagnostics, finalise, run_until_stopped

__all__ = ["sample"]


def sample(
    problem,
    kernel: Kernel | None = None,
    *,
    chains: int = 4,
    warmup: int | None = None,
    draws: int = 500,
    thin: int = 1,
    seed: int | None = None,
    keep: Literal["inputs", "latents"] = "inputs",
    initial=None,
    target_acceptance: float | None = None,
    progress: bool = True,
    run: str | os.PathLike | None = None,
    checkpoint_every: float = 60.0,
    devices: Sequence[str | torch.device] | str | torch.device | None = None,
    executor: Any = None,
    shards: int | None = None,
    until: Mapping[str, Any] | None = None,
) -> Draws:
    """Draw from a conditioned problem with many chains at once.

    Args:
        problem: a :class:`Fibre`, a :class:`Target`, or anything with ``energy``, ``dim`` and ``batch_shape``.
        kernel: None for :class:`HMC` on a target (of a dense metric for the latents of a decoder, of an adapted
            diagonal one where no prior says how wide coordinates are, :class:`EllipticalSlice` if it has no gradient,
            :class:`RiemannianHMC` where a Gaussian tolerance is small beside the slope of the outputs), and on a fibre
            :class:`LiftedHMC` if the model's noise is additive and normal, unless it leaves a narrow, bent ridge,
            half of the other inputs free or more, else :class:`ConstrainedHMC`. Where the start finds several modes,
            :class:`ModeJumps` of the default kernel. ``Draws.kernel`` has it.
        chains: chains per problem of the batch.
        warmup: iterations that adapt the kernel and are not kept; None for as many as it takes until step sizes,
            trajectory lengths and energies have settled, at most 500 (a kernel that adapts no step size, or a metric
            from nothing, takes all of them). With 0, an open step size is only searched for at the starting points.
        draws: draws kept per chain.
        thin: iterations per kept draw.
        seed: seed of all randomness; None draws one and records it in ``Draws.seed``.
        keep: ``"latents"`` drops the inputs to save memory, which disables ``generate()``.
        initial: starting positions ``[chains, *batch, D]``; None finds them near prior draws and, with a warm-up,
            anneals the noise of a fibre of a model that has normal noise, or the likelihood of the latents of a
            decoder, until they are typical of the posterior. Stranded chains restart from surviving ones:
            ``Draws.ancestors`` records which.
        target_acceptance: mean acceptance probability that step sizes are adapted to, unless the kernel names its own;
            None for 0.9 where trajectories have a length, and 0.8 else, as for NUTS.
        progress: show a bar with acceptance, failures and constraint error on the standard error stream.
        run: a new folder that keeps the run while it runs: :func:`resume` goes on with it after a stop of any kind,
            :func:`extend` adds draws, :func:`collect` reads what is there. The draws are the same as without.
        checkpoint_every: seconds from one checkpoint to the next, which is what a stop may cost.
        devices: where chains run; None for the problem's device, ``"auto"`` for all CUDA devices, or a list, of which
            each has a process of its own; ``["cpu", "cpu"]`` is two processes.
        executor: a ``concurrent.futures`` executor whose workers run the chains, such as those of Dask, ``submitit``
            or ``mpi4py``; they have to reach the folder ``run``. Under ``torchrun`` ranks share a run's chains.
        shards: parts that the chains are cut into after a common warm-up, each with its own random numbers, which
            workers make one by one. Draws depend on the number of shards, not on who makes them. None for one, and
            with ``devices``, ``executor`` or ranks for eight, at most one a chain.
        until: what the run goes on until, ``draws`` being the most: ``ess``, the smallest bulk effective sample size of
            all latents; ``r_hat``, their largest R-hat; ``mcse``, by the name of a latent the Monte Carlo error of its
            means; all of them have to be reached, or ``seconds``: ``until=dict(ess=400, mcse={"z": 0.01})``. Looks
            take a fiftieth of the time, and ``Draws.stopped_by`` says what was reached. For runs of one shard.

    Returns:
        :class:`Draws`. An interrupt (Ctrl-C), or an exception of the model, after the first draw returns the draws made
        so far, with ``interrupted`` set and a warning that names the cause. A run whose draws are of no use says so
        in warnings (:func:`~dgm_infer.sampling.verdict.verdict`), and so does one whose chains form groups that never
        overlap, pooled means are then invalid (``Draws.chain_groups``).

    Raises:
        ArgumentError: an argument is outside its range, the folder holds a run, or what to sample cannot be stored.
        StartError: no starting points were found.
        EvidenceError: :class:`ModeJumps` was to find the modes of a target, and found none.
    """
    context("sample")
    # choose a kernel
    if not isinstance(problem, Fibre):
        problem = as_target(problem)
    undecided = kernel is None
    example = "HMC()"
    if isinstance(problem, Fibre):
        example = "ConstrainedHMC()" if problem.marginal is None else "LiftedHMC()"
    kernel = check_kernel("sample", default_kernel(problem) if kernel is None else kernel, example)
    # check
    kernel.check(problem)
    plan = RunPlan.checked(
        chains=chains,
        warmup=warmup,
        draws=draws,
        thin=thin,
        seed=seed,
        keep=keep,
        target_acceptance=target_acceptance,
    )
    flag("sample", "progress", progress)
    if initial is not None:
        like = getattr(problem, "values", None)
        initial = numbers("sample", "initial", initial, None if like is None else digits(initial))
    keeping = Keeping.checked("sample", run, checkpoint_every, devices, executor)
    in_folder = keeping.is_asked_for or shards is not None or until is not None
    check_size(problem, plan, streams=in_folder)
    if isinstance(problem, Target) and initial is None:
        check_energy(problem, kernel, device_of(problem, initial))
    # find starting points, warm up, draw
    run_inputs = RunInputs(problem, kernel, initial, undecided)
    with fitting_threads("sample", lambda: trial(problem, kernel, plan.chains)):
        if in_folder:
            # of the room above, which imports this one: loaded by those who ask for it
            begin = import_module("..runs.resume", __package__).begin_chains
            return begin(run_inputs, plan, keeping, shards=shards, progress=progress, until=until)
        with Progress(progress, diagnostics, plan.transitions) as bar:
            sampling_run = SamplingRun.begin(run_inputs, plan, bar)
            stopped_by = run_until_stopped(sampling_run, bar)
        # report
        return finalise(sampling_run.outcome(), stopped_by)
