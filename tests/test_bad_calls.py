"""Calls as a new user mistypes them: each is answered by one line that names the argument or the class, and the value.

Every row is a call, in the notation of :func:`vocabulary`, and words that its answer must hold. A call that is
accepted, or ends in an error of torch or Python, fails.
"""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dgm_infer as dgm
import generators
import trainers
from dgm_infer.conditioning.check import Report
from dgm_infer.errors import DgmInferError, ModelError
from tests.bad_values import NEVER, TAKEN, VALUES, answer_to, public_calls
from tests.oracles import Circle

# Longest answer, in characters.
LONGEST = 320
# What only an error of torch or Python says.
JARGON = re.compile(
    r"DefaultCPUAllocator|invalid combination of arguments|unpack|pos(ition)? \d|has no attribute|has no len|"
    r"object is not (callable|iterable)|not supported between|must be real number|invalid data type|Could not infer"
)


class Shaped(dgm.GenerativeModel):
    """Images of two rows and one column: the sum and the difference of two inputs."""

    input_density = dgm.StandardNormal(2)

    def __init__(self):
        super().__init__()
        self.output_shape = (2, 1)

    def observed(self, u):
        return torch.stack([u.sum(-1), u[..., 0] - u[..., 1]], -1)


class Summed(dgm.GenerativeModel):
    """``x = |u|^2`` of two inputs, with an output in one dimension and every optional method."""

    input_density = dgm.StandardNormal(2)

    def observed(self, u):
        return u.square().sum(-1, keepdim=True)


def model(f=None, **replaced):
    """A two-input model with a method or an attribute replaced; ``f`` is its function of the inputs."""
    if f is not None:
        replaced["observed"] = lambda self, u: f(u)
    return type("M", (Summed,), replaced)().eval()


def weighing(value):
    """A network all of whose weights are this number."""
    net = nn.Linear(3, 2, dtype=torch.tensor(value).dtype)
    nn.init.constant_(net.weight, value)  # type: ignore[arg-type]
    return generators.from_module(net.eval(), 3)


def bowl(x):
    return 0.5 * x.square().sum(-1)


def sample(problem, kernel=None, **arguments):
    arguments = {"chains": 2, "warmup": 0, "draws": 4, "seed": 0, "progress": False} | arguments
    kernel = kernel or (dgm.HMC if isinstance(problem, dgm.Target) else dgm.ConstrainedHMC)(step_size=0.1, n_steps=1)
    return dgm.sample(problem, kernel, **arguments)


def log_evidence(target=None, m=None, **arguments):
    target = dgm.Target(bowl, 2) if target is None else target
    method = dgm.Elbo(samples=4) if m is None else m
    arguments = {"chains": 2, "seed": 0, "progress": False} | arguments
    return dgm.log_evidence(target, dgm.Gaussian(torch.zeros(2), 1.0), method, **arguments)


def vocabulary(folder):
    """What the calls name: S and L sample and estimate in no time, the lower-case ones are small valid objects."""
    circle = dgm.condition(Circle().eval(), torch.tensor([2.0]))
    vae = generators.GaussianVAE(3, (8, 8), hidden=(4,)).eval()
    lost = generators.GaussianVAE(3, (8, 8), hidden=(4,)).eval()
    nn.init.constant_(next(lost.decoder.parameters()), math.nan)
    drawn = sample(circle)
    drawn.save(folder / "c.nc")
    evidence = log_evidence()
    posterior = generators.LatentPosterior(vae.decoder, torch.zeros(8, 8), dgm.StandardNormal(3))
    digits = trainers.DigitsData()
    return {
        "dgm": dgm,
        "generators": generators,
        "trainers": trainers,
        "torch": torch,
        "tensor": torch.tensor,
        "zeros": torch.zeros,
        "nan": math.nan,
        "inf": math.inf,
        "masked": np.ma.masked_array([1.0], mask=[True]),
        "S": sample,
        "L": log_evidence,
        "N": dgm.StandardNormal,
        "T": str(folder),
        "Circle": Circle,
        "Lin": lambda: Shaped().eval(),
        "mk": model,
        "net": lambda: nn.Linear(3, 4),
        "circ": lambda: circle,
        "vae": lambda: vae,
        "tgt": lambda: dgm.Target(bowl, 2),
        "base": lambda: dgm.Gaussian(torch.zeros(2), 1.0),
        "draws": lambda: drawn,
        "ev": lambda: evidence,
        "post": lambda: posterior,
        "digits": lambda: digits,
        "f": bowl,
        "weights": weighing,
        "lost": lambda: lost,
        "eight_bit": torch.arange(64.0).reshape(8, 8) * 4,
    }


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    return vocabulary(tmp_path_factory.mktemp("bad_calls"))


CALLS = {
    # ------------------------------------------------------------------------------------------------------- densities
    "N('a')": "StandardNormal(dim='a'): must be an integer",
    "N(None)": "StandardNormal(dim=None): must be an integer",
    "N(1.5)": "dim=1.5",
    "N(True)": "dim=True",
    "dgm.Product(1)": "Product(factors=1)",
    "dgm.Product(N(1),'x')": "Product(factors='x')",
    "dgm.WithNoise(Circle(),'a')": "WithNoise(sd='a')",
    "dgm.WithNoise(Circle(),None)": "WithNoise(sd=None)",
    # --------------------------------------------------------------------------------------------------------- targets
    "dgm.Target(lambda x:x,'2')": "Target(dim='2')",
    "dgm.Target(lambda x:x,2,'ab')": "Target(batch_shape='ab')",
    "dgm.Target(f, 1.5)": "Target(dim=1.5)",
    "dgm.Target(f, 2, (-1,))": "Target(batch_shape=(-1,))",
    "dgm.Target(None, 2)": "Target(energy=None)",
    "dgm.Target(5, 2)": "Target(energy=5)",
    "S(dgm.Target(None,2))": "Target(energy=None)",
    "S(dgm.Target(5,2))": "Target(energy=5)",
    "S(dgm.Target(lambda x:(x+0j).square().sum(-1),2))": "complex64",
    "S(dgm.Target(lambda x:None,2))": "NoneType",
    "S(dgm.Target(lambda x:x[...,3],2))": "the energy fails",
    "S(dgm.Target(lambda x:f(x)+torch.randn(x.shape[:-1]),2))": "differs from call to call",
    "S(dgm.Target(lambda x:-x.square().sum(-1),2))": "falls without end",
    # --------------------------------------------------------------------------------------------------------- models
    "dgm.check(mk(output_range=3))": "M(output_range=3)",
    "dgm.check(mk(output_shape=5))": "M(output_shape=5)",
    "dgm.condition(mk(f=lambda u: (u.square().sum(-1,keepdim=True),)),tensor([2.]))": "returns a tuple",
    "dgm.condition(mk(f=lambda u: None),tensor([2.]))": "returns a NoneType",
    "dgm.condition(mk(output_range=('a','b')),tensor([2.]))": "M(output_range=('a', 'b'))",
    "dgm.condition(mk(output_range=(0,1,2)),tensor([2.]))": "M(output_range=(0, 1, 2))",
    "dgm.condition(mk(output_range=3),tensor([2.]))": "M(output_range=3)",
    "dgm.condition(mk(output_shape='ab'),tensor([2.]))": "M(output_shape='ab')",
    "dgm.condition(mk(output_shape=5),tensor([2.]))": "M(output_shape=5)",
    "dgm.condition(mk(output_shape=None),tensor([2.]))": "M(output_shape=None)",
    "S(dgm.condition(mk(f=lambda u: torch.from_numpy(u.detach().numpy())[...,:1]),tensor([2.])))": (
        "M.observed has no derivative"
    ),
    "S(dgm.condition(mk(log_factor=lambda s,u: None),tensor([1.])))": "M.log_factor",
    "S(dgm.condition(mk(log_factor=lambda s,u: u.square()),tensor([1.])))": "M.log_factor",
    "S(dgm.condition(mk(latents=lambda s,u: None),tensor([1.]))).summary()": "NoneType",
    "S(dgm.condition(mk(latents=lambda s,u: u),tensor([1.]))).summary()": "Tensor",
    "S(dgm.condition(mk(latents=lambda s,u: {'a':1.}),tensor([1.]))).summary()": "'a'",
    "S(dgm.condition(mk(latents=lambda s,u: {'a/b':u}),tensor([1.]))).save(T+'/ab.nc')": "'a/b'",
    "S(dgm.condition(mk(latents=lambda s,u: {1:u}),tensor([1.]))).summary()": "latent 1",
    "S(dgm.condition(mk(latents=lambda s,u: {}),tensor([1.]))).summary()": "no latents",
    # ------------------------------------------------------------------------------------------ kinds of tensors
    "dgm.condition(mk(), zeros(1).to_sparse())": "condition(observed): is a sparse tensor",
    "dgm.condition(mk(), zeros(1).to('meta'))": "condition(observed): is a tensor on the meta device",
    "dgm.condition(mk(), torch.nested.nested_tensor([zeros(2), zeros(1)], layout=torch.jagged))": (
        "condition(observed): is a nested tensor"
    ),
    "dgm.condition(mk(), masked)": "condition(observed): is a masked array",
    "dgm.pixels(tensor([True]).to('meta'))": "pixels(mask): is a tensor on the meta device",
    "dgm.linear(torch.eye(2).to_sparse())": "linear(matrix): is a sparse tensor",
    "dgm.linear(zeros(0, 4))": "linear(matrix of shape (0, 4))",
    "dgm.linear(torch.full((2, 2), inf))": "linear(matrix=inf): not finite",
    "dgm.blur(torch.full((3, 3), nan))": "blur(kernel=nan): not finite",
    "dgm.blur(zeros(3, 3))": "blur(kernel of shape (3, 3)): is zero",
    "dgm.HMC(step_size=torch.ones(2).to_sparse())": "HMC(step_size): is a sparse tensor",
    "dgm.HMC(step_size=zeros(0))": "step_size=tensor([])",
    "S(tgt(), initial=torch.eye(2).to_sparse())": "sample(initial): is a sparse tensor",
    "dgm.Gaussian(zeros(2), cholesky=tensor([[2., 1.], [1., 2.]]))": "numbers above the diagonal",
    "dgm.kernels.EllipticalSlice(mean=nan)": "EllipticalSlice(mean=nan): not finite",
    "dgm.condition(mk(), tensor([1.]), tolerance=1., distance=lambda a, b: -(a - b).norm(dim=-1))": "not be negative",
    "dgm.condition(generators.from_module(net().to('meta'), 3), zeros(4))": "on the meta device",
    # ---------------------------------------------------------------------------------------------------- sizes
    "dgm.Target(f, 2, (0,))": "Target(batch_shape=(0,))",
    "N(10**20)": "StandardNormal(dim=100000000000000000000)",
    "circ().start(0, torch.Generator())": "Fibre.start(chains=0)",
    "dgm.modes(tgt(), starts=10**12)": "modes(starts=1000000000000): needs",
    "N(2).sample(-1)": "StandardNormal.sample(shape=-1)",
    "N(2).log_prob('x')": "StandardNormal.log_prob(u='x')",
    "N(2).log_prob(zeros(3))": "StandardNormal.log_prob(u of shape (3,)): expected [..., 2]",
    "base().sample(generator=5)": "Gaussian.sample(generator=5)",
    "draws().summary(names=[])": "summary(names=[])",
    # ---------------------------------------------------------------------------------------------------- paths
    **{
        f"{call}({path})": words
        for path, words in (("5000 * 'a'", "must be a shorter path"), ("'a' + chr(0)", "without null characters"))
        for call in (
            "draws().save",
            "ev().save",
            "dgm.Draws.load",
            "dgm.Evidence.load",
            "dgm.collect",
            "dgm.resume",
            "generators.load",
            "generators.IWAE.from_npz",
            "(lambda path: generators.save(vae(), path))",
            "(lambda path: generators.from_module(net(), 3, weights=path))",
            "(lambda path: S(circ(), run=path))",
        )
    },
    # ---------------------------------------------------------------------------------------------------- conditioning
    "dgm.condition(Circle(),tensor([2.]),device='meta')": "device='meta'",
    "dgm.condition(Circle(),tensor([2.]),device=1.5)": "device=1.5",
    "dgm.condition(Circle(),tensor([2.]),tolerance='0.1')": "tolerance='0.1'",
    "dgm.condition(Circle(),tensor([2.]),tolerance=inf)": "tolerance=inf",
    "dgm.condition(Circle(),tensor([2.]),tolerance=True)": "tolerance=True",
    "dgm.condition(Circle(),tensor([2.]),tolerance=1e10)": "the data would not matter",
    "dgm.condition(Circle(),tensor([2.]),tolerance=tensor([.1,.2]))": "tolerance=tensor([0.1000, 0.2000])",
    "dgm.condition(Lin(),tensor([.1]),observe=lambda x: 1/0)": "division by zero",
    "dgm.condition(Lin(),tensor([.1]),observe=lambda x: None)": "NoneType",
    "S(dgm.condition(Lin(),tensor([.1]),observe=lambda x: torch.tensor(x.detach().numpy())[...,0,:1]))": (
        "observe has no derivative"
    ),
    "dgm.condition(Lin(),tensor([.1]),observe=lambda x: x.to('cuda:99')[...,0,:1])": "observe fails",
    "S(dgm.condition(Lin(),tensor([.1]),observe=lambda x: x.mean().reshape(1)))": "observe",
    "S(dgm.condition(Lin(),tensor([.1]),observe=lambda x: x.reshape(-1)[:1]))": "observe",
    "dgm.condition(generators.GAN(2,(8,8),channels=None).eval(),eight_bit)": "divide by 255",
    "dgm.condition(weights(nan),zeros(2))": "net.weight are NaN, 6 of 6",
    "dgm.condition(weights(1j),zeros(2))": "net.weight are of torch.complex64",
    "dgm.check(weights(nan))": "net.weight are NaN",
    "dgm.condition(Circle(),tensor([1j]))": "observed of torch.complex64",
    "dgm.condition(Circle(),tensor([nan]))": "not finite",
    "dgm.linear('M')": "linear(matrix='M')",
    "dgm.linear(None)": "linear(matrix=None)",
    "dgm.blur('1')": "blur(kernel='1')",
    "dgm.blur(None)": "blur(kernel=None)",
    "dgm.blur(1e9)": "blur(kernel=1e+09)",
    # -------------------------------------------------------------------------------------------------------- sampling
    "S(circ(),chains=10**13)": "chains=10000000000000",
    "S(circ(),chains=2**70)": "chains=1180591620717411303424",
    "S(circ(),draws=10**13)": "draws=10000000000000",
    "S(circ(),draws=2**70)": "draws=1180591620717411303424",
    "S(circ(),thin=10**30)": "thin=1000000000000000000000000000000",
    "S(dgm.condition(mk(latents=lambda s,u:{'a':u[...,None].expand(*u.shape,10**9)}),tensor([1.])),keep='latents',"
    "warmup=10**7,draws=10**5)": "draws=100000): needs",
    "S(circ(),initial='x')": "initial='x'",
    "S(circ(),chains=True)": "chains=True",
    "S(circ(),warmup=True)": "warmup=True",
    "S(circ(),seed=True)": "seed=True",
    "S(circ(),progress='no')": "progress='no'",
    "dgm.ConstrainedHMC(compile='yes')": "compile='yes'",
    "dgm.ConstrainedHMC(split='yes')": "split='yes'",
    "dgm.ConstrainedHMC(step_size=True)": "step_size=True",
    "dgm.ConstrainedHMC(tolerance=inf)": "tolerance=inf",
    "dgm.ConstrainedHMC(tolerance=True)": "tolerance=True",
    "dgm.LiftedHMC(tolerance=1e10)": "tolerance=10000000000.0",
    # ----------------------------------------------------------------------------------------------------------- draws
    "draws().generate(10**12)": "n=1000000000000",
    "draws().save('/proc/x.nc')": "/proc/x.nc",
    "draws().save(5)": "path=5",
    "draws().save(None)": "path=None",
    "draws().summary('nope')": "'nope'",
    "draws().summary(5)": "names=5",
    "draws().summary(['nope'])": "'nope'",
    "dgm.Draws.load(5)": "path=5",
    "dgm.Draws.load(None)": "path=None",
    "dgm.Draws.load(T+'/c.nc',problem=post()).generate()": "3",
    # -------------------------------------------------------------------------------------------------------- evidence
    "L(chains=10**12)": "chains=1000000000000",
    "L(dgm.Target(lambda x: x.square().sum(-1)+1/0,2))": "division by zero",
    "L(dgm.Target(lambda x:f(x)+torch.randn(x.shape[:-1]),2))": "differs from call to call",
    "L(dgm.Target(lambda x:-x.square().sum(-1),2))": "falls without end",
    "L(chains=True)": "chains=True",
    "L(seed=True)": "seed=True",
    "L(progress='no')": "progress='no'",
    "L(m=dgm.AIS(temperatures=4,schedule=lambda k: None))": "AIS(schedule",
    "L(m=dgm.AIS(temperatures=10**13))": "AIS(temperatures=10000000000000): needs",
    "L(m=dgm.AIS(temperatures=4,pilot_temperatures=10**13))": "AIS(pilot_temperatures=10000000000000): needs",
    "L(m=dgm.evidence.HamiltonianAIS(temperatures=10**13,step_size=.1))": "HamiltonianAIS(temperatures=1000",
    "dgm.bidirectional(tgt(),base(),zeros(2),dgm.AIS(temperatures=10**13),progress=False)": "AIS(temperatures=",
    "L(m=dgm.Elbo(10**13))": "Elbo(samples=10000000000000): needs",
    "L(m=dgm.evidence.ImportanceSampling(10**13))": "ImportanceSampling(samples=10000000000000): needs",
    "L(m=dgm.SMC(particles=2**50))": "SMC(particles=1125899906842624): needs",
    "L(m=dgm.SMC(temperatures=10**13,schedule='linear'))": "SMC(temperatures=10000000000000): needs",
    "L(m=dgm.GibbsTempering(draws=10**13,warmup=10**9))": "GibbsTempering(draws=10000000000000): needs",
    "L(m=dgm.GibbsTempering(pilot_temperatures=10**13))": "GibbsTempering(pilot_temperatures=10000000000000): needs",
    "L(m=dgm.ContinuousTempering(draws=10**13))": "ContinuousTempering(draws=10000000000000): needs",
    "L(m=dgm.SimulatedTempering(temperatures=10**13))": "SimulatedTempering(temperatures=10000000000000): needs",
    "L(m=dgm.evidence.PathSampling(dgm.GibbsTempering(draws=10**13)))": "GibbsTempering(draws=10000000000000): needs",
    "L(m=dgm.ParallelTempering(draws=10**13))": "ParallelTempering(draws=10000000000000): needs",
    "L(m=dgm.ParallelTempering(temperatures=10**13))": "ParallelTempering(temperatures=10000000000000): needs",
    "L(m=dgm.ParallelTempering(pilot_temperatures=10**13))": "pilot_temperatures=10000000000000): needs",
    "dgm.AIS(schedule=None)": "AIS(schedule=None)",
    "dgm.bidirectional(tgt(),base(),None)": "exact_draws=None",
    "dgm.Evidence.load(None)": "path=None",
    "ev().expectation(None)": "f=None",
    "ev().expectation(lambda x: 1)": "int",
    "ev().save(None)": "path=None",
    # ----------------------------------------------------------------------------------------------------------- bases
    "base().energy('x')": "energy(x='x')",
    "base().energy(zeros(3))": "(3,)",
    "base().sample('a')": "shape='a'",
    "base().sample(-1)": "shape=-1",
    "base().sample(1.5)": "shape=1.5",
    "base().take(5)": "problems=5",
    "base().take(torch.tensor([7]))": "problems=tensor([7])",
    "dgm.Gaussian('a',1.)": "mean='a'",
    "dgm.Gaussian(None,1.)": "mean=None",
    "dgm.Gaussian(zeros(2),'1')": "sd='1'",
    "dgm.Gaussian(zeros(2),1.,log_zeta='a')": "log_zeta='a'",
    "dgm.Gaussian.standard(tgt(),device='cuda:99')": "device='cuda:99'",
    "dgm.Gaussian.fit(tgt(),rate='a')": "rate='a'",
    "dgm.Gaussian.fit(tgt(),seed='a',steps=5)": "seed='a'",
    "dgm.Gaussian.standard(tgt(),dtype=torch.int32)": "dtype=torch.int32",
    "dgm.Gaussian.fit(dgm.Target(lambda x: f(x-1),2),rate=1e10,steps=20)": "1e+10",
    "dgm.Gaussian.fit(dgm.Target(lambda x: f(x)*nan,2),steps=5)": "NaN",
    "dgm.Gaussian.fit(dgm.Target(lambda x: -f(x),2),steps=5)": "falls without end",
    "dgm.Gaussian.from_encoder(None,zeros(3))": "encoder=None",
    "dgm.Gaussian.from_encoder(vae().encoder,None)": "images=None",
    "dgm.Gaussian.from_encoder(vae().encoder,torch.full((2,8,8),nan))": "images=nan",
    "dgm.Gaussian.from_encoder(vae().encoder,zeros(3,7))": "(3, 7)",
    "dgm.Gaussian.laplace(tgt(),start='x')": "start='x'",
    "dgm.Gaussian.of_mixture(None,None,None)": "means=None",
    # ------------------------------------------------------------------------------------------------------ generators
    "generators.GAN(2,(8,8),output_range=5)": "output_range=5",
    "generators.GaussianVAE('2',(8,8))": "latent_dim='2'",
    "generators.GaussianVAE(2,(8,8),hidden=(-3,))": "hidden=(-3,)",
    "generators.GaussianVAE(2,(8,8),hidden=5)": "hidden=5",
    "generators.GaussianVAE(2,(8,8),sd='a')": "sd='a'",
    "generators.GaussianVAE(2,8)": "output_shape=8",
    "generators.GaussianVAE(2.5,(8,8))": "latent_dim=2.5",
    "generators.GaussianVAE(10**12,(8,8))": "GiB",
    "generators.IWAE(2,(8,8),hidden='x')": "hidden='x'",
    "generators.IWAE.from_npz(None)": "folder=None",
    "generators.LatentPosterior(vae().decoder,'x',N(3))": "images='x'",
    "generators.LatentPosterior(vae().decoder,None,N(3))": "images=None",
    "post().energy(zeros(2))": "(2,)",
    "post().take(torch.tensor([5]))": "problems=tensor([5])",
    "generators.LatentPosterior(vae().decoder,zeros(8,8),N(3),mask='x')": "mask='x'",
    "generators.LatentPosterior(vae().decoder,eight_bit,N(3))": "scale 8-bit pixels",
    "generators.LatentPosterior(lost().decoder,zeros(8,8),N(3))": "are NaN",
    "generators.LinearGaussian('a')": "weight='a'",
    "generators.LinearGaussian(zeros(3,2),sd='a')": "sd='a'",
    "generators.LotkaVolterra(initial='ab')": "initial='ab'",
    "generators.from_hub(None,'x',3)": "repository=None",
    "generators.from_module(net(),10**12)": "latent=1000000000000",
    "generators.from_module(net(),3,arguments=[1])": "arguments=[1]",
    "generators.from_module(net(),3,inputs=5)": "inputs=5",
    "generators.from_module(net(),3,noise='a')": "sd='a'",
    "generators.from_module(net(),3,weights=5)": "weights=5",
    "generators.from_module(net(),3.)": "latent=3.0",
    "generators.from_module(net(),None)": "latent=None",
    "generators.load('')": "''",
    "generators.load('/')": "'/'",
    "generators.save(vae(),'/proc/x')": "/proc/x",
    "generators.save(vae(),None)": "path=None",
    "generators.save(vae(),T+'/n',notes={'a':object()})": "notes",
    # -------------------------------------------------------------------------------------------------------- training
    "trainers.Augmentation()(zeros(3))": "(3,)",
    "trainers.Augmentation(noise='a')": "noise='a'",
    "digits().held_out('a')": "n='a'",
    "digits().held_out(1.5)": "n=1.5",
    "trainers.DigitsData(batch_size='a')": "batch_size='a'",
    "trainers.FolderData(None,(8,8))": "root=None",
    "trainers.FolderData(T,8)": "size=8",
    "trainers.ImageGrids(n='a')": "n='a'",
    "trainers.VAETraining(vae(),learning_rate='a')": "learning_rate='a'",
}


def made(call, names):
    """What a call returns; the only fault that check() finds is raised."""
    result = eval(call, names)
    if isinstance(result, Report):
        (finding,) = result.findings
        raise ModelError(finding.what)


def answer(call, names):
    """The message of a call's exception, which must be one line in the project's own words."""
    with pytest.raises(DgmInferError) as caught:
        made(call, names)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= LONGEST
    assert not JARGON.search(message)
    return message


@pytest.mark.parametrize("call", CALLS)
def test_a_mistyped_call_is_answered_in_one_line_that_names_it(call, names):
    assert CALLS[call] in answer(call, names)


@pytest.mark.parametrize(
    "call",
    [
        "len(5)",
        "torch.zeros('a')",
        "(_ for _ in ()).throw(dgm.errors.ArgumentError('two' + chr(10) + 'lines'))",
        "(_ for _ in ()).throw(dgm.errors.ArgumentError('word ' * 100))",
        "(_ for _ in ()).throw(dgm.errors.ArgumentError('N(x): failed to unpack it'))",
        "N(2)",
    ],
)
def test_control_other_answers_are_noticed(call, names):
    with pytest.raises((AssertionError, TypeError, pytest.fail.Exception)):
        answer(call, names)


@pytest.mark.slow
# a time limit that is lost in a callback of XLA's strikes again
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_values_of_a_wrong_kind_are_refused_in_one_line_by_every_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = public_calls(tmp_path)
    wrong = []
    with warnings.catch_warnings():
        # what a call says beside its answer is not looked at
        warnings.simplefilter("ignore")
        for name, call in calls.items():
            for argument in call.arguments():
                for kind in VALUES:
                    found = answer_to(call, argument, kind)
                    if found and kind not in TAKEN.get((name, argument), ()):
                        wrong.append(f"{name}({argument}={kind}): {found}")
    assert len(calls) > 120
    assert not wrong, f"{len(wrong)} bad answers:\n" + "\n".join(wrong[:40])


def test_control_other_answers_to_values_are_noticed():
    def takes_all(value):
        return value

    def ends_in_torch(value):
        return torch.zeros(value)

    def never_ends(value):
        while True:
            pass

    assert answer_to(takes_all, "value", "sparse") == "taken"
    assert answer_to(takes_all, "value", "double") is None
    assert "TypeError" in (answer_to(ends_in_torch, "value", "text") or "")
    assert answer_to(never_ends, "value", "text", seconds=1) == "no end"
    assert answer_to(dgm.StandardNormal, "dim", "text") is None
    assert "sparse" in NEVER
