"""Calibration on fibres without noise, where only constrained kernels apply."""

import pytest
import torch

import dgm_infer as dgm
from tests.calibration import uniformity
from tests.mistakes import GramTermReversed
from tests.oracles import FLOAT

PROBLEMS, CHAINS = 200, 9
# the false alarms of all p-values of this module together: below 3 %
ALARM = 1e-3


class Stretched(dgm.GenerativeModel):
    """Two bent outputs of four inputs; the last two scale the first two, so that every fibre is one sheet over them."""

    input_density = dgm.StandardNormal(4)
    output_shape = (2,)  # type: ignore[assignment]

    def observed(self, u):
        a, b, s, t = u.unbind(-1)
        return torch.stack(
            [a * torch.exp(0.8 * s) + 0.5 * torch.sin(t), b * torch.exp(0.8 * t) + 0.4 * torch.tanh(s)], -1
        )


# compiled transitions are those of their kernel, test_constrained_program; the default has its laws in test_posteriors
PLAIN = dgm.ConstrainedHMC(n_steps=(1, 4), n_geodesic=1, max_iterations=20)
KERNELS = {
    "float64": PLAIN,
    "float32 Jacobians": PLAIN.replace(float32_jacobians=True),
    "no Gram force": PLAIN.replace(gram_force=False),
}


def p_values(kernel, kind=dgm.Fibre, problems=PROBLEMS):
    """Of uniform ranks of the inputs and of the sum and product of the two that stretch."""
    u = torch.randn(problems, 4, generator=torch.Generator().manual_seed(60), dtype=FLOAT)
    problem = dgm.condition(Stretched().eval(), Stretched()(u))
    problem = kind(problem.observed, problem.values)
    draws = dgm.sample(problem, kernel, chains=CHAINS, warmup=60, draws=1, thin=5, seed=1, progress=False)
    # one draw per chain: independent of the others, and of the start if the chain has forgotten it
    drawn = draws.inputs[:, -1]

    def functions(u):
        return torch.cat([u, u[..., 2:].sum(-1, keepdim=True), u[..., 2:].prod(-1, keepdim=True)], -1)

    pairs = zip(functions(u).unbind(-1), functions(drawn).unbind(-1), strict=True)
    return [uniformity(truth, values) for truth, values in pairs]


@pytest.mark.slow
# acceptance without the Gram force does not rise to 1 as steps shrink, and warm-up says so
@pytest.mark.filterwarnings("ignore:warm-up stopped shrinking steps:UserWarning")
@pytest.mark.parametrize("kernel", KERNELS)
def test_fibres_without_noise_are_calibrated(kernel):
    assert min(p_values(KERNELS[kernel])) > ALARM


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:warm-up stopped shrinking steps:UserWarning")
# the kernels share the statistic, and the mistake is the problem's: one kernel shows that it is noticed
def test_control_with_the_gram_term_reversed_they_are_not():
    assert min(p_values(PLAIN, GramTermReversed, PROBLEMS // 2)) < 1e-6
