"""Sequential Monte Carlo along the path (Del Moral, Doucet and Jasra 2006), or waste-free (Dau and Chopin 2022)."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..arguments import fraction, positive, whole_number, within
from ..errors import ArgumentError
from ..progress import Progress
from ..settings import Settings
from .estimators import largest_share, log_mean, tail_excess, weight_ess
from .method import EstimateStatus, Outcome, check_held
from .path import AnnealedPath, PathPoint
from .plan import Planned, StepSizes


def systematic(log_weights: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Ancestors by systematic resampling: particle i has ``count w_i`` offspring, rounded up or down, unbiased.

    One uniform number per run places ``count`` evenly spaced points on the cumulative sum of the weights.

    Args:
        log_weights: ``[runs, particles, *batch]``, normalised per run.
        count: number of offspring per run.

    Returns:
        indices ``[runs, count, *batch]`` of particles.
    """
    below = log_weights.exp().movedim(1, -1).cumsum(-1)
    shape = (*below.shape[:-1], 1)
    uniform = torch.rand(shape, generator=rng, dtype=below.dtype, device=below.device)
    places = (torch.arange(count, dtype=below.dtype, device=below.device) + uniform) / count * below[..., -1:]
    # right=True: a particle of zero weight has no offspring
    chosen = torch.searchsorted(below.contiguous(), places.contiguous(), right=True)
    return chosen.clamp_max(log_weights.shape[1] - 1).movedim(-1, 1)


def pick(point: PathPoint, runs: int, ancestors: Tensor) -> PathPoint:
    """Points ``[runs * particles, *batch]`` of the ancestors ``[runs, count, *batch]``: ``[runs * count, *batch]``."""

    def picked(values: Tensor) -> Tensor:
        values = values.unflatten(0, (runs, -1))
        index = ancestors
        if values.ndim > ancestors.ndim:
            index = index.unsqueeze(-1).expand(*ancestors.shape, values.shape[-1])
        return values.gather(1, index).flatten(0, 1)

    return PathPoint(*(picked(values) for values in point))


@dataclass(frozen=True)
class SMCSettings(Settings):
    """What every run does alike."""

    pilot: int = 32
    """Chains of the pilot, which only tunes."""
    share_of_rest: float = 0.1
    """Largest adaptive step, as a share of what remains to 1: particles at beta have at least the tails of the base to
    the power ``1 - beta``, so that weights of a step d have ``(1 - beta)/d`` moments however heavy the target's tails
    are. Three of them do not suffice, as a move leaves particles in tails where they are (correlations of
    ``phi - psi`` of 0.6) and their weights multiply: docs/evidence.md has the coverage by this share."""
    share_of_rest_moved: float = 1 / 3
    """The same of waste-free runs, whose particles move many times at every temperature: with a tenth, chains at
    successive temperatures depend on each other, and their own error is 0.79 of the spread over runs (tests)."""
    last: float = 0.03
    """What may remain for the last step: its weights, to such a power, differ little but far out (coverage there)."""


SETTINGS = SMCSettings()


@dataclass(frozen=True, eq=False)
class SMC(Planned):
    """Particles that are weighted, resampled, and moved by Hamiltonian trajectories, at one temperature after another.

    Each chain of :func:`log_evidence` is a run with its own ``particles``, so that errors come from the spread over
    independent runs: ``Z-hat`` of a run is the product over temperatures of the mean incremental weight, and the
    estimate is the mean over runs. With a fixed schedule, or one frozen from a pilot, ``E[Z-hat] = Z`` (unbiased);
    with one by which each half of the runs adapts to the particles of the other it is consistent.

    Args:
        particles: particles per run.
        schedule: ``"adaptive"``, temperatures as far apart as ``conditional_ess`` allows, or a schedule of
            :class:`AIS`: ``"barrier"``, ``"sigmoid"``, ``"linear"``, a function of K, or values.
        temperatures: K; for the adaptive schedule the maximum, and the last step then goes to 1.
        conditional_ess: share of the particles that an adaptive step leaves effective (Zhou, Johansen and Aston 2016).
        threshold: share of effective particles below which a run resamples.
        waste_free: P keeps all states of ``particles/P`` chains of P states, whose first states are resampled: as many
            moves, and no state is discarded. The diagnostic ``run_std_error`` is the standard error of a single run
            from the spread over its chains: too small if P states do not forget the first, or chains are few. None
            makes one move per particle.
        n_steps, step_size, target_acceptance, pilot_temperatures: as in :class:`AIS`.
    """

    own_schedules = ("adaptive",)
    particles: int = 64
    _: KW_ONLY
    schedule: str | Tensor | Callable[[int], Tensor] = "adaptive"
    temperatures: int = 150
    conditional_ess: float = 0.97
    threshold: float = 0.5
    waste_free: int | None = None

    def __post_init__(self):
        super().__post_init__()
        whole_number("SMC", "particles", self.particles, 2)
        fraction("SMC", "conditional_ess", self.conditional_ess)
        within("SMC", "threshold", positive("SMC", "threshold", self.threshold), 0, 1)
        if self.waste_free is not None:
            whole_number("SMC", "waste_free", self.waste_free, 2)
            if self.particles % self.waste_free or self.particles == self.waste_free:
                raise ArgumentError(
                    f"SMC(waste_free={self.waste_free}): must divide particles={self.particles} into two or more chains"
                )

    @property
    def status(self) -> EstimateStatus:
        return "consistent" if self._adapts else "unbiased"

    @property
    def _adapts(self) -> bool:
        return isinstance(self.schedule, str) and self.schedule == "adaptive"

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        check_held(self, path, particles=chains * self.particles * path.base.mean.numel())
        pilot_chains = min(SETTINGS.pilot, chains * self.particles)
        sizes, pilot = self.tuned_steps(path, pilot_chains, rng, progress)
        betas = None if self._adapts else self.betas(path, pilot)
        # per chain: the pilot's evaluations, shared among the runs
        spent = -(-path.evaluations * pilot_chains // chains)
        path.evaluations = 0
        swarm = _Swarm(self, path, sizes, chains, rng)
        live = (swarm, path, rng)
        for _ in progress.steps("particles", lambda: not swarm.arrived, live, lambda: log_mean(swarm.log_z)):
            progress.expect(1)
            swarm.advance(betas)
        path.evaluations = spent + self.particles + (path.evaluations - 1) * swarm.movers
        return swarm.outcome(spent)


def next_temperatures(share: float, of_rest: float, beta: Tensor, difference: Tensor, log_weights: Tensor) -> Tensor:
    """Temperatures ``[runs, *batch]`` after ``beta``, at which a share of the particles of other runs is effective.

    Each half of the runs goes by the particles of the other: a run that goes by its own shortens a step if one of them
    has a large weight, and estimates too small a Z: under tails heavier than the base's, by more than its error. A
    single run has no other.

    Args:
        of_rest: longest step as a share of what remains, whatever the particles say, but for the last one.
        difference: ``phi - psi`` of the particles, ``[runs, particles, *batch]``.
        log_weights: likewise, normalised per run.
    """
    half, rest = len(beta) // 2, 1 - beta
    farthest = torch.where(rest > SETTINGS.last, beta + of_rest * rest, 1.0)
    if not half:
        return _farthest(share, beta[0], difference, log_weights).unsqueeze(0).minimum(farthest)
    first = _farthest(share, beta[0], difference[half:], log_weights[half:])
    second = _farthest(share, beta[half], difference[:half], log_weights[:half])
    return torch.cat([first.expand_as(beta[:half]), second.expand_as(beta[half:])]).minimum(farthest)


def _farthest(share: float, beta: Tensor, difference: Tensor, log_weights: Tensor) -> Tensor:
    """The temperature after ``beta [*batch]``, by bisection on ``(sum W w)^2 / sum W w^2`` for the weights
    ``w = exp(-d Delta)`` of a step of length d, over the particles of all these runs."""
    rest, log_shares = 1 - beta, log_weights - math.log(len(log_weights))

    def too_long(step: Tensor) -> Tensor:
        log_w = -step * difference
        first, second = ((log_shares + k * log_w).flatten(0, 1).logsumexp(0) for k in (1, 2))
        # runs without weights may as well finish
        return 2 * first - second < math.log(share)

    low, high = torch.zeros_like(rest), rest.clone()
    # finish in one step if that is not too long; a tiny step replaces one of zero length, as 0 * inf is NaN
    finish = ~too_long(rest.clamp_min(1e-300))
    for _ in range(30):
        middle = 0.5 * (low + high)
        long = too_long(middle)
        low, high = torch.where(long, low, middle), torch.where(long, middle, high)
    # any step, however short, drops draws of zero density
    return torch.where(finish, 1.0, (beta + low.clamp_min(1e-9)).clamp_max(1))


class _Swarm:
    """Particles of all runs, ``[runs * particles, *batch]``, and their estimates so far."""

    def __init__(self, method: SMC, path: AnnealedPath, sizes: StepSizes, runs: int, rng: torch.Generator):
        self.method, self.path, self.sizes, self.runs, self.rng = method, path, sizes, runs, rng
        self.chain_length = method.waste_free or 1
        # number of chains that move
        self.movers = method.particles // self.chain_length
        self.point = path.at(path.draws(runs * method.particles, rng))
        self.log_n = math.log(method.particles)
        energy = self.point.energy.unflatten(0, (runs, -1)).double()
        self.log_weights = torch.full_like(energy, -self.log_n)
        self.log_z = torch.zeros_like(energy[:, 0])
        self.beta, self.variance = torch.zeros_like(self.log_z), torch.zeros_like(self.log_z)
        self.acceptance, self.temperatures = torch.zeros_like(self.log_z), torch.zeros_like(self.log_z)
        self.count = 0

    @property
    def arrived(self) -> bool:
        return bool((self.beta >= 1).all())

    def advance(self, betas: Tensor | None) -> None:
        """One temperature: weigh, resample, move; at the next of ``betas [K + 1, *batch]``, or of None adapted."""
        difference = self.path.difference(self.point).unflatten(0, (self.runs, -1))
        if betas is not None:
            beta = betas[self.count + 1].expand_as(self.beta)
        elif self.count + 1 >= self.method.temperatures:
            beta = torch.ones_like(self.beta)
        else:
            of_rest = SETTINGS.share_of_rest if self.method.waste_free is None else SETTINGS.share_of_rest_moved
            share = self.method.conditional_ess
            beta = next_temperatures(share, of_rest, self.beta, difference, self.log_weights)
        self.temperatures += self.beta < 1
        width = (beta - self.beta).unsqueeze(1)
        raw = self.log_weights - torch.where(width > 0, width * difference, 0.0)
        mean = raw.logsumexp(1, keepdim=True)
        alive = ~mean.isneginf()
        self.log_z += mean.squeeze(1)
        # a run that has lost all weight continues, with zero weight
        self.log_weights = torch.where(alive, raw - mean, self.log_weights)
        self.beta = beta
        self.count += 1
        if self.method.waste_free is None:
            self._resample_and_move()
        else:
            self.variance += torch.where(alive.squeeze(1), self._variance_of_mean(), math.inf)
            self._move_and_keep()

    def _resample_and_move(self) -> None:
        n = self.method.particles
        needed = weight_ess(self.log_weights.movedim(1, 0)) < self.method.threshold * n
        if needed.any():
            needed = needed.unsqueeze(1)
            own = torch.arange(n, device=needed.device).reshape(-1, *[1] * (needed.ndim - 2))
            ancestors = torch.where(needed, systematic(self.log_weights, n, self.rng), own)
            self.point = pick(self.point, self.runs, ancestors)
            self.log_weights = torch.where(needed, -self.log_n, self.log_weights)
        self.point = self._moved(self.point)

    def _move_and_keep(self) -> None:
        states = [pick(self.point, self.runs, systematic(self.log_weights, self.movers, self.rng))]
        while len(states) < self.chain_length:
            states.append(self._moved(states[-1]))
        # [runs, P, M]: the states of a chain are M particles apart
        self.point = PathPoint(
            *(
                torch.stack([part.unflatten(0, (self.runs, -1)) for part in parts], 1).flatten(1, 2).flatten(0, 1)
                for parts in zip(*states, strict=True)
            )
        )
        self.log_weights = torch.full_like(self.log_weights, -self.log_n)

    def _moved(self, point: PathPoint) -> PathPoint:
        beta = self.beta.repeat_interleave(self.movers, 0)
        move = self.path.move(point, beta, self.sizes.at(beta), self.method.n_steps, self.rng)
        self.acceptance += move.acceptance.unflatten(0, (self.runs, -1)).mean(1) / max(self.chain_length - 1, 1)
        return move.point

    def _variance_of_mean(self) -> Tensor:
        """Variance of the mean incremental weight over its square, from the spread over the chains of a run."""
        shares = (self.log_weights + self.log_n).exp()
        return shares.unflatten(1, (self.chain_length, self.movers)).mean(1).var(1) / self.movers

    def outcome(self, pilot_evaluations: int) -> Outcome:
        # the mean over the particles of a run is its Z-hat
        log_weights = self.log_weights + self.log_n + self.log_z.unsqueeze(1)
        diagnostics = {
            "ess": weight_ess(log_weights.flatten(0, 1)),
            "max_weight_share": largest_share(self.log_z),
            "lost_chains": self.log_z.isneginf().sum(0),
            "acceptance": (self.acceptance / self.count).mean(0),
            "temperatures": self.temperatures.mean(0),
            "tail_excess": tail_excess(self.path.difference(self.point), log_weights.flatten(0, 1)),
        }
        if self.method.waste_free is not None:
            # runs that have lost all weight have no variance
            kept = self.variance.isfinite()
            total = torch.where(kept, self.variance, 0.0).sum(0)
            diagnostics["run_std_error"] = (total / kept.sum(0)).sqrt()
        draws = self.path.base.unwhiten(self.point.v).unflatten(0, (self.runs, -1))
        return Outcome(log_mean(self.log_z), draws, log_weights, diagnostics, pilot_evaluations)
