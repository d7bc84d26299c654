"""What a command has finished stays, wherever it is stopped."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import dgm_infer as dgm
from dgm_infer import Draws, Evidence
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.runs import replay
from evaluation import experiments
from evaluation.commands import condition as condition_module
from evaluation.commands import evidence as evidence_module
from evaluation.commands.cli import main
from evaluation.commands.keeping import without_stops
from evaluation.experiments import quantile
from evaluation.figures.saving import save_picture
from tests.dgm_infer.runs.same import Well
from tests.disks import fill
from tests.findings import honest

CONDITION = """\
name: small
generator: digits_vae
images: trainers.DigitsData
n_images: 1
kernel: {n_steps: 1, n_geodesic: 1, step_size: 0.1}
chains: 2
warmup: 0
draws: 6
seed: 1
"""
EVIDENCE = """\
name: small
generator: digits_vae
images: trainers.DigitsData
n_images: 3
methods:
  - {class_path: dgm_infer.Elbo, init_args: {samples: 20}}
  - {class_path: dgm_infer.evidence.ImportanceSampling, init_args: {samples: 20}}
  - {class_path: dgm_infer.AIS, init_args: {temperatures: 5, pilot_temperatures: 5, n_steps: 2}}
bounds: null
chains: 4
seed: 1
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command on a small configuration; returns its exit code and its run folder, or None if there is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    # pictures take most of the time of a run as short as these, and are not looked at
    monkeypatch.setattr(condition_module, "traces", lambda path, *_: save_picture(path, Figure(), 50))

    def go(name, *options):
        (tmp_path / "config.yaml").write_text({"condition": CONDITION, "evidence": EVIDENCE}[name])
        code = main([name, "--config", "config.yaml", *options])
        folders = list((tmp_path / "runs" / "small").iterdir()) if (tmp_path / "runs" / "small").exists() else []
        assert len(folders) <= 1
        return code, folders[0] if folders else None

    return go


def names(folder):
    return {path.name for path in folder.iterdir()}


def during(monkeypatch, owner, name, act, call=1):
    """Act before a function's call of this number."""
    function, calls = getattr(owner, name), 0

    # with its signature, by which the parser knows a kernel
    @functools.wraps(function)
    def acting(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, acting)


def stop():
    signal.raise_signal(signal.SIGINT)


def terminate():
    signal.raise_signal(signal.SIGTERM)


def break_down():
    raise RuntimeError("a fault of the model")


@pytest.mark.parametrize("act", [stop, pytest.param(terminate, marks=pytest.mark.slow)])
def test_a_signal_while_sampling_keeps_the_draws(run, monkeypatch, act):
    before = signal.getsignal(signal.SIGTERM)
    during(monkeypatch, dgm.ConstrainedHMC, "step", act, call=4)
    code, folder = run("condition")
    assert code == 130
    # the transition under way is finished
    assert Draws.load(folder / "posterior.nc").shape[1] == 4
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("act", [stop, terminate])
def test_a_signal_while_the_draws_are_saved_waits_until_they_are(run, monkeypatch, capsys, act):
    during(monkeypatch, Draws, "to_arviz", act)
    code, folder = run("condition")
    assert code == 130
    assert names(folder) == {"config.yaml", "posterior.nc", "run"}
    assert Draws.load(folder / "posterior.nc").shape[1] == 6
    error = capsys.readouterr().err
    assert "interrupted; dgm-infer condition --resume runs/small/" in error
    assert "; runs/small/" in error


@pytest.mark.parametrize(("owner", "name"), [(Draws, "summary"), (condition_module, "completions")])
def test_a_signal_after_the_draws_are_saved_leaves_them(run, monkeypatch, owner, name):
    during(monkeypatch, owner, name, stop)
    code, folder = run("condition")
    assert code == 130
    assert Draws.load(folder / "posterior.nc").shape[1] == 6


def test_an_error_after_sampling_leaves_the_draws(run, monkeypatch, tmp_path):
    during(monkeypatch, condition_module, "completions", break_down)
    with pytest.raises(RuntimeError, match="a fault"):
        run("condition")
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert names(folder) == {"config.yaml", "posterior.nc", "log.txt", "summary.csv"}


@pytest.mark.filterwarnings("default:stopped by")
def test_a_model_that_fails_while_sampling_leaves_the_draws_and_is_named(run, monkeypatch, capsys):
    during(monkeypatch, dgm.ConstrainedHMC, "step", break_down, call=4)
    code, folder = run("condition")
    assert code == 130
    assert Draws.load(folder / "posterior.nc").shape[1] == 3
    error = capsys.readouterr().err
    assert "warning: stopped by RuntimeError (a fault of the model) (dgm.resume(" in error
    assert "goes on): 3 of 6 draws were made and are kept" in error


@pytest.mark.parametrize("command", ["condition", "evidence"])
def test_results_that_the_disk_refuses_are_in_the_temporary_folder(run, monkeypatch, capsys, tmp_path, command):
    owner, name = (dgm.ConstrainedHMC, "step") if command == "condition" else (dgm.Elbo, "run")
    during(monkeypatch, owner, name, lambda: fill(monkeypatch, tmp_path / "runs"))
    code, folder = run(command)
    assert code == 2
    # here the disk takes a run: it stays
    assert {path.name.split("_")[0] for path in folder.iterdir()} == {"config.yaml", "run"}
    (saved,) = (tmp_path / "temporary").glob("*/*")
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"dgm-infer {command}: error: cannot save runs/small/")
    assert (
        f"No space left on device; it is in {saved}; dgm-infer {command} --resume runs/small/{folder.name} goes on"
        in error
    )
    if command == "condition":
        assert Draws.load(saved).shape[1] == 6
    else:
        assert Evidence.load(saved).log_z.shape == (3,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not all draws are in")
def test_a_run_folder_that_vanishes_while_sampling_is_made_again(run, monkeypatch, tmp_path):
    during(monkeypatch, dgm.ConstrainedHMC, "step", lambda: shutil.rmtree(tmp_path / "runs"), call=4)
    code, folder = run("condition")
    assert code == 0
    assert Draws.load(folder / "posterior.nc").shape[1] == 6


def test_a_picture_makes_a_folder_that_has_vanished_again(tmp_path):
    save_picture(tmp_path / "runs" / "picture.png", Figure(), 50)
    assert names(tmp_path / "runs") == {"picture.png"}


@pytest.mark.parametrize("act", [stop, terminate])
def test_evidence_keeps_every_method_that_was_finished(run, monkeypatch, capsys, act):
    during(monkeypatch, dgm.AIS, "run", act)
    code, folder = run("evidence")
    assert code == 130
    assert names(folder) == {"config.yaml", "Elbo.npz", "ImportanceSampling.npz", "evidence.csv"}
    assert set(pd.read_csv(folder / "evidence.csv")["method"]) == {"Elbo", "ImportanceSampling"}
    said, error = capsys.readouterr()
    # a method is begun again, and those before it are not
    assert f"dgm-infer evidence --resume runs/small/{folder.name} goes on; runs/small/" in error
    assert re.search(r"^1 of 3, after \d+:\d\d: Elbo: 3 images x 4 chains$", said, re.M)
    # the table of what is there, which nobody has to look up in a file
    told = said.partition("finished before the interruption:\n")[2].splitlines()
    assert [line.split()[0] for line in told] == ["method", "Elbo", "ImportanceSampling"]


@honest
@pytest.mark.filterwarnings("default:the result is not in")
def test_estimates_are_written_again_into_a_folder_that_has_vanished(run, monkeypatch, tmp_path):
    during(monkeypatch, dgm.AIS, "run", lambda: shutil.rmtree(tmp_path / "runs"))
    code, folder = run("evidence")
    assert code == 0
    assert {"Elbo.npz", "ImportanceSampling.npz", "AIS.npz", "evidence.csv"} <= names(folder)


def test_evidence_of_the_images_before_an_interrupt_is_kept(run, monkeypatch):
    during(monkeypatch, dgm.AIS, "run", stop, call=3)
    code, folder = run("evidence", "--chunk", "1")
    assert code == 130
    found = Evidence.load(folder / "AIS.npz")
    assert found.interrupted
    assert found.log_z.isfinite().tolist() == [True, True, False]


@honest
def test_a_picture_that_fails_leaves_the_estimates(run, monkeypatch, tmp_path):
    during(monkeypatch, evidence_module, "by_image", break_down)
    with pytest.raises(RuntimeError, match="a fault"):
        run("evidence")
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert "AIS.npz" in names(folder)
    assert "AIS" in (folder / "log.txt").read_text()


def test_a_signal_before_anything_is_finished_leaves_nothing(run, monkeypatch, capsys):
    during(monkeypatch, dgm.Elbo, "run", terminate)
    assert run("evidence") == (130, None)
    assert "interrupted before anything could be kept" in capsys.readouterr().err


@honest
@pytest.mark.parametrize("command", ["condition", "evidence"])
def test_a_command_that_was_stopped_goes_on_with_the_numbers_of_one_that_was_not(run, monkeypatch, capsys, command):
    """And every file of it is there, its own runs are gone, and its configuration holds the seed."""
    code, whole = run(command, "--seed", "null")
    assert code == 0
    seed = re.search(r"^seed: (\d+)$", (whole / "config.yaml").read_text(), re.M)[1]
    shutil.move(whole, whole.parents[2] / "whole")
    if command == "condition":
        during(monkeypatch, dgm.ConstrainedHMC, "step", stop, call=4)
    else:
        monkeypatch.setattr(replay, "LOOPS", replay.LoopSettings(shortest=0.0))
        during(monkeypatch, AnnealedPath, "move", stop, call=10)
    code, folder = run(command, "--seed", seed)
    monkeypatch.undo()
    assert code == 130
    name = folder.relative_to(folder.parents[2])
    assert f"dgm-infer {command} --resume {name} goes on" in capsys.readouterr().err
    monkeypatch.chdir(folder.parents[2])
    assert main([command, "--resume", str(name)]) == 0
    said, told = capsys.readouterr()
    if command == "condition":
        assert "going on where the run was stopped\n" in told
    else:
        said = re.sub(r"after \d+:\d\d", "after", said)
        assert "1 of 3, after: Elbo: finished before, and taken over\n" in said
        assert "3 of 3, after: AIS: 3 images x 4 chains, going on where it was stopped\n" in said
    whole = folder.parents[2] / "whole"
    assert names(folder) == names(whole)
    if command == "condition":
        one, other = (Draws.load(each / "posterior.nc") for each in (folder, whole))
        assert torch.equal(one.inputs, other.inputs)
        assert not one.interrupted
    else:
        one, other = (pd.read_csv(each / "evidence.csv").drop(columns="seconds") for each in (folder, whole))
        pd.testing.assert_frame_equal(one, other, check_exact=True)


@pytest.mark.parametrize("command", ["condition", "reproduce"])
def test_resume_goes_alone_and_needs_a_folder_of_a_run_of_its_command(run, capsys, tmp_path, command):
    (tmp_path / "other").mkdir()
    other = {"condition": '{"name": "quantile", "fast": true, "seed": 1, "data": null, "command": []}'}.get(command)
    (tmp_path / "other" / "config.yaml").write_text(other or CONDITION)
    for options, line in (
        (["--resume", "x", "--seed", "1"], "no other options"),
        (["--resume=x"], "holds no config.yaml"),
        (["--resume", "other"], f"other: holds no run of {command}"),
    ):
        assert main([command, *options]) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        assert line in said


KILLED = """\
import functools, os, signal, sys
import dgm_infer as dgm
from evaluation.commands.cli import main

command, owner, name = sys.argv[1], getattr(dgm, sys.argv[2]), sys.argv[3]
calls = iter(range(2 if name == "step" else 0))

@functools.wraps(getattr(owner, name))
def killed(*arguments, function=getattr(owner, name), **options):
    if next(calls, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments, **options)

setattr(owner, name, killed)
sys.exit(main([command, "--config", "config.yaml"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "place", "left"),
    [
        ("condition", ("ConstrainedHMC", "step"), {"config.yaml", "run"}),
        ("evidence", ("AIS", "run"), {"config.yaml", "Elbo.npz", "ImportanceSampling.npz", "evidence.csv", "run_AIS"}),
    ],
)
def test_a_kill_leaves_what_was_finished(tmp_path, command, place, left):
    (tmp_path / "config.yaml").write_text({"condition": CONDITION, "evidence": EVIDENCE}[command])
    paths = os.environ | {"PYTHONPATH": str(Path(dgm.__file__).parents[1])}
    process = subprocess.run([sys.executable, "-c", KILLED, command, *place], cwd=tmp_path, env=paths, check=False)
    assert process.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "runs" / "small").iterdir()
    assert names(folder) == left
    if command == "evidence":
        assert Evidence.load(folder / "Elbo.npz").log_z.shape == (3,)


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs an experiment that makes a picture, acts, and makes another; returns the exit code and its run folders."""
    monkeypatch.chdir(tmp_path)

    def go(act):
        def pictures(folder, **options):
            save_picture(folder / "first.png", Figure(), 50)
            act()
            save_picture(folder / "second.png", Figure(), 50)
            return {}

        monkeypatch.setattr(quantile, "run", pictures)
        code = main(["reproduce", "quantile", "--fast"])
        return code, list((tmp_path / "runs" / "reproduce_quantile").glob("*"))

    return go


def test_a_signal_leaves_what_an_experiment_had_written(experiment, capsys):
    code, (folder,) = experiment(terminate)
    assert code == 130
    assert names(folder) == {"first.png", "config.yaml"}
    assert "keeps what was finished: config.yaml, first.png" in capsys.readouterr().err


def test_an_experiment_whose_folder_vanishes_has_its_results(experiment, tmp_path):
    code, (folder,) = experiment(lambda: shutil.rmtree(tmp_path / "runs"))
    assert code == 0
    assert names(folder) == {"second.png", "results.json", "log.txt", "report.html"}


def test_an_experiment_on_a_full_disk_is_refused_before_it_begins(experiment, monkeypatch, capsys, tmp_path):
    fill(monkeypatch, tmp_path / "runs")
    assert experiment(lambda: pytest.fail("it began")) == (2, [])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("No space left on device")


def test_an_experiment_whose_disk_is_full_later_keeps_what_it_had_written(experiment, monkeypatch, capsys, tmp_path):
    code, (folder,) = experiment(lambda: fill(monkeypatch, tmp_path / "runs"))
    assert code == 2
    assert names(folder) == {"first.png", "config.yaml"}
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "second.png: No space left on device" in line


PARTS = []


class InParts:
    """An experiment of four parts, which notes those that it computes."""

    @staticmethod
    def fit():
        PARTS.append("fit")
        return dgm.Gaussian(torch.zeros(2), 1.5)

    @staticmethod
    def run(folder, *, fast, data, seed, parts):
        options = {"chains": 4, "seed": seed, "progress": False}
        first, _ = parts.run(dgm.sample, Well(1.0), dgm.HMC(n_steps=1), warmup=5, draws=5, **options)
        base, _ = parts.value(InParts.fit)
        method = dgm.AIS(temperatures=6, pilot_temperatures=4)
        found, _ = parts.run(dgm.log_evidence, Well(1.0), base, method, coverage=False, **options)
        last, seconds = parts.run(dgm.sample, Well(2.0), dgm.HMC(n_steps=2), warmup=5, draws=5, **options)
        for result in (first, found, last):
            uninterrupted(result)
        save_picture(folder / "picture.png", Figure(), 50)
        sums = [draws.inputs.double().sum().item() for draws in (first, last)]
        return {"sums": sums, "log_z": found.log_z.item(), "seconds": seconds, "summary": f"log Z {found.log_z:.9f}"}


@pytest.fixture
def in_parts(tmp_path, monkeypatch):
    """Runs the experiment of four parts; returns the exit code and its run folder, or None if there is none."""
    PARTS.clear()
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        # a test may undo these
        monkeypatch.setitem(experiments.EXPERIMENTS, "parts", "for the tests")
        monkeypatch.setitem(sys.modules, "evaluation.experiments.parts", InParts)
        monkeypatch.setattr(replay, "LOOPS", replay.LoopSettings(shortest=0.0))
        code = main(["reproduce", *arguments])
        return code, *(tmp_path / "runs" / "reproduce_parts").glob("*")

    return go


def record_of(folder):
    """Its results, without the seconds."""
    record = json.loads((folder / "results.json").read_text())
    assert record.pop("seconds") > record["results"].pop("seconds") > 0
    return record


@honest
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        pytest.param(dgm.HMC, "step", 10, id="in the first part"),
        pytest.param(InParts, "fit", 1, id="in the second"),
        pytest.param(AnnealedPath, "move", 3, id="in the third"),
        pytest.param(dgm.HMC, "step", 26, id="in the last"),
        pytest.param(Figure, "savefig", 1, id="after it"),
    ],
)
def test_an_experiment_that_was_stopped_goes_on_to_the_record_of_one_that_was_not(
    in_parts, monkeypatch, capsys, tmp_path, owner, name, call
):
    code, whole = in_parts("parts", "--seed", "7")
    assert code == 0
    assert names(whole) == {"config.yaml", "picture.png", "results.json", "log.txt", "report.html"}
    shutil.move(whole, tmp_path / "whole")
    PARTS.clear()
    during(monkeypatch, owner, name, stop, call=call)
    code, folder = in_parts("parts", "--seed", "7")
    monkeypatch.undo()
    assert code == 130
    assert f"dgm-infer reproduce --resume {folder.relative_to(tmp_path)} goes on" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    # of the part under way
    assert main(["watch", str(folder), "--once"]) == 0
    assert capsys.readouterr().out.count("() in ") == 1
    assert in_parts("--resume", str(folder.relative_to(tmp_path))) == (0, folder)
    assert names(folder) == names(tmp_path / "whole")
    assert record_of(folder) == record_of(tmp_path / "whole")
    assert PARTS == ["fit"]
    # and is not begun again over its results
    assert in_parts("--resume", str(folder))[0] == 2
    assert "has finished" in capsys.readouterr().err


def test_signals_wait_for_the_end_of_a_block():
    done = []

    def work():
        with without_stops():
            stop()
            done.append("all of it")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    with pytest.raises(KeyboardInterrupt):
        stop()
