"""What all tests share: which are skipped, and how that is reported."""

import os
import shutil
import signal
import tempfile
from collections import Counter

import pytest
import torch

from dgm_infer.autodiff.xla import FOLDER
from tests.findings import honest

# tests are small, and the workers of xdist share the cores: threads would wait for each other
torch.set_num_threads(1)
# programs that tests have compiled serve the other workers, and their children, and nobody else
PROGRAMS = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="dgm-infer-programs-")
if PROGRAMS is not None:
    os.environ[FOLDER] = PROGRAMS


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard():
    """Ctrl-C raises KeyboardInterrupt, which a job in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items):
    """Slow tests judge runs by numbers; marks of their own come later, and win."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(honest, append=False)


def pytest_unconfigure():
    if PROGRAMS is not None:
        shutil.rmtree(PROGRAMS, ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    """One line for every reason for which tests were skipped."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
