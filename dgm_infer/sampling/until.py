"""``until=``: how well the posterior is to be known before a run ends, instead of how many draws it makes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from ..arguments import positive
from ..arguments.objects import shown
from ..errors import ArgumentError
from .chain_groups import side_by_side
from .draws import Draws
from .inference_data import effective_draws, r_hat


@dataclass(frozen=True)
class LookSettings:
    """How much of a run is looked at while it goes on."""

    draws: int = 2000
    """Draws per chain, evenly spaced, that are judged: fewer draws look less effective, never more."""
    columns: int = 64
    """Numbers of each that are shown: a picture has thousands."""


_LOOK = LookSettings()


def _judged(draws: Draws) -> dict[str, Tensor]:
    """Some draws of the latents, or else of the inputs, evenly spaced."""
    step = -(-draws.shape[1] // _LOOK.draws)
    if draws.inputs is not None:
        inputs = draws.inputs[:, ::step]
        return (draws.problem.latents(inputs) if draws.problem is not None else {}) or {"inputs": inputs}
    return {name: value[:, ::step] for name, value in draws.latents.items()}


@torch.no_grad()
def worst_mixing(draws: Draws) -> tuple[float, float]:
    """The largest R-hat and the fewest bulk effective draws, by some draws of the first numbers of the latents."""
    values = side_by_side(_judged(draws), len(draws.shape) - 2).flatten(2)[..., : _LOOK.columns]
    effective = effective_draws(values, "bulk").nan_to_num(0.0).min().item()
    rates = r_hat(values) if values.shape[0] > 1 else torch.tensor([torch.nan])
    return rates.nan_to_num(torch.inf).max().item(), effective


@dataclass(frozen=True)
class Until:
    """What a run goes on until; a time ends it whatever it has reached.

    Attributes:
        ess: smallest bulk effective sample size of all latents.
        r_hat: largest R-hat of all latents.
        mcse: by the name of a latent, the largest Monte Carlo error of its means, in its units.
        seconds: wall-clock seconds.
    """

    ess: float | None = None
    r_hat: float | None = None
    mcse: Mapping[str, float] | None = None
    seconds: float | None = None

    @classmethod
    def checked(cls, call: str, until: Any, latents: Sequence[str] | None = None) -> Self:
        """What ``until=`` says, given as a dict.

        Args:
            latents: names of those of the problem, if they are known.

        Raises:
            ArgumentError: it names something else, or a number outside its range.
        """
        known = [field.name for field in fields(cls)]
        example = "a dict such as dict(ess=400, r_hat=1.01, mcse={'z': 0.01}, seconds=600)"
        if not isinstance(until, Mapping) or not until or not set(until) <= set(known):
            raise ArgumentError(f"{call}(until={shown(until)}): must be {example}")
        values = dict(until)
        for name in {"ess", "seconds"} & set(values):
            values[name] = positive(call, f"until {name}", values[name])
        if "r_hat" in values and not (isinstance(values["r_hat"], int | float) and values["r_hat"] > 1):
            raise ArgumentError(f"{call}(until r_hat={shown(values['r_hat'])}): must be above 1, such as 1.01")
        if "mcse" in values:
            errors = values["mcse"]
            if not isinstance(errors, Mapping) or not errors:
                raise ArgumentError(f"{call}(until mcse={shown(errors)}): must be {example}")
            values["mcse"] = {n: positive(call, f"until mcse of {n}", value) for n, value in errors.items()}
            for name in errors:
                if latents is not None and name not in latents:
                    raise ArgumentError(f"{call}(until mcse of {name!r}): there are the latents {', '.join(latents)}")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @torch.no_grad()
    def reached(self, draws: Draws, seconds: float) -> tuple[bool, str]:
        """Whether it is, and where the run is, in words."""
        said, is_reached = [], True
        kept = _judged(draws)
        batch, enough = len(draws.shape) - 2, draws.shape[1] >= 4
        values = side_by_side(kept, batch)
        if self.ess is not None:
            found = effective_draws(values, "bulk").nan_to_num(0.0).min().item() if enough else 0.0
            is_reached &= found >= self.ess
            said.append(f"bulk effective draws at least {found:.0f} of {self.ess:g}")
        if self.r_hat is not None:
            found = r_hat(values).nan_to_num(torch.inf).max().item() if enough else torch.inf
            is_reached &= found <= self.r_hat
            said.append(f"R-hat at most {found:.3f} of {self.r_hat:g}")
        for name, most in (self.mcse or {}).items():
            own = side_by_side({name: kept[name]}, batch)
            error = own.flatten(0, 1).std(0) / effective_draws(own, "mean").sqrt() if enough else None
            found = torch.inf if error is None else error.nan_to_num(torch.inf).max().item()
            is_reached &= found <= most
            said.append(f"Monte Carlo error of {name} {found:.2g} of {most:g}")
        if self.seconds is not None:
            over = seconds >= self.seconds
            # a time alone is a limit; beside others it ends the run whatever these are
            is_reached = over or (is_reached and bool(said))
            said.append(f"{seconds:.0f} s of {self.seconds:g}")
        return is_reached, ", ".join(said)
