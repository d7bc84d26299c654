"""Estimators with a planted mistake, for negative controls."""

from dgm_infer.evidence.annealing import Annealed


def anneal_with_weights_after_the_move(path, plan, v, n_steps, rng, progress):
    """``anneal`` as some textbooks print it: every weight at the state after the move."""
    point, log_weights, acceptance = path.at(v), 0.0, 0.0
    for k in range(len(plan.betas) - 1):
        point, accepted = path.move(point, plan.betas[k + 1], plan.step_sizes[k + 1], n_steps, rng)
        log_weights = log_weights - (plan.betas[k + 1] - plan.betas[k]) * path.difference(point)
        acceptance = acceptance + accepted
    return Annealed(log_weights, point, acceptance)
