"""The samplers of estimated densities that two experiments compare, and what a draw of each costs (T 3)."""

import warnings

from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Draws
from dgm_infer.errors import uninterrupted
from dgm_infer.kernels import Kernel

from ..reports.kept import NOT_KEPT, Parts

__all__ = ["SAMPLERS", "estimates_per_draw", "pseudo_marginal_kernel", "quietly_sampled"]

SAMPLERS = ("PM-MH", "MI+MH", "SS+MH", "MI+SS", "SS+SS")
"""Pseudo-marginal Metropolis-Hastings; updates of the noise by independent proposals (MI) or elliptical slices (SS),
then of the target variables by a random walk (MH) or slices along lines (SS)."""


def pseudo_marginal_kernel(name: str, scale: float | Tensor | None) -> Kernel:
    """The sampler of this name, with isotropic moves of the target variables and no stepping out, as published.

    Args:
        name: one of :data:`SAMPLERS`.
        scale: step size of the random walk, None to adapt it, or width of the bracket; ``[*batch]`` or a number.
    """
    if name == "PM-MH":
        return dgm.kernels.PseudoMarginalMH(scale, "identity")
    noise, target = name.split("+")
    first = dgm.kernels.Independence() if noise == "MI" else dgm.kernels.EllipticalSlice()
    if target == "MH":
        return dgm.kernels.Alternating(first, dgm.kernels.RandomWalk(scale, "identity"), ("noise", "target"))
    assert scale is not None
    return dgm.kernels.Alternating(
        first, dgm.kernels.LinearSlice(scale, max_steps=1, metric="identity"), ("noise", "target")
    )


def estimates_per_draw(draws: Draws) -> Tensor:
    """Mean number of density estimates per transition, ``[*batch]``.

    One per proposal of a Metropolis-Hastings update, and one per point that a slice update tries; the estimate at the
    present point is kept.
    """
    blocks = ("noise", "target") if isinstance(draws.kernel, dgm.kernels.Alternating) else ("",)
    one = draws.stats["acceptance_rate"].new_ones(())
    counts = (draws.stats.get(f"{block}_slice_evaluations", one) for block in blocks)
    return sum((count.double().expand(draws.shape).mean((0, 1)) for count in counts), one.double() * 0)


def quietly_sampled(problem: dgm.Target, kernel: Kernel, parts: Parts = NOT_KEPT, **options) -> Draws:
    """:func:`dgm_infer.sample` without its warnings of chains that disagree, which the comparison is about.

    Raises:
        KeyboardInterrupt: interrupted.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        draws, _ = parts.run(dgm.sample, problem, kernel, **options)
    return uninterrupted(draws)
