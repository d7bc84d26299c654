"""Programs as Pyro's users write them: densities against Pyro's, posteriors against its NUTS or quadrature."""

import contextlib
import functools
import json
import math

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.errors import ModelError
from tests.public_programs import DESIGN, EXAMPLES, RESPONSE
from tests.quick import cases
from tests.reference_programs import FILE, potential_of

FLOAT = torch.float64
# Those whose posteriors are drawn. All densities are Pyro's own, above, and what is sampled by its density has nothing
# else to get wrong than mixing: the hardest of these. Of fibres, every distribution of the data that has a fibre, every
# structure of the Jacobian, and the kinds of latents that other tests of posteriors lack.
DRAWN = (
    # by the density: shares with bounds, heavy tails, enumerated topics, two modes, angles, cut points
    "baseball",
    "seeds",
    "robust regression",
    "ordered logit",
    "topics",
    "Gaussian mixture, marginal",
    "wind",
    "heading",
    # fibres of normal data: by blocks, by units, dense; with imputed inputs, a factor, bounds
    "eight schools, non-centred",
    "rats",
    "dugongs",
    "lasso",
    "horseshoe",
    "missing covariates",
    "a factor with a kink",
    "local level",
    # fibres of other data
    "polynomial regression",
    "correlations",
    "low rank",
    "Gaussian state space",
    "Beta regression",
    "waiting times",
    "censored times",
    "truncated data",
    "tanks",
    "pharmacokinetics",
    "annual maxima",
)
REFERENCE = json.loads(FILE.read_text())
# one of each kind; all of them in the long run
QUICK = {
    "eight schools, centred",
    "regression as a module",
    "Gaussian mixture, enumerated",
    "hidden Markov model",
    "topics",
    "Multinomial",
    "missing covariates",
    "heading",
    "spike and slab",
}


def target_of(name):
    example = EXAMPLES[name]
    return dgm.target_from_pyro(example.program, *example.args)


@pytest.mark.parametrize("name", cases({name: name for name in EXAMPLES}, QUICK))
def test_the_density_of_a_program_is_that_of_pyro(name):
    example = EXAMPLES[name]
    target = target_of(name)
    # a program is run when it is converted, not at every energy
    assert target.vectorised
    assert target._rows.has_code(torch.zeros(0, dtype=FLOAT))
    x = 0.4 * torch.randn(3, target.dim, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    energy, gradient = target.energy_and_gradient(x)
    assert gradient.isfinite().all()
    if not (example.is_of_pyro and example.has_coordinates_of_pyro):
        return
    start, potential, bijections = potential_of(example)
    latents = target.latents(x)
    for i in range(3):
        at = {key: bijections[key](latents[key][i].to(start[key])) for key in start}
        # in the 32 bits of the program's own numbers
        assert energy[i].item() == pytest.approx(float(potential(at)), rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("name", cases({name: name for name in EXAMPLES}, QUICK))
def test_a_program_is_conditioned_or_refused_in_a_line_whose_remedy_works(name):
    example = EXAMPLES[name]
    try:
        model, said = dgm.from_pyro(example.program, *example.args), ""
    except ModelError as error:
        model, said = None, str(error)
    if model is not None:
        assert dgm.condition(model, model.data).dim == model.input_density.dim
        return
    assert "\n" not in said
    assert "target_from_pyro" in said
    target = target_of(name)
    assert target.energy(torch.zeros(target.dim, dtype=FLOAT)).isfinite()


@functools.cache
def drawn(name, seed=0):
    """Draws as users make them: of the fibre of what is observed exactly, else of the target."""
    example = EXAMPLES[name]
    problem = target_of(name)
    if not example.is_sampled_softly:
        with contextlib.suppress(ModelError):
            model = dgm.from_pyro(example.program, *example.args)
            problem = dgm.condition(model, model.data)
    draws = dgm.sample(problem, chains=32, warmup=120, draws=50, seed=seed, progress=False)
    return draws.latents


def largest_difference(latents, name):
    """From the reference's means and standard deviations, in standard errors of both, where they have a variance."""
    reference, worst = REFERENCE[name], 0.0
    for key, mean in reference["means"].items():
        if key in EXAMPLES[name].heavy:
            continue
        value = latents[key.removeprefix("cos ")].double()
        value = value.cos() if key.startswith("cos ") else value
        own = value.mean(1).std(0) / math.sqrt(len(value))
        # a mean that is not known to a third of the posterior's width says little
        assert (own <= value.flatten(0, 1).std(0) / 3 + 1e-9).all(), key
        error = torch.tensor(reference.get("errors", {}).get(key, 0.0))
        worst = max(worst, _apart(value, torch.tensor(mean), error))
        if key in reference.get("sds", {}):
            sd = torch.tensor(reference["sds"][key])
            error = 2 * sd * torch.tensor(reference.get("sd_errors", {}).get(key, 0.0))
            worst = max(worst, _apart((value - torch.tensor(mean)).square(), sd.square(), error))
    return worst


def _apart(value, mean, error):
    """Between the mean of ``[chains, draws, ...]`` and another one; chains' spread tells their error to an eighth."""
    means = value.mean(1)
    own = means.std(0) / math.sqrt(len(means))
    # entries that cannot vary agree to rounding
    return ((means.mean(0) - mean).abs() / ((own**2 + error**2).sqrt() + 1e-6)).max().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_the_posterior_of_a_program_is_that_of_its_reference(name):
    assert largest_difference(drawn(name), name) < 5


@pytest.mark.slow
def test_control_another_prior_has_another_posterior():
    # the same data and names, with HalfCauchy(5) for LogNormal(1, .5)
    latents = drawn("eight schools, non-centred")
    latents = {key: latents[key] for key in ("mu", "tau", "theta")}
    assert largest_difference(latents, "eight schools, centred") > 5


def log_integral(target, n, has_angle=False):
    """By the trapezoidal rule on a box around the mass of the target, which is looked for on a coarse grid.

    Of an angle, a point of the plane at distance 1 stands for all on its ray: r exp(-r^2/2) integrates to 1.
    """

    def on_grid(axes):
        x = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        points = torch.cat([x[:, :1].cos(), x[:, :1].sin(), x[:, 1:]], -1) if has_angle else x
        with torch.no_grad():
            log_joint = 0.5 * has_angle - torch.cat([target.energy(part) for part in points.split(50_000)])
        if has_angle:
            # one turn
            log_joint[(x[:, 0] < -math.pi) | (x[:, 0] >= math.pi)] = -math.inf
        return x, log_joint.nan_to_num(-math.inf, -math.inf, -math.inf)

    axes = [torch.linspace(-14, 14, 57, dtype=FLOAT)] * (target.dim - has_angle)
    for points in (41, n):
        x, log_joint = on_grid(axes)
        kept = x[log_joint > log_joint.max() - 25]
        steps = torch.stack([axis[1] - axis[0] for axis in axes])
        low, high = (kept.amin(0) - steps).tolist(), (kept.amax(0) + steps).tolist()
        axes = [torch.linspace(*ends, points, dtype=FLOAT) for ends in zip(low, high, strict=True)]
        if has_angle:
            axes[0] = torch.linspace(-math.pi, math.pi, points, dtype=FLOAT)
    cell = math.prod((axis[1] - axis[0]).item() for axis in axes)
    return on_grid(axes)[1].logsumexp(0).item() + math.log(cell)


@pytest.mark.parametrize(
    "name", cases({name: name for name, found in REFERENCE.items() if "log_z" in found}, {"coin", "Dirichlet data"})
)
def test_the_evidence_of_a_program_is_that_of_quadrature(name):
    target = target_of(name)
    has_angle = not EXAMPLES[name].has_coordinates_of_pyro
    found = log_integral(target, {1: 1001, 2: 301}[target.dim - has_angle], has_angle)
    assert found == pytest.approx(REFERENCE[name]["log_z"], abs=1e-3 + REFERENCE[name]["log_z_error"])


def test_the_evidence_of_published_values_is_found():
    for name in ("spike and slab", "mixture as a prior"):
        assert log_integral(target_of(name), 20001) == pytest.approx(-2.0532, abs=1e-4)


def test_variables_of_a_selection_have_the_posterior_of_all_their_subsets():
    """Eight linear models with normal weights, each in closed form."""
    X, y = DESIGN.double(), RESPONSE.double()
    log_z, means = [], []
    for subset in torch.cartesian_prod(*[torch.tensor([0.05, 1.5], dtype=FLOAT)] * 3):
        prior = torch.diag(subset**2)
        covariance = X @ prior @ X.T + 0.25 * torch.eye(len(y), dtype=FLOAT)
        evidence = torch.distributions.MultivariateNormal(torch.zeros(len(y), dtype=FLOAT), covariance)
        log_z.append(evidence.log_prob(y) - math.log(8))
        means.append(prior @ X.T @ torch.linalg.solve(covariance, y))
    exact_z = torch.stack(log_z).logsumexp(0).item()
    exact = torch.stack(log_z).softmax(0) @ torch.stack(means)
    target = target_of("variable selection")
    axes = [torch.linspace(float(m) - 2.5, float(m) + 2.5, 101, dtype=FLOAT) for m in exact]
    x = torch.cartesian_prod(*axes)
    log_joint = -torch.cat([target.energy(part) for part in x.split(100_000)])
    # steps of a twentieth for a width of as much: the rule's error is far below this
    assert log_joint.logsumexp(0).item() + 3 * math.log(0.05) == pytest.approx(exact_z, abs=1e-3)
    torch.testing.assert_close(log_joint.softmax(0) @ x, exact, rtol=0, atol=1e-3)


def test_sixty_programs_have_a_reference():
    in_closed_form = {name for name, example in EXAMPLES.items() if not example.is_of_pyro}
    assert len({*REFERENCE, *in_closed_form}) >= 60
    assert {*REFERENCE, *in_closed_form} <= set(EXAMPLES)
