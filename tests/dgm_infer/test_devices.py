"""Sampling, draws and evidence on a device, where nothing is mixed with the host. The device is a double."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dgm_infer as dgm
import generators
from tests.devices import DEVICE, Device, Generator, from_device, to_device
from tests.findings import honest
from tests.models import Bent, Images, image
from tests.oracles import FLOAT
from tests.quick import cases

ROOT = Path(__file__).parents[2]
QUICK = {"warmup": 12, "draws": 3, "chains": 2, "seed": 1, "progress": False}
PILOT = {"pilot_temperatures": 4}
METHODS = {
    "ImportanceSampling": dgm.evidence.ImportanceSampling(8),
    "Elbo": dgm.Elbo(8),
    "AIS": dgm.AIS(4, **PILOT),
    "HamiltonianAIS": dgm.evidence.HamiltonianAIS(4, **PILOT),
    "SMC": dgm.SMC(particles=8),
    "GibbsTempering": dgm.GibbsTempering(draws=4, warmup=2, **PILOT),
    "ContinuousTempering": dgm.ContinuousTempering(draws=4, warmup=2, step_size=0.2, **PILOT),
    "SimulatedTempering": dgm.SimulatedTempering(draws=4, warmup=2, **PILOT),
    "ParallelTempering": dgm.ParallelTempering(draws=8, temperatures=3, **PILOT),
    "PathSampling": dgm.evidence.PathSampling(dgm.GibbsTempering(draws=8, warmup=2, **PILOT), parts=2),
}


@pytest.fixture(autouse=True)
def generators_of_the_device(monkeypatch):
    monkeypatch.setattr(torch, "Generator", Generator)


class Bowl(dgm.Target):
    """Normal densities about ``values``."""

    def __init__(self, values):
        self.values = values
        super().__init__(None, values.shape[-1], values.shape[:-1])

    def energy(self, x):
        return 0.5 * (x - self.values).square().sum(-1)

    def take(self, problems):
        return Bowl(self.values[problems])


CENTERS = torch.tensor([[0.5, -0.3], [0.1, 0.2]])


def there(centers=CENTERS):
    return Bowl(to_device(centers))


@honest
@pytest.mark.parametrize("method", cases(METHODS, quick=("ImportanceSampling",)))
def test_evidence_is_estimated_on_the_device_of_its_base(method):
    def estimate(target, zeros):
        return dgm.log_evidence(target, dgm.Gaussian(zeros, 1.2), method, chains=3, seed=1, progress=False, chunk=1)

    here = estimate(Bowl(CENTERS), torch.zeros(2, 2))
    with Device():
        found = estimate(there(), to_device(torch.zeros(2, 2)))
        assert found.log_z.device == DEVICE
        assert found.interval()[0].device == DEVICE
    torch.testing.assert_close(from_device(found.log_z), here.log_z, rtol=0, atol=1e-4)


def test_bounds_are_found_on_the_device():
    with Device():
        base = dgm.Gaussian(to_device(torch.zeros(2, 2)), 1.2)
        bounds = dgm.bidirectional(there(), base, to_device(CENTERS), METHODS["AIS"], chains=3, seed=1, progress=False)
        assert bounds.gap.device == DEVICE


FITS = {
    "fit": lambda target: dgm.Gaussian.fit(target, steps=3),
    "full fit": lambda target: dgm.Gaussian.fit(target, "full", steps=3),
    "fit of low rank": lambda target: dgm.Gaussian.fit(target, "low_rank", rank=1, steps=3),
    "laplace": dgm.Gaussian.laplace,
    "local fits": lambda target: dgm.Gaussian.from_local_fits(target, 2, steps=3),
}


@pytest.mark.parametrize("fit", cases(FITS, quick=("fit", "laplace")))
def test_bases_follow_the_device_and_the_type_of_their_target(fit):
    for dtype in (torch.float32, FLOAT):
        assert fit(Bowl(CENTERS.to(dtype))).mean.dtype == dtype
    with Device():
        assert fit(there()).mean.device == DEVICE


def test_laplace_of_a_decoder_in_float32():
    vae = generators.GaussianVAE(2, (2, 2), hidden=(4,), sd=0.5).eval()
    assert vae.decoder(torch.zeros(2)).mean.dtype == torch.float32
    target = generators.LatentPosterior(vae.decoder, torch.rand(3, 2, 2), dgm.StandardNormal(2))
    base = dgm.Gaussian.laplace(target)
    assert base.mean.shape == (3, 2)
    assert base.mean.dtype == torch.float32


KERNELS = {"HMC": dgm.HMC(0.5, n_steps=2), "NUTS": dgm.NUTS(0.5, n_steps=3), "dense": dgm.HMC(metric="dense")}


@pytest.mark.parametrize("kernel", cases(KERNELS, quick=("HMC",)))
def test_targets_are_sampled_on_their_device(kernel):
    with Device():
        assert dgm.sample(there(), kernel, **QUICK).inputs.device == DEVICE


# the double takes a thousand times as long as a device: few transitions
FIBRE_KERNELS = {
    "ConstrainedHMC": dgm.ConstrainedHMC(n_geodesic=1, max_iterations=5),
    "LiftedHMC": dgm.LiftedHMC(),
}


@pytest.mark.parametrize("kernel", cases(FIBRE_KERNELS, quick=()))
def test_fibres_are_sampled_on_their_device_with_a_warm_up(kernel):
    y = torch.linspace(-0.8, 0.8, 5, dtype=FLOAT)
    start = dgm.condition(Bent(), y).start(2, torch._C.Generator().manual_seed(1))
    with Device():
        fibre = dgm.condition(to_device(Bent()), to_device(y))
        draws = dgm.sample(fibre, kernel, **QUICK | {"warmup": 2, "draws": 1, "initial": to_device(start)})
        assert draws.inputs.device == DEVICE


OPERATORS = {
    "downsample": (dgm.downsample(1), image(2)),
    "linear": (dgm.linear(torch.eye(2, 6, dtype=FLOAT)), torch.zeros(2, 2)),
}


@pytest.mark.parametrize(("observe", "values"), cases(OPERATORS, quick=()))
def test_operators_follow_the_device(observe, values):
    with Device():
        fibre = dgm.condition(to_device(Images().double().eval()), to_device(values.double()), observe=observe)
        draws = dgm.sample(fibre, dgm.ConstrainedHMC(0.1, n_steps=1, n_geodesic=1), **QUICK | {"warmup": 0})
        assert draws.generate(1).device == DEVICE


GRADIENT_FREE = {"EllipticalSlice": dgm.kernels.EllipticalSlice(), "HMC": dgm.HMC()}


@pytest.mark.parametrize("kernel", cases(GRADIENT_FREE, quick=()))
def test_soft_observations_are_sampled_on_their_device(kernel):
    with Device():
        target = dgm.condition(to_device(Images().double().eval()), to_device(image(2).double()), tolerance=0.3)
        assert dgm.sample(target, kernel, **QUICK).inputs.device == DEVICE


def test_for_a_constant_number_of_steps_the_host_waits_for_nothing():
    kernel = dgm.HMC(0.5, n_steps=4)
    x = torch.zeros(3, 2, 2)
    with Device() as device:
        target = there()
        state = kernel.init(target, to_device(x))
        device.waits.clear()
        kernel.step(target, state, Generator(DEVICE).manual_seed(1))
        assert device.waits.total() == 0
        # the control: of a random number it must know the largest
        kernel.replace(n_steps=(2, 4)).step(target, state, Generator(DEVICE).manual_seed(1))
        assert device.waits.total() > 0


@pytest.mark.slow
def test_the_walk_of_the_readme_is_sampled_on_a_device_and_its_draws_from_a_file_follow_it(tmp_path):
    source = re.search(r"class Walk\(.*?\n\n\n", (ROOT / "docs" / "tour.md").read_text(), re.DOTALL)
    assert source
    names: dict[str, Any] = {"dgm": dgm, "torch": torch}
    exec(source[0].replace("100", "3"), names)
    path = tmp_path / "draws.nc"
    with Device():
        walk = names["Walk"]()
        walk.register_buffer("at", to_device(torch.zeros(1)))
        fibre = dgm.condition(walk, to_device(torch.tensor([0.5, 1.0, 1.5], dtype=FLOAT)))
        draws = dgm.sample(fibre, dgm.ConstrainedHMC(0.2, n_steps=1, n_geodesic=1), **QUICK | {"warmup": 0})
        assert len(draws.summary()) == 1
        draws.save(path)
        loaded = dgm.Draws.load(path, problem=fibre)
        for tensor in (loaded.inputs, *loaded.latents.values(), *loaded.stats.values(), loaded.generate(1)):
            assert tensor.device == DEVICE
    assert dgm.Draws.load(path).inputs.device.type == "cpu"
