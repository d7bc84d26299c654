"""The structured and the dense path are the same method: the same chains from the same seed."""

import functools

import pytest
import torch

import dgm_infer as dgm
from generators import GAndK, GaussianVAE, GeneralisedLambda, LotkaVolterra
from tests.oracles import FLOAT
from tests.quick import some


def digits_like() -> GaussianVAE:
    torch.manual_seed(40)
    return GaussianVAE(3, (4, 5), (16, 16), sd=0.2).eval()


def convolutional() -> GaussianVAE:
    torch.manual_seed(40)
    return GaussianVAE(3, (4, 5), (), sd=0.2, channels=(6, 4)).eval()


MODELS = {
    "generalised lambda": lambda: GeneralisedLambda(50),
    "g-and-k": lambda: GAndK(50),
    "Lotka-Volterra": LotkaVolterra,
    "Gaussian VAE": digits_like,
    "convolutional VAE": convolutional,
}


def generated(model: dgm.DirectedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of three problems, typical ones, and their outputs: ``[3, Du]``, ``[3, Dx]``."""
    rng = torch.Generator().manual_seed(41)
    u = model.input_density.sample((3,), generator=rng, dtype=FLOAT)
    if isinstance(model, LotkaVolterra):
        centre = torch.log(torch.tensor([0.4, 0.005, 0.05, 0.001], dtype=FLOAT)) + 2
        u[:, :4] = centre + 0.1 * u[:, :4]
    with torch.no_grad():
        x = model.double().observed(u)
    return u, x.reshape(3, *model.output_shape)


@functools.cache
def chains(make, structure: str | None = None, *, solver: str = "newton", seed: int = 3) -> dgm.Draws:
    model = make()
    u, x = generated(model)
    if structure is not None:
        model.structure = structure
    problem = dgm.condition(model, x)
    assert (problem.units is None) == (structure == "dense")
    # tight: the two paths may stop a projection at different points within the tolerance
    kernel = dgm.ConstrainedHMC(0.1, n_steps=3, n_geodesic=2, solver=solver, tolerance=1e-11)
    return dgm.sample(
        problem, kernel, chains=4, warmup=0, draws=3, seed=seed, initial=u.expand(4, *u.shape), progress=False
    )


@pytest.mark.parametrize("solver", some(("newton", "quasi_newton"), quick=("newton",)))
@pytest.mark.parametrize("name", some(MODELS, quick=("generalised lambda", "Gaussian VAE")))
def test_structured_and_dense_paths_give_the_same_chains(name, solver):
    structured, dense = chains(MODELS[name], solver=solver), chains(MODELS[name], "dense", solver=solver)
    assert structured.stats["acceptance_rate"].mean() > 0.5
    assert (structured.inputs[:, -1] - structured.inputs[:, 0]).abs().max() > 0.1
    torch.testing.assert_close(structured.inputs, dense.inputs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_control_another_seed_gives_other_chains():
    make = MODELS["generalised lambda"]
    assert (chains(make).inputs - chains(make, seed=4).inputs).abs().max() > 0.1
