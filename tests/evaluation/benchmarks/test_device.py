"""The lines that are measured on a device, on the CPU and on the double of a device."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dgm_infer.errors import CheckpointError, ConfigError
from evaluation.benchmarks import device, device_parts
from evaluation.benchmarks.device_parts import PARTS, SIZES, DeviceTask, Line, Sizes, measure
from evaluation.benchmarks.workers import WorkerResult
from tests.devices import DEVICE, Device, Generator
from tests.quick import cases

TINY = Sizes(2, 1, 2, 1, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2)
TASK = DeviceTask("training", ("float32",), 1e-3, "cpu", 0, None, TINY)


@pytest.mark.parametrize(
    "part", cases({name: name for name in PARTS if name != "faces"}, quick=("training", "evidence"))
)
def test_every_line_of_a_part_is_measured(part):
    records = list(measure(replace(TASK, part=part, dtypes=("float32", "float64")), None))
    assert [record["dtype"] for record in records] == sorted(record["dtype"] for record in records)
    for record in records:
        assert record.get("error") is None
        assert record["part"] == part
        assert record["rate"] == pytest.approx(record["units_per_piece"] * record["pieces"] / record["seconds"])
        assert record["pieces"] == 1
        assert record["waits"] is None
        assert min(record["making"], record["first"]) > 0


# sampling on the double takes minutes, and has tests of its own
@pytest.mark.parametrize("part", cases({"training": "training", "evidence": "evidence"}, quick=("training",)))
def test_lines_run_on_a_device_and_the_waits_of_the_host_are_counted(part, monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)
    with Device() as double:

        def waits(work) -> int:
            before = double.waits.total()
            work()
            return double.waits.total() - before

        records = list(measure(replace(TASK, part=part, device=str(DEVICE)), waits))
    for record in records:
        assert record.get("error") is None
        assert record["rate"] > 0
        # a step of training waits for nothing; estimates come back to the host
        assert (record["waits"] > 0) == (part == "evidence")


def counted(work, **facts) -> dict[str, Any]:
    return device_parts._worked(lambda: Line("name", "units", work), "cpu", **{"seconds": 0.2, "waits": None} | facts)


def test_work_is_repeated_until_its_seconds_are_used():
    def work():
        torch.linalg.inv(torch.eye(50))
        return 3.0, None

    record = counted(work)
    assert record["pieces"] > 10
    assert 0.1 < record["seconds"] < 0.4
    assert record["rate"] * record["seconds"] == pytest.approx(3 * record["pieces"])
    assert counted(work, seconds=0.0)["pieces"] == 1


def test_effective_draws_are_those_of_the_worst_column():
    values = torch.randn(4, 200, 3, generator=torch.Generator().manual_seed(0))
    good = device_parts._effective(values, 2.0)
    assert good["min_ess_per_second"] == pytest.approx(400, rel=0.2)
    assert good["max_r_hat"] < 1.02
    values[..., 1] = values[..., 1].cumsum(1)
    assert device_parts._effective(values, 2.0)["min_ess_per_second"] < 50
    assert device_parts._effective(values[:, :19], 2.0) == {}


def test_a_line_that_is_not_there_or_fails_is_named_and_the_next_is_measured(monkeypatch):
    def absent():
        raise CheckpointError("the face generator is not installed: make faces")

    def broken():
        raise RuntimeError("CUDA out of memory\nand more")

    good = lambda: Line("good", "units", lambda: (1.0, None))  # noqa: E731
    makes = [("absent", absent), ("broken", broken), ("good", good)]
    monkeypatch.setitem(PARTS, "training", lambda task, dtype: iter(makes))
    first, second, third = measure(TASK, None)
    assert first["left_out"] == "the face generator is not installed: make faces"
    assert second["error"].startswith("RuntimeError: CUDA out of memory")
    assert third["title"] == "good"


def test_parts_are_added_to_the_record_and_one_that_is_late_is_named(tmp_path, monkeypatch, capsys):
    line = {"part": "training", "line": "VAE", "dtype": "float32"}
    done = line | {
        "title": "VAE, batches of 100",
        "unit": "images",
        "rate": 1234.5,
        "waits": 7,
        "making": 0.1,
        "first": 0.2,
    }
    tasks = []

    def workers(function, given, *, report, patience, **_):
        tasks.extend(given)
        report(json.dumps(done | {"part": given[0].part}))
        late = given[0].part == "evidence"
        return [WorkerResult(error="still running after 9 s, ended") if late else WorkerResult()]

    monkeypatch.setattr(device, "run_workers", workers)
    options: dict[str, Any] = {"cores": 1, "output": str(tmp_path)}
    device.bench(parts="training,evidence", minutes=2, **options)
    path = device.bench(parts="fibre", dtypes="float64", minutes=1, **options)
    record = json.loads(path.read_text())
    assert list(record["parts"]) == ["fibre", "evidence", "training"]
    assert record["parts"]["evidence"]["errors"] == ["still running after 9 s, ended"]
    assert record["sizes"] == SIZES["cpu"]._asdict()
    # shares of the minutes, less what processes take to start
    assert [task.seconds for task in tasks] == pytest.approx([34, 74, 54])
    assert tasks[-1].dtypes == ("float64",)
    text = (tmp_path / "device.md").read_text()
    assert text in capsys.readouterr().out
    assert "GPU: not measured" in text
    assert "1234 images/s" in text
    assert "- evidence: still running after 9 s, ended" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": "fibre,galaxies"}, "parts: 'galaxies' is not one of fibre"),
        ({"parts": ""}, "parts: 0 must be 1 or more"),
        ({"dtypes": "float16"}, "dtypes: 'float16' is not one of float32"),
        ({"minutes": 0.0}, "minutes"),
        ({"data": "nowhere"}, "nowhere"),
        ({"device": "cuda"}, "give --device cpu"),
    ],
)
def test_options_that_measure_nothing(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ConfigError, CheckpointError), match=words):
        device.bench(**({"output": "results"} | options))
    assert not list(tmp_path.iterdir())
