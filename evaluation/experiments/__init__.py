"""The published experiments: what ``dgm-infer reproduce NAME`` runs.

An experiment is a module of this folder, named as in :data:`EXPERIMENTS`, with one function::

    def run(folder: Path, *, fast: bool, data: Path | None, seed: int, parts: Parts = NOT_KEPT) -> dict

It writes its pictures into ``folder`` and returns its results, ready for JSON; the text under the key ``"summary"``,
if there is one, is printed and kept as ``log.txt``. What takes long is a part of ``parts``
(:class:`evaluation.reports.kept.Parts`): a run that was stopped computes none twice.
"""

__all__ = ["EXPERIMENTS"]

EXPERIMENTS = {
    "quantile": "parameters of a generalised lambda distribution from 250 observations (J 10.1)",
    "lotka_volterra": "predator-prey dynamics from the full series and from nine summaries (J 10.2)",
    "pose": "human poses from binocular and monocular projections (J 10.3; needs the reference data)",
    "inpainting": "MNIST digits of which the top quarter is observed (needs the reference data)",
    "gaussian_latent": "pseudo-marginal samplers of a known posterior against the scale of their moves (T 3.6.1)",
    "gp_probit": "pseudo-marginal samplers of a Gaussian process classifier (T 3.6.2; needs the reference data)",
    "boltzmann": "log Z and moments of Boltzmann machine relaxations, against time (T 5.6.1)",
    "radon": "evidence of a hierarchical regression by tempering of a Pyro program (T 5.6.3; needs the reference data)",
    "iwae": "log p(x) of images under an IWAE, against time (T 5.6.2; needs the reference data)",
    "rate_distortion": "rate against distortion of the shipped generators (Huang et al. 2020)",
}
"""Names and one line each; the modules are imported when they are run."""
