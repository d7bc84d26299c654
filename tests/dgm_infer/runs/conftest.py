"""Tests of runs do not wait for the disk: none but that of a power cut needs what it holds."""

import pytest

from dgm_infer.runs import store


@pytest.fixture(autouse=True)
def quick_disk(request, monkeypatch):
    if "power" not in request.node.name:
        monkeypatch.setattr(store, "_SETTINGS", (*store._SETTINGS, "synchronous = OFF"))
