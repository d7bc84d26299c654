"""Non-reversible parallel tempering from two references (Syed et al. 2021, Surjanovic et al. 2022)."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...arguments import flag, whole_number
from ...arguments.values import shown
from ...errors import ArgumentError
from ...progress import Progress
from ...references import Gaussian
from ...references.modes import search
from ..estimators import Estimate
from ..method import Outcome, check_held
from ..path import AnnealedPath
from ..plan import Piloted, equal_distances, interpolated
from .legs import Legs, broad_reference
from .replicas import Replicas, Round


@dataclass(frozen=True)
class TuningRounds:
    """The rounds of sweeps that tune parallel tempering, and the search for its broad reference."""

    first: int = 4
    """Sweeps of the first round, at least."""
    fitted: int = 8
    """Sweeps of the shortest round whose draws the base is fitted to."""
    starts: int = 64
    """Minimisations per round of the search, as of ``dgm_infer.modes``."""
    iterations: int = 200
    """Gradients of each."""
    least_share: float = 0.05
    """Share of the estimate below which the base is cut off: it would cost as much again for a twentieth."""


ROUNDS = TuningRounds()


@dataclass(frozen=True, eq=False)
class ParallelTempering(Piloted):
    """Parallel tempering: every chain is a line of replicas, from the base up to the target and down to a broad base.

    A replica at ``beta_k`` of a leg has the density ``~ exp(-beta_k phi - (1 - beta_k) psi)``, psi the energy of the
    leg's reference. A sweep makes one Hamiltonian move of every replica above the references, swaps neighbours, even
    pairs and then odd ones, and draws the references again (math 6.10); the two legs exchange their targets. Tuning
    takes rounds of sweeps that double: each moves the temperatures to equal distances along the
    communication barrier (math 6.11). The last round, frozen, gives ``log Z`` by Bennett's ratio of neighbours
    (math 6.12), a mean of the legs' estimates whose weights come from tuning: consistent. Chains are independent
    groups of replicas, and the standard error is that between them.

    A mode that the base misses enters along the broad leg, and a base that is far worse than the broad reference is
    cut off (math 6.13): a bad base costs time, not correctness. Between the rounds of tuning the base is fitted to the
    draws of the target so far (math 6.15), as in stabilised variational parallel tempering.

    Diagnostics beside those of all methods: ``barrier [legs, *batch]``, ``round_trips`` between references and target
    (all chains), ``round_trip_rate`` (per chain and sweep), ``restarts`` (independent arrivals at the target, per
    chain), ``swap_acceptance`` and ``least_swap_acceptance``, ``log_z_forward`` and ``log_z_backward`` (plain stepping
    stones), ``leg_log_z [legs, *batch]``, ``leg_shift`` (by how much a base that is cut off finds log Z larger) and
    ``betas``; the base's leg is the first.

    Args:
        draws: sweeps of the last round; tuning takes about as many before it.
        temperatures: K, replicas per leg besides that at the reference; about twice the barrier, or more.
        n_steps: leapfrog steps per sweep.
        step_size: largest step in whitened coordinates, a number or ``[*batch]``; None adapts it per temperature and
            problem until the last round.
        broad: the second reference: True for :meth:`Gaussian.broad` of the target, and for problems in which its
            search finds no minimum, or spikes alone, the base's mean with 4 times its covariance (math 6.10); a
            Gaussian ``[*batch, D]`` or ``[D]``; or False for none.
        adapt_base: whether rounds of tuning fit a Gaussian base again, with full covariance, to their draws of the
            target (math 6.15); the broad reference stays, so that it cannot hurt.
        thin: sweeps per draw of x in the result, which are two with two legs.
        target_acceptance: mean acceptance probability that step sizes are adapted to.
        pilot_temperatures: temperatures of the annealing run that makes the first schedule and step sizes.
    """

    explores: ClassVar[bool] = True
    """It starts from a broad reference too: no cross-check of its modes is made."""
    draws: int = 144
    temperatures: int = 12
    _: KW_ONLY
    broad: bool | Gaussian = True
    adapt_base: bool = True
    thin: int = 1
    pilot_temperatures: int = 30

    def __post_init__(self):
        super().__post_init__()
        name = "ParallelTempering"
        for field in ("draws", "temperatures", "thin"):
            whole_number(name, field, getattr(self, field))
        if self.thin > self.draws:
            raise ArgumentError(f"{name}(thin={self.thin}): must be at most draws={self.draws}")
        flag(name, "adapt_base", self.adapt_base)
        if not isinstance(self.broad, bool | Gaussian):
            raise ArgumentError(f"{name}(broad={shown(self.broad)}): must be a Gaussian, True or False")

    @property
    def particles(self) -> int:
        """Points per chain that are evaluated together, by which a run is cut into chunks."""
        return (self.temperatures + 1) * (1 if self.broad is False else 2)

    def run(self, path: AnnealedPath, chains: int, rng: torch.Generator, progress: Progress) -> Outcome:
        position = chains * path.base.mean.numel() * (1 if self.broad is False else 2)
        check_held(
            self,
            path,
            draws=self.draws // self.thin * position,
            temperatures=(self.temperatures + 1) * position,
            pilot_temperatures=self.pilot_temperatures * path.batch_shape.numel(),
        )
        before = path.evaluations
        legs = Legs(path, self._broad(path, chains, rng))
        searched = path.evaluations - before
        rounds = self._rounds()
        progress.expect(self.pilot_temperatures + sum(rounds) + self.draws)
        replicas = self._replicas(legs, chains, rng, progress)
        powers = torch.ones(legs.batch_shape, dtype=torch.float64, device=replicas.betas.device) / legs.count
        for i, sweeps in enumerate(rounds):
            # the last round of tuning has the base of the run itself
            fits = self.adapt_base and legs.can_refit and sweeps >= ROUNDS.fitted and i + 1 < len(rounds)
            tuned = Round(replicas, sweeps if fits else 0, tunes=True)
            for _ in progress.steps("tuning", sweeps, (tuned, replicas, legs, rng)):
                tuned.add(replicas.sweep(self.target_acceptance if self.step_size is None else None))
            powers, replicas.coupled = _leg_powers(tuned)
            self._retune(replicas, tuned)
            if fits:
                replicas.refit(tuned.draws)
        spent = searched + legs.evaluations
        final = Round(replicas, keep=self.draws // self.thin, thin=self.thin)
        interrupted = False

        def estimate() -> Estimate:
            return final.stones.estimates(powers)["bennett"]

        try:
            live = (final, replicas, legs, rng)
            for _ in progress.steps("parallel tempering", self.draws, live, estimate):
                final.add(replicas.sweep(None))
        except KeyboardInterrupt:
            if final.kept == 0:
                raise
            interrupted = True
        path.evaluations += legs.evaluations
        return final.outcome(powers, spent, interrupted)

    def _broad(self, path: AnnealedPath, chains: int, rng: torch.Generator) -> Gaussian | None:
        if isinstance(self.broad, Gaussian) or not self.broad:
            return self.broad or None
        if path.target.standardised:
            return Gaussian.broad(path.target, like=path.base)
        found = search(path.target, path.base, ROUNDS.starts, ROUNDS.iterations, rng, required=False)
        path.evaluations += -(-found.evaluations // chains)
        return broad_reference(found, path.base)

    def _rounds(self) -> list[int]:
        """Sweeps of every round of tuning: each twice the one before, the last half of the draws."""
        sweeps, rounds = self.draws // 2, []
        while sweeps >= ROUNDS.first or not rounds:
            rounds.insert(0, max(sweeps, 1))
            sweeps //= 2
        return rounds

    def _replicas(self, legs: Legs, chains: int, rng: torch.Generator, progress: Progress) -> Replicas:
        """Replicas with the pilot's schedule and step sizes, all at draws of the last reference.

        So they start where the broad reference is: what is too wide narrows sooner than what is missing comes.
        """
        pilot = self.pilot(legs, chains, rng, progress)
        betas = pilot.barrier(self.temperatures)
        curve = interpolated(betas, pilot.columns, pilot.log_z_path.nan_to_num(0.0, 0.0, 0.0))
        start = legs.base.unwhiten(legs.draws(len(betas) * chains, rng))[:, -1]
        return Replicas(legs, betas, pilot.step_sizes.at(betas), curve.diff(dim=0), start, self.n_steps, rng)

    def _retune(self, replicas: Replicas, tuned: Round) -> None:
        """Move the temperatures, and what belongs to them, by the rejections of a round."""
        old = replicas.betas
        new = equal_distances(self.temperatures, old, tuned.rejections)
        steps = tuned.stones.bennett.nan_to_num(0.0, 0.0, 0.0)
        curve = torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])
        log_steps = interpolated(new, old, replicas.step_sizes.log().to(old))
        replicas.betas, replicas.centre = new, interpolated(new, old, curve).diff(dim=0)
        replicas.step_sizes = log_steps.exp().to(replicas.step_sizes)


def _leg_powers(tuned: Round) -> tuple[Tensor, Tensor]:
    """Shares of the legs in the estimate ``[legs, *batch]`` (math 6.13), and whether the base takes part ``[*batch]``.

    A base far worse than the broad reference would fill the targets with the modes that it knows: it is cut off.
    """
    rejections = tuned.rejections
    odds = (rejections / (1 - rejections).clamp_min(1e-9)).sum(0).square()
    share = 1 / (torch.maximum(odds, tuned.missed.nan_to_num(1e9)).square() + 1e-6)
    share = share / share.sum(0)
    coupled = share[0] >= ROUNDS.least_share
    share[0] = torch.where(coupled, share[0], 0.0)
    return share / share.sum(0), coupled
