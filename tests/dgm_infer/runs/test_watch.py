"""What a run is at, told by its folder: while it goes on, stopped, and at its end; in words and as a page."""

import math
import re
import time

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.runs import kinds, replay
from dgm_infer.runs.folder import RunFolder
from dgm_infer.runs.kinds import PageSettings, duration, is_over, progress_rows
from dgm_infer.runs.store import Writer
from dgm_infer.sampling.inference_data import effective_draws, r_hat
from dgm_infer.sampling.run import SamplingRun
from evaluation.commands.cli import main
from tests.dgm_infer.runs.same import Killed, Well
from tests.models import Bent
from tests.oracles import FLOAT


def seen(path):
    return dict(progress_rows(RunFolder.open("watch", path)))


def killed(monkeypatch, path, transition, problem, kernel, **options):
    """A run with a checkpoint after every transition that ends after this one."""
    move, made = SamplingRun._move, []

    def moved(self, *arguments):
        move(self, *arguments)
        made.append(None)
        if len(made) > transition:
            raise Killed

    monkeypatch.setattr(SamplingRun, "_move", moved)
    # the page too is that of the last checkpoint, however long it takes to write
    monkeypatch.setattr(kinds, "_SETTINGS", PageSettings(share=math.inf))
    with pytest.raises(Killed):
        dgm.sample(problem, kernel, chains=4, seed=1, progress=False, run=path, checkpoint_every=1e-9, **options)
    monkeypatch.undo()


def test_a_run_on_a_fibre_is_told_from_beside_it(tmp_path, monkeypatch, capsys):
    fibre = dgm.condition(Bent(), torch.full((2, 5), 0.3, dtype=FLOAT))
    killed(monkeypatch, tmp_path / "run", 24, fibre, dgm.ConstrainedHMC(), warmup=10, draws=30)
    found = seen(tmp_path / "run")
    assert found["progress"] == "60 % of the transitions, sampling"
    seconds = RunFolder.open("watch", tmp_path / "run").seconds
    assert found["computed"].startswith(f"for {duration(seconds)}, up to the checkpoint of 20")
    assert re.fullmatch(r"[\d.]+ (s|min|h|days)", found["time left"])
    draws = dgm.collect(tmp_path / "run")
    assert found["draws"] == "14 of 30 per chain, 4 of 4 chains"
    assert found["acceptance"] == f"{draws.stats['acceptance_rate'].mean():.2f}"
    assert found["worst constraint error"] == f"{draws.stats['constraint_error'].max():.1e}"
    assert found["stuck chains"] == "0 of 8"
    values = draws.latents["z"].double().flatten(2)
    assert found["R-hat"] == f"at most {r_hat(values).max():.3f}"
    assert found["bulk effective draws"] == f"at least {effective_draws(values, 'bulk').min():.0f}"
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    told = capsys.readouterr().out
    assert "14 of 30 per chain" in told
    page = (tmp_path / "run" / "index.html").read_text()
    assert 'http-equiv="refresh"' in page
    assert "14 of 30 per chain, 4 of 4 chains" in page
    # for phones, and in the dark
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    began = time.monotonic()
    dgm.resume(tmp_path / "run", progress=False)
    assert 0 < RunFolder.open("watch", tmp_path / "run").seconds - seconds < time.monotonic() - began
    page = (tmp_path / "run" / "index.html").read_text()
    assert "refresh" not in page
    assert "finished" in page
    assert main(["watch", str(tmp_path / "run")]) == 0
    assert "100 % of the transitions" in capsys.readouterr().out


def test_chains_that_never_move_are_told(tmp_path, monkeypatch):
    kernel = dgm.HMC(n_steps=1, step_size=1e6)
    killed(monkeypatch, tmp_path / "run", 8, Well(1.0), kernel, warmup=0, draws=50)
    found = seen(tmp_path / "run")
    assert found["stuck chains"] == "4 of 4"
    assert found["acceptance"] == "0.00"


def test_a_run_that_warms_up_says_so_and_quick_runs_have_no_page(tmp_path, monkeypatch):
    killed(monkeypatch, tmp_path / "run", 5, Well(1.0), dgm.HMC(n_steps=1), warmup=20, draws=20)
    assert seen(tmp_path / "run")["progress"] == "12 % of the transitions, warm-up"
    assert "draws" not in seen(tmp_path / "run")
    dgm.sample(Well(1.0), dgm.HMC(n_steps=1), chains=4, draws=5, seed=1, progress=False, run=tmp_path / "quick")
    assert not (tmp_path / "quick" / "index.html").exists()


def test_evidence_tells_its_step_and_log_z_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "LOOPS", replay.LoopSettings(shortest=0.0, share=float("inf")))
    write, made = Writer.write, []

    def written(self, records):
        write(self, records)
        made.append(None)
        if len(made) == 60:
            raise Killed

    monkeypatch.setattr(Writer, "write", written)
    base, method = dgm.Gaussian(torch.zeros(2), 1.5), dgm.GibbsTempering(draws=100, warmup=10, pilot_temperatures=10)
    with pytest.raises(Killed):
        dgm.log_evidence(
            Well(1.0), base, method, chains=4, seed=1, progress=False, run=tmp_path / "run", checkpoint_every=1e-9
        )
    monkeypatch.undo()
    found = seen(tmp_path / "run")
    shown = r"tempering, step (\d+) of 100 \(.* left of them\): log Z (-?[\d.]+) \+- ([\d.]+)"
    step, log_z, error = map(float, re.fullmatch(shown, found["progress"]).groups())
    assert 0 < step < 100
    # log Z = log 2 pi
    assert abs(log_z - 1.8379) < 5 * error + 0.1
    whole = dgm.resume(tmp_path / "run", progress=False)
    assert is_over(RunFolder.open("watch", tmp_path / "run"))
    assert f"log Z {whole.log_z:.3f}" in seen(tmp_path / "run")["progress"]


def test_what_is_no_run_and_durations_in_words(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "no run is there" in capsys.readouterr().err
    assert [duration(s) for s in (5, 150, 9000, 200000)] == ["5 s", "2.5 min", "2.5 h", "2.3 days"]
