"""``Flow``: a normalizing flow of Zuko as a base, trained on draws or by the bound (math 11.11)."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ..arguments import allocatable, indices, instance, positive, random_seed, whole_number, within
from ..errors import ArgumentError, EvidenceError, extra
from ..linear_maps import TriangularMap, factorised
from ..probe import energy_fault, probe_points
from ..target import as_target
from .density import Whitened, check_weighted, given_log_zeta, origin, weighted_moments
from .gaussian import Gaussian
from .variational import adam


@dataclass(frozen=True)
class FlowSettings:
    """How flows are trained and evaluated."""

    moments: int = 2**16
    """Draws that a flow's own moments are taken from: to a 250th of a standard deviation."""
    rows: int = 2**15
    """Rows that are evaluated at once."""
    held_out: float = 0.1
    """Share of the draws that chooses the step of training that is kept."""
    look: int = 25
    """Steps between two looks at these."""
    first: float = 0.01
    """Factor of the last weights of every layer at first: a flow starts as its Gaussian."""
    widen: float = 2.0
    """Factor of the sds of a start by the bound, which is too narrow."""


FLOW = FlowSettings()


class Flow(Whitened):
    """A normalizing flow per problem: ``x = m + L T(z)``, z standard normal, T invertible and learned (math 11.11).

    T is a neural spline flow of coupling layers (Durkan et al. 2019, arXiv:1906.04032) by Zuko, the extra ``flows``,
    whose density and draws are both exact in one pass. ``N(m, L L^T)`` is the Gaussian that it was trained from.
    Whitened coordinates are those of the flow's own moments, estimated from its draws. Problems have networks of their
    own, which are evaluated in turn: it is meant for single problems, or a few. A base is frozen.

    Made by :meth:`from_draws` or :meth:`fit`.

    Attributes:
        networks: the flows in the coordinates of ``start``, one per problem, with frozen parameters.
        start: the Gaussian whose whitened coordinates they transform.
        elbo: ``[*batch]`` evidence lower bound after :meth:`fit`, else None.
    """

    networks: nn.ModuleList
    start: Gaussian
    elbo: Tensor | None = None

    def __init__(self, networks: nn.ModuleList, start: Gaussian, *, log_zeta: Tensor | None = None, seed: int = 0):
        if len(instance("Flow", "networks", networks, nn.ModuleList, "Flow.fit(target)")) != start.batch_shape.numel():
            raise ArgumentError(f"Flow(networks): expected one per problem, {start.batch_shape.numel()}")
        for parameter in networks.parameters():
            parameter.requires_grad_(False)
        vars(self).update(networks=networks.eval(), start=start, log_zeta=log_zeta, mean=start.mean, scale=start.scale)
        x = self.sample((FLOW.moments,), torch.Generator(start.mean.device).manual_seed(seed))
        moments = weighted_moments(x.double(), x.new_zeros(x.shape[:-1]))
        scale = TriangularMap(factorised(moments.covariance).to(start.mean))
        vars(self).update(mean=moments.mean.to(start.mean), scale=scale)

    @property
    def moments(self) -> Gaussian:
        return Gaussian._of(self.mean, self.scale, log_zeta=self.log_zeta)

    def energy(self, x: Tensor) -> Tensor:
        """``-log q(x) = |z|^2/2 + D/2 log 2 pi + log|det L| - log|det dz/dv|``: ``[..., *batch, D] -> [..., *batch]``.

        Raises:
            ArgumentError: x is not a tensor whose last dimension is D.
        """
        return _energy(self.networks, self.start, self._points("energy", "x", x))

    def energy_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (gradient,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), gradient

    @torch.no_grad()
    def sample(self, shape: tuple[int, ...] | int = (), generator: torch.Generator | None = None) -> Tensor:
        """Independent draws ``[*shape, *batch, D]``.

        Raises:
            ArgumentError: the shape is neither an integer >= 0 nor a sequence of them.
        """
        return _drawn(self.networks, self.start, self._normal(shape, generator))

    def take(self, problems: Tensor) -> "Flow":
        """The flows of the problems with flat indices ``[N]``; the batch shape is ``[N]``.

        Raises:
            ArgumentError: an index is out of range.
        """
        problems = indices("Flow.take", "problems", problems, self.batch_shape.numel())
        new = object.__new__(Flow)
        moments = self.moments.take(problems)
        vars(new).update(
            networks=nn.ModuleList([self.networks[int(i)] for i in problems]),
            start=self.start.take(problems),
            mean=moments.mean,
            scale=moments.scale,
            log_zeta=moments.log_zeta,
        )
        return new

    def to(self, *args: Any, **kwargs: Any) -> "Flow":
        """The same flows on another device or in another dtype."""
        new = object.__new__(Flow)
        moments = self.moments.to(*args, **kwargs)
        vars(new).update(
            vars(self)
            | {
                "networks": copy.deepcopy(self.networks).to(*args, **kwargs),
                "start": self.start.to(*args, **kwargs),
                "mean": moments.mean,
                "scale": moments.scale,
                "log_zeta": moments.log_zeta,
            }
        )
        return new

    # ------------------------------------------------------------------------------------------------------ training

    @classmethod
    def from_draws(
        cls,
        draws: Tensor,
        log_weights: Tensor | None = None,
        *,
        steps: int = 300,
        samples: int = 256,
        rate: float = 1e-2,
        seed: int = 0,
        log_zeta: Tensor | None = None,
        **network: Any,
    ) -> Self:
        """The flow of largest likelihood of weighted draws of the target, such as a tempered pilot's.

        A tenth of the draws is held out: kept is the step of training at which their likelihood was largest.

        Args:
            draws: ``[chains, draws, *batch, D]``, of at least 20 in all.
            log_weights: ``[chains, draws, *batch]``; None for equal ones.
            steps: steps of Adam.
            samples: draws per step.
            rate: initial learning rate, which falls to zero along a cosine.
            seed: seed of all randomness.
            log_zeta: ``[*batch]``, the pilot's log evidence.
            network: ``layers``, ``width`` and ``bins`` of the flow.

        Raises:
            ArgumentError: an argument is outside its range, or shapes do not fit.
            EvidenceError: all weights of a problem are zero, or training diverged.
            MissingExtraError: Zuko is not installed.
        """
        call = "Flow.from_draws"
        draws, log_weights = check_weighted(call, draws, log_weights)
        if draws.shape[:2].numel() < 20:
            raise ArgumentError(f"{call}(draws of shape {tuple(draws.shape)}): expected 20 draws or more in all")
        steps, samples = whole_number(call, "steps", steps), whole_number(call, "samples", samples)
        positive(call, "rate", rate)
        rate, seed = within(call, "rate", rate, 0, torch.finfo(draws.dtype).max), random_seed(call, seed)
        allocatable(call, "samples", samples, 3 * samples * draws.shape[-1], "fewer draws", like=draws)
        log_zeta = given_log_zeta(call, log_zeta, draws[0, 0])
        x, logs = draws.flatten(0, 1), log_weights.flatten(0, 1).double()
        moments = weighted_moments(x.double(), logs)
        # as many draws' worth of the diagonal as Gaussian.refined takes of its old covariance
        share = (moments.ess / (moments.ess + x.shape[-1] + 2))[..., None, None]
        diagonal = torch.diag_embed(moments.covariance.diagonal(dim1=-2, dim2=-1))
        scale = TriangularMap(factorised(torch.lerp(diagonal, moments.covariance, share)).to(x))
        start = Gaussian._of(moments.mean.to(x), scale, log_zeta=log_zeta)
        rng = torch.Generator(x.device).manual_seed(seed)
        order = torch.randperm(len(x), generator=rng, device=x.device)
        held, kept = order[: max(1, int(FLOW.held_out * len(x)))], order[max(1, int(FLOW.held_out * len(x))) :]
        flat, weights = start.whiten(x).reshape(len(x), -1, x.shape[-1]), logs.softmax(0).reshape(len(x), -1)
        networks = _networks(call, start, seed, **network)
        for problem, one in enumerate(networks):
            v, w = flat[:, problem], weights[:, problem]
            if not (w[kept] > 0).any():
                raise EvidenceError(f"{call}(): all draws of problem {problem} that training may use have zero weight")

            def loss(one=one, v=v, w=w) -> Tensor:
                chosen = kept[torch.multinomial(w[kept], samples, replacement=True, generator=rng)]
                return -_log_prob(one, v[chosen]).mean()

            def outside(one=one, v=v, w=w) -> Tensor:
                return -(w[held] * _log_prob(one, v[held])).sum()

            _train(one, loss, steps, rate, outside if (w[held] > 0).sum() > 1 else None)
        return cls(networks, start, log_zeta=log_zeta, seed=seed)

    @classmethod
    def fit(
        cls,
        target,
        *,
        start: Gaussian | None = None,
        steps: int = 300,
        samples: int = 64,
        rate: float = 1e-2,
        seed: int = 0,
        **network: Any,
    ) -> Self:
        """The flow with the largest evidence lower bound, by the gradient that follows the draws (math 11.11).

        A bound seeks modes: a flow that starts in one of several stays there. Use :meth:`from_draws` then.

        Args:
            target: anything with ``energy``, ``dim`` and ``batch_shape``.
            start: initial Gaussian; None for ``Gaussian.fit(target)``, twice as wide. Splines bend only within
                five of its standard deviations.
            steps, samples, rate: as in :meth:`from_draws`; samples are draws of the flow per step.
            seed: seed of all randomness.
            network: as in :meth:`from_draws`.

        Raises:
            ArgumentError: an argument is outside its range.
            EvidenceError: the energy is faulty, or training diverged.
            MissingExtraError: Zuko is not installed.
        """
        call = "Flow.fit"
        steps, samples = whole_number(call, "steps", steps), whole_number(call, "samples", samples)
        rate, seed = positive(call, "rate", rate), random_seed(call, seed)
        target = as_target(target)
        if start is None:
            local = Gaussian.fit(target, start=Gaussian(origin(target), 1.0), seed=seed)
            start = Gaussian(local.mean, FLOW.widen * local.covariance_diagonal.sqrt())
        instance(call, "start", start, Gaussian, "Gaussian(mean, sd)")
        if tuple(start.mean.shape) != (*target.batch_shape, target.dim):
            raise ArgumentError(f"{call}(start={start}): expected a Gaussian over {(*target.batch_shape, target.dim)}")
        rng = torch.Generator(start.mean.device).manual_seed(seed)
        points = start.sample(probe_points(target), torch.Generator(start.mean.device).manual_seed(0))
        if fault := energy_fault(target, points):
            raise EvidenceError(f"{call}(): {fault}")
        within(call, "rate", rate, 0, torch.finfo(start.mean.dtype).max)
        allocatable(call, "samples", samples, 3 * samples * start.mean.numel(), "fewer draws", like=start.mean)
        networks = _networks(call, start, seed, **network)
        frozen = copy.deepcopy(networks).requires_grad_(False)

        def loss() -> Tensor:
            z = torch.randn(samples, *start.mean.shape, generator=rng, dtype=start.mean.dtype, device=start.mean.device)
            x = _drawn(networks, start, z)
            there = x.detach().requires_grad_()
            # the parameters of the density are held: its score has mean zero and a variance that remains
            frozen.load_state_dict(networks.state_dict())
            (own,) = torch.autograd.grad(_energy(frozen, start, there).sum(), there)
            _, gradient = target.energy_and_gradient(x.detach())
            slope = gradient - own
            return (torch.where(slope.isfinite().all(-1, keepdim=True), slope, 0.0) * x).sum() / samples

        _train(networks, loss, steps, rate, None)
        made = cls(networks, start, log_zeta=start.log_zeta, seed=seed)
        with torch.no_grad():
            x = made.sample((1000,), rng)
            elbo = (made.energy(x) - target.energy(x)).double().mean(0)
        vars(made).update(elbo=elbo)
        return made

    def refined(
        self, draws: Tensor, log_weights: Tensor, log_zeta: Tensor | None = None, *, kind: Any = None
    ) -> "Flow":
        """A new flow trained on weighted draws of the target: :meth:`from_draws`; ``kind`` has no meaning here."""
        return Flow.from_draws(draws, log_weights, log_zeta=log_zeta)


def _networks(
    call: str, start: Gaussian, seed: int, *, layers: int = 3, width: int = 32, bins: int = 8
) -> nn.ModuleList:
    """A spline flow per problem; torch's global randomness, from which Zuko draws first weights, is left as it was."""
    with extra("flows"):
        import zuko
    for name, value in (("layers", layers), ("width", width), ("bins", bins)):
        whole_number(call, name, value, 2 if name == "bins" else 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        passes = 2 if start.dim > 1 else 1
        networks = [
            zuko.flows.NSF(start.dim, transforms=layers, bins=bins, hidden_features=(width, width), passes=passes)
            for _ in range(start.batch_shape.numel())
        ]
    for network in networks:
        for layer in cast(list[Any], network.transform.transforms):
            # near the identity at first: the flow starts as its Gaussian
            last = layer.hyper[-1] if hasattr(layer, "hyper") else layer.phi
            for parameter in last.parameters():
                parameter.data *= FLOW.first
    return nn.ModuleList(networks).to(start.mean)


def _log_prob(network: nn.Module, v: Tensor) -> Tensor:
    """Log density of a flow at points ``[N, D]`` of its own coordinates."""
    z, log_det = network().transform.call_and_ladj(v)
    return log_det - 0.5 * z.square().sum(-1) - 0.5 * v.shape[-1] * math.log(2 * math.pi)


def _energy(networks: nn.ModuleList, start: Gaussian, x: Tensor) -> Tensor:
    x = x.expand(torch.broadcast_shapes(x.shape, start.mean.shape))
    v = start.whiten(x)
    lead = v.shape[: v.ndim - start.mean.ndim]
    flat = v.reshape(lead.numel(), -1, start.dim)
    columns = [
        torch.cat([_log_prob(network, part) for part in flat[:, i].split(FLOW.rows)])
        for i, network in enumerate(networks)
    ]
    return start.log_det - torch.stack(columns, 1).reshape((*lead, *start.batch_shape))


def _drawn(networks: nn.ModuleList, start: Gaussian, z: Tensor) -> Tensor:
    """Points of standard normal numbers through the flows, both ``[..., *batch, D]``."""
    flat = z.reshape(-1, len(networks), start.dim)
    columns = [
        torch.cat([network().transform.inv(part) for part in flat[:, i].split(FLOW.rows)])
        for i, network in enumerate(networks)
    ]
    return start.unwhiten(torch.stack(columns, 1).reshape(z.shape))


def _train(
    network: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, outside: Callable[[], Tensor] | None
) -> None:
    """Adam with a cosine; of the steps that are looked at, that with the smallest loss outside is kept.

    Raises:
        EvidenceError: the loss is not finite.
    """
    best, kept = math.inf, None
    for i in adam(network.parameters(), steps, rate, f"training a flow, {steps} steps", memory=0.999):
        if outside is not None and i % FLOW.look == 0:
            with torch.no_grad():
                now = float(outside())
            if now < best:
                best, kept = now, copy.deepcopy(network.state_dict())
        with torch.enable_grad():
            value = loss()
        if not value.isfinite():
            raise EvidenceError(f"the training of a flow diverged at step {i}: use a rate below {rate:g}")
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    if outside is not None and kept is not None:
        with torch.no_grad():
            last = float(outside())
        # NaN is not an improvement
        if not last < best:
            network.load_state_dict(kept)
