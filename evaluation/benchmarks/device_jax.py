"""Ten leapfrog steps of many rows on one device: ours, and the same arithmetic in JAX under jit and scan.

``python -m evaluation.benchmarks.device_jax --device cuda`` prints a line for each decoder and type. JAX gets a network
of the same widths, and no bookkeeping of draws: what the fastest code for this one model takes.
"""

import argparse
import time
from importlib import import_module
from typing import Any

import torch

import dgm_infer as dgm
import generators

from .completions import top_half

__all__ = ["main"]

# Step sizes at which both decoders accept nine of ten trajectories.
_STEPS = {"digits_vae": 0.1, "mnist_vae": 0.01}


def _ours(model: Any, step: float, dtype: torch.dtype, device: str, images: int, chains: int) -> float:
    """Seconds a transition: of a long call, less a short one."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        flat = model.observed(model.input_density.sample((images,), generator=rng))
    data, mask = flat.reshape(images, *model.output_shape), top_half(tuple(model.output_shape))
    fibre = dgm.condition(model, data, observe=dgm.pixels(mask), dtype=dtype, device=device)
    options: dict[str, Any] = {"chains": chains, "warmup": 0, "progress": False}
    kernel = dgm.LiftedHMC(step_size=step, n_steps=10, compile=True)
    before: Any = dgm.sample(fibre, kernel, draws=32, seed=1, **options)
    start = before.inputs[:, -1]
    seconds = []
    for draws in (200, 1200):
        began = time.perf_counter()
        made = dgm.sample(fibre, kernel, draws=draws, seed=2, initial=start, keep="latents", **options)
        float(made.stats["energy"].sum())
        seconds.append(time.perf_counter() - began)
    return (seconds[1] - seconds[0]) / 1000


def _theirs(model: Any, step: float, dtype: torch.dtype, images: int, chains: int) -> float:
    """Seconds a transition of a scan of 1000."""
    jax: Any = import_module("jax")
    jnp: Any = import_module("jax.numpy")
    jax.config.update("jax_enable_x64", dtype == torch.float64)
    kind = jnp.float64 if dtype == torch.float64 else jnp.float32
    weights = [p.detach().cpu().double().numpy() for k, p in model.named_parameters() if "decoder" in k and p.ndim == 2]
    layers = [jnp.asarray(w, kind) for w in weights]
    layers[-1] = layers[-1][: layers[-1].shape[0] // 2]
    dim = layers[0].shape[1]

    def energy(u):
        h = u
        for k, layer in enumerate(layers):
            h = h @ layer.T
            h = jnp.tanh(h) if k < len(layers) - 1 else h
        return 0.5 * jnp.square(h / 0.3).sum(-1) + 0.5 * jnp.square(u).sum(-1)

    gradient = jax.grad(lambda u: energy(u).sum())

    def transition(u, key):
        key, other = jax.random.split(key)
        momentum = jax.random.normal(key, u.shape, u.dtype)
        before = energy(u) + 0.5 * jnp.square(momentum).sum(-1)

        def kick_and_drift(_, point):
            q, p = point
            q = q + step * p
            return q, p - step * gradient(q)

        q, p = jax.lax.fori_loop(0, 10, kick_and_drift, (u, momentum - 0.5 * step * gradient(u)))
        p = p + 0.5 * step * gradient(q)
        after = energy(q) + 0.5 * jnp.square(p).sum(-1)
        accepted = jnp.log(jax.random.uniform(other, before.shape, u.dtype)) < before - after
        u = jnp.where(accepted[..., None], q, u)
        return u, u

    run = jax.jit(lambda u, keys: jax.lax.scan(transition, u, keys))
    u, keys = jnp.zeros((chains, images, dim), kind), jax.random.split(jax.random.PRNGKey(0), 1000)
    run(u, keys)[0].block_until_ready()
    began = time.perf_counter()
    run(u, keys)[0].block_until_ready()
    return (time.perf_counter() - began) / 1000


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--chains", type=int, default=16)
    options = parser.parse_args(arguments)
    for name, step in _STEPS.items():
        for dtype in (torch.float32, torch.float64):
            model = generators.load(name)
            ours = _ours(model, step, dtype, options.device, options.images, options.chains)
            theirs = _theirs(model, step, dtype, options.images, options.chains)
            print(f"{name}, {dtype}: {1e3 * ours:.3g} ms a transition, JAX {1e3 * theirs:.3g} ms", flush=True)


if __name__ == "__main__":
    main()
