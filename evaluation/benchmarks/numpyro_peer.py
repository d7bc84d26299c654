"""NumPyro as a peer: NUTS on a program with a dense mass matrix, all chains in one process and program."""

import importlib
from typing import Any

from .image_sampling import ImageTask
from .jax_images import ADAPTED, Function, Images, Sampler, jax, jnp, over_trees, repeated, sample_images
from .jax_series import Series, sample_series
from .series_problems import SeriesTask
from .workers import Report

__all__ = ["nuts", "program", "run", "run_series", "series_program"]

numpyro: Any = importlib.import_module("numpyro")
dist: Any = importlib.import_module("numpyro.distributions")
infer: Any = importlib.import_module("numpyro.infer")

# Draws of a run: one compiled program.
_BLOCK = 100


def program(posterior: Images) -> Function:
    """``z ~ N(0, I)``, ``y ~ N(g(z)[observed], sd^2)`` with a plate over the images, as a NumPyro user writes it."""

    def model() -> None:
        y = jnp.asarray(posterior.observed)
        with numpyro.plate("images", len(y)):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(posterior.dim), 1.0).to_event(1))
            numpyro.sample("y", dist.Normal(posterior.predict(z), posterior.sd).to_event(1), obs=y)

    return model


def nuts(model: Function, name: str, shape: tuple[int, ...], warmup: int) -> Sampler:
    """NUTS with a dense mass matrix, its other settings as they come; positions are the values of one variable.

    Args:
        model: the program; its only variable is unconstrained.
        name: of this variable.
        shape: of its value.
        warmup: iterations, in whole blocks.
    """
    programs: dict[str, Function] = {}

    def block(kernel: Any) -> Function:
        def chain(state):
            def once(state, _):
                state = kernel.sample(state, (), {})
                return state, (state.z[name].ravel(), state.num_steps)

            return jax.lax.scan(once, state, None, length=_BLOCK)

        @jax.jit
        def draw(state):
            state, (z, steps) = over_trees(chain, state)
            return state, z.swapaxes(0, 1), steps.mean()

        return draw

    def warm_up(key, start):
        values = start[:ADAPTED].reshape(-1, *shape)
        keys, blocks = jax.random.split(key, len(values)), -(-warmup // _BLOCK)
        # NUTS looks for a valid point before it takes those that it is given: the first of these
        strategy = infer.init_to_value(values={name: values[0]})
        single, all_chains = (infer.NUTS(model, dense_mass=True, init_strategy=strategy) for _ in range(2))
        single.init(keys[0], blocks * _BLOCK, {name: values[0]}, (), {})
        state = all_chains.init(keys, blocks * _BLOCK, {name: values}, (), {})
        programs["draw"] = block(single)
        for _ in range(blocks):
            state, _, _ = programs["draw"](state)
        return repeated(state, len(start))._replace(rng_key=jax.random.split(key, len(start)))

    return Sampler(warm_up, lambda key, state: programs["draw"](state), "numpyro.infer.NUTS")


def run(task: ImageTask, report: Report) -> dict[str, Any]:
    """Chains of all images together."""
    assert task.warmup is not None
    warmup = task.warmup
    return sample_images(task, lambda posterior: nuts(program(posterior), "z", posterior.shape, warmup), report)


def series_program(posterior: Series) -> Function:
    """Standard normal inputs, and a series of them that is observed with noise."""

    def model() -> None:
        y = jnp.asarray(posterior.observed)
        u = numpyro.sample("u", dist.Normal(jnp.zeros(posterior.dim), 1.0).to_event(1))
        # the program also runs at prior draws, where series overflow: not a reason to stop
        likelihood = dist.Normal(posterior.predict(u), posterior.sd, validate_args=False)
        numpyro.sample("y", likelihood.to_event(1), obs=y)

    return model


def run_series(task: SeriesTask, report: Report) -> dict[str, Any]:
    """Chains of a series."""
    assert task.warmup is not None
    warmup = task.warmup
    return sample_series(task, lambda posterior: nuts(series_program(posterior), "u", (posterior.dim,), warmup), report)
