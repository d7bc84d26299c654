"""The benchmark of log evidence: what it measures, on a small network in the published layout, and what it writes."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.files import REFERENCE_DATA
from evaluation.benchmarks import evidence
from evaluation.commands.cli import main
from evaluation.reports.estimates import Estimates
from tests.files import write_iwae

SMALL = [
    *("--images", "3", "--chains", "2", "--temperatures", "2", "--repeats", "2"),
    *("--compared_images", "2", "--compared_chains", "2", "--compared_temperatures", "4", "--cores", "1"),
    *("--reference_temperatures", "4"),
]


# that so few chains and temperatures estimate nothing is said
tiny = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data" / "iwae_mnist"
    folder.mkdir(parents=True)
    write_iwae(folder, sizes=(3, 7, 6, 784))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 2, (5, 784), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, latents=rng.normal(size=(5, 3)))
    return folder.parent


def bench(data, output, *options):
    return main(["bench", "evidence", *SMALL, "--data", str(data), "--output", str(output), *options])


@pytest.mark.slow
@tiny
def test_results_and_table_are_written(data, tmp_path, capsys):
    before = torch.get_num_threads()
    assert bench(data, tmp_path / "results", "--peer", "false", "--jax", "false") == 0
    assert torch.get_num_threads() == before
    record = json.loads((tmp_path / "results" / "evidence_cpu.json").read_text())
    assert record["settings"]["images"] == 3
    speed = record["throughput"]
    assert len(speed["turns"]["annealing"]) == 2
    assert speed["share"] == pytest.approx(
        np.median(np.divide(speed["turns"]["annealing"], speed["turns"]["bare_loop"])), rel=1e-9
    )
    assert set(record["methods"]) == {"Elbo", "ImportanceSampling", "AIS", "GibbsTempering", "ContinuousTempering"}
    assert record["annealing"]["over_pyro"] is None
    text = (tmp_path / "results" / "evidence.md").read_text()
    assert text == evidence.table(tmp_path / "results")
    assert text in capsys.readouterr().out
    # no GPU column, nothing of Pyro's, and not the run that is a GPU's
    assert text.count("not measured") == 10 + 3


@pytest.mark.slow
@tiny
def test_pyro_stands_beside_ours(data, tmp_path):
    assert bench(data, tmp_path / "results", "--jax", "false") == 0
    record = json.loads((tmp_path / "results" / "evidence_cpu.json").read_text())
    labels = [label for label in record["methods"] if label.startswith("Pyro")]
    assert len(labels) == 5
    ratios = record["annealing"]["over_pyro"]
    seconds = record["annealing"]["seconds"]
    assert ratios["same_images"] == pytest.approx(seconds["same_images"] / seconds["pyro"])


def test_published_results_are_valid():
    folder = Path(__file__).parents[3] / "evaluation" / "results"
    assert (folder / "evidence.md").read_text() == evidence.table(folder)


@pytest.fixture
def small():
    """A posterior of four images, and a base."""
    torch.manual_seed(0)
    model = generators.IWAE(3, (4, 4), (8,))
    target = generators.LatentPosterior(model.decoder, torch.zeros(4, 16), dgm.StandardNormal(3))
    return target, dgm.Gaussian(torch.zeros(4, 3), torch.ones(4, 3))


def test_an_interrupted_annealing_has_no_rate(small, monkeypatch):
    def interrupted(*arguments, whole=dgm.log_evidence, **options):
        result = whole(*arguments, **options)
        result.interrupted = True
        return result

    monkeypatch.setattr(dgm, "log_evidence", interrupted)
    target, base = small
    with pytest.raises(KeyboardInterrupt):
        evidence.throughput(target, base, 2, 2, 2, 0)


def test_a_slower_gradient_has_a_smaller_rate(small, monkeypatch):
    target, base = small
    fast = evidence.throughput(target, base, 2, 2, 2, 0)
    quick = target.energy_and_gradient

    def slow(z):
        time.sleep(0.01)
        return quick(z)

    monkeypatch.setattr(target, "energy_and_gradient", slow)
    slowed = evidence.throughput(target, base, 2, 2, 2, 0)
    # 8 image-gradients in ten milliseconds and more
    assert slowed["bare_loop"] < 800 < fast["bare_loop"]
    assert slowed["annealing"] < 800 < fast["annealing"]


def test_seconds_to_an_error_go_with_variance_and_time():
    row = Estimates("a", torch.zeros(2), torch.tensor([0.1, 0.3]), "unbiased", 4.0, 10)
    # four times the time at a quarter of the variance is the same
    other = Estimates("b", torch.zeros(2), torch.tensor([0.05, 0.15]), "unbiased", 16.0, 10)
    assert evidence.seconds_to_error(row) == pytest.approx(4 / 2 * 0.05 / 0.01)
    assert evidence.seconds_to_error(other) == pytest.approx(evidence.seconds_to_error(row))


BAD = {
    "no images": (["--images", "0"], "images: 0"),
    "more images than there are": (["--images", "6"], "at most the 5 published"),
    "no temperatures": (["--temperatures", "0"], "temperatures: 0"),
    "one chain": (["--compared_chains", "1"], "compared_chains: 1"),
    "too many cores": (["--cores", "100000"], "cores: 100000"),
    "negative seed": (["--seed", "-1"], "seed: -1"),
    "absent data": (["--data", "absent"], "absent"),
    "data of another kind": (["--data", "."], "decoder.npz does not exist"),
    "misspelt option": (["--image", "3"], "--image"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, named = BAD[case]
    assert bench(data, tmp_path / "results", *options) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert named in message
    assert not (tmp_path / "results").exists()


def test_without_data_the_variable_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(REFERENCE_DATA, raising=False)
    assert main(["bench", "evidence", "--output", str(tmp_path / "results")]) == 2
    assert REFERENCE_DATA in capsys.readouterr().err
