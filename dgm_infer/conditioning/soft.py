"""The ABC posterior in input space (J 5)."""

import torch
from torch import Tensor

from ..arguments import positive
from ..target import Target
from .reduced import ObservedModel

__all__ = ["InputPosterior"]


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

    @property
    def model(self):
        return self.observed.model

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
