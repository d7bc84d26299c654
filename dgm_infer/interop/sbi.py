"""Posteriors with the interface of sbi's, so that its diagnostics run on them; sbi itself is not needed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import allocatable, array, digits, instance, names_of, positive, random_seed, whole_number
from ..conditioning.condition import condition
from ..conditioning.observations import Observation, Pixels
from ..conditioning.observations import observe as as_observation
from ..conditioning.operators import Operator
from ..errors import ArgumentError, ModelError
from ..kernels import Kernel
from ..kernels.kernel import check_kernel
from ..models import LatentVariableModel, as_generative_model, frozen_copy, is_discrete, reference_tensor
from ..sampling.chain_groups import labels
from ..sampling.draws import Draws
from ..sampling.sample import sample
from ..target import reference


class Simulations(NamedTuple):
    """Joint draws of a model."""

    thetas: Tensor
    """``[n, d]``."""
    xs: Tensor
    """``[n, *x_shape]``."""


class SBIPosterior:
    """The exact posterior of a generative model behind the methods of sbi's ``NeuralPosterior``.

    ``theta`` is the vector of latents, each flattened, in the order of ``names``; :attr:`entries` says which entry is
    which. So ``sbi.diagnostics.run_sbc`` and ``run_tarp`` take it as a posterior::

        thetas, xs = posterior.simulate(200)
        ranks, _ = run_sbc(thetas, xs, posterior, num_posterior_samples=100)

    Every x of a batch is an independent problem of :func:`dgm_infer.condition`, and all of them are sampled at once.
    Seeds come from torch's global generator, as in sbi: ``torch.manual_seed`` repeats a result.

    Args:
        model: what :func:`dgm_infer.condition` takes.
        names: latents that make up theta, in this order; None for all in the order of the model.
        observe: the observation operator, as for :func:`dgm_infer.condition`.
        tolerance: width of an ABC kernel; None for the exact posterior.
        kernel: as for :func:`dgm_infer.sample`.
        chains: the most chains per x. Ranks are uniform for independent draws: with as many chains as draws they are.
        warmup: iterations that adapt the kernel, before the first draw.
        thin: iterations per draw.

    Attributes:
        draws: the :class:`Draws` of the last call, to be diagnosed; None before it.

    Raises:
        ArgumentError: a number is outside its range.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] | str | None = None,
        *,
        observe: Any = None,
        tolerance: float | None = None,
        kernel: Kernel | None = None,
        chains: int = 32,
        warmup: int = 300,
        thin: int = 3,
    ):
        self.model = instance("SBIPosterior", "model", model, nn.Module, "dgm.from_simulator(simulate, prior)")
        self.names = None if names is None else tuple(names_of("SBIPosterior", "names", names))
        # refused where it is given
        as_observation(observe)
        self.observe = observe
        self.tolerance = None if tolerance is None else positive("SBIPosterior", "tolerance", tolerance)
        self.kernel = None if kernel is None else check_kernel("SBIPosterior", kernel, "dgm.ConstrainedHMC()")
        self.chains = whole_number("SBIPosterior", "chains", chains)
        self.warmup = whole_number("SBIPosterior", "warmup", warmup, 0)
        self.thin = whole_number("SBIPosterior", "thin", thin)
        self.draws: Draws | None = None
        self._x: Tensor | None = None

    @property
    def default_x(self) -> Tensor | None:
        """The observation of :meth:`sample` where none is given."""
        return self._x

    @default_x.setter
    def default_x(self, x: Any) -> None:
        self.set_default_x(x)

    def set_default_x(self, x: Any) -> "SBIPosterior":
        """Set the observation of :meth:`sample` where none is given, and return the posterior."""
        self._x = array("set_default_x", "x", x, digits(x))
        return self

    @property
    def entries(self) -> list[str]:
        """What the entries of theta are, for example ``["slope", "effect[0]", "effect[1]"]``."""
        return labels(self._chosen(self._joint(1, 0)[0]), 1)

    def sample(
        self, sample_shape: Sequence[int] = (), x: Any = None, show_progress_bars: bool = True, **kwargs: Any
    ) -> Tensor:
        """Draws of theta given one observation, ``[*sample_shape, d]``.

        Args:
            sample_shape: shape of independent draws.
            x: ``x_shape`` or ``[1, *x_shape]``; None for the default.
            show_progress_bars: show the bar of :func:`dgm_infer.sample`.
            kwargs: other settings of sbi's posteriors, which do not apply here and are refused.

        Raises:
            ArgumentError: there is no observation, or more than one.
            ObservationError: it does not fit the model.
        """
        x = self._x if x is None else x
        if x is None:
            raise ArgumentError("sample(x=None): give an observation, or set_default_x(x)")
        found, batch = self._sampled("sample", sample_shape, x, show_progress_bars, kwargs)
        if batch.numel() != 1:
            raise ArgumentError(
                f"sample(x): {batch.numel()} observations, of batch shape {tuple(batch)}: use sample_batched"
            )
        return found.reshape(*torch.Size(sample_shape), found.shape[-1])

    def sample_batched(
        self, sample_shape: Sequence[int], x: Any, show_progress_bars: bool = True, **kwargs: Any
    ) -> Tensor:
        """Draws of theta given each of many observations, ``[*sample_shape, B, d]``.

        Args:
            x: ``[B, *x_shape]``.
            sample_shape, show_progress_bars, kwargs: as for :meth:`sample`.

        Raises:
            ArgumentError: x is not a batch.
            ObservationError: it does not fit the model.
        """
        found, batch = self._sampled("sample_batched", sample_shape, x, show_progress_bars, kwargs)
        if len(batch) != 1:
            raise ArgumentError(f"sample_batched(x): has batch shape {tuple(batch)}: must be [B, *x_shape]")
        return found

    def log_prob(self, theta: Tensor, x: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Not available: latents are functions of the inputs, whose density at theta is not known.

        Raises:
            ArgumentError: always; it names what sbi's diagnostics can use instead.
        """
        raise ArgumentError(
            "SBIPosterior.log_prob: the density of theta is not known, only draws are: run_sbc(reduce_fns='marginals')"
        )

    def simulate(self, n: int, seed: int | None = None) -> Simulations:
        """Latents and outputs from the model itself: ``thetas [n, d]`` and ``xs [n, *x_shape]``.

        With a tolerance the outputs are those without its kernel, so that ranks show the error of the approximation.

        Args:
            n: number of pairs.
            seed: None for one from torch's global generator.

        Raises:
            ArgumentError: ``n`` is not an integer >= 1, or no latent has one of the names.
            ModelError: the model has a log factor, so that its inputs are not draws of its prior.
        """
        n = whole_number("simulate", "n", n)
        latents, x = self._joint(n, random_seed("simulate", _global_seed() if seed is None else seed))
        return Simulations(_as_sbi(self._theta(latents, 1)), _as_sbi(x))

    def __repr__(self):
        names = "all latents" if self.names is None else ", ".join(self.names)
        return f"SBIPosterior({type(self.model).__name__}, theta: {names})"

    def _sampled(
        self, call: str, shape: Sequence[int], x: Any, progress: bool, kwargs: dict
    ) -> tuple[Tensor, torch.Size]:
        """Draws ``[*shape, *batch, d]``, and the batch shape."""
        if kwargs:
            raise ArgumentError(f"{call}({next(iter(kwargs))}=...): is a setting of other posteriors, leave it out")
        shape = torch.Size([whole_number(call, "sample_shape", size) for size in shape])
        n = shape.numel()
        problem = condition(self.model, x, observe=self.observe, tolerance=self.tolerance)  # type: ignore[arg-type]
        batch = torch.Size(problem.batch_shape)
        # names first: sampling takes longer than a typing error is worth
        self._chosen(problem.latents(torch.zeros(*batch, problem.dim).to(reference(problem))))
        allocatable(call, "sample_shape", tuple(shape), n * batch.numel() * problem.dim, "draw fewer at a time")
        chains = min(self.chains, n)
        self.draws = sample(
            problem,
            self.kernel,
            chains=chains,
            warmup=self.warmup,
            draws=-(-n // chains),
            thin=self.thin,
            seed=_global_seed(),
            keep="latents",
            progress=bool(progress),
        )
        theta = self._theta(self.draws.latents, 2 + len(batch))
        # neighbours are of different chains
        mixed = theta.transpose(0, 1).flatten(0, 1)[:n]
        return _as_sbi(mixed.reshape(*shape, *mixed.shape[1:])), batch

    def _joint(self, n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """``n`` draws of the latents, and of what is observed of the outputs."""
        if is_discrete(self.model):
            made = LatentVariableModel.of(self.model).generate(n, seed)
            return {"z": made.latents}, made.images
        model = as_generative_model(self.model)
        if model.has_log_factor:
            raise ModelError(
                f"simulate(): {type(model).__name__} has a log factor, so that its inputs are not draws of its prior: "
                "simulate thetas and xs by hand"
            )
        device = reference_tensor(model).device
        frozen = frozen_copy(model, torch.float64, device)
        rng = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            u = frozen.input_density.sample((n,), generator=rng, dtype=torch.float64, device=device)
            x = frozen.observed(u)
            if isinstance(self.observe, Operator):
                return frozen.latents(u), self.observe(x)
            x = x.reshape(n, *frozen.output_shape)
            whole = self.observe is None or isinstance(self.observe, Pixels)
            return frozen.latents(u), x if whole else _function(self.observe)(x)

    def _chosen(self, latents: dict[str, Tensor]) -> dict[str, Tensor]:
        names = tuple(latents) if self.names is None else self.names
        for name in names:
            if name not in latents:
                raise ArgumentError(f"SBIPosterior(names={name!r}): must be among the latents {', '.join(latents)}")
        return {name: latents[name] for name in names}

    def _theta(self, latents: dict[str, Tensor], n_lead: int) -> Tensor:
        """Latents ``[*lead, *shape]`` as vectors ``[*lead, d]``."""
        return torch.cat([value.reshape(*value.shape[:n_lead], -1) for value in self._chosen(latents).values()], -1)


def _function(observe: Any) -> Callable[[Tensor], Tensor]:
    if isinstance(observe, Observation) and not callable(observe):
        raise ArgumentError(f"simulate(): a {type(observe).__name__} cannot be applied to outputs: simulate xs by hand")
    return observe


def _global_seed() -> int:
    return int(torch.randint(2**62, ()))


def _as_sbi(values: Tensor) -> Tensor:
    """In the type that sbi computes with."""
    return values.to(torch.get_default_dtype()) if values.is_floating_point() else values
