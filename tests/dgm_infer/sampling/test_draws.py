"""Draws: what the contract promises about shapes, statistics, and completed outputs."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ModelError
from dgm_infer.progress import Progress
from generators import LinearGaussian
from tests.dgm_infer.sampling.short_runs import CHAINS, DRAWS, KERNEL, MASKS, fibre, run
from tests.files import arviz_groups
from tests.models import MASK, Images, image
from tests.oracles import FLOAT, Circle, Ellipse, linear_gaussian_model
from tests.quick import some

# --------------------------------------------------------------------------------------------------- shapes and names


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)], ids=str)
def test_inputs_latents_and_statistics_have_the_promised_shapes(batch):
    draws = run(fibre(batch))
    assert draws.shape == (CHAINS, DRAWS, *batch)
    assert draws.inputs.shape == (CHAINS, DRAWS, *batch, 5)
    assert draws.latents.keys() == {"z"}
    assert draws.latents["z"].shape == (CHAINS, DRAWS, *batch, 2)
    assert torch.equal(draws.latents["z"], draws.inputs[..., :2])
    names = {"acceptance_rate", "diverging", "n_steps", "step_size", "energy"}
    names |= {"constraint_error", "projection_failed", "reversal_failed", "solver_iterations"}
    assert draws.stats.keys() == names
    assert {value.shape for value in draws.stats.values()} == {(CHAINS, DRAWS, *batch)}
    assert draws.generate().shape == (CHAINS, DRAWS, *batch, 2, 3)
    assert draws.generate(4).shape == (CHAINS, 4, *batch, 2, 3)


def test_statistics_are_of_the_draw_they_stand_beside(draws):
    error = draws.problem.constraint_error(draws.inputs)
    torch.testing.assert_close(draws.stats["constraint_error"], error, rtol=0, atol=1e-12)
    stayed = (draws.inputs[:, 1:] == draws.inputs[:, :-1]).all(-1)
    assert (draws.stats["acceptance_rate"][:, 1:][stayed] < 1).all()


def test_more_chains_than_draws_are_summarised_without_a_word():
    draws = run(fibre(()), chains=12, draws=3)
    assert len(draws.summary()) == 2


def test_a_latent_without_dimensions_is_one_number_a_draw():
    draws = run(dgm.condition(Circle(), [[1.0], [2.0]]))
    assert draws.latents["angle"].shape == (CHAINS, DRAWS, 2)
    assert list(draws.summary().index) == ["angle[0]", "angle[1]"]


def test_seed_kernel_and_problem_are_kept(draws):
    assert draws.seed == 4
    assert draws.kernel == KERNEL
    assert isinstance(draws.problem, dgm.Fibre)
    assert draws.interrupted is False


def test_without_a_seed_one_is_drawn_and_recorded():
    first = run(seed=None, draws=2)
    assert torch.equal(run(seed=first.seed, draws=2).inputs, first.inputs)
    assert run(seed=None, draws=1).seed != first.seed


def test_thinning_keeps_every_third_iteration():
    every, third = run(draws=6), run(draws=2, thin=3)
    assert torch.equal(third.inputs, every.inputs[:, 2::3])
    for name, value in third.stats.items():
        assert torch.equal(value, every.stats[name][:, 2::3])


def test_keeping_only_latents_drops_the_inputs_and_changes_nothing_else(draws):
    latents = run(keep="latents")
    assert latents.inputs is None
    assert torch.equal(latents.latents["z"], draws.latents["z"])
    assert latents.shape == draws.shape
    assert list(latents.summary().columns) == list(draws.summary().columns)


def test_given_starting_points_are_where_the_chains_start():
    problem = dgm.condition(Circle(), [1.0])
    angle = torch.tensor([0.1, 1.0, 2.0], dtype=FLOAT)
    initial = torch.stack([angle.cos(), angle.sin()], -1)
    draws = run(problem, KERNEL.replace(step_size=1e-6), initial=initial, warmup=0)
    torch.testing.assert_close(draws.inputs[:, 0], initial, rtol=0, atol=1e-4)
    assert not torch.equal(draws.inputs[:, 0], initial)


def test_given_starting_points_are_taken_in_the_precision_of_the_problem():
    problem = dgm.condition(Circle(), [1.0])
    draws = run(problem, chains=2, warmup=0, initial=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert draws.inputs.dtype == FLOAT
    assert draws.stats["constraint_error"].max() < 1e-8


# ----------------------------------------------------------------------------------------------------------- ArviZ


def test_the_summary_has_one_row_a_latent_and_arviz_columns(draws):
    table = draws.summary()
    assert list(table.index) == [f"z[{i}, {j}]" for i in range(3) for j in range(2)]
    for column in ("mean", "sd", "mcse_mean", "ess_bulk", "ess_tail", "r_hat"):
        assert column in table.columns
    np.testing.assert_allclose(table["mean"], draws.latents["z"].mean((0, 1)).flatten().numpy())
    assert list(draws.summary(["z"]).index) == list(table.index)


def test_arviz_gets_latents_statistics_and_inputs(draws):
    data = draws.to_arviz()
    assert arviz_groups(data) == {"posterior", "sample_stats", "unconstrained_posterior"}
    assert data.posterior["z"].dims[:3] == ("chain", "draw", "problem")
    np.testing.assert_array_equal(data.posterior["z"].values, draws.latents["z"].numpy())
    np.testing.assert_array_equal(data.unconstrained_posterior["inputs"].values, draws.inputs.numpy())
    assert set(data.sample_stats.data_vars) == set(draws.stats)
    for name, value in draws.stats.items():
        np.testing.assert_array_equal(data.sample_stats[name].values, value.numpy())
    assert arviz_groups(run(keep="latents").to_arviz()) == {"posterior", "sample_stats"}


def test_a_latent_may_be_called_like_a_statistic():
    class Named(Ellipse):
        def latents(self, u):
            return {"energy": u, "step_size": u[..., 0]}

    draws = run(dgm.condition(Named(), [2.0]))
    data: Any = draws.to_arviz()
    np.testing.assert_array_equal(data.posterior["energy"].values, draws.inputs.numpy())
    np.testing.assert_array_equal(data.sample_stats["energy"].values, draws.stats["energy"].numpy())
    assert len(draws.summary()) == 3


@pytest.mark.parametrize(
    ("latents", "words"),
    [
        (lambda u: {"draw": u}, "'draw', like a dimension"),
        (lambda u: {"problem_0": u}, "'problem_0', like a dimension"),
        (lambda u: {"a\0b": u}, "rename it"),
        (lambda u: {"z": u.to(torch.complex128)}, "view_as_real"),
        (lambda u: {"z": u.bfloat16()}, "bfloat16.*float"),
    ],
)
def test_latents_that_no_file_holds_are_refused_before_the_work(latents, words, monkeypatch):
    class Odd(Ellipse):
        def latents(self, u):
            return latents(u)

    monkeypatch.setattr(dgm.ConstrainedHMC, "step", lambda *arguments: pytest.fail("it sampled"))
    with pytest.raises(ModelError, match=words):
        run(dgm.condition(Odd(), [2.0]))


# ---------------------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize("mask", [MASK, MASKS], ids=["one mask", "a mask per problem"])
def test_completions_show_the_observed_part_bit_for_bit_and_vary_elsewhere(mask):
    draws = run(fibre(mask=mask))
    outputs = draws.generate(seed=2)
    seen = mask.expand(3, 2, 3)
    expected = image(3).double().expand_as(outputs)
    assert torch.equal(outputs[:, :, seen], expected[:, :, seen])
    assert (outputs[:, :, ~seen].std((0, 1)) > 0.05).all()


def test_the_hidden_part_is_generated_from_the_latents_with_fresh_noise():
    # the noise left after the mean of the latents is white and of the model's size
    model = linear_gaussian_model(n_outputs=40)
    mask = torch.arange(40) < 5
    problem = dgm.condition(model, torch.zeros(40), observe=dgm.pixels(mask))
    draws = run(problem, chains=20, draws=20)
    mean = draws.latents["z"] @ model.weight.mT + model.bias
    noise = ((draws.generate(seed=2) - mean) / model.sd)[..., ~mask]
    n = noise.numel()
    assert abs(noise.mean()) < 5 / n**0.5
    assert abs(noise.var() - 1) < 5 * (2 / n) ** 0.5
    # the control: the noise of the observed part is tied to the data
    observed = ((draws.generate(seed=2) - mean) / model.sd)[..., mask]
    assert abs(observed.var() - 1) > 5 * (2 / n) ** 0.5 or abs(observed.mean()) > 5 / n**0.5


def test_the_same_seed_generates_the_same_outputs(draws):
    assert torch.equal(draws.generate(seed=2), draws.generate(seed=2))
    assert not torch.equal(draws.generate(seed=2), draws.generate(seed=3))
    assert torch.equal(draws.generate(), draws.generate(seed=draws.seed))


@pytest.mark.parametrize("n", [1, 3, DRAWS, 2 * DRAWS])
def test_n_outputs_a_chain_are_spread_over_its_draws(draws, n):
    seen = []
    complete = draws.problem.complete

    class Spy:
        can_complete = True

        def complete(self, inputs, rng):
            seen.append(inputs)
            return complete(inputs, rng)

    spied = dgm.Draws(inputs=draws.inputs, latents=None, stats=draws.stats, kernel=KERNEL, seed=1, problem=Spy())
    assert spied.generate(n).shape[:2] == (CHAINS, n)
    which = [int((draws.inputs[0] == row).all((-1, -2)).nonzero()[0, 0]) for row in seen[0][0]]
    assert which == sorted(which)
    assert len(set(which)) == min(n, DRAWS)


def test_draws_under_a_tolerance_generate_too():
    target = dgm.condition(Images().eval(), image(3), observe=dgm.pixels(MASK), tolerance=0.1)
    outputs = run(target, dgm.HMC(step_size=0.05)).generate(seed=2)
    assert outputs.shape == (CHAINS, DRAWS, 3, 2, 3)
    assert torch.equal(outputs[..., MASK], image(3).double()[..., MASK].expand(CHAINS, DRAWS, 3, 3))


def test_a_dense_model_generates_from_all_of_its_inputs():
    problem = dgm.condition(Ellipse(), [2.0])
    draws = run(problem)
    assert torch.equal(draws.generate(), torch.full((CHAINS, DRAWS, 1), 2.0, dtype=FLOAT))


# ---------------------------------------------------------------------------------------------------------- interrupts


def interrupt_after(monkeypatch, calls, error=KeyboardInterrupt):
    """Ctrl-C, or an error, in the middle of a transition, after so many, those of the start-up not counted."""
    step, count = dgm.ConstrainedHMC.step, [0]

    def interrupted(self, problem, *args):
        if problem.observed.noise_scale is None:
            if count[0] == calls:
                raise error
            count[0] += 1
        return step(self, problem, *args)

    monkeypatch.setattr(dgm.ConstrainedHMC, "step", interrupted)


@pytest.mark.parametrize("keep", some(("inputs", "latents"), quick=("inputs",)))
def test_an_interrupt_keeps_the_draws_that_were_made(monkeypatch, tmp_path, draws, keep):
    whole = run(keep=keep)
    # two warm-up iterations, then five draws
    interrupt_after(monkeypatch, 7)
    with pytest.warns(UserWarning, match=f"5 of {DRAWS} draws"):
        part = run(keep=keep)
    assert part.interrupted
    assert part.shape == (CHAINS, 5, 3)
    assert torch.equal(part.latents["z"], whole.latents["z"][:, :5])
    assert part.stats["energy"].shape == (CHAINS, 5, 3)
    part.save(tmp_path / "part.nc")
    assert dgm.Draws.load(tmp_path / "part.nc").interrupted
    if keep == "inputs":
        assert part.generate().shape == (CHAINS, 5, 3, 2, 3)


def test_an_interrupt_between_thinned_draws_keeps_whole_draws(monkeypatch):
    interrupt_after(monkeypatch, 2 + 3 * 2 + 1)
    with pytest.warns(UserWarning, match="2 of 4"):
        part = run(draws=4, thin=3)
    assert part.shape == (CHAINS, 2, 3)


def test_an_exception_of_the_model_keeps_the_draws_that_were_made(monkeypatch, draws):
    interrupt_after(monkeypatch, 7, RuntimeError("out of memory"))
    with pytest.warns(UserWarning, match=rf"stopped by RuntimeError \(out of memory\): 5 of {DRAWS} draws"):
        part = run()
    assert part.interrupted
    assert torch.equal(part.inputs, draws.inputs[:, :5])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_interrupt_before_the_first_draw_is_an_interrupt(monkeypatch, calls, error):
    interrupt_after(monkeypatch, calls, error)
    with pytest.raises(error):
        run()


class Verbose(dgm.ConstrainedHMC):
    """Reports a statistic of a size for which no machine has room, in as many transitions as it makes."""

    made = 0

    def step(self, problem, state, rng):
        Verbose.made += 1
        state, info = super().step(problem, state, rng)
        return state, dataclasses.replace(info, stats={**info.stats, "wide": torch.zeros(CHAINS, 1).expand(-1, 2**40)})


def test_room_for_statistics_is_made_before_the_warm_up_has_passed():
    with pytest.raises(RuntimeError, match="allocate"):
        run(kernel=Verbose(step_size=0.3, n_steps=2, n_geodesic=1), warmup=6)
    assert Verbose.made < 6


# ------------------------------------------------------------------------------------------------------------ progress


def test_the_bar_is_on_the_standard_error_stream_and_can_be_silenced(capfd):
    run(progress=False)
    assert capfd.readouterr() == ("", "")
    run(progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    for word in ("accept", "failed", "constraint"):
        assert word in err


def test_the_bar_holds_on_to_no_positions(monkeypatch):
    news = []

    class Recorder(Progress):
        def update(self, phase, info=None, count=1):
            news.append(info)

    monkeypatch.setattr("dgm_infer.sampling.sample.Progress", Recorder)
    problem = fibre()
    dgm.sample(problem, KERNEL, chains=CHAINS, warmup=1, draws=1, seed=0, progress=False)
    assert len(news) == 2
    assert all(info.tuning is None for info in news)
    assert all(value.shape[-2:] == (CHAINS, 3) for info in news for value in info.all_stats().values())
    state = KERNEL.init(problem, problem.start(CHAINS, torch.Generator().manual_seed(0)))
    _, info = KERNEL.step(problem, state, torch.Generator().manual_seed(0))
    assert info.tuning.end.position.shape == state.position.shape


def test_fresh_noise_shares_no_numbers_with_the_run():
    # the same stream again would give the numbers that drew the latents
    model = LinearGaussian(torch.zeros(40, 40, dtype=FLOAT), sd=1.0)
    mask = torch.zeros(40, dtype=torch.bool)
    mask[0] = True
    kernel = dgm.ConstrainedHMC(step_size=1e-3, n_steps=1)
    draws = dgm.sample(
        dgm.condition(model, torch.zeros(40), observe=dgm.pixels(mask)),
        kernel,
        chains=16,
        warmup=0,
        draws=1,
        seed=5,
        progress=False,
    )
    z = draws.latents["z"].flatten()[: 16 * 39]
    for noise in (draws.generate(), draws.generate(seed=5)):
        fresh = noise.flatten()
        correlations = torch.stack(
            [torch.corrcoef(torch.stack([z[:500], fresh[i : i + 500]]))[0, 1] for i in range(140)]
        )
        assert correlations.abs().max() < 0.25


def test_outputs_can_be_written_to():
    model = LinearGaussian(torch.ones(3, 2, dtype=FLOAT))
    draws = dgm.sample(dgm.condition(model, torch.zeros(3)), chains=2, warmup=2, draws=2, seed=0, progress=False)
    draws.generate().add_(1)


def test_a_latent_named_as_a_dimension_is_refused():
    made = run()
    draws = dgm.Draws(
        inputs=made.inputs, latents={"draw": made.inputs}, stats=made.stats, kernel=KERNEL, seed=1, problem=made.problem
    )
    with pytest.raises(dgm.errors.ArgumentError, match="'draw'"):
        draws.to_arviz()


class Named(dgm.GenerativeModel):
    """One observed input, and a latent by any function of the others."""

    input_density = dgm.StandardNormal(3)

    def __init__(self, function):
        super().__init__()
        self.function = function

    def observed(self, u):
        return u[..., :1]

    def latents(self, u):
        return {"a": self.function(u[..., 1])}


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a - a.mean(),
        lambda a: a / (1 + a.norm()),
        lambda a: a.cumsum(0),
        lambda a: a + torch.randn(a.shape),
    ],
    ids=["centred", "scaled by the norm", "those before", "random"],
)
@pytest.mark.parametrize("chains", [1, 4])
def test_latents_that_depend_on_other_chains_or_on_chance_are_refused(function, chains):
    short = {"chains": chains, "warmup": 1, "draws": 2, "seed": 0, "progress": False}
    with pytest.raises(dgm.errors.ModelError, match=r"Named\.latents gives 'a' that changes with the other positions"):
        dgm.sample(dgm.condition(Named(function), torch.zeros(1)), **short)
    # the control
    dgm.sample(dgm.condition(Named(torch.sin), torch.zeros(1)), **short)
    target = dgm.Target(lambda x: 0.5 * x.square().sum(-1), 2)
    target.latents = lambda x: {"a": function(x[..., 1])}
    with pytest.raises(dgm.errors.ModelError, match=r"Target\.latents gives 'a' that changes with the other positions"):
        dgm.sample(target, dgm.HMC(0.1, n_steps=1), **short)


def test_completions_may_be_without_the_noise_of_the_model():
    """What is hidden is then the mean of the decoder at the draw's latents, the rest as observed."""
    torch.manual_seed(0)
    model = generators.GaussianVAE(3, (4, 4), hidden=[8]).eval()
    image, mask = model.generate(1, seed=1).images[0], torch.arange(16).reshape(4, 4) < 6
    options = {"chains": 2, "warmup": 3, "draws": 4, "seed": 1, "progress": False}
    exact = dgm.sample(dgm.condition(model, image, observe=dgm.pixels(mask)), **options)
    found = exact.generate(mean=True)
    with torch.no_grad():
        expected = model.decoder.mean(exact.latents["z"].float()).reshape(found.shape).double()
    torch.testing.assert_close(found[..., ~mask], expected[..., ~mask], rtol=0, atol=1e-6)
    assert (found[..., mask] == image[mask]).all()
    # the control: with noise they differ
    assert (exact.generate()[..., ~mask] - expected[..., ~mask]).std() > 0.5 * model.decoder.sd.detach().mean()
    # noise of a measurement is not in completions, the model's own is
    noisy = dgm.sample(dgm.condition(model, dgm.blur(0.5)(image), observe=dgm.blur(0.5), noise=0.1), **options)
    with torch.no_grad():
        expected = model.decoder.mean(noisy.inputs[..., :3].float()).reshape(2, 4, 4, 4).double()
    torch.testing.assert_close(noisy.generate(mean=True), expected, rtol=0, atol=1e-6)
    shifted = dgm.WithNoise(model, 0.3)
    both = dgm.sample(dgm.condition(shifted, image, observe=dgm.pixels(mask)), **options)
    with torch.no_grad():
        expected = model.decoder.mean(both.inputs[..., :3].float()).reshape(2, 4, 4, 4).double()
    torch.testing.assert_close(both.generate(mean=True)[..., ~mask], expected[..., ~mask], rtol=0, atol=1e-6)


def test_noise_that_is_not_added_cannot_be_left_out():
    model = generators.GeneralisedLambda(5)
    fibre = dgm.condition(model, model.generate(1, seed=1).images[0])
    draws = dgm.sample(fibre, chains=2, warmup=2, draws=3, seed=1, progress=False)
    with pytest.raises(ModelError, match=r"mean=True.*GeneralisedLambda does not add its noise"):
        draws.generate(mean=True)
