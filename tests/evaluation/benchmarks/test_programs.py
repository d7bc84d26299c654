"""The benchmark of traced simulators: what is compared is the same function, and the tables say what was timed."""

import json

import pytest
import torch

import dgm_infer as dgm
from evaluation.benchmarks import programs
from evaluation.benchmarks.programs import programs_table


@pytest.fixture(scope="module")
def problems():
    return programs._problems(units=3, steps=2)


@pytest.mark.parametrize("name", ["generalised lambda", "predator and prey"])
def test_all_ways_of_writing_a_simulator_are_one_function_of_the_inputs(problems, name):
    problem = problems[name]
    traced, by_hand, declared = (problem.models[label] for label in ("traced", "by hand", "declared"))
    u = declared.input_density.sample((5,), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = declared.observed(u)
    for model in (traced, by_hand):
        torch.testing.assert_close(model.observed(u), expected, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(model.input_density.log_prob(u), declared.input_density.log_prob(u))
        for latent, value in declared.latents(u).items():
            torch.testing.assert_close(model.latents(u)[latent], value)
    # the control: other inputs, another output
    assert (traced.observed(u + 0.1) - expected).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.* finite outputs in fewer than")
def test_longer_data_than_were_published_are_made(problems):
    longer = programs._problems(units=260, steps=51)
    assert longer["generalised lambda"].data.shape == (260,)
    assert longer["predator and prey"].data.shape == (102,)
    assert longer["predator and prey"].data.isfinite().all()
    assert "260 independent units" in repr(longer["generalised lambda"].models["traced"])


def test_every_way_is_timed_and_tabled(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "_LEAST", 1e-6)
    path = programs.bench(units=3, steps=2, chains=2, repeats=2, output=str(tmp_path))
    record = json.loads(path.read_text())
    assert (tmp_path / "programs.md").read_text() == programs.page(record)
    for entry in record["problems"].values():
        assert set(entry["seconds"]) == {"forward", "linearisation", "transition"}
        assert set(entry["seconds"]["forward"]) == {"traced", "by hand", "vectorised", "declared"}
        for by_label in entry["seconds"].values():
            assert all(len(timed["turns"]) == 2 and timed["median"] > 0 for timed in by_label.values())
        turns = entry["seconds"]["forward"]
        ratios = [a / b - 1 for a, b in zip(turns["traced"]["turns"], turns["vectorised"]["turns"], strict=True)]
        assert entry["overhead"] == pytest.approx(sum(ratios) / 2)
    assert record["problems"]["predator and prey"]["structures"]["declared"] == "markov"


def test_the_table_has_milliseconds_ratios_and_overheads():
    timed = {"traced": {"median": 0.003}, "by hand": {"median": 0.002}}
    record = {"problems": {"a": {"seconds": {"forward": timed, "transition": timed}, "overhead": 0.2}}}
    assert programs_table(record).splitlines()[2:] == [
        "| a | forward | 3 | 2 | | | 1.50 | 20 % |",
        "| a | transition | 3 | 2 | | | 1.50 | |",
    ]


def test_bad_options_are_named(tmp_path):
    for options in ({"units": 1}, {"steps": 1}, {"chains": 0}, {"repeats": 0}, {"seed": -1}):
        with pytest.raises(dgm.errors.ConfigError, match=next(iter(options))):
            programs.bench(**options, output=str(tmp_path))


CHAINS = 80


def moments(model, data, seed, least=200):
    """First two moments of the latents ``[2, 4]``, with their standard errors, from many independent chains."""
    fibre = dgm.condition(model, data)
    draws = dgm.sample(fibre, chains=CHAINS, warmup=60, draws=20, seed=seed, progress=False)
    summary = draws.summary([f"z{i}" for i in range(1, 5)])
    assert summary["ess_bulk"].to_numpy().min() > least
    z = torch.stack([draws.latents[f"z{i}"] for i in range(1, 5)], -1)
    means = torch.stack([z, z**2]).mean(2)
    return means.mean(1), means.std(1) / CHAINS**0.5


def test_transitions_that_are_timed_are_made_from_points_that_make_the_data():
    problem = programs._problems(units=12, steps=7)["predator and prey"]
    fibres = [dgm.condition(model, problem.data) for model in problem.models.values()]
    fibre, kernel = fibres[-1], dgm.ConstrainedHMC(step_size=1e-3, n_steps=5, n_geodesic=1)
    start = problem.start(fibre, 4, seed=1)
    for each in fibres:
        assert each.constraint(start).abs().max() < 1e-8
        _, info = kernel.step(each, kernel.init(each, start), torch.Generator().manual_seed(1))
        assert (info.acceptance_rate > 0.9).all()
    # the control: points near prior draws have noise that no series has
    far = fibre.start(4, torch.Generator().manual_seed(0))
    assert far[:, 4:].abs().amax(-1).min() > 20 > start[:, 4:].abs().max()


@pytest.mark.slow
# without the structure of the series few searches from the prior, where most series explode, end on the fibre
@pytest.mark.filterwarnings("ignore:.* chains found no start of their own")
def test_the_posterior_of_a_simulator_as_written_is_that_of_the_model_by_hand():
    name = "predator and prey"
    problem = programs._problems(units=12, steps=7)[name]
    ours, our_errors = moments(problem.models["traced"], problem.data, seed=1)
    theirs, their_errors = moments(problem.models["declared"], problem.data, seed=2)
    apart = (ours - theirs).abs() / (our_errors**2 + their_errors**2).sqrt()
    assert apart.max() < 5
    # the control: of half the data the posterior is another
    fewer = programs._problems(units=6, steps=3)[name]
    others, other_errors = moments(fewer.models["declared"], fewer.data, seed=3, least=0)
    assert ((ours - others).abs() / (our_errors**2 + other_errors**2).sqrt()).max() > 5
