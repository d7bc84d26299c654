"""The tutorials run, print what their pages say, and it is true."""

import math
import re
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import distributions as td

from evaluation.commands.cli import main
from tests.docs.pages import DOCS, examples, few_iterations, printed, unlike

PAGES = ["sum", "simulator", "evidence"]


def run(page, change=lambda block: block):
    names = {"__name__": page}
    with torch.random.fork_rng():
        for block in examples(f"tutorials/{page}.md"):
            exec(compile(change(block), f"docs/tutorials/{page}.md", "exec"), names)
    return names


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore")
def test_a_tutorial_runs_and_prints_such_lines(page, capsys):
    run(page, few_iterations)
    lines = capsys.readouterr().out.splitlines()
    words = [
        [re.sub(r"-?(\d+(\.\d+)?(e[+-]\d+)?|nan|inf)", "#", line) for line in text] for text in (lines, says(page))
    ]
    assert words[0] == words[1]


def says(page):
    return printed(f"tutorials/{page}.md")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_prints_what_its_page_says(page, capsys):
    run(page)
    lines = capsys.readouterr().out.splitlines()
    assert list(unlike(says(page), lines)) == []
    # the control: other estimates are noticed, each of them
    others = [re.sub(r"-?\d+\.\d+(?= \+-)", lambda found: f"{float(found[0]) + 0.2:.3f}", line) for line in says(page)]
    assert len(list(unlike(others, lines))) == sum("+-" in line for line in lines) >= 2


def without_numbers(line):
    return re.sub(r"-?\d+(\.\d+)?(e[+-]\d+)?", "#", line)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ["images", "likelihood", "train"])
def test_a_tutorial_on_images_says_what_happens(page, tmp_path, monkeypatch, capsys):
    """Word for word, in a folder of its own; what it makes is there, and better than what it began with."""
    monkeypatch.chdir(tmp_path)
    names = run(page)
    lines = iter(map(without_numbers, capsys.readouterr().out.splitlines()))
    assert [line for line in map(without_numbers, says(page)) if line not in lines] == []
    if page == "images":
        measured, restored, truth = names["measured"], names["mean"], names["held_out"][-2]
        assert (restored - truth).square().mean() < 0.4 * (measured - truth).square().mean()
        assert all((tmp_path / name).is_file() for name in ("completed.png", "restored.png"))
        # the guess that training took
        assert 0.8 < names["sd"] / 0.1 < 1.3
        assert names["likelihood"].std_error.max() < 0.5
        # held-out pictures are of many classes, whatever the names of files begin with
        classes = load_digits(return_X_y=True)[1]
        digits = {int(classes[int(file.stem)]) for file in names["files"][-8:]}
        assert len(digits) >= 5
        the_commands_do_what_the_page_says(tmp_path)
    elif page == "likelihood":
        # of three latents, importance sampling from the prior knows the answer
        model, picture = names["small"], names["held_out"][0].double()
        z = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            made = model.model.observed(z).double()
        log_density = td.Normal(made, float(model.sd)).log_prob(picture.flatten()).sum(-1)
        assert (2 * log_density.logsumexp(0) - (2 * log_density).logsumexp(0)).exp() > 100
        assert abs(log_density.logsumexp(0) - math.log(len(z)) - names["b"].log_z[0]) < 0.4
    else:
        (folder,) = (tmp_path / "runs" / "mine").iterdir()
        assert len(list((folder / "images").glob("*_mean.png"))) == 3


def the_commands_do_what_the_page_says(folder):
    """With the file of the page, and fewer draws."""
    text = (DOCS / "tutorials" / "images.md").read_text()
    (model,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    (folder / "mymodel.py").write_text(model)
    commands = re.findall(r"^dgm-infer (.*)$", text, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["condition", "condition", "evidence"]
    for command in commands:
        fewer = " --chains 2 --warmup 5 --draws 4" if command.startswith("condition") else ""
        assert main(f"{command}{fewer} --seed 1".split()) == 0
    (half,) = (folder / "runs" / "half").glob("*/images")
    assert len(list(half.glob("*_mean.png"))) == 8


def estimate(page, line):
    """A number of a page and its standard error."""
    (text,) = [each for each in says(page) if each.startswith(line)]
    return (float(number) for number in re.search(r"(-?[\d.]+) \+- ([\d.]+)", text).groups())  # type: ignore[union-attr]


@pytest.mark.parametrize(("line", "exact"), [("sorting", 2.0), ("transport", 3.0), ("delivery", 1.0)])
def test_the_stages_of_the_sum_have_the_means_of_dirichlet_shares(line, exact):
    mean, error = estimate("sum", line)
    # errors are printed with one digit
    assert abs(mean - exact) < 5 * (error + 0.005)
    # the control: the prior's share of another stage
    assert abs(mean - (exact + 1)) > 5 * (error + 0.005)


def test_the_rate_of_the_simulator_is_that_of_its_likelihood():
    names: dict[str, Any] = {"__name__": "simulator"}
    with torch.random.fork_rng():
        exec(examples("tutorials/simulator.md")[0], names)
    path = torch.cat([torch.tensor([0.3]), names["seen"]]).double()
    rate = torch.linspace(0.01, 6, 4000, dtype=torch.float64)
    before, dt = path[:-1], 0.2
    expected = before + rate[:, None] * before * (1 - before) * dt
    log_density = td.Normal(expected, 0.1 * dt**0.5).log_prob(path[1:]).sum(-1) + td.LogNormal(0.0, 0.5).log_prob(rate)
    exact = (log_density.softmax(0) * rate).sum().item()
    mean, error = estimate("simulator", "rate:")
    assert abs(mean - exact) < 5 * (error + 0.0005)
    # the control: the value that generated the path
    assert abs(mean - 1.5) > 5 * (error + 0.0005)


def log_evidence(counts, shape=2.0, rate=0.5):
    """Of counts with one Poisson rate, Gamma a priori."""
    total, n = sum(counts), len(counts)
    own = shape * math.log(rate) - math.lgamma(shape)
    return (
        own
        + math.lgamma(shape + total)
        - (shape + total) * math.log(rate + n)
        - sum(math.lgamma(count + 1) for count in counts)
    )


def test_the_evidences_and_the_bayes_factor_are_those_in_closed_form():
    (counts,) = re.findall(r"counts = torch.tensor\(\[([^]]*)\]", examples("tutorials/evidence.md")[0])
    counts = [float(count) for count in counts.split(",")]
    constant, changed = log_evidence(counts), log_evidence(counts[:6]) + log_evidence(counts[6:])
    for line, exact in (("constant", constant), ("changed", changed), ("log Bayes factor", changed - constant)):
        value, error = estimate("evidence", line)
        assert abs(value - exact) < 5 * (error + 0.0005)
        # the control: the rates' prior with another shape
        other = log_evidence(counts, shape=2.5)
        assert abs(value - other) > 5 * (error + 0.0005)


def test_control_lines_that_differ_are_noticed():
    said = ["a: 1.00 +- 0.01; b 2.50", "error 1e-09"]
    assert list(unlike(said, ["a: 1.04 +- 0.01; b 2.51", "error 3e-08"])) == []
    for found in (
        ["a: 1.20 +- 0.01; b 2.50", "error 1e-09"],
        ["a: 1.00 +- 0.01; b 2.60", "error 1e-09"],
        ["a: 1.00 +- 0.01; b 2.50", "error 1e-03"],
        ["c: 1.00 +- 0.01; b 2.50", "error 1e-09"],
        said[:1],
    ):
        assert len(list(unlike(said, found))) == 1
