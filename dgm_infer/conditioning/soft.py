"""The ABC posterior in input space (J 5)."""

import torch
from torch import Tensor

from ..arguments import positive
from ..target import Block, Target
from .reduced import ObservedModel

__all__ = ["InputPosterior"]


class InputPrior:
    """``p_u`` of the inputs that an observation leaves: a :class:`~dgm_infer.target.Density`."""

    def __init__(self, observed: ObservedModel, like: Tensor):
        self.observed, self.dim, self._like = observed, observed.dim, like

    def log_prob(self, u: Tensor) -> Tensor:
        return self.observed.log_prior(u)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        return self.observed.sample_inputs(shape, generator, self._like)


class InputPosterior(Target):
    """ABC posterior in input space with a Gaussian kernel (math 2.4, J (34), J (79)).

    ``energy(u) = -log p_u(u) + |A(g_x(u)) - y|^2 / (2 tolerance^2)``

    Args:
        observed: the model through its observation operator.
        values: ``[*batch, Dy]`` observed values.
        tolerance: standard deviation of the kernel, in units of the output.
    """

    def __init__(self, observed: ObservedModel, values: Tensor, tolerance: float):
        tolerance = positive("condition", "tolerance", tolerance)
        super().__init__(None, observed.dim, tuple(values.shape[:-1]))
        self.observed = observed
        self.values = values
        self.tolerance = tolerance
        self.prior = InputPrior(observed, values)

    @property
    def model(self):
        return self.observed.model

    @property
    def blocks(self):
        """``"global"`` and ``"local"`` inputs, of models that have both."""
        if not self.model.has_local_inputs:
            return {}
        n_global = self.model.split(self.values.new_empty(0, self.dim))[0].shape[-1]
        return {"global": Block(0, n_global), "local": Block(n_global, self.dim)}

    def energy(self, x):
        misfit = (self.observed.outputs(x) - self.values).square().sum(-1)
        return misfit / (2 * self.tolerance**2) - self.observed.log_density(x)

    def latents(self, x):
        with torch.no_grad():
            return self.observed.latents(x)

    def initial_draws(self, n, rng):
        """Draws from the prior, ``[n, *batch, D]``."""
        return self.observed.sample_inputs((n, *self.batch_shape), rng, self.values)

    def complete(self, u: Tensor, rng: torch.Generator) -> Tensor:
        """Complete outputs ``[..., *batch, *output_shape]``: the observed part as observed, the rest generated."""
        return self.observed.complete(u, self.values, rng)
