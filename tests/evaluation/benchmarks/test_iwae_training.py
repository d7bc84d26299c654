"""The comparison of objectives: its two estimators on models where they are known, and what it writes."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import generators
from evaluation.benchmarks import iwae_training
from evaluation.commands.cli import main
from tests.files import write_mnist
from tests.models import layer
from trainers.mnist import N_VALIDATION

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")

SMALL = [
    *("--epochs", "1", "--samples", "2", "--batch_size", "10", "--bound_samples", "3", "--gradients", "16"),
    *("--gradient_images", "2", "--cores", "1"),
]


def independent_pixels() -> generators.BernoulliVAE:
    """A decoder that ignores z: p(x) is a product, and the exact posterior is the prior."""
    torch.manual_seed(0)
    model = generators.BernoulliVAE(2, (2, 3), ())
    for network in (model.decoder.network, model.encoder.network):
        with torch.no_grad():
            layer(network, -1).weight.zero_()
    with torch.no_grad():
        layer(model.encoder.network, -1).bias.zero_()
    return model


def test_bounds_of_an_exact_posterior_are_the_evidence():
    model = independent_pixels()
    images = torch.bernoulli(torch.rand(7, 2, 3))
    evidence = model.decoder(torch.zeros(7, 2)).log_prob(images.flatten(1)).double().detach()
    for bound in iwae_training.held_out_bounds(model, images, 5):
        torch.testing.assert_close(bound, evidence, rtol=0, atol=1e-5)


def test_a_wrong_posterior_separates_the_bounds():
    """The encoder's sd doubled: the ELBO loses KL = 2 (3/2 - log 2), the importance-weighted bound nearly nothing."""
    model = independent_pixels()
    with torch.no_grad():
        layer(model.encoder.network, -1).bias[2:] += math.log(2)
    images = torch.bernoulli(torch.rand(7, 2, 3))
    evidence = model.decoder(torch.zeros(7, 2)).log_prob(images.flatten(1)).double().detach()
    torch.manual_seed(1)
    elbo, iwae = iwae_training.held_out_bounds(model, images, 20_001)
    gap = 2 * (1.5 - math.log(2))
    assert abs((evidence - elbo).mean() - gap) < 0.05
    assert (evidence - iwae).mean().abs() < 0.01


@pytest.mark.slow
def test_the_ratio_of_a_known_gradient(monkeypatch):
    """A bound ``a . (signal + noise)`` has the gradient ``signal + noise``: ratio |signal| / (sd sqrt(D))."""
    model = independent_pixels()
    parameter = nn.Parameter(torch.zeros(10))
    model.encoder = nn.ParameterList([parameter])  # type: ignore[assignment]
    signal = torch.full((10,), 0.2)

    def weights(model, images, k, gradient):
        return (parameter @ (signal + torch.randn(10))).expand(1, len(images))

    monkeypatch.setattr(iwae_training, "log_weights", weights)
    torch.manual_seed(2)
    found = iwae_training.gradient_ratio(model, torch.zeros(1, 2, 3), 1, "plain", 4000)
    assert abs(found["ratio"] - 0.2) < 5 * found["error"]
    assert found["error"] < 0.01
    signal.fill_(0.4)
    assert iwae_training.gradient_ratio(model, torch.zeros(1, 2, 3), 1, "plain", 4000)["ratio"] > 0.35


def test_results_and_table_are_written(tmp_path, capsys):
    write_mnist(tmp_path / "data", N_VALIDATION + 20, 7)
    state = torch.get_rng_state()
    output = tmp_path / "results"
    assert main(["bench", "iwae_training", *SMALL, "--data", str(tmp_path / "data"), "--output", str(output)]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    record = json.loads((output / "iwae_training.json").read_text())
    assert set(record["models"]) == set(record["gradients"]) == {"VAE", "IWAE-2"}
    means = [record["models"][label]["iwae_3"]["mean"] for label in ("IWAE-2", "VAE")]
    assert record["gain"]["mean"] == pytest.approx(means[0] - means[1])
    text = (output / "iwae_training.md").read_text()
    assert text == iwae_training.table(output)
    assert text in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {"iwae_training.json", "iwae_training.md"}


def test_published_results_are_valid():
    folder = Path(__file__).parents[3] / "evaluation" / "results"
    assert (folder / "iwae_training.md").read_text() == iwae_training.table(folder)


BAD = {
    "no epochs": (["--epochs", "0"], "epochs: 0"),
    "no draws": (["--bound_samples", "0"], "bound_samples: 0"),
    "too few gradients": (["--gradients", "3"], "gradients: 3"),
    "no learning rate": (["--learning_rate", "0"], "learning_rate: 0"),
    "negative seed": (["--seed", "-1"], "seed: -1"),
    "absent data": (["--data", "absent"], "absent"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, named = BAD[case]
    assert main(["bench", "iwae_training", *SMALL, "--output", str(tmp_path / "results"), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert named in message
    assert not (tmp_path / "results").exists()
