"""Straight-line code of programs: the program's own values and derivatives, or the program itself."""

import copy

import pytest
import torch
from torch import distributions as td
from torch import nn

import dgm_infer as dgm
from dgm_infer.interop.straight_line import Parts, Recording, Rows, straight_line_code
from tests.recorded import assert_code_is_the_program, inputs_of

FLOAT = torch.float64
NORMAL = td.Normal(0.0, 1.0)


def writes_through_views(z):
    path = torch.zeros(2, 3)
    row = path[1]
    row[0] = z
    path[:, 1] = torch.randn(2)
    before = path * 1.0
    path += 1
    path[1, 2] = row[0] + z
    return torch.cat([before.reshape(-1), path.reshape(-1), row])


def lists_that_grow(z):
    parts = [torch.tensor(1.0), z]
    first = torch.stack(parts)
    parts.append(z * 2)
    second = torch.stack(parts)
    parts[0] = torch.randn(())
    return torch.cat([first, second, torch.stack(parts)])


def neutral_then_written(z):
    x = z + 0.0 * torch.zeros(3) + torch.randn(3)
    y = x * 1
    y[0] = 5.0
    zero = torch.zeros(3)
    zero[1] = z
    return x + y + zero


def filled_in_place(z):
    plain = torch.empty(3).normal_()
    viewed = torch.empty(3)
    part = viewed[:2]
    viewed.normal_()
    twice = torch.empty(3).normal_()
    twice[0] = z
    given = z * torch.ones(3)
    copied = torch.zeros(3).copy_(given)
    given[1] = 7.0
    return torch.cat([plain * z, part, viewed, twice, copied, given, torch.zeros(2).copy_(z)])


def dimensions_from_the_end(z):
    x = z + torch.randn(3, 2)
    sums = [x.sum(-1), x.mean(0), x.sum(), x.sum((0, -1)), x.cumsum(-1).sum(0), torch.softmax(x, -1)[0]]
    joined = torch.stack([x[:, 0], x[:, 1]], -1), torch.cat([x, x], -1), x.flatten(), x.unsqueeze(-1), x[None]
    return torch.cat([each.reshape(-1) for each in (*sums, *joined)])


def extremes_and_order(z):
    x = z + torch.randn(4)
    top = x.max(0)
    return torch.cat([x.sort().values, top.values.reshape(1), x.min().reshape(1), torch.diff(x), x @ torch.ones(4, 2)])


@pytest.mark.parametrize(
    "simulate",
    [
        writes_through_views,
        lists_that_grow,
        neutral_then_written,
        filled_in_place,
        dimensions_from_the_end,
        extremes_and_order,
    ],
)
def test_writes_lists_and_dimensions(simulate):
    assert_code_is_the_program(dgm.from_simulator(simulate, NORMAL))


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def jvp(ctx, t):
        return 2 * t


def test_an_autograd_function_is_a_call():
    assert_code_is_the_program(dgm.from_simulator(lambda z: Doubled.apply(z) + torch.randn(3), NORMAL))


def test_what_a_recording_misses_runs_as_it_is():
    model = dgm.from_simulator(lambda z: torch.func.grad(lambda x: x.pow(3))(z) + torch.randn(3), NORMAL).double()
    u = inputs_of(model)
    frozen = copy.deepcopy(model).eval()
    assert frozen._rows._codes is None
    torch.testing.assert_close(frozen.observed(u), model.train().observed(u))
    assert (frozen.observed(u + 1) != frozen.observed(u)).all()


def test_control_code_of_another_function_is_noticed():
    probes = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    count = iter(range(100))

    def changing(v):
        return Parts([v * (1 + next(count))], [], [])

    def constant(v):
        return Parts([v + v.detach().square()], [], [])

    def plain(v):
        return Parts([v + v.square()], [v[:2]], [])

    assert straight_line_code(changing, probes) is None
    # the derivative of the code is the program's, whatever its value suggests
    codes = straight_line_code(constant, probes)
    assert codes is not None
    torch.testing.assert_close(torch.func.jacrev(lambda v: codes[0](v)[0])(probes[0]), torch.eye(4).double())
    codes = straight_line_code(plain, probes)
    assert codes is not None
    torch.testing.assert_close(codes[0](probes[0])[0], probes[0] + probes[0].square())


def test_what_outputs_do_not_need_is_left_out():
    v = torch.ones(3, dtype=FLOAT)
    with Recording(v) as recording:
        unused = torch.linalg.inv(v.diag())
        output = v[0] * 2
    zeros = torch.zeros_like(v)
    assert torch.equal(recording.code([output])(zeros)[0], zeros[0])
    with pytest.raises(RuntimeError, match="singular"):
        recording.code([unused])(zeros)


def test_data_that_a_program_read_may_be_written_to_later():
    x = torch.linspace(0, 1, 3, dtype=FLOAT)

    def line(z):
        return torch.stack([z * x[0], z * x[1] + torch.randn(())]) + torch.cat([x[2:], torch.randn(1)])

    fibre = dgm.condition(dgm.from_simulator(line, NORMAL), torch.zeros(2), observe=dgm.pixels([False, True]))
    u = torch.randn(4, fibre.dim, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    before = fibre.constraint(u)
    x.fill_(5.0)
    torch.testing.assert_close(fibre.constraint(u), before, rtol=0, atol=0)
    # the control: a model that is conditioned now reads the data of now
    other = dgm.condition(dgm.from_simulator(line, NORMAL), torch.zeros(2), observe=dgm.pixels([False, True]))
    assert not torch.allclose(other.constraint(u), before)


def test_the_code_follows_weights_dtype_and_copies():
    net = nn.Linear(1, 3)
    model = dgm.from_simulator(lambda z, net: net(z.reshape(1)) + torch.randn(3), NORMAL, net)
    frozen = copy.deepcopy(model).double().eval()
    u = inputs_of(model)
    before = frozen.observed(u)
    again = copy.deepcopy(frozen)
    with torch.no_grad():
        dict(again.named_parameters())["argument_0.bias"].add_(1.0)
    torch.testing.assert_close(again.observed(u), before + 1)
    torch.testing.assert_close(again.eval().observed(u), before + 1)
    torch.testing.assert_close(frozen.observed(u), before)
    assert frozen.float().observed(u.float()).dtype == torch.float32
    torch.testing.assert_close(frozen.observed(u.float()).double(), before, rtol=1e-5, atol=1e-5)
    # inputs of another type than the model's run through the program
    assert frozen.observed(u).dtype == FLOAT


def test_a_row_without_a_factor_is_nan_and_no_other():
    rows = Rows(lambda v: Parts([torch.linalg.cholesky(v.reshape(1, 1)).reshape(-1)], [], []))
    u = torch.tensor([[4.0], [-1.0], [9.0]], dtype=torch.float64)
    (found,) = rows.each(0, u)
    torch.testing.assert_close(found[[0, 2], 0], u[[0, 2], 0].sqrt())
    assert found[1].isnan().all()
    with pytest.raises(RuntimeError, match="cholesky"):
        rows.each(0, -u[:1])
