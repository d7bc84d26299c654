"""The picture of rate against distortion, and its table."""

import json

import pytest
from PIL import Image

from evaluation.commands.reproduce import reproduce
from evaluation.reports.rates import rate_at, rates_table
from tests.findings import honest


@honest
def test_the_shipped_generators_are_drawn(tmp_path, monkeypatch):
    monkeypatch.delenv("DGM_INFER_REFERENCE_DATA", raising=False)
    folder = reproduce("rate_distortion", fast=True, output=str(tmp_path))
    results = json.loads((folder / "results.json").read_text())["results"]
    assert list(results["sets"]) == ["digits"]
    for curve in results["sets"]["digits"]["curves"].values():
        assert len(curve["beta"]) == len(curve["rate"]) == len(curve["distortion"]) == 13
        assert curve["beta"][0] == 0
        assert curve["rate"][0] == pytest.approx(0, abs=1e-9)
    with Image.open(folder / "rate_distortion.png") as picture:
        assert len(set(picture.convert("RGB").resize((60, 40)).getdata())) > 10
    assert rates_table(results) in (folder / "log.txt").read_text()


def test_a_rate_between_two_points_is_that_of_a_line_in_log_distortion():
    curve = {"distortion": [0.4, 0.1, 0.05], "rate": [0.0, 2.0, 5.0], "rate_error": [0.0, 0.2, 0.4]}
    assert rate_at(curve, 0.4) == pytest.approx((0.0, 0.0))
    assert rate_at(curve, 0.2) == pytest.approx((1.0, 0.1))
    assert rate_at(curve, 0.2) != pytest.approx((1.33, 0.13), rel=0.1)
    assert rate_at(curve, 0.04) is None
