"""Plain torch simulators as generative models: every random number they draw becomes an input."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as td

from ..arguments import function
from ..errors import ArgumentError, ModelError
from ..models import InputDensity
from .guards import check_structure, prepared
from .reparametrisation import reparametrise, reparametrise_density
from .tape import Tape, first_line
from .traced import TracedModel, TracedRun

Prior = InputDensity | td.Distribution | Mapping[str, td.Distribution] | Callable[[], Any] | None


def from_simulator(
    simulate: Callable[..., Tensor], prior: Prior, *args: Any, structure: str | None = None, **kwargs: Any
) -> "SimulatorModel":
    """A simulator written in plain torch as a generative model: ``x = simulate(z, *args)``, ``z`` drawn by ``prior``.

    What it draws with ``torch.randn``, ``rand``, ``normal``, their ``_like`` and in-place forms, and with ``rsample``
    or ``sample`` of ``torch.distributions`` becomes the model's input vector, of unit-variance coordinates where there
    is such a form (math 1.3). The simulator is written for one z, without batch dimensions, and runs vectorised over
    chains, in the dtype and on the device of its inputs. It is run a few times to be checked; torch itself is not
    changed, and its random state stays as it was.

    Args:
        simulate: returns one tensor of real numbers. A network belongs to ``args``, or is the simulator itself.
        prior: of the latents z: a distribution; a mapping from names to distributions, which gives z as a dict; an
            input density; a function that draws z (a tensor, or a dict) with torch; None for a simulator that draws
            everything itself and is called as ``simulate(*args)``.
        args: further arguments of the simulator. Tensors and modules become parts of the model.
        structure: None to find out whether the outputs are independent units given some of the inputs (stated in
            ``repr(model)``), which makes conditioning linear in the data; "dense" to leave it; "independent" to insist.
        kwargs: further arguments by name.

    Returns:
        a model for ``dgm_infer.condition``; its latents have the names of a mapping, or are called z.

    Raises:
        ArgumentError: an argument is of the wrong kind.
        ModelError: the simulator does not make the same draws in each run, draws discrete numbers or by rejection
            (except Gamma variables and what is made of them), hides random numbers, branches on random values, cuts the
            graph, or fails. The message quotes the line.
    """
    function("from_simulator", "simulate", simulate, "lambda z: z + torch.randn(3)")
    check_structure("from_simulator", structure)
    model = SimulatorModel(simulate, prior, args, kwargs)
    return prepared(model, structure, first_line(simulate))


class SimulatorModel(TracedModel):
    """A simulator as a model: see :func:`from_simulator`, which makes it."""

    def __init__(self, simulate: Callable[..., Tensor], prior: Prior, args: tuple, kwargs: dict[str, Any]):
        super().__init__(getattr(simulate, "__name__", type(simulate).__name__))
        self.simulator = simulate
        self.prior = prior
        self._check_prior()
        self._names = [*map(str, range(len(args))), *kwargs]
        self._n_args = len(args)
        for name, value in zip(self._names, [*args, *kwargs.values()], strict=True):
            if isinstance(value, Tensor):
                self.register_buffer(f"argument_{name}", value.detach(), persistent=False)
            else:
                setattr(self, f"argument_{name}", value)

    def run(self, tape: Tape) -> TracedRun:
        values = [getattr(self, f"argument_{name}") for name in self._names]
        n = self._n_args
        args, kwargs = values[:n], dict(zip(self._names[n:], values[n:], strict=True))
        if self.prior is None:
            return TracedRun(self.simulator(*args, **kwargs), {})
        tape.in_prior = True
        z = self._drawn(tape)
        tape.in_prior = False
        latents = dict(z) if isinstance(z, Mapping) else {"z": z}
        # a simulator may change what it is given
        given = {name: _own(value) for name, value in latents.items()} if isinstance(z, Mapping) else _own(z)
        return TracedRun(self.simulator(given, *args, **kwargs), latents)

    def latents(self, u):
        return {"u": u} if self.prior is None else super().latents(u)

    def _drawn(self, tape: Tape) -> Any:
        prior: Any = self.prior
        if isinstance(prior, InputDensity):
            return torch.cat([tape.draw(form, "the prior") for form in reparametrise_density(prior)])
        if isinstance(prior, td.Distribution):
            return tape.draw(reparametrise(prior), "the prior")
        if isinstance(prior, Mapping):
            return {name: tape.draw(reparametrise(d), f"the prior of {name}") for name, d in prior.items()}
        z = prior()
        if not isinstance(z, Tensor | Mapping):
            raise ModelError(f"the prior of {self.name} returns a {type(z).__name__}: expected a tensor or a dict")
        return z

    def _check_prior(self) -> None:
        prior = self.prior
        if prior is None or isinstance(prior, InputDensity | td.Distribution):
            return
        if isinstance(prior, Mapping):
            wrong = [name for name, d in prior.items() if not isinstance(d, td.Distribution)]
            if wrong:
                raise ArgumentError(f"from_simulator(prior): {wrong[0]!r} is not a torch distribution")
            return
        if isinstance(prior, nn.Module) or not callable(prior) or isinstance(prior, type):
            raise ArgumentError(
                f"from_simulator(prior={type(prior).__name__}): must be a distribution, a dict of them, an input "
                "density, a function that draws, or None"
            )


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
