"""What ``bench ablations`` runs: problems of other kinds than those that numbers were chosen on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import dgm_infer as dgm
import generators
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence import Evidence, Method
from dgm_infer.sampling.chain_groups import side_by_side
from dgm_infer.sampling.inference_data import effective_draws, r_hat

from ..problems.families import FAMILIES, HEAVY
from ..problems.known import known_target
from ..problems.mixtures import NormalMixture
from ..problems.regressions import LogisticRegression
from ..problems.small import eight_schools, folded, squares, wide_mass
from .image_problems import PROBLEMS as IMAGES
from .image_problems import top_half
from .problems import Problem as Published
from .series_problems import SERIES

__all__ = ["PROBLEMS", "Problem"]

# Log Z of the regression, by a million weights of a widened Laplace approximation.
_REGRESSION = -85.910


@dataclass(frozen=True)
class Problem:
    """Something to run with and without a switch.

    Args:
        room: ``"sampling"``, ``"conditioning"`` or ``"evidence"``, which switches are measured on it.
        words: what it is, in a line.
        measure: runs it with ``seed, chains, draws``; ``rate`` (smallest effective draws per second), ``seconds``,
            ``r_hat``, ``findings`` and, where the truth is known, ``error``: None for what it does not have.
    """

    room: str
    words: str
    measure: Callable[[int, int, int], dict[str, Any]]


def _sampled(
    make: Callable[[], Any], kernel: Any = None, error: Callable[[dgm.Draws], float] | None = None
) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures ``dgm.sample(problem)``."""

    def measure(seed: int, chains: int, draws: int) -> dict[str, Any]:
        problem, started = make(), time.process_time()
        made = dgm.sample(problem, kernel, chains=chains, draws=draws, seed=seed, progress=False)
        seconds = time.process_time() - started
        variables = made.latents or {"inputs": made.inputs}
        values = side_by_side(variables, len(made.shape) - 2)  # type: ignore[arg-type]
        values = values[..., (values != values[:1, :1]).flatten(0, -2).any(0)]
        # interrupted runs are short, which is not due to the switch
        findings = [each.what.split(",")[0] for each in made.diagnose() if each.severity != "imprecise"]
        return {
            "rate": effective_draws(values, "bulk").min().item() / seconds,
            "seconds": seconds,
            "r_hat": r_hat(values).max().item(),
            "draws": made.shape[1],
            "kernel": type(made.kernel).__name__,
            "findings": findings,
            "error": None if error is None else error(made),
        }

    return measure


def _estimated(
    target: Callable[[], dgm.Target],
    base: Callable[[dgm.Target], dgm.Gaussian],
    truth: float,
    method: Method | None = None,
) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures ``dgm.log_evidence(target, base, method)``; draws per chain are the method's own."""

    def problem() -> tuple[dgm.Target, dgm.Gaussian]:
        made = target()
        return made, base(made)

    return _evidence(problem, lambda found: abs(float(found.log_z) - truth), method=method)


def _covered(family: str, n: int) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures adaptive SMC on n problems of log Z = 0: the error is the share whose 95 % interval leaves it out."""

    def left_out(found: Evidence) -> float:
        low, high = found.interval()
        return 1 - float(((low < 0) & (high > 0)).double().mean())

    return _evidence(lambda: HEAVY[family](n), left_out, method=dgm.SMC(), coverage=False)


def _annealed(family: str, n: int) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures annealed importance sampling on n problems of log Z = 0: the root mean square error."""
    make = (FAMILIES | HEAVY)[family]
    return _evidence(lambda: make(n), lambda found: float(found.log_z.square().mean().sqrt()), method=dgm.AIS())


def _evidence(
    problem: Callable[[], tuple[dgm.Target, dgm.Gaussian]], error: Callable[[Evidence], float], **options: Any
) -> Callable[[int, int, int], dict[str, Any]]:
    """Measures ``dgm.log_evidence(target, base, **options)``."""

    def measure(seed: int, chains: int, draws: int) -> dict[str, Any]:
        target, base = problem()
        started = time.process_time()
        found = uninterrupted(dgm.log_evidence(target, base, chains=chains, seed=seed, progress=False, **options))
        return {
            "rate": None,
            "seconds": time.process_time() - started,
            "r_hat": None,
            "draws": found.log_weights.shape[1],
            "kernel": found.method,
            "findings": [each.what.split(",")[0] for each in found.diagnose() if each.severity != "imprecise"],
            "error": error(found),
            "claimed": float(found.std_error.square().mean().sqrt()),
        }

    return measure


def _wide(target: dgm.Target) -> dgm.Gaussian:
    return dgm.Gaussian(torch.zeros(target.dim, dtype=torch.float64), 3.0)


def _image(name: str, n: int) -> Callable[[], Any]:
    return lambda: IMAGES[name].conditioned(n).fibre()


def _digits_gan() -> Any:
    """Four digits that a generator without noise makes, from 9 of their pixels."""
    model = generators.load("digits_gan")
    u = model.input_density.sample((4,), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[1::3, 1::3] = True
    with torch.no_grad():
        digits = model(u).reshape(4, *model.output_shape)
    return dgm.condition(model, digits, observe=dgm.pixels(mask.expand(tuple(model.output_shape))))


def _half(name: str, n: int) -> Callable[[], Any]:
    """Upper halves of images that a generator with noise makes, given its latents' posterior."""

    def make() -> Any:
        model = generators.load(name)
        images = model.generate(n, seed=3).images
        if name.endswith("iwae"):
            images = (images > torch.rand(images.shape, generator=torch.Generator().manual_seed(0))).to(images)
        return dgm.condition(model, images, observe=dgm.pixels(top_half(tuple(model.output_shape))))

    return make


class _Parabola(nn.Module):
    """``x = (z - 0.3)^2`` with noise: two latents for every image."""

    def forward(self, z: Tensor) -> Independent:
        return Independent(Normal((z - 0.3).square(), torch.tensor(0.1, dtype=z.dtype)), 1)


def _roots() -> Any:
    return generators.LatentPosterior(_Parabola().double(), torch.ones(1, dtype=torch.float64), dgm.StandardNormal(1))


def _roots_error(draws: dgm.Draws) -> float:
    """Error of the mass of the larger root's mode, by quadrature."""
    z = torch.linspace(-6, 6, 24001, dtype=torch.float64).unsqueeze(-1)
    weight = torch.softmax(-_roots().energy(z), 0)
    assert isinstance(draws.inputs, Tensor)
    return ((draws.inputs[..., 0] > 0.3).double().mean() - weight[z[:, 0] > 0.3].sum()).abs().item()


def _mixture() -> NormalMixture:
    return NormalMixture.spread(6, 5, 6, seed=1)


def _mixture_error(draws: dgm.Draws) -> float:
    """Error of the means, in standard deviations of the mixture."""
    means, x = _mixture().means, draws.inputs
    assert isinstance(x, Tensor)
    sd = (means.var(0, unbiased=False) + 1).sqrt()
    return ((x.double().mean((0, 1)) - means.mean(0)) / sd).abs().max().item()


def _folded_error(draws: dgm.Draws) -> float:
    """Error of the mass of the wide mode."""
    assert isinstance(draws.inputs, Tensor)
    share = (draws.inputs[..., 0] > 0).double().mean((0, 1))
    return (share - wide_mass()).abs().max().item()


PROBLEMS: dict[str, Problem] = {
    "digits": Problem("sampling", "halves of four digits, additive noise", _sampled(_image("digits", 4))),
    "mnist": Problem("sampling", "half of a larger digit, fully connected", _sampled(_image("mnist_vae", 1))),
    "gan": Problem("sampling", "9 pixels of four generated digits, no noise", _sampled(_digits_gan)),
    "mild series": Problem("sampling", "50 steps of prey and predators, noise added", _sampled(SERIES["mild"].fibre)),
    "series": Problem(
        "sampling", "10 steps of prey and predators, given exactly", _sampled(Published("lotka_volterra", 20).fibre)
    ),
    "quantiles": Problem(
        "sampling", "50 draws of a generalised lambda", _sampled(Published("generalised_lambda", 50).fibre)
    ),
    "folded": Problem(
        "sampling", "one number with a wide and a narrow mode; error of the mass of one",
        _sampled(folded, error=_folded_error),
    ),
    "squares": Problem("sampling", "four squares with noise, sixteen modes", _sampled(squares)),
    "latent flow": Problem(
        "sampling", "half of an MNIST digit, a flow of latents", _sampled(_half("mnist_latent_flow", 1))
    ),
    "garment": Problem(
        "sampling", "half of a garment, a flow of latents", _sampled(_half("fashion_latent_flow", 1))
    ),
    "binary": Problem("sampling", "halves of four digits of 0 and 1, an IWAE", _sampled(_half("digits_iwae", 4))),
    "roots": Problem(
        "sampling", "two latents for an image; error of the mass of one", _sampled(_roots, error=_roots_error)
    ),
    "schools": Problem("sampling", "eight schools, a Pyro program", _sampled(eight_schools)),
    "seeds": Problem("sampling", "random effects of seeds", _sampled(lambda: known_target("seeds", None).target)),
    "mixture": Problem(
        "sampling", "six normals in five dimensions, ModeJumps; error of the means in standard deviations",
        _sampled(_mixture, dgm.ModeJumps(), _mixture_error),
    ),
    "normals, Laplace base": Problem(
        "evidence", "four normals in three dimensions, the base at one of them; error of log Z",
        _estimated(lambda: NormalMixture.spread(4, 3, 4, seed=2), dgm.Gaussian.laplace, 0.0),
    ),
    "normals, Gibbs": Problem(
        "evidence", "the same by Gibbs tempering",
        _estimated(lambda: NormalMixture.spread(4, 3, 4, seed=2), dgm.Gaussian.laplace, 0.0, dgm.GibbsTempering()),
    ),
    "normals, wide base": Problem(
        "evidence", "four normals in eight dimensions, a base that covers them; error of log Z",
        _estimated(lambda: NormalMixture.spread(4, 8, 3, seed=3), _wide, 0.0),
    ),
    "regression": Problem(
        "evidence", "logistic regression of 20 weights from its prior; error of log Z",
        _estimated(
            lambda: LogisticRegression.simulated(200, 19, 0),
            lambda target: dgm.Gaussian(torch.zeros(target.dim, dtype=torch.float64), 1.0), _REGRESSION,
        ),
    ),
    **{
        name: Problem(
            "evidence", f"{name}, tails heavier than a narrow base's, SMC; error: share of 200 outside 95 % intervals",
            _covered(name, 200),
        )
        for name in HEAVY
    },
    **{
        f"{name.replace(',', '')} annealed": Problem(
            "evidence", f"{name}, AIS; error of log Z, root mean square of 100", _annealed(name, 100)
        )
        for name in FAMILIES | HEAVY
    },
    "conv gan": Problem(
        "conditioning", "16 pixels of a larger digit, a convolutional generator without noise",
        _sampled(_image("gan", 1), dgm.ConstrainedHMC()),
    ),
    "exact series": Problem(
        "conditioning", "10 steps of prey and predators, given exactly",
        _sampled(Published("lotka_volterra", 20).fibre, dgm.ConstrainedHMC()),
    ),
    "exact quantiles": Problem(
        "conditioning", "50 draws of a generalised lambda, given exactly",
        _sampled(Published("generalised_lambda", 50).fibre, dgm.ConstrainedHMC()),
    ),
}  # fmt: skip
"""By name; of other kinds than those that numbers were chosen on."""
