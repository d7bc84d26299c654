"""Riemannian HMC: its Hamiltonian, the problems it is for, and what it gains on a narrow ridge."""

from typing import cast

import arviz
import pytest
import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer.errors import ArgumentError
from dgm_infer.kernels.mode_jumps import innermost
from tests.oracles import FLOAT, Ellipse

EPS = 0.3


class Bent(dgm.GenerativeModel):
    """Two outputs of four inputs."""

    input_density = dgm.StandardNormal(4)

    def observed(self, u):
        return torch.stack([u[..., 0].exp() + u[..., 1], u[..., 2] * u[..., 3] + u[..., 0]], -1)


def test_the_energy_on_the_graph_is_the_riemannian_hamiltonian():
    target = dgm.condition(Bent(), [1.0, 0.5], tolerance=EPS)
    rng = torch.Generator().manual_seed(1)
    u = torch.randn(5, 4, generator=rng, dtype=FLOAT)
    v = torch.randn(5, 4, generator=rng, dtype=FLOAT)
    jacobian = torch.stack([cast(Tensor, torch.autograd.functional.jacobian(Bent().observed, point)) for point in u])
    metric = jacobian.mT @ jacobian / EPS**2 + torch.eye(4, dtype=FLOAT)
    kinetic = 0.5 * torch.einsum("ci,cij,cj->c", v, metric, v)
    hamiltonian = target.energy(u) + 0.5 * metric.logdet() + kinetic

    state = dgm.kernels.RiemannianHMC(0.1, n_steps=2).init(target, u)
    momentum = torch.cat([v, -(jacobian @ v.unsqueeze(-1)).squeeze(-1) / EPS], -1)
    on_embedding = state.lifted.energy + 0.5 * momentum.square().sum(-1)
    differences = hamiltonian - on_embedding
    torch.testing.assert_close(differences, differences[:1].expand(5))
    torch.testing.assert_close(state.energy, target.energy(u))
    # the momentum is a tangent of the graph
    torch.testing.assert_close(state.lifted.linearisation.jacobian.tangent(momentum), momentum)


def test_pixels_of_one_mask_per_image_and_summaries_are_on_the_graph():
    class Image(dgm.GenerativeModel):
        input_density = dgm.StandardNormal(3)
        output_shape = (2, 2)

        def observed(self, u):
            return torch.cat([u.tanh(), u.sum(-1, keepdim=True)], -1)

    masks = torch.tensor([[[True, False], [True, False]], [[False, True], [False, True]]])
    several = dgm.condition(Image(), torch.zeros(2, 2, 2), observe=dgm.pixels(masks), tolerance=EPS)
    mean = dgm.condition(Bent(), [1.0, 0.5], tolerance=EPS, summaries=lambda x: x.mean(-1, keepdim=True))
    for target in (several, mean):
        u = target.initial_draws(3, torch.Generator().manual_seed(1))
        embedding = target.embedding
        assert embedding is not None
        assert embedding.fibre.constraint_error(embedding.lift(u)).max() < 1e-12
        assert torch.equal(embedding.project(embedding.lift(u)), u)
        dgm.sample(
            target, dgm.kernels.RiemannianHMC(0.2, n_steps=2), chains=3, warmup=0, draws=2, seed=1, progress=False
        )


@pytest.mark.parametrize(
    "options", [{"kernel": "uniform"}, {"kernel": "epanechnikov"}, {"distance": lambda a, b: (a - b).abs().amax(-1)}]
)
def test_what_is_no_gaussian_width_is_refused(options):
    target = dgm.condition(Ellipse(), [2.0], tolerance=EPS, **options)
    with pytest.raises(ArgumentError, match="kernel='gaussian'"):
        dgm.sample(target, dgm.kernels.RiemannianHMC(), chains=2, warmup=1, draws=2, progress=False)


def test_the_narrowness_of_a_tolerance_is_the_largest_singular_value_over_it():
    target = dgm.condition(Bent(), torch.tensor([[1.0, 0.5], [0.0, 2.0]]), tolerance=EPS)
    u = target.initial_draws(3, torch.Generator().manual_seed(1))
    jacobian = torch.stack(
        [cast(Tensor, torch.autograd.functional.jacobian(Bent().observed, point)) for point in u.flatten(0, 1)]
    )
    expected = torch.linalg.svdvals(jacobian)[:, 0].reshape(3, 2) / EPS
    assert target.embedding is not None
    torch.testing.assert_close(target.embedding.stretch(u), expected, rtol=0.02, atol=0.0)


@pytest.mark.parametrize(("tolerance", "picked"), [(2.0, dgm.HMC), (0.1, dgm.kernels.RiemannianHMC)])
def test_it_is_the_default_where_the_tolerance_is_small(tolerance, picked):
    target = dgm.condition(Ellipse(), [2.0], tolerance=tolerance)
    draws = dgm.sample(target, chains=2, warmup=5, draws=2, seed=1, progress=False)
    # which jumps between the two modes
    assert type(innermost(draws.kernel)) is picked
    assert type(dgm.sample(target, dgm.HMC(), chains=2, warmup=5, draws=2, seed=1, progress=False).kernel) is dgm.HMC


# every evaluation of the model counts; one with a Jacobian and the gradient of its determinant as three
def ess_per_evaluation(target, kernel, start):
    draws = dgm.sample(target, kernel, initial=start, chains=len(start), warmup=0, draws=50, seed=1, progress=False)
    ess = min(float(arviz.ess(draws.inputs[..., i].numpy(), method="mean")) for i in range(2))
    steps = draws.stats["n_steps"].double()
    solver = draws.stats.get("solver_iterations")
    return ess / float((steps if solver is None else 3 * steps + solver).sum())


@pytest.mark.slow
def test_it_moves_along_a_narrow_ridge_where_hmc_does_not():
    target = dgm.condition(Ellipse(), [2.0], tolerance=0.01)
    angle = 2 * torch.pi * torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    start = torch.stack([2**0.5 * angle.cos(), 0.5**0.5 * angle.sin()], -1)
    ours = ess_per_evaluation(target, dgm.kernels.RiemannianHMC(0.4, trajectory_length=2.0), start)
    # shorter trajectories do not mix, longer steps are rejected
    assert ours > 5 * ess_per_evaluation(target, dgm.HMC(0.0035, n_steps=(200, 400)), start)
