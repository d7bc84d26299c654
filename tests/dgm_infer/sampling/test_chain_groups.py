"""A run whose chains are on several pieces of a posterior says which chains are where; one that is slow does not."""

import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.sampling import chain_groups as module
from dgm_infer.sampling.chain_groups import group_chains
from tests.oracles import FLOAT, compare

CHAINS = 32


class TwoMoons(dgm.GenerativeModel):
    """Two crescents of parameters explain the same point (the usual benchmark, with a prior off its centre)."""

    input_density = dgm.StandardNormal(4)
    output_shape = (2,)
    prior = torch.distributions.Normal(torch.tensor(0.4, dtype=FLOAT), torch.tensor(0.5, dtype=FLOAT))

    def latents(self, u):
        return {"z": self.prior.loc + self.prior.scale * u[..., :2]}

    def observed(self, u):
        first, second = self.latents(u)["z"].unbind(-1)
        angle = math.pi * (torch.special.ndtr(u[..., 2]) - 0.5)
        radius = 0.1 + 0.01 * u[..., 3]
        return torch.stack(
            [
                radius * angle.cos() + 0.25 - (first + second).abs() / math.sqrt(2),
                radius * angle.sin() + (second - first) / math.sqrt(2),
            ],
            -1,
        )

    @classmethod
    def truth(cls) -> tuple[torch.Tensor, torch.Tensor]:
        """Mass and mean of z of the crescent of either sign, given (0, 0): z is a rotation of the crescent's point."""
        angle = ((torch.arange(1000, dtype=FLOAT) + 0.5) / 1000 - 0.5) * math.pi
        deviate = torch.linspace(-8, 8, 201, dtype=FLOAT)
        radius = 0.1 + 0.01 * deviate
        total = (radius * angle.cos().unsqueeze(-1) + 0.25) * math.sqrt(2)
        difference = -radius * angle.sin().unsqueeze(-1) * math.sqrt(2)
        z = torch.stack([torch.stack([s * total - difference, s * total + difference], -1) / 2 for s in (1, -1)])
        weight = (cls.prior.log_prob(z).sum(-1) - deviate.square() / 2).exp()
        mass = weight.sum((1, 2))
        return mass / mass.sum(), (weight.unsqueeze(-1) * z).sum((1, 2)) / mass.unsqueeze(-1)


def two_moons(chains=CHAINS, draws=100, warmup=100, **changes):
    problem = dgm.condition(TwoMoons(), [0.0, 0.0])
    return dgm.sample(problem, chains=chains, draws=draws, warmup=warmup, seed=1, progress=False, **changes)


@pytest.fixture(scope="module")
def moons():
    with pytest.warns(UserWarning, match="never overlap") as said:
        draws = two_moons()
    return draws, [str(warning.message) for warning in said]


def test_two_moons_are_told_apart(moons):
    draws, said = moons
    on_second = draws.latents["z"].sum(-1) < 0
    assert (on_second == on_second[:, :1]).all()
    n_second = int(on_second[:, 0].sum())
    assert 1 <= n_second < CHAINS / 2
    assert torch.equal(draws.chain_groups == 1, on_second[:, 0])
    assert said == [
        f"sample(): misleading: chains form 2 groups that never overlap ({CHAINS - n_second} and {n_second} chains): "
        "their numbers come from the starting points and are not posterior weights (see draws.chain_groups)"
    ]


def test_the_draws_of_a_group_are_those_of_its_moon(moons):
    draws, _ = moons
    for group, mean in enumerate(TwoMoons.truth()[1]):
        z, ess = compare(draws.latents["z"][draws.chain_groups == group], mean)
        assert ess.min() > 100
        assert z.abs().max() <= 5


def test_groups_of_loaded_draws_and_of_inputs_are_the_same(moons, tmp_path):
    draws, _ = moons
    draws.save(tmp_path / "moons.nc")
    assert torch.equal(dgm.Draws.load(tmp_path / "moons.nc").chain_groups, draws.chain_groups)
    assert torch.equal(group_chains(draws.inputs), draws.chain_groups)


def test_each_problem_of_a_batch_has_its_own_groups():
    x = torch.randn(6, 100, 3, 2, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    x[:2, :, 1, 0] += 20
    x[5, :, 2, 1] = torch.arange(100)
    assert group_chains(x).T.tolist() == [[0] * 6, [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, -1]]


def test_pieces_in_many_dimensions_are_told_apart_by_few_draws():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 32, 100, generator=generator, dtype=FLOAT)
    assert group_chains(x).tolist() == [0] * 6
    x[4:] += 1.5
    assert group_chains(x).tolist() == [0, 0, 0, 0, 1, 1]
    # a coordinate in which all chains drift, and overlap, hides nothing
    x[..., 0] = torch.randn(6, 32, generator=generator, dtype=FLOAT).cumsum(1)
    assert group_chains(x).tolist() == [0, 0, 0, 0, 1, 1]


def test_a_ring_in_a_ring_is_another_group():
    angle = 2 * math.pi * torch.rand(8, 64, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    radius = torch.tensor([1.0, 1, 2, 1, 2, 1, 1, 1], dtype=FLOAT).view(-1, 1)
    rings = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    assert group_chains(rings).tolist() == [0, 0, 1, 0, 1, 0, 0, 0]


def test_a_chain_on_both_pieces_makes_them_one():
    x = torch.randn(5, 64, 1, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    x[:2] += 20
    assert group_chains(x).tolist() == [1, 1, 0, 0, 0]
    x[4, ::3] += 20
    assert group_chains(x).tolist() == [0] * 5


def test_nothing_is_said_of_too_few_draws_or_of_one_chain():
    x = torch.randn(4, 31, 1, dtype=FLOAT) + 20 * torch.arange(4).view(-1, 1, 1)
    assert (group_chains(x) == -1).all()
    assert group_chains(torch.randn(1, 100, 1)).tolist() == [-1]


# ------------------------------------------------------------------------------------------------------- slow mixing


def autoregressive(time: float, *, chains: int = 4, runs: int = 500, dim: int = 1) -> torch.Tensor:
    """Chains on one piece, ``[chains, 128, runs, dim]``; the first coordinate forgets over ``time`` draws."""
    generator = torch.Generator().manual_seed(round(time))
    keep = math.exp(-1 / time)
    noise = torch.randn(128, chains, runs, dim, generator=generator, dtype=FLOAT)
    x = noise.clone()
    for t in range(1, 128):
        x[t, ..., 0] = keep * x[t - 1, ..., 0] + math.sqrt(1 - keep**2) * noise[t, ..., 0]
    return x.movedim(0, 1)


# in draws; a run has 128
TIMES = [1, 10, 50, 200, 10_000]


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(("chains", "dim"), [(2, 1), (4, 1), (4, 5), (16, 1)])
def test_slow_chains_on_one_piece_are_seldom_taken_for_several(time, chains, dim):
    runs = 500 if chains < 16 else 50
    alarms = (group_chains(autoregressive(time, chains=chains, runs=runs, dim=dim)).amax(0) > 0).sum()
    # 0.8 % at the worst, see math 5.7: 5 standard deviations above
    assert alarms <= 0.008 * runs + 5 * math.sqrt(0.008 * runs)


def test_control_without_the_first_condition_they_are(monkeypatch):
    monkeypatch.setattr(module, "_SETTINGS", module.GroupSettings(drift=1.0))
    alarms = (group_chains(autoregressive(10_000, runs=100)).amax(0) > 0).sum()
    assert alarms > 50


def test_control_without_the_second_every_chain_is_a_group(monkeypatch):
    monkeypatch.setattr(module, "_SETTINGS", module.GroupSettings(at_home=0.0))
    assert group_chains(torch.randn(4, 64, 1, dtype=FLOAT)).amax() == 3
