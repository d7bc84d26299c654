"""The reconstructor for deepinv, on its own physics: what they become here, and posterior means of known value."""

import warnings
from typing import Any

import pytest
import torch

import dgm_infer as dgm
import generators
from dgm_infer.errors import ArgumentError, ModelError, ObservationError
from dgm_infer.interop.measurements import measurement

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import deepinv
    import deepinv.models
    import deepinv.physics

# whose types say less than its documentation
physics: Any = deepinv.physics

KERNEL = dgm.ConstrainedHMC(step_size=0.2, n_steps=2, n_geodesic=1)
TOP = torch.cat([torch.ones(1, 4, 8), torch.zeros(1, 4, 8)], 1)
BOX = torch.full((1, 1, 2, 2), 0.25)
SMOOTH = torch.tensor([[1.0, 2, 1], [2, 6, 2], [1, 2, 1]])[None, None] / 18


@pytest.fixture(scope="module")
def digits():
    return generators.load("digits_vae")


@pytest.fixture(scope="module")
def images(digits):
    return digits.generate(3, seed=2).images.unsqueeze(1)


def short(model, **options):
    return dgm.interop.DeepinvReconstructor(model, kernel=KERNEL, chains=3, warmup=0, draws=4, seed=1, **options)


def fixed(problem, **options):
    return dgm.sample(problem, KERNEL, chains=3, warmup=0, draws=4, seed=1, progress=False, **options)


def test_it_is_a_reconstructor_of_deepinv(digits, images):
    ours = short(digits)
    assert isinstance(ours, deepinv.models.Reconstructor)
    inpainting = physics.Inpainting((1, 8, 8), mask=TOP)
    y = inpainting(images)
    found = ours(y, inpainting)
    assert found.shape == images.shape
    assert found.dtype == y.dtype
    # noise-free: the observed part is as observed, and the rest is not what the mask leaves there
    assert torch.equal(inpainting.A(found), y)
    assert (found[:, :, 4:] != 0).all()
    samples = ours.sample(y, inpainting)
    assert samples.shape == (12, 3, 1, 8, 8)
    torch.testing.assert_close(samples.mean(0), found)
    assert (samples[:, :, :, 4:].std(0) > 0.01).all()


def test_inpainting_is_pixels(digits, images):
    ours = short(digits)
    # a mask per image too, as deepinv's generators make them
    masks = torch.stack([TOP, TOP.flip(1), TOP])
    for mask, mine in ((TOP, TOP[0]), (masks, masks[:, 0])):
        inpainting = physics.Inpainting((1, 8, 8), mask=mask)
        samples = ours.sample(inpainting(images), inpainting)
        direct = fixed(dgm.condition(digits, images[:, 0], observe=dgm.pixels(mine.bool())))
        expected = direct.generate().transpose(0, 1).flatten(0, 1).unsqueeze(2)
        torch.testing.assert_close(samples, expected.float())
        assert torch.equal(inpainting.A(samples[0]), inpainting(images))


def test_block_means_are_a_downsampling_that_keeps_the_structure(digits, images):
    ours = short(digits)
    down = physics.Downsampling((1, 8, 8), filter=BOX, factor=2)
    y = down(images)
    torch.testing.assert_close(y, dgm.downsample(2)(images))
    problem = ours.condition(y, down)
    direct = dgm.condition(digits, y[:, 0], observe=dgm.downsample(2))
    assert problem.structure == direct.structure
    assert problem.units is not None
    torch.testing.assert_close(fixed(problem).inputs, fixed(direct).inputs)
    found = ours(y, down)
    torch.testing.assert_close(down.A(found), y, rtol=1e-5, atol=1e-6)


def square(x):
    return x.square().sum((-1, -2))


EXACT = {
    "inpainting": lambda: physics.Inpainting((1, 8, 8), mask=TOP),
    "identity": lambda: physics.Denoising(physics.ZeroNoise()),
    "every other pixel": lambda: physics.Downsampling((1, 8, 8), filter=None, factor=2),
    "bicubic": lambda: physics.Downsampling((1, 8, 8), filter="bicubic", factor=2),
    "blur": lambda: physics.Blur(SMOOTH, padding="valid"),
    "blur by Fourier transform": lambda: physics.BlurFFT((1, 8, 8), filter=SMOOTH),
    "compressed sensing": lambda: physics.CompressedSensing(m=6, img_size=(1, 8, 8)),
    "a function": lambda: physics.Physics(A=square),
}


@pytest.mark.parametrize("name", EXACT)
def test_images_agree_with_noise_free_measurements(name, digits, images):
    how = EXACT[name]()
    y = how(images)
    samples = short(digits).sample(y, how)
    for image in samples:
        torch.testing.assert_close(how.A(image), y, rtol=1e-5, atol=2e-6)


def test_the_matrix_is_that_of_the_operator(images):
    blur = physics.Blur(SMOOTH, padding="circular")
    how = measurement(blur(images), blur, (1, 8, 8), is_exact=False)
    assert how.matrix is not None
    torch.testing.assert_close((images.double().flatten(1) @ how.matrix.mT).float(), blur(images).flatten(1))
    # ours, of an image that is reflected
    ours = physics.Blur(SMOOTH, padding="reflect")
    torch.testing.assert_close(ours(images), dgm.blur(SMOOTH[0, 0])(images))


class Images(generators.LinearGaussian):
    """Images of two rows and three columns, linear in two latents."""

    def __init__(self):
        rng = torch.Generator().manual_seed(3)
        weight = torch.randn(6, 2, generator=rng, dtype=torch.float64)
        super().__init__(weight, 0.5 * torch.randn(6, generator=rng, dtype=torch.float64), sd=0.4)
        self.output_shape = (2, 3)


SIGMA = 0.3
HOLES = torch.tensor([[[1.0, 0, 1], [0, 1, 1]]])
NOISY = {
    "denoising": lambda noise: physics.Denoising(noise),
    "inpainting": lambda noise: physics.Inpainting((1, 2, 3), mask=HOLES, noise_model=noise),
    "blur": lambda noise: physics.Blur(torch.tensor([[[[0.3, 0.7]]]]), padding="circular", noise_model=noise),
    "sums": lambda noise: physics.LinearPhysics(A=lambda x: x.sum((-1, -2)), img_size=(1, 2, 3), noise_model=noise),
    "a function": lambda noise: physics.Physics(A=lambda x: x[..., :2], noise_model=noise),
}


def exact_moments(model, matrix, y, sigma):
    """Mean ``[B, 6]`` and variances ``[6]`` of ``x | y`` for ``x ~ N(b, C)``, ``y = M x + sigma n``."""
    covariance = model.weight @ model.weight.mT + model.sd**2 * torch.eye(6)
    total = matrix @ covariance @ matrix.mT + sigma**2 * torch.eye(len(matrix))
    gain = covariance @ matrix.mT @ torch.linalg.inv(total)
    mean = model.bias + (y - model.bias @ matrix.mT) @ gain.mT
    return mean, (covariance - gain @ matrix @ covariance).diagonal()


def standard_errors(chains, exact):
    """Largest deviation of means of ``[draws, chains, ...]`` from exact values, in standard errors over chains."""
    means = chains.mean(0)
    return float(((means.mean(0) - exact) / (means.std(0) / means.shape[0] ** 0.5)).abs().max())


@pytest.mark.parametrize("name", NOISY)
def test_images_given_noisy_measurements_have_the_exact_moments(name):
    how = NOISY[name](physics.GaussianNoise(SIGMA))
    model = Images()
    rng = torch.Generator().manual_seed(4)
    y = how.A(torch.randn(2, 1, 2, 3, generator=rng))
    kernel = dgm.ConstrainedHMC(step_size=0.5, n_steps=(3, 5), n_geodesic=1)
    ours = dgm.interop.DeepinvReconstructor(model, kernel=kernel, chains=100, warmup=15, draws=10, seed=5)
    chains = ours.sample(y, how).double().reshape(10, 100, 2, 6)
    matrix = how.A(torch.eye(6).reshape(6, 1, 2, 3)).flatten(1).mT.double()
    seen = (matrix != 0).any(1)
    matrix, values = matrix[seen], y.double().flatten(1)[:, seen]

    def errors(sigma):
        mean, variance = exact_moments(model, matrix, values, sigma)
        return max(standard_errors(chains, mean), standard_errors((chains - mean).square(), variance.expand(2, 6)))

    assert errors(SIGMA) < 5
    # the control: another noise
    assert errors(2 * SIGMA) > 5


def test_noise_joins_the_units_of_the_generator(digits, images):
    noise = physics.GaussianNoise(SIGMA)
    masks = torch.stack([TOP, TOP.flip(1), TOP])
    inpainting = physics.Inpainting((1, 8, 8), mask=masks, noise_model=noise)
    for how, size in ((physics.Denoising(noise), 64), (inpainting, 32)):
        problem = short(digits).condition(how(images), how)
        assert problem.units == (12, 2, 1)
        assert problem.dim == 12 + 2 * size
        assert short(digits).sample(how(images), how).shape == (12, 3, 1, 8, 8)
    # not with an operator that mixes pixels
    blur = physics.Blur(SMOOTH, padding="circular", noise_model=noise)
    assert short(digits).condition(blur(images), blur).units != (12, 2, 1)


def test_colours_and_channels_are_kept_apart():
    model = generators.GaussianVAE(3, (2, 4, 4), hidden=(8,), sd=0.1)
    x = model.generate(2, seed=1).images
    scan = physics.MRI(mask=(torch.arange(4) % 2 == 0).float().expand(4, 4), img_size=(2, 4, 4))
    samples = short(model).sample(scan(x), scan)
    assert samples.shape == (12, 2, 2, 4, 4)
    torch.testing.assert_close(scan.A(samples[0]), scan(x), rtol=1e-5, atol=2e-6)


def test_flat_outputs_are_images_of_a_stated_shape(images):
    flat = generators.GaussianVAE(2, (64,), hidden=(4,), sd=0.1)
    with pytest.raises(ArgumentError, match=r"outputs have shape \(64,\): give \(C, H, W\)"):
        short(flat)
    inpainting = physics.Inpainting((1, 8, 8), mask=TOP)
    found = short(flat, image_shape=(1, 8, 8))(inpainting(images), inpainting)
    assert torch.equal(inpainting.A(found), inpainting(images))
    with pytest.raises(ArgumentError, match=r"image_shape=\(1, 8, 9\)"):
        short(flat, image_shape=(1, 8, 9))


@pytest.mark.filterwarnings("ignore::UserWarning:deepinv")
def test_the_test_loop_of_deepinv_runs_it(digits, images):
    inpainting = physics.Inpainting((1, 8, 8), mask=TOP)
    pairs: Any = [(x, inpainting(x[None])[0]) for x in images]
    loader = torch.utils.data.DataLoader(pairs, batch_size=3)
    found: Any = deepinv.test(
        short(digits), loader, inpainting, verbose=False, show_progress_bar=False, metrics=deepinv.metric.PSNR()
    )
    assert found["PSNR"] > found["PSNR no learning"]


def stacked():
    return physics.stack(physics.Denoising(physics.ZeroNoise()), physics.Denoising(physics.ZeroNoise()))


def test_what_is_not_mapped_is_one_line(digits, images):
    ours = short(digits)

    def measured(how):
        return ours(how.A(images), how)

    with pytest.raises(ModelError, match=r"^PoissonNoise of Denoising is not mapped: only GaussianNoise and ZeroNoise"):
        measured(physics.Denoising(physics.PoissonNoise(1.0)))
    with pytest.raises(ModelError, match=r"the sigma of Denoising's GaussianNoise is from 0.1 to 0.3"):
        measured(physics.Denoising(physics.GaussianNoise(torch.tensor([0.1, 0.2, 0.3]))))
    with pytest.raises(ModelError, match="the sensor of Physics is not mapped"):
        measured(physics.Physics(sensor_model=lambda x: x.clamp(0, 1)))
    with pytest.raises(ArgumentError, match="y is a TensorList: must be one tensor"):
        measured(stacked())
    with pytest.raises(ModelError, match="another operator for each measurement"):
        measured(physics.Blur(SMOOTH * torch.ones(3, 1, 1, 1), padding="valid"))
    with pytest.raises(ObservationError, match=r"its 4 measurements have rank 1, .*GaussianNoise"):
        measured(physics.LinearPhysics(A=lambda x: x.mean((-1, -2)).expand(-1, 4)))
    with pytest.raises(ModelError, match="LinearPhysics is not linear"):
        measured(physics.LinearPhysics(A=lambda x: x.square()))
    with pytest.raises(ArgumentError, match=r"y has shape \(3, 1, 8, 7\): Inpainting gives \[B, 1, 8, 8\]"):
        ours(images[..., 1:], physics.Inpainting((1, 8, 8), mask=TOP))
    with pytest.raises(ArgumentError, match=r"physics=float: must be a deepinv.physics.Physics"):
        ours(images, 0.1)
    with pytest.raises(ModelError, match="fails for images of shape"):
        ours(images, physics.Physics(A=lambda x: x.reshape(-1, 1, 8, 9)))
    with pytest.raises(ArgumentError, match="draws=0"):
        dgm.interop.DeepinvReconstructor(digits, draws=0)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    import builtins
    import sys

    own = builtins.__import__

    def absent(name, *arguments, **options):
        if name.partition(".")[0] == "deepinv":
            raise ModuleNotFoundError("No module named 'deepinv'", name="deepinv")
        return own(name, *arguments, **options)

    for module in ("dgm_infer.interop.deepinv", "dgm_infer.interop.measurements"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(dgm.errors.MissingExtraError, match=r"^deepinv is not installed: pip install"):
        _ = dgm.interop.DeepinvReconstructor
