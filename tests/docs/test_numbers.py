"""The measured numbers of README.md and docs are those of evaluation/results, which commands write."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from evaluation.benchmarks import (
    abc,
    coverage,
    methods,
    modes,
    multimodal,
    programs,
    replicas,
    samplers,
    scaling,
    targets,
)
from evaluation.reports import images
from evaluation.reports.documents import PAGES, read_record, renewed, seconds_to
from evaluation.reports.rates import LEVELS, rate_at

ROOT = Path(__file__).parents[2]
EVIDENCE, COMPLETIONS, IMAGES = "docs/evidence.md", "docs/completions.md", "docs/images.md"
SAMPLERS, PROGRAMS, README = "docs/samplers.md", "docs/programs.md", "README.md"
COUNTS = {1.5: "one and a half", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 18: "eighteen"}
SHARES = {4: "a quarter", 5: "a fifth", 7: "a seventh", 8: "an eighth"}
# a setting that no record holds
SETTINGS = ("moment-matched to 100 mean-field fits",)

Records = dict[str, Any]


def records() -> Records:
    return {
        name: read_record(name)
        for name in (
            "rate_distortion",
            "methods",
            "boltzmann",
            "radon",
            "iwae_training",
            "abc",
            "quantile",
            "gp_probit",
        )
    }


def count(value: float, unit: float = 1) -> str:
    rounded = round(value / unit) * unit
    return COUNTS.get(rounded, f"{rounded:g}")


def share(value: float) -> str:
    return SHARES.get(round(value), f"1/{value:.3g}")


def mean_ratio(ratios: list[float]) -> float:
    return prod(ratios) ** (1 / len(ratios))


def efforts(r: Records, experiment: str) -> dict[str, float]:
    """Gradients to the error aimed at, by method."""
    rows = r["methods"]["experiments"][experiment]["methods"]
    return {label: row["to_error"] for label, row in rows.items() if row["to_error"] is not None}


def sentences(r: Records) -> list[tuple[str, str]]:
    """What the pages say, if the records are these."""
    settings = r["methods"]["settings"]
    annealing = r["methods"]["experiments"]["digits"]["methods"]["AIS"]
    aimed_at = annealing["std_error"] * (annealing["gradient_evaluations"] / annealing["to_error"]) ** 0.5
    images = [efforts(r, name) for name in ("digits", "iwae")]
    lead = mean_ratio([sorted(e.values())[1] / e["Hamiltonian AIS"] for e in images])
    machines = [r["methods"]["experiments"][f"boltzmann {i}"]["methods"] for i in (0, 3)]
    fewer = mean_ratio([m["AIS"]["to_error"] / m["simulated tempering"]["to_error"] for m in machines])
    frozen = sorted(m["SMC, frozen"]["deviation"] for m in machines)
    seconds = max(m["SMC, frozen"]["seconds"] for m in machines)
    diagonal, refined = (efforts(r, f"radon, {kind} base") for kind in ("diagonal", "refined"))
    saved = sorted(diagonal[label] / effort for label, effort in refined.items())

    boltzmann = r["boltzmann"]["results"]
    longest = {label: entries[-1] for label, entries in boltzmann["methods"].items()}
    shortest = {label: entries[0] for label, entries in boltzmann["methods"].items()}
    faster = {label: seconds_to(longest["AIS"]) / seconds_to(entry) for label, entry in longest.items()}
    guess = (sum(entry["log_z"] ** 2 for entry in boltzmann["base"]) / len(boltzmann["base"])) ** 0.5
    best = longest["ST"]
    moments = max(best["mean"]["value"], best["covariance"]["value"])

    bound = r["radon"]["results"]["methods"]["ELBO, diagonal"]
    trained = {name: model["iwae_5000"]["mean"] for name, model in r["iwae_training"]["models"].items()}
    draws = r["iwae_training"]["settings"]["samples"]
    chains, smc = r["abc"]["chains"], r["abc"]["sequential"]
    costs = {name: row["simulations"] / row["effective"] for name, row in smc.items()}
    seconds_of, simulations_of = (
        {name: costs_of[name] / costs_of["dgm-infer"] for name in ("pyABC", "sbi")}
        for costs_of in ({name: row["seconds_per_1000"] for name, row in smc.items()}, costs)
    )
    least = {
        label: min(latent["ess_per_second"] for latent in row["latents"].values())
        for label, row in r["quantile"]["results"]["methods"].items()
    }
    by_intervals = least["ABC-MCMC by intervals, ε = 0.1"] / least["constrained HMC"]
    classifier = r["gp_probit"]["results"]
    curves = r["rate_distortion"]["results"]["sets"]["mnist"]["curves"]
    pairs = [[rate_at(curves[name], level) for name in ("mnist_gan", "mnist_conv_vae")] for level in LEVELS]
    dearer = sorted(gan[0] / vae[0] for gan, vae in pairs if gan is not None and vae is not None)
    said = {
        EVIDENCE: [
            f"GAN of MNIST needs {count(dearer[0])} to {count(dearer[-1])} times the nats",
            f"a given error in log Z in {share(faster['ST'])} of annealing's time",
            f"that a standard error of {aimed_at:.2g} nats takes",
            f"methods --chains {settings['chains']} --images {settings['images']} --runs {settings['runs']}`",
            f"radon are one problem run {count(settings['runs'])} times",
            f"takes the fewest gradients on images, by a factor of about {count(lead, 0.5)};",
            f"simulated tempering takes {share(fewer)} of annealing's gradients",
            f"saves factors of {count(saved[0])} to {count(saved[-1])} on radon",
            f"its {settings['chains']} runs of 64 reach an error of {frozen[0]:.2f} to {frozen[1]:.2f} on the "
            f"Boltzmann machines in {seconds:.0f} s",
            f"boltzmann --data FOLDER` ({r['boltzmann']['seconds'] / 60:.0f} min of one core): the "
            f"{count(len(boltzmann['systems']))} published relaxations",
            f"{count(boltzmann['runs'])} runs of {boltzmann['chains']} chains each",
            f"whose guess of log Z is {guess:.2f} off",
            f"by factors of {count(faster['CT-HMC'])} to {count(faster['Gibbs CT'])} in log Z at the longest runs",
            f"at {shortest['CT-HMC']['seconds']:.0f} s they are level in log Z",
            f"particles here: {boltzmann['chains']} of them stay",
            f"radon --data FOLDER` ({r['radon']['seconds'] / 60:.0f} min of one core)",
            f"(ELBO {bound['mean']:.2f} +- {bound['mean_error']:.2f})",
        ],
        SAMPLERS: [
            f"are {chains['ratio']:.0f} times as fast in one call of {chains['chains']} chains as chain by chain",
            f"has {by_intervals:.2f} times the effective draws of constrained HMC for the worst latent",
            f"(J 10.1; {r['quantile']['results']['methods']['constrained HMC']['chains']} chains, "
            f"{r['quantile']['seconds'] / 60:.0f} minutes of one core)",
            f"gp_probit --data FOLDER`, {r['gp_probit']['seconds'] / 60:.0f} minutes of one core): scale",
            f"R-hat is at least {min(row['r_hat'] for row in classifier['methods'].values()):.2f}, so that",
            f"takes {seconds_of['pyABC']:.0f} times the seconds with pyABC and {seconds_of['sbi']:.1f} times with sbi, "
            f"and {simulations_of['pyABC']:.2f} and {simulations_of['sbi']:.2f} times the simulations",
        ],
        README: [
            f"simulated tempering gets log Z to {best['log_z_rmse']:.2f} and the moments to {share(1 / moments)} of "
            f"the base's error, in {share(faster['ST'])} of the time that annealing takes",
            f"An IWAE of {draws} draws ends {trained[f'IWAE-{draws}'] - trained['VAE']:.0f} nats above a VAE",
        ],
    }
    return [(page, sentence) for page, lines in said.items() for sentence in lines]


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def warped(record: Any) -> Any:
    """A record of other numbers, in other ratios."""
    if isinstance(record, dict):
        return {key: warped(value) for key, value in record.items()}
    if isinstance(record, list):
        return [warped(value) for value in record]
    # settings name what else is in a record
    return record if isinstance(record, str | bool | int | None) else record * (1.5 + abs(record)) ** 0.5


@pytest.mark.parametrize(("page", "sentence"), sentences(records()))
def test_a_measured_number_is_that_of_the_record(page, sentence):
    assert sentence in text(page)


def test_sentences_from_other_records_are_not_found():
    measured = dict(zip(sentences(records()), sentences(warped(records())), strict=True))
    changed = {old: new for old, new in measured.items() if old != new}
    assert len(changed) >= 12
    assert [new for page, new in changed.values() if new in text(page)] == []


def test_every_number_of_the_measurements_is_tested():
    measured = text(EVIDENCE).split("## Measured")[1]
    for page, sentence in (*sentences(records()), *((EVIDENCE, setting) for setting in SETTINGS)):
        measured = measured.replace(sentence, "") if page == EVIDENCE else measured
    left = re.sub(r"<!-- table.*?<!-- end -->|`[^`]*`|\]\([^)]*\)", "", measured)
    assert re.findall(r"[^.]*\d[^.]*", left) == []


STALE = {
    EVIDENCE: ("-1081.40", "-1081.41"),
    COMPLETIONS: (": nearest training images |", ": nearest images |"),
    IMAGES: ("largest difference of means |", "largest difference |"),
    SAMPLERS: ("simulations per one |", "simulations |"),
    PROGRAMS: ("| traced / by hand |", "| ratio |"),
}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_up_to_date(page):
    # if not: python -m evaluation.reports.documents
    printed = (ROOT / page).read_text()
    assert renewed(printed) == printed
    stale = printed.replace(*STALE[page])
    assert stale != printed
    assert renewed(stale) == printed


@pytest.mark.parametrize(
    ("record", "name", "table"),
    [
        ("methods", "methods", methods.table),
        ("coverage", "coverage", coverage.page),
        ("modes", "modes", modes.page),
        ("multimodal", "multimodal", multimodal.page),
        ("replicas", "replicas", replicas.page),
        ("targets", "targets", targets.table),
        ("programs", "programs", programs.page),
        ("abc", "abc", abc.page),
        ("scaling", "scaling", scaling.table),
        ("images_cpu", "images", images.page),
        ("samplers", "samplers", samplers.page),
    ],
)
def test_published_tables_are_those_of_their_records(record, name, table):
    assert table(read_record(record)) == (ROOT / "evaluation" / "results" / f"{name}.md").read_text()


def test_the_crossover_is_drawn_from_the_record():
    # if not: python -m evaluation.figures.crossover
    with Image.open(ROOT / "docs" / "crossover.png") as picture:
        assert picture.info["Source"] == read_record("images_cpu")["date"]


def test_the_readme_s_log_likelihood_is_the_one_tested():
    source = (ROOT / "tests/evaluation/experiments/test_iwae_values.py").read_text()
    value, tolerance = re.search(r"^LOG_EVIDENCE, TOLERANCE = (\S+), (\S+)$", source, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert f"log p(x) = {value} averaged over 100 images, to {tolerance} nats" in text(README)
