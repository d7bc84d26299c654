"""BlackJAX as a peer: NUTS after window adaptation, MCLMC and ChEES-HMC, all chains in one program."""

import importlib
from typing import Any

from .image_sampling import ImageTask
from .jax_images import ADAPTED, Function, Sampler, jax, jnp, over_trees, repeated, sample_images
from .jax_series import sample_series
from .series_problems import SeriesTask
from .workers import Report

__all__ = ["KERNELS", "chees", "mclmc", "nuts", "run", "run_series"]

blackjax: Any = importlib.import_module("blackjax")
optax: Any = importlib.import_module("optax")

# Draws of a block: one compiled program.
_BLOCK = 100
# Steps for which MCLMC tunes itself; it takes a third of them.
_TUNING = 10_000
# Steps of MCLMC per draw that is kept: two successive ones are nearly the same.
_THINNED = 8
# ChEES: learning rate of the trajectory's length, the first step size, and draws with a jitter of their own.
_LEARNING_RATE, _FIRST_STEP, _JITTERED = 0.02, 0.1, 2**20


def nuts(energy: Function, chains: int, warmup: int) -> Sampler:
    """NUTS with a dense mass matrix, by window adaptation, which every chain has to itself up to four.

    Args:
        energy: ``[D] -> []``.
        chains: number of chains.
        warmup: iterations.
    """
    kernel, density = blackjax.nuts.build_kernel(), _density(energy)

    def adapt(key, z):
        adaptation = blackjax.window_adaptation(
            blackjax.nuts, density, is_mass_matrix_diagonal=False, adaptation_info_fn=_nothing()
        )
        (state, found), _ = adaptation.run(key, z, num_steps=warmup)
        return state, (found["step_size"], found["inverse_mass_matrix"])

    def step(key, chain):
        state, found = chain
        state, info = kernel(key, state, density, *found)
        return (state, found), state.position, info.num_integration_steps

    return _by_chain(adapt, step, chains, "blackjax.nuts", over_trees)


def mclmc(energy: Function, chains: int, warmup: int) -> Sampler:
    """Microcanonical Langevin dynamics, unadjusted, tuned chain by chain up to four; every eighth point is a draw.

    Its stationary distribution is near the posterior, not the posterior. It tunes for a number of steps of its own:
    ``warmup`` is not used.
    """
    kernel, density = blackjax.mclmc.build_kernel(), _density(energy)

    def adapt(key, z):
        first, second = jax.random.split(key)
        state = blackjax.mclmc.init(z, density, first)
        state, found, _ = blackjax.mclmc_find_L_and_step_size(kernel, _TUNING, state, second, density)
        return state, (found.inverse_mass_matrix, found.L, found.step_size)

    def step(key, chain):
        state, found = chain

        def once(state, key):
            return kernel(key, state, density, *found)[0], None

        state, _ = jax.lax.scan(once, state, jax.random.split(key, _THINNED))
        return (state, found), state.position, jnp.asarray(_THINNED)

    return _by_chain(adapt, step, chains, "blackjax.mclmc", _together)


def chees(energy: Function, chains: int, warmup: int) -> Sampler:
    """HMC whose chains together adapt one step size, one length of trajectories and one diagonal mass matrix."""
    density, functions = _density(energy), {}

    @jax.jit
    def warm_up(key, start):
        adaptation = blackjax.chees_adaptation(
            density, chains, adaptation_info_fn=_nothing(), mass_matrix_estimation="diagonal"
        )
        optimizer = optax.adam(_LEARNING_RATE)
        (states, found), _ = adaptation.run(key, start, _FIRST_STEP, optimizer, warmup, max_sampling_steps=_JITTERED)
        # a program cannot return functions
        functions.update({name: found[name] for name in ("next_random_arg_fn", "integration_steps_fn")})
        return states, (found["step_size"], found["inverse_mass_matrix"], found["integration_steps_params"])

    def step(key, chain, found):
        kernel = blackjax.dynamic_hmc.build_kernel(**functions)
        state, info = kernel(key, chain, density, *found)
        return state, (state.position, info.num_integration_steps)

    @jax.jit
    def draw(key, state):
        states, found = state

        def once(states, key):
            return jax.vmap(step, (0, 0, None))(jax.random.split(key, chains), states, found)

        states, (z, steps) = jax.lax.scan(once, states, jax.random.split(key, _BLOCK))
        return (states, found), z, steps.mean()

    return Sampler(warm_up, draw, "blackjax.chees_adaptation")


KERNELS = {"nuts": nuts, "mclmc": mclmc, "chees": chees}
"""By the name in a task."""


def _density(energy: Function) -> Function:
    return lambda z: -energy(z)


def _nothing() -> Function:
    """Keeps nothing of the iterations of an adaptation."""
    return blackjax.adaptation.base.get_filter_adapt_info_fn()


def _by_chain(adapt: Function, step: Function, chains: int, kernel: str, across: Function) -> Sampler:
    """A sampler of independent chains from ``adapt(key, z) -> chain`` and ``step(key, chain) -> chain, z, steps``.

    Args:
        across: ``(function, arguments of all chains)``: how it is called for every chain.
    """

    @jax.jit
    def warm_up(key, start):
        adapted = start[:ADAPTED]
        state = across(lambda own: adapt(*own), (jax.random.split(key, len(adapted)), adapted))
        return repeated(state, chains)

    def block(own):
        key, chain = own

        def once(chain, key):
            chain, z, steps = step(key, chain)
            return chain, (z, steps)

        return jax.lax.scan(once, chain, jax.random.split(key, _BLOCK))

    @jax.jit
    def draw(key, state):
        state, (z, steps) = across(block, (jax.random.split(key, chains), state))
        return state, z.swapaxes(0, 1), steps.mean()

    return Sampler(warm_up, draw, kernel)


def _together(function: Function, arguments: Any) -> Any:
    return jax.vmap(function)(arguments)


def run(task: ImageTask, report: Report) -> dict[str, Any]:
    """Chains of all images by the kernel that ``task.kernel`` names, one of :data:`KERNELS`."""
    assert task.warmup is not None
    make, warmup = KERNELS[task.kernel], task.warmup
    return sample_images(task, lambda posterior: make(posterior.energy, task.chains, warmup), report)


def run_series(task: SeriesTask, report: Report) -> dict[str, Any]:
    """Chains of a series, likewise."""
    assert task.warmup is not None
    make, warmup = KERNELS[task.kernel], task.warmup
    return sample_series(task, lambda posterior: make(posterior.energy, task.chains, warmup), report)
