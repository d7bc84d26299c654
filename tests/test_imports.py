"""Imports point one way, and importing the core is cheap and loads nothing heavy."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# a package may import those before it, and itself
PACKAGES = ["dgm_infer", "generators", "trainers", "evaluation"]

# a module of the core may import those before it; modules of one family share a line
CORE = [
    "errors",
    "runs",
    "inputs",
    "model",
    "operators",
    "observe",
    "observed",
    "jacobian",
    "projection",
    "compilation",
    "fibre",
    "target",
    "faults",
    "condition",
    "base",
    "integrators",
    "kernels",
    "adaptation",
    "startup",
    "draws",
    "sampling",
    "likelihood_free",
    "evidence",
    "interop",
    "check",
]

HEAVY = {"lightning", "pytorch_lightning", "pyro", "arviz", "matplotlib", "pandas", "sklearn", "jsonargparse"}


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


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of a module that point the wrong way."""
    if module in ("dgm_infer", "dgm_infer.cli", "dgm_infer.__main__"):
        return []
    top, *rest = module.split(".")
    wrong = []
    for name in sorted(imported_modules(source, module, is_package)):
        other, *parts = name.split(".")
        if other not in PACKAGES:
            continue
        if other != top:
            upward = PACKAGES.index(other) > PACKAGES.index(top)
        elif top == "dgm_infer" and parts[:1] != rest[:1]:
            # the package itself, or a name of it that is no module: it imports everything
            upward = not parts or parts[0] not in CORE or CORE.index(parts[0]) > CORE.index(rest[0])
        else:
            upward = False
        if upward:
            wrong.append(name)
    return wrong


def all_modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield pytest.param(path, ".".join(parts[:-1] if is_package else parts), is_package, id="/".join(parts))


@pytest.mark.parametrize(("path", "module", "is_package"), list(all_modules()))
def test_no_import_points_upwards(path, module, is_package):
    assert upward_imports(path.read_text(), module, is_package) == []


def test_every_module_of_the_core_has_its_place_in_the_order():
    names = {p.stem for p in (ROOT / "dgm_infer").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert names - {"__init__", "__main__", "cli"} <= set(CORE)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from .sampling import sample", "dgm_infer.fibre"),
        ("from . import sampling", "dgm_infer.fibre"),
        ("import dgm_infer.draws", "dgm_infer.kernels.hmc"),
        ("from ..draws import Draws", "dgm_infer.kernels.hmc"),
        ("def f():\n    from .condition import condition", "dgm_infer.fibre"),
        ("import dgm_infer", "dgm_infer.fibre"),
        ("from dgm_infer import condition", "dgm_infer.fibre"),
        ("from . import Fibre", "dgm_infer.fibre"),
        ("from .observed import ObservedModel", "dgm_infer.observe"),
        ("if TYPE_CHECKING:\n    from .fibre import Fibre", "dgm_infer.compilation"),
        ("from .cli import main", "dgm_infer.draws"),
        ("import generators", "dgm_infer.sampling"),
        ("from generators.vae import GaussianVAE", "dgm_infer.sampling"),
        ("from trainers import VAE", "generators.vae"),
        ("import evaluation.plots", "trainers.callbacks"),
        ("if True:\n    import evaluation", "generators.vae"),
    ],
)
def test_control_an_upward_import_is_caught(source, module):
    assert len(upward_imports(source, module)) == 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from .errors import ArgumentError\nfrom .jacobian import JacobianMap", "dgm_infer.fibre"),
        ("from . import kernels", "dgm_infer.draws"),
        ("from .kernel import Info\nfrom ..integrators import leapfrog", "dgm_infer.kernels.hmc"),
        ("import torch\nfrom torch import Tensor", "dgm_infer.errors"),
        ("from dgm_infer import Fibre\nfrom .networks import mlp", "generators.vae"),
        ("import trainers, generators, dgm_infer", "evaluation.runs"),
        ("import evaluation", "dgm_infer.cli"),
    ],
)
def test_control_a_downward_import_is_not(source, module):
    assert upward_imports(source, module) == []


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def loaded_by(code: str) -> set[str]:
    """Top-level modules that running the code adds to those of ``import torch``."""
    names = python(f"import sys, torch; before = set(sys.modules); {code}; print(*(set(sys.modules) - before))").split()
    return {name.split(".")[0] for name in names}


def test_importing_the_core_loads_nothing_heavy():
    loaded = loaded_by("import dgm_infer")
    assert "dgm_infer" in loaded
    assert not loaded & (HEAVY | {"generators", "trainers", "evaluation"})


def test_control_a_heavy_import_is_noticed():
    assert loaded_by("import dgm_infer, pandas") & HEAVY == {"pandas"}


def test_importing_the_core_changes_no_global_state_of_torch():
    state = "(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), "
    state += "torch.is_grad_enabled(), torch.initial_seed() == seed, torch.distributions.Distribution._validate_args)"
    code = f"import torch; seed = torch.initial_seed(); a = {state}; import dgm_infer; b = {state}; print(a == b)"
    assert python(code) == "True"


@pytest.mark.slow
def test_importing_the_core_adds_less_than_a_third_of_a_second_to_torch():
    def seconds(code):
        started = time.perf_counter()
        python(code)
        return time.perf_counter() - started

    pairs = [(seconds("import torch"), seconds("import torch, dgm_infer")) for _ in range(5)]
    assert min(both for _, both in pairs) - min(torch for torch, _ in pairs) < 0.3
