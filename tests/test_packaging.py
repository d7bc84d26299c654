"""The base installation samples; a package beyond it belongs to an extra, which one line names when it is missing."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dgm_infer
from dgm_infer.errors import extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("dgm_infer", "generators", "trainers", "evaluation")
EXTRAS = PROJECT["optional-dependencies"]

# a folder whose modules are imported only where an extra is asked for
ROOMS = {
    "trainers": "train",
    "evaluation/commands": "train",
    "evaluation/experiments": "experiments",
    "evaluation/benchmarks": "bench",
}


def declared(extra: str | None) -> set[str]:
    """Distributions that an extra declares, those of the extras it includes too; None for the base."""
    names = set()
    for requirement in map(Requirement, PROJECT["dependencies"] if extra is None else EXTRAS[extra]):
        if requirement.name == PROJECT["name"]:
            names.update(*map(declared, requirement.extras))
        else:
            names.add(canonicalize_name(requirement.name))
    return names


@cache
def distributions() -> dict[str, set[str]]:
    """The installed distributions that provide a module, by its name."""
    return {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant)


def undeclared_imports(source: str, extra: str | None = None) -> list[str]:
    """Packages that a module imports though neither the base, nor ``extra``, nor an ``extra()`` block declares them."""
    found = []

    def visit(node: ast.AST, allowed: set[str]) -> None:
        if isinstance(node, ast.With):
            for item in node.items:
                call = item.context_expr
                if not isinstance(call, ast.Call):
                    continue
                # a name that is computed declares nothing
                function = ast.unparse(call.func)
                if function == "extra" and _is_literal(call.args[0]):
                    allowed = allowed | declared(ast.literal_eval(call.args[0]))
                elif function == "importing_pyro":
                    allowed = allowed | declared("pyro")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if (
                top not in {*sys.stdlib_module_names, *PACKAGES}
                and not distributions().get(top, {canonicalize_name(top)}) & allowed
            ):
                found.append(top)
        for child in ast.iter_child_nodes(node):
            visit(child, allowed)

    visit(ast.parse(source), declared(None) | (declared(extra) if extra else set()))
    return found


def test_every_import_is_declared():
    wrong = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            extra = next((extra for room, extra in ROOMS.items() if name.startswith(room + "/")), None)
            if found := undeclared_imports(path.read_text(), extra):
                wrong[name] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "extra", "found"),
    [
        ("import lightning.pytorch", None, ["lightning"]),
        ("def f():\n    from sklearn import datasets", None, ["sklearn"]),
        ("from lightning.pytorch import Trainer", "pyro", ["lightning"]),
        ('with extra("pyro"):\n    import pyro\n    import cvxpy', None, ["cvxpy"]),
        ('with extra("pyro"):\n    pass\nimport pyro', None, ["pyro"]),
        # of a package that another one brings
        ("import jinja2", "bench", ["jinja2"]),
        ("import torch.nn, numpy, json, generators", None, []),
        ("import cvxpy, lightning", "experiments", []),
        ('with extra("pyro"), catch_warnings():\n    import pyro', None, []),
    ],
)
def test_control_an_undeclared_import_is_found(source, extra, found):
    assert undeclared_imports(source, extra) == found


@cache
def beyond_the_base() -> set[str]:
    """Modules that a base installation lacks: of distributions that its requirements do not bring, all the way down."""
    brought, waiting = set(), [Requirement(line) for line in PROJECT["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in brought:
            continue
        brought.add(name)
        waiting += [below for below in map(Requirement, requires(name) or []) if _applies(below, requirement.extras)]
    return {module for module, names in distributions().items() if not names & brought} - set(PACKAGES)


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


# Finds no package whose name is among the arguments, as if it were not installed.
HIDE = """
import json, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv[1:] else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


def run(code: str, folder: Path, absent: set[str], words: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python in ``folder`` where the packages ``absent`` are not installed; ``words`` is its standard input."""
    command = [sys.executable, "-W", "ignore", "-c", f"{HIDE}\nsys.path.insert(0, {str(ROOT)!r})\n{code}"]
    return subprocess.run([*command, *sorted(absent)], cwd=folder, input=words, capture_output=True, text=True)


SAMPLE = """
import torch
import dgm_infer as dgm, generators

class Circle(dgm.GenerativeModel):
    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u.square().sum(-1, keepdim=True)

    def latents(self, u):
        return {"angle": torch.atan2(u[..., 1], u[..., 0])}

fibre = dgm.condition(Circle(), torch.tensor([2.0]))
draws = dgm.sample(fibre, chains=4, warmup=5, draws=10, seed=1, progress=False)
summary = draws.summary()
draws.save("posterior.nc")
loaded = dgm.Draws.load("posterior.nc")

model = generators.load("digits_vae")
image = model.observed(torch.zeros(1, model.input_density.dim))[0].reshape(8, 8).detach()
target = generators.LatentPosterior(model.decoder, image[None], model.global_density)
base = dgm.Gaussian.from_encoder(model.encoder, target.images)
estimate = dgm.log_evidence(target, base, dgm.AIS(temperatures=5), chains=4, seed=1, progress=False)
low, high = estimate.interval()
table = estimate.to_dataframe()

def missing(use):
    try:
        use()
    except dgm.errors.MissingExtraError as error:
        return str(error)

print(json.dumps({
    "missing": [missing(lambda: dgm.target_from_pyro), missing(lambda: __import__("trainers"))],
    "columns": list(summary),
    "same": torch.equal(loaded.inputs, draws.inputs),
    "radius": draws.inputs.square().sum(-1).sub(2).abs().max().item(),
    "width": (high - low).item(),
    "rows": len(table),
}))
"""


@pytest.mark.slow
def test_the_base_installation_samples(tmp_path):
    result = run(SAMPLE, tmp_path, beyond_the_base())
    assert result.returncode == 0, result.stderr
    done = json.loads(result.stdout)
    assert done["missing"] == [
        'pyro is not installed: pip install "dgm-infer[pyro]"',
        'lightning is not installed: pip install "dgm-infer[train]"',
    ]
    assert {"mean", "sd", "ess_bulk", "r_hat"} <= set(done["columns"])
    assert done["same"]
    assert done["radius"] < 1e-6
    assert done["width"] > 0
    assert done["rows"] == 1


def test_control_what_the_base_lacks_is_hidden(tmp_path):
    result = run("import lightning", tmp_path, beyond_the_base())
    assert result.returncode == 1
    assert "No module named 'lightning'" in result.stderr
    result = run("import sklearn", tmp_path, {"sklearn"})
    assert "No module named 'sklearn'" in result.stderr


def test_of_nested_extras_the_outermost_is_named():
    expected = pytest.raises(dgm_infer.errors.MissingExtraError, match=r"^absent is not .*\[bench\]")
    with expected as caught, extra("bench"), extra("pyro"):
        import absent  # type: ignore[import-not-found] # noqa: F401
    assert isinstance(caught.value, ModuleNotFoundError)
    assert caught.value.name == "absent"


def test_a_package_that_is_there_and_lacks_a_module_is_not_called_missing():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'dgm_infer\.absent'"), extra("pyro"):
        import dgm_infer.absent  # type: ignore[import-not-found] # noqa: F401


COMMANDS = """
import io
from contextlib import redirect_stderr, redirect_stdout
from evaluation.commands.cli import main

answers = {}
for line in sys.stdin:
    with redirect_stderr(io.StringIO()) as errors, redirect_stdout(io.StringIO()) as words:
        code = main(line.split())
    answers[line.strip()] = [code, words.getvalue(), errors.getvalue()]
print(json.dumps(answers))
"""

# the extra that a command names first, by its command line
NAMED = {
    f"train --config {ROOT}/configs/train/digits_vae.yaml": "train",
    f"condition --config {ROOT}/configs/condition/digits_top_half.yaml": "train",
    f"evidence --config {ROOT}/configs/evidence/digits_vae.yaml": "train",
    "reproduce boltzmann": "experiments",
    "bench evidence": "bench",
    "bench training": "bench",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the commands of a base installation answer: exit code, standard output, standard error."""
    lines = "\n".join([*NAMED, "--help", "--version"])
    result = run(COMMANDS, tmp_path_factory.mktemp("base"), beyond_the_base(), lines)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", NAMED)
@pytest.mark.slow
def test_a_command_of_the_base_installation_names_its_extra(command, answers):
    code, words, errors = answers[command]
    assert code == 2
    assert words == ""
    name = command.split()[0]
    remedy = f'pip install "dgm-infer[{NAMED[command]}]"'
    assert re.fullmatch(rf"dgm-infer {name}: error: \w+ is not installed: {re.escape(remedy)}\n", errors)


@pytest.mark.slow
def test_the_base_installation_has_help_and_version(answers):
    assert answers["--version"] == [0, f"dgm-infer {dgm_infer.__version__}\n", ""]
    assert answers["--help"][0] == 0


# a command that needs the package, among the others of its extra, which are there
NEEDS = {
    "blackjax": "bench series",
    "clarabel": "reproduce boltzmann --fast",
    "cvxpy": "reproduce boltzmann --fast",
    "jsonargparse": f"evidence --config {ROOT}/configs/evidence/digits_vae.yaml",
    "lightning": f"condition --config {ROOT}/configs/condition/digits_top_half.yaml",
    "mici": "bench fibre",
    "numpyro": "bench series",
    "optax": "bench series",
    "pyro": "bench evidence",
    "sklearn": f"evidence --config {ROOT}/configs/evidence/digits_vae.yaml",
    "tensorboard": f"train --config {ROOT}/configs/train/digits_vae.yaml",
    "yaml": f"evidence --config {ROOT}/configs/evidence/digits_vae.yaml",
    "torchvision": f"train --config {ROOT}/configs/train/digits_vae.yaml",
}
MODULES = {"cvxpy-base": "cvxpy", "pyro-ppl": "pyro", "pyyaml": "yaml", "scikit-learn": "sklearn"}


def test_each_optional_package_has_a_command_that_needs_it():
    assert set(NEEDS) == {MODULES.get(name, name) for name in declared("bench") - declared(None)}


# Every command in a process of its own that lacks one package, forked where the base is imported and none of them is.
APART = """
import io, os
from contextlib import redirect_stderr, redirect_stdout
import dgm_infer

needs, answers = json.load(sys.stdin), {}
assert not set(needs) & set(sys.modules), set(needs) & set(sys.modules)
for package, command in needs.items():
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        sys.argv[1:] = [package]
        with redirect_stderr(io.StringIO()) as errors, redirect_stdout(io.StringIO()):
            from evaluation.commands.cli import main

            code = main(command.split())
        os.write(here, json.dumps([code, errors.getvalue()]).encode())
        os._exit(0)
    os.close(here)
    os.waitpid(child, 0)
    with open(there) as answer:
        answers[package] = json.load(answer)
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_a_single_missing_package_is_named_with_its_extra(tmp_path):
    result = run(APART, tmp_path, set(), json.dumps(NEEDS))
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout)
    assert answers.keys() == NEEDS.keys()
    for package, (code, errors) in answers.items():
        assert code == 2, package
        assert errors.count("\n") == 1, errors
        assert package in errors, errors
        assert re.search(r"installed: pip install .dgm-infer\[\w+\]", errors), errors
    assert list(tmp_path.iterdir()) == []


def test_the_changelog_begins_with_the_version():
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == dgm_infer.__version__


def test_the_version_is_written_in_one_place():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    source = (ROOT / settings["tool"]["hatch"]["version"]["path"]).read_text()
    assert f'__version__ = "{dgm_infer.__version__}"' in source


def test_hosted_machines_run_the_targets_that_ci_runs():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command == "make ${{ matrix.target }} PYTHON=python"
    hosted = {run["target"] for run in job["strategy"]["matrix"]["include"]}
    assert hosted <= set(targets)
    assert hosted == set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))


def test_hooks_are_programs_of_the_environment_that_make_lint_runs_too():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in local["hooks"]:
        program, verb, _ = hook["entry"].split()
        assert f"{program.replace('.venv', '$(VENV)')} {verb} " in lint


@pytest.mark.slow
def test_what_is_built_installs_with_its_configurations_and_runs_the_readme(tmp_path):
    """Wheel and sdist, built as a release is; the wheel in a folder of its own, beside what it requires alone."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source, built, maker, site = (tmp_path / name for name in ("source", "built", "maker", "site"))
    # what a clone has
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    built.mkdir()
    subprocess.run([*pip, "install", "--target", str(maker), "hatchling"], check=True)
    code = f"from hatchling.build import *; build_sdist({str(built)!r}); build_wheel({str(built)!r})"
    environment = {**os.environ, "PYTHONPATH": str(maker)}
    subprocess.run([sys.executable, "-c", code], cwd=source, env=environment, check=True, capture_output=True)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name == f"dgm_infer-{dgm_infer.__version__}-py3-none-any.whl"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "tests/test_packaging.py"} <= names
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    assert (site / "evaluation" / "configs" / "condition" / "digits_top_half.yaml").is_file()
    assert not (site / "evaluation" / "benchmarks").exists()
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    # what is imported does not depend on how long it samples: test_readme runs it as printed
    example = example.replace("warmup=100, draws=300", "warmup=0, draws=5")
    assert "draws=5" in example
    example += "\nassert dgm.__file__.startswith(sys.argv[-1]), dgm.__file__\nprint(completions.shape)"
    code = f"{HIDE}\nsys.path.insert(0, {str(site)!r})\n{example}"
    command = [sys.executable, "-W", "ignore", "-c", code, *sorted(beyond_the_base()), str(site)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([16, 5, 8, 8])" in result.stdout
