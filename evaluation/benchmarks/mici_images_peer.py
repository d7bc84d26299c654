"""The peer of the images benchmark on small decoders: Mici's constrained HMC with JAX, one chain per image and process.

The system is that of :mod:`.mici_peer`. Mici has no batches of problems: a process samples one image after the other.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dgm_infer.errors import ModelError

from .image_sampling import Conditioned, ImageTask
from .jax_images import network
from .mici_peer import constrained_system, jax, jnp, sample_chain
from .workers import Clock, Report

__all__ = ["run"]

# Share of the seconds after which warm-up ends in any case.
_WARMUP_SHARE = 0.5
# Steps of the descent to where chains start.
_DESCENT = 300


def run(task: ImageTask, report: Report) -> dict[str, Any]:
    """One chain of every image, stopped on time; the result as :func:`.image_sampling.run`.

    The noise is among the inputs, as on this project's fibre: ``c(z, n) = g(z) + sd n - y``. Chains start at a mode of
    the latents' posterior, found by descent from a prior draw: prior draws are further from the typical set.
    """
    given = Conditioned.load(task.path)
    assert given.mask is not None
    assert given.sd is not None
    index = given.mask.flatten().nonzero().squeeze(-1)
    y = given.images.flatten(1)[:, index].double()
    rng = torch.Generator().manual_seed(task.seed + task.index)
    sd, where, dim = given.sd, index.numpy(), int(np.prod(given.latent))
    batched = network(given.net)

    def g(z):
        return batched(z[None])[0]

    net = given.net.double()
    origin = torch.zeros(1, dim, dtype=torch.float64)
    if not np.allclose(g(jnp.zeros(dim)), net(origin).flatten().numpy()):
        raise ModelError("the decoder is more than its layers, one after the other")
    whole, chains, relative = Clock(task.seconds), [], []
    assert task.warmup is not None
    for observed in y:
        clock = Clock(task.seconds / len(y))
        z = _mode(net, index, observed, sd, torch.randn(dim, generator=rng, dtype=torch.float64))
        with torch.no_grad():
            n = (observed - net(z[None]).flatten()[index]) / sd
        start, values = torch.cat([z, n]).numpy(), jnp.asarray(observed.numpy())

        def constraint(u, values=values):
            return g(u[:dim])[where] + sd * u[dim:] - values

        hamiltonian = constrained_system(lambda u: 0.5 * jnp.square(u).sum(), constraint)
        seed = [task.seed, task.index, len(chains)]
        chain = sample_chain(hamiltonian, start, len(start), clock, task.warmup, _WARMUP_SHARE, seed)
        report(
            f"process {task.index}: {chain.warmup_iterations} warm-up iterations in {chain.warmup_seconds:.1f} s, "
            f"{len(chain.inputs)} draws"
        )
        chains.append(chain)
        compiled = jax.jit(constraint)
        errors = [float(jnp.abs(compiled(u)).max()) for u in chain.inputs]
        relative.append(max(errors, default=float("nan")) / max(1.0, float(observed.abs().max())))
    shortest = min(len(chain.inputs) for chain in chains)
    steps = [float(np.mean(chain.statistics["n_step"])) for chain in chains if len(chain.inputs)]
    return {
        "z": np.concatenate([chain.inputs[:shortest, :dim] for chain in chains], -1)[None],
        "constraint_error": max(relative),
        "steps": float(np.mean(steps)) if steps else float("nan"),
        "seconds": whole.elapsed,
        "warmup_seconds": sum(chain.warmup_seconds for chain in chains),
        "kernel": "mici.samplers.DynamicMultinomialHMC",
    }


def _mode(net: nn.Module, index: Tensor, y: Tensor, sd: float, z: Tensor) -> Tensor:
    """A local maximum of ``p(z | y)``, near enough, ``[Dz]``."""
    z = z.clone().requires_grad_()
    descent = torch.optim.Adam([z], lr=0.05)
    for _ in range(_DESCENT):
        descent.zero_grad()
        misfit = (net(z[None]).flatten()[index] - y) / sd
        (0.5 * misfit.square().sum() + 0.5 * z.square().sum()).backward()
        descent.step()
    return z.detach()
