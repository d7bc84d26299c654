"""``RateDistortion``: rates and distortions at all temperatures, with their errors, and their file."""

import io
import json
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ..arguments import file_path, flag
from ..errors import CheckpointError, cause
from ..files import write_file

if TYPE_CHECKING:
    import pandas

__all__ = ["CurvePoints", "RateDistortion", "curve_points"]

_FORMAT = "dgm-infer rate distortion 1"


class CurvePoints(NamedTuple):
    """Estimates at one temperature, each ``[*batch]``, float64."""

    rate: Tensor
    rate_error: Tensor
    distortion: Tensor
    distortion_error: Tensor
    ess: Tensor


def curve_points(beta: Tensor | float, log_weights: Tensor, distortions: Tensor) -> CurvePoints:
    """Rate ``-log Z - beta D`` and distortion D of weighted draws (math 7.9), both ``[chains, *batch]``.

    The errors are those of the delta method: with shares w of the weights, which sum to 1 over C chains, the mean of
    squares over ``C - 1`` of ``C w_c (d_c - D)``, and of ``-(C w_c - 1) - beta C w_c (d_c - D)``.
    """
    n = log_weights.shape[0]
    total = log_weights.logsumexp(0)
    shares = (log_weights - total).exp().nan_to_num(nan=0.0)
    # a state of infinite distortion has no weight
    weighted = torch.where(shares > 0, shares * distortions, 0.0)
    mean = weighted.sum(0)
    moved = n * (weighted - shares * mean)
    log_z = total - np.log(n)

    def error(influence: Tensor) -> Tensor:
        if n == 1:
            return torch.full_like(mean, torch.nan)
        return (influence.square().sum(0) / (n * (n - 1))).sqrt()

    ess = 1 / shares.square().sum(0)
    return CurvePoints(
        -log_z - beta * mean, error(-(n * shares - 1) - beta * moved), mean, error(moved), ess.nan_to_num(posinf=0.0)
    )


@dataclass(frozen=True, eq=False)
class RateDistortion:
    """Result of :func:`rate_distortion`: points ``(distortion, rate)`` at every ``beta``, in one run.

    In expectation, and for each image, a point lies on or above the curve of the decoder and its prior: no code whose
    codewords are prior draws has less rate at that distortion. Rates are in nats.

    Attributes:
        beta: inverse temperatures, ``[K + 1]``, from 0 on.
        rate: ``[K + 1, *batch]``, float64 like all estimates.
        rate_error: standard errors from the spread over chains.
        distortion, distortion_error: ``[K + 1, *batch]``.
        ess: effective number of chains, ``[K + 1, *batch]``; a bound from less than two is loose.
        chains: chains per image.
        diagnostics: ``acceptance [*batch]``, ``gradient_evaluations`` per chain and image, including
            ``pilot_evaluations``, ``seconds``.
        seed: seed of the run.
    """

    beta: Tensor
    rate: Tensor
    rate_error: Tensor
    distortion: Tensor
    distortion_error: Tensor
    ess: Tensor
    chains: int
    diagnostics: dict[str, Any]
    seed: int

    @property
    def images(self) -> int:
        """Number of images."""
        return self.rate[0].numel()

    def mean(self) -> CurvePoints:
        """Means over the images, each ``[K + 1]``, with errors for these very images; the smallest ess of each."""

        def error(values: Tensor) -> Tensor:
            return values.reshape(len(self.beta), -1).square().sum(1).sqrt() / self.images

        def mean(values: Tensor) -> Tensor:
            return values.reshape(len(self.beta), -1).mean(1)

        least = self.ess.reshape(len(self.beta), -1).amin(1)
        return CurvePoints(
            mean(self.rate), error(self.rate_error), mean(self.distortion), error(self.distortion_error), least
        )

    def to_dataframe(self, per_image: bool = False) -> "pandas.DataFrame":
        """One row per temperature, of means over the images; or one per temperature and image."""
        import pandas

        beta = self.beta.cpu().numpy()
        if not flag("to_dataframe", "per_image", per_image):
            columns = {name: value.cpu().numpy() for name, value in self.mean()._asdict().items()}
            return pandas.DataFrame({"beta": beta, **columns})
        index = pandas.MultiIndex.from_product([beta, range(self.images)], names=["beta", "image"])
        names = CurvePoints._fields
        return pandas.DataFrame({name: getattr(self, name).reshape(-1).cpu().numpy() for name in names}, index=index)

    def save(self, path: str | os.PathLike) -> None:
        """Write a NumPy archive (``.npz``) atomically."""
        arrays = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        own = {name: value for name, value in self.diagnostics.items() if not isinstance(value, Tensor)}
        arrays |= {f"diagnostics.{k}": v for k, v in self.diagnostics.items() if isinstance(v, Tensor)}
        header = {"format": _FORMAT, "chains": self.chains, "seed": self.seed, "diagnostics": own}
        file = io.BytesIO()
        numpy: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
        np.savez_compressed(file, header=np.array(json.dumps(header)), **numpy)
        write_file(path, file)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the file is missing, damaged, or was not written by :meth:`save`.
        """
        path = file_path("RateDistortion.load", "path", path)
        if not path.is_file():
            raise CheckpointError(f"no rates and distortions at {path}: RateDistortion.save(path) writes them")
        try:
            with np.load(path, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                if header.get("format") != _FORMAT:
                    raise ValueError(f"format {header.get('format')!r}")
                tensors = {name: torch.from_numpy(file[name]) for name in file.files if name != "header"}
            prefix = "diagnostics."
            own = {k.removeprefix(prefix): tensors.pop(k) for k in list(tensors) if k.startswith(prefix)}
            diagnostics = {**own, **header["diagnostics"]}
            return cls(**tensors, chains=header["chains"], seed=header["seed"], diagnostics=diagnostics)
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged, or was not written by RateDistortion.save: {cause(error)}"
            ) from error

    def __repr__(self):
        means = self.mean()
        return (
            f"RateDistortion({self.images} images, {len(self.beta)} temperatures; at beta = {self.beta[-1]:.4g} rate "
            f"{means.rate[-1]:.2f} +- {means.rate_error[-1]:.2f}, distortion {means.distortion[-1]:.4g} +- "
            f"{means.distortion_error[-1]:.2g})"
        )
