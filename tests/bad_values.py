"""Values of the wrong kind, and a valid call of every public callable in which each argument is replaced by them.

The callables, their methods and their arguments are found by introspection: a new one without a valid call is missed
by :func:`public_calls`, which raises.
"""

import contextlib
import datetime
import decimal
import importlib
import inspect
import math
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import dgm_infer as dgm
import generators
from dgm_infer import conditioning, kernels, likelihood_free
from dgm_infer.errors import DgmInferError
from tests.oracles import Circle

ROOMS = (
    "dgm_infer",
    "dgm_infer.models",
    "dgm_infer.conditioning",
    "dgm_infer.references",
    "dgm_infer.kernels",
    "dgm_infer.evidence",
    "dgm_infer.likelihood_free",
    "dgm_infer.interop",
    "generators",
)

# What users get from the package and do not make themselves, and what rooms below hand to rooms above.
MADE_HERE = {
    *(
        "Draws",
        "Evidence",
        "Fibre",
        "Flow",
        "Bounds",
        "Comparison",
        "Expectation",
        "RateDistortion",
        "Refined",
        "Modes",
        # a distribution of torch's kind
        "CensoredNormal",
        "noiseless",
        "beneath_noise",
        "CensoredDecoder",
        "DiffusionGenerator",
    ),
    *("ABCDraws", "Report", "Info", "Bound", "Linearisation", "ObservedModel", "Reduction", "InputPosterior"),
    *(
        "DisjointSums",
        "Everything",
        "Function",
        "Selection",
        "LatentVariableModel",
        "MeanOfDecoder",
        "NetworkGenerator",
    ),
    *(
        "HumanPose",
        "Hyperbola",
        "as_generative_model",
        "base_distribution",
        "check_weights",
        "copied",
        "evaluation_copy",
    ),
    *("frozen_copy", "is_discrete", "output_distribution", "reference_tensor", "validate"),
    # to be subclassed
    *("DgmInferError", "DirectedModel", "GenerativeModel", "InputDensity", "Observation", "Operator", "DiscreteModel"),
    *("Kernel", "Method"),
}

# The methods that users call, of any class that has them.
METHODS = {
    *("diagnose", "expectation", "fit", "from_draws", "from_encoder", "from_local_fits", "from_modes", "from_npz"),
    *(
        "from_folder",
        "generate",
        "held_out",
        "interval",
        "laplace",
        "load",
        "of_mixture",
        "published_images",
        "refined",
    ),
    *("sample", "log_prob", "energy", "save", "summary", "start", "take", "to_arviz", "to_dataframe", "covering"),
    *("broad", "standard", "smoothed", "whiten", "unwhiten", "prior_images", "predictive", "simulate_from", "replace"),
}


def _masked() -> Any:
    return np.ma.masked_array(np.ones(2), mask=[True, False])


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)


def _ragged() -> Any:
    return [[1.0], [1.0, 2.0]]


# By kind; a value is made anew for every call.
VALUES: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(2, device="meta"),
    "meta scalar": lambda: torch.empty((), device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": _nested,
    "jagged": _jagged,
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "complex number": lambda: 1j,
    "NaN": lambda: math.nan,
    "NaNs": lambda: torch.full((2,), math.nan),
    "infinite": lambda: math.inf,
    "infinities": lambda: torch.full((2,), math.inf),
    "negative": lambda: -1,
    "zero": lambda: 0,
    "absurd": lambda: 10**13,
    "huge": lambda: 10**20,
    "larger": lambda: 2**70,
    "huge float": lambda: 1e300,
    "tiny": lambda: 1e-320,
    "empty": lambda: torch.empty(0),
    "integers": lambda: torch.ones(2, dtype=torch.int64),
    "8 bits": lambda: torch.ones(2, dtype=torch.uint8),
    "double": lambda: torch.ones(2, dtype=torch.float64),
    "half": lambda: torch.ones(2, dtype=torch.float16),
    "flag": lambda: True,
    "flags": lambda: torch.ones(2, dtype=torch.bool),
    "matrix": lambda: torch.ones(3, 5),
    "masked": _masked,
    "objects": lambda: np.array([object(), None], dtype=object),
    "words": lambda: np.array(["a", "b"]),
    "dates": lambda: np.array(["2026-11-26"], dtype="datetime64[D]"),
    "records": lambda: np.zeros(2, dtype=[("a", float), ("b", int)]),
    "NumPy NaN": lambda: np.float64("nan"),
    "text": lambda: "x",
    "empty text": lambda: "",
    "null": lambda: "a\0b",
    "long text": lambda: "a" * 5000,
    "bytes": lambda: b"x",
    "None": lambda: None,
    "ragged": _ragged,
    "empty list": list,
    "mapping": lambda: {"a": 1},
    "set": lambda: {1},
    "date": lambda: datetime.date(2026, 11, 26),
    "decimal": lambda: decimal.Decimal("NaN"),
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "module": lambda: nn.Linear(2, 2),
    "generator": lambda: (i for i in range(2)),
}


class Call(NamedTuple):
    """A public callable, and arguments with which it works."""

    function: Callable[..., Any]
    valid: dict[str, Any]

    def arguments(self) -> Iterator[str]:
        """The arguments by name that can be replaced; ``*args`` by the name that they have there."""
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                yield name

    def __call__(self, **replaced: Any) -> Any:
        arguments = self.valid | replaced
        parameters = inspect.signature(self.function).parameters
        several = [name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL]
        if not several or several[0] not in arguments:
            return self.function(**arguments)
        # what precedes *args is given by position
        names = list(parameters)[: list(parameters).index(several[0])]
        before = [arguments.pop(name, parameters[name].default) for name in names]
        rest = arguments.pop(several[0])
        return self.function(*before, *(rest if isinstance(rest, tuple) else (rest,)), **arguments)


def _bowl(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x.square().sum(-1)


def _normal_program() -> None:
    import pyro
    from pyro import distributions as dist

    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.5))


def _simulate(z: torch.Tensor) -> torch.Tensor:
    return z + torch.randn(2)


def _sampled(problem: Any) -> Any:
    return dgm.sample(problem, kernels.HMC(0.5, 1), chains=2, warmup=0, draws=4, seed=0, progress=False)


def valid_arguments(folder: Any) -> dict[str, dict[str, Any]]:
    """Arguments of each public callable, by its name, with which it works quickly; those without a row need none."""
    normal = torch.distributions.Normal(0.0, 1.0)
    target, base = dgm.Target(_bowl, 2), dgm.Gaussian(torch.zeros(2), 1.0)
    circle = dgm.condition(Circle().eval(), torch.tensor([2.0]))
    vae = generators.GaussianVAE(3, (8, 8), hidden=(4,)).eval()
    estimate = dgm.log_evidence(target, base, dgm.Elbo(samples=4), chains=2, seed=0, progress=False)
    quick = {"chains": 2, "seed": 0, "progress": False}
    simulation = likelihood_free.Simulation(
        lambda z, rng: z + torch.randn(z.shape, generator=rng), dgm.StandardNormal(2), torch.zeros(2)
    )
    shapes = {"latent_dim": 3, "output_shape": (8, 8), "hidden": (4,)}
    mixture = {"means": torch.zeros(2, 2), "covariances": torch.eye(2).expand(2, 2, 2), "log_weights": torch.zeros(2)}
    small = {"layers": 1, "width": 4, "bins": 2}
    weighted = {"draws": torch.randn(2, 12, 2), "log_weights": torch.zeros(2, 12)}
    run = str(folder / "run")
    dgm.sample(circle, kernels.ConstrainedHMC(0.1, 1), warmup=0, draws=4, run=run, **quick)
    estimate.save(folder / "e.npz")
    _sampled(target).save(folder / "t.nc")
    return {
        "StandardNormal": {"dim": 2},
        "Logistic": {"dim": 2},
        "Uniform": {"dim": 2},
        "Product": {"factors": (dgm.StandardNormal(2),)},
        "Target": {"energy": _bowl, "dim": 2},
        "Gaussian": {"mean": torch.zeros(2), "sd": 1.0},
        "Mixture": {"means": torch.zeros(2, 2), "sd": 1.0},
        "WithNoise": {"model": Circle(), "sd": 0.1},
        "LatentPosterior": {
            "decoder": vae.decoder,
            "images": torch.zeros(8, 8),
            "prior": dgm.StandardNormal(3),
        },
        "pixels": {"mask": torch.tensor([True, False])},
        "blur": {"kernel": 1.0},
        "downsample": {"factor": 2},
        "linear": {"matrix": torch.eye(2)},
        "check": {"model": Circle().eval()},
        "condition": {"model": Circle().eval(), "observed": torch.tensor([2.0])},
        "sample": {"problem": target, "kernel": kernels.HMC(0.5, 1), "warmup": 0, "draws": 4, **quick},
        "log_evidence": {"target": target, "base": base, "method": dgm.Elbo(samples=4), **quick},
        "bidirectional": {
            "target": target,
            "base": base,
            "exact_draws": torch.zeros(2, 2),
            "method": dgm.AIS(temperatures=3, step_size=0.5),
            **quick,
        },
        "refine_base": {
            "target": target,
            "base": base,
            "method": dgm.GibbsTempering(draws=8, warmup=4, step_size=0.5),
            "rounds": 1,
            **quick,
        },
        "rate_distortion": {
            "model": vae,
            "images": torch.zeros(2, 8, 8),
            "beta": [0.0, 1.0],
            "method": dgm.AIS(temperatures=3, step_size=0.5),
            **quick,
        },
        "modes": {"target": target, "starts": 2},
        "image": {"source": torch.zeros(8, 8)},
        "FlowGenerator": {"velocity": generators.VelocityMLP(2, 4), "shape": (2,)},
        "LatentFlow": {"vae": vae, "flow": generators.FlowGenerator(generators.VelocityMLP(3, 4), (3,))},
        "VelocityMLP": {"dim": 2},
        "VelocityUNet": {"shape": (8, 8), "channels": (4,), "middle": 4, "width": 4},
        "from_diffusion": {"denoiser": _noise, "schedule": _levels, "shape": (2,), "steps": 2},
        "compare": {"a": estimate, "b": estimate},
        "collect": {"run": run},
        "resume": {"run": run, "progress": False},
        "extend": {"run": run, "draws": 1, "progress": False},
        "from_simulator": {"simulate": _simulate, "prior": normal},
        "from_pyro": {"program": _normal_program},
        "target_from_pyro": {"program": _normal_program},
        "Simulation": {"simulate": lambda z, rng: z, "prior": dgm.StandardNormal(2), "observed": torch.zeros(2)},
        "sample_abc": {
            "simulation": simulation,
            "method": likelihood_free.ABCRejection(tolerance=1.0),
            "draws": 10,
            "seed": 0,
        },
        "ABCRejection": {"tolerance": 1.0},
        "ABCImportance": {"tolerance": 1.0},
        "ABCMCMC": {"tolerance": 1.0},
        "ABCSMC": {"tolerance": 1.0},
        "ImportanceEstimate": {"log_joint": len, "proposal": len, "n_latents": 1},
        "LaplaceEstimate": {"log_joint": len, "n_latents": 1},
        "ParticleFilter": {"step": len, "log_observation": len, "n_steps": 2, "step_noise": 1},
        "PseudoMarginal": {
            "log_estimate": lambda x, u: -u.square().sum(-1),
            "prior": dgm.StandardNormal(1),
            "noise": dgm.StandardNormal(1),
        },
        "DeepinvReconstructor": {"model": vae},
        "SBIPosterior": {"model": Circle().eval()},
        "base_from_guide": {"target": dgm.target_from_pyro(_normal_program), "guide": _guide(), "steps": 2},
        "GAN": {"latent_dim": 3, "output_shape": (8, 8), "channels": None, "hidden": (4,)},
        "IWAE": shapes,
        "BernoulliVAE": shapes,
        "BernoulliDecoder": shapes,
        "Critic": {"output_shape": (8, 8), "hidden": (4,), "channels": None},
        "GaussianDecoder": shapes | {"sd": 0.1},
        "GaussianEncoder": shapes,
        "GaussianVAE": shapes,
        "LinearGaussian": {"weight": torch.eye(2)},
        "from_module": {"net": nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), "latent": 3},
        "from_hub": {"repository": str(folder), "entry": "net", "latent": 3},
        "load": {"name": "digits_vae"},
        "save": {"model": vae, "path": folder / "vae.safetensors"},
        "register": {"cls": generators.GaussianVAE},
        # ------------------------------------------------------------------------------------------------------ methods
        "Gaussian.of_mixture": mixture,
        "Gaussian.fit": {"target": target, "steps": 2, "samples": 2},
        "Gaussian.from_local_fits": {"target": target, "starts": 2, "steps": 2, "samples": 2},
        "Gaussian.from_encoder": {"encoder": vae.encoder, "images": torch.zeros(2, 64)},
        "Gaussian.laplace": {"target": target},
        "Gaussian.broad": {"target": target, "starts": 2},
        "Gaussian.standard": {"target": target},
        "Gaussian.covering": {"found": dgm.modes(target, starts=2)},
        "Mixture.from_local_fits": {"target": target, "starts": 2, "steps": 2, "samples": 2},
        "Mixture.from_modes": {"target": target, "starts": 2},
        "Flow.fit": {"target": target, "start": base, "steps": 2, "samples": 4, **small},
        "Flow.from_draws": {"draws": torch.randn(2, 12, 2), "steps": 2, "samples": 4, **small},
        "refined": weighted,
        "Draws.load": {"path": folder / "t.nc"},
        "Evidence.load": {"path": folder / "e.npz"},
        "Evidence.expectation": {"f": lambda x: x},
        "RateDistortion.load": {"path": folder / "r.npz"},
        "IWAE.from_npz": {"folder": folder},
        "IWAE.published_images": {"folder": folder},
        "HumanPose.from_folder": {"folder": folder},
        "Fibre.start": {"chains": 2, "rng": torch.Generator()},
        "SBIPosterior.sample": {"sample_shape": (1,), "x": torch.tensor([2.0])},
        "DeepinvReconstructor.sample": {"y": torch.zeros(1, 1, 8, 8), "physics": None},
        "predictive": {},
        "generate": {"n": 2, "seed": 0},
        "start": {"chains": 2, "rng": torch.Generator()},
        "take": {"problems": torch.tensor([0])},
        "log_prob": {"u": torch.zeros(2), "x": torch.zeros(2)},
        "energy": {"u": torch.zeros(2), "x": torch.zeros(2)},
        "whiten": {"x": torch.zeros(2)},
        "unwhiten": {"v": torch.zeros(2)},
        "save method": {"path": folder / "saved"},
        "smoothed": {"beta": 10.0},
        "prior_images": {"n": 2},
    }


def _noise(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return 0.1 * x


def _levels(t: float) -> tuple[float, float]:
    return 1 - 0.9 * t, 0.9 * t


def _guide() -> Any:
    from pyro.infer.autoguide import AutoDiagonalNormal

    return AutoDiagonalNormal


def instances() -> dict[str, Any]:
    """A small valid object of every class whose methods are called, by the class's name."""
    target, base = dgm.Target(_bowl, 2), dgm.Gaussian(torch.zeros(2), 1.0)
    vae = generators.GaussianVAE(3, (8, 8), hidden=(4,)).eval()
    return {
        "Draws": _sampled(target),
        "Evidence": dgm.log_evidence(target, base, dgm.Elbo(samples=4), chains=2, seed=0, progress=False),
        "Fibre": dgm.condition(Circle().eval(), torch.tensor([2.0])),
        "Gaussian": base,
        "Mixture": dgm.Mixture(torch.zeros(2, 2), 1.0),
        "StandardNormal": dgm.StandardNormal(2),
        "Logistic": dgm.Logistic(2),
        "Product": dgm.Product(dgm.StandardNormal(1), dgm.Logistic(1)),
        "Uniform": kernels.Uniform(2),
        "LatentPosterior": conditioning.LatentPosterior(vae.decoder, torch.zeros(1, 8, 8), dgm.StandardNormal(3)),
        "InputPosterior": dgm.condition(Circle().eval(), torch.tensor([2.0]), tolerance=0.1),
        "GaussianVAE": vae,
        "NetworkGenerator": generators.from_module(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), 3),
    }


def public_calls(folder: Any) -> dict[str, Call]:
    """All public callables of :data:`ROOMS`, and methods of objects, with valid arguments.

    Raises:
        AssertionError: a required argument of one has no valid value here.
    """
    valid, objects, found = valid_arguments(folder), instances(), {}
    for room in map(importlib.import_module, ROOMS):
        for name in room.__all__:
            item = getattr(room, name)
            if not callable(item):
                continue
            if inspect.isclass(item):
                found |= _methods(name, item, objects.get(name), valid)
            if name not in MADE_HERE and not issubclass(item if inspect.isclass(item) else int, DgmInferError):
                found[name] = _call(name, item, valid.get(name, {}))
    return found


def _methods(name: str, cls: type, instance: Any, valid: dict[str, dict[str, Any]]) -> dict[str, Call]:
    """Its methods in :data:`METHODS`: of the class, those that make one; of an object, the others."""
    found = {}
    # Fibre.take is of inner loops
    for method in sorted((METHODS - ({"take"} if name == "Fibre" else set())) & set(dir(cls))):
        of_class = isinstance(inspect.getattr_static(cls, method), classmethod | staticmethod)
        if not of_class and instance is None:
            continue
        function = getattr(cls if of_class else instance, method)
        key = f"{name}.{method}"
        known = inspect.signature(function).parameters
        arguments = valid.get("save method" if method == "save" else method, {})
        # a row of its own may have arguments that are passed on
        own = valid.get(key, {name: value for name, value in arguments.items() if name in known})
        found[key] = _call(key, function, own)
    return found


def _call(name: str, function: Callable[..., Any], valid: dict[str, Any]) -> Call:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds and p.name not in valid]
    assert not missing, f"{name}: give {', '.join(missing)} a value in valid_arguments()"
    return Call(function, valid)


class NoEnd(BaseException):
    """A call that takes too long."""


@contextlib.contextmanager
def bounded(seconds: int, memory: int) -> Iterator[None]:
    """Raise :class:`NoEnd` after a time, and refuse allocations beyond these bytes."""

    def late(*_: Any) -> None:
        raise NoEnd

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, limits[1]))
    # again every second: what is raised within a callback of the interpreter is lost
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Kinds that no argument takes for a number, a name or a path, but those of TAKEN.
NEVER = {
    *("sparse", "compressed", "meta", "meta scalar", "quantized", "nested", "jagged", "complex", "complex number"),
    *("masked", "objects", "words", "dates", "records", "NumPy NaN", "NaN", "null", "long text", "bytes", "date"),
    *("decimal", "object", "class", "set", "generator", "ragged"),
}
# Arguments that take them, and why: names of what is looked up later, values handed on to the user's own program, and a
# callable.
TAKEN: dict[tuple[str, str], set[str]] = {
    ("SBIPosterior", "names"): {"null", "long text"},
    ("from_module", "select"): {"null", "long text"},
    ("from_module", "key"): {"null", "long text"},
    ("SBIPosterior", "observe"): {"class"},
    ("Alternating", "blocks"): {"ragged"},
    ("save", "notes"): {"NaN", "NumPy NaN"},
    ("check", "observe"): {"class"},
    ("from_diffusion", "schedule"): {"class"},
    ("Fibre.start", "report"): {"module"},
    **{(name, "args"): set(VALUES) for name in ("from_pyro", "from_simulator", "target_from_pyro")},
}


def answer_to(call: Callable[..., Any], argument: str, kind: str, seconds: int = 10) -> str | None:
    """What is wrong with the answer to a value; None for a DgmInferError of one line, and for one that may be taken."""
    foretold = False

    def hear(message: Any, *_: Any) -> None:
        nonlocal foretold
        if "will take about" in str(message):
            foretold = True
            # enough said: its end is not waited for
            signal.setitimer(signal.ITIMER_REAL, 1, 1)

    try:
        with bounded(seconds, 16 * 2**30), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = hear
            result = call(**{argument: VALUES[kind]()})
    except DgmInferError as error:
        message = str(error)
        return None if "\n" not in message and len(message) <= 400 else f"long: {message[:200]}"
    except NoEnd:
        return None if foretold else "no end"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    # a report of what is wrong is an answer too
    told = isinstance(result, conditioning.Report) and bool(result.findings)
    return "taken" if kind in NEVER and not told else None
