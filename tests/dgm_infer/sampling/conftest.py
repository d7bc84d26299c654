"""What the tests of draws share."""

import pytest

from tests.dgm_infer.sampling.short_runs import run


@pytest.fixture(scope="session")
def draws():
    return run()
