"""Pyro programs as targets: their latent variables on R^D, for evidence methods and kernels."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import array, floating_type, mapping
from ..errors import ArgumentError, ModelError, cause
from ..extras import extra
from ..sampling.predictive import CalledProgram
from ..target import Target
from .charts import chart_of, has_chart, is_point
from .intercept import Promotion
from .log_densities import TOLERATED, log_density, lost_mass, warn_of_lost_mass

with extra("pyro"), warnings.catch_warnings():
    # torch.jit warns about this Python version; only parts of Pyro that are unused here need it
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    from pyro import poutine
    from pyro.distributions.util import scale_and_mask
    from pyro.infer import config_enumerate
    from pyro.infer.mcmc.util import TraceEinsumEvaluator
    from pyro.poutine.messenger import Messenger
    from pyro.poutine.subsample_messenger import _Subsample

__all__ = ["PyroTarget", "target_from_pyro"]


def target_from_pyro(
    program: Callable[..., Any],
    *args: Any,
    observed: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> "PyroTarget":
    """A Pyro program with its data as a target: ``exp(-energy)`` integrates to the evidence ``p(observed)``.

    Continuous latent variables are mapped to R^D by the standard bijection of their support, angles to points of the
    plane, with priors written in these coordinates; discrete ones that Pyro can enumerate are summed out. From the
    program to its evidence::

        target = dgm.target_from_pyro(program, y)
        base = dgm.interop.base_from_guide(target, AutoMultivariateNormal)
        evidence = dgm.log_evidence(target, base)

    Args:
        program: a callable with ``pyro.sample`` statements, called as ``program(*args, **kwargs)``.
        observed: values by name, for sample statements without their own ``obs=``.
        dtype: floating-point type of the computation; None for float64, whatever that of the program's numbers.

    Raises:
        ArgumentError: a name in ``observed`` is not a sample statement of the program, or a deterministic one, which
            has no likelihood; or ``dtype`` is not a floating-point type.
        ModelError: the program fails, has no latent variables, draws random numbers outside ``pyro.sample``, uses
            mini-batches, or has a discrete latent variable that cannot be summed out.
    """
    if not callable(program):
        raise ArgumentError(f"target_from_pyro({type(program).__name__}): expected a Pyro program, a callable")
    dtype = torch.float64 if dtype is None else floating_type("target_from_pyro", "dtype", dtype)
    given = mapping("target_from_pyro", "observed", observed, "{'y': data}")
    data = {name: array("target_from_pyro", f"observed[{name!r}]", value) for name, value in given.items()}
    return PyroTarget(program, args, kwargs, data, dtype)


class Site(NamedTuple):
    """Position of a latent variable in the vector of all of them."""

    start: int
    stop: int
    shape: torch.Size
    """Shape of its unconstrained value."""


class PyroTarget(Target):
    """The unconstrained posterior of a Pyro program: see :func:`target_from_pyro`, which makes it.

    ``energy(x) = -log p(observed, z) - log|dz/dx|``, ``[..., D] -> [...]``; batch shape ``()``.

    Attributes:
        observed_data: the observations by name.
        lost_mass: the share of its prior that no coordinate reaches, by name of a variable that loses more than 0.001.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        observed: dict[str, Any],
        dtype: torch.dtype = torch.float64,
    ):
        name = getattr(program, "__name__", type(program).__name__)
        self._args, self._kwargs, self.dtype = args, kwargs, dtype
        self.source = CalledProgram(program, args, kwargs, tuple(observed))
        if observed:
            program = poutine.condition(program, data=observed)
        self._program = program
        plain = self._first_trace(program, name)
        _check(plain, name, observed)
        self.sites, dim = _sites(plain)
        # what pyro.factor observes is empty
        self.observed_data = {
            key: node["value"] for key, node in plain.nodes.items() if _is_observed(node) and node["value"].numel()
        }
        if not self.sites:
            raise ModelError(
                f"the Pyro program {name} has no continuous latent variables: nothing is left to integrate"
            )
        super().__init__(None, dim)
        self._enumerate(plain)
        self._check_randomness(name)
        self.lost_mass = self._lost_mass()
        warn_of_lost_mass(f"the Pyro program {name}", self.lost_mass, 5)
        self.vectorised = self._try_vmap(name)

    def energy(self, x):
        rows = x.reshape(-1, self.dim)
        if self.vectorised:
            energy = torch.func.vmap(self._energy_of_one)(rows)
        else:
            energy = torch.stack([self._energy_of_one(row) for row in rows])
        return energy.reshape(x.shape[:-1])

    def latents(self, x):
        """Latent and deterministic variables by name in their own supports, each ``[..., *shape]``."""
        with torch.no_grad():
            rows = x.reshape(-1, self.dim)
            if self.vectorised:
                values = torch.func.vmap(self._variables_of_one)(rows)
            else:
                each = [self._variables_of_one(row) for row in rows]
                values = {name: torch.stack([row[name] for row in each]) for name in each[0]}
        return {name: value.reshape((*x.shape[:-1], *value.shape[1:])) for name, value in values.items()}

    def initial_draws(self, n, rng):
        """Standard normal draws in the dtype and on the device of the program."""
        x = torch.randn(n, self.dim, generator=rng, dtype=self.dtype, device=rng.device)
        return x.to(self.device)

    def _trace(self, program: Callable[..., Any], x: Tensor) -> tuple[Any, Tensor]:
        """One run of the program with its latent variables taken from ``x [D]``: its trace, and ``log|dz/dx|``."""
        with pyro.validation_enabled(False), Promotion(x.dtype, x.device), _Unconstrained(self.sites, x) as messenger:
            trace = poutine.trace(program).get_trace(*self._args, **self._kwargs)
        for name, density in messenger.densities.items():
            # in place of the density at the value, which is rounded
            node: Any = trace.nodes[name]
            node["unscaled_log_prob"] = density
            node["log_prob"] = scale_and_mask(density, node["scale"], node["mask"])
            node["log_prob_sum"] = node["log_prob"].sum()
        return trace, messenger.log_jacobian

    def _energy_of_one(self, x: Tensor) -> Tensor:
        trace, log_jacobian = self._trace(self._enumerated, x)
        with pyro.validation_enabled(False), Promotion(x.dtype, x.device):
            return -self._evaluator.log_prob(trace) - log_jacobian

    def _variables_of_one(self, x: Tensor) -> dict[str, Tensor]:
        trace, _ = self._trace(self._program, x)
        return {
            name: site["value"]
            for name, site in trace.nodes.items()
            if name in self.sites or (site["type"] == "sample" and site["infer"].get("_deterministic"))
        }

    def _first_trace(self, program: Callable[..., Any], name: str) -> Any:
        # Pyro draws from the global generators
        with torch.random.fork_rng(devices=[]), pyro.validation_enabled(True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="pyro")
            torch.manual_seed(0)
            try:
                trace = poutine.trace(program).get_trace(*self._args, **self._kwargs)
                # of deterministic values there is no density
                trace.compute_log_prob(_has_density)
            except Exception as error:
                raise ModelError(f"the Pyro program {name} fails: {cause(error)}") from error
        return trace

    def _enumerate(self, plain: Any) -> None:
        """Prepare the sums over discrete latent variables, if there are any."""
        latent = [site for site in plain.nodes.values() if _is_latent(site)]
        discrete = any(site["fn"].has_enumerate_support for site in latent)
        depth = max((-frame.dim for site in plain.nodes.values() for frame in _frames(site)), default=0)
        self._enumerated = poutine.enum(config_enumerate(self._program), -1 - depth) if discrete else self._program
        self.device = next(site["log_prob"].device for site in plain.nodes.values() if "log_prob" in site)
        probe = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            trace, _ = self._trace(self._enumerated, probe)
            for key in self.sites:
                before, after = plain.nodes[key]["value"].shape, trace.nodes[key]["fn"].shape()
                if torch.Size(after).numel() != before.numel():
                    raise ModelError(
                        f"site {key!r} of the Pyro program depends on a discrete latent variable and cannot be summed "
                        "over it: marginalise by hand, for example with MixtureSameFamily"
                    )
            with pyro.validation_enabled(False), Promotion(self.dtype, self.device):
                self._evaluator = TraceEinsumEvaluator(trace, discrete, depth if discrete else None)

    def _check_randomness(self, name: str) -> None:
        probe = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            energies = torch.stack([self._energy_of_one(probe) for _ in range(2)])
        if (energies[0] - energies[1]).nan_to_num(0, 0, 0) != 0:
            raise ModelError(
                f"the Pyro program {name} gives different densities for the same latent variables: draw its random "
                "numbers with pyro.sample"
            )

    def _lost_mass(self) -> dict[str, float]:
        """The share of its prior that no coordinate reaches, by name, at one point."""
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), pyro.validation_enabled(False):
            torch.manual_seed(0)
            trace, _ = self._trace(self._program, torch.zeros(self.dim, dtype=self.dtype, device=self.device))
            shares = {key: lost_mass(fn, chart_of(fn)) for key in self.sites if (fn := trace.nodes[key]["fn"])}
        return {key: share for key, share in shares.items() if share > TOLERATED}

    def _try_vmap(self, name: str) -> bool:
        """Whether the program can be vectorised over points."""
        rows = torch.linspace(-0.5, 0.5, 3 * self.dim, dtype=self.dtype, device=self.device).reshape(3, self.dim)
        try:
            with torch.no_grad():
                together = torch.func.vmap(self._energy_of_one)(rows)
                torch.func.vmap(self._variables_of_one)(rows)
            reason = ""
        except Exception as error:
            together, reason = None, cause(error)
        with torch.no_grad():
            alone = torch.stack([self._energy_of_one(row) for row in rows])
        if together is not None and torch.allclose(together, alone, rtol=1e-4, atol=1e-4, equal_nan=True):
            return True
        warnings.warn(
            f"the Pyro program {name} cannot be vectorised and runs once for every chain, which is slow: "
            + (reason or "its densities of several points at once differ from those of each point alone"),
            stacklevel=4,
        )
        return False


class _Unconstrained(Messenger):
    """Gives latent variables their values ``z(x)``, with the chart of their *current* distribution.

    A support may depend on other variables (``Uniform(0, sigma)``): a bijection kept from an earlier run would map to
    another set.

    Attributes:
        densities: ``log p(z(x))`` by name, each ``[*batch_shape]``.
        log_jacobian: ``log|dz/dx|`` of all variables.
    """

    def __init__(self, sites: Mapping[str, Site], x: Tensor):
        super().__init__()
        self.sites, self.x = sites, x
        self.densities: dict[str, Tensor] = {}
        self.log_jacobian = x.new_zeros(())

    def _pyro_sample(self, msg):
        site = self.sites.get(msg["name"])
        if site is None or msg["is_observed"]:
            return
        x, chart = self.x[site.start : site.stop].reshape(site.shape), chart_of(msg["fn"])
        jacobian = chart.log_jacobian(x)
        self.densities[msg["name"]] = log_density(msg["fn"], chart, x) - jacobian
        self.log_jacobian = self.log_jacobian + jacobian.sum()
        msg["value"], msg["done"] = chart.value(x), True


def _sites(trace: Any) -> tuple[dict[str, Site], int]:
    """Continuous latent variables in the order of the program, and their total dimension."""
    sites, start = {}, 0
    for name, node in trace.nodes.items():
        if not _is_latent(node) or node["fn"].has_enumerate_support:
            continue
        shape = chart_of(node["fn"]).shape
        stop = start + math.prod(shape)
        sites[name] = Site(start, stop, shape)
        start = stop
    return sites, start


def _is_latent(node: Mapping[str, Any]) -> bool:
    is_free = node["type"] == "sample" and not node["is_observed"] and not isinstance(node["fn"], _Subsample)
    return is_free and not is_point(node["fn"])


def _has_density(name: str, node: Any) -> bool:
    return not is_point(node["fn"])


def _is_observed(node: Mapping[str, Any]) -> bool:
    return node["type"] == "sample" and node["is_observed"] and not _is_deterministic(node)


def _is_deterministic(node: Mapping[str, Any]) -> bool:
    return bool(node["infer"].get("_deterministic")) or is_point(node["fn"])


def _frames(node: Mapping[str, Any]) -> list[Any]:
    return [frame for frame in node.get("cond_indep_stack", ()) if frame.vectorized]


def _check(trace: Any, program: str, observed: Mapping[str, Any]) -> None:
    names = [name for name, node in trace.nodes.items() if node["type"] == "sample"]
    for name in observed:
        if name not in names:
            raise ArgumentError(f"observed: {name!r} is not a sample statement of the program (it has {names})")
    for name, node in trace.nodes.items():
        is_own = node["type"] == "sample" and node["is_observed"] and not node["infer"].get("_deterministic")
        if name in observed or is_own:
            _check_likelihood(name, node)
    for name, node in trace.nodes.items():
        if node["type"] != "sample":
            continue
        fn = node["fn"]
        if isinstance(fn, _Subsample):
            if fn.subsample_size is not None and fn.subsample_size < fn.size:
                raise ModelError(
                    f"plate {name!r} of the Pyro program {program} takes {fn.subsample_size} of {fn.size} data at a "
                    "time: evidence needs them all, omit subsample_size"
                )
        elif _is_latent(node) and not fn.has_enumerate_support and not has_chart(fn):
            raise ModelError(
                f"site {name!r} of the Pyro program {program} is discrete without a finite support, or has no "
                f"bijection from the real numbers ({type(fn).__name__}), and cannot be summed out: marginalise by hand"
            )


def _check_likelihood(name: str, node: Mapping[str, Any]) -> None:
    if _is_deterministic(node):
        raise ArgumentError(
            f"observed: {name!r} is a deterministic statement, which has no likelihood: condition(from_pyro(...)) "
            "samples its posterior; evidence needs an error model, a sample statement around it"
        )
