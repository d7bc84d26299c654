"""Every example of docs/extending.md runs, and adding its part takes one file and the registry, nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dgm_infer as dgm
import generators
from generators.registry import CLASSES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```(python|diff)\n(.*?)```", PAGE, re.DOTALL)
PARTS = ["GaussianWalk", "Antithetic", "Forward", "Differences", "PoissonVAE"]
SUITES = {
    "tests/dgm_infer/kernels/test_contract.py": "GaussianWalk",
    "tests/dgm_infer/evidence/test_contract.py": "Antithetic",
}


def path_of(block: str) -> str | None:
    """The file that a block is, by its first line; None for a block that uses it."""
    first = re.match(r"# (\S+\.py)\n", block)
    return None if first is None else first[1]


@pytest.fixture
def _registered(monkeypatch):
    # what an example registers is gone after it
    for name in list(CLASSES):
        monkeypatch.setitem(CLASSES, name, CLASSES[name])
    yield
    CLASSES.pop("PoissonVAE", None)


@pytest.mark.slow
@pytest.mark.usefixtures("_registered")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_examples_run_as_printed(capsys):
    names = {"__name__": "extending", "dgm": dgm, "generators": generators, "torch": torch}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block, "docs/extending.md", "exec"), names)
    assert set(PARTS) <= set(names)
    walk = names["walk"]
    assert walk.inputs.shape == (8, 200, 2)
    # what warm-up chose is accepted as often as asked for
    assert 0.6 < walk.stats["acceptance_rate"].mean() < 0.95
    truth = torch.tensor(2 * torch.pi).log().item()
    estimate = names["estimate"]
    assert (estimate.log_z - truth).abs() < 5 * estimate.std_error
    assert (names["ring"].stats["constraint_error"] < 1e-7).all()
    assert names["fibre"].structure.units == (1, 2, 1)
    assert isinstance(names["posterior"], generators.LatentPosterior)
    assert names["likelihood"].log_z.shape == (1,)
    assert "Blocks" in capsys.readouterr().out


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["VAETraining", "IWAETraining"])
def test_the_decoder_trains(name):
    trainers = pytest.importorskip("trainers")
    names: dict[str, Any] = {"__name__": "extending"}
    (block,) = (block for kind, block in BLOCKS if path_of(block) == "generators/counts.py")
    exec(compile(block, "docs/extending.md", "exec"), names)
    module = getattr(trainers, name)(names["PoissonVAE"]())
    assert isinstance(module.generator, names["PoissonVAE"])


def added(source: str, diff: str) -> str:
    """A file with the added lines of a diff, each after the line before it in the diff."""
    after = None
    for line in diff.splitlines()[1:]:
        if line.startswith("+"):
            assert after is not None
            # a list on one line goes on after what it begins with
            end = source.index(after) + len(after)
            gap = "" if line.startswith("+,") else "\n"
            source = source[:end] + gap + line[1:] + source[end:]
            after = line[1:]
        else:
            assert source.count(line[1:]) == 1, f"{line[1:]!r} is not in the file once"
            after = line[1:]
    return source


@pytest.mark.slow
def test_adding_all_of_them_takes_two_files_each_and_their_contracts_hold(tmp_path):
    for package in ("dgm_infer", "generators", "trainers", "tests"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    touched = {part: [] for part in PARTS}
    for kind, block in BLOCKS:
        path = path_of(block)
        if path is None:
            continue
        file = tmp_path / path
        assert file.exists() == (kind == "diff"), path
        text = added(file.read_text(), block) if kind == "diff" else block
        file.write_text(text)
        (part,) = (part for part in PARTS if re.search(rf"\b{part}\b", block))
        touched[part].append(path)
    assert all(len(paths) == 2 for paths in touched.values())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    check = (
        "import dgm_infer as dgm, generators\n"
        "from dgm_infer.structures import STRUCTURES\n"
        "from dgm_infer.conditioning import Differences\n"
        "from generators.registry import CLASSES\n"
        "print(dgm.__file__, dgm.kernels.GaussianWalk, dgm.evidence.Antithetic)\n"
        "print(STRUCTURES['forward'], CLASSES['PoissonVAE'])"
    )
    seen = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert seen.returncode == 0, seen.stderr
    assert str(tmp_path) in seen.stdout
    for suite, part in SUITES.items():
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-k", part, suite],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-3000:]
        assert re.search(r"[1-9]\d* passed|\d+%", run.stdout)


def test_the_page_names_files_that_exist():
    for path in re.findall(r"`((?:tests|dgm_infer|generators)/[\w/]+(?:\.py)?/?)`", PAGE):
        assert (ROOT / path).exists(), path
