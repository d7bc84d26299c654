"""Pyro's automatic guides as normalised bases, which evidence methods start from."""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..arguments import allocatable, positive, random_seed, whole_number
from ..errors import ArgumentError, EvidenceError, cause
from ..probe import energy_doubt, energy_fault, probe_points
from ..progress import foretold
from ..references import Gaussian
from ..references.density import origin
from ..references.variational import check_divergence, lower_bound
from ..sampling.predictive import importing_pyro
from ..target import Target, as_target
from .pyro import PyroTarget

with importing_pyro():
    import pyro
    import pyro.distributions
    import pyro.optim
    from pyro import poutine
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoContinuous, AutoGuide, AutoLaplaceApproximation, AutoNormal

_CALL = "base_from_guide"
_GAUSSIAN = (
    "AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoNormal or AutoLaplaceApproximation"
)
# Dimensions left to the plates of a program that the energy runs: Pyro numbers those of all plates that are open.
_DEPTH = 16
# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions


def base_from_guide(
    target: Target,
    guide: Callable[[Callable[..., Any]], AutoGuide] | AutoGuide,
    *,
    steps: int = 1000,
    samples: int = 8,
    rate: float = 0.05,
    seed: int | None = 0,
) -> Gaussian:
    """The Gaussian of one of Pyro's automatic guides, in the target's coordinates: a base for ``log_evidence``.

    A class is fitted here, by Pyro's SVI on ``exp(-energy)``: ``q`` that maximises ``E_q[-energy(x) - log q(x)]``
    (Kucukelbir et al. 2017), or for ``AutoLaplaceApproximation`` the mode and the inverse Hessian there. A guide that
    was fitted to the program itself is taken over, its sites in the order of the target's.

    Args:
        target: what :func:`dgm_infer.target_from_pyro` returns; to fit a class, any target without a batch.
        guide: a class such as ``AutoMultivariateNormal``, or a function of the program,
            ``lambda program: AutoLowRankMultivariateNormal(program, rank=2)``; or a fitted guide of the program.
        steps: steps of the optimiser, Adam with a rate that falls to a hundredth.
        samples: draws per step.
        rate: initial learning rate.
        seed: seed of all randomness; None draws one.

    Returns:
        a Gaussian ``[D]`` with ``elbo``, a fresh estimate of its evidence lower bound from 1000 draws.

    Raises:
        ArgumentError: an argument is outside its range; the guide is not Gaussian on R^D, was not fitted, or has other
            sites or coordinates than the target.
        EvidenceError: the energy is faulty, or the fit diverged.
    """
    steps, samples = whole_number(_CALL, "steps", steps), whole_number(_CALL, "samples", samples)
    rate, seed = positive(_CALL, "rate", rate), random_seed(_CALL, seed)
    target = as_target(target)
    if target.batch_shape:
        raise ArgumentError(
            f"{_CALL}(target of batch shape {tuple(target.batch_shape)}): a guide fits one problem, use Gaussian.fit"
        )
    if isinstance(guide, AutoGuide):
        base = _taken_over(target, guide)
    elif callable(guide):
        base = _fitted(target, guide, steps, samples, rate, seed)
    else:
        raise ArgumentError(f"{_CALL}(guide={type(guide).__name__}): expected a guide of Pyro, such as {_GAUSSIAN}")
    rng = torch.Generator(base.mean.device).manual_seed(seed)
    elbo = lower_bound(target, base, rng)
    check_divergence(elbo.isnan(), rate)
    return Gaussian._of(base.mean, base.scale, elbo=elbo)


def _fitted(target: Target, make: Callable[..., Any], steps: int, samples: int, rate: float, seed: int) -> Gaussian:
    zero = origin(target)
    points = torch.randn(probe_points(target), target.dim, generator=torch.Generator().manual_seed(0)).to(zero)
    allocatable(_CALL, "samples", samples, 3 * samples * zero.numel(), "fewer draws", like=zero)
    if fault := energy_fault(target, points) or energy_doubt(target, points):
        raise EvidenceError(f"{_CALL}(): {fault}")

    def program() -> None:
        # all of the density is in the energy, which is one of x as it is: no bijection, no order of sites
        with poutine.mask(mask=False):
            x = pyro.sample("x", dist.Normal(zero, 1.0).to_event(1))
        # the energy may run a program of its own, whose statements are not this one's
        with poutine.block():
            energy = target.energy(x.reshape(-1, target.dim))
        pyro.factor("log_density", -energy.reshape(x.shape[:-1]))

    with _own_state(zero.device, seed):
        try:
            guide = make(program)
        except Exception as error:
            raise ArgumentError(f"{_CALL}(guide={_name(make)}): it fails for this target, {cause(error)}") from error
        if not isinstance(guide, AutoGuide):
            raise ArgumentError(f"{_CALL}(guide={_name(make)}): it makes a {type(guide).__name__}, not a guide of Pyro")
        if not isinstance(guide, AutoLaplaceApproximation):
            # a guide that is not Gaussian is refused before it is fitted
            guide()
            _moments(guide)
        adam = pyro.optim.ClippedAdam({"lr": rate, "betas": (0.9, 0.99), "lrd": 0.01 ** (1 / steps)})
        elbo = Trace_ELBO(num_particles=samples, vectorize_particles=True, max_plate_nesting=_DEPTH)
        svi = SVI(program, guide, adam, elbo)
        losses = torch.tensor(
            [svi.step() for _ in foretold(steps, f"fitting a guide, {steps} steps")], dtype=torch.float64
        )
        if not losses[-1].isfinite():
            # an energy that is NaN has its own message
            lower_bound(target, Gaussian(zero, 1.0), torch.Generator(zero.device).manual_seed(seed))
        check_divergence(~losses[-1].isfinite(), rate)
        if isinstance(guide, AutoLaplaceApproximation):
            guide = _curved(guide, rate)
        return _gaussian(*_moments(guide), rate)


def _taken_over(target: Target, guide: AutoGuide) -> Gaussian:
    """The Gaussian of a guide that was fitted to the target's program."""
    name = type(guide).__name__
    if not isinstance(target, PyroTarget):
        raise ArgumentError(
            f"{_CALL}(guide={name}): a fitted guide needs what target_from_pyro returns, or give its class to fit it"
        )
    if guide.prototype_trace is None:
        raise ArgumentError(f"{_CALL}(guide={name}): it has not been fitted, give the class to fit it here")
    if isinstance(guide, AutoLaplaceApproximation):
        raise ArgumentError(f"{_CALL}(guide={name}): give guide.laplace_approximation(), or the class to fit it here")
    mean, spread = _moments(guide)
    where, start = {}, 0
    bijections = {}
    nodes: Any = guide.prototype_trace.iter_stochastic_nodes()
    for key, site in nodes:
        bijections[key] = torch.distributions.biject_to(site["fn"].support)
        size = bijections[key].inv(site["value"]).numel()
        where[key], start = range(start, start + size), start + size
    sizes = {key: site.stop - site.start for key, site in target.sites.items()}
    if {key: len(place) for key, place in where.items()} != sizes:
        raise ArgumentError(
            f"{_CALL}(guide={name}): its sites {_listed({k: len(p) for k, p in where.items()})} are not the "
            f"target's {_listed(sizes)}: fit both with the same arguments and data"
        )
    order = torch.tensor([i for key in target.sites for i in where[key]], device=mean.device)
    base = _gaussian(mean[order], {kind: _reordered(kind, value, order) for kind, value in spread.items()})
    base = base.to(target.device, target.dtype)
    _check_coordinates(target, base, bijections, name)
    return base


def _check_coordinates(target: PyroTarget, base: Gaussian, bijections: Mapping[str, Any], name: str) -> None:
    """Raise :class:`ArgumentError` if the guide gives the variables other values at a point than the target."""
    x = base.sample((4,), torch.Generator(base.mean.device).manual_seed(0))
    for row in x:
        values = target.latents(row)
        for key, site in target.sites.items():
            by_guide = bijections[key](row[site.start : site.stop].reshape(site.shape))
            if not torch.allclose(by_guide, values[key], rtol=1e-4, atol=1e-5, equal_nan=True):
                raise ArgumentError(
                    f"{_CALL}(guide={name}): its bijection of {key!r} is not the target's, as where a "
                    "support depends on other variables: give the class, to fit it in the target's coordinates"
                )


def _moments(guide: AutoGuide) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean ``[D]`` and scale of a guide, as :class:`Gaussian` takes them."""
    if isinstance(guide, AutoNormal):
        assert guide.prototype_trace is not None
        parts = [guide._get_loc_and_scale(key) for key, _ in guide.prototype_trace.iter_stochastic_nodes()]
        mean, sd = (torch.cat([part[i].detach().reshape(-1) for part in parts]) for i in range(2))
        return mean, {"sd": sd}
    posterior: Any = guide.get_posterior() if isinstance(guide, AutoContinuous) else None
    if isinstance(posterior, torch.distributions.Independent):
        posterior = posterior.base_dist
    match posterior:
        case torch.distributions.Normal():
            return posterior.loc.detach(), {"sd": posterior.scale.detach()}
        case torch.distributions.MultivariateNormal():
            return posterior.loc.detach(), {"cholesky": posterior.scale_tril.detach()}
        case torch.distributions.LowRankMultivariateNormal():
            sd = posterior.cov_diag.detach().sqrt()
            return posterior.loc.detach(), {"sd": sd, "factor": posterior.cov_factor.detach()}
    raise ArgumentError(f"{_CALL}(guide={type(guide).__name__}): it is not Gaussian on R^D, take {_GAUSSIAN}")


def _gaussian(mean: Tensor, spread: Mapping[str, Tensor], rate: float = math.nan) -> Gaussian:
    finite = mean.isfinite().all() & torch.stack([value.isfinite().all() for value in spread.values()]).all()
    check_divergence(~finite, rate)
    return Gaussian(mean, **spread)


def _reordered(kind: str, value: Tensor, order: Tensor) -> Tensor:
    if kind != "cholesky":
        return value[order]
    if torch.equal(order, torch.arange(len(order), device=order.device)):
        return value
    rows = value[order].double()
    return torch.linalg.cholesky(rows @ rows.mT).to(value)


def _curved(guide: AutoLaplaceApproximation, rate: float) -> AutoGuide:
    try:
        return guide.laplace_approximation()
    except RuntimeError as error:
        raise EvidenceError(
            f"{_CALL}(guide=AutoLaplaceApproximation): the Hessian at its mode is not positive definite; use more "
            f"steps, a rate other than {rate:g}, or another guide"
        ) from error


@contextmanager
def _own_state(device: torch.device, seed: int):
    """Pyro's parameters and torch's random numbers of the caller stay as they are."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), pyro.get_param_store().scope(), pyro.validation_enabled(False):
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="pyro")
            # Pyro gives this one the path of its file for a module; divergence is an error here
            warnings.filterwarnings("ignore", message="Encountered (NaN|inf)", category=UserWarning)
            yield


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)


def _listed(sizes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in sizes.items()) + "}"
