"""Densities and estimators with a planted mistake, for negative controls."""

import torch

import dgm_infer as dgm
from dgm_infer.evidence.annealing import Annealed


class WithoutGramTerm(dgm.Fibre):
    """The density ``p_u`` per unit length of the fibre: the posterior's without ``|J J^T|^(-1/2)``."""

    def _gram_energy(self, jacobian):
        return torch.zeros_like(super()._gram_energy(jacobian))

    def _gram_cotangent(self, jacobian):
        return tuple(torch.zeros_like(c) for c in super()._gram_cotangent(jacobian))


class GramTermReversed(dgm.Fibre):
    """The Gram term with the wrong sign.

    Ranks hardly show that it is missing: the posterior is multiplied by the root of a Fisher information alone.
    """

    def _gram_energy(self, jacobian):
        return -super()._gram_energy(jacobian)

    def _gram_cotangent(self, jacobian):
        return tuple(-c for c in super()._gram_cotangent(jacobian))


def systematic_without_chance(log_weights, count, rng):
    """``systematic`` with its points always at the ends of their intervals."""
    below = log_weights.exp().movedim(1, -1).cumsum(-1)
    places = (torch.arange(count, dtype=below.dtype) + 1) / count * below[..., -1:] * (1 - 1e-12)
    chosen = torch.searchsorted(below.contiguous(), places.contiguous(), right=True)
    return chosen.clamp_max(log_weights.shape[1] - 1).movedim(-1, 1)


def anneal_with_weights_after_the_move(path, plan, v, moves, rng, progress):
    """``anneal`` as some textbooks print it: every weight at the state after the move."""
    point, log_weights, acceptance = path.at(v), 0.0, 0.0
    momentum = moves.first_momentum(path, len(v), rng)
    for k in range(len(plan.betas) - 1):
        given = plan.betas[k + 1], plan.step_sizes[k + 1]
        (point, accepted), momentum = moves.forward(path, point, momentum, *given, rng)
        log_weights = log_weights - (plan.betas[k + 1] - plan.betas[k]) * path.difference(point)
        acceptance = acceptance + accepted
    return Annealed(log_weights, point, acceptance)


class WrongForward(torch.autograd.Function):
    """``2 x`` with the forward derivative of ``3 x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad

    @staticmethod
    def jvp(ctx, tangent):
        return 3 * tangent
