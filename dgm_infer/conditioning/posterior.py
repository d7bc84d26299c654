"""A prior times a likelihood whose power can rise from 0 to 1, from which chains start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..settings import Settings
from ..structures import push_forward
from ..target import Target


@dataclass(frozen=True)
class PosteriorSettings(Settings):
    """How posteriors are differentiated."""

    columns: int = 20
    """Forward derivatives taken at once: memory for so many copies of the network."""


_SETTINGS = PosteriorSettings()


class Posterior(Target):
    """``p(u | y)`` of inputs u with a prior: a :class:`Target` whose likelihood can be tempered."""

    standardised = True

    @property
    def values(self) -> Tensor:
        """The observed values, whose type and device are those of the computation."""
        raise NotImplementedError

    @property
    def n_outputs(self) -> int:
        """Numbers that the model computes for every problem: those of a Jacobian are so many times D."""
        raise NotImplementedError

    @property
    def convolves(self) -> bool:
        """Whether the model has layers that are convolutions, whose gradients take long."""
        raise NotImplementedError

    def tempered_energy(self, u: Tensor, beta: Tensor, /) -> Tensor:
        """``-beta log p(y | u) - log p(u)`` up to a constant, differentiable in both: ``[..., D], [...] -> [...]``."""
        raise NotImplementedError

    def precision(self, u: Tensor, /) -> Tensor | None:
        """``I + K^T K``, that of the posterior about u if the outputs were linear, ``[..., D, D]`` in float64; None if
        the likelihood's information is not known.

        It takes as many forward derivatives of the model as there are inputs.
        """
        raise NotImplementedError

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another type."""
        raise NotImplementedError


def gauss_newton(function: Callable[[Tensor], Tensor], u: Tensor, whiten: Callable[[Tensor], Tensor]) -> Tensor:
    """``I + K^T K``, in float64, without which rounding may leave it indefinite: ``[..., D] -> [..., D, D]``.

    Args:
        function: ``[..., D] -> [..., N]``, row by row.
        whiten: K t of derivatives ``J t`` of the function, ``[n, ..., N]``.
    """
    with torch.no_grad():
        unit = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        columns = [whiten(push_forward(function, u, part)[1]) for part in unit.split(_SETTINGS.columns)]
        k = torch.cat(columns).movedim(0, -1).double()
        return unit.double() + k.mT @ k


class AnnealedPosterior(Target):
    """A posterior at a power ``beta`` of its likelihood: of additive normal noise, its inverse variance in units of the
    noise's own.

    With beta the last coordinate, ``energy(u, beta) = -beta log p(y | u) - log p(u)``, up to a constant of u. Its
    derivative in beta is the misfit ``-log p(y | u)``, up to a constant.
    """

    def __init__(self, posterior: Posterior):
        self._posterior = posterior
        self.values = posterior.values
        coarse: Any = posterior.coarse
        self.coarse: Any = None if coarse is None else type(self)(coarse)
        super().__init__(None, posterior.dim + 1, tuple(posterior.batch_shape))

    @property
    def is_exact(self) -> bool:
        """Whether gradients are computed in float64."""
        return self.coarse is None and self.values.dtype == torch.float64

    def energy(self, x):
        return self._posterior.tempered_energy(x[..., :-1], x[..., -1])

    def energy_and_gradient(self, x):
        # distributions that check their parameters would raise for the whole batch where one trajectory has diverged
        finite = x.isfinite().all(-1)
        x = torch.where(finite.unsqueeze(-1), x, 0.0)
        if self.coarse is None:
            energy, gradient = super().energy_and_gradient(x)
        else:
            with torch.no_grad():
                energy = self.energy(x)
            gradient = self.coarse.gradient(x.float()).to(x)
        return torch.where(finite, energy, torch.nan), gradient
