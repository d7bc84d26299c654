"""The progress bar: what it is told, and when it says so."""

import re
import threading
import time
import warnings

import pytest
import torch
from tqdm import tqdm

import dgm_infer as dgm
from dgm_infer.diagnosis import DiagnosisWarning
from dgm_infer.progress import Progress, foretold
from dgm_infer.sampling.plan import LONGEST_WARMUP


def test_the_words_come_from_all_news_since_the_bar_was_last_drawn(capfd):
    seen = []

    def describe(news):
        seen.append(list(news))
        return f"latest {news[-1]}"

    with Progress(True, describe, 5) as bar:
        # drawn at the first transition; the rest falls within the interval, until the end
        bar.bar.mininterval = 1e9
        for i in range(5):
            bar.update("counting", i)
    assert [i for news in seen for i in news] == list(range(5))
    assert all(seen)
    err = capfd.readouterr().err
    assert "counting" in err
    assert "latest 4" in err


def test_announced_transitions_and_words_before_the_first_one_are_shown(capfd):
    with Progress(True) as bar:
        bar.say("start-up")
        bar.expect(3)
        bar.expect(4)
    err = capfd.readouterr().err
    assert "start-up" in err
    assert "/7" in err


def test_a_hidden_bar_computes_and_writes_nothing(capfd):
    def describe(news):
        raise AssertionError("nobody sees it")

    with Progress(False, describe, 2) as bar:
        bar.say("start-up")
        bar.update("counting", 1)
        bar.finish()
    assert capfd.readouterr() == ("", "")


def test_nothing_is_drawn_before_there_is_something_to_say(capfd):
    with Progress(True) as bar:
        bar.note("base: the encoder's posterior")
    assert capfd.readouterr().err.strip() == "base: the encoder's posterior"
    # the control
    with Progress(True) as bar:
        bar.say("start-up")
    assert "start-up" in capfd.readouterr().err


def test_a_run_whose_kernel_is_not_given_names_it(capfd):
    target = dgm.Target(lambda x: x.square().sum(-1) / 2, 2)
    dgm.sample(target, chains=2, warmup=0, draws=2, seed=1)
    assert "kernel: HMC\n" in capfd.readouterr().err
    dgm.sample(target, dgm.NUTS(step_size=0.5), chains=2, warmup=0, draws=2, seed=1)
    assert "kernel:" not in capfd.readouterr().err


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr("dgm_infer.progress.time", clock)
    return clock


def test_the_time_left_is_that_of_the_running_phase_not_of_the_start_up(clock, capfd):
    with Progress(True, total=204) as bar:
        assert bar.bar.format_dict["rate"] == 0
        clock.now += 3600
        bar.update("warm-up")
        # after one transition nothing is known
        assert "<?" in str(bar.bar)
        for _ in range(10):
            clock.now += 2
            bar.update("warm-up")
        assert bar.bar.format_dict["rate"] == pytest.approx(0.5)
        # 193 transitions of 2 seconds
        assert "<06:26" in str(bar.bar)
        clock.now += 1000
        for _ in range(11):
            bar.update("sampling")
            clock.now += 0.5
        assert bar.bar.format_dict["rate"] == pytest.approx(10 / 5.5)
    capfd.readouterr()


def test_the_time_left_is_not_that_of_compiling(clock, capfd):
    with Progress(True, total=204) as bar:
        for _ in range(4):
            clock.now += 0.5
            bar.update("warm-up")
        bar.note("compiling transitions")
        clock.now += 60
        bar.update("warm-up")
        assert "<?" in str(bar.bar)
        for _ in range(10):
            clock.now += 0.1
            bar.update("warm-up")
        assert bar.bar.format_dict["rate"] == pytest.approx(10)
    capfd.readouterr()


def test_a_lock_that_another_process_took_with_it_stops_no_bar():
    # tqdm's is shared with forked processes, of which one may be killed while it holds it
    with tqdm.get_lock():
        bars = []
        maker = threading.Thread(target=lambda: bars.append(Progress(False)), daemon=True)
        maker.start()
        maker.join(timeout=10)
        assert len(bars) == 1


@pytest.mark.parametrize("transitions", [100, 10**9])
def test_a_run_that_will_not_end_says_so_as_soon_as_its_rate_is_known(transitions, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr("dgm_infer.progress.time.monotonic", lambda: float(next(now)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Progress(False, total=transitions) as bar:
            for _ in range(5):
                bar.update("sampling")
    # a second each
    expected = ["sampling, 999999998 transitions left: will take about 31.7 years at this rate"]
    assert [str(each.message) for each in said] == (expected if transitions > 100 else [])


def test_steps_that_will_not_end_say_so_after_the_second():
    steps = foretold(10**15, "a fit")
    assert [next(steps), next(steps)] == [0, 1]
    time.sleep(0.001)
    with pytest.warns(DiagnosisWarning, match="a fit: will take about .* years at this rate"):
        assert next(steps) == 2
    assert list(foretold(3, "a fit")) == [0, 1, 2]


def bowl(x):
    return 0.5 * x.square().sum(-1)


SHORT = {"chains": 2, "seed": 0, "progress": False}


@pytest.mark.parametrize(
    "method",
    [
        dgm.AIS(5, n_steps=10**9),
        dgm.SMC(8, n_steps=10**9),
        dgm.GibbsTempering(n_steps=10**9),
        dgm.ContinuousTempering(n_steps=10**9),
    ],
    ids=["annealing", "SMC", "tempering", "joint tempering"],
)
def test_a_trajectory_of_evidence_that_will_not_end_is_said_at_its_second_step(method):
    base = dgm.Gaussian(torch.zeros(2), torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiagnosisWarning)
        with pytest.raises(DiagnosisWarning, match=r"a trajectory of 1e\+09 steps: will take about"):
            dgm.log_evidence(SLOW, base, method, **SHORT)


def slow(x):
    # a millisecond: a billion steps take days on any machine
    time.sleep(0.001)
    return bowl(x)


SLOW = dgm.Target(slow, 2)


def test_a_trajectory_that_will_not_end_is_said_before_the_first_transition():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiagnosisWarning)
        with pytest.raises(DiagnosisWarning, match=r"sample: 10 transitions of 1e\+10 steps: will take about"):
            dgm.sample(dgm.Target(bowl, 2), dgm.HMC(0.1, 10**10, compile=False), warmup=0, draws=10, **SHORT)


def test_before_the_first_transition_the_time_moves_and_no_count_stands_still(clock, capfd):
    with Progress(True, total=800) as bar:
        bar.say("start-up, noise x 49.5")
        err = capfd.readouterr().err
        assert "start-up, noise x 49.5: [00:00]" in err
        assert "/800" not in err
        clock.now += 100
        bar.update("warm-up")
        assert "1/800" in str(bar.bar)


def test_a_warm_up_that_ends_early_says_so_before_the_total_falls(capfd):
    target = dgm.Target(lambda x: x.square().sum(-1) / 2, 2)
    dgm.sample(target, dgm.HMC(metric="identity"), chains=8, draws=10, seed=1)
    (found,) = re.findall(r"warm-up: settled after (\d+) of at most (\d+) iterations", capfd.readouterr().err)
    assert int(found[0]) < int(found[1]) == LONGEST_WARMUP
    # the control: a warm-up of given length
    dgm.sample(target, dgm.HMC(), chains=8, warmup=20, draws=10, seed=1)
    assert "settled" not in capfd.readouterr().err
