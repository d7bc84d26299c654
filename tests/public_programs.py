"""Programs as Pyro's users write them, with small data: regressions, hierarchies, mixtures, series, survival."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit")
    import pyro
    import pyro.distributions
    import pyro.nn
    from pyro import poutine
    from pyro.infer import config_enumerate
    from pyro.infer.reparam import LocScaleReparam

# Pyro's distributions are torch's with more methods, which their types do not have
dist: Any = pyro.distributions
PyroModule: Any = pyro.nn.PyroModule
PyroSample: Any = pyro.nn.PyroSample
T = torch.tensor


class Example(NamedTuple):
    """A program and its arguments."""

    program: Callable[..., Any]
    args: tuple = ()
    has_coordinates_of_pyro: bool = True
    """Whether every latent variable has Pyro's own coordinate: an angle has two here."""
    is_of_pyro: bool = True
    """Whether Pyro's own inference takes it: not what is continuous and depends on an indicator."""
    heavy: tuple[str, ...] = ()
    """Variables without a posterior variance."""
    is_sampled_softly: bool = False
    """Whether its likelihood is sampled, not its fibre, which takes minutes where noise has heavy tails or modes."""


# ------------------------------------------------------------------------------------------------ hierarchies
SCHOOLS = T([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]), T([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools_centred(y, sigma):
    mu = pyro.sample("mu", dist.Normal(0, 5))
    tau = pyro.sample("tau", dist.LogNormal(1.0, 0.5))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def eight_schools_non_centred(y, sigma):
    mu = pyro.sample("mu", dist.Normal(0, 5))
    tau = pyro.sample("tau", dist.HalfCauchy(scale=5))
    with pyro.plate("schools", 8):
        eta = pyro.sample("eta", dist.Normal(0, 1))
        theta = pyro.deterministic("theta", mu + tau * eta)
        pyro.sample("obs", dist.Normal(theta, sigma), obs=y)


eight_schools_reparametrised = poutine.reparam(eight_schools_centred, config={"theta": LocScaleReparam(0.0)})


def pumps(failures, hours):
    alpha = pyro.sample("alpha", dist.Exponential(1.0))
    beta = pyro.sample("beta", dist.Gamma(0.1, 1.0))
    with pyro.plate("pumps", len(hours)):
        rate = pyro.sample("rate", dist.Gamma(alpha, beta))
        pyro.sample("failures", dist.Poisson(rate * hours), obs=failures)


def baseball(at_bats, hits):
    m = pyro.sample("m", dist.Uniform(0, 1))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("players", len(hits)):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
        pyro.sample("hits", dist.Binomial(at_bats, phi), obs=hits)


def radon(county, floor, log_radon):
    mu_a = pyro.sample("mu_a", dist.Normal(0.0, 2.0))
    sigma_a = pyro.sample("sigma_a", dist.HalfNormal(1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("counties", 3):
        a = pyro.sample("a", dist.Normal(mu_a, sigma_a))
    with pyro.plate("houses", len(floor)):
        pyro.sample("y", dist.Normal(a[county] + b * floor, sigma), obs=log_radon)


def varying_slopes(group, x, y):
    scales = pyro.sample("scales", dist.HalfNormal(torch.ones(2)).to_event(1))
    factor = pyro.sample("factor", dist.LKJCholesky(2, 2.0))
    with pyro.plate("groups", 3):
        raw = pyro.sample("raw", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    effects = pyro.deterministic("effects", raw @ (scales.unsqueeze(-1) * factor).T)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(effects[group, 0] + effects[group, 1] * x, 0.5), obs=y)


def rats(days, weights):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    spread = pyro.sample("spread", dist.Gamma(2.0, 4.0))
    with pyro.plate("rats", 3, dim=-2):
        level = pyro.sample("level", dist.Normal(mean, spread))
        with pyro.plate("days", 4, dim=-1):
            pyro.sample("weight", dist.Normal(level + slope * days, 0.3), obs=weights)


def seeds(n, germinated, extract):
    alpha, beta = (pyro.sample(name, dist.Normal(0.0, 2.0)) for name in ("alpha", "beta"))
    sigma = pyro.sample("sigma", dist.HalfCauchy(0.5))
    with pyro.plate("plates", len(n)):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        logits = alpha + beta * extract + sigma * b
        pyro.sample("r", dist.Binomial(n, logits=logits), obs=germinated)


def items(answers):
    with pyro.plate("questions", 3, dim=-1):
        difficulty = pyro.sample("difficulty", dist.Normal(0.0, 1.0))
        discrimination = pyro.sample("discrimination", dist.LogNormal(0.0, 0.3))
    with pyro.plate("students", 4, dim=-2):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        with pyro.plate("each", 3, dim=-1):
            logits = discrimination * (ability - difficulty)
            pyro.sample("answers", dist.Bernoulli(logits=logits), obs=answers)


def bradley_terry(first, second, first_won):
    skill = pyro.sample("skill", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("games", len(first)):
        pyro.sample("won", dist.Bernoulli(logits=skill[first] - skill[second]), obs=first_won)


def funnel(y):
    v = pyro.sample("v", dist.Normal(0.0, 1.5))
    with pyro.plate("dimensions", 3):
        x = pyro.sample("x", dist.Normal(0.0, (v / 2).exp()))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


# ------------------------------------------------------------------------------------------------ regressions
X = torch.linspace(-1.5, 1.5, 8)
LINE = T([-1.2, -1.1, -0.4, -0.6, 0.5, 0.4, 1.3, 1.1])
OUTLIERS = T([-1.2, -1.1, -0.4, 4.6, 0.5, 0.4, 1.3, 1.1])
YES = T([0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
COUNTS = T([0.0, 1.0, 1.0, 0.0, 2.0, 4.0, 3.0, 7.0])
POSITIVE = T([0.4, 0.3, 0.9, 0.8, 1.4, 1.1, 2.9, 2.2])
SHARES = T([0.2, 0.15, 0.3, 0.35, 0.5, 0.45, 0.8, 0.7])


def linear(x, y):
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(intercept + slope * x, sigma), obs=y)


class BayesianRegression(PyroModule):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = PyroModule[nn.Linear](n_in, n_out)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([n_out, n_in]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 2.0).expand([n_out]).to_event(1))

    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 5.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


class SmallNetwork(PyroModule):
    def __init__(self):
        super().__init__()
        self.hidden = PyroModule[nn.Linear](1, 2)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 1]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 0.5).expand([2]).to_event(1))
        self.output = PyroModule[nn.Linear](2, 1, bias=False)
        self.output.weight = PyroSample(dist.LogNormal(0.0, 0.5).expand([1, 2]).to_event(2))

    def forward(self, x, y=None):
        mean = self.output(torch.tanh(self.hidden(x))).squeeze(-1)
        pyro.deterministic("prediction", mean)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def logistic(x, y):
    coefficients = pyro.sample("coefficients", dist.Normal(torch.zeros(2), torch.ones(2) * 2).to_event(1))
    logits = coefficients[0] + coefficients[1] * x
    pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def probit(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(probs=dist.Normal(0.0, 1.0).cdf(slope * x)), obs=y)


def poisson(x, counts):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("counts", dist.Poisson(torch.exp(a + b * x)), obs=counts)


def negative_binomial(x, counts):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.5))
    rate = concentration / torch.exp(a + b * x)
    with pyro.plate("data", len(x)):
        pyro.sample("counts", dist.GammaPoisson(concentration, rate), obs=counts)


def zero_inflated(counts):
    gate = pyro.sample("gate", dist.Beta(1.0, 1.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(counts)):
        pyro.sample("counts", dist.ZeroInflatedPoisson(rate, gate=gate), obs=counts)


def robust(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.StudentT(nu + 1, slope * x, scale), obs=y)


def lasso(X, y):
    b = pyro.sample("b", dist.Laplace(torch.zeros(3), 0.5).to_event(1))
    sigma = pyro.sample("sigma", dist.InverseGamma(2.0, 1.0))
    pyro.sample("y", dist.Normal(X @ b, sigma).to_event(1), obs=y)


def horseshoe(X, y):
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    with pyro.plate("features", 3):
        lam = pyro.sample("lam", dist.HalfCauchy(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    b = pyro.deterministic("b", tau * lam * z)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ b, 0.4), obs=y)


def ordered_logit(x, rating):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    base = dist.Normal(torch.tensor([-1.0, 0.0, 1.0]), 1.0).to_event(1)
    cuts = pyro.sample("cuts", dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()]))
    with pyro.plate("data", len(x)):
        pyro.sample("rating", dist.OrderedLogistic(slope * x, cuts), obs=rating)


def softmax(x, kind):
    with pyro.plate("kinds", 2):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
    scores = a + b * x.unsqueeze(-1)
    logits = torch.cat([scores, torch.zeros(len(x), 1)], -1)
    with pyro.plate("data", len(x)):
        pyro.sample("kind", dist.Categorical(logits=logits), obs=kind)


def beta_regression(x, shares):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    precision = pyro.sample("precision", dist.Gamma(3.0, 0.2))
    mean = torch.sigmoid(slope * x)
    with pyro.plate("data", len(x)):
        pyro.sample("share", dist.Beta(mean * precision, (1 - mean) * precision), obs=shares)


def gamma_regression(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.Exponential(0.2))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Gamma(shape, shape / torch.exp(a + b * x)), obs=y)


def heteroscedastic(x, y):
    slope, level, growth = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("slope", "level", "growth"))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * x, torch.exp(level - 1 + growth * x)), obs=y)


def quantile(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.AsymmetricLaplace(slope * x, scale, 0.5), obs=y)


def polynomial(x, y):
    with pyro.plate("terms", 3):
        c = pyro.sample("c", dist.Normal(0.0, 1.0))
    features = torch.stack([x**k for k in range(3)], -1)
    pyro.sample("y", dist.MultivariateNormal(features @ c, 0.2 * torch.eye(len(x))), obs=y)


def errors_in_variables(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        true_x = pyro.sample("true_x", dist.Normal(0.0, 1.5))
        pyro.sample("x", dist.Normal(true_x, 0.4), obs=x)
        pyro.sample("y", dist.Normal(slope * true_x, 0.4), obs=y)


def two_predictors(y):
    """Of Richard McElreath's terrain example: an interaction."""
    a, b_a, b_r, b_ar = (pyro.sample(f"b_{i}", dist.Normal(0.0, 1.0)) for i in range(4))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 4.0))
    africa = T([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    with pyro.plate("data", 8):
        mean = a + b_a * africa + b_r * X + b_ar * africa * X
        pyro.sample("y", dist.Normal(mean, sigma), obs=y)


DESIGN = T([[1.0, 0.2, -0.5], [0.3, -1.0, 0.8], [-0.7, 0.5, 1.0], [0.1, 1.2, -0.3], [-1.1, -0.4, 0.2], [0.6, 0.9, 1.1]])
RESPONSE = T([1.3, 0.2, -1.1, 0.4, -1.2, 0.7])


# ------------------------------------------------------------------------------------------------ mixtures, classes
CLUSTERS = T([-2.1, -1.8, -1.6, 0.9, 1.2, 1.4])


@config_enumerate
def gaussian_mixture(data):
    weights = pyro.sample("weights", dist.Dirichlet(2.0 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    low = pyro.sample("low", dist.Normal(-2.0, 1.0))
    high = pyro.sample("high", dist.Normal(2.0, 1.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(torch.stack([low, high])[assignment], scale), obs=data)


def marginal_mixture(data):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    base = dist.Normal(torch.tensor([-1.5, 1.5]), 1.0).to_event(1)
    means = pyro.sample("means", dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()]))
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, 0.5))
    with pyro.plate("data", len(data)):
        pyro.sample("obs", mixture, obs=data)


def sequential_mixture(data):
    with pyro.plate("components", 2):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor([2.0, 20.0]), torch.tensor([2.0, 2.0])))
    weight = pyro.sample("weight", dist.Beta(2.0, 2.0))
    with pyro.plate("data", len(data)):
        k = pyro.sample("k", dist.Bernoulli(weight), infer={"enumerate": "sequential"})
        pyro.sample("n", dist.Poisson(rate[k.long()]), obs=data)


def hidden_markov(data):
    with pyro.plate("states", 2):
        transition = pyro.sample("transition", dist.Dirichlet(torch.tensor([[4.0, 1.0], [1.0, 4.0]])))
    means = pyro.sample("means", dist.Normal(torch.tensor([-1.5, 1.0]), 0.5).to_event(1))
    x = 0
    for t in pyro.markov(range(len(data))):
        x = pyro.sample(f"x_{t}", dist.Categorical(transition[x]), infer={"enumerate": "parallel"})
        pyro.sample(f"y_{t}", dist.Normal(means[x], 0.6), obs=data[t])


def discrete_hmm(words):
    stay = pyro.sample("stay", dist.Beta(4.0, 2.0))
    with pyro.plate("states", 2):
        emission = pyro.sample("emission", dist.Dirichlet(torch.tensor([[3.0, 1.0, 1.0], [1.0, 1.0, 3.0]])))
    transition = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([1 - stay, stay])])
    logits = dist.DiscreteHMM(torch.zeros(2), transition.log(), dist.Categorical(emission))
    pyro.sample("words", logits, obs=words)


def topics(documents):
    with pyro.plate("topics", 2):
        topic_words = pyro.sample(
            "topic_words", dist.Dirichlet(torch.tensor([[3.0, 3.0, 1.0, 1.0], [1.0, 1.0, 3.0, 3.0]]))
        )
    with pyro.plate("documents", documents.shape[1]):
        doc_topics = pyro.sample("doc_topics", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("words", documents.shape[0]):
            topic = pyro.sample("word_topics", dist.Categorical(doc_topics), infer={"enumerate": "parallel"})
            pyro.sample("doc_words", dist.Categorical(topic_words[topic]), obs=documents)


@config_enumerate
def latent_class(answers):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    with pyro.plate("items", 3):
        low = pyro.sample("low", dist.Beta(1.0, 3.0))
        high = pyro.sample("high", dist.Beta(3.0, 1.0))
    with pyro.plate("people", len(answers)):
        k = pyro.sample("k", dist.Bernoulli(share))
        probabilities = torch.where(k.unsqueeze(-1) == 1, high, low)
        pyro.sample("answers", dist.Bernoulli(probabilities).to_event(1), obs=answers)


@config_enumerate
def annotators(labels):
    prevalence = pyro.sample("prevalence", dist.Beta(1.0, 1.0))
    with pyro.plate("annotators", 3, dim=-1):
        accuracy = pyro.sample("accuracy", dist.Beta(4.0, 2.0))
    with pyro.plate("items", 4, dim=-2):
        truth = pyro.sample("truth", dist.Bernoulli(prevalence))
        with pyro.plate("labels", 3, dim=-1):
            said = torch.where(truth == 1, accuracy, 1 - accuracy)
            pyro.sample("label", dist.Bernoulli(said), obs=labels)


@config_enumerate
def occupancy(detections, visits):
    psi = pyro.sample("psi", dist.Beta(1.0, 1.0))
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("sites", len(detections)):
        z = pyro.sample("z", dist.Bernoulli(psi))
        pyro.sample("y", dist.Binomial(visits, z * p), obs=detections)


@config_enumerate
def variable_selection(X, y):
    with pyro.plate("features", 3):
        on = pyro.sample("on", dist.Bernoulli(0.5))
        b = pyro.sample("b", dist.Normal(0.0, torch.where(on == 1, torch.tensor(1.5), torch.tensor(0.05))))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ b, 0.5), obs=y)


def spike_and_slab(y):
    """The example of a mixture as a latent variable, from an indicator."""
    on = pyro.sample("on", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
    b = pyro.sample("b", dist.Normal(0.0, torch.where(on == 1, torch.tensor(2.0), torch.tensor(0.05))))
    pyro.sample("y", dist.Normal(b, 0.5), obs=y)


def mixture_prior(y):
    weights, scales = torch.tensor([0.7, 0.3]), torch.tensor([0.05, 2.0])
    b = pyro.sample("b", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(torch.zeros(2), scales)))
    pyro.sample("y", dist.Normal(b, 0.5), obs=y)


@config_enumerate
def change_point(counts):
    early, late = (pyro.sample(name, dist.Exponential(0.3)) for name in ("early", "late"))
    tau = pyro.sample("tau", dist.Categorical(torch.ones(len(counts))))
    years = torch.arange(len(counts))
    rate = torch.where(years < tau.unsqueeze(-1), early, late)
    pyro.sample("counts", dist.Poisson(rate).to_event(1), obs=counts)


# ------------------------------------------------------------------------------------------------ counts and shares
def coin(flips):
    fairness = pyro.sample("fairness", dist.Beta(10.0, 10.0))
    for i in range(len(flips)):
        pyro.sample(f"flip_{i}", dist.Bernoulli(fairness), obs=flips[i])


def two_variants(n, clicks):
    with pyro.plate("variants", 2):
        rate = pyro.sample("rate", dist.Beta(1.0, 1.0))
        pyro.sample("clicks", dist.Binomial(n, rate), obs=clicks)
    pyro.deterministic("lift", rate[1] - rate[0])


def dirichlet_multinomial(counts):
    p = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 2.0, 1.0])))
    pyro.sample("counts", dist.Multinomial(int(counts.sum()), p), obs=counts)


def dirichlet_data(shares):
    a = pyro.sample("a", dist.Exponential(1.0))
    pyro.sample("shares", dist.Dirichlet(a * torch.ones(3)), obs=shares)


def compositions(shares):
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.2))
    centre = pyro.sample("centre", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("samples", len(shares)):
        pyro.sample("shares", dist.Dirichlet(concentration * centre), obs=shares)


def overdispersed(counts):
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.5).expand([3]).to_event(1))
    with pyro.plate("rows", len(counts)):
        pyro.sample("counts", dist.DirichletMultinomial(concentration, total_count=5.0), obs=counts)


def waiting_times(y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Exponential(rate), obs=y)


def tanks(serials):
    n = pyro.sample("n", dist.Pareto(10.0, 1.0))
    with pyro.plate("data", len(serials)):
        pyro.sample("serial", dist.Uniform(0.0, n), obs=serials)


def lost_letters(heard):
    p = pyro.sample("p", dist.Uniform(0.0, 1.0))
    with pyro.plate("data", len(heard)):
        pyro.sample("heard", dist.Geometric(p), obs=heard)


# ------------------------------------------------------------------------------------------------ angles, matrices
def wind(angles):
    loc = pyro.sample("loc", dist.VonMises(0.0, 0.5))
    concentration = pyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with pyro.plate("data", len(angles)):
        pyro.sample("angle", dist.VonMises(loc, concentration), obs=angles)


def heading(y):
    a = pyro.sample("a", dist.VonMises(0.0, 2.0))
    pyro.sample("y", dist.Normal(a.cos(), 0.5), obs=y)


def correlations(pairs):
    factor = pyro.sample("factor", dist.LKJCholesky(2, 1.5))
    scales = pyro.sample("scales", dist.HalfCauchy(torch.ones(2)).to_event(1))
    with pyro.plate("data", len(pairs)):
        scale_tril = torch.diag_embed(scales) @ factor
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), scale_tril=scale_tril), obs=pairs)


def observed_correlation(matrix):
    eta = pyro.sample("eta", dist.Gamma(2.0, 1.0))
    pyro.sample("factor", dist.LKJCholesky(3, eta), obs=torch.linalg.cholesky(matrix))


def scatter(matrix):
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    pyro.sample("scatter", dist.Wishart(torch.tensor(5.0), scale * torch.eye(2)), obs=matrix)


def factors(data):
    with pyro.plate("loadings", 3):
        w = pyro.sample("w", dist.LogNormal(0.0, 0.5))
    covariance = w.unsqueeze(-1) * w + 0.3 * torch.eye(3)
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(3), covariance), obs=data)


def low_rank(data):
    psi = pyro.sample("psi", dist.InverseGamma(3.0, 1.0))
    w = pyro.sample("w", dist.HalfNormal(torch.ones(2)).to_event(1))
    noise = psi * torch.ones(2)
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.LowRankMultivariateNormal(torch.zeros(2), w.unsqueeze(-1), noise), obs=data)


# ------------------------------------------------------------------------------------------------ survival, missing
TIMES, CENSORED = T([0.4, 1.0, 2.0, 0.7, 2.0, 1.3]), T([False, False, True, False, True, False])


def censored_exponential(times, censored):
    rate = pyro.sample("rate", dist.Gamma(2.0, 2.0))
    with pyro.plate("seen", int((~censored).sum())):
        pyro.sample("time", dist.Exponential(rate), obs=times[~censored])
    with pyro.plate("lost", int(censored.sum())):
        pyro.sample("survived", dist.Bernoulli(torch.exp(-rate * times[censored])), obs=torch.ones(2))


def weibull_survival(times, censored):
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    hazard = torch.log(shape / scale) + (shape - 1) * torch.log(times / scale)
    pyro.factor("survival", (torch.where(censored, torch.zeros(()), hazard) - (times / scale) ** shape).sum())


def masked_censoring(times, censored):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(times)):
        with poutine.mask(mask=~censored):
            pyro.sample("time", dist.LogNormal(loc, scale), obs=times)
        with poutine.mask(mask=censored):
            beyond = 1 - dist.LogNormal(loc, scale).cdf(times)
            pyro.sample("beyond", dist.Bernoulli(beyond), obs=torch.ones(len(times)))


def tobit(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(x)):
        latent = pyro.sample("latent", dist.Normal(slope * x, 1.0))
        pyro.sample("y", dist.Normal(latent.clamp_min(0.0), 0.2), obs=y)


def rounded(readings):
    """Readings to the nearest integer: the likelihood is the mass of the interval."""
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    noise = dist.Normal(mean, scale)
    pyro.factor("interval", (noise.cdf(readings + 0.5) - noise.cdf(readings - 0.5)).log().sum())


def truncated(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)
        pyro.factor("above", -torch.log1p(-dist.Normal(mean, scale).cdf(torch.zeros(()))))


def missing_outcomes(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    present = ~y.isnan()
    with pyro.plate("data", len(x)), poutine.mask(mask=present):
        pyro.sample("y", dist.Normal(slope * x, sigma), obs=torch.where(present, y, 0.0))


def missing_covariates(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    present = ~x.isnan()
    with pyro.plate("missing", int((~present).sum())):
        imputed = pyro.sample("imputed", dist.Normal(0.0, 1.0))
    full = torch.where(present, x, 0.0).masked_scatter(~present, imputed)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(slope * full, 0.5), obs=y)


# ------------------------------------------------------------------------------------------------ time and space
SERIES = T([0.2, 0.6, 0.5, 1.1, 0.8, 1.4, 1.0, 0.7])


def autoregression(y):
    phi = pyro.sample("phi", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    previous = y[0]
    for t in range(1, len(y)):
        previous = pyro.sample(f"y_{t}", dist.Normal(phi * previous, sigma), obs=y[t])


def local_level(y):
    step = pyro.sample("step", dist.HalfNormal(0.5))
    level = torch.zeros(())
    for t in pyro.markov(range(len(y))):
        level = pyro.sample(f"level_{t}", dist.Normal(level, step))
        pyro.sample(f"y_{t}", dist.Normal(level, 0.3), obs=y[t])


def random_walk(y):
    drift = pyro.sample("drift", dist.Normal(0.0, 1.0))
    with pyro.plate("time", len(y)):
        steps = pyro.sample("steps", dist.Normal(drift, 0.3))
    path = pyro.deterministic("path", steps.cumsum(-1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(path, 0.3), obs=y)


def stochastic_volatility(returns):
    sigma = pyro.sample("sigma", dist.Exponential(5.0))
    with pyro.plate("time", len(returns)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        volatility = (sigma * z.cumsum(-1) - 1).exp()
        pyro.sample("returns", dist.Normal(0.0, volatility), obs=returns)


def gaussian_hmm(y):
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    one, zero = torch.ones(1, 1), torch.zeros(1)
    hmm = dist.GaussianHMM(
        dist.MultivariateNormal(zero, one), one, dist.MultivariateNormal(zero, 0.1 * one), one,
        dist.MultivariateNormal(zero, noise**2 * one), duration=len(y),
    )  # fmt: skip
    pyro.sample("y", hmm, obs=y.unsqueeze(-1))


def gaussian_process(x, y):
    length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    squares = ((x.unsqueeze(-1) - x) / length) ** 2
    covariance = torch.exp(-0.5 * squares) + (noise**2 + 1e-4) * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def cox_process(counts):
    amplitude = pyro.sample("amplitude", dist.HalfNormal(1.0))
    n = len(counts)
    squares = (torch.arange(n).unsqueeze(-1) - torch.arange(n)) ** 2
    factor = torch.linalg.cholesky(torch.exp(-squares / 8.0) + 1e-3 * torch.eye(n))
    z = pyro.sample("z", dist.Normal(torch.zeros(n), 1.0).to_event(1))
    intensity = pyro.deterministic("intensity", torch.exp(amplitude * (factor @ z)))
    with pyro.plate("cells", n):
        pyro.sample("counts", dist.Poisson(intensity), obs=counts)


def epidemic(cases):
    """An ODE by Euler steps, in a loop over time."""
    beta = pyro.sample("beta", dist.LogNormal(0.5, 0.5))
    gamma = pyro.sample("gamma", dist.LogNormal(-0.5, 0.5))
    t, step = torch.tensor(0.0), torch.tensor(0.25)
    s, i = torch.tensor(0.95), torch.tensor(0.05)
    infected = []
    while t < 4:
        new, recovered = beta * s * i, gamma * i
        s, i = s - step * new, i + step * (new - recovered)
        t = t + step
        if t % 1 == 0:
            infected.append(i)
    with pyro.plate("days", 4):
        pyro.sample("cases", dist.LogNormal(torch.stack(infected).log(), 0.2), obs=cases)


def pharmacokinetics(times, concentrations):
    absorption = pyro.sample("absorption", dist.LogNormal(0.5, 0.3))
    elimination = pyro.sample("elimination", dist.LogNormal(-1.5, 0.3))
    curve = absorption / (absorption - elimination) * (torch.exp(-elimination * times) - torch.exp(-absorption * times))
    with pyro.plate("data", len(times)):
        pyro.sample("c", dist.LogNormal(curve.log(), 0.2), obs=concentrations)


def dugongs(ages, lengths):
    alpha = pyro.sample("alpha", dist.Normal(2.5, 0.5))
    beta = pyro.sample("beta", dist.HalfNormal(1.0))
    gamma = pyro.sample("gamma", dist.Uniform(0.5, 1.0))
    with pyro.plate("data", len(ages)):
        pyro.sample("length", dist.Normal(alpha - beta * gamma**ages, 0.1), obs=lengths)


def annual_maxima(y):
    loc = pyro.sample("loc", dist.Normal(0.0, 5.0))
    scale = pyro.sample("scale", dist.Exponential(1.0))
    with pyro.plate("years", len(y)):
        pyro.sample("y", dist.Gumbel(loc, scale), obs=y)


def exchange(y):
    """Torch's own random numbers have no place in a density."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)
    pyro.factor("penalty", -0.5 * mean.abs())


EXAMPLES: dict[str, Example] = {
    "eight schools, centred": Example(eight_schools_centred, SCHOOLS),
    "eight schools, non-centred": Example(eight_schools_non_centred, SCHOOLS),
    "eight schools, reparametrised": Example(eight_schools_reparametrised, SCHOOLS),
    "pumps": Example(pumps, (T([5.0, 1.0, 5.0, 14.0, 3.0]), T([94.3, 15.7, 62.9, 126.0, 5.24]))),
    "baseball": Example(baseball, (T([45.0, 45.0, 45.0, 45.0]), T([18.0, 14.0, 11.0, 7.0]))),
    "radon": Example(
        radon,
        (
            T([0, 0, 0, 1, 1, 1, 2, 2]),
            T([0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
            T([1.2, 0.3, 0.9, 0.1, 0.8, 1.1, 1.0, 1.9]),
        ),
    ),
    "varying slopes": Example(varying_slopes, (T([0, 0, 0, 1, 1, 1, 2, 2]), X, LINE)),
    "rats": Example(
        rats, (T([-1.5, -0.5, 0.5, 1.5]), T([[-1.4, -0.6, 0.4, 1.2], [-0.9, 0.1, 0.9, 2.1], [-1.9, -1.0, 0.1, 0.8]]))
    ),
    "seeds": Example(seeds, (T([39.0, 62.0, 81.0, 51.0]), T([10.0, 23.0, 33.0, 36.0]), T([0.0, 0.0, 1.0, 1.0]))),
    "item response": Example(items, (T([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),)),
    "Bradley-Terry": Example(
        bradley_terry, (T([0, 0, 1, 2, 3, 0]), T([1, 2, 2, 3, 1, 3]), T([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    ),
    "funnel": Example(funnel, (T([0.5, -1.0, 2.0]),)),
    "linear regression": Example(linear, (X, LINE)),
    "regression as a module": Example(BayesianRegression(1, 1), (X.unsqueeze(-1), LINE)),
    "Bayesian network": Example(SmallNetwork(), (X.unsqueeze(-1), LINE)),
    "logistic regression": Example(logistic, (X, YES)),
    "probit regression": Example(probit, (X, YES)),
    "Poisson regression": Example(poisson, (X, COUNTS)),
    "negative binomial regression": Example(negative_binomial, (X, COUNTS)),
    "zero-inflated Poisson": Example(zero_inflated, (T([0.0, 0.0, 3.0, 2.0, 0.0, 4.0]),)),
    "robust regression": Example(robust, (X, OUTLIERS), is_sampled_softly=True),
    "lasso": Example(lasso, (DESIGN, RESPONSE)),
    "horseshoe": Example(horseshoe, (DESIGN, RESPONSE), heavy=("tau", "lam")),
    "ordered logit": Example(ordered_logit, (X, T([0, 0, 1, 1, 2, 1, 3, 3]))),
    "softmax regression": Example(softmax, (X, T([0, 0, 1, 0, 2, 1, 2, 2]))),
    "Beta regression": Example(beta_regression, (X, SHARES)),
    "Gamma regression": Example(gamma_regression, (X, POSITIVE)),
    "heteroscedastic regression": Example(heteroscedastic, (X, LINE)),
    "quantile regression": Example(quantile, (X, LINE), is_sampled_softly=True),
    "polynomial regression": Example(polynomial, (X, LINE)),
    "errors in variables": Example(errors_in_variables, (X[:4], LINE[:4])),
    "interaction": Example(two_predictors, (LINE,)),
    "Gaussian mixture, enumerated": Example(gaussian_mixture, (CLUSTERS,)),
    "Gaussian mixture, marginal": Example(marginal_mixture, (CLUSTERS,), is_sampled_softly=True),
    "Poisson mixture, sequential": Example(sequential_mixture, (T([1.0, 0.0, 9.0]),)),
    "hidden Markov model": Example(hidden_markov, (CLUSTERS,)),
    "discrete hidden Markov model": Example(discrete_hmm, (T([0, 0, 1, 2, 2]),)),
    "topics": Example(topics, (T([[0, 1], [0, 1], [2, 3], [1, 1], [3, 2]]),)),
    "latent classes": Example(latent_class, (T([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),)),
    "annotators": Example(annotators, (T([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),)),
    "occupancy": Example(occupancy, (T([0.0, 2.0, 0.0, 3.0, 1.0]), 4)),
    "variable selection": Example(variable_selection, (DESIGN, RESPONSE), is_of_pyro=False),
    "spike and slab": Example(spike_and_slab, (T(1.0),), is_of_pyro=False),
    "mixture as a prior": Example(mixture_prior, (T(1.0),), is_of_pyro=False),
    "change point": Example(change_point, (T([4.0, 5.0, 3.0, 1.0, 0.0, 2.0]),)),
    "coin": Example(coin, (T([1.0, 1.0, 0.0, 1.0]),)),
    "two variants": Example(two_variants, (T([50.0, 60.0]), T([5.0, 12.0]))),
    "Multinomial": Example(dirichlet_multinomial, (T([1.0, 0.0, 3.0]),)),
    "Dirichlet data": Example(dirichlet_data, (T([0.2, 0.3, 0.5]),)),
    "compositions": Example(compositions, (T([[0.2, 0.3, 0.5], [0.1, 0.4, 0.5], [0.3, 0.3, 0.4]]),)),
    "Dirichlet-multinomial": Example(overdispersed, (T([[1.0, 0.0, 4.0], [2.0, 1.0, 2.0], [0.0, 0.0, 5.0]]),)),
    "waiting times": Example(waiting_times, (POSITIVE,)),
    "tanks": Example(tanks, (T([6.0, 2.0, 9.0]),)),
    "geometric": Example(lost_letters, (T([0.0, 2.0, 1.0]),)),
    "wind": Example(wind, (T([0.3, 0.8, -0.4, 1.1]),), has_coordinates_of_pyro=False, is_sampled_softly=True),
    "heading": Example(heading, (T(0.3),), has_coordinates_of_pyro=False, is_sampled_softly=True),
    "correlations": Example(correlations, (T([[0.9, 1.1], [-0.4, 0.2], [1.3, 0.6], [-1.0, -1.4]]),)),
    "observed correlation": Example(observed_correlation, (T([[1.0, 0.4, 0.1], [0.4, 1.0, -0.2], [0.1, -0.2, 1.0]]),)),
    "Wishart data": Example(scatter, (T([[3.0, 0.5], [0.5, 2.0]]),)),
    "factor analysis": Example(factors, (T([[0.9, 1.1, 0.5], [-0.4, 0.2, -0.3], [1.3, 0.6, 1.0]]),)),
    "low rank": Example(low_rank, (T([[0.9, 1.1], [-0.4, 0.2], [1.3, 0.6]]),)),
    "censored times": Example(censored_exponential, (TIMES, CENSORED)),
    "Weibull survival": Example(weibull_survival, (TIMES, CENSORED)),
    "censoring by masks": Example(masked_censoring, (TIMES, CENSORED)),
    "tobit": Example(tobit, (X[::2], T([0.0, 0.0, 0.6, 1.1])), is_sampled_softly=True),
    "rounded readings": Example(rounded, (T([0.0, 1.0, -1.0, 0.0]),)),
    "truncated data": Example(truncated, (T([1.0, 0.5, 2.0]),)),
    "missing outcomes": Example(missing_outcomes, (X, torch.where(YES == 1, LINE, math.nan))),
    "missing covariates": Example(missing_covariates, (torch.where(COUNTS == 1, math.nan, X), LINE)),
    "autoregression": Example(autoregression, (SERIES,)),
    "local level": Example(local_level, (SERIES[:5],)),
    "random walk": Example(random_walk, (SERIES[:5],)),
    "stochastic volatility": Example(stochastic_volatility, (LINE[:5],)),
    "Gaussian state space": Example(gaussian_hmm, (SERIES,)),
    "Gaussian process": Example(gaussian_process, (X, LINE)),
    "Cox process": Example(cox_process, (COUNTS[:5],)),
    "epidemic": Example(epidemic, (T([0.07, 0.12, 0.15, 0.14]),)),
    "pharmacokinetics": Example(pharmacokinetics, (T([0.5, 1.0, 2.0, 4.0, 8.0]), T([0.5, 0.7, 0.75, 0.5, 0.2]))),
    "dugongs": Example(dugongs, (T([1.0, 2.0, 5.0, 9.0, 15.0]), T([1.8, 1.9, 2.2, 2.4, 2.6]))),
    "annual maxima": Example(annual_maxima, (T([2.1, 3.4, 2.8, 4.9]),)),
    "a factor with a kink": Example(exchange, (T([0.5, -0.2, 1.0]),)),
}
