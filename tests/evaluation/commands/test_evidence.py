"""The evidence command: its run folder, what it says, and what it refuses."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import dgm_infer as dgm
import generators
from dgm_infer import Evidence
from dgm_infer.errors import EvidenceError, ModelError
from evaluation.commands.cli import main
from evaluation.commands.evidence import _parts, fitted_base
from evaluation.figures import log_evidence
from evaluation.reports.estimates import Estimates, caveats, table
from tests.findings import honest
from tests.quick import some

# runs as short as these may have no round trip, and say so
pytestmark = honest

CONFIG = """\
name: small
generator: digits_vae
images: trainers.DigitsData
n_images: 3
methods:
  - class_path: dgm_infer.Elbo
    init_args: {samples: 20}
  - class_path: dgm_infer.AIS
    init_args: {temperatures: 20, pilot_temperatures: 10, n_steps: 3}
  - class_path: dgm_infer.GibbsTempering
    init_args: {draws: 20, warmup: 5, pilot_temperatures: 10, n_steps: 3}
bounds: {temperatures: 20, pilot_temperatures: 10, n_steps: 3}
n_simulated: 2
chains: 4
seed: 1
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def run(config, *options):
    return main(["evidence", "--config", config, *options])


def test_a_run_folder_has_estimates_table_and_picture(config, tmp_path, capsys):
    assert run(config) == 0
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    labels = {"Elbo", "AIS", "GibbsTempering", "reverse_AIS", "Bennett"}
    assert {path.name for path in folder.iterdir()} == {f"{label}.npz" for label in labels} | {
        "config.yaml",
        "evidence.csv",
        "evidence.png",
        "log.txt",
        "report.html",
    }
    found = Evidence.load(folder / "AIS.npz")
    assert found.log_z.shape == (3,)
    assert found.status == "unbiased"
    with open(folder / "evidence.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    assert float(next(row["log_z"] for row in rows if row["method"] == "AIS")) == pytest.approx(found.log_z[0].item())
    with Image.open(folder / "evidence.png") as picture:
        assert min(picture.size) > 300
    text = capsys.readouterr().out
    assert text.endswith("\n")
    for words in ("heuristic", "mean gap", "3 images, 4 chains each, seed 1", "2 images simulated"):
        assert words in text
    assert (folder / "log.txt").read_text() in text


@pytest.mark.slow
def test_the_resolved_configuration_repeats_the_run(config, tmp_path):
    assert run(config, "--n_simulated", "0") == 0
    (first,) = (tmp_path / "runs" / "small").iterdir()
    assert run(str(first / "config.yaml"), "--name", "again") == 0
    (second,) = (tmp_path / "runs" / "again").iterdir()
    for name in ("AIS.npz", "Bennett.npz"):
        assert torch.equal(Evidence.load(first / name).log_z, Evidence.load(second / name).log_z)


def test_without_bounds_there_are_none(config, tmp_path, capsys):
    assert run(config, "--bounds", "null", "--n_simulated", "0") == 0
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert not (folder / "Bennett.npz").exists()
    assert "heuristic" not in capsys.readouterr().out


def test_a_binary_generator_needs_binary_images(config, tmp_path, capsys):
    torch.manual_seed(0)
    generators.save(generators.IWAE(3, (8, 8), (16,)), tmp_path / "binary")
    assert run(config, "--generator", "binary", "--n_simulated", "2") == 2
    assert "binarise" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert run(config, "--generator", "binary", "--binarise", "0.5") == 0


class WithoutEncoder(generators.GaussianVAE):
    def __init__(self):
        super().__init__(2, (8, 8), (4,), sd=0.3)
        del self.encoder


@pytest.mark.slow
@pytest.mark.parametrize("kind", some((None, "diagonal", "low_rank", "full", "laplace"), quick=(None,)))
def test_a_generator_without_an_encoder_has_other_bases(kind):
    torch.manual_seed(0)
    model = WithoutEncoder()
    target = generators.LatentPosterior(model.decoder, torch.rand(3, 8, 8), model.prior)
    base = fitted_base(dgm.models.LatentVariableModel.of(model), target, kind, 0)
    assert base.batch_shape == (3,)
    assert base.mean.dtype == torch.float32
    estimate = dgm.log_evidence(target, base, dgm.evidence.ImportanceSampling(200), chains=4, seed=0, progress=False)
    assert estimate.log_z.isfinite().all()


def _npy(array):
    np.save("images.npy", array)
    return "images.npy"


def test_a_base_that_cannot_be_had_leads_to_those_of_the_command(monkeypatch):
    model, images = generators.load("digits_vae"), torch.zeros(2, 8, 8)
    target = generators.LatentPosterior(model.decoder, images, model.prior)

    def none(cls, target):
        raise EvidenceError("the Hessian at the mode is not positive definite for 1 of 2 problems: pass start=")

    monkeypatch.setattr(dgm.Gaussian, "laplace", classmethod(none))
    with pytest.raises(EvidenceError, match=r"for 1 of 2 problems: choose base full, low_rank or diagonal$"):
        fitted_base(dgm.models.LatentVariableModel.of(model), target, "laplace", 0)


BAD = {
    "unknown key": (["--chainz", "3"], "did you mean 'chains'"),
    "abbreviated option": (["--chunks", "3"], "did you mean 'chunk'"),
    "wrong type": (["--chains", "many"], "many"),
    "one chain": (["--chains", "1"], "chains = 1"),
    "zero chains": (["--chains", "0"], "chains = 0"),
    "zero images": (["--n_images", "0"], "n_images"),
    "zero images at a time": (["--chunk", "0"], "chunk=0"),
    "negative seed": (["--seed", "-1"], "seed=-1"),
    "no methods": (["--methods", "[]"], "methods"),
    "unknown method": (["--methods", "[{class_path: dgm_infer.AISS}]"], "AISS"),
    "class that is not a method": (["--methods", "[{class_path: dgm_infer.StandardNormal}]"], "protocol Method"),
    "illegal method": (["--methods", "[{class_path: dgm_infer.AIS, init_args: {temperatures: 0}}]"], "temperatures=0"),
    "unknown base": (["--base", "prior"], "prior"),
    "negative count": (["--n_simulated", "-1"], "n_simulated"),
    "unknown generator": (["--generator", "digit_vae"], "digits_vae"),
    "generator without a decoder": (["--generator", "{class_path: generators.Hyperbola}"], "no decoder"),
    "generator without an encoder": (
        ["--base", "encoder", "--generator", f"{{class_path: {__name__}.WithoutEncoder}}"],
        "no encoder",
    ),
    "missing images": (["--images", "absent.npy"], "absent.npy"),
    "device that there is none of": (["--device", "gpu7"], "gpu7"),
    "name that leads elsewhere": (["--name", "../x"], "'../x'"),
}


# what the library itself says to these, or the same to every command, is tested there
SAID_ELSEWHERE = {
    "abbreviated option",
    "one chain",
    "zero chains",
    "zero images at a time",
    "negative seed",
    "illegal method",
    "unknown generator",
    "missing images",
    "device that there is none of",
    "name that leads elsewhere",
}


@pytest.mark.parametrize("case", some(BAD, quick=BAD.keys() - SAID_ELSEWHERE))
def test_bad_input_gets_one_line_and_exit_code_2(case, config, tmp_path, capsys):
    options, named = BAD[case]
    assert run(config, *options) == 2
    error = [line for line in capsys.readouterr().err.strip().splitlines() if "it/s" not in line]
    assert len(error) == 1, error
    assert error[0].startswith("dgm-infer evidence: error: ")
    assert named in error[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("images", "words"),
    [(np.full((3, 8, 8), np.nan), "not finite"), (np.mgrid[:3, :8, 0:256:32][2] + 0.0, "divide by")],
)
def test_pixels_of_no_use_are_refused(config, capsys, images, words):
    assert run(config, "--images", _npy(images)) == 2
    assert words in capsys.readouterr().err


def estimates(log_z, error, **changes):
    values = {"status": "unbiased", "seconds": 1.0, "gradient_evaluations": 10}
    return Estimates("method", torch.tensor(log_z).double(), torch.tensor(error).double(), **{**values, **changes})


def test_the_error_of_a_mean_is_that_of_independent_estimates():
    row = estimates([1.0, 2.0, 6.0], [0.3, 0.4, 1.2])
    assert row.mean == 3
    assert row.mean_error == pytest.approx(1.3 / 3)
    assert json.loads(json.dumps(row.record()))["std_error"] == pytest.approx([0.3, 0.4, 1.2])
    assert "3.000   0.433     0.400" in table([row])


def evidence(status="consistent", **diagnostics):
    values = torch.zeros(3, dtype=torch.float64)
    return Evidence(
        log_z=values, std_error=values, bias=values, dof=3, status=status, method="m", diagnostics=diagnostics,
        draws=None, log_weights=values.expand(4, 1, 3), seed=0,
    )  # fmt: skip


def test_problems_not_to_be_trusted_are_named():
    agree = torch.tensor([True, False, False])
    (line,) = caveats("m", evidence(base_moments_agree=agree))
    assert line.startswith("m: misleading: base moments are not recovered at beta = 0 of problems 1 and 2: ")
    share = torch.tensor([0.9, 0.1, math.nan])
    (line,) = caveats("m", evidence("unbiased", max_weight_share=share))
    assert line.startswith("m: misleading: one draw has 90 % of the weight of problem 0: ")
    assert caveats("m", evidence(base_moments_agree=~torch.zeros(3, dtype=torch.bool))) == []
    assert caveats("m", evidence("lower", max_weight_share=share)) == []


def test_chains_cut_short_are_named_by_the_command(config, tmp_path, capsys):
    """Steps that go nowhere leave the chains where the pilot put them."""
    stuck = "{class_path: dgm_infer.GibbsTempering, init_args: {draws: 4, warmup: 0, n_steps: 1, step_size: 1.0e-4}}"
    assert run(config, "--methods", f"[{stuck}]", "--bounds", "null") == 0
    assert "GibbsTempering: misleading: no chain went from the base to the target and back" in capsys.readouterr().out


def test_pictures_are_drawn_of_one_image_and_of_errors_that_are_not_known(tmp_path):
    rows = [estimates([1.0], [math.nan], status=status) for status in ("unbiased", "lower", "upper", "heuristic")]
    log_evidence.by_image(tmp_path / "a.png", rows, rows[0])
    log_evidence.against_time(tmp_path / "b.png", {"AIS": rows}, {"ELBO": 0.5}, (0.9, 1.1), title="title")
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300


def test_a_network_with_noise_has_a_decoder_of_the_same_density():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Sigmoid(), torch.nn.Unflatten(-1, (4, 4))).eval()
    noisy = dgm.WithNoise(generators.from_module(net, latent=3), 0.2)
    x, z = torch.rand(2, 4, 4), torch.randn(5, 2, 3)
    model = _parts(noisy)
    target = generators.LatentPosterior(model.decoder, x, model.prior)
    marginal = dgm.condition(noisy, x, dtype=torch.float32).marginal
    torch.testing.assert_close(target.energy(z), marginal.energy(z), rtol=1e-4, atol=1e-3)
    # the control: other noise
    other = generators.LatentPosterior(_parts(dgm.WithNoise(noisy.model, 0.25)).decoder, x, model.prior)
    assert (target.energy(z) - other.energy(z)).abs().max() > 1
    with pytest.raises(ModelError, match="--output_noise SD"):
        _parts(noisy.model)
