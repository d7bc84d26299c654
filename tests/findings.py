"""What a run finds wrong with itself is no failure of a law that numbers decide."""

import pytest

__all__ = ["honest"]

# Rounding differs between processors, so that any seed may be the one that a run warns of. Findings of sampling open
# with their call. A test whose law is that nothing is said records the warnings.
honest = pytest.mark.filterwarnings("ignore::dgm_infer.diagnosis.DiagnosisWarning", r"ignore:sample\(\):UserWarning")
"""Lets findings of runs pass: slow tests have it (``conftest.py``), a quick one that judges by numbers takes it."""
