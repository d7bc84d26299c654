"""Objectives of generators and critics against closed forms."""

import math

import pytest
import torch
from torch import nn

from trainers.adversarial import average_towards, critic_loss, energy_distance, generator_loss, gradient_penalty


def test_the_non_saturating_losses_are_those_of_the_paper():
    real, fake = torch.tensor([0.3, 2.0]), torch.tensor([-1.0, 0.7])
    p, q = real.sigmoid(), fake.sigmoid()
    torch.testing.assert_close(critic_loss("non_saturating", real, fake), -(p.log().mean() + (1 - q).log().mean()))
    torch.testing.assert_close(generator_loss("non_saturating", fake), -q.log().mean())
    # a critic that cannot tell
    assert critic_loss("non_saturating", torch.zeros(3), torch.zeros(3)).item() == pytest.approx(2 * math.log(2))


def test_a_confident_critic_leaves_the_generator_its_gradient():
    score = torch.tensor([-30.0], requires_grad=True)
    (slope,) = torch.autograd.grad(generator_loss("non_saturating", score), score)
    assert slope.item() == pytest.approx(-1)


def test_wassersteins_losses_are_differences_of_means():
    real, fake = torch.tensor([0.3, 2.0]), torch.tensor([-1.0, 0.7])
    assert critic_loss("wasserstein", real, fake).item() == pytest.approx(-0.15 - 1.15)
    assert generator_loss("wasserstein", fake).item() == pytest.approx(0.15)


def test_the_penalty_of_a_linear_critic_is_that_of_its_slope():
    slope = torch.tensor([[3.0, 0.0], [0.0, 4.0]])

    def critic(x):
        return (x * slope).sum((-1, -2))

    real, fake = torch.randn(6, 2, 2), torch.randn(6, 2, 2)
    assert gradient_penalty("wasserstein", critic, real, fake).item() == pytest.approx((5 - 1) ** 2)
    assert gradient_penalty("non_saturating", critic, real, fake).item() == pytest.approx(25 / 2)


def test_the_penalty_is_taken_between_the_images_or_at_real_ones():
    """The critic ``x^2 / 2`` has the slope x."""

    def critic(x):
        return x.square().sum(-1) / 2

    real, fake = torch.full((20_000, 1), 1.0), torch.full((20_000, 1), 3.0)
    torch.manual_seed(0)
    # x uniform on [1, 3]: E (x - 1)^2 = 4/3
    assert gradient_penalty("wasserstein", critic, real, fake).item() == pytest.approx(4 / 3, abs=5 * 1.2 / 20_000**0.5)
    assert gradient_penalty("non_saturating", critic, real, fake).item() == pytest.approx(0.5)


def test_the_penalty_reaches_the_critics_parameters_also_where_the_slope_is_zero():
    critic = nn.Linear(3, 1)
    nn.init.zeros_(critic.weight)
    gradient_penalty("wasserstein", lambda x: critic(x).squeeze(-1), torch.rand(4, 3), torch.rand(4, 3)).backward()
    assert critic.weight.grad is not None
    assert critic.weight.grad.isfinite().all()


def test_the_average_forgets_its_start_and_follows_with_its_decay():
    average, source = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for tensor in (source.weight.data, source.running_mean):
        tensor.fill_(1.0)
    nn.init.zeros_(average.weight)
    average_towards(average, source, decay=0.9, updates=0)
    # the first of all: d = 1/10
    assert average.weight.tolist() == pytest.approx([0.9, 0.9])
    assert average.running_mean.tolist() == pytest.approx([0.9, 0.9])
    average_towards(average, source, decay=0.5, updates=10**6)
    assert average.weight.tolist() == pytest.approx([0.95, 0.95])
    source.num_batches_tracked.fill_(7)
    average_towards(average, source, decay=0.5, updates=10**6)
    assert average.num_batches_tracked == 7
    assert not average.weight.grad_fn


def test_the_energy_distance_of_normals():
    """``2 E|x - y| - E|x - x'| - E|y - y'|`` of N(0, 1) and N(m, 1), by the folded normal."""
    rng = torch.Generator().manual_seed(0)
    m = 1.5

    def folded(mean):
        # E|N(mean, 2)|
        return 2 / math.sqrt(math.pi) * math.exp(-(mean**2) / 4) + mean * math.erf(mean / 2)

    estimates = torch.stack(
        [
            energy_distance(torch.randn(200, 1, generator=rng), m + torch.randn(200, 1, generator=rng))
            for _ in range(100)
        ]
    )
    error = estimates.std() / 10
    assert (estimates.mean() - 2 * (folded(m) - folded(0))).abs() < 5 * error
    assert error < 0.02


def test_the_energy_distance_of_equal_distributions_is_unbiased():
    rng = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, 20, 3, generator=rng) for _ in range(400)]
    unbiased = torch.stack([energy_distance(x, y) for x, y in pairs])
    assert unbiased.mean().abs() < 5 * unbiased.std() / 20
    # with the zero distances of points from themselves it is not
    biased = torch.stack(
        [2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean() for x, y in pairs]
    )
    assert biased.mean() > 5 * biased.std() / 20
