"""The law of straight-line code: what evaluation mode runs is the program itself."""

import copy

import torch

FLOAT = torch.float64


def inputs_of(model, n=5, seed=3):
    return model.input_density.sample((n,), generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def assert_code_is_the_program(model, n=5):
    """The code of evaluation mode and the program itself: outputs, latents, factors, and their derivatives."""
    program, frozen = model.double().train(), copy.deepcopy(model).double().eval()
    assert frozen._rows._codes is not None
    u = inputs_of(model, n)
    for function in ("observed", "log_factor"):
        a, pull_a = torch.func.vjp(getattr(program, function), u)
        b, pull_b = torch.func.vjp(getattr(frozen, function), u)
        torch.testing.assert_close(a, b)
        w = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
        torch.testing.assert_close(pull_a(w)[0], pull_b(w)[0])
    torch.testing.assert_close(program.latents(u), frozen.latents(u), check_stride=False)
    torch.testing.assert_close(program.observed(u[0]), frozen.observed(u[0]))
    torch.testing.assert_close(torch.func.jacrev(program.observed)(u[0]), torch.func.jacrev(frozen.observed)(u[0]))
    return frozen._rows._codes
