"""Structure is a cheaper way to the same answer: the same constraint, density, chains and completions as without it."""

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.autodiff import row_execution
from dgm_infer.structures import Units
from tests.models import Bent, BentPairs, FreeWalk, Walk
from tests.oracles import FLOAT
from tests.quick import some

MODELS = {
    "scalar units": Bent,
    "pairs of two inputs": BentPairs,
    "pairs of three inputs": lambda structure="independent": BentPairs(structure, n_inputs=3),
    "walk": Walk,
    "walk of free coordinates": FreeWalk,
}
WALKS = {name: make for name, make in MODELS.items() if "walk" in name}


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def make(request):
    return request.param


@pytest.fixture(params=WALKS.values(), ids=WALKS.keys())
def walk(request):
    return request.param


def draw_inputs(model, *shape, seed=90):
    return model.input_density.sample(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def generated(model, n=3):
    """Inputs ``[n, Du]`` and their outputs: the inputs are on the fibres of the outputs."""
    u = draw_inputs(model, n)
    return u, model.observed(u)


def both_ways(make):
    """The fibres of the same three observations with structure and without, and inputs on them."""
    u, x = generated(make())
    structured, dense = dgm.condition(make(), x), dgm.condition(make("dense"), x)
    assert structured.units is not None
    assert dense.units is None
    assert structured.dim == dense.dim
    return structured, dense, u


# --------------------------------------------------------------------------------------------------- the same problem


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (Bent(), Units(2, 1, 1)),
        (BentPairs(n_inputs=3), Units(2, 3, 2)),
        (Walk(), Units(2, 2, 2)),
        (FreeWalk(), Units(2, 1, 1)),
        (Walk("dense"), None),
        (dgm.WithNoise(Bent(), 0.1), Units(7, 1, 1)),
    ],
    ids=repr,
)
def test_units_are_single_outputs_whole_steps_or_what_the_class_says(model, units):
    assert model.units == units


def test_a_walk_is_simulated_by_its_transitions():
    model = Walk(n_steps=3)
    u = draw_inputs(model, 5)
    u1, u2 = model.split(u)
    z = model.global_latents(u1)
    state = model.initial(z)
    for t in range(3):
        state = model.transition(state, z, u2[:, 2 * t : 2 * t + 2])
        assert torch.equal(model.observed(u)[:, 2 * t : 2 * t + 2], state)


def test_one_step_ahead_of_the_series_that_the_inputs_make_is_that_series(walk):
    model = walk()
    u, x = generated(model)
    torch.testing.assert_close(model.one_step_ahead(u, x), x, rtol=0, atol=1e-14)
    # the control: of another series
    assert (model.one_step_ahead(u, x.flip(0)) - x).abs().max() > 0.1


def test_the_constraint_has_the_zeros_of_the_dense_one(make):
    structured, dense, u = both_ways(make)
    assert structured.constraint_error(u).max() < 1e-14
    # the first output that misses the data is the same off the fibre
    for i in range(structured.dim):
        moved = u.clone()
        moved[:, i] += 0.3
        mine, theirs = ((fibre.constraint(moved).abs() > 1e-12).int() for fibre in (structured, dense))
        assert torch.equal(mine.argmax(-1), theirs.argmax(-1))
        assert mine.any()


def test_starts_are_on_the_fibre_of_the_dense_constraint(make):
    structured, dense, _ = both_ways(make)
    u = structured.start(8, torch.Generator().manual_seed(91))
    assert (dense.constraint_error(u) < 50 * 1e-8 * dense.scale).all()


def test_on_the_fibre_energy_gradient_along_it_and_tangents_are_those_of_the_dense_path(make):
    structured, dense, u = both_ways(make)
    mine, theirs = structured.linearise(u), dense.linearise(u)
    torch.testing.assert_close(mine.jacobian.log_det, theirs.jacobian.log_det, rtol=0, atol=1e-8)
    torch.testing.assert_close(mine.energy, theirs.energy, rtol=0, atol=1e-8)
    p = draw_inputs(structured.model, 3, seed=92)
    torch.testing.assert_close(mine.jacobian.tangent(p), theirs.jacobian.tangent(p), rtol=0, atol=1e-8)
    # across the fibre the conditional residual has another gradient
    along = theirs.jacobian.tangent
    torch.testing.assert_close(along(mine.gradient), along(theirs.gradient), rtol=0, atol=1e-8)


def test_control_off_the_fibre_the_conditional_residual_is_another_constraint(walk):
    structured, dense, u = both_ways(walk)
    off = u + 0.1
    assert (structured.constraint(off) - dense.constraint(off)).abs().max() > 1e-3
    difference = structured.linearise(off).jacobian.log_det - dense.linearise(off).jacobian.log_det
    assert difference.abs().max() > 1e-3


def test_with_a_tolerance_a_walk_is_compared_with_the_series_it_simulates(walk):
    model = walk()
    u, x = generated(model)
    target = dgm.condition(model, x, tolerance=0.5)
    off = u + 0.1
    misfit = (model.observed(off) - x).square().sum(-1) / (2 * 0.5**2)
    torch.testing.assert_close(target.energy(off), misfit - model.input_density.log_prob(off))


def five_transitions(fibre, u, *, solver, split, seed=7):
    # tight: the two constraints are bounded by the same tolerance, and a step may stop anywhere below it
    kernel = dgm.ConstrainedHMC(0.3, n_steps=3, n_geodesic=2, solver=solver, split=split, tolerance=1e-12)
    initial = u.expand(6, *u.shape)
    return dgm.sample(fibre, kernel, chains=6, warmup=0, draws=5, seed=seed, initial=initial, progress=False)


WAYS = {"quasi_newton, straight": ("quasi_newton", False), "newton, circular": ("newton", True)}


# the contract of structures compares chains too, in the quick run
@pytest.mark.slow
@pytest.mark.parametrize(("solver", "split"), WAYS.values(), ids=WAYS)
def test_the_same_seed_gives_the_same_chains_with_structure_and_without(make, solver, split):
    structured, dense, u = both_ways(make)
    mine, theirs = (five_transitions(f, u, solver=solver, split=split) for f in (structured, dense))
    torch.testing.assert_close(mine.inputs, theirs.inputs, rtol=0, atol=1e-6)
    assert mine.stats["acceptance_rate"].mean() > 0.5
    assert (mine.inputs[:, -1] - u).abs().max() > 0.5
    # the control: another seed
    other = five_transitions(dense, u, solver=solver, split=split, seed=8)
    assert (mine.inputs - other.inputs).abs().max() > 0.1


# --------------------------------------------------------------------------------------------------- units under masks


def mask_of(*units, size=2, n=3):
    """All outputs of the named units of ``size`` outputs each."""
    return torch.isin(torch.arange(n * size) // size, torch.tensor(units))


MASKS = torch.stack([mask_of(0, 2), mask_of(1, 2), mask_of(0, 1)])


def whole_inputs(u, hidden, units, n_inputs):
    """Inputs of the whole model: those of the units observed from ``u``, of the others from ``hidden``."""
    shown = torch.cat([torch.arange(n_inputs) + i * n_inputs for i in units])
    return torch.cat([u[..., :2], hidden.index_copy(-1, shown, u[..., 2:])], -1)


@pytest.mark.parametrize("n_inputs", [2, 3])
@pytest.mark.parametrize("units", [[0, 2], [1, 2]], ids=str)
def test_whole_units_are_conditioned_without_the_inputs_of_the_hidden_ones(n_inputs, units):
    model = BentPairs(n_inputs=n_inputs)
    observe = dgm.pixels(mask_of(*units))
    _, x = generated(model)
    fibre, full = (
        dgm.condition(model, x, observe=observe),
        dgm.condition(BentPairs("dense", n_inputs), x, observe=observe),
    )
    assert fibre.units == Units(2, n_inputs, 2)
    assert fibre.dim == 2 + 2 * n_inputs
    assert full.dim == 2 + 3 * n_inputs
    u = torch.randn(5, 3, fibre.dim, generator=torch.Generator().manual_seed(93), dtype=FLOAT)
    hidden = torch.randn(5, 3, 3 * n_inputs, generator=torch.Generator().manual_seed(94), dtype=FLOAT)
    whole = whole_inputs(u, hidden, units, n_inputs)
    torch.testing.assert_close(fibre.constraint(u), full.constraint(whole))
    # the hidden noise has its own density and no part in the Gram matrix
    left_out = model.input_density.log_prob(whole) - dgm.StandardNormal(fibre.dim).log_prob(u)
    torch.testing.assert_close(fibre.linearise(u).energy, full.linearise(whole).energy + left_out)
    torch.testing.assert_close(fibre.linearise(u).jacobian.log_det, full.linearise(whole).jacobian.log_det)


def test_units_of_which_a_part_is_observed_are_conditioned_densely():
    model = BentPairs()
    _, x = generated(model)
    mask = mask_of(0, 2)
    mask[2] = True
    fibre, full = (dgm.condition(m, x, observe=dgm.pixels(mask)) for m in (model, BentPairs("dense")))
    assert fibre.units is None
    assert fibre.dim == 8
    u = draw_inputs(model, 5, 3)
    torch.testing.assert_close(fibre.linearise(u).energy, full.linearise(u).energy)


def test_a_walk_of_which_a_part_is_observed_is_conditioned_densely(walk):
    _, x = generated(walk())
    mask = torch.ones(8, dtype=torch.bool)
    mask[2:4] = False
    fibre, full = (dgm.condition(m, x, observe=dgm.pixels(mask)) for m in (walk(), walk("dense")))
    assert fibre.units is None
    u = draw_inputs(walk(), 5, 3)
    torch.testing.assert_close(fibre.constraint(u), full.constraint(u))
    torch.testing.assert_close(fibre.linearise(u).energy, full.linearise(u).energy)


def test_every_problem_may_have_its_own_units():
    model = BentPairs()
    _, x = generated(model)
    fibre = dgm.condition(model, x, observe=dgm.pixels(MASKS))
    assert fibre.units == Units(2, 2, 2)
    u = torch.randn(5, 3, fibre.dim, generator=torch.Generator().manual_seed(95), dtype=FLOAT)
    together = fibre.rows(5).linearise(u.flatten(0, 1))
    for problem in range(3):
        alone = dgm.condition(model, x[problem], observe=dgm.pixels(MASKS[problem]))
        torch.testing.assert_close(fibre.constraint(u)[:, problem], alone.constraint(u[:, problem]))
        torch.testing.assert_close(
            together.energy.reshape(5, 3)[:, problem], alone.linearise(u[:, problem]).energy, rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("masks", [mask_of(0, 2), MASKS], ids=["one mask", "a mask per problem"])
def test_completions_show_the_observed_units_and_generate_the_others_afresh(masks):
    model = BentPairs()
    _, x = generated(model)
    fibre = dgm.condition(model, x, observe=dgm.pixels(masks))
    u = fibre.start(2000, torch.Generator().manual_seed(96))
    completed = fibre.complete(u, torch.Generator().manual_seed(97))
    seen = masks.expand(3, 6)
    assert torch.equal(completed[:, seen], x[seen].expand(2000, -1))
    # what is generated has the distribution of the model, given z
    z = u[..., :2]
    again = model.simulate({"z": z}, draw_inputs(model, 2000, 3, seed=98)[..., 2:])
    for mine, theirs in ((completed.mean(0), again.mean(0)), (completed.std(0), again.std(0))):
        scale = again.std(0)
        assert ((mine - theirs)[~seen] / scale[~seen]).abs().max() < 5 * (2 / 2000) ** 0.5
    assert (completed - again)[:, ~seen].abs().amax(0).min() > 0.1


# ---------------------------------------------------------------------------------------------------- sums of outputs


SUMS = torch.tensor([[0.5, 0, 0, 0.5, 0], [0, 2, 0, 0, -1]], dtype=FLOAT)


def test_sums_of_scalar_units_are_units_of_their_inputs():
    model = Bent()
    y = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=FLOAT)
    fibre = dgm.condition(model, y, observe=dgm.linear(SUMS))
    full = dgm.condition(model, y, observe=lambda x: x @ SUMS.mT)
    assert fibre.units == Units(2, 2, 1)
    # the noise of output 2, in no sum, is left out
    assert fibre.dim == 2 + 4
    assert full.units is None
    u = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(99), dtype=FLOAT)
    whole = torch.zeros(5, 2, 7, dtype=FLOAT)
    whole[..., [0, 1, 2, 5, 3, 6]] = u
    torch.testing.assert_close(fibre.constraint(u), full.constraint(whole))
    mine, theirs = fibre.linearise(u), full.linearise(whole)
    torch.testing.assert_close(mine.jacobian.log_det, theirs.jacobian.log_det)
    left_out = dgm.StandardNormal(1).log_prob(torch.zeros(1, dtype=FLOAT))
    torch.testing.assert_close(mine.energy, theirs.energy + left_out)


def test_completions_of_sums_add_up_and_vary():
    model = Bent()
    y = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=FLOAT)
    fibre = dgm.condition(model, y, observe=dgm.linear(SUMS))
    u = fibre.start(50, torch.Generator().manual_seed(100))
    completed = fibre.complete(u, torch.Generator().manual_seed(101))
    torch.testing.assert_close(completed @ SUMS.mT, y.expand(50, 2, 2), rtol=0, atol=1e-7)
    assert completed.std(0).min() > 0.05


def test_sums_that_share_outputs_and_sums_of_larger_units_are_conditioned_densely():
    y = torch.tensor([0.3, -0.2], dtype=FLOAT)
    shared = SUMS.clone()
    shared[1, 0] = 1.0
    six = torch.cat([SUMS, torch.zeros(2, 1)], 1)
    for model, matrix in ((Bent(), shared), (BentPairs(), six), (Walk(n_steps=3), six)):
        fibre = dgm.condition(model, y, observe=dgm.linear(matrix))
        assert fibre.units is None
        assert fibre.dim == model.input_density.dim
        u = draw_inputs(model, 4)
        torch.testing.assert_close(fibre.constraint(u), model.observed(u) @ matrix.mT - y)


# ------------------------------------------------------------------------------------------- what is declared wrongly


def variant(base, *arguments, **changes):
    """A model of a subclass with other attributes and methods."""
    name = f"Wrong{base.__name__}"
    model = type(name, (base,), {k: v for k, v in changes.items() if callable(v)})(*arguments)
    for key, value in changes.items():
        if not callable(value):
            setattr(model, key, value)
    return model


def another_simulate(self, z, u2):
    return type(self).__base__.simulate(self, z, u2) + 0.1


def one_coordinate(self, previous, z, u2_t):
    return Walk.transition(self, previous, z, u2_t)[..., :1]


def coupled_where_positive(self, z, u2):
    return Bent.simulate(self, z, u2) + 0.1 * (z["z"][..., :1] > 0) * u2.roll(1, -1)


def mostly_infinite(self, previous, z, u2_t):
    return Walk.transition(self, previous, z, u2_t) + torch.exp(1e4 * z["rate"] - 3000).unsqueeze(-1)


WRONG = {
    "units of a coordinate where the noise of a step is mixed": (
        lambda: variant(Walk, unit_inputs=1, unit_outputs=1), ["'markov'", "steps depend", "unit_inputs"]
    ),
    "the same where most prior draws overflow": (
        lambda: variant(Walk, unit_inputs=1, unit_outputs=1, transition=mostly_infinite), ["'markov'", "steps depend"]
    ),
    "single outputs where pairs share noise": (
        lambda: variant(BentPairs, unit_inputs=1, unit_outputs=1), ["'independent'", "outputs depend", "unit_outputs"]
    ),
    "single outputs where half of the prior draws share noise": (
        lambda: variant(Bent, simulate=coupled_where_positive, output_shape=(5,)), ["'independent'", "outputs depend"]
    ),
    "units across pairs": (
        lambda: variant(BentPairs, "independent", 3, unit_outputs=3), ["9 local inputs in units of 3", "6 outputs"]
    ),
    "unequal numbers of units": (
        lambda: variant(BentPairs, unit_outputs=3), ["units of 2", "units of 3", "as many units", "'dense'"]
    ),
    "outputs in units without inputs": (
        lambda: variant(Walk, unit_outputs=1), ["'markov'", "8 local inputs in units of 2", "8 outputs in units of 1"]
    ),
    "a walk that is not simulated by its transitions": (
        lambda: variant(Walk, simulate=another_simulate), ["'markov'", "transition()", "0.1 of the largest", "'dense'"]
    ),
    "steps that do not divide the local inputs": (
        lambda: variant(Walk, step_inputs=3), ["8 local inputs", "steps of 3", "step_inputs"]
    ),
    "longer steps than there are local inputs": (lambda: variant(Walk, step_inputs=16), ["steps of 16"]),
    "steps without inputs": (lambda: variant(Walk, step_inputs=0), ["step_inputs = 0"]),
    "half an input": (lambda: variant(BentPairs, unit_inputs=0.5), ["unit_inputs = 0.5", "integer >= 1"]),
    "a transition to a smaller state": (
        lambda: variant(Walk, transition=one_coordinate, output_shape=(4,)), ["'markov'", "transition()"]
    ),
    "a transition and no initial state": (
        lambda: variant(Walk, initial=dgm.DirectedModel.initial, output_shape=(8,)), ["defines no initial(z)"]
    ),
    "neither transition nor simulate": (
        lambda: variant(Walk, transition=dgm.DirectedModel.transition), ["defines no simulate(z, u2)"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_structure_that_is_not_the_models_is_refused_in_one_line(make, words):
    model = make()
    shape = vars(model).get("output_shape", (8,) if isinstance(model, Walk) else (6,))
    with pytest.raises(dgm.errors.ModelError) as caught:
        dgm.condition(model, torch.zeros(shape))
    message = str(caught.value)
    assert "\n" not in message
    for word in [type(model).__name__, *words]:
        assert word in message


def test_control_the_same_models_as_they_are_declared_rightly_are_accepted():
    for model in (Walk(), variant(Walk, transition=FreeWalk.transition, unit_inputs=1, unit_outputs=1), BentPairs()):
        problem = dgm.condition(model, torch.zeros(model.output_shape))
        assert isinstance(problem, dgm.Fibre)
        assert problem.units is not None
    dgm.condition(variant(Walk, "dense", simulate=another_simulate), torch.zeros(8))
    dgm.condition(variant(BentPairs, unit_inputs=6, unit_outputs=6), torch.zeros(6))


@pytest.mark.parametrize("solver", some(("newton", "quasi_newton"), quick=("newton",)))
@pytest.mark.parametrize("model", [Bent(), BentPairs(), Walk(), Bent("dense")], ids=lambda m: f"{type(m).__name__}")
def test_rows_worked_off_in_parts_make_the_same_chains(monkeypatch, model, solver):
    u = torch.randn(model.input_density.dim, generator=torch.Generator().manual_seed(3), dtype=FLOAT)
    problem = dgm.condition(model, model.observed(u))
    kernel = dgm.ConstrainedHMC(step_size=0.3, n_steps=2, n_geodesic=2, solver=solver)

    def chains():
        return dgm.sample(problem, kernel, chains=7, warmup=0, draws=3, seed=1, progress=False).inputs

    whole, calls = chains(), []
    evaluate = row_execution._evaluate
    monkeypatch.setattr(row_execution, "_evaluate", lambda f, *a: calls.append(len(f.values)) or evaluate(f, *a))
    row_size = problem.structure.row_size(problem.values.shape[-1], problem.dim)
    monkeypatch.setattr(row_execution, "SETTINGS", row_execution.ExecutionSettings(elements=3 * row_size))
    assert torch.allclose(chains(), whole, rtol=1e-10, atol=1e-12)
    assert max(calls) == 3
