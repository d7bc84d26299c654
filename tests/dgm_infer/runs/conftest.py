"""Tests of runs do not wait for the disk: none but that of a power cut needs what it holds."""

import pytest

from dgm_infer.runs import drawn, resume, store


@pytest.fixture(autouse=True)
def quick_disk(request, monkeypatch):
    if "power" not in request.node.name:
        monkeypatch.setattr(store, "_SETTINGS", (*store._SETTINGS, "synchronous = OFF"))


@pytest.fixture
def streamed(monkeypatch):
    """Draws go to the folder two or three at a time, and are read into a mapped file."""
    for module in (drawn, resume):
        monkeypatch.setattr(module, "MEMORY", drawn.MemorySettings(block=600, read=600))
