"""Compiled fibres give the results of eager ones, for any number of rows, each function compiled once."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import dgm_infer as dgm
from dgm_infer.autodiff import compilation
from dgm_infer.autodiff.compilation import Compiler
from dgm_infer.conditioning.projection import project
from tests.models import Bent, BentPairs, Network, Stretched, Walk
from tests.oracles import FLOAT, Circle, Ellipse, Wave
from tests.quick import cases

ROW = torch.tensor([True, False, True, True, True])


def under_a_mask_a_problem():
    masks = torch.stack([ROW, ROW.flip(0)])
    return dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 10).reshape(2, 5), observe=dgm.pixels(masks))


PROBLEMS = {
    "scalar units, a mask a problem": under_a_mask_a_problem,
    "pairs": lambda: dgm.condition(BentPairs(), torch.linspace(-0.8, 0.8, 6)),
    "walk": lambda: dgm.condition(Walk(), torch.linspace(-0.8, 0.8, 16).reshape(2, 8)),
    "dense": lambda: dgm.condition(Ellipse(), [2.0]),
    "not normal": lambda: dgm.condition(Stretched(), torch.linspace(-0.8, 0.8, 5)),
    "sums": lambda: dgm.condition(Bent(), [0.3, -0.2], observe=dgm.linear([[0.5, 0, 0, 0.5, 0], [0, 2, 0, 0, -1.0]])),
    "strongly bent": lambda: dgm.condition(Wave(), [0.0]),
    "32 bits": lambda: dgm.condition(Bent(), torch.linspace(-0.8, 0.8, 5), dtype=torch.float32),
}


@pytest.fixture
def compiled(monkeypatch):
    """The graphs given to the compiler, which go on as they are: all but the compiler itself, in no time."""
    graphs = []

    def keep(graph, *example, **options):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "standalone_compile", keep)
    return graphs


def largest_difference(problem, *, solver="newton", chains=(5, 1), **settings):
    """Between the chains of compiled and eager kernels, of the same seed."""
    kernel = dgm.ConstrainedHMC(0.3, n_steps=(2, 3), n_geodesic=2, solver=solver, **settings)
    differences = []
    for n in chains:
        eager, fast = (
            dgm.sample(problem, kernel.replace(compile=c), chains=n, warmup=0, draws=4, seed=3, progress=False)
            for c in (False, True)
        )
        assert eager.inputs.diff(dim=1).abs().max() > 0.01
        for name in ("n_steps", "projection_failed", "reversal_failed"):
            assert torch.equal(fast.stats[name], eager.stats[name])
        differences.append((fast.inputs - eager.inputs).abs().max().item())
    return max(differences)


def rounding(problem):
    return 1e-10 if problem.values.dtype == FLOAT else 1e-4


# What is compiled depends on the problem, and an update of a solver on the structure alone, not on the flow: all
# problems by one solver, and every structure by the other; one of them in the quick run.
OTHER = ("scalar units, a mask a problem", "walk", "strongly bent")
CASES = {f"{name}, newton": (name, "newton", True) for name in PROBLEMS}
CASES |= {f"{name}, quasi_newton": (name, "quasi_newton", False) for name in OTHER}
QUICK = ("dense, newton",)
every_case = pytest.mark.parametrize(("name", "solver", "split"), cases(CASES, quick=QUICK))


@every_case
def test_traced_functions_make_the_chains_of_eager_ones(name, solver, split, compiled):
    problem = PROBLEMS[name]()
    assert largest_difference(problem, solver=solver, split=split) < rounding(problem)
    # the updates of the first solver, Jacobian and linearisation, for all sizes
    assert len(compiled) == 3


def test_a_traced_linearisation_by_structure_is_called_for_any_number_of_rows(compiled):
    problem = PROBLEMS["pairs"]()
    for rows in (3, 7):
        u = torch.randn(rows, problem.dim, generator=torch.Generator().manual_seed(4), dtype=FLOAT)
        expected = problem.rows(rows).linearise(u)
        found = problem.computed(mode="compiled").rows(rows).evaluate(dgm.Fibre.linearise, u)
        torch.testing.assert_close(found.energy, expected.energy)
        torch.testing.assert_close(found.gradient, expected.gradient)
    # code is for what is evaluated often
    assert compiled == []


# compilers see what was traced: one problem of every structure, and the other solver
COMPILED = [f"{name}, newton" for name in ("scalar units, a mask a problem", "pairs", "dense")]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*COMPILED, "walk, quasi_newton"])
def test_compiled_functions_make_the_chains_of_eager_ones(case):
    name, solver, split = CASES[case]
    problem = PROBLEMS[name]()
    assert largest_difference(problem, solver=solver, split=split, chains=(5, 2, 1, 7)) < rounding(problem)


@pytest.mark.slow
def test_a_fibre_keeps_what_it_compiled(compiled):
    problem = PROBLEMS["pairs"]()
    kernel = dgm.ConstrainedHMC(0.3, n_steps=2, solver="newton", compile=True)
    for chains in (3, 4):
        dgm.sample(problem, kernel, chains=chains, warmup=0, draws=2, seed=0, progress=False)
    seen = len(compiled)
    initial = problem.start(50, torch.Generator().manual_seed(1))
    dgm.sample(problem, kernel, chains=50, warmup=2, draws=2, seed=0, initial=initial, progress=False)
    assert len(compiled) == seen
    # the control: another problem is another function
    dgm.sample(PROBLEMS["pairs"](), kernel, chains=3, warmup=0, draws=2, seed=0, progress=False)
    assert len(compiled) > seen


def test_a_solver_of_many_updates_is_one_graph_of_a_few(compiled):
    problem = dgm.condition(Wave(), [0.0])
    fibre = problem.rows(1).computed(mode="compiled")
    u = torch.tensor([[0.9, 0.4]], dtype=FLOAT)
    base, none = fibre.jacobian(u), torch.zeros(1, dtype=FLOAT)
    everything = torch.ones(1, dtype=torch.bool)
    for solver in ("broyden", "quasi_newton"):
        del compiled[:]
        found = project(fibre, u, base, tolerance=none, active=everything, solvers=(solver,), max_iterations=20)
        assert found.iterations.item() > 16
        (graph,) = compiled
        # the constraint of the model has one sine: where the updates begin, and after each
        assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == 1 + 6


def test_variants_that_share_a_compiler_keep_their_functions(compiled):
    fibre = PROBLEMS["pairs"]().rows(3).computed(mode="compiled")
    u = fibre.start(1, torch.Generator().manual_seed(0))[0]
    both = [each.evaluate(dgm.Fibre.linearise, u, often=False) for each in (fibre, fibre.computed(gram_force=False))]
    assert len(compiled) == 0
    for found, each in zip(both, (fibre, fibre.computed(gram_force=False)), strict=True):
        torch.testing.assert_close(found.gradient, each.linearise(u).gradient, rtol=1e-8, atol=1e-10)
    assert (both[0].gradient - both[1].gradient).abs().max() > 0.01


def test_without_compile_nothing_is_compiled(compiled):
    problem = PROBLEMS["pairs"]()
    dgm.sample(problem, chains=3, warmup=0, draws=2, seed=0, progress=False)
    assert compiled == []


@pytest.mark.parametrize("constant", [3, 31, 53, 10007, 20014])
def test_numbers_of_the_model_are_not_taken_for_numbers_of_rows(constant, compiled):
    def function(x):
        wide = x @ torch.ones(x.shape[-1], constant, dtype=FLOAT)
        return (wide + torch.zeros(len(x), constant, dtype=FLOAT)).sum(-1) * constant

    compiler = Compiler()
    for rows in (3, 1, 53, 100):
        x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows), dtype=FLOAT)
        torch.testing.assert_close(compiler("key", function, x, generate=True), function(x))
    assert len(compiled) == 1


class Counted(Circle):
    """It remembers the most rows that it computed; fake rows have no values to compute."""

    most = 0

    def observed(self, u):
        inner = u
        functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
        while functorch.is_functorch_wrapped_tensor(inner):
            inner = functorch.get_unwrapped(inner)
        if not isinstance(inner, FakeTensor):
            self.most = max(self.most, u.shape[:-1].numel())
        return super().observed(u)


def test_tracing_computes_a_few_rows_only():
    problem = dgm.condition(Counted(), [1.0])
    for rows in (3, 500):
        u = torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows), dtype=FLOAT)
        fibre = problem.computed(mode="compiled").rows(rows)
        problem.model.most = 0
        fibre.evaluate(dgm.Fibre.linearise, u)
        # once traced, the graph computes, not the model
        assert problem.model.most == (3 if rows == 3 else 0)


class Undecided(Circle):
    """Its output is computed in a way that depends on values."""

    def observed(self, u):
        x = super().observed(u)
        return 1 * x if bool((x > 100).any()) else x


class Sized(Circle):
    """Its output depends on how many rows it has."""

    def observed(self, u):
        x = super().observed(u)
        return x * (1 + x.shape[0] if x.ndim > 1 else 1)


def test_a_model_that_depends_on_the_number_of_rows_is_refused_before_it_is_compiled():
    with pytest.raises(dgm.errors.ModelError, match=r"Sized\.observed changes the output of a row when the other rows"):
        dgm.condition(Sized(), [1.0])


def test_a_model_that_cannot_be_compiled_is_refused_in_one_line():
    kernel = dgm.ConstrainedHMC(0.3, n_steps=2, compile=True)
    problem = dgm.condition(Undecided(), [1.0])
    with pytest.raises(dgm.errors.ModelError, match="compile=True") as caught:
        dgm.sample(problem, kernel, chains=2, warmup=0, draws=1, seed=0, progress=False)
    assert "\n" not in str(caught.value)
    # the control: it can be sampled without
    dgm.sample(problem, kernel.replace(compile=False), chains=2, warmup=0, draws=1, seed=0, progress=False)


def test_a_broken_file_of_a_stopped_compilation_is_named(monkeypatch):
    def broken(graph, *example, **options):
        raise OSError("/tmp/cache/ab/main.so: file too short")

    monkeypatch.setattr(torch._inductor, "standalone_compile", broken)
    problem = dgm.condition(Ellipse(), [2.0])
    with pytest.raises(
        dgm.errors.ModelError, match=r"file too short\): a compilation that was stopped left .*, remove /"
    ):
        dgm.sample(problem, dgm.ConstrainedHMC(0.3, compile=True), chains=2, draws=1, warmup=0, progress=False)


class Looking(Network):
    """A network that looks at the values of its inputs."""

    def prepare(self, u):
        if bool((u > 1e3).all()):
            raise ValueError("far away")
        return u


def test_derivatives_of_networks_with_convolutions_are_traced_where_they_can_be(monkeypatch):
    traced = []
    trace = compilation._trace
    monkeypatch.setattr(compilation, "_trace", lambda *args: traced.append(trace(*args)) or traced[-1])
    kernel = dgm.ConstrainedHMC(0.3, n_steps=(2, 3))
    draws = []
    for network in (Network, Looking):
        torch.manual_seed(0)
        convolved = nn.Unflatten(-1, (1, 2, 3)), nn.Conv2d(1, 1, 3, padding=1), nn.Flatten()
        fibre = dgm.condition(
            network(*convolved).double(),
            [0.1, 0, 0, 0.2, 0],
            observe=dgm.pixels(torch.tensor([True, False, False, True, False])),
        )
        assert fibre.traces
        draws.append(dgm.sample(fibre, kernel, chains=5, warmup=0, draws=4, seed=3, progress=False).inputs)
    # the Jacobian and the linearisation; those of the network that cannot be traced are called as they are
    assert len(traced) == 2
    assert draws[0].diff(dim=1).abs().max() > 0.01
    # derivatives of convolutions are in float32
    torch.testing.assert_close(*draws, rtol=0, atol=1e-4)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collections_leave_out_what_compilers_leave(collects):
    before = gc.get_freeze_count()
    cycle = Stretched()
    cycle.own, gone = [cycle], weakref.ref(cycle)
    del cycle
    try:
        (gc.enable if collects else gc.disable)()
        Compiler()("key", lambda x: x.sin() + 1, torch.ones(4, 2, dtype=FLOAT), generate=True)
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() > before + 1000
        # what was garbage before has been freed
        assert gone() is None
        # without code nothing is left
        gc.unfreeze()
        Compiler()("key", lambda x: x.sin() + 1, torch.ones(4, 2, dtype=FLOAT), generate=False)
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
