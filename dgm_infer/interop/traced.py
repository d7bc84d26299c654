"""Programs that draw random numbers, as functions of one input vector (math 1.1)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..models import DirectedModel, InputDensity, Logistic, StandardNormal
from .intercept import Interception
from .straight_line import Parts, Rows
from .tape import Draw, Tape


class TracedRun(NamedTuple):
    """Result of one run."""

    output: Tensor
    """The observed output, ``[*output_shape]``."""
    latents: dict[str, Tensor]


class UnitSplit(NamedTuple):
    """A Jacobian whose columns, in another order, are ``[A | blockdiag(D_1, ..., D_U)]``."""

    n_global: int
    inputs: int
    """Local inputs per unit."""
    outputs: int
    """Consecutive outputs per unit."""
    order: Tensor
    """The columns in that order, ``[D]``."""


class Mixed(InputDensity):
    """Independent coordinates, each N(0, 1) or logistic of unit variance.

    Args:
        is_logistic: one flag per coordinate.
    """

    def __init__(self, is_logistic: Tensor):
        self._flags = is_logistic
        self.dim = len(is_logistic)

    def coordinate_log_prob(self, u):
        normal, logistic = StandardNormal(self.dim), Logistic(self.dim)
        return torch.where(self._flags.to(u.device), logistic.coordinate_log_prob(u), normal.coordinate_log_prob(u))

    def sample(self, shape=(), *, generator=None, dtype=None, device=None):
        normal, logistic = (
            density.sample(shape, generator=generator, dtype=dtype, device=device)
            for density in (StandardNormal(self.dim), Logistic(self.dim))
        )
        return torch.where(self._flags.to(normal.device), logistic, normal)

    def __repr__(self):
        n_logistic = int(self._flags.sum())
        return f"{self.dim - n_logistic} normal and {n_logistic} logistic inputs"


class TracedModel(DirectedModel):
    """A program as a generative model: its draws are the inputs, in the order of :attr:`order`.

    A subclass defines :meth:`run`; :func:`~dgm_infer.interop.guards.prepared` records and checks it. The program runs
    once per row, vectorised with ``torch.func.vmap``. In evaluation mode, as in every conditioned problem, the torch
    calls of one run are repeated without the program around them, if that gives the same numbers.

    Attributes:
        draws: its draws, in the order of the program.
        found: the structure that was found, in words.
    """

    order: Tensor
    probes: Tensor
    """Inputs in the order of the program, which the code of evaluation mode is made and checked with, ``[n, D]``."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.draws: tuple[Draw, ...] = ()
        self.has_factor = False
        self.found = "not searched"
        self.latents_are_global = False
        self.register_buffer("order", torch.empty(0, dtype=torch.long), persistent=False)
        self.register_buffer("_place", torch.empty(0, dtype=torch.long), persistent=False)
        self.register_buffer("probes", torch.empty(0, 0), persistent=False)
        self._place: Tensor
        self._rows = Rows(self._parts)
        self._latent_names: list[str] = []

    def run(self, tape: Tape) -> TracedRun:
        """One run of the program that takes its draws from the tape."""
        raise NotImplementedError

    def record(self, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tape, TracedRun]:
        """A run with random numbers, which the tape holds afterwards; torch's global generators stay as they were."""
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            torch.manual_seed(seed)
            tape = Tape(self.name, dtype, device, rng=torch.Generator().manual_seed(seed))
            with Interception(tape):
                outcome = self.run(tape)
        return tape, outcome

    def arrange(self, draws: tuple[Draw, ...], split: UnitSplit | None) -> None:
        """Set the draws, and the order of inputs that shows their units."""
        self.draws = draws
        flags = [torch.full((draw.size,), draw.kind == "logistic") for draw in draws]
        is_logistic = torch.cat(flags) if flags else torch.empty(0, dtype=torch.bool)
        dim = len(is_logistic)
        order = torch.arange(dim) if split is None else split.order
        n_global = dim if split is None else split.n_global
        self.structure = "dense" if split is None else "independent"
        self.has_local_inputs = split is not None
        self.unit_inputs, self.unit_outputs = (1, 1) if split is None else (split.inputs, split.outputs)
        self.global_density = _density(is_logistic[order[:n_global]])
        self.local_density = _density(is_logistic[order[n_global:]])
        vars(self).pop("input_density", None)
        self.order, self._place = order.to(self.order.device), torch.argsort(order).to(self.order.device)

    def replay(self, v: Tensor) -> tuple[Tape, TracedRun, list[str]]:
        """The run at inputs ``v [D]`` in the order of the program, and the lines that cut its graph."""
        tape = Tape(self.name, v.dtype, v.device, v, self.draws)
        with Interception(tape) as interception:
            outcome = self.run(tape)
        tape.finish()
        return tape, outcome, interception.cuts

    def _parts(self, v: Tensor) -> Parts:
        tape, outcome, _ = self.replay(v)
        row = outcome.output if outcome.output.ndim == 1 else outcome.output.reshape(-1)
        return Parts(
            [row if row.dtype == v.dtype else row.to(v.dtype)],
            list(outcome.latents.values()),
            [factor.reshape(()) for factor in tape.factors],
        )

    def observed(self, u):
        return self._each(0, u)[0]

    def latents(self, u):
        has_code = self._rows.has_code(u)
        names = self._latent_names if has_code else list(self.replay(u.new_zeros(u.shape[-1]))[1].latents)
        return dict(zip(names, self._each(1, u), strict=True))

    def log_factor(self, u):
        return torch.stack(self._each(2, u)).sum(0) if self.has_factor else u.new_zeros(u.shape[:-1])

    def _each(self, part: int, u: Tensor) -> tuple[Tensor, ...]:
        return self._rows.each(part, u if self.structure == "dense" else u[..., self._place])

    def train(self, mode: bool = True):
        super().train(mode)
        self._rows.forget()
        if not mode and len(self.probes):
            self._rows.record(self.probes)
            if self._rows.has_code(self.probes):
                self._latent_names = list(self.replay(self.probes[0])[1].latents)
        return self

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # the code has the weights as they were
        return self.train(self.training)

    @property
    def has_log_factor(self):
        return self.has_factor

    @property
    def can_scale_noise(self):
        # a factor corrects the density of the inputs as they are
        return super().can_scale_noise and not self.has_factor

    @property
    def can_omit_local_inputs(self):
        return self.latents_are_global and not self.has_factor

    def global_latents(self, u1):
        return {"u": u1}

    def simulate(self, z, u2):
        return self.observed(torch.cat([z["u"], u2], -1))

    def __repr__(self):
        dim, size = self.input_density.dim, torch.Size(self.output_shape).numel()
        return f"{type(self).__name__}({self.name}: {dim} inputs, {size} outputs; structure: {self.found})"


def _density(is_logistic: Tensor) -> InputDensity:
    if is_logistic.all() and len(is_logistic):
        return Logistic(len(is_logistic))
    return Mixed(is_logistic) if is_logistic.any() else StandardNormal(len(is_logistic))
