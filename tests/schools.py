"""Eight schools, centred, and their evidence by quadrature."""

import torch
from torch.distributions import HalfCauchy, Normal

import dgm_infer as dgm

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


class Schools(dgm.Target):
    """Eight schools as one writes them: descents come to a log scale whose exponential is zero."""

    def __init__(self):
        super().__init__(dim=10)

    def energy(self, x):
        mu, log_tau, theta = x[..., 0], x[..., 1], x[..., 2:]
        tau = log_tau.exp()
        log_prob = Normal(0.0, 5.0).log_prob(mu) + HalfCauchy(x.new_tensor(5.0)).log_prob(tau) + log_tau
        log_prob = log_prob + Normal(mu.unsqueeze(-1), tau.unsqueeze(-1)).log_prob(theta).sum(-1)
        return -log_prob - Normal(theta, ERRORS.to(x)).log_prob(EFFECTS.to(x)).sum(-1)


def log_z_of_schools():
    """By a sum over mu and log tau, given which the effects integrate out."""
    mu = torch.linspace(-30, 30, 1201, dtype=torch.float64)
    log_tau = torch.linspace(-20, 12, 3201, dtype=torch.float64)
    tau = log_tau.exp().unsqueeze(-1)
    log_prob = Normal(0.0, 5.0).log_prob(mu) + HalfCauchy(torch.tensor(5.0).double()).log_prob(tau) + tau.log()
    for y, s in zip(EFFECTS, ERRORS, strict=True):
        log_prob = log_prob + Normal(mu, (tau.square() + s.square()).sqrt()).log_prob(y)
    return float(log_prob.flatten().logsumexp(0) + (mu[1] - mu[0]).log() + (log_tau[1] - log_tau[0]).log())
