"""``dgm-infer bench evidence``: speed of annealing, and log p(x) of the same images by this project and by Pyro.

Three measurements on the published importance-weighted auto-encoder, float32, in one process:

- image-gradients per second of annealed importance sampling, ten leapfrog steps per temperature, against a bare loop of
  ``energy_and_gradient`` on as many points; the two take turns, and the median of their ratios counts;
- seconds until one image's estimate has a standard error of 0.1, by annealing with as many temperatures here and with
  Pyro's HMC kernel, one chain after another. A standard error falls with the square root of the chains, so a run with
  the right number of chains would take the seconds of this run times its mean squared error over 0.01;
- every method's estimate, error, status, seconds and gradients on the same images.

Beside JAX: all images are also annealed by the loop that one would write in JAX, with as many temperatures, and a
logistic regression's evidence is estimated by BlackJAX's adaptive tempered sequential Monte Carlo too. Seconds to an
error go by the error that a method claims, and by its distance from a long run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

import dgm_infer as dgm
from dgm_infer import Gaussian
from dgm_infer.errors import ConfigError, extra, uninterrupted
from dgm_infer.files import REFERENCE_DATA
from generators import IWAE, LatentPosterior

from ..experiments.reference import reference_folder
from ..reports.estimates import Estimates
from ..reports.records import write_record
from ..reports.tables import markdown
from .evidence_in_jax import missing, plain_annealing, regressions, seconds_to
from .machine import check_device, checked_cores, device_name
from .publishing import DEVICES, by_device, cores_of, new_record, publish, versions
from .settings import check_counts, check_seed, writable_folder
from .throughput import STEPS, one_large_run, throughput
from .workers import torch_threads

__all__ = ["bench", "seconds_to_error", "table", "throughput"]

_ERROR = 0.1
# Leapfrog steps of the plain loop in JAX and their size: a quarter of a turn about the base.
_PLAIN = (5, 0.3)


def bench(
    images: int = 100,
    chains: int = 8,
    temperatures: int = 30,
    repeats: int = 5,
    compared_images: int = 4,
    compared_chains: int = 8,
    compared_temperatures: int = 100,
    peer: bool = True,
    jax: bool = True,
    reference_temperatures: int = 1000,
    device: Literal["cpu", "cuda"] = "cpu",
    cores: int | None = None,
    data: str | None = None,
    seed: int = 0,
    output: str = "evaluation/results",
) -> Path:
    """Measure annealing's speed, and every method beside Pyro's on the same images.

    Args:
        images: images in the speed measurement.
        chains: chains per image in it.
        temperatures: temperatures in it, of ten leapfrog steps each.
        repeats: turns of annealing and of the bare loop.
        compared_images: number of images, the first ones, in the comparison with Pyro.
        compared_chains: chains of annealing in it, for both.
        compared_temperatures: temperatures of annealing in it, for both.
        peer: run Pyro, which the ratio needs.
        jax: anneal by a plain loop in JAX and estimate a regression's evidence by BlackJAX; what is not installed is
            left out, and the record says so.
        reference_temperatures: of the long annealing from which errors are taken.
        device: device of this project; Pyro runs on the CPU. On cuda, 1000 images with 16 chains are annealed once,
            with 1000 temperatures.
        cores: processor cores; null for all of them.
        data: the reference folder, with iwae_mnist in it; null for the environment variable DGM_INFER_REFERENCE_DATA.
        seed: seed of all randomness.
        output: folder for ``evidence_<device>.json`` and ``evidence.md``.

    Returns:
        path of the JSON file.
    """
    counts = {
        "images": images,
        "chains": chains,
        "temperatures": temperatures,
        "repeats": repeats,
        "compared_images": compared_images,
        "compared_temperatures": compared_temperatures,
        "reference_temperatures": reference_temperatures,
    }
    check_counts(**counts)
    if compared_chains < 2:
        raise ConfigError(f"compared_chains: {compared_chains} must be >= 2, for a standard error")
    check_seed(seed)
    check_device(device)
    if peer:
        # before anything is measured
        with extra("bench"):
            import pyro  # noqa: F401
    folder_of_data = reference_folder(data)
    if folder_of_data is None or not folder_of_data.is_dir():
        raise ConfigError(
            f"data: {folder_of_data or 'not given'}; name the folder that has iwae_mnist in it (--data FOLDER, or "
            f"{REFERENCE_DATA})"
        )
    cores = checked_cores(cores)
    model = IWAE.from_npz(folder_of_data).to(device)
    pictures = IWAE.published_images(folder_of_data).images
    available = len(pictures)
    for name, value in (("images", images), ("compared_images", compared_images)):
        if value > available:
            raise ConfigError(f"{name}: {value} must be at most the {available} published images")
    folder = writable_folder(output)
    settings = {
        **counts,
        "compared_chains": compared_chains,
        "peer": peer,
        "jax": jax,
        "device": device,
        "cores": cores,
        "seed": seed,
    }
    path = folder / f"evidence_{device}.json"
    record = new_record(
        "evidence",
        settings,
        ["dgm-infer", "torch", "pyro-ppl", "numpy", "jax", "blackjax"],
        device_name=device_name(device),
        threads=cores,
    )

    def posterior(n: int) -> tuple[LatentPosterior, Gaussian]:
        target = LatentPosterior(model.decoder, pictures[:n], model.prior)
        return target, Gaussian.from_encoder(model.encoder, target.images)

    with torch_threads(cores):
        print(f"speed: {images} images x {chains} chains, {repeats} turns of {temperatures} temperatures", flush=True)
        record["throughput"] = throughput(*posterior(images), chains, temperatures, repeats, seed)
        if device == "cuda":
            record["large"] = one_large_run(posterior, seed)
        rows = _compared(*posterior(compared_images), compared_chains, compared_temperatures, seed)
        print(f"annealing {images} images at once, {compared_temperatures} temperatures", flush=True)
        method = dgm.AIS(temperatures=compared_temperatures)
        options = {"chains": compared_chains, "seed": seed, "progress": False}
        wide = uninterrupted(dgm.log_evidence(*posterior(images), method, **options))
        together = Estimates.of(f"AIS, {images} images", wide)
        theirs = _peer(model, posterior(compared_images), compared_chains, compared_temperatures, seed) if peer else []
        if jax:
            record["jax"] = _beside_jax(model, pictures[:images], posterior(images), together, settings)
    by_label = {row.label: row for row in [*rows, *theirs]}
    record["methods"] = {label: row.record() for label, row in by_label.items()}
    record["annealing"] = _annealing(by_label["AIS"], together, by_label.get("Pyro AIS, serial HMC"))
    write_record(path, record)
    publish(path, "evidence", table(folder))
    return path


def _compared(target: LatentPosterior, base: Gaussian, chains: int, temperatures: int, seed: int) -> list[Estimates]:
    methods = [
        (dgm.Elbo(), 16),
        (dgm.evidence.ImportanceSampling(), 16),
        (dgm.AIS(temperatures=temperatures), chains),
        (dgm.GibbsTempering(), 16),
        (dgm.ContinuousTempering(), 16),
    ]
    rows = []
    for method, own_chains in methods:
        name = type(method).__name__
        print(f"{name}: {len(target.images)} images x {own_chains} chains", flush=True)
        options = {"chains": own_chains, "seed": seed, "progress": False}
        evidence = uninterrupted(dgm.log_evidence(target, base, method, **options))
        rows.append(Estimates.of(name, evidence))
    return rows


def _peer(
    model: IWAE, problem: tuple[LatentPosterior, Gaussian], chains: int, temperatures: int, seed: int
) -> list[Estimates]:
    from . import pyro_peer as baselines

    target, base = problem
    model = model.cpu()
    decoder = baselines.PyroDecoder(model.decoder.requires_grad_(False), target.images.cpu(), base.to("cpu"))
    rows = []
    for function, own in (
        (baselines.svi_encoder, {}),
        (baselines.svi_autoguide, {}),
        (baselines.renyi_elbo, {}),
        (baselines.importance, {}),
        (baselines.annealed_importance, {"temperatures": temperatures, "chains": chains, "n_steps": STEPS}),
    ):
        print(f"Pyro: {function.__name__}", flush=True)
        rows.append(function(decoder, seed=seed, **own))
    return rows


def _beside_jax(
    model: IWAE,
    pictures: Tensor,
    problem: tuple[LatentPosterior, Gaussian],
    own: Estimates,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Annealing of all images here and by the plain loop in JAX, both about a long run; and the regression."""
    temperatures, chains, seed = (settings[name] for name in ("compared_temperatures", "compared_chains", "seed"))
    print(f"reference: {settings['reference_temperatures']} temperatures", flush=True)
    method = dgm.AIS(temperatures=settings["reference_temperatures"])
    options = {"chains": chains, "seed": seed + 1, "progress": False}
    truth = uninterrupted(dgm.log_evidence(*problem, method, **options)).log_z.reshape(-1).cpu().double()

    def row(found: Estimates) -> dict[str, Any]:
        rate = found.gradient_evaluations * len(truth) / found.seconds
        return _to_errors(found.log_z, found.std_error, found.seconds, truth) | {"rate": rate}

    rows = {"dgm-infer": row(own)}
    options = {"chains": chains, "seed": seed, "progress": False, "keep_draws": False}
    for name, other in {"default": None, "Hamiltonian AIS": dgm.evidence.HamiltonianAIS()}.items():
        print(f"all images: {name}", flush=True)
        evidence = uninterrupted(dgm.log_evidence(*problem, other, **options))
        rows[f"dgm-infer, {name}"] = row(Estimates.of(name, evidence))
    if reason := missing():
        rows["plain loop"] = {"left_out": reason}
    else:
        print("plain loop in JAX", flush=True)
        found = plain_annealing(
            model, pictures, chains, temperatures, settings["repeats"], settings["cores"], seed, *_PLAIN
        )
        if "error" not in found:
            log_z, errors = (torch.from_numpy(found[name]) for name in ("log_z", "std_error"))
            seconds = median(found["seconds"])
            kept = {name: found[name] for name in ("compilation", "acceptance", "agreed")}
            rate = found["gradients"] * len(truth) / seconds
            found = {**_to_errors(log_z, errors, seconds, truth), "rate": rate, **kept}
        rows["plain loop"] = found
    print("a regression", flush=True)
    return {"annealing": rows, "regression": regressions(settings["cores"], seed)}


def _to_errors(log_z: Tensor, std_error: Tensor, seconds: float, truth: Tensor) -> dict[str, float]:
    """Seconds per image to :data:`_ERROR`, by distance from the truth and as claimed; estimates ``[..., n]``."""
    each = seconds / len(truth)
    square, claimed = (log_z.double() - truth).square().mean(), std_error.double().square().mean()
    return {
        "rmse": square.sqrt().item(),
        "claimed": claimed.sqrt().item(),
        "to_rmse": seconds_to(_ERROR, each, square.item()),
        "to_claimed": seconds_to(_ERROR, each, claimed.item()),
    }


def seconds_to_error(estimates: Estimates, error: float = _ERROR) -> float:
    """Seconds per image to a standard error, in a run with as many chains as that takes: variance times time."""
    variance = float(estimates.std_error.double().square().mean())
    return seconds_to(error, estimates.seconds / len(estimates.log_z), variance)


def _annealing(own: Estimates, together: Estimates, peer: Estimates | None) -> dict[str, Any]:
    sides = {"same_images": own, "all_images": together, **({"pyro": peer} if peer is not None else {})}
    seconds = {name: seconds_to_error(side) for name, side in sides.items()}
    ratios = (
        {name: seconds[name] / seconds["pyro"] for name in ("same_images", "all_images")} if peer is not None else None
    )
    return {"error": _ERROR, "seconds": seconds, "over_pyro": ratios, "images_at_once": len(together.log_z)}


def table(folder: Path) -> str:
    """Markdown of the results in a folder, on a processor and on a GPU."""
    records = by_device(folder, "evidence")
    rows = [[name, *(_cell(record, get) for record in records.values())] for name, get in _LINES]
    parts = [
        "# Log evidence: speed, and dgm-infer beside Pyro\n\nPublished IWAE of binarised MNIST, float32.\n",
        markdown(["", *DEVICES.values()], rows),
        *(_details(device, record) for device, record in records.items() if record is not None),
    ]
    return "\n".join(parts)


def _cell(record: dict[str, Any] | None, value: Callable[[dict[str, Any]], str]) -> str:
    """A value of a device that was measured, and of what was measured there."""
    try:
        return value(record) if record is not None else "not measured"
    except (KeyError, TypeError):
        return "not measured"


_LINES: Sequence[tuple[str, Callable[[dict[str, Any]], str]]] = (
    ("image-gradients/s, bare loop of energy and gradient", lambda r: f"{r['throughput']['bare_loop']:.0f}"),
    ("image-gradients/s, annealing", lambda r: f"{r['throughput']['annealing']:.0f}"),
    ("annealing over the bare loop", lambda r: f"{r['throughput']['share']:.2f}"),
    ("image-gradients/s, loop written by hand", lambda r: f"{r['throughput']['hand_written_loop']:.0f}"),
    ("annealing over the loop written by hand", lambda r: f"{r['throughput']['share_of_hand_written']:.2f}"),
    (
        "1000 images x 16 chains, 1000 temperatures",
        lambda r: f"{r['large']['seconds']:.0f} s, {r['large']['image_gradients_per_second']:.0f} image-gradients/s",
    ),
    (
        "seconds per image to a standard error of 0.1, annealing the images that Pyro has",
        lambda r: f"{r['annealing']['seconds']['same_images']:.3g}",
    ),
    (
        "seconds per image to a standard error of 0.1, annealing all images at once",
        lambda r: f"{r['annealing']['seconds']['all_images']:.3g}",
    ),
    (
        "seconds per image to a standard error of 0.1, Pyro's HMC, one chain after another",
        lambda r: f"{r['annealing']['seconds']['pyro']:.3g}",
    ),
    (
        "seconds over Pyro's: the same images; all at once",
        lambda r: ", ".join(f"1/{1 / r['annealing']['over_pyro'][k]:.0f}" for k in ("same_images", "all_images")),
    ),
)


def _in_jax(record: dict[str, Any]) -> list[str]:
    """Tables of what was measured beside JAX."""
    if "jax" not in record:
        return []
    rows = [
        [name, row.get("left_out") or row["error"], *["-"] * 4]
        if "rmse" not in row
        else [name, f"{row['rate']:.0f}", *(f"{row[key]:.3g}" for key in ("rmse", "claimed", "to_rmse", "to_claimed"))]
        for name, row in record["jax"]["annealing"].items()
    ]
    header = [
        "annealing all images",
        "image-gradients/s",
        "error, rms",
        "claimed",
        "s per image to 0.1, by rms",
        "claimed",
    ]
    found = record["jax"]["regression"]
    lines = [
        [
            name,
            *(
                [f"{row['seconds']:.3g}", f"{row['rmse']:.3g}", f"{row['to_rmse']:.3g}"]
                if "rmse" in row
                else [row.get("left_out") or row["error"], "-", "-"]
            ),
            f"{row['to_claimed']:.3g}" if "to_claimed" in row else "-",
            f"{row['compilation']:.1f}" if "compilation" in row else "-",
        ]
        for name, row in found["methods"].items()
    ]
    words = f"regression, {found['dim']} dimensions, log Z = {found['log_z']:.3f} ± {found['std_error']:.3f}"
    columns = [words, "seconds", "error, rms", "s to 0.05, by rms", "as claimed", "compilation, s"]
    return ["Beside a plain loop in JAX, compiled, and BlackJAX:\n", markdown(header, rows), markdown(columns, lines)]


def _details(device: str, record: dict[str, Any]) -> str:
    settings = record["settings"]
    where = f"`{record['command']}`, {record['date']}, on {record['processor']}, {cores_of(record['threads'])}"
    where += f" with {record['device_name']}" if record["device_name"] else ""
    rows = [
        [
            label,
            f"{row['mean']:.3f}",
            f"{row['mean_error']:.3f}",
            row["status"],
            f"{row['seconds']:.2f}",
            str(row["gradient_evaluations"]),
        ]
        for label, row in record["methods"].items()
    ]
    parts = [
        f"## {DEVICES[device]}\n",
        f"{where}; {versions(record)}. Speed: {settings['images']} images x {settings['chains']} chains, {STEPS} "
        f"leapfrog steps per temperature. Annealing beside Pyro: {settings['compared_temperatures']} temperatures, "
        f"{settings['compared_chains']} chains; seconds to an error are those of the run times its mean squared error "
        f"over {_ERROR}^2.\n",
        f"The first {settings['compared_images']} images; gradients are those of all chains of an image.\n",
        markdown(["method", "mean log p(x)", "standard error", "status", "seconds", "gradients"], rows),
        *_in_jax(record),
    ]
    return "\n".join(parts)
