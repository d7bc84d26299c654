"""What the peers in JAX share: posteriors of images as functions of JAX, descents, and draws until the time is used.

Functions compute in the dtype that JAX has when they are called: numbers are handed over with 64 bits.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dgm_infer.errors import ModelError

from .image_sampling import Conditioned, ImageTask
from .workers import Clock, Report

__all__ = [
    "ADAPTED",
    "AGREED",
    "Images",
    "Sampler",
    "best_of_descents",
    "differences",
    "disagreement",
    "drawn_until",
    "images_posterior",
    "network",
    "over_trees",
    "precision",
    "repeated",
    "sample_images",
]

# without a declared type: type checks do not depend on whether the extra ``bench`` is installed
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")

Function = Callable[..., Any]

AGREED = 1e-6
"""Largest difference from this project's energies and gradients, relative, in float64."""

ADAPTED = 4
"""Chains that adapt, at most: more go on from where these are then, in different directions, with their metrics."""

# Chains whose trees are grown in step.
_FEW = 8
# Points at which energies are compared.
_COMPARED = 8
# Searches per problem, their steps, and the learning rate that they begin with; it falls to nothing along a cosine.
_SEARCHES, _DESCENT, _RATE = 32, 500, 0.05
# Draws that are made even if they are late.
_FEWEST = 20
_LAYERS = {nn.Tanh: jnp.tanh, nn.SiLU: jax.nn.silu, nn.Sigmoid: jax.nn.sigmoid, nn.ReLU: jax.nn.relu}


def network(net: nn.Module) -> Function:
    """A network of layers, one after the other, as a function of JAX: ``[n, Dz] -> [n, Dx]``.

    Raises:
        ModelError: it has layers that have no counterpart here.
    """
    steps = [_layer(layer) for layer in net.modules() if not list(layer.children())]

    def compute(z):
        for step in steps:
            z = step(z)
        return z.reshape(len(z), -1)

    return compute


def _layer(layer: nn.Module) -> Function:
    if type(layer) in _LAYERS:
        return _LAYERS[type(layer)]
    if isinstance(layer, nn.Linear):
        weight, bias = _numbers(layer.weight).T, _numbers(layer.bias)
        return lambda x: x @ jnp.asarray(weight) + jnp.asarray(bias)
    if isinstance(layer, nn.Unflatten):
        shape = tuple(layer.unflattened_size)
        return lambda x: x.reshape(len(x), *shape)
    if isinstance(layer, nn.Flatten):
        return lambda x: x.reshape(len(x), -1)
    plain = {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}
    if isinstance(layer, nn.ConvTranspose2d) and plain.items() <= vars(layer).items() and layer.bias is not None:
        return _transposed(layer)
    raise ModelError(f"a layer {type(layer).__name__} has no counterpart here")


def _transposed(layer: nn.ConvTranspose2d) -> Function:
    """A transposed convolution: one of the input with zeros between its pixels, by the kernel negated."""
    kernel = np.ascontiguousarray(_numbers(layer.weight)[:, :, ::-1, ::-1].swapaxes(0, 1))
    bias, stride = _numbers(layer.bias)[:, None, None], tuple(layer.stride)
    sides: Any = zip(layer.kernel_size, layer.padding, layer.output_padding, strict=True)
    ends = [(k - 1 - p, k - 1 - p + more) for k, p, more in sides]

    def convolve(x):
        spread = jax.lax.conv_general_dilated(x, jnp.asarray(kernel), (1, 1), ends, lhs_dilation=stride)
        return spread + jnp.asarray(bias)

    return convolve


def _numbers(part: Any) -> np.ndarray:
    return part.detach().double().numpy()


class Images(NamedTuple):
    """Posteriors of latents, one per image, all images in one function."""

    energies: Function
    """``z [n, Dz] -> [n]``, minus ``log p(z, y)`` of every image."""
    predict: Function
    """``z [n, Dz] -> [n, m]``, the noiseless pixels."""
    observed: np.ndarray
    """The observed pixels of every image, ``[n, m]``."""
    sd: float
    dim: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a point: ``(n, Dz)``."""
        return len(self.observed), self.dim

    def energy(self, z):
        """Energy of all images together: ``[n * Dz] -> []``."""
        return self.energies(z.reshape(self.shape)).sum()


def images_posterior(given: Conditioned) -> Images:
    """``z ~ N(0, I)``, ``y ~ N(g(z)[observed], sd^2)`` of every image."""
    assert given.mask is not None
    assert given.sd is not None
    index = given.mask.flatten().nonzero().squeeze(-1)
    y = _numbers(given.images.flatten(1)[:, index])
    g, sd, where, dim = network(given.net), given.sd, index.numpy(), int(np.prod(given.latent))
    constant = 0.5 * (dim + len(where)) * math.log(2 * math.pi) + len(where) * math.log(sd)

    def predict(z):
        return g(z)[:, where]

    def energies(z):
        misfit = (predict(z) - jnp.asarray(y)) / sd
        return 0.5 * jnp.square(z).sum(-1) + 0.5 * jnp.square(misfit).sum(-1) + constant

    return Images(energies, predict, y, sd, dim)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """JAX computes in float32 or float64 within the block."""
    with jax.enable_x64(dtype == "float64"):
        yield


def disagreement(given: Conditioned, posterior: Images, seed: int) -> dict[str, float]:
    """The largest differences of energies and gradients from this project's, relative to their sizes, in float64.

    Raises:
        ModelError: one is larger than :data:`AGREED`.
    """
    # a copy: a module is cast in place
    net = deepcopy(given.net).double()
    target = replace(given, net=net, images=given.images.double()).latent_posterior(None)
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(_COMPARED, *posterior.shape, generator=rng, dtype=torch.float64)
    energy, gradient = target.energy_and_gradient(z)
    ours = {"energy": energy.sum(-1).detach().numpy(), "gradient": gradient.flatten(1).numpy()}
    return differences(posterior.energy, z.flatten(1).numpy(), ours)


def differences(energy: Function, points: np.ndarray, ours: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest differences of a function of JAX from ``energy [k]`` and ``gradient [k, D]`` at points ``[k, D]``.

    Raises:
        ModelError: one is larger than :data:`AGREED` of the largest value.
    """
    with precision("float64"):
        values = jax.jit(jax.vmap(jax.value_and_grad(energy)))(jnp.asarray(points))
        theirs: dict[str, np.ndarray] = dict(zip(("energy", "gradient"), map(np.asarray, values), strict=True))
    found = {name: float(np.abs(a - theirs[name]).max() / np.abs(a).max()) for name, a in ours.items()}
    for name, size in found.items():
        if not size <= AGREED:
            raise ModelError(f"the peer's {name} is another function: it differs by {size:.1g} of its size")
    return found


def best_of_descents(energies: Function, shape: tuple[int, int], key: Any) -> Any:
    """The lowest point that Adam reaches from 32 prior draws, of every problem: ``[n, D]``.

    Args:
        energies: ``[n, D] -> [n]``.
        shape: ``(n, D)``.
        key: of the prior draws.
    """
    slope = jax.grad(lambda z: energies(z).sum())

    def descent(z):
        def step(carry, t):
            z, m, v = carry
            g = slope(z)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            rate = 0.5 * _RATE * (1 + jnp.cos(jnp.pi * t / _DESCENT))
            ahead = rate * (m / (1 - 0.9 ** (t + 1))) / (jnp.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
            return (z - ahead, m, v), None

        steps = jnp.arange(_DESCENT, dtype=z.dtype)
        (z, _, _), _ = jax.lax.scan(step, (z, jnp.zeros_like(z), jnp.zeros_like(z)), steps)
        return z, energies(z)

    @jax.jit
    def best(key):
        z, low = jax.vmap(descent)(jax.random.normal(key, (_SEARCHES, *shape)))
        return z[jnp.nanargmin(low, 0), jnp.arange(shape[0])]

    return best(key)


class Sampler(NamedTuple):
    """A sampler in compiled programs."""

    warm_up: Function
    """``(key, start [chains, D]) -> state``."""
    draw: Function
    """``(key, state) -> (state, z [draws, chains, D], steps per draw)``."""
    kernel: str


def over_trees(function: Function, states: Any) -> Any:
    """A transition of trees of every chain: of few chains in step, of many one after the other.

    In step every chain waits for the deepest tree. On one core, 5 us per chain and step of four chains of digits, one
    after the other 7.5, but of 64 chains in step 150.
    """
    few = len(jax.tree.leaves(states)[0]) <= _FEW
    return jax.vmap(function)(states) if few else jax.lax.map(function, states)


def repeated(state: Any, chains: int) -> Any:
    """The states of chains that have adapted as those of more: each goes on several times."""
    return jax.tree.map(lambda part: part[jnp.arange(chains) % len(part)], state)


def drawn_until(clock: Clock, sampler: Sampler, key: Any, start: Any, report: Report) -> dict[str, Any]:
    """Warm up, and draw until the clock's budget is used.

    Returns:
        ``draws`` ``[chains, draws, D]``, ``steps`` per draw, ``warmup_seconds``, ``kernel``.
    """
    key, own = jax.random.split(key)
    state = jax.block_until_ready(sampler.warm_up(own, start))
    warm = clock.elapsed
    report(f"{len(start)} chains warmed up in {warm:.1f} s")
    kept: list[np.ndarray] = []
    steps, seconds, count = [], 0.0, 0
    while clock.left > seconds or count < _FEWEST:
        began = clock.elapsed
        key, own = jax.random.split(key)
        state, z, taken = sampler.draw(own, state)
        kept.append(np.asarray(z))
        steps.append(float(taken))
        count += len(kept[-1])
        # a block that would end late is not begun; the first one's seconds are those of its compilation
        seconds = clock.elapsed - began if len(kept) > 1 else 0.0
    draws = np.concatenate(kept).swapaxes(0, 1)
    return {"draws": draws, "steps": float(np.mean(steps)), "warmup_seconds": warm, "kernel": sampler.kernel}


def sample_images(task: ImageTask, make: Callable[[Images], Sampler], report: Report) -> dict[str, Any]:
    """All chains of all images in one process; the result as :func:`.image_sampling.run`.

    The images are one problem, as a program with a plate has them. Whatever is compiled, searched and adapted counts.
    Only the comparison with this project's energies, which no user needs, is made before.

    Args:
        make: the sampler of a posterior.
    """
    given = Conditioned.load(task.path)
    posterior = images_posterior(given)
    agreed = disagreement(given, posterior, task.seed)
    with precision(task.dtype):
        clock = Clock(task.seconds)
        key, first = jax.random.split(jax.random.key(task.seed))
        if task.start == "descents":
            best = best_of_descents(posterior.energies, posterior.shape, first).ravel()
            start = jnp.broadcast_to(best, (task.chains, len(best)))
        else:
            start = jax.random.normal(first, (task.chains, math.prod(posterior.shape)))
        made = drawn_until(clock, make(posterior), key, start, report)
    draws = made.pop("draws")
    return {
        "z": draws,
        "last": draws[:, -1],
        "constraint_error": float("nan"),
        "seconds": clock.elapsed,
        "agreed": agreed,
        **made,
    }
