"""Log evidence of a decoder as Pyro estimates it: SVI, RenyiELBO, Importance, and annealing by Pyro's HMC.

Every function takes the same :class:`PyroDecoder` and returns :class:`Estimates`, image by image, so that its numbers
stand beside ours. Pyro has no annealed importance sampling: :func:`annealed_importance` runs one on its HMC kernel, a
chain per image after another, as its MCMC does.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal

from dgm_infer import Gaussian
from dgm_infer.errors import ArgumentError, ModelError, extra
from dgm_infer.evidence.estimators import log_mean
from dgm_infer.evidence.plan import sigmoid

from ..reports.estimates import Estimates

with extra("pyro"), warnings.catch_warnings():
    # about torch.jit on this version of Python, which Pyro needs only for what is not used here
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    from pyro import distributions as dist
    from pyro.infer import SVI, Importance, RenyiELBO, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.infer.mcmc import HMC
    from pyro.infer.mcmc.util import initialize_model
    from pyro.optim import Adam  # type: ignore[attr-defined]

__all__ = [
    "PyroDecoder",
    "annealed_importance",
    "importance",
    "renyi_elbo",
    "svi_autoguide",
    "svi_encoder",
]


@dataclass(frozen=True)
class PyroDecoder:
    """``z ~ N(0, I)``, ``x ~ decoder(z)`` as a Pyro program, and a Gaussian guide of every image.

    Args:
        decoder: ``[..., Dz]`` to an Independent Bernoulli or Normal.
        images: ``[n, Dx]``.
        base: guide of every image, batch ``[n]``, such as the encoder's; what annealing starts from too.
    """

    decoder: nn.Module
    images: Tensor
    base: Gaussian

    def __post_init__(self):
        if self.images.ndim != 2 or self.base.batch_shape != self.images.shape[:1]:
            raise ArgumentError(
                f"PyroDecoder(images of shape {tuple(self.images.shape)}, base of {tuple(self.base.batch_shape)}): "
                "expected [n, Dx] and n bases"
            )
        if self.base.kind != "diagonal":
            raise ArgumentError(f"PyroDecoder(base of kind {self.base.kind!r}): must be diagonal")

    def __len__(self) -> int:
        return len(self.images)

    def take(self, i: int) -> "PyroDecoder":
        """One image."""
        which = torch.tensor([i], device=self.images.device)
        return PyroDecoder(self.decoder, self.images[which], self.base.take(which))

    def program(self) -> None:
        like = self.base.mean
        zero, one = like.new_zeros(()), like.new_ones(())
        with pyro.plate("images", len(self)):
            z = pyro.sample("z", dist.Normal(zero.expand(self.base.dim), one).to_event(1))
            pyro.sample("x", _as_pyro(self.decoder(z)), obs=self.images)

    def guide(self) -> None:
        with pyro.plate("images", len(self)):
            pyro.sample("z", dist.Normal(self.base.mean, self._sd).to_event(1))

    @cached_property
    def _sd(self) -> Tensor:
        return self.base.covariance_diagonal.sqrt()


def svi_encoder(problem: PyroDecoder, *, particles: int = 100, repeats: int = 16, seed: int = 0) -> Estimates:
    """Evidence lower bound of the guide as it is, ``Trace_ELBO(particles)``, repeated for its error."""
    elbo = Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
    return _repeated_loss("Pyro ELBO, encoder", problem, elbo, repeats, seed)


def renyi_elbo(problem: PyroDecoder, *, particles: int = 1000, repeats: int = 16, seed: int = 0) -> Estimates:
    """Importance-weighted bound of the guide, ``RenyiELBO(alpha=0, particles)``, repeated for its error."""
    elbo = RenyiELBO(alpha=0, num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
    return _repeated_loss("Pyro RenyiELBO", problem, elbo, repeats, seed)


def svi_autoguide(
    problem: PyroDecoder,
    *,
    steps: int = 1000,
    particles: int = 8,
    rate: float = 0.02,
    draws: int = 100,
    repeats: int = 16,
    seed: int = 0,
) -> Estimates:
    """Evidence lower bound of ``AutoDiagonalNormal`` fitted by SVI, all images in one plate.

    Args:
        problem: the images.
        steps: steps of Adam.
        particles: draws per step.
        rate: learning rate.
        draws: draws of the fitted guide per repeat.
        repeats: repeats of the estimate, for its error.
        seed: seed of all randomness.
    """
    elbo = Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)
    started = time.perf_counter()
    with _apart(seed):
        guide = AutoDiagonalNormal(problem.program, init_scale=0.1)
        svi = SVI(problem.program, guide, Adam({"lr": rate}), elbo)
        for _ in range(steps):
            svi.step()
        fitted = guide.get_posterior().base_dist  # type: ignore[union-attr]
        mean, sd = (part.detach().reshape(len(problem), -1) for part in (fitted.loc, fitted.scale))
        own = PyroDecoder(problem.decoder, problem.images, Gaussian(mean, sd))
        measured = Trace_ELBO(num_particles=draws, vectorize_particles=True, max_plate_nesting=1)
        values = _losses(own, measured, repeats)
    return _mean("Pyro SVI, autoguide", values, time.perf_counter() - started, gradient_evaluations=steps * particles)


def importance(problem: PyroDecoder, *, samples: int = 200, repeats: int = 4, seed: int = 0) -> Estimates:
    """``pyro.infer.Importance`` with the guide, a trace at a time: the log of a mean of weights.

    The error is that of the mean of all weights; ``repeats`` runs are pooled.
    """
    started = time.perf_counter()
    log_weights = []
    with _apart(seed), torch.no_grad():
        for i in range(len(problem)):
            one = problem.take(i)
            runs = [Importance(one.program, one.guide, num_samples=samples).run() for _ in range(repeats)]
            log_weights.append(torch.cat([torch.as_tensor(run.log_weights) for run in runs]))
    estimate = log_mean(torch.stack(log_weights, -1).double())
    return Estimates(
        "Pyro Importance", estimate.log_z, estimate.std_error, "unbiased", time.perf_counter() - started, 0
    )


def annealed_importance(
    problem: PyroDecoder,
    *,
    temperatures: int = 100,
    n_steps: int = 10,
    step_size: float = 0.2,
    chains: int = 4,
    seed: int = 0,
) -> Estimates:
    """Annealed importance sampling from the guide whose moves are ``pyro.infer.mcmc.HMC`` on Pyro's potential.

    The kernel moves v, ``z = mean + sd v`` of the guide, under ``(1 - beta) |v|^2/2 + beta phi(z)``; the schedule is
    sigmoidal. Chains run one after the other.

    Args:
        problem: the images.
        temperatures: K.
        n_steps: leapfrog steps per temperature.
        step_size: step size at all temperatures. Trajectories have a fixed length: 0.3 with 10 steps is almost half a
            period of the guide, after which a chain is at the mirror image of its start.
        chains: chains per image.
        seed: seed of all randomness.
    """
    betas = sigmoid(temperatures).tolist()
    started = time.perf_counter()
    calls, accepted = 0, 0.0
    log_weights = torch.empty(chains, len(problem), dtype=torch.float64)
    with _apart(seed), pyro.validation_enabled(False):
        for i in range(len(problem)):
            path = _AnnealedPotential(problem.take(i))
            for c in range(chains):
                log_weights[c, i] = path.anneal(betas, n_steps, step_size)
            calls, accepted = calls + path.gradients, accepted + path.acceptance / (len(problem) * chains)
    estimate = log_mean(log_weights)
    return Estimates(
        "Pyro AIS, serial HMC",
        estimate.log_z,
        estimate.std_error,
        "unbiased",
        time.perf_counter() - started,
        calls // len(problem),
        {"acceptance": accepted, "step_size": step_size, "temperatures": temperatures, "chains": chains},
    )


class _AnnealedPotential:
    """One image's potential between guide and posterior, for a kernel that asks for it at one temperature."""

    def __init__(self, one: PyroDecoder):
        self.base, self.beta = one.base, 0.0
        self.gradients, self.acceptance = 0, 0.0
        initial = {"z": one.base.mean}
        _, self.phi, _, _ = initialize_model(one.program, initial_params=initial)

    def target(self, v: Tensor) -> Tensor:
        """``phi(mean + sd v)``."""
        return self.phi({"z": self.base.unwhiten(v)})

    def __call__(self, parameters: dict[str, Tensor]) -> Tensor:
        self.gradients += 1
        v = parameters["v"]
        return (1 - self.beta) * 0.5 * v.square().sum() + self.beta * self.target(v)

    def anneal(self, betas: list[float], n_steps: int, step_size: float) -> float:
        """The log weight of a fresh chain, ``-sum (beta' - beta) (phi - psi)``."""
        parameters = {"v": torch.randn_like(self.base.mean)}
        # half a step more: the kernel rounds the number of steps down
        kernel = HMC(
            potential_fn=self,
            step_size=step_size,  # type: ignore[arg-type]
            trajectory_length=step_size * (n_steps + 0.5),
            adapt_step_size=False,
            adapt_mass_matrix=False,
        )
        kernel.initial_params = parameters
        kernel.setup(0)
        log_weight, accepted = 0.0, 0
        for beta, following in pairwise(betas):
            v = parameters["v"]
            with torch.no_grad():
                difference = self.target(v) - self.base.energy(self.base.unwhiten(v)).sum()
            log_weight -= (following - beta) * float(difference)
            self.beta = following
            # what it kept belongs to the last temperature
            kernel.clear_cache()
            parameters = kernel.sample(parameters)
            accepted += int(bool((parameters["v"] != v).any()))
        self.acceptance += accepted / (len(betas) - 1)
        return log_weight


def _repeated_loss(label: str, problem: PyroDecoder, elbo, repeats: int, seed: int) -> Estimates:
    started = time.perf_counter()
    with _apart(seed):
        values = _losses(problem, elbo, repeats)
    return _mean(label, values, time.perf_counter() - started, gradient_evaluations=0)


def _losses(problem: PyroDecoder, elbo, repeats: int) -> Tensor:
    """Bounds ``[repeats, n]``; Pyro's losses are sums over their plates, so images are evaluated one by one."""
    with torch.no_grad():
        each = [problem.take(i) for i in range(len(problem))]
        values = [[-elbo.loss(one.program, one.guide) for one in each] for _ in range(repeats)]
    return torch.tensor(values, dtype=torch.float64)


def _mean(label: str, values: Tensor, seconds: float, *, gradient_evaluations: int) -> Estimates:
    error = values.std(0) / len(values) ** 0.5
    return Estimates(label, values.mean(0), error, "lower", seconds, gradient_evaluations)


@contextmanager
def _apart(seed: int) -> Iterator[None]:
    """Random numbers and parameters of Pyro's own, which leave the caller's alone."""
    with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
        torch.manual_seed(seed)
        yield


def _as_pyro(likelihood):
    """The same distribution of Pyro's class, which its statements need."""
    base = likelihood.base_dist if isinstance(likelihood, Independent) else None
    if isinstance(base, Bernoulli):
        return dist.Bernoulli(logits=base.logits, validate_args=False).to_event(1)
    if isinstance(base, Normal):
        return dist.Normal(base.loc, base.scale, validate_args=False).to_event(1)
    raise ModelError(f"a {type(likelihood).__name__}: the Pyro baselines know Independent Bernoulli and Normal outputs")
