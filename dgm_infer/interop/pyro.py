"""Pyro programs as targets: their latent variables on R^D, for evidence methods and kernels."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import floating_type
from ..errors import ArgumentError, ModelError, cause, warn
from ..sampling.predictive import CalledProgram, importing_pyro
from ..target import Target
from .charts import chart_of, has_chart
from .intercept import Interception
from .log_densities import TOLERATED, log_density, lost_mass, warn_of_lost_mass
from .statements import (
    as_data,
    conditioned,
    first_run,
    has_data,
    imputed,
    is_deterministic,
    is_latent,
    is_likelihood,
    is_variable,
    run,
)
from .straight_line import Parts, Rows
from .tape import Draw, Tape, present_line

with importing_pyro():
    import pyro
    from pyro import poutine
    from pyro.distributions.util import scale_and_mask
    from pyro.infer.mcmc.util import TraceEinsumEvaluator
    from pyro.ops.contract import contract_to_tensor
    from pyro.ops.rings import LogRing


def target_from_pyro(
    program: Callable[..., Any],
    *args: Any,
    observed: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> "PyroTarget":
    """A Pyro program with its data as a target: ``exp(-energy)`` integrates to the evidence ``p(observed)``.

    Continuous latent variables are mapped to R^D by the standard bijection of their support, angles to points of the
    plane, with priors written in these coordinates; discrete ones that Pyro can enumerate are summed out, also where
    distributions of continuous ones depend on them. From the program to its evidence::

        target = dgm.target_from_pyro(program, y)
        base = dgm.interop.base_from_guide(target, AutoMultivariateNormal)
        evidence = dgm.log_evidence(target, base)

    The program runs a few times, here; energies repeat the torch calls of one run, for all points at once, and see what
    the program reads from outside as it was then.

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
    data = as_data("target_from_pyro", "observed", observed)
    return PyroTarget(CalledProgram(program, args, kwargs, tuple(data)), data, dtype)


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
        sites: where the latent variables are in x, by name.
        observed_data: the observations by name.
        lost_mass: the share of its prior that no coordinate reaches, by name of a variable that loses more than 0.001.
        vectorised: whether all points are computed at once.
    """

    def __init__(self, source: CalledProgram, data: Mapping[str, Tensor], dtype: torch.dtype = torch.float64):
        self.source, self.dtype = source, dtype
        name = source.name
        nodes = first_run(source, data, densities=True)
        _check(nodes, name, data)
        self.sites = _sites(nodes)
        # what pyro.factor observes is empty
        self.observed_data = {
            key: node["value"] for key, node in nodes.items() if is_likelihood(node) and node["value"].numel()
        }
        self._imputed = imputed(nodes)
        if not self.sites:
            raise ModelError(f"{name} has no continuous latent variables: nothing is left to integrate")
        super().__init__(None, max(site.stop for site in self.sites.values()))
        self.device = next(node["log_prob"].device for node in nodes.values() if "log_prob" in node)
        self._draws = tuple(Draw("real", site.shape, True, f"site {key!r}") for key, site in self.sites.items())
        self._values = {key: node["value"].shape for key, node in nodes.items() if is_variable(node)}
        self._is_discrete = any(is_latent(node) and node["fn"].has_enumerate_support for node in nodes.values())
        self._depth = max((-f.dim for n in nodes.values() for f in n["cond_indep_stack"] if f.vectorized), default=0)
        program = conditioned(source, data)
        if self._is_discrete:
            parallel = poutine.infer_config(program, _enumerated)
            program = poutine.enum(parallel, -1 - self._depth)
        self._program = program
        self._names: list[str] = []
        self.lost_mass = self._prepare(name)
        warn_of_lost_mass(name, self.lost_mass)
        self._rows = Rows(self._parts)
        self.vectorised = self._capture(name)

    def energy(self, x):
        return self._each(0, x)[0]

    def latents(self, x):
        """Latent and deterministic variables by name in their own supports, each ``[..., *shape]``.

        Deterministic ones that depend on a variable that is summed out have no value.
        """
        with torch.no_grad():
            return dict(zip(self._names, self._each(1, x), strict=True))

    def initial_draws(self, n, rng):
        """Standard normal draws in the dtype and on the device of the program."""
        x = torch.randn(n, self.dim, generator=rng, dtype=self.dtype, device=rng.device)
        return x.to(self.device)

    def _each(self, part: int, x: Tensor) -> tuple[Tensor, ...]:
        if self.vectorised:
            return self._rows.each(part, x)
        rows = zip(*(self._parts(row)[part] for row in x.reshape(-1, self.dim)), strict=True)
        return tuple(torch.stack(values).reshape((*x.shape[:-1], *values[0].shape)) for values in rows)

    def _parts(self, x: Tensor) -> Parts:
        """Energy and variables of one point ``[D]``."""
        with Interception(tape := _Coordinates(self.source.name, x.dtype, x.device, x, self._draws)):
            trace, log_jacobian = self._trace(tape)
            with pyro.validation_enabled(False):
                log_prob = self._sums.log_prob(trace) if self._is_discrete else trace.log_prob_sum()
            energy = -log_prob - log_jacobian
        return Parts([energy], [trace.nodes[key]["value"] for key in self._names], [])

    def _trace(self, tape: Tape) -> tuple[Any, Tensor]:
        """One run of the program with its latent variables taken from the tape: its trace, and ``log|dz/dx|``."""
        assert tape.u is not None
        densities: dict[str, Tensor] = {}
        jacobians = [tape.u.new_zeros(())]

        def value(node: Mapping[str, Any]) -> Tensor | None:
            site = self.sites.get(node["name"])
            if site is None or node["is_observed"]:
                return None
            # the chart of the present distribution: a support may depend on other variables, as Uniform(0, sigma)
            fn, x = node["fn"], tape.take("real", site.shape)
            chart = chart_of(fn)
            jacobian = chart.log_jacobian(x)
            densities[node["name"]] = log_density(fn, chart, x) - jacobian
            jacobians.append(jacobian.sum())
            return chart.value(x)

        trace = run(self.source, self._program, value)
        tape.finish()
        for name, density in densities.items():
            # in place of the density at the value, which is rounded
            node: Any = trace.nodes[name]
            node["unscaled_log_prob"] = density
            mask = None if name in self._imputed else node["mask"]
            node["log_prob"] = scale_and_mask(density, node["scale"], mask)
            node["log_prob_sum"] = node["log_prob"].sum()
        return trace, torch.stack(jacobians).sum()

    def _prepare(self, name: str) -> dict[str, float]:
        """Find which values there are, and prepare the sums over discrete variables; returns the lost mass."""
        zero = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        tape = _Coordinates(name, self.dtype, self.device, zero, self._draws)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), Interception(tape), pyro.validation_enabled(False):
            try:
                trace, _ = self._trace(tape)
                if self._is_discrete:
                    self._sums = _Sums(trace, True, self._depth)
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(
                    f"{name} fails where its discrete variables are summed over, as vectors of all their values "
                    f"({cause(error)}): choose by them with torch.where or by indexing, not by branches"
                ) from error
        nodes: dict[str, Any] = dict(trace.nodes)
        for key in self.sites:
            if nodes[key]["value"].shape != self._values[key]:
                raise ModelError(
                    f"the support of site {key!r} of {name} depends on a discrete latent variable, which "
                    "cannot be summed out: write both as one MixtureSameFamily"
                )
        self._names = [
            key
            for key, node in nodes.items()
            if key in self.sites or (is_variable(node) and is_deterministic(node))
            if torch.as_tensor(node["value"]).shape == self._values[key]
        ]
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), pyro.validation_enabled(False):
            torch.manual_seed(0)
            shares = {key: lost_mass(fn, chart_of(fn)) for key in self.sites if (fn := nodes[key]["fn"])}
        return {key: share for key, share in shares.items() if share > TOLERATED}

    def _capture(self, name: str) -> bool:
        """Whether all points can be computed at once: by the torch calls of one run, or the program itself."""
        rows = torch.linspace(-0.5, 0.5, 3 * self.dim, dtype=self.dtype, device=self.device).reshape(3, self.dim)
        self._rows.record(rows)
        with torch.no_grad():
            try:
                together, reason = self._rows.each(0, rows)[0], ""
                self._rows.each(1, rows)
            except Exception as error:
                together, reason = None, cause(error)
            alone, again = (torch.stack([self._parts(row).output[0] for row in rows]) for _ in range(2))
        if not torch.equal(alone.nan_to_num(), again.nan_to_num()):
            raise ModelError(
                f"{name} gives different densities for the same latent variables: draw its random numbers with "
                "pyro.sample, and change nothing outside"
            )
        if together is not None and torch.allclose(together, alone, rtol=1e-4, atol=1e-4, equal_nan=True):
            return True
        warn(
            f"the Pyro program {name} cannot be vectorised and runs once for every chain, which is slow: "
            + (reason or "its densities of several points at once differ from those of each point alone"),
        )
        return False


class _Sums(TraceEinsumEvaluator):
    """Pyro's sums over discrete variables, in log space throughout."""

    def log_prob(self, model_trace):
        return contract_to_tensor(self._get_log_factors(model_trace), self._enum_dims, ring=_LogSums())


class _LogSums(LogRing):
    """Sums of products of terms, by elimination of one variable after the other.

    Pyro's own goes by exponentials, with a derivative of its own that ``vmap`` does not take.
    """

    def sumproduct(self, terms, dims):
        rest: list[Any] = list(terms)
        # the variables of fewest neighbours first
        for dim in sorted(dims, key=lambda dim: len({*"".join(t._pyro_dims for t in terms if dim in t._pyro_dims)})):
            joined = _product([term for term in rest if dim in term._pyro_dims])
            rest = [term for term in rest if dim not in term._pyro_dims]
            rest.append(_named(_log_sum(joined, joined._pyro_dims.index(dim)), joined._pyro_dims.replace(dim, "")))
        return _product(rest)


def _product(terms: list[Any]) -> Any:
    """The sum of logarithms whose dimensions have names, in the order of all their names."""
    dims = "".join(sorted({*"".join(term._pyro_dims for term in terms)}))
    every = []
    for term in terms:
        own = sorted(term._pyro_dims)
        aligned = term.permute([term._pyro_dims.index(dim) for dim in own])
        every.append(aligned.reshape([aligned.shape[own.index(dim)] if dim in own else 1 for dim in dims]))
    return _named(sum(every[1:], every[0]), dims)


def _log_sum(x: Tensor, dim: int) -> Tensor:
    """``logsumexp`` whose derivative is finite where every term is impossible."""
    info = torch.finfo(x.dtype)
    shift = x.detach().amax(dim, keepdim=True).clamp_min(info.min)
    return (x - shift).exp().sum(dim).clamp_min(info.tiny).log() + shift.squeeze(dim)


def _named(term: Any, dims: str) -> Any:
    term._pyro_dims = dims
    return term


class _Coordinates(Tape):
    """The coordinates of a target: nothing else is drawn."""

    def draw(self, form, name=None):
        raise ModelError(f"{self.name} draws random numbers with torch, at {present_line()}: use pyro.sample")


def _enumerated(node: Any) -> Any:
    """How Pyro treats a statement: it sums over a latent one that is discrete."""
    return {"enumerate": "parallel"} if is_latent(node) and node["fn"].has_enumerate_support else {}


def _sites(nodes: Mapping[str, Any]) -> dict[str, Site]:
    """Continuous latent variables in the order of the program."""
    sites, start = {}, 0
    for name, node in nodes.items():
        if is_latent(node) and not node["fn"].has_enumerate_support:
            shape = chart_of(node["fn"]).shape
            stop = start + math.prod(shape)
            sites[name] = Site(start, stop, shape)
            start = stop
    return sites


def _check(nodes: Mapping[str, Any], program: str, observed: Mapping[str, Any]) -> None:
    for name in observed:
        if name not in nodes:
            raise ArgumentError(f"observed: {name!r} is not a sample statement of {program} (it has {list(nodes)})")
    for name, node in nodes.items():
        if is_deterministic(node) and (name in observed or has_data(node)):
            raise ArgumentError(
                f"observed: {name!r} is a deterministic statement, which has no likelihood: condition(from_pyro(...)) "
                "samples its posterior; evidence needs an error model, a sample statement around it"
            )
        fn = node["fn"]
        if is_latent(node) and not fn.has_enumerate_support and not has_chart(fn):
            raise ModelError(
                f"site {name!r} of {program} is discrete without a finite support, or has no bijection from the real "
                f"numbers ({type(fn).__name__}), and cannot be summed out: marginalise by hand"
            )
