"""Modules with a prior and a decoder: which distributions of outputs are conditioned on, and what is said of others."""

import pytest
import torch
from torch import distributions, nn

import dgm_infer as dgm
import generators
from dgm_infer.errors import ModelError

Y = torch.tensor([0.5, 1.0, 1.0, 0.2, 0.1, 0.3])


class Decoder(nn.Module):
    def __init__(self, law):
        super().__init__()
        self.mean, self.law = nn.Linear(2, 6), law

    def forward(self, z):
        return self.law(self.mean(z))


class Decoding(nn.Module):
    def __init__(self, law):
        super().__init__()
        torch.manual_seed(0)
        self.prior, self.decoder = dgm.StandardNormal(2), Decoder(law)


def laplace(mean):
    return distributions.Independent(distributions.Laplace(mean, 0.5), 1)


def test_a_decoder_of_another_law_is_named_with_what_takes_it():
    model = Decoding(laplace).eval()
    for call in (dgm.condition, lambda model, y: dgm.check(model, y).findings[0].what):
        try:
            said = call(model, Y)
        except ModelError as error:
            said = str(error)
        assert "the decoder of Decoding gives a Laplace" in said
    # what is advised works
    draws = dgm.sample(
        generators.LatentPosterior(model.decoder, Y, model.prior), warmup=50, draws=20, seed=1, progress=False
    )
    assert draws.latents["z"].shape[-1] == 2
    assert dgm.log_evidence((model, Y), method=dgm.Elbo(), seed=1, progress=False).log_z.isfinite()


def test_a_decoder_of_pixels_that_are_no_event_is_named_by_every_call():
    model = Decoding(lambda mean: distributions.Normal(mean, 0.5)).eval()
    for call in (dgm.condition, lambda model, y: dgm.log_evidence((model, y))):
        with pytest.raises(ModelError, match="make the pixels one event with"):
            call(model, Y)
    # the control
    fibre = dgm.condition(
        Decoding(lambda mean: distributions.Independent(distributions.Normal(mean, 0.5), 1)).eval(), Y
    )
    assert fibre.dim == 8
