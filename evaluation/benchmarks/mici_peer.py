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
from typing import Any, Literal

import numpy as np
import torch

from dgm_infer.models.densities import STANDARD_LOGISTIC

from .problems import Problem
from .tasks import MiciTask
from .workers import Clock, Report

__all__ = ["constraint", "generator", "negative_log_density", "run", "system"]

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
    """The constrained Hamiltonian system, its derivatives compiled by JAX."""
    c = constraint(problem, form)
    jacobian = mici.autodiff.jax_wrapper.jacobian_and_value(c)
    # with respect to J alone: sum_ij m_ij J_ij(u), differentiated
    product = jax.jit(jax.grad(lambda u, m: (jacobian(u)[0] * m).sum()))
    evaluate = mici.autodiff.jax_wrapper.jit_and_return_numpy_arrays(jacobian)

    def matrix_hessian_product(u):
        return (lambda m: np.asarray(product(u, m)), *evaluate(u))

    return mici.systems.DenseConstrainedEuclideanMetricSystem(
        negative_log_density(problem),
        c,
        dens_wrt_hausdorff=False,
        mhp_constr=matrix_hessian_product,
        backend="jax",
    )


def run(task: MiciTask, report: Report) -> dict[str, Any]:
    """One chain of Mici's on one processor, stopped on time; the result as :func:`evaluation.benchmarks.fibre.ours`.

    It starts at the published parameters and noise, which are in the typical set: from points on the fibre near prior
    draws, where this project's chains start, Mici often overflows or keeps a tiny step size.
    """
    clock = Clock(task.seconds)
    logging.getLogger("mici").setLevel(logging.CRITICAL)
    # overflow in rejected proposals
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    model = task.problem.model()
    hamiltonian = system(task.problem, task.form)
    integrator = mici.integrators.ConstrainedLeapfrogIntegrator(hamiltonian)
    sampler = mici.samplers.DynamicMultinomialHMC(
        hamiltonian, integrator, np.random.default_rng([task.seed, task.index])
    )
    trace = _Trace(model.global_density.dim)
    start = task.problem.generating_inputs().numpy()
    trace.end_after(task.warmup_share * task.seconds - clock.elapsed)
    states, _, statistics = sampler.sample_chains(
        task.warmup, 0, [start], display_progress=False, trace_funcs=[trace], trace_warm_up=True
    )
    warm = clock.elapsed
    done = int(np.isfinite(statistics["accept_stat"][0]).sum())
    report(f"process {task.index}: {done} warm-up iterations in {warm:.1f} s, step size {integrator.step_size:.3g}")
    trace.end_after(clock.left)
    # more than fit in the time: a transition takes a millisecond or more
    _, traces, statistics = sampler.sample_chains(
        0, max(1, int(2000 * task.seconds)), states, display_progress=False, trace_funcs=[trace]
    )
    inputs = traces["globals"][0]
    n = int(np.isfinite(inputs).all(-1).sum())
    statistics = {name: values[0][:n] for name, values in statistics.items()}
    failed = statistics["convergence_error"] | statistics["non_reversible_step"]
    with torch.no_grad():
        latents = model.global_latents(torch.from_numpy(inputs[:n]))
    return {
        "latents": {name: value.numpy()[None] for name, value in latents.items()},
        "seconds": clock.elapsed,
        "cpu_seconds": clock.cpu,
        "warmup_seconds": warm,
        "warmup_iterations": done,
        "acceptance": statistics["accept_stat"],
        "failed": failed,
        "n_steps": statistics["n_step"],
        "step_size": integrator.step_size,
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
