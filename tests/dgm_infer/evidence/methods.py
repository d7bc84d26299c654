"""What tests of all methods of evidence share: the registered ones with small sizes, and one as a user defines it."""

import dataclasses
import inspect
from dataclasses import dataclass

import dgm_infer as dgm
from dgm_infer import evidence
from dgm_infer.evidence.estimators import log_mean
from dgm_infer.evidence.method import Outcome
from dgm_infer.settings import Settings
from tests.known_evidence import known_gaussian

REGISTERED = [
    value
    for name in evidence.__all__
    if inspect.isclass(value := getattr(evidence, name)) and dataclasses.is_dataclass(value) and hasattr(value, "run")
]

# Sizes under which a method takes a fraction of a second; fields that a method does not have are left out.
SMALL = {
    "temperatures": 40,
    "pilot_temperatures": 20,
    "draws": 60,
    "warmup": 30,
    "samples": 60,
    "parts": 2,
    "fit_steps": 40,
}
SMALL["tempering"] = dgm.GibbsTempering(draws=60, warmup=0, pilot_temperatures=20)
# and those that are enough where nothing is estimated
TINY = {
    "temperatures": 10,
    "pilot_temperatures": 10,
    "draws": 12,
    "warmup": 20,
    "samples": 12,
    "parts": 2,
    "fit_steps": 5,
}
TINY["tempering"] = dgm.GibbsTempering(draws=12, warmup=0, pilot_temperatures=10)


@dataclass(frozen=True, eq=False)
class Weighted(Settings):
    """A user's own method: the mean of importance weights, one per chain."""

    samples: int = 50

    @property
    def status(self):
        return "unbiased"

    def run(self, path, chains, rng, progress):
        v = path.draws(chains * self.samples, rng)
        log_weights = -path.differences(v).unflatten(0, (chains, self.samples))
        draws = path.base.unwhiten(v).unflatten(0, (chains, self.samples))
        each = log_mean(log_weights.movedim(1, 0)).log_z
        progress.update("importance")
        return Outcome(log_mean(each), draws, log_weights, {})


@dataclass(frozen=True, eq=False)
class Inflated(Weighted):
    """The same with a planted bias of half a nat."""

    def run(self, path, chains, rng, progress):
        outcome = super().run(path, chains, rng, progress)
        estimate = outcome.estimate._replace(log_z=outcome.estimate.log_z + 0.5)
        return outcome._replace(estimate=estimate)


# where a temperature is a chain, or has states of its own
FEWER = {
    dgm.ParallelTempering: {"temperatures": 5, "draws": 32},
    dgm.evidence.ImportanceTempering: {
        "tempering": dgm.SimulatedTempering(
            temperatures=6, schedule="sigmoid", draws=60, warmup=10, pilot_temperatures=20
        )
    },
}


def small(method: type, sizes=SMALL):
    """The method with small sizes."""
    names = {field.name for field in dataclasses.fields(method)}
    sizes = sizes | FEWER.get(method, {})
    return method(**{name: value for name, value in sizes.items() if name in names})


def estimated(method, *, problems=(2,), chains=16, seed=3, **options):
    known = known_gaussian(2, problems)
    estimate = dgm.log_evidence(known.target, known.base, method, chains=chains, seed=seed, progress=False, **options)
    return known, estimate


KINDS = [*REGISTERED, Weighted]


def within(known, estimate):
    """Whether estimates are where their status says, up to five standard errors."""
    z = (estimate.log_z - estimate.bias.nan_to_num(0) - known.log_z) / estimate.std_error
    if estimate.status == "lower":
        return bool(((estimate.log_z - known.log_z) / estimate.std_error <= 5).all())
    return bool((z.abs() <= 5).all())
