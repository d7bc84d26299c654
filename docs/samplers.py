"""The table of docs/samplers.md: effective draws per evaluation of pseudo-marginal samplers."""

import arviz
import torch

import dgm_infer as dgm

CHAINS, DRAWS = 50, 600
DIM, DATA = 4, 6
Y = torch.randn(DATA, DIM, generator=torch.Generator().manual_seed(1)) * 6**0.5


def log_joint(x, z):
    """``z_m ~ N(x, I)``, ``y_m ~ N(z_m, 4 I)``."""
    z = z.unflatten(-1, (DATA, DIM))
    return -0.5 * (z - x.unsqueeze(-2)).square().sum((-1, -2)) - (Y - z).square().sum((-1, -2)) / 8


def prior(x):
    mean = x.repeat(*[1] * (x.ndim - 1), DATA)
    return mean, torch.ones_like(mean)


estimate = dgm.ImportanceEstimate(log_joint, prior, DATA * DIM, samples=1)
target = dgm.PseudoMarginal(estimate, dgm.StandardNormal(DIM), dgm.StandardNormal(estimate.noise_dim))
walks = [dgm.RandomWalk(step, "identity") for step in (0.4, 0.8)]
slices = [dgm.LinearSlice(width, metric="identity") for width in (2.0, 10.0)]
kernels = {
    "PM-MH": [dgm.PseudoMarginalMH(step, "identity") for step in (0.2, 0.4, 0.8)],
    "MI+MH": [dgm.Alternating(dgm.Independence(), walk, ("noise", "target")) for walk in walks],
    "SS+MH": [dgm.Alternating(dgm.EllipticalSlice(), walk, ("noise", "target")) for walk in walks],
    "MI+SS": [dgm.Alternating(dgm.Independence(), line, ("noise", "target")) for line in slices],
    "SS+SS": [dgm.Alternating(dgm.EllipticalSlice(), line, ("noise", "target")) for line in slices],
}
# evaluations of a transition beside those of its slices
PLAIN = {"PM-MH": 1, "MI+MH": 2, "SS+MH": 1, "MI+SS": 1, "SS+SS": 0}

for name, several in kernels.items():
    for kernel in several:
        rng = torch.Generator().manual_seed(2)
        x = Y.sum(0) / (DATA + 5) + (5 / (DATA + 5)) ** 0.5 * torch.randn(CHAINS, DIM, generator=rng)
        start = torch.cat([x, torch.randn(CHAINS, estimate.noise_dim, generator=rng)], -1)
        draws = dgm.sample(
            target, kernel, chains=CHAINS, warmup=0, draws=DRAWS, seed=1, initial=start, keep="latents", progress=False
        )
        columns = draws.latents["x"].movedim(-1, 0)
        ess = min(float(arviz.ess(column.numpy(), method="mean")) for column in columns)
        sliced = [v.double().mean().item() for k, v in draws.stats.items() if k.endswith("slice_evaluations")]
        evaluations = PLAIN[name] + sum(sliced)
        per_thousand = 1000 * ess / (CHAINS * DRAWS * evaluations)
        second = getattr(kernel, "second", kernel)
        step = getattr(second, "step_size", None) or second.width
        stay = draws.longest_stay.max().item()
        print(f"{name:6} {step:5} {per_thousand:6.1f} {evaluations:5.1f} evaluations, longest stay {stay}", flush=True)
