"""log p(x) of images under an importance-weighted auto-encoder of binarised MNIST, against time (T 5.6.2, T fig. 5.4).

The published parameters and the first images of the published set, which the model itself generated: the latents that
made them are exact draws of their posteriors, so that annealing in both directions bounds log p(x) rigorously. Annealed
importance sampling, Gibbs and joint continuous tempering start from the encoder, in its whitened coordinates. Three
things differ from the original: step sizes are adapted on pilots, whose time counts, instead of fixed (0.3, 0.25,
0.15); the joint method's temperature control has a scale of 1, not 8, with which it travelled a hundredth as often in
a comparison on 20 images; and there are 100 images instead of 1000.
"""

from pathlib import Path

import dgm_infer as dgm
from dgm_infer.errors import uninterrupted
from dgm_infer.evidence import Method
from generators import IWAE, LatentPosterior

from ..figures import log_evidence
from ..reports.estimates import Estimates, caveats, table
from ..reports.kept import NOT_KEPT, Parts
from .reference import required_data

__all__ = ["run"]

# Images, chains of each, and temperatures of annealing, which are the draws of tempering.
_FULL = (100, 16, (50, 100, 200, 500, 1000, 2000))
_FAST = (10, 4, (20, 50, 100))


def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict:
    """Write ``evidence.png`` into ``folder``.

    Args:
        folder: folder of the picture.
        fast: few images, chains and temperatures.
        data: the reference folder, with ``iwae_mnist`` in it.
        seed: seed of all randomness.
        parts: what a run that was stopped takes up again.

    Raises:
        ConfigError: the model's files are missing.
    """
    data = required_data(
        data, "iwae_mnist", "its authors published the files on GitHub, matt-graham/continuously-tempered-hmc"
    )
    n_images, chains, lengths = _FAST if fast else _FULL
    model = IWAE.from_npz(data)
    images, latents = IWAE.published_images(data)
    target = LatentPosterior(model.decoder, images[:n_images], model.prior)
    base = dgm.Gaussian.from_encoder(model.encoder, target.images)
    options = {"chains": chains, "seed": seed, "keep_draws": False}

    notes: list[str] = []

    def estimate(label: str, method: Method) -> Estimates:
        print(f"{label}: {n_images} images x {chains} chains", flush=True)
        evidence = uninterrupted(parts.run(dgm.log_evidence, target, base, method, **options)[0])
        notes.extend(caveats(label, evidence))
        return Estimates.of(label, evidence)

    bounds = [
        estimate("ELBO", dgm.Elbo()),
        *(estimate(f"IWAE-{k}", dgm.evidence.ImportanceSampling(k)) for k in ((50,) if fast else (50, 2000))),
    ]
    families = {
        "AIS": lambda k: dgm.AIS(temperatures=k, schedule="sigmoid"),
        "Gibbs CT": lambda k: dgm.GibbsTempering(draws=k),
        "joint CT": lambda k: dgm.ContinuousTempering(draws=k),
    }
    curves = {label: [estimate(f"{label}, {k}", method(k)) for k in lengths] for label, method in families.items()}
    longest = dgm.AIS(temperatures=lengths[-1], schedule="sigmoid")
    print(f"bidirectional bounds: {longest.temperatures} temperatures", flush=True)
    both, _ = parts.run(dgm.bidirectional, target, base, latents[:n_images], longest, **options)
    uninterrupted(both.combined)
    sandwich = [
        Estimates.of(label, evidence)
        for label, evidence in (("lower", both.lower), ("upper", both.upper), ("Bennett", both.combined))
    ]
    log_evidence.against_time(
        folder / "evidence.png",
        curves,
        {row.label: row.mean for row in bounds},
        (sandwich[0].mean, sandwich[1].mean),
        title=f"log p(x) of {n_images} images, {chains} chains each",
    )
    rows = [*bounds, *(row for curve in curves.values() for row in curve), *sandwich]
    return {
        "summary": f"{n_images} images, {chains} chains each\n{table(rows)}mean gap of the bidirectional bounds "
        f"{float(both.gap.mean()):.3f}\n" + "".join(f"{note}\n" for note in notes),
        "images": n_images,
        "chains": chains,
        "mean_gap": float(both.gap.mean()),
        "bounds": {row.label: row.record() for row in bounds},
        "bidirectional": {row.label: row.record() for row in sandwich},
        "methods": {
            label: [{"length": k, **row.record()} for k, row in zip(lengths, curve, strict=True)]
            for label, curve in curves.items()
        },
    }
