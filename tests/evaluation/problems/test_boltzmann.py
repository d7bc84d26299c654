"""Boltzmann machine relaxations: the semidefinite programme, the density, the truth."""

import math

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.references.density import weighted_moments
from evaluation.problems.boltzmann import BoltzmannRelaxation, published_system, random_system
from evaluation.problems.repeated import repeated
from tests.files import reference_folder

FLOAT = torch.float64


@pytest.fixture(scope="module")
def small():
    return BoltzmannRelaxation(*random_system(8, seed=3))


def test_no_other_diagonal_makes_the_largest_eigenvalue_smaller(small):
    own = torch.linalg.eigvalsh(small.weights + torch.diag(small.diagonal))
    torch.testing.assert_close(small.Q @ small.Q.mT, small.weights + torch.diag(small.diagonal), atol=1e-6, rtol=0)
    assert own[0].abs() < 1e-7
    assert small.dim < small.units
    rng = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        others = small.diagonal + size * torch.randn(200, small.units, generator=rng, dtype=FLOAT)
        values = torch.linalg.eigvalsh(small.weights + torch.diag_embed(others))
        # lifted until they are positive semidefinite
        assert (values[:, -1] + (-values[:, 0]).clamp_min(0) > own[-1] - 1e-7).all()


def test_the_truth_is_that_of_quadrature():
    weights = torch.tensor([[0.0, 1.2, -0.7], [1.2, 0.0, 0.9], [-0.7, 0.9, 0.0]], dtype=FLOAT)
    relaxation = BoltzmannRelaxation(weights, torch.tensor([0.3, -0.2, 0.1], dtype=FLOAT))
    assert relaxation.dim == 2
    truth = relaxation.exact()
    axis = torch.linspace(-9, 9, 361, dtype=FLOAT)
    x = torch.cartesian_prod(axis, axis)
    density = (-relaxation.energy(x)).exp() * (axis[1] - axis[0]) ** 2
    z = density.sum()
    mean = (density[:, None] * x).sum(0) / z
    second = (density[:, None] * x).mT @ x / z
    torch.testing.assert_close(truth.log_z, z.log(), atol=1e-9, rtol=0)
    torch.testing.assert_close(truth.mean, mean, atol=1e-9, rtol=0)
    # Q Q^T is W + D up to the eigenvalue that the solver leaves in place of zero
    torch.testing.assert_close(truth.covariance, second - torch.outer(mean, mean), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_by_hand_is_that_of_the_energy(small, dtype):
    x = 3 * torch.randn(5, 4, small.dim, generator=torch.Generator().manual_seed(1), dtype=dtype)
    energy, gradient = small.energy_and_gradient(x)
    general, slope = dgm.Target.energy_and_gradient(small, x)
    torch.testing.assert_close(energy, general)
    torch.testing.assert_close(gradient, slope)
    assert energy.dtype == dtype


def test_a_mean_field_solution_is_a_bound_and_many_make_a_base(small):
    truth = small.exact()
    for seed in range(5):
        assert small.mean_field(1, seed=seed).log_zeta <= truth.log_z
    base = small.mean_field()
    one = small.mean_field(1)
    assert (base.log_zeta - truth.log_z).abs() < (one.log_zeta - truth.log_z).abs()
    assert (base.covariance - truth.covariance).norm() < 0.5 * (one.covariance - truth.covariance).norm()


def test_random_systems_follow_the_recipe():
    weights, biases = random_system(30, seed=0)
    assert torch.equal(weights, weights.mT)
    assert (weights.diagonal() == 0).all()
    assert 0.05 < biases.std() < 0.15
    # most eigenvalues of V are near -6 or 6
    values = np.linalg.eigvalsh(weights.numpy())
    assert (np.abs(values) > 4).mean() > 0.5
    assert np.abs(values).max() < 8
    assert not torch.equal(weights, random_system(30, seed=1)[0])


def test_repeated_problems_are_independent_runs_of_one(small):
    target, base = repeated(small, small.mean_field(), 3)
    method = dgm.GibbsTempering(draws=50, warmup=10, pilot_temperatures=20)
    evidence = dgm.log_evidence(target, base, method, seed=0, progress=False)
    assert evidence.log_z.shape == (3,)
    assert len(set(evidence.log_z.tolist())) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoltzmannRelaxation(torch.zeros(3, 2), torch.zeros(3)), r"weights of shape \(3, 2\)"),
        (lambda: BoltzmannRelaxation(torch.eye(3), torch.zeros(3)), "diagonal of zeros"),
        (lambda: BoltzmannRelaxation(*random_system(22, 0)).exact(), "20 units at most"),
        (lambda: random_system(1, 0), "units=1"),
        (lambda: BoltzmannRelaxation(torch.zeros(3, 3), torch.zeros(3)), "leaves nothing to relax"),
        (lambda: BoltzmannRelaxation(*random_system(5, 0)).mean_field(0), "starts=0"),
        (
            lambda: repeated(
                dgm.Target(lambda x: x.square().sum(-1), 2, (3,)), dgm.Gaussian(torch.zeros(3, 2), 1.0), 2
            ),
            r"batch \(3,\)",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()


def test_missing_systems_are_named(tmp_path):
    with pytest.raises(dgm.errors.CheckpointError, match=r"system_0\.npz does not exist"):
        published_system(tmp_path, 0)


def test_published_systems_have_the_known_ranks_and_evidence():
    folder = reference_folder("boltzmann")
    known = [(27, 170.8345), (27, 172.9647), (27, 172.8749), (27, 173.2117), (26, 164.0688)]
    for i, (rank, log_z) in enumerate(known):
        relaxation, truth = published_system(folder, i)
        assert relaxation.dim == rank
        assert truth.log_z == pytest.approx(log_z, abs=1e-4)


@pytest.mark.slow
def test_tempering_finds_the_modes_of_a_published_system_and_a_plain_chain_does_not():
    relaxation, truth = published_system(reference_folder("boltzmann"), 2)
    # joint moves: the means of one run are off by 0.13 to 0.3, those of four together by half as much
    runs = 4
    target, base = repeated(relaxation, relaxation.mean_field().to(torch.float32), runs)
    worst = 0.0
    # simulated tempering has more systems, in tests of the experiment
    for method in (dgm.GibbsTempering, dgm.ContinuousTempering):
        evidence = dgm.log_evidence(
            target, base, method(draws=750, n_steps=20, thin=5), chains=64, seed=1, progress=False
        )
        # 0.05 to 0.15 over six seeds, with twice the draws
        assert (evidence.log_z - truth.log_z).square().mean().sqrt() <= 0.3
        moments = weighted_moments(evidence.draws.flatten(0, 1).double(), evidence.log_weights.flatten(0, 1))
        worst = max(worst, float((moments.mean.mean(0) - truth.mean).square().mean().sqrt()))
    start = base.to(FLOAT).sample((16,), torch.Generator().manual_seed(0))[:, 0]
    with pytest.warns(UserWarning, match="groups that never overlap"):
        chains = dgm.sample(relaxation, dgm.HMC(n_steps=20), chains=16, warmup=100, draws=400, seed=1, initial=start)
    assert float(chains.summary()["r_hat"].max()) > 1.3
    plain = chains.inputs.mean((0, 1)) - truth.mean
    assert plain.square().mean().sqrt() > 2 * worst
    assert math.isfinite(worst)
