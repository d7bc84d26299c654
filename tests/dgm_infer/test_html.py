"""What notebooks show of results: whole HTML without scripts, whose numbers are those of the result; plots."""

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError
from tests.pages import whole


def read(thing):
    """What a notebook shows of it, which is whole and asks for nothing elsewhere."""
    return whole(thing._repr_html_())


@pytest.fixture(scope="module")
def fibre():
    model = generators.load("digits_vae")
    return dgm.condition(model, model.generate(1, seed=1).images[0], observe=dgm.pixels(torch.ones(8, 8).triu() > 0))  # type: ignore[operator]


@pytest.fixture(scope="module")
def draws(fibre):
    return dgm.sample(fibre, chains=3, warmup=3, draws=8, seed=1, progress=False)


@pytest.fixture(scope="module")
def estimate():
    target = dgm.Target(lambda x: x.square().sum(-1) / 2, 2, (3,))
    return dgm.log_evidence(target, dgm.Gaussian.laplace(target), dgm.AIS(10), chains=4, seed=1, progress=False)


def test_draws_show_how_good_they_are_their_worst_latents_and_completions(draws):
    page = read(draws)
    summary = draws.summary()
    worst = summary["r_hat"].idxmax()
    assert str(worst) in page.words
    assert f"{summary.loc[worst, 'ess_bulk']:.4g}" in page.words
    assert str(draws.diagnose()).split()[0] in page.words
    assert len(page.addresses) == 3
    # without their problem there is nothing to complete
    apart = dgm.Draws(inputs=draws.inputs, latents=dict(draws.latents), stats=draws.stats, kernel=draws.kernel, seed=1)
    assert read(apart).addresses == []


def test_estimates_show_their_numbers_and_what_is_wrong_with_them(estimate):
    page = read(estimate)
    for value in estimate.log_z.tolist():
        assert f"{value:.4g}" in page.words
    assert str(estimate.diagnose()).split(":")[0] in page.words
    assert f"{dgm.compare(estimate, estimate).std_error[0].item():.4g}" in read(dgm.compare(estimate, estimate)).words


def test_problems_kernels_and_findings_are_shown(fibre, draws):
    assert "observed values" in read(fibre).words
    assert "2 dimensions" in read(dgm.Target(lambda x: x.square().sum(-1), 2)).words
    assert f"{draws.kernel.step_size.item():.4g}" in read(draws.kernel).words
    assert "temperatures" in read(dgm.AIS(7)).words
    assert read(draws.diagnose()).words
    wrong = dgm.check(fibre.model, torch.zeros(8, 8) + 9)
    assert all(each.remedy in read(wrong).words for each in wrong.findings)
    assert "<script>" not in read(dgm.diagnosis.Diagnosis((), "<script>")).tags


def test_objects_print_what_they_are(fibre):
    things = [dgm.pixels(torch.ones(2, 2) > 0), dgm.downsample(2), dgm.blur(1.0), dgm.linear(torch.eye(2)), fibre]
    things += [dgm.Target(lambda x: x.sum(-1), 1, (2,)), dgm.condition(fibre.model, torch.zeros(8, 8), tolerance=0.1)]
    assert [repr(thing) for thing in things if " at 0x" in repr(thing)] == []
    assert repr(dgm.Target(lambda x: x.sum(-1), 1, (2,))) == "Target(1 dimension, *batch = (2,))"
    assert repr(dgm.downsample(2)) == "Downsample(factor=2)"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["trace", "rank", "posterior", "pair"])
def test_plots_are_arviz_s_of_the_worst_latents(kind, draws, tmp_path):
    figure = draws.plot(kind, n=2)
    figure.savefig(tmp_path / "plot.png")
    worst = draws.summary()["r_hat"].nlargest(2).index
    words = " ".join(
        text
        for axis in figure.axes
        for text in (axis.get_title(), axis.get_xlabel(), axis.get_ylabel(), *_legend(axis))
    )
    assert all(name in words for name in worst)


def _legend(axis):
    return [] if axis.get_legend() is None else [text.get_text() for text in axis.get_legend().get_texts()]


def test_plots_of_estimates_have_their_intervals(estimate):
    for thing, value in ((estimate, estimate.log_z), (dgm.compare(estimate, estimate), torch.zeros(3))):
        (axis,) = thing.plot().axes
        assert list(axis.lines[0].get_ydata()) == value.tolist()  # type: ignore[arg-type]
        low, high = thing.interval()
        segments = axis.collections[0].get_segments()  # type: ignore[attr-defined]
        ends = torch.tensor(segments[1])[:, 1]
        torch.testing.assert_close(ends, torch.stack([low[1], high[1]]).double(), check_dtype=False)


def test_what_is_not_there_is_answered_in_a_line(draws, tmp_path):
    assert torch.equal(draws["z"], draws.latents["z"])
    for ask in (lambda: draws["w"], lambda: draws.latents["w"], lambda: draws[0]):
        with pytest.raises(ArgumentError, match="there is z"):
            ask()
    assert draws.latents.get("w") is None
    with pytest.raises(ArgumentError, match=r"kind='violin'.*rank"):
        draws.plot("violin")
    with pytest.raises(ArgumentError, match="names"):
        draws.plot(names="w")
    for ending, words in ((".png", "savefig"), (".csv", "to_csv")):
        with pytest.raises(ArgumentError, match=words):
            draws.save(tmp_path / f"x{ending}")
    assert list(tmp_path.iterdir()) == []
