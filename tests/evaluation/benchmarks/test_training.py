"""Training by Lightning beside a plain loop: that both do the same, and what is written."""

import json
import time
from pathlib import Path

import pytest
import torch

import generators
from evaluation.benchmarks import training
from evaluation.benchmarks.autoencoders import trained
from evaluation.benchmarks.plain_loop_peer import plain_loss
from evaluation.commands.cli import main
from tests.files import write_mnist
from trainers import IWAETraining, MNISTData, VAETraining
from trainers.mnist import N_VALIDATION

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")

SMALL = ["--rounds", "1", "--steps", "1", "--cores", "1"]


@pytest.mark.parametrize("samples", [None, 5])
def test_the_loop_by_hand_has_the_loss_and_the_gradient_of_the_module(samples, monkeypatch):
    torch.manual_seed(0)
    model = generators.BernoulliVAE(3, (4, 4), (6,))
    module = VAETraining(model) if samples is None else IWAETraining(model, samples)
    monkeypatch.setattr(module, "log", lambda *args, **options: None)
    x = torch.bernoulli(torch.rand(7, 4, 4))
    found = []
    for loss in (lambda: module.training_step(x, 0), lambda: plain_loss(model, x.flatten(1), samples)):
        torch.manual_seed(1)
        model.zero_grad()
        value = loss()
        value.backward()
        found.append((value, [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_a_slower_side_has_a_smaller_share(monkeypatch):
    case = training.Case("small", None, 8, None)
    ordinary = training.compared(case, 3, 3, "cpu", 0)
    monkeypatch.setattr(VAETraining, "on_train_batch_start", lambda *args: time.sleep(0.1))
    slowed = training.compared(case, 3, 3, "cpu", 0)
    assert slowed["share"] < ordinary["share"]
    assert slowed["lightning"]["step_ms"] > 100
    # asleep, the processor does nothing
    assert slowed["cpu_share"] > 2 * slowed["share"]


def test_results_and_table_are_written(tmp_path, capsys):
    output = tmp_path / "results"
    state = torch.get_rng_state()
    assert main(["bench", "training", *SMALL, "--output", str(output)]) == 0
    assert torch.equal(torch.get_rng_state(), state)
    record = json.loads((output / "training_cpu.json").read_text())
    assert list(record["cases"]) == [case.name for case in training.CASES]
    for row in record["cases"].values():
        (plain,), (lightning,) = row["plain"]["turns"], row["lightning"]["turns"]
        assert row["share"] == pytest.approx(plain["seconds"] / lightning["seconds"])
    text = (output / "training.md").read_text()
    assert text == training.table(output)
    assert text in capsys.readouterr().out
    # every case has five cells without a GPU, and a line says so
    assert text.count("not measured") == 5 * len(training.CASES) + 1


def test_published_results_are_valid():
    folder = Path(__file__).parents[3] / "evaluation" / "results"
    assert (folder / "training.md").read_text() == training.table(folder)


def test_a_run_in_sixteen_bits_is_recorded(tmp_path):
    write_mnist(tmp_path, N_VALIDATION + 20, 7)
    data = MNISTData(tmp_path, batch_size=10, binarise="dynamic")
    with torch.random.fork_rng():
        model, figures = trained(2, data, 1, 1e-3, 0, "cpu", "bf16-mixed")
    assert not model.training
    assert figures["best_epoch"] == 1
    assert figures["seconds"] > 0


@pytest.mark.gpu
def test_a_gpu_is_measured_too(tmp_path):
    write_mnist(tmp_path / "data", N_VALIDATION + 20, 7)
    options = ["--device", "cuda", "--epochs", "1", "--data", str(tmp_path / "data"), "--output", str(tmp_path)]
    assert main(["bench", "training", *SMALL, *options]) == 0
    record = json.loads((tmp_path / "training_cuda.json").read_text())
    assert len(record["precision"]) == 2 + 4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rounds", "0"], "rounds: 0"),
        (["--steps", "0"], "steps: 0"),
        (["--seed", "-1"], "seed: -1"),
        (["--cores", "100000"], "cores: 100000"),
        (["--device", "tpu"], "device"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "training", *SMALL, "--output", str(tmp_path / "results"), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert named in message
    assert not (tmp_path / "results").exists()
