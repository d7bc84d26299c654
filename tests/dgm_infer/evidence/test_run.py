"""``log_evidence()``: batches, chunks, seeds, dtypes, what it refuses."""

import math
import warnings

import pytest
import torch

import dgm_infer as dgm
from dgm_infer.evidence import lower_bounds
from dgm_infer.evidence.path import AnnealedPath
from dgm_infer.evidence.tempering.continuous import LadderChain
from tests.findings import honest
from tests.known_evidence import known_bimodal, known_gaussian, known_linear_gaussian
from tests.oracles import FLOAT
from tests.quick import cases, some

# runs as short as these may have no round trip, and say so
pytestmark = honest

QUICK = {
    "AIS": dgm.AIS(30, pilot_temperatures=20),
    "AIS, barrier": dgm.AIS(30, "barrier", pilot_temperatures=20),
    "Hamiltonian AIS": dgm.evidence.HamiltonianAIS(60, pilot_temperatures=20),
    "Gibbs tempering": dgm.GibbsTempering(draws=30, warmup=10, pilot_temperatures=20),
    "continuous tempering": dgm.ContinuousTempering(draws=30, warmup=30, pilot_temperatures=20),
    "simulated tempering": dgm.SimulatedTempering(draws=30, warmup=10, pilot_temperatures=20, temperatures=50),
    "path sampling": dgm.evidence.PathSampling(dgm.GibbsTempering(draws=60, warmup=10, pilot_temperatures=20), parts=2),
    "SMC": dgm.SMC(8, pilot_temperatures=20),
    "SMC, waste-free": dgm.SMC(8, schedule="linear", temperatures=10, waste_free=4, pilot_temperatures=20),
    "importance sampling": dgm.evidence.ImportanceSampling(50),
    "ELBO": dgm.Elbo(50),
}
every_method = pytest.mark.parametrize("method", QUICK.values(), ids=QUICK)
# what chunks do to draws is the work of the run, not of the method
every_kind = pytest.mark.parametrize(
    "method",
    cases(
        {name: QUICK[name] for name in ("importance sampling", "AIS, barrier", "Gibbs tempering", "SMC, waste-free")},
        ("importance sampling",),
    ),
)


def run(target, base, method, **settings):
    return dgm.log_evidence(target, base, method, **{"chains": 4, "seed": 1, "progress": False} | settings)


@every_method
def test_results_have_the_batchs_shape_whatever_it_is(method):
    for batch in ((), (2, 3)):
        known = known_gaussian(3, batch)
        estimate = run(known.target, known.base, method)
        for value in (estimate.log_z, estimate.std_error, estimate.bias, estimate.diagnostics["ess"]):
            assert value.shape == batch
            assert value.dtype == FLOAT
        assert estimate.draws.shape == (*estimate.log_weights.shape, 3)
        assert estimate.log_weights.shape[0] == 4
        assert estimate.log_weights.shape[2:] == batch
        assert estimate.log_z.isfinite().all()
        assert estimate.dof == 3


def test_a_seed_that_is_drawn_is_recorded():
    known = known_gaussian(2)
    first = run(known.target, known.base, QUICK["AIS"], seed=None)
    assert torch.equal(run(known.target, known.base, QUICK["AIS"], seed=first.seed).log_z, first.log_z)


@every_kind
def test_a_batch_in_chunks_is_the_problems_one_after_another(method):
    known = known_linear_gaussian((2, 3))
    chunked = run(known.target, known.base, method, chunk=1)
    alone = run(known.target.take(torch.tensor([0])), known.base.take(torch.tensor([0])), method)
    # the first chunk has the first random numbers
    torch.testing.assert_close(chunked.log_z[0, 0], alone.log_z[0])
    torch.testing.assert_close(chunked.draws[:, :, 0, 0], alone.draws[:, :, 0])
    assert chunked.log_z.shape == (2, 3)
    # 6 problems in chunks of 4: the last is smaller
    ragged = run(known.target, known.base, method, chunk=4)
    assert ragged.draws.shape[2:] == (2, 3, 3)
    for name, value in ragged.diagnostics.items():
        assert not isinstance(value, torch.Tensor) or value.shape[-2:] == (2, 3), name


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_every_problem_of_a_chunked_batch_has_its_own_answer(chunk):
    known = known_linear_gaussian((2, 3))
    assert known.log_z.max() - known.log_z.min() > 1
    estimate = run(known.target, known.base, dgm.AIS(100), chains=64, chunk=chunk)
    assert ((estimate.log_z - known.log_z).abs() <= 5 * estimate.std_error).all()


@pytest.mark.slow
def test_bounds_in_chunks_keep_draws_and_problems_together():
    known = known_linear_gaussian((5,))
    exact = known.draw(32, torch.Generator().manual_seed(0))
    settings = {"chains": 32, "seed": 1, "chunk": 2, "progress": False}
    bounds = dgm.bidirectional(known.target, known.base, exact, dgm.AIS(100), **settings)
    for estimate in (bounds.lower, bounds.upper, bounds.combined):
        assert ((estimate.log_z - known.log_z).abs() <= 5 * estimate.std_error).all()
    torch.testing.assert_close(bounds.upper.draws[:, 0], exact)
    # draws of other problems are not exact draws of these
    mixed = dgm.bidirectional(known.target, known.base, exact.roll(1, 1), dgm.AIS(1), **settings)
    assert (mixed.upper.log_z < known.log_z - 1).any()


# ---------------------------------------------------------------------------------------------------------- interrupts


def stop_after(monkeypatch, owner, name, calls):
    """Ctrl-C once a function has been called so often; returns how to let it be called on."""
    function, count = getattr(owner, name), 0

    def interrupted(*args, **kwargs):
        nonlocal count
        if count == calls:
            raise KeyboardInterrupt
        count += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


def assert_same(one, other, ends, draws):
    """The first problems' estimates and draws of one are the other's; the rest is not there."""
    for name in ("log_z", "std_error", "bias"):
        torch.testing.assert_close(getattr(one, name)[:ends], getattr(other, name)[:ends], equal_nan=True)
        assert getattr(one, name)[ends:].isnan().all()
    torch.testing.assert_close(one.draws[:, :draws, :ends], other.draws[:, :draws, :ends])
    torch.testing.assert_close(one.log_weights[:, :draws, :ends], other.log_weights[:, :draws, :ends])
    assert one.draws[:, :, ends:].isnan().all()


# what an interrupt keeps is the work of the run, not of the method
@pytest.mark.parametrize(
    "method", cases({name: QUICK[name] for name in ("AIS", "Gibbs tempering", "SMC", "ELBO")}, ("AIS",))
)
def test_an_interrupt_between_chunks_keeps_the_estimates_of_those_before(method, monkeypatch, tmp_path):
    known = known_linear_gaussian((3,))
    whole = run(known.target, known.base, method, chunk=1)
    stop_after(monkeypatch, type(method), "run", 2)
    with pytest.warns(UserWarning, match="interrupted: estimates of 2 of 3 problems are kept"):
        part = run(known.target, known.base, method, chunk=1)
    assert part.interrupted
    assert not whole.interrupted
    assert_same(part, whole, 2, whole.draws.shape[1])
    part.save(tmp_path / "part.npz")
    assert dgm.Evidence.load(tmp_path / "part.npz").interrupted
    assert len(part.to_dataframe()) == 3


def test_an_interrupt_of_tempering_keeps_the_estimate_of_shorter_chains(monkeypatch):
    known = known_linear_gaussian((3,))
    short, long = (dgm.GibbsTempering(draws=n, warmup=5, pilot_temperatures=10, thin=2) for n in (14, 40))
    expected = run(known.target, known.base, short)
    # five of the warm-up
    stop_after(monkeypatch, LadderChain, "step", 5 + 14)
    with pytest.warns(UserWarning, match="interrupted: estimates of 3 of 3"):
        part = run(known.target, known.base, long)
    assert part.interrupted
    assert part.draws.shape == expected.draws.shape
    assert_same(part, expected, 3, 7)
    for name, value in expected.diagnostics.items():
        # an interrupted run looks for no minima
        if name not in ("seconds", "gradient_evaluations", "minima"):
            torch.testing.assert_close(part.diagnostics[name], value)


def test_an_interrupt_of_a_later_chunk_keeps_its_shorter_chains(monkeypatch):
    known = known_linear_gaussian((3,))
    method = dgm.GibbsTempering(draws=10, warmup=0, pilot_temperatures=10)
    whole = run(known.target, known.base, method, chunk=1)
    stop_after(monkeypatch, LadderChain, "step", 10 + 4)
    with pytest.warns(UserWarning, match="interrupted: estimates of 2 of 3"):
        part = run(known.target, known.base, method, chunk=1)
    assert part.log_z[0] == whole.log_z[0]
    assert part.log_z.isnan().tolist() == [False, False, True]
    torch.testing.assert_close(part.draws[:, :, 0], whole.draws[:, :, 0])
    torch.testing.assert_close(part.draws[:, :4, 1], whole.draws[:, :4, 1])
    assert part.log_weights[:, 4:, 1].isneginf().all()
    assert part.expectation(lambda x: x.nan_to_num(0)).value[:2].isfinite().all()


def test_an_interrupt_of_importance_sampling_keeps_the_draws_made(monkeypatch):
    known = known_gaussian(2)
    monkeypatch.setattr(lower_bounds, "_POINTS", 40)
    stop_after(monkeypatch, AnnealedPath, "normal", 3)
    with pytest.warns(UserWarning, match="interrupted"):
        part = run(known.target, known.base, dgm.evidence.ImportanceSampling(50))
    assert part.draws.shape[1] == 30
    assert part.log_z.isfinite()


@pytest.mark.parametrize(
    "method", [QUICK["AIS"], QUICK["Gibbs tempering"], QUICK["ELBO"]], ids=lambda m: type(m).__name__
)
def test_an_interrupt_before_any_estimate_is_an_interrupt(method, monkeypatch):
    known = known_gaussian(2)
    stop_after(monkeypatch, AnnealedPath, "normal", 0)
    with pytest.raises(KeyboardInterrupt):
        run(known.target, known.base, method)


def test_who_needs_a_whole_estimate_is_interrupted_too(monkeypatch):
    known = known_gaussian(2)
    stop_after(monkeypatch, LadderChain, "step", 15)
    with pytest.warns(UserWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        dgm.evidence.refine_base(known.target, known.base, QUICK["Gibbs tempering"], chains=4, progress=False)


# --------------------------------------------------------------------------------------------------------------- types


def test_a_foreign_target_with_an_energy_will_do():
    known = known_gaussian(2)

    class Foreign:
        dim, batch_shape = 2, ()

        def energy(self, x):
            return known.target.energy(x)

    estimate = run(Foreign(), known.base, dgm.AIS(100), chains=64)
    assert abs(estimate.log_z - known.log_z) <= 5 * estimate.std_error


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [dgm.AIS(200), dgm.GibbsTempering(draws=300), dgm.ContinuousTempering(draws=300)],
    ids=lambda m: type(m).__name__,
)
def test_float32_and_float64_have_the_same_mean(method):
    known = known_gaussian(10, (20,))
    results = []
    for dtype, seed in ((torch.float32, 2), (FLOAT, 3)):
        estimate = run(known.target, known.base.to(dtype), method, chains=64, seed=seed)
        assert estimate.draws.dtype == dtype
        assert estimate.log_z.dtype == estimate.log_weights.dtype == FLOAT
        results.append((estimate.log_z - estimate.bias).mean())
        error = estimate.std_error.square().sum().sqrt() / 20
    assert error <= 0.01
    assert (results[0] - results[1]).abs() <= 3 * math.sqrt(2) * error
    assert (results[1] + 3).abs() <= 5 * error


@pytest.mark.gpu
@every_method
def test_everything_runs_on_the_device_of_the_base(method):
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=FLOAT, device="cuda")
    target = dgm.Target(lambda x: 0.5 * (x / scales.unsqueeze(-1)).square().sum(-1), 4, (3,))
    base = dgm.Gaussian(torch.zeros(3, 4, dtype=FLOAT, device="cuda"), 1.3)
    log_z = 2 * math.log(2 * math.pi) + 4 * scales.log()
    estimate = run(target, base, method, chains=256)
    assert estimate.draws.is_cuda
    assert estimate.log_z.is_cuda
    if estimate.status != "lower":
        assert ((estimate.log_z - log_z).abs() <= 5 * estimate.std_error).all()
    assert (estimate.log_z - 5 * estimate.std_error < log_z).all()


# ------------------------------------------------------------------------------ targets without a density somewhere


class HalfPlane(dgm.Target):
    """A standard normal density on the half plane where the coordinates sum to more than 0: Z is 1/2."""

    dim = 2

    def __init__(self, outside):
        super().__init__()
        self.outside = outside

    def energy(self, x):
        energy = 0.5 * x.square().sum(-1) + math.log(2 * math.pi)
        return energy + torch.where(x.sum(-1) > 0, 0.0, self.outside)


@pytest.mark.parametrize("outside", some((math.inf, math.nan, -math.inf), quick=(math.nan,)))
@pytest.mark.parametrize("method", [dgm.AIS(20), dgm.evidence.ImportanceSampling(500)], ids=lambda m: type(m).__name__)
def test_weights_that_are_not_finite_count_as_zero(method, outside):
    base = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        estimate = run(HalfPlane(outside), base, method, chains=1000)
    assert len(said) == math.isnan(outside)
    assert abs(estimate.log_z - math.log(0.5)) <= 5 * estimate.std_error
    assert estimate.std_error < 0.1
    inside = estimate.expectation(lambda x: (x.sum(-1) > 0).double())
    assert inside.value == 1
    if isinstance(method, dgm.AIS):
        # none starts in the half of the base that is outside
        assert estimate.diagnostics["lost_chains"] == 0


@every_method
def test_a_target_without_a_density_at_any_draw_of_the_base_is_a_named_error(method):
    target = dgm.Target(lambda x: x.square().sum(-1) + math.inf * (x.sum(-1) < 40), 2)
    base = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.0)
    with pytest.raises(dgm.errors.EvidenceError, match="base"):
        run(target, base, method)


def test_a_base_that_covers_one_of_two_modes_is_seen_in_the_weights():
    known = known_bimodal()
    narrow = dgm.Gaussian(torch.tensor([1.5, 1.0], dtype=FLOAT), torch.tensor([0.45, 0.5], dtype=FLOAT))
    covered = run(known.target, narrow, dgm.evidence.ImportanceSampling(1000), chains=16)
    # importance weights alone see the mode they have; it is a lower bound all the same
    assert covered.log_z < known.log_z - 0.3
    wide = run(known.target, known.base, dgm.evidence.ImportanceSampling(1000), chains=16)
    assert abs(wide.log_z - known.log_z) <= 5 * wide.std_error - wide.bias


# ------------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chains": 0}, r"log_evidence\(chains=0\): must be an integer >= 1"),
        ({"chains": 2.5}, "chains=2.5"),
        ({"chunk": 0}, "chunk=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, f"from 0 to {2**63 - 1}"),
    ],
)
def test_bad_settings_are_named(settings, message):
    known = known_gaussian(2, (3,))
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        run(known.target, known.base, QUICK["AIS"], **settings)


def test_what_does_not_fit_is_named():
    known, other = known_gaussian(2, (3,)), known_gaussian(3, (3,))
    plain = dgm.Target(known.target.energy, 2, (3,))
    cases = [
        ((known.target, other.base, None), r"the base has \[\*batch, D\] = \(3, 3\), the target \(3, 2\)"),
        ((known.target, torch.zeros(2), None), r"base=Tensor\): expected a Gaussian"),
        ((object(), known.base, None), "expected a Target, not a object"),
        ((known.target, known.base, dgm.AIS), r"method=AIS: expected an instance"),
        ((known.target, known.base, "AIS"), "method='AIS'"),
        ((known.target, known.base, dgm.AIS(step_size=torch.ones(2))), r"step_size of shape \(2,\) does not fit"),
        (
            (dgm.Target(lambda x: x, 2, (3,)), known.base, None),
            r"of shape \(\d+, 3, 2\): expected one real value per point",
        ),
        # before a base is looked for
        (
            (dgm.Target(lambda x: x.square().sum(), 2), None, None),
            r"is of shape \(\): expected one real value per point",
        ),
        (
            (dgm.Target(lambda x: x.square().sum(-1, keepdim=True), 2), None, None),
            r"is of shape \(3, 1\): expected one real value per point, shape \(3,\)$",
        ),
    ]
    for (target, base, method), message in cases:
        with pytest.raises(dgm.errors.ArgumentError, match=message):
            dgm.log_evidence(target, base, method, progress=False)
    with pytest.raises(dgm.errors.ArgumentError, match="a Target has no take"):
        run(plain, known.base, QUICK["AIS"], chunk=1)


def test_a_target_that_computes_in_another_type_is_named():
    linear = torch.nn.Linear(2, 1).requires_grad_(False)
    target = dgm.Target(lambda x: linear(x).square().sum(-1) + x.square().sum(-1), 2)
    base = dgm.Gaussian(torch.zeros(2, dtype=FLOAT), 1.0)
    with pytest.raises(dgm.errors.ArgumentError, match=r"energy fails at .*, torch.float64 on cpu; base.to\(...\)"):
        run(target, base, QUICK["AIS"])
    assert run(target, base.to(torch.float32), QUICK["AIS"]).log_z.isfinite()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgm.AIS(0), "temperatures=0"),
        (lambda: dgm.AIS(schedule="cubic"), "schedule='cubic'"),
        (lambda: dgm.AIS(schedule=torch.tensor([0.0, 0.6, 0.5, 1.0])), "must rise from 0 to 1"),
        (lambda: dgm.AIS(schedule=torch.tensor([0.1, 1.0])), "must rise from 0 to 1"),
        (lambda: dgm.AIS(step_size=0.0), "step_size=0"),
        (lambda: dgm.AIS(n_steps=0), "n_steps=0"),
        (lambda: dgm.AIS(target_acceptance=0), "target_acceptance=0"),
        (lambda: dgm.evidence.HamiltonianAIS(0), r"HamiltonianAIS\(temperatures=0\)"),
        (lambda: dgm.evidence.HamiltonianAIS(half_life=0), r"HamiltonianAIS\(half_life=0\): must be a positive number"),
        (lambda: dgm.evidence.HamiltonianAIS(half_life=math.inf), "half_life=inf"),
        (
            lambda: dgm.evidence.HamiltonianAIS(schedule="adaptive"),
            "one of linear, sigmoid, barrier, a function",
        ),
        (lambda: dgm.evidence.ImportanceSampling(0), "samples=0"),
        (lambda: dgm.Elbo(-3), "samples=-3"),
    ],
)
def test_methods_check_themselves(make, message):
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exact_draws": torch.zeros(5)}, r"exact_draws of shape \(5,\)\): expected \(2,\), or \(4, 2\) for 4 chains"),
        ({"method": dgm.GibbsTempering()}, "expected an AIS or a HamiltonianAIS"),
        ({"exact_draws": torch.full((2,), math.nan)}, "not finite"),
    ],
)
def test_bidirectional_checks_its_arguments(change, message):
    known = known_gaussian(2)
    arguments = {"exact_draws": known.base.mean, "method": dgm.AIS(5)} | change
    with pytest.raises(dgm.errors.ArgumentError, match=message):
        dgm.bidirectional(known.target, known.base, chains=4, progress=False, **arguments)


def test_exact_draws_without_a_density_are_a_named_error():
    base = dgm.Gaussian(torch.ones(2, dtype=FLOAT), 1.0)
    with pytest.raises(dgm.errors.EvidenceError, match="zero density at the exact draws of 1 of 1 problems"):
        dgm.bidirectional(HalfPlane(math.inf), base, -torch.ones(2), dgm.AIS(5), chains=4, progress=False)


def test_schedules_can_be_values_or_a_function():
    known = known_gaussian(2)
    values = torch.linspace(0, 1, 101) ** 2
    by_values = run(known.target, known.base, dgm.AIS(schedule=values, step_size=0.5))
    by_function = run(
        known.target, known.base, dgm.AIS(100, schedule=lambda n: torch.linspace(0, 1, n + 1) ** 2, step_size=0.5)
    )
    torch.testing.assert_close(by_values.log_z, by_function.log_z)
    # a fixed step size and schedule need no pilot
    assert by_values.diagnostics["pilot_evaluations"] == 0
    assert by_values.diagnostics["gradient_evaluations"] == 100 * 5 + 1


@pytest.mark.parametrize("temperatures", [1, 3])
@pytest.mark.slow
def test_short_pilots_will_do(temperatures):
    known = known_gaussian(2, (2,))
    for method in (dgm.AIS(60), dgm.AIS(60, "barrier"), dgm.GibbsTempering(draws=100), dgm.ContinuousTempering()):
        method = method.replace(pilot_temperatures=temperatures)
        estimate = run(known.target, known.base, method, chains=64)
        assert ((estimate.log_z - known.log_z).abs() <= 5 * estimate.std_error).all()


@pytest.mark.slow
def test_the_defaults_take_as_many_gradients_as_their_docstring_says():
    known = known_gaussian(2)
    diagnostics = run(known.target, known.base, dgm.AIS()).diagnostics
    assert (diagnostics["gradient_evaluations"], diagnostics["pilot_evaluations"]) == (2537, 536)
    diagnostics = run(known.target, known.base, dgm.evidence.HamiltonianAIS()).diagnostics
    assert (diagnostics["gradient_evaluations"], diagnostics["pilot_evaluations"]) == (2537, 536)
    for method in (dgm.AIS, dgm.evidence.HamiltonianAIS):
        assert all(str(n) in (method.__doc__ or "").replace(" ", "") for n in (2537, 536))


@pytest.mark.parametrize("method", cases(QUICK, ("AIS", "Gibbs tempering", "SMC", "ELBO")))
def test_one_chain_has_an_estimate_and_no_standard_error(method):
    known = known_gaussian(2)
    estimate = run(known.target, known.base, method, chains=1)
    assert estimate.log_z.isfinite()
    assert estimate.std_error.isnan()
    assert all(end.isnan() for end in estimate.interval())


def test_a_progress_bar_shows_the_running_estimate(capsys):
    known = known_gaussian(2, (2,))
    run(known.target, known.base, dgm.GibbsTempering(draws=20, warmup=5, pilot_temperatures=10), progress=True)
    shown = capsys.readouterr().err
    assert "tempering: 100%" in shown
    assert "mean log Z -" in shown
    run(known.target, known.base, dgm.AIS(5, step_size=0.5), progress=False)
    assert capsys.readouterr().err == ""
