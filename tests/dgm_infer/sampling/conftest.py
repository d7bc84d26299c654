"""Fixtures shared by the tests of draws."""

import pytest

from tests.dgm_infer.sampling.short_runs import run


@pytest.fixture(scope="session")
def draws():
    return run()
