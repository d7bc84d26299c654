"""Imports point one way, for folders and for the files inside them, and importing the core loads nothing heavy."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.import_order import ORDER

ROOT = Path(__file__).resolve().parents[1]


def all_modules() -> Iterator[tuple[Path, str, bool]]:
    """Path, dotted name and whether it is a package, of every module of the four packages."""
    for package in ORDER[""]:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield path, ".".join(parts[:-1] if is_package else parts), is_package


MODULES = list(all_modules())
NAMES = {module for _, module, _ in MODULES}


def imported_modules(source: str, module: str, is_package: bool) -> set[str]:
    """Absolute names of what a module's source imports, at any depth of the code; ``a.b`` for ``from a import b``."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def points_upwards(name: str, module: str) -> bool:
    """Whether an import of ``name`` by ``module`` points the wrong way."""
    # a name in a module counts as the module
    while name not in NAMES and "." in name:
        name = name.rpartition(".")[0]
    theirs, own = name.split("."), module.split(".")
    if theirs[0] not in ORDER[""] or name == module or module == "":
        return False
    common = 0
    while common < min(len(theirs), len(own)) and theirs[common] == own[common]:
        common += 1
    if common == len(own):
        # a package's own face imports what is in it
        return False
    if common == len(theirs):
        # a package that this module is in
        return True
    order = ORDER[".".join(own[:common])]
    return order.index(theirs[common]) > order.index(own[common])


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of a module that point the wrong way."""
    return sorted(name for name in imported_modules(source, module, is_package) if points_upwards(name, module))


@pytest.mark.parametrize("package", ["", *(module for _, module, is_package in MODULES if is_package)])
def test_the_order_lists_exactly_what_a_package_holds(package):
    if package == "":
        assert len(set(ORDER[""])) == 4
        return
    prefix = f"{package}."
    held = {name.removeprefix(prefix).split(".")[0] for name in NAMES if name.startswith(prefix)}
    assert sorted(ORDER.get(package, [])) == sorted(held)


def test_the_order_lists_no_package_that_is_not_there():
    assert set(ORDER) - {""} <= {module for _, module, is_package in MODULES if is_package}


@pytest.mark.parametrize(("path", "module", "is_package"), [pytest.param(*m, id=m[1]) for m in MODULES])
def test_no_import_points_upwards(path, module, is_package):
    assert upward_imports(path.read_text(), module, is_package) == []


def reached(starts: set[str]) -> set[str]:
    """What some modules import, directly or through others, the packages that hold it included."""
    found, waiting = set(), list(starts)
    sources = {module: (path, is_package) for path, module, is_package in MODULES}
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        path, is_package = sources[module]
        for name in (*imported_modules(path.read_text(), module, is_package), module):
            parts = name.split(".")
            waiting += {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & NAMES
    return found


def test_the_wheel_holds_what_the_commands_import_and_no_benchmarks():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    left_out = tuple(f"{path.removesuffix('.py').replace('/', '.')}." for path in wheel["exclude"])
    held = {name for name in NAMES if not f"{name}.".startswith(left_out)}
    rooms = ("evaluation.commands.", "evaluation.experiments.")
    needed = reached({name for name in NAMES if name.startswith(rooms)} - {"evaluation.commands.bench"})
    own = {"evaluation.commands.bench"}
    assert {name for name in held if name.startswith("evaluation")} == own | {
        n for n in needed if n.startswith("evaluation")
    }
    assert {name for name in NAMES if not name.startswith("evaluation")} <= held


def test_modules_are_small():
    lengths = sorted(len(path.read_text().splitlines()) for path, _, is_package in MODULES if not is_package)
    assert lengths[len(lengths) // 2] <= 200
    assert lengths[-1] <= 400


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..sampling.sample import sample", "dgm_infer.conditioning.fibre"),
        ("from .. import sampling", "dgm_infer.conditioning.fibre"),
        ("import dgm_infer.sampling.draws", "dgm_infer.kernels.hmc"),
        ("def f():\n    from .condition import condition", "dgm_infer.conditioning.fibre"),
        ("import dgm_infer", "dgm_infer.conditioning.fibre"),
        ("from dgm_infer import condition", "dgm_infer.conditioning.fibre"),
        ("from . import Fibre", "dgm_infer.conditioning.observed"),
        ("from .observed import ObservedModel", "dgm_infer.conditioning.operators"),
        ("if TYPE_CHECKING:\n    from .fibre import Fibre", "dgm_infer.conditioning.observed"),
        ("from evaluation.commands.cli import main", "dgm_infer.sampling.draws"),
        ("import generators", "dgm_infer.sampling.sample"),
        ("from generators.vae import GaussianVAE", "dgm_infer.sampling.sample"),
        ("from trainers import VAETraining", "generators.vae"),
        ("from .iwae import IWAE", "generators.vae"),
        ("import evaluation.figures.log_evidence", "trainers.monitoring"),
        ("if True:\n    import evaluation", "generators.vae"),
        ("from ..commands.cli import main", "evaluation.experiments.quantile"),
    ],
)
def test_control_an_upward_import_is_caught(source, module):
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        (
            "from ..errors import ArgumentError\nfrom .observed import ObservedModel",
            "dgm_infer.conditioning.fibre",
            False,
        ),
        ("from .. import kernels", "dgm_infer.sampling.draws", False),
        ("from .kernel import Info\nfrom .integrators import leapfrog", "dgm_infer.kernels.hmc", False),
        ("from .hmc import HMC", "dgm_infer.kernels", True),
        ("import torch\nfrom torch import Tensor", "dgm_infer.errors", False),
        ("from dgm_infer import Fibre\nfrom .networks import mlp", "generators.vae", False),
        ("import trainers, generators, dgm_infer", "evaluation.experiments.iwae", False),
        ("import evaluation.experiments", "evaluation.commands.cli", False),
    ],
)
def test_control_a_downward_import_is_not(source, module, is_package):
    assert upward_imports(source, module, is_package) == []


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def loaded_by(code: str) -> set[str]:
    """Top-level modules that running the code adds to those of ``import torch``."""
    names = python(f"import sys, torch; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))").split()
    return {name.split(".")[0] for name in names}


def test_importing_the_core_loads_nothing_but_torch_and_itself():
    # what makes it fast, said without a clock
    assert loaded_by("import dgm_infer; dgm_infer.sample") - sys.stdlib_module_names == {"dgm_infer"}


@pytest.mark.slow
def test_control_a_heavy_import_is_noticed():
    assert {"dgm_infer", "pandas"} < loaded_by("import dgm_infer, pandas") - sys.stdlib_module_names


@pytest.mark.slow
def test_importing_the_core_changes_no_global_state_of_torch():
    state = "(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), "
    state += "torch.is_grad_enabled(), torch.initial_seed() == seed, torch.distributions.Distribution._validate_args)"
    use = "import dgm_infer; dgm_infer.sample"
    code = f"import torch; seed = torch.initial_seed(); a = {state}; {use}; b = {state}; print(a == b)"
    assert python(code) == "True"
