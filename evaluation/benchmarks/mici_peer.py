"""The peer of the fibre benchmark: Mici's constrained HMC with JAX, on the same problems.

The set-up is the one that ``mici.sample_constrained_hmc_chains`` makes: a ``DenseConstrainedEuclideanMetricSystem``
with the prior's density on the ambient space, the constrained leapfrog integrator with its default (Newton) projection
solver, the dynamic multinomial HMC sampler (NUTS) and a dual-averaging step size adapter, all in float64. One thing
is faster than what its JAX backend makes by itself: the matrix-Hessian product is compiled as a whole, where the
backend returns a closure that runs operation by operation.
"""

import importlib
import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dgm_infer.models.densities import STANDARD_LOGISTIC

from .problems import Problem
from .tasks import MiciTask
from .workers import Clock, Report

__all__ = [
    "Chain",
    "constrained_system",
    "constraint",
    "generator",
    "negative_log_density",
    "run",
    "sample_chain",
    "system",
]

# without a declared type: type checks do not depend on whether the extra ``bench`` is installed
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
mici: Any = importlib.import_module("mici")

# Mici computes in double precision; nothing else here uses JAX.
jax.config.update("jax_enable_x64", True)

Function = Callable[[Any], Any]


def generator(problem: Problem) -> Function:
    """``g(u)``: ``[4 + N] -> [N]``, as in :mod:`generators` and with its order of inputs."""
    if problem.name == "generalised_lambda":
        return _generalised_lambda
    return _lotka_volterra


def constraint(problem: Problem, form: Literal["generator", "residual"] = "generator") -> Function:
    """``c(u) = g(u) - x``, or its conditional residual ``f(x_{t-1}, z, u_t) - x_t`` (math 4.7), ``[4 + N] -> [N]``.

    Both vanish at the same inputs and give the same posterior. The residual is what this project makes of a model with
    ``structure = "markov"``; a user of Mici would have to derive it. For independent outputs there is no difference.
    """
    observed = jnp.asarray(problem.observations().numpy())
    if problem.name == "lotka_volterra" and form == "residual":
        return lambda u: _lotka_volterra_residual(u, observed)
    generate = generator(problem)
    return lambda u: generate(u) - observed


def negative_log_density(problem: Problem) -> Function:
    """``-log p_u(u)`` up to a constant: ``[4 + N] -> []``."""
    if problem.name == "lotka_volterra":
        return lambda u: 0.5 * jnp.square(u).sum()

    def energy(u):
        a = 0.5 * STANDARD_LOGISTIC * jnp.abs(u[3:])
        return 0.5 * jnp.square(u[:3]).sum() + 2 * (a + jnp.log1p(jnp.exp(-2 * a))).sum()

    return energy


def _generalised_lambda(u):
    z1, z3, z4 = u[:3]
    z2 = jax.nn.softplus(STANDARD_LOGISTIC * u[3])
    log_p, log_q = (jax.nn.log_sigmoid(sign * STANDARD_LOGISTIC * u[4:]) for sign in (1, -1))
    return z1 + (jnp.expm1(z3 * log_p) / z3 - jnp.expm1(z4 * log_q) / z4) / z2


def _step(z, prey, predators, noise):
    """One Euler-Maruyama step with ``dt = 1`` and unit noise."""
    return jnp.stack(
        [
            prey + z[0] * prey - z[1] * prey * predators + noise[..., 0],
            predators + z[3] * prey * predators - z[2] * predators + noise[..., 1],
        ],
        -1,
    )


def _lotka_volterra(u):
    z = jnp.exp(u[:4] - 2)

    def step(state, noise):
        state = _step(z, state[0], state[1], noise)
        return state, state

    return jax.lax.scan(step, jnp.full(2, 100.0), u[4:].reshape(-1, 2))[1].ravel()


def _lotka_volterra_residual(u, observed):
    series = observed.reshape(-1, 2)
    previous = jnp.concatenate([jnp.full((1, 2), 100.0), series[:-1]])
    step = _step(jnp.exp(u[:4] - 2), previous[:, 0], previous[:, 1], u[4:].reshape(-1, 2))
    return (step - series).ravel()


def system(problem: Problem, form: Literal["generator", "residual"] = "generator") -> Any:
    """The constrained Hamiltonian system of a problem."""
    return constrained_system(negative_log_density(problem), constraint(problem, form))


def constrained_system(energy: Function, c: Function) -> Any:
    """The system of a density ``exp(-energy(u))`` on the ambient space and ``c(u) = 0``, its derivatives compiled."""
    jacobian = mici.autodiff.jax_wrapper.jacobian_and_value(c)
    # with respect to J alone: sum_ij m_ij J_ij(u), differentiated
    product = jax.jit(jax.grad(lambda u, m: (jacobian(u)[0] * m).sum()))
    evaluate = mici.autodiff.jax_wrapper.jit_and_return_numpy_arrays(jacobian)

    def matrix_hessian_product(u):
        return (lambda m: np.asarray(product(u, m)), *evaluate(u))

    return mici.systems.DenseConstrainedEuclideanMetricSystem(
        energy,
        c,
        dens_wrt_hausdorff=False,
        mhp_constr=matrix_hessian_product,
        backend="jax",
    )


class Chain(NamedTuple):
    """A chain that was stopped on time."""

    inputs: np.ndarray
    """The first inputs of every draw, ``[draws, n_kept]``."""
    statistics: dict[str, np.ndarray]
    """Mici's, each ``[draws]``."""
    warmup_seconds: float
    warmup_iterations: int
    step_size: float

    @property
    def failed(self) -> np.ndarray:
        return self.statistics["convergence_error"] | self.statistics["non_reversible_step"]


def sample_chain(
    hamiltonian: Any, start: np.ndarray, n_kept: int, clock: Clock, warmup: int, warmup_share: float, seed: list[int]
) -> Chain:
    """A chain from ``start`` until the clock's budget is used.

    Args:
        hamiltonian: a :func:`constrained_system`.
        start: on its manifold.
        n_kept: number of inputs that are recorded, the first.
        clock: counts from before the system was made.
        warmup: iterations that adapt the step size, at most.
        warmup_share: share of the budget after which warm-up ends in any case.
        seed: of all randomness.
    """
    logging.getLogger("mici").setLevel(logging.CRITICAL)
    # overflow in rejected proposals
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    integrator = mici.integrators.ConstrainedLeapfrogIntegrator(hamiltonian)
    sampler = mici.samplers.DynamicMultinomialHMC(hamiltonian, integrator, np.random.default_rng(seed))
    trace = _Trace(n_kept)
    trace.end_after(warmup_share * clock.budget - clock.elapsed)
    states, _, statistics = sampler.sample_chains(
        warmup, 0, [start], display_progress=False, trace_funcs=[trace], trace_warm_up=True
    )
    warm = clock.elapsed
    done = int(np.isfinite(statistics["accept_stat"][0]).sum())
    trace.end_after(clock.left)
    # more than fit in the time: a transition takes a millisecond or more
    _, traces, statistics = sampler.sample_chains(
        0, max(1, int(2000 * clock.budget)), states, display_progress=False, trace_funcs=[trace]
    )
    inputs = traces["globals"][0]
    n = int(np.isfinite(inputs).all(-1).sum())
    statistics = {name: values[0][:n] for name, values in statistics.items()}
    return Chain(inputs[:n], statistics, warm, done, integrator.step_size)


def run(task: MiciTask, report: Report) -> dict[str, Any]:
    """One chain of Mici's on one processor, stopped on time; the result as :func:`evaluation.benchmarks.fibre.ours`.

    It starts at the published parameters and noise, which are in the typical set: from points on the fibre near prior
    draws, where this project's chains start, Mici often overflows or keeps a tiny step size.
    """
    clock = Clock(task.seconds)
    model = task.problem.model()
    chain = sample_chain(
        system(task.problem, task.form),
        task.problem.generating_inputs().numpy(),
        model.global_density.dim,
        clock,
        task.warmup,
        task.warmup_share,
        [task.seed, task.index],
    )
    report(
        f"process {task.index}: {chain.warmup_iterations} warm-up iterations in {chain.warmup_seconds:.1f} s, "
        f"step size {chain.step_size:.3g}"
    )
    with torch.no_grad():
        latents = model.global_latents(torch.from_numpy(chain.inputs))
    return {
        "latents": {name: value.numpy()[None] for name, value in latents.items()},
        "seconds": clock.elapsed,
        "cpu_seconds": clock.cpu,
        "warmup_seconds": chain.warmup_seconds,
        "warmup_iterations": chain.warmup_iterations,
        "acceptance": chain.statistics["accept_stat"],
        "failed": chain.failed,
        "n_steps": chain.statistics["n_step"],
        "step_size": chain.step_size,
    }


class _Trace:
    """Records the global inputs of every iteration, and stops the chain as a user would: by an interrupt."""

    def __init__(self, n_global: int):
        self.n_global = n_global
        self.end = math.inf
        self.calls = 0

    def end_after(self, seconds: float) -> None:
        self.end, self.calls = time.perf_counter() + seconds, 0

    def __call__(self, state) -> dict[str, np.ndarray]:
        self.calls += 1
        # the first call only asks for the shapes
        if self.calls > 1 and time.perf_counter() > self.end:
            raise KeyboardInterrupt
        return {"globals": state.pos[: self.n_global].copy()}
