"""Replicas of parallel tempering: swaps, trips, stepping stones, sweeps and rounds (math 6.10, math 6.12)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..estimators import Estimate, drift, exceeded, log_ratios
from ..method import Outcome
from ..path import PathPoint
from ..plan import TUNING
from .legs import Legs

# Probability, over all problems, that a base that is cut off says so much more than the estimate by chance.
_CHANCE = 0.05


def swap_log_ratios(betas: Tensor, differences: Tensor) -> Tensor:
    """Log of ``pi_k(x') pi_{k+1}(x)/(pi_k(x) pi_{k+1}(x'))``, ``[K, chains, *batch]``.

    It is ``(beta_{k+1} - beta_k) (d(x') - d(x))`` for x at ``beta_k``, x' at ``beta_{k+1}`` and ``d = phi - psi``;
    ``-inf`` where both states have zero density.

    Args:
        betas: ``[K + 1, *batch]``.
        differences: ``d``, ``[K + 1, chains, *batch]``.
    """
    return ((betas[1:] - betas[:-1]).unsqueeze(1) * differences.diff(dim=0)).nan_to_num(
        -torch.inf, posinf=torch.inf, neginf=-torch.inf
    )


def swaps(probabilities: Tensor, parity: int, rng: torch.Generator) -> Tensor:
    """Which row every temperature takes its new state from, ``[K + 1, chains, *batch]``.

    Only the pairs (k, k + 1) with k of this parity may swap: even and odd pairs in turn, never at random, which lets
    replicas travel without turning back (Syed et al. 2021).

    Args:
        probabilities: of acceptance, ``[K, chains, *batch]``.
    """
    n = len(probabilities)
    column = (-1, *[1] * (probabilities.ndim - 1))
    uniform = torch.rand(probabilities.shape, generator=rng, dtype=probabilities.dtype, device=probabilities.device)
    rungs = torch.arange(n + 1, device=probabilities.device)
    accepted = ((uniform < probabilities) & (rungs[:n] % 2 == parity).reshape(column)).long()
    none = torch.zeros_like(accepted[:1])
    return rungs.reshape(column) + torch.cat([accepted, none]) - torch.cat([none, accepted])


def exchanged(values: Tensor, source: Tensor) -> Tensor:
    """Values ``[K + 1, chains, *batch]``, or with one more dimension, rearranged as :func:`swaps` says."""
    if values.ndim > source.ndim:
        source = source.unsqueeze(-1).expand_as(values)
    return values.gather(0, source)


class Trips:
    """Counts of replicas that reach the target from a reference, and come back.

    Attributes:
        restarts: arrivals at the target since the last visit to a reference, ``[chains, legs, *batch]``.
        round_trips: returns to a reference after that.
    """

    def __init__(self, like: Tensor):
        # 1 after a visit to a reference, 2 after the target was reached from there, else 0
        self._past = torch.zeros(like.shape, dtype=torch.int8, device=like.device)
        self.restarts = torch.zeros(like.shape[1:], dtype=torch.int64, device=like.device)
        self.round_trips = torch.zeros_like(self.restarts)

    def follow(self, source: Tensor, crossed: Tensor | None) -> None:
        """Move the replicas' marks with their states; ``crossed [*batch]``, if any, is where the targets did."""
        past = exchanged(self._past, source)
        if crossed is not None:
            past[-1] = torch.where(crossed, past[-1].flip(1), past[-1])
        # not in place: who counts a part of a run keeps the earlier counts
        self.restarts = self.restarts + (past[-1] == 1)
        past[-1] = torch.where(past[-1] == 1, 2, past[-1])
        self.round_trips = self.round_trips + (past[0] == 2)
        past[0] = 1
        self._past = past


class SteppingStones:
    """Sums, per chain and pair of neighbours, from which ``log Z(beta_{k+1}) - log Z(beta_k)`` is estimated.

    With ``f = -(beta_{k+1} - beta_k) d`` at a state of ``beta_k``, ``r = (beta_{k+1} - beta_k) d`` at one of
    ``beta_{k+1}`` and ``d = phi - psi``: forward ``log mean exp f``, backward ``-log mean exp r``, and Bennett's
    ``c + log sum sigmoid(f - c) - log sum sigmoid(r + c)``, right for any c and best near the answer. c comes from
    earlier states, so that sums are all that is stored.

    Args:
        betas: ``[K + 1, *batch]``.
        centre: c, ``[K, *batch]``.
        chains: independent chains.
    """

    def __init__(self, betas: Tensor, centre: Tensor, chains: int):
        self.widths, self.centre = betas.diff(dim=0).unsqueeze(1), centre.unsqueeze(1)
        shape = (len(centre), chains, *centre.shape[1:])
        self._halves = torch.full((2, 4, *shape), -torch.inf, dtype=torch.float64, device=betas.device)
        self.count = 0

    def add(self, differences: Tensor, half: int = 0) -> None:
        """Add states with these ``d``, ``[K + 1, chains, *batch]``, in the first half of a run or the second (1)."""
        # an infinite difference over no distance is none
        forward = torch.where(self.widths > 0, -self.widths * differences[:-1], 0.0)
        reverse = torch.where(self.widths > 0, self.widths * differences[1:], 0.0)
        bennett = logsigmoid(forward - self.centre), logsigmoid(reverse + self.centre)
        new = torch.stack([forward, reverse, *bennett])
        self._halves[half] = torch.logaddexp(self._halves[half], new)
        self.count += 1

    @property
    def _sums(self) -> Tensor:
        return self._halves.logsumexp(0)

    @property
    def bennett(self) -> Tensor:
        """Bennett's estimate for every pair from all chains, ``[K, *batch]``."""
        _, _, up, down = self._sums.logsumexp(2)
        return self.centre.squeeze(1) + up - down

    def estimates(self, powers: Tensor) -> dict[str, Estimate]:
        """Estimates ``forward``, ``backward`` and ``bennett`` of log Z, with jackknife errors over the chains.

        Args:
            powers: shares of the legs in the estimate, ``[legs, *batch]`` with sum 1; the sums are of
                ``[K, chains, legs, *batch]``.
        """
        forward, reverse, up, down = self._sums
        log_n = torch.full_like(forward, 0.0) + torch.tensor(float(self.count)).log()
        pairs = {"forward": (forward, log_n), "backward": (log_n, reverse), "bennett": (up + self.centre, down)}
        return {name: log_ratios(_flat(up), _flat(down), self._shares(powers)) for name, (up, down) in pairs.items()}

    def drift(self, powers: Tensor) -> Tensor:
        """By how much Bennett's estimate is larger in the second half, 0 where that can be chance, ``[*batch]``."""
        up, down = self._halves[:, 2] + self.centre, self._halves[:, 3]
        return drift(torch.stack([*map(_flat, up)]), torch.stack([*map(_flat, down)]), self._shares(powers))

    def leg_shift(self, powers: Tensor) -> Tensor:
        """By how much a base that is cut off finds log Z larger, 0 where that can be chance, ``[*batch]``.

        A leg misses mass rather than invent it, so that only the larger of two that differ tells something.
        """
        chains, legs = self._halves.shape[2], len(powers)
        if chains == 1 or legs == 1:
            return torch.zeros_like(powers[0])
        _, _, up, down = self._sums
        up = up + self.centre
        # the broad leg turned upside down
        above = torch.cat([up[:, :, 0], down[:, :, 1]]).movedim(1, 0)
        more, error, _ = log_ratios(above, torch.cat([down[:, :, 0], up[:, :, 1]]).movedim(1, 0))
        beyond = float(exceeded(_CHANCE / max(more.numel(), 1), chains - 1)) * error
        return torch.where((powers[0] == 0) & more.isfinite() & (more > beyond), more, 0.0)

    def _shares(self, powers: Tensor) -> Tensor:
        return powers.expand(self._halves.shape[2], *powers.shape).flatten(0, 1)


def _flat(sums: Tensor) -> Tensor:
    """``[K, chains, legs, *batch]`` as ``[chains, K * legs, *batch]``."""
    return sums.movedim(1, 0).flatten(1, 2)


class Sweep(NamedTuple):
    """What one sweep showed, before its swaps; legs are the first batch dimension."""

    differences: Tensor
    """``phi - psi`` of all replicas, ``[K + 1, chains, legs, *batch]``, float64."""
    swap_probabilities: Tensor
    """``[K, chains, legs, *batch]``."""
    acceptance: Tensor
    """Acceptance of the moves above the reference, ``[K, chains, legs, *batch]``."""
    targets: PathPoint
    """States at the target, ``[chains, legs, *batch]``."""


class Replicas:
    """States at all temperatures of all legs and chains, moved together.

    Args:
        legs: the paths.
        betas: ``[K + 1, legs, *batch]``, float64.
        step_sizes: ``[K + 1, legs, *batch]``.
        centre: guesses of ``log Z(beta_{k+1}) - log Z(beta_k)``, ``[K, legs, *batch]``.
        start: first positions of the replicas of one leg, ``[(K + 1) chains, *batch, D]``, which serve all legs.
        n_steps: leapfrog steps per sweep.
        rng: source of all randomness.
    """

    def __init__(
        self,
        legs: Legs,
        betas: Tensor,
        step_sizes: Tensor,
        centre: Tensor,
        start: Tensor,
        n_steps: int,
        rng: torch.Generator,
    ):
        self.legs, self.betas, self.step_sizes, self.centre = legs, betas, step_sizes, centre
        chains = len(start) // len(betas)
        self.chains, self.n_steps, self.rng = chains, n_steps, rng
        self.point = legs.at(legs.coordinates(start).unflatten(0, (len(betas), chains)))
        self.trips = Trips(self.point.energy)
        # whether the legs' targets change places, per problem
        self.coupled = torch.ones(betas.shape[2:], dtype=torch.bool, device=betas.device)

    def refit(self, draws: Tensor) -> None:
        """Another base, as :meth:`Legs.refit`, with the replicas where they are."""
        x = self.legs.base.unwhiten(self.point.v)
        self.legs.refit(draws)
        self.point = self.legs.at(self.legs.base.whiten(x))

    def sweep(self, target_acceptance: float | None) -> Sweep:
        """A move of every replica above the references, then swaps of even pairs and of odd ones.

        Args:
            target_acceptance: what the step sizes are adapted to; None leaves them.
        """
        upper = PathPoint(*(part[1:] for part in self.point))
        move = self.legs.move(upper, self.betas[1:, None], self.step_sizes[1:, None], self.n_steps, self.rng)
        point = PathPoint(*(torch.cat([old[:1], new]) for old, new in zip(self.point, move.point, strict=True)))
        if target_acceptance is not None:
            error = move.acceptance.mean(1) - target_acceptance
            self.step_sizes[1:] *= (TUNING.gain * error).exp()
        differences = self.legs.difference(point)
        probabilities = swap_log_ratios(self.betas, differences).clamp_max(0).exp()
        source = swaps(probabilities, 0, self.rng)
        # a replica goes two temperatures a sweep: swaps cost no gradient
        after = swap_log_ratios(self.betas, exchanged(differences, source)).clamp_max(0).exp()
        source = exchanged(source, swaps(after, 1, self.rng))
        targets = PathPoint(*(part[-1] for part in point))
        crosses = self.legs.count == 2
        self.point = self._renewed(PathPoint(*(exchanged(part, source) for part in point)), crosses)
        self.trips.follow(source, self.coupled if crosses else None)
        return Sweep(differences, probabilities, move.acceptance, targets)

    def _renewed(self, point: PathPoint, crosses: bool) -> PathPoint:
        """The references drawn again and, if the targets change places, each evaluated on the other's leg."""
        v = [self.legs.draws(self.chains, self.rng)]
        if crosses:
            v.append(self.legs.crossed(point.v[-1]))
        fresh = self.legs.at(torch.stack(v))
        # exchanged() made copies
        for old, new in zip(point, fresh, strict=True):
            old[0] = new[0]
        if crosses:
            there, here = (PathPoint(*(part[-1] for part in whole)) for whole in (fresh, point))
            for old, new in zip(point, there.where(self.coupled.expand(here.energy.shape), here), strict=True):
                old[-1] = new
        return point


class Round:
    """Sums over a round of sweeps at fixed temperatures, and every so many of its states at the target.

    Args:
        replicas: what is swept.
        keep: draws of x per chain and leg.
        thin: sweeps per draw.
        tunes: whether to sum up how far the references are from the target.
    """

    def __init__(self, replicas: Replicas, keep: int = 0, thin: int = 1, *, tunes: bool = False):
        legs, betas, chains = replicas.legs, replicas.betas, replicas.chains
        self.legs, self.betas, self.chains, self.thin, self.sweeps = legs, betas, chains, thin, 0
        self.stones = SteppingStones(betas, replicas.centre, chains)
        self._trips, self._before = replicas.trips, (replicas.trips.restarts, replicas.trips.round_trips)
        self._swaps = torch.zeros_like(betas[1:])
        self._acceptance = torch.zeros_like(betas[1:])
        self._tunes, self._at_target = tunes, torch.zeros_like(betas[0])
        self._draws = legs.base.mean.new_empty(chains, keep, *legs.base.mean.shape)
        self._half = keep * thin / 2
        self.kept = 0

    def add(self, sweep: Sweep) -> None:
        self.stones.add(sweep.differences, int(self._half > 0 and self.sweeps >= self._half))
        self._swaps += sweep.swap_probabilities.mean(1)
        self._acceptance += sweep.acceptance.mean(1)
        if self._tunes:
            self._at_target += self.legs.at_last(sweep.targets).mean(0)
        self.sweeps += 1
        if self.sweeps % self.thin == 0 and self.kept < self._draws.shape[1]:
            self._draws[:, self.kept] = self.legs.base.unwhiten(sweep.targets.v)
            self.kept += 1

    @property
    def draws(self) -> Tensor:
        """States at the target that were kept, those of both legs in turn: ``[chains, draws, *batch, D]``."""
        return self._draws[:, : self.kept].flatten(1, 2)

    @property
    def rejections(self) -> Tensor:
        """Mean rejection probability of every pair, ``[K, legs, *batch]``."""
        return 1 - self._swaps / self.sweeps

    @property
    def missed(self) -> Tensor:
        """``KL(target | reference) = -E[phi - psi] - log Z`` of every leg: large for one that misses modes.

        Targets and log Z are those of the last leg, which is the broad one.
        """
        return (-self._at_target / self.sweeps - self.stones.bennett.sum(0)[-1]).clamp_min(0)

    def outcome(self, powers: Tensor, pilot_evaluations: int, interrupted: bool) -> Outcome:
        """Estimates and diagnostics; ``powers [legs, *batch]`` are the shares of the legs."""
        estimates = self.stones.estimates(powers)
        draws = self.draws
        rejections = self.rejections
        restarts, round_trips = (
            (now - before).sum(1)
            for now, before in zip((self._trips.restarts, self._trips.round_trips), self._before, strict=True)
        )
        diagnostics = {
            "acceptance": (self._acceptance / self.sweeps).mean((0, 1)),
            "barrier": rejections.sum(0),
            "round_trips": round_trips.sum(0),
            "round_trip_rate": round_trips.double().mean(0) / self.sweeps,
            "restarts": restarts.double().mean(0),
            "swap_acceptance": (1 - rejections).mean((0, 1)),
            "least_swap_acceptance": (1 - rejections).amin((0, 1)),
            "log_z_forward": estimates["forward"].log_z,
            "log_z_backward": estimates["backward"].log_z,
            "leg_log_z": self.stones.bennett.sum(0),
            "leg_shares": powers,
            "drift": self.stones.drift(powers),
            "leg_shift": self.stones.leg_shift(powers),
            "betas": self.betas,
        }
        log_weights = torch.zeros(draws.shape[:-1], dtype=torch.float64, device=draws.device)
        return Outcome(estimates["bennett"], draws, log_weights, diagnostics, pilot_evaluations, interrupted)
