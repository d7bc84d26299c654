"""Boltzmann machines relaxed to densities on R^D: a Gaussian for every binary state (math 12.6, T appendix E)."""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgm_infer import Gaussian, Target
from dgm_infer.arguments import random_seed, whole_number
from dgm_infer.errors import ArgumentError, CheckpointError, EvidenceError, cause, extra
from generators.arrays import read_arrays

__all__ = [
    "BinaryMoments",
    "BoltzmannRelaxation",
    "Moments",
    "published_machines",
    "published_system",
    "random_machines",
    "random_system",
]

# Eigenvalues of W + D that count as zero.
_DROPPED = 1e-6
_LARGEST_ENUMERATION = 20


class BinaryMoments(NamedTuple):
    """Moments of ``P(s) = exp(s^T W s/2 + b^T s)/Z_B`` over ``s in {-1, 1}^{D_B}``."""

    log_norm: Tensor
    """``log Z_B``."""
    mean: Tensor
    """``E[s]``, ``[D_B]``."""
    second: Tensor
    """``E[s s^T]``, ``[D_B, D_B]``."""


class Moments(NamedTuple):
    """What is known of a relaxation."""

    log_z: Tensor
    mean: Tensor
    """``[D]``."""
    covariance: Tensor
    """``[D, D]``."""


class BoltzmannRelaxation(Target):
    """Relaxation of a Boltzmann machine, with energy ``phi(x) = |x|^2/2 - sum_i log cosh(q_i^T x + b_i)``.

    ``Q Q^T = W + D``; the diagonal matrix D minimises the largest eigenvalue of ``W + D`` among those that make it
    positive semidefinite, found as a semidefinite programme by Clarabel. The solution lies on the boundary of that
    set: the eigenvectors of the eigenvalues that it makes zero are left out of Q, so that D is less than D_B.

    Args:
        weights: W, ``[D_B, D_B]``, symmetric with a diagonal of zeros.
        biases: b, ``[D_B]``.

    Attributes:
        diagonal: diagonal of D, ``[D_B]``, float64 like all of these.
        Q: ``[D_B, D]``.

    Raises:
        ArgumentError: shapes or symmetry are wrong.
        EvidenceError: the semidefinite programme was not solved.
    """

    def __init__(self, weights: Tensor, biases: Tensor):
        weights, biases = (torch.as_tensor(part, dtype=torch.float64) for part in (weights, biases))
        if weights.shape != (*biases.shape, *biases.shape) or biases.ndim != 1:
            raise ArgumentError(
                f"BoltzmannRelaxation(weights of shape {tuple(weights.shape)}, biases of {tuple(biases.shape)}): "
                "expected [D_B, D_B] and [D_B]"
            )
        if not torch.allclose(weights, weights.mT, atol=1e-10) or weights.diagonal().abs().max() > 1e-10:
            raise ArgumentError("BoltzmannRelaxation(weights): must be symmetric with a diagonal of zeros")
        self.weights, self.biases = weights, biases
        self.diagonal = _least_diagonal(weights)
        values, vectors = torch.linalg.eigh(weights + torch.diag(self.diagonal))
        kept = values > _DROPPED
        if not kept.any():
            raise ArgumentError("BoltzmannRelaxation(weights): are all zero, which leaves nothing to relax")
        self.Q = vectors[:, kept] * values[kept].sqrt()
        super().__init__(None, int(kept.sum()))

    @property
    def units(self) -> int:
        """D_B."""
        return len(self.biases)

    def energy(self, x):
        return self._of_fields(x, self._fields(x).abs())[0]

    def energy_and_gradient(self, x):
        # by hand, one exponential for both: this is all that the samplers compute
        fields = self._fields(x.detach())
        energy, grown = self._of_fields(x, fields.abs())
        # |tanh| = (1 - e)/(1 + e)
        tanh = (2 / grown - 1).copysign(fields)
        return energy.detach(), (x - tanh @ self.Q.to(x)).detach()

    def _of_fields(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """With ``log cosh a = a + log(1 + e) - log 2``, ``e = exp(-2 a)``: the energy, and ``1 + e``."""
        grown = (-2 * a).exp() + 1
        # one logarithm of all units; a product of so many numbers up to 2 is finite, also in float32
        logs = grown.prod(-1).log() if self.units <= 100 else grown.log().sum(-1)
        return 0.5 * x.square().sum(-1) - a.sum(-1) - logs + self.units * math.log(2), grown

    def _fields(self, x: Tensor) -> Tensor:
        """``Q x + b``, ``[..., D_B]``."""
        return x @ self.Q.mT.to(x) + self.biases.to(x)

    # ------------------------------------------------------------------------------------------------- the truth

    @cached_property
    def binary(self) -> BinaryMoments:
        """The binary model's moments by enumeration.

        Raises:
            ArgumentError: more than 20 units.
        """
        if self.units > _LARGEST_ENUMERATION:
            raise ArgumentError(
                f"BoltzmannRelaxation.exact() sums over 2**{self.units} states: {_LARGEST_ENUMERATION} units at most; "
                "exact(binary) takes moments found elsewhere"
            )
        bits = torch.arange(2**self.units).unsqueeze(-1).bitwise_right_shift(torch.arange(self.units)) & 1
        s = 2.0 * bits.double() - 1
        log_p = 0.5 * ((s @ self.weights) * s).sum(-1) + s @ self.biases
        log_norm = log_p.logsumexp(0)
        p = (log_p - log_norm).exp().unsqueeze(-1)
        return BinaryMoments(log_norm, (p * s).sum(0), (p * s).mT @ s)

    def exact(self, binary: BinaryMoments | None = None) -> Moments:
        """The truth, by way of the binary model.

        ``log Z = log Z_B + tr(D)/2 + D/2 log 2 pi - D_B log 2``, ``E[x] = Q^T E[s]``,
        ``E[x x^T] = Q^T E[s s^T] Q + I``.

        Args:
            binary: moments of the binary model; None to enumerate it, up to 20 units.
        """
        binary = self.binary if binary is None else binary
        mean = self.Q.mT @ binary.mean
        second = self.Q.mT @ binary.second @ self.Q + torch.eye(self.dim, dtype=torch.float64)
        return Moments(self._log_z(binary.log_norm), mean, second - torch.outer(mean, mean))

    def _log_z(self, log_norm: Tensor) -> Tensor:
        constant = 0.5 * self.diagonal.sum() + 0.5 * self.dim * math.log(2 * math.pi) - self.units * math.log(2)
        return log_norm + constant

    # -------------------------------------------------------------------------------------------- local fits

    def mean_field(self, starts: int = 200, *, seed: int = 0, sweeps: int = 1000) -> Gaussian:
        """A Gaussian moment-matched to the mixture of the binary model's mean-field solutions (T 5.5, T 5.6.1).

        Solutions ``m = tanh(W m + b)``, found unit by unit from random starts, have the bounds
        ``l = m^T W m/2 + b^T m + sum_i H(m_i)`` on ``log Z_B``; relaxed, one is a mixture over s with mean ``Q^T m``
        and covariance ``Q^T diag(1 - m^2) Q + I``.

        Args:
            starts: random ones, of which duplicates among the solutions are removed.
            seed: seed of the starts.
            sweeps: over all units, at most.

        Returns:
            with the bound on log Z of the mixture as ``log_zeta``.
        """
        starts = whole_number("mean_field", "starts", starts)
        rng = torch.Generator().manual_seed(random_seed("mean_field", seed))
        m = 2 * torch.rand(starts, self.units, generator=rng, dtype=torch.float64) - 1
        for _ in range(sweeps):
            before = m.clone()
            for i in range(self.units):
                m[:, i] = (m @ self.weights[i] + self.biases[i]).tanh()
            if (m - before).abs().max() < 1e-10:
                break
        up, down = (1 + m) / 2, (1 - m) / 2
        entropy = -(torch.xlogy(up, up) + torch.xlogy(down, down)).sum(-1)
        bounds = self._log_z(0.5 * ((m @ self.weights) * m).sum(-1) + m @ self.biases + entropy)
        means = m @ self.Q
        covariances = torch.einsum("id,ni,ie->nde", self.Q, 1 - m.square(), self.Q)
        covariances = covariances + torch.eye(self.dim, dtype=torch.float64)
        return Gaussian.of_mixture(means, covariances, bounds)


def random_system(units: int, seed: int, *, scale: float = 6.0, steepness: float = 2.0, bias: float = 0.1) -> tuple:
    """Weights and biases of a frustrated system (T 5.6.1).

    ``V = R diag(scale tanh(steepness n)) R^T`` for a Haar-distributed rotation R and normal n; W is V without its
    diagonal, ``b ~ N(0, bias^2)``.

    Returns:
        ``[D_B, D_B]`` and ``[D_B]``, float64.
    """
    from scipy.stats import ortho_group

    units = whole_number("random_system", "units", units, 2)
    rng = np.random.RandomState(seed)
    rotation = ortho_group.rvs(units, random_state=rng)
    weights = (rotation * (scale * np.tanh(steepness * rng.normal(size=units)))) @ rotation.T
    weights = (weights + weights.T) / 2
    np.fill_diagonal(weights, 0)
    return torch.from_numpy(weights), torch.from_numpy(bias * rng.normal(size=units))


def published_system(folder: Path, index: int) -> tuple[BoltzmannRelaxation, Moments]:
    """One of the published systems of 30 units, and its truth from the enumerated binary model.

    Args:
        folder: with ``system_0.npz`` and so on, in itself or in its subfolder ``boltzmann``.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    inner = folder / "boltzmann"
    path = (inner if inner.is_dir() else folder) / f"system_{index}.npz"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: the reference data has it in its folder boltzmann")
    try:
        arrays = read_arrays(path)
        relaxation = BoltzmannRelaxation(arrays["weights"], arrays["biases"])
        binary = BinaryMoments(*(arrays[f"binary_{name}"] for name in ("log_norm", "mean", "second_moment")))
    except (LookupError, ValueError, OSError, EOFError) as error:
        raise CheckpointError(f"{path} holds no Boltzmann machine: {cause(error)}") from error
    return relaxation, relaxation.exact(binary)


def _least_diagonal(weights: Tensor) -> Tensor:
    """``argmin_D lambda_max(W + D)`` subject to ``W + D`` positive semidefinite, ``[D_B]``."""
    with extra("experiments"):
        import clarabel  # noqa: F401 (cvxpy's solver, which it loads when asked for)
        import cvxpy

    n = len(weights)
    diagonal, largest = cvxpy.Variable(n), cvxpy.Variable()
    matrix = cvxpy.diag(diagonal) + weights.numpy()
    programme = cvxpy.Problem(cvxpy.Minimize(largest), [matrix >> 0, largest * np.eye(n) - matrix >> 0])
    # looser tolerances leave eigenvalues above what is dropped, each worth 0.92 in log Z
    programme.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    if programme.status != cvxpy.OPTIMAL or diagonal.value is None:
        raise EvidenceError(f"the semidefinite programme of the relaxation ended {programme.status}")
    return torch.from_numpy(diagonal.value)


def random_machines(n: int, units: int, seed: int) -> Iterator[tuple[BoltzmannRelaxation, Moments]]:
    """Relaxations of :func:`random_system` of n successive seeds, with their truth."""
    for i in range(seed, seed + n):
        machine = BoltzmannRelaxation(*random_system(units, i))
        yield machine, machine.exact()


def published_machines(folder: Path) -> Iterator[tuple[BoltzmannRelaxation, Moments]]:
    """The five of :func:`published_system`."""
    return (published_system(folder, i) for i in range(5))
