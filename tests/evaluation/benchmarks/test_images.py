"""Samplers of images side by side: generators handed over, what a method came to, the record and its page."""

import json
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import generators
from dgm_infer.errors import CheckpointError, ConfigError
from evaluation.benchmarks import calibration, earlier_peer, images
from evaluation.benchmarks.crossover import crossover
from evaluation.benchmarks.image_energies import latent_energy, reached
from evaluation.benchmarks.image_methods import METHODS
from evaluation.benchmarks.image_problems import PROBLEMS, SWEPT, ImageProblem, grid, plain_network
from evaluation.benchmarks.image_sampling import Conditioned, ImageTask, run
from evaluation.benchmarks.image_summary import agreement, summarise
from evaluation.benchmarks.image_tables import page, ratios
from evaluation.benchmarks.publishing import measured_before
from evaluation.benchmarks.workers import WorkerResult
from tests.devices import DEVICE, Device, Generator
from tests.quick import cases


def smoothed():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Unflatten(-1, (2, 3)))
    return generators.from_module(net.eval(), 4, transform=torch.tanh, smooth=10)


GENERATORS = {
    "fully connected": lambda: generators.load("digits_vae"),
    "convolutional": lambda: generators.load("mnist_conv_vae"),
    "with a range": lambda: generators.load("mnist_gan"),
    "smoothed": smoothed,
}


def pickled(path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".pkl"))


def saved(net, path) -> Conditioned:
    Conditioned(net, (4,), None, torch.zeros(1, 2, 3)).save(path)
    return Conditioned.load(str(path))


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_a_generator_handed_over_makes_the_same_images_and_names_no_class_of_this_project(make, tmp_path):
    model, path = make(), tmp_path / "net.pt"
    z = torch.randn(5, model.shapes["z"][0] if hasattr(model, "shapes") else model.config["latent_dim"])
    with torch.no_grad():
        there = saved(plain_network(model), path).net(z)
        here = model.decoder.mean(z) if hasattr(model, "decoder") else model.observed(z)
    assert there.shape == (5, *model.output_shape)
    torch.testing.assert_close(there.flatten(1), here)
    assert b"generators" not in pickled(path)
    assert b"dgm_infer" not in pickled(path)


def test_control_a_network_as_it_is_names_the_classes_of_this_project(tmp_path):
    saved(generators.load("mnist_conv_vae").decoder.network, tmp_path / "net.pt")  # type: ignore[union-attr]
    assert b"generators" in pickled(tmp_path / "net.pt")


def test_a_model_without_a_network_is_not_handed_over():
    with pytest.raises(ConfigError, match="GeneralisedLambda"):
        plain_network(generators.GeneralisedLambda(3))


def test_problems_observe_what_they_say():
    assert int(grid(7)((28, 28)).sum()) == 16
    given = SWEPT["grid_3"].conditioned(2, sd=0.03)
    assert given.sd == 0.03
    assert given.mask is not None
    assert int(given.mask.sum()) == 9
    assert PROBLEMS["digits"].conditioned(2).sd == pytest.approx(0.12)


def test_the_posteriors_of_the_peers_are_that_of_the_fibre():
    pyro_peer = pytest.importorskip("evaluation.benchmarks.pyro_images_peer")
    from pyro.infer.mcmc.util import initialize_model

    given = PROBLEMS["digits"].conditioned(2)
    z = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(0))
    _, potential, _, _ = initialize_model(pyro_peer.program(given), ())
    theirs = torch.stack([potential({"z": point}) for point in z])
    ours = given.latent_posterior(None).energy(z).sum(-1)
    marginal = given.fibre().marginal.energy(z.double()).sum(-1).float()
    for energy in (ours, marginal):
        torch.testing.assert_close(energy - energy[0], theirs - theirs[0], rtol=1e-4, atol=1e-2)
    # another sd would be noticed
    narrow = Conditioned(**(vars(given) | {"sd": 0.11})).latent_posterior(None).energy(z).sum(-1)
    assert (narrow - narrow[0] - theirs + theirs[0]).abs().max() > 1


@pytest.mark.parametrize("kernel", cases({"nuts": "nuts", "lifted": "lifted"}, quick=("nuts",)))
def test_images_are_sampled_on_a_device(kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)
    path, mask = tmp_path / "conditioned.pt", torch.tensor([[True] * 3, [False] * 3])
    net = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(-1, (2, 3)))
    Conditioned(net, (3,), 0.3, torch.rand(1, 2, 3), mask).save(path)
    with Device():
        found = run(ImageTask(str(path), kernel, 1e-6, 2, 1, 1, 0, device=str(DEVICE)), print)
    # no time was left for draws: the chains came back, to the host
    assert found["last"].shape[0] == 2
    assert np.isfinite(found["last"]).all()


def test_a_device_that_is_not_there_is_named_before_anything_is_measured(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    for bench in (images.bench, calibration.bench):
        with pytest.raises(ConfigError, match="device: cuda, but PyTorch finds no GPU here"):
            bench(device="cuda", output=str(tmp_path))
    assert not list(tmp_path.iterdir())


def worker(mean=0.0, draws=500, seed=0, chains=4, **facts) -> WorkerResult:
    """Independent draws of 6 pairs."""
    z = mean + np.random.default_rng(seed).normal(size=(chains, draws, 6))
    result = {"z": z, "constraint_error": 1e-12, "steps": 3.0, "seconds": 9.0, "warmup_seconds": 1.0}
    return WorkerResult({**result, "kernel": "HMC", **facts})


def test_independent_draws_are_all_effective():
    row = summarise([worker(), worker(seed=1, draws=1000)], seconds=10)
    # lengths differ: 750 draws on average
    assert row["median_ess_per_second"] == pytest.approx(8 * 750 / 10, rel=0.1)
    assert row["min_ess_per_second"] <= row["median_ess_per_second"]
    assert (row["chains"], row["draws"], row["mixed"]) == (8, 500, 1.0)
    assert len(row["mean"]) == len(row["mcse"]) == len(row["r_hat"]) == 6
    # one that is late has the rate of the time it took
    late = summarise([worker(seconds=20.0)], seconds=10)
    assert late["median_ess_per_second"] == pytest.approx(4 * 500 / 20, rel=0.15)


def test_energies_and_masses_of_a_linear_generator_are_known():
    """Its posterior is normal: Laplace's mass is log p(y), and energies are D/2 above their minimum on average."""
    rng = torch.Generator().manual_seed(0)
    net, n, dim = nn.Linear(4, 6), 2, 4
    given = Conditioned(
        net.requires_grad_(False), (dim,), 0.3, torch.randn(n, 2, 3, generator=rng), torch.ones(2, 3) > 0
    )
    weight, y = net.weight.double(), given.images.flatten(1).double() - net.bias.double()
    marginal = torch.distributions.MultivariateNormal(torch.zeros(6).double(), weight @ weight.mT + 0.09 * torch.eye(6))
    precision = torch.eye(dim) + weight.mT @ weight / 0.09
    mean = torch.linalg.solve(precision, weight.mT @ y.mT / 0.09).mT
    factor = torch.linalg.cholesky(torch.linalg.inv(precision))
    draws = mean + torch.randn(4, 2000, n, dim, generator=rng, dtype=torch.float64) @ factor.mT
    found = reached(given, [draws.flatten(2).numpy()])
    assert found["mass"] == pytest.approx(marginal.log_prob(y).tolist(), abs=1e-3)
    least = latent_energy(given)(mean)
    # sd of the mean of 200 draws of chi squared with 4 degrees of freedom, halved: 0.1
    assert found["energy"] == pytest.approx((least + dim / 2).tolist(), abs=0.5)
    # the network handed over keeps its dtype
    assert net.weight.dtype == torch.float32
    # chains elsewhere are seen by their energy; the mode they lead to is the same
    away = reached(given, [draws.flatten(2).numpy() + 1])
    assert min(a - b for a, b in zip(away["energy"], found["energy"], strict=True)) > 1
    assert away["mass"] == pytest.approx(found["mass"], abs=1e-3)


def test_chains_apart_have_not_mixed():
    row = summarise([worker(), worker(mean=3.0, seed=1)], seconds=10)
    assert row["mixed"] == 0
    assert row["max_r_hat"] > 1.5


def test_what_failed_is_a_line():
    row = summarise([worker(draws=7), WorkerResult(error="ended")], seconds=10)
    assert row == {"errors": ["ended", "only 7 draws per chain in 9 s"]}


def test_methods_of_one_posterior_agree_and_a_planted_bias_does_not():
    rows = {f"method {i}": summarise([worker(seed=i)], 10) for i in range(3)}
    agreed = agreement(rows)
    assert agreed is not None
    assert agreed["largest"] < 4
    assert (agreed["compared"], agreed["possible"]) == (18, 18)
    rows["biased"] = summarise([worker(mean=0.2, seed=3)], 10)
    biased = agreement(rows)
    assert biased is not None
    assert biased["largest"] > 4
    assert "biased" in biased["between"]
    assert agreement({"alone": rows["biased"], "failed": {"errors": ["ended"]}}) is None
    # of few draws nobody knows how far off they are
    rows["biased"]["draws"] = 199 // rows["biased"]["chains"]
    assert agreement(rows) == agreed


def record() -> dict[str, Any]:
    def measured(speed, **facts):
        return {"budget": 10.0, **summarise([worker(seconds=1 / speed, **facts)], 1e-9)}

    rows = {
        "constrained": measured(1.0),
        "constrained b1b3d75": measured(0.1),
        "lifted": measured(4.0, seed=1),
        "default": measured(3.0, kernel="LiftedHMC", seed=2),
        "Pyro NUTS": {"budget": 10.0, "errors": ["still running after 50 s, ended"]},
        "Mici with JAX": {"left_out": "jax not installed", "errors": []},
    }
    sweep = {f"{sd:g}": measured(sd) for sd in (0.3, 0.03)} | {"0.003": {"budget": 1.0, "errors": ["late"]}}
    return {
        "command": "dgm-infer bench images",
        "date": "2026-01-01",
        "processor": "one",
        "load_average_at_start": 0.1,
        "versions": {"torch": "2"},
        "settings": {"images": 2, "cores": 1},
        "problems": {
            "digits": {"title": "digits", "methods": rows, "agreement": agreement(rows)},
            "faces": {"title": "faces", "methods": {}, "left_out": "not installed"},
        },
        "sweep": {"grid_3": {"title": "9 pixels", "methods": {"constrained": sweep, "lifted": sweep}}},
    }


def test_the_page_has_a_row_per_method_and_says_what_is_missing():
    text = page(record())
    lines = text.splitlines()
    first = next(line for line in lines if line.startswith("| Digits"))
    # constrained over the baseline, default over the peers that were measured, default over the best
    assert [cell.strip() for cell in first.split("|")[2:-1]][:5] == ["10", "-", "-", "-", first.split("|")[6].strip()]
    assert float(first.split("|")[6]) == pytest.approx(0.75, rel=0.1)
    for words in ("| default: LiftedHMC |", "- Mici with JAX: jax not installed", "still running", "Not measured: not"):
        assert words in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    assert all(line.count("|") == table[0].count("|") for table in tables for line in table if line.startswith("|"))
    assert ratios(record()).count("\n") == 4
    with_masses = record()
    rows = with_masses["problems"]["digits"]["methods"]
    rows["constrained"]["mass"], rows["lifted"]["mass"] = [-10.0, -20.0], [-12.0, -17.5]
    rows["NumPyro NUTS, prior starts"] = {**rows["lifted"], "mass": [-10.0, -17.5]}
    told = page(with_masses)
    assert "default / NumPyro NUTS, prior starts" in told
    below = {cells[1].strip(): cells[-2].strip() for line in told.splitlines() if len(cells := line.split("|")) == 13}
    assert (below["constrained"], below["lifted"], below["NumPyro NUTS, prior starts"]) == ("2.50", "2.00", "0.00")
    assert below["default: LiftedHMC"] == "-"


def test_the_crossover_is_drawn_with_the_date_of_its_record(tmp_path):
    crossover(tmp_path / "crossover.png", record())
    with Image.open(tmp_path / "crossover.png") as picture:
        assert min(picture.size) > 300
        assert picture.info["Source"] == "2026-01-01"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"problems": "digits,letters"}, "problems: 'letters' is not one of digits, mnist"),
        ({"problems": "digits=soon"}, "problems: 'soon' is not a number"),
        ({"methods": "lifted,gibbs"}, "methods: 'gibbs' is not one of constrained"),
        ({"jax_starts": "descents,truth"}, "jax_starts: 'truth' is not one of descents, prior"),
        ({"jax_dtypes": "float16"}, "jax_dtypes: 'float16' is not one of float32, float64"),
        ({"jax_warmup": 0}, "jax_warmup: 0 must be 1 or more"),
        ({"seconds": 0.0}, "seconds"),
        ({"chains": 1}, "chains"),
        ({"images": 0}, "images"),
        ({"sweep_noise": "0.3,wide"}, "sweep_noise: 'wide' is not a number"),
        ({"sweep_noise": "0.3,-1"}, "sweep_noise"),
        ({"cores": 0}, "cores"),
        ({"baseline": "."}, "baseline"),
    ],
)
def test_options_that_measure_nothing(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        images.bench(**({"output": "results"} | arguments))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_problem_that_is_not_installed_is_a_line_of_the_record(tmp_path, monkeypatch, capsys):
    def missing():
        raise CheckpointError("the face generator is not installed: make faces")

    monkeypatch.setitem(PROBLEMS, "faces", ImageProblem("faces", "faces", missing, missing, factor=16))
    path = images.bench(problems="faces", sweep=False, cores=1, output=str(tmp_path))
    left_out = json.loads(path.read_text())["problems"]["faces"]
    assert left_out == {"methods": {}, "title": "faces", "left_out": "the face generator is not installed: make faces"}
    assert "Not measured: the face generator is not installed" in capsys.readouterr().out


def test_a_method_without_its_packages_is_left_out_and_one_with_other_noise_does_not_apply(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluation.benchmarks.image_methods.find_spec", lambda name: None)
    path = images.bench(problems="digits", methods="nuts_noise,pyro,mici", sweep=False, cores=1, output=str(tmp_path))
    rows = json.loads(path.read_text())["problems"]["digits"]["methods"]
    assert {label: row["left_out"].split(":")[0] for label, row in rows.items()} == {
        "Pyro NUTS": "pyro not installed",
        "Mici with JAX": "mici and jax not installed",
    }
    for start in ("descents", "descents,prior"):
        path = images.bench(
            problems="digits", methods="numpyro", jax_starts=start, sweep=False, cores=1, output=str(tmp_path)
        )
    rows = json.loads(path.read_text())["problems"]["digits"]["methods"]
    # every form of a peer in JAX is a row, and none is that of Mici
    assert [label for label in rows if label.startswith("NumPyro")] == ["NumPyro NUTS", "NumPyro NUTS, prior starts"]
    assert METHODS["mici"].missing == "mici and jax not installed: pip install 'dgm-infer[bench]'"


@pytest.mark.slow
def test_methods_are_measured_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "SWEPT", {"grid_3": SWEPT["grid_3"]})
    options: dict[str, Any] = {"cores": 1, "chains": 2, "images": 1, "warmup": 20, "output": str(tmp_path)}
    sampled = {"problems": "digits=10", "methods": "lifted,nuts"}
    path = images.bench(**sampled, sweep_noise="0.3", sweep_seconds=5, **options)
    first = json.loads(path.read_text())
    rows = first["problems"]["digits"]["methods"]
    assert set(rows) == {"lifted", "NUTS on latents"}
    for row in rows.values():
        assert row["errors"] == []
        assert row["min_ess_per_second"] > 0
    assert rows["lifted"]["constraint_error"] < 1e-8
    assert set(first["sweep"]["grid_3"]["methods"]) == {"constrained", "lifted"}
    again = json.loads(images.bench(problems="digits=10", methods="lifted", sweep=False, **options).read_text())
    assert again["problems"] == first["problems"]
    assert again["sweep"] == first["sweep"]
    # of other settings nothing is kept
    assert measured_before(path, again["settings"] | {"seed": 1}, "problems", "sweep") == {"problems": {}, "sweep": {}}


@pytest.mark.slow
def test_another_checkout_is_what_its_process_imports(tmp_path):
    given = PROBLEMS["digits"].conditioned(1)
    given.save(tmp_path / "digits.pt")
    task = images.ImageTask(str(tmp_path / "digits.pt"), "lifted", 5.0, 2, 20, 1, 0, checkout=str(images.Path.cwd()))
    lines: list[str] = []
    result = earlier_peer.run(task, lines.append)
    assert result["z"].shape[0] == 2
    assert result["kernel"] == "LiftedHMC"
    assert any("warmed up" in line for line in lines)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="is not the dgm_infer that is found first"):
        earlier_peer.run(images.replace(task, checkout=str(tmp_path / "empty")), lines.append)
