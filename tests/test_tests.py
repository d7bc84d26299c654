"""How the tests are kept: no module takes from another's tests, folders are those of the code, skips are counted."""

import ast
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import dgm_infer as dgm
from tests.conftest import pytest_terminal_summary
from tests.findings import honest

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def imports_of_tests(source: str) -> list[str]:
    """What a source imports of the modules of tests, ``test_*``, at any depth of its code."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [name for name in names if any(part.startswith("test_") for part in name.split("."))]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_module_takes_from_a_module_of_tests(path):
    assert imports_of_tests(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from tests.trainers.test_vae import linear_vae",
        "import tests.trainers.test_vae as vae",
        "from tests.trainers import test_vae",
        "from .test_vae import linear_vae",
        "from . import test_vae",
        "def f():\n    from tests.trainers.test_vae import linear_vae",
    ],
)
def test_control_an_import_of_tests_is_noticed(source):
    assert len(imports_of_tests(source)) == 1
    assert imports_of_tests(source.replace("test_vae", "models")) == []


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_the_folder_of_a_test_is_one_of_the_code(path):
    folder = path.parent.relative_to(TESTS)
    assert (ROOT / folder).is_dir()


def skipped(*reasons):
    """Terminal output for tests skipped for these reasons, each in its own place."""
    lines = []
    reports = [SimpleNamespace(longrepr=(f"test_{i}.py", i, f"Skipped: {reason}")) for i, reason in enumerate(reasons)]
    pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append))
    return lines


def test_every_reason_of_a_skip_is_a_line_with_its_count():
    assert skipped("no data", "no GPU", "no data") == ["2 skipped: no data", "1 skipped: no GPU"]
    assert skipped() == []


def finding():
    warnings.warn("AIS: the estimate rests on one or two of 16 chains", dgm.diagnosis.DiagnosisWarning, stacklevel=1)


@pytest.mark.slow
def test_a_finding_of_a_run_is_no_failure_of_a_slow_test():
    finding()
    # what is no finding is
    with pytest.raises(UserWarning, match="unexpected"):
        warnings.warn("unexpected", UserWarning, stacklevel=1)


@honest
def test_a_finding_of_a_run_is_no_failure_of_a_quick_test_that_says_so():
    finding()


def test_control_a_finding_of_a_run_is_a_failure_elsewhere():
    with pytest.raises(dgm.diagnosis.DiagnosisWarning, match="rests on"):
        finding()
