"""Modes that chains visit, and those that they miss."""

import json

import pytest
import torch

import dgm_infer as dgm
from evaluation.benchmarks import unvisited
from tests.oracles import FLOAT


def two(x):
    """Two normals of sd 0.1, 4 apart, the second three times as heavy."""
    near, far = 0.5 * (x / 0.1).square().sum(-1), 0.5 * ((x - 4) / 0.1).square().sum(-1)
    return -torch.logaddexp(-near, -far + torch.tensor(3.0, dtype=x.dtype).log())


def test_a_mode_is_visited_where_a_draw_is_among_those_of_its_normal():
    found = dgm.modes(dgm.Target(two, 2), 64, seed=1)
    assert found.counts == 2
    draws = 4 + 0.1 * torch.randn(2, 50, 2, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    # the heavier one is the first
    assert unvisited.near(found, draws).tolist() == [True, False]
    assert unvisited.near(found, torch.cat([draws, draws - 4], 1)).tolist() == [True, True]
    assert unvisited.near(found, draws - 2).tolist() == [False, False]


@pytest.mark.slow
def test_images_are_sampled_searched_and_recorded(tmp_path):
    path = unvisited.bench("digits", images=2, starts=32, at_once=1, output=str(tmp_path))
    rows = json.loads(path.read_text())["problems"]["digits"]
    assert [row["image"] for row in rows] == [0, 1]
    assert all(row["visited"] >= 1 and row["gap"] < 3 and row["r_hat"] < 1.1 for row in rows)
    assert "top half" in (tmp_path / "unvisited.md").read_text()
