"""Generative models: deterministic functions of random inputs with a known density (J 4, T 4.2)."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ModelError
from .densities import InputDensity, Product, StandardNormal

__all__ = ["STRUCTURES", "DirectedModel", "GenerativeModel", "Units", "WithNoise", "reference_tensor"]

STRUCTURES = ("independent", "markov", "dense")


class Units(NamedTuple):
    """Structure of a Jacobian ``[A | blockdiag(D_1, ..., D_U)]``."""

    n_global: int
    """Columns of A: the global inputs."""
    inputs: int = 1
    """Local inputs of a unit, columns of every D."""
    outputs: int = 1
    """Outputs of a unit, rows of every D."""

    @property
    def is_scalar(self) -> bool:
        return self.inputs == self.outputs == 1


class GenerativeModel(nn.Module):
    """A differentiable generative model ``x = g_x(u)``, ``u ~ p_u``.

    A subclass sets ``input_density`` and defines :meth:`observed`; every method takes any leading dimensions
    and treats them as independent.
    """

    input_density: InputDensity
    output_range: tuple[float, float] | None = None
    """What every output lies in, (low, high), edges excluded unless the outputs are discrete; None for all numbers."""
    structure: str = "dense"
    """Of the Jacobian: only a :class:`DirectedModel` has another one."""

    def observed(self, u: Tensor) -> Tensor:
        """Observed outputs ``g_x(u)``, flat: ``[..., Du] -> [..., Dx]``."""
        raise NotImplementedError(f"{type(self).__name__} defines no observed(u)")

    def forward(self, u: Tensor) -> Tensor:
        return self.observed(u)

    def latents(self, u: Tensor) -> dict[str, Tensor]:
        """Named latent variables ``g_z(u)``, each ``[..., *shape]``."""
        return {"u": u}

    def log_factor(self, u: Tensor) -> Tensor:
        """Additional log density ``[..., Du] -> [...]``, for soft observations and non-standard inputs."""
        return u.new_zeros(u.shape[:-1])

    @property
    def has_log_factor(self) -> bool:
        return type(self).log_factor is not GenerativeModel.log_factor or "log_factor" in vars(self)

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one output, with ``prod(output_shape) = Dx``; flat unless the model says otherwise."""
        like = reference_tensor(self)
        try:
            with torch.no_grad():
                output = self.observed(torch.zeros(self.input_density.dim, dtype=like.dtype, device=like.device))
        except Exception as error:
            # nn.Module would report an AttributeError as an attribute output_shape that is missing
            reason = " ".join(str(error).split())
            raise ModelError(f"{type(self).__name__}.observed fails for one row of zeros: {reason}") from error
        return tuple(output.shape)


class DirectedModel(GenerativeModel):
    """A model whose inputs split into ``u = [u1, u2]``: ``z = g_z(u1)``, ``x = g_{x|z}(z, u2)``.

    ``structure`` declares the Jacobian of ``N`` outputs and decides what conditioning costs:

    - ``"independent"``: the outputs fall into units that depend on z and each on local inputs of its own, so that
      ``J = [A | blocks]`` (J 8.2). A unit has ``unit_outputs`` consecutive outputs and ``unit_inputs`` consecutive
      local inputs, one of each unless the class says otherwise.
    - ``"markov"``: a state that moves by ``x_t = f(x_{t-1}, z, u2_t)`` and is observed after every step. The class
      defines :meth:`initial` and :meth:`transition` in place of :meth:`simulate`, and ``step_inputs``, the local
      inputs of one step. Given the observed previous state the steps are independent units, whole steps unless
      ``unit_outputs`` and ``unit_inputs`` say that the components of a step are independent too.
    - ``"dense"``: anything else.
    """

    structure: str = "dense"
    step_inputs: int = 1
    unit_inputs: int | None = None
    unit_outputs: int | None = None
    global_density: InputDensity
    local_density: InputDensity

    def global_latents(self, u1: Tensor) -> dict[str, Tensor]:
        """Latent variables ``g_z(u1)``: ``[..., L] -> {name: [..., *shape]}``."""
        raise NotImplementedError(f"{type(self).__name__} defines no global_latents(u1)")

    def simulate(self, z: dict[str, Tensor], u2: Tensor) -> Tensor:
        """Outputs ``g_{x|z}(z, u2)``: ``[..., N] -> [..., Dx]``."""
        if type(self).transition is DirectedModel.transition:
            raise NotImplementedError(f"{type(self).__name__} defines no simulate(z, u2)")
        state, states = self.initial(z), []
        for u2_t in u2.unflatten(-1, (-1, self.step_inputs)).unbind(-2):
            state = self.transition(state, z, u2_t)
            states.append(state)
        return torch.stack(states, -2).flatten(-2)

    def initial(self, z: dict[str, Tensor]) -> Tensor:
        """State before the first step: ``[..., S]``, or ``[S]`` where it does not depend on z."""
        raise NotImplementedError(f"{type(self).__name__} defines no initial(z)")

    def transition(self, previous: Tensor, z: dict[str, Tensor], u2_t: Tensor) -> Tensor:
        """One step ``f(x_{t-1}, z, u2_t)``: ``[..., S], [..., step_inputs] -> [..., S]``; leading dimensions
        broadcast."""
        raise NotImplementedError(f"{type(self).__name__} defines no transition(previous, z, u2_t)")

    def one_step_ahead(self, u: Tensor, x: Tensor) -> Tensor:
        """Every state from the one before it in ``x``: ``[..., Du], [..., Dx] -> [..., Dx]``.

        That is ``f(x_{t-1}, z(u1), u2_t)``, which equals x exactly where ``observed(u) = x`` (MATH 4).
        """
        u1, u2 = self.split(u)
        # a dimension for the steps: z is the same at all of them
        z = self.global_latents(u1.unsqueeze(-2))
        u2 = u2.unflatten(-1, (-1, self.step_inputs))
        initial = self.initial(z)
        states = x.unflatten(-1, (u2.shape[-2], -1))
        lead = torch.broadcast_shapes(u.shape[:-1], x.shape[:-1])
        previous = [initial.expand(*lead, 1, states.shape[-1]), states[..., :-1, :].expand(*lead, -1, -1)]
        return self.transition(torch.cat(previous, -2), z, u2).flatten(-2)

    @cached_property
    def input_density(self) -> InputDensity:  # type: ignore[override]
        return Product(self.global_density, self.local_density)

    @property
    def units(self) -> Units | None:
        """Sizes of the independent units, None for a dense structure."""
        if self.structure == "dense":
            return None
        whole_step = self.structure == "markov"
        n_steps = self.local_density.dim // self.step_inputs if whole_step else 1
        state = torch.Size(self.output_shape).numel() // n_steps
        inputs = self.unit_inputs or (self.step_inputs if whole_step else 1)
        return Units(self.global_density.dim, inputs, self.unit_outputs or (state if whole_step else 1))

    def split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., L + N] -> [..., L], [..., N]``."""
        n_global = self.global_density.dim
        return u[..., :n_global], u[..., n_global:]

    def observed(self, u):
        u1, u2 = self.split(u)
        return self.simulate(self.global_latents(u1), u2)

    def named_latents(self, u1: Tensor) -> dict[str, Tensor]:
        """The latent variables to report, of the global inputs: ``[..., L] -> {name: [..., *shape]}``."""
        return self.global_latents(u1)

    def latents(self, u):
        return self.named_latents(self.split(u)[0])

    @property
    def has_local_latents(self) -> bool:
        """Whether a subclass reports latents of the local inputs too, by a ``latents`` of its own."""
        return type(self).latents is not DirectedModel.latents


class WithNoise(DirectedModel):
    """A model with independent Gaussian output noise, ``g_y(u, n) = g_x(u) + sd n`` (J 7).

    Its Jacobian has full row rank everywhere; conditioning on it equals a Gaussian ABC kernel of width ``sd``.

    Args:
        model: the noiseless model.
        sd: standard deviation of the noise, in units of the output; positive, a number or ``[Dx]``.
    """

    structure = "independent"

    def __init__(self, model: GenerativeModel, sd: float | Tensor):
        super().__init__()
        validate(model)
        # the noise computes in the model's type: a 32-bit sd must not turn a 64-bit model into a mixture
        sd = torch.as_tensor(sd, dtype=reference_tensor(model).dtype)
        if not bool((sd > 0).all()):
            raise ArgumentError(f"WithNoise(sd={sd.min().item():g}): sd must be positive")
        self.model = model
        self.register_buffer("sd", sd)
        self.sd: Tensor
        self.output_shape = model.output_shape
        self.global_density = model.input_density
        self.local_density = StandardNormal(torch.Size(self.output_shape).numel())
        if sd.ndim and sd.shape != (self.local_density.dim,):
            raise ArgumentError(
                f"WithNoise(sd of shape {tuple(sd.shape)}): expected a number or shape ({self.local_density.dim},)"
            )

    def global_latents(self, u1):
        return {"u": u1}

    def simulate(self, z, u2):
        return self.model.observed(z["u"]) + self.sd * u2

    def named_latents(self, u1):
        return self.model.latents(u1)

    def log_factor(self, u):
        return self.model.log_factor(self.split(u)[0])

    @property
    def has_log_factor(self):
        return self.model.has_log_factor


def reference_tensor(module: nn.Module) -> Tensor:
    """A floating-point parameter or buffer whose dtype and device the module computes in; else an empty tensor."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0)


def validate(model: GenerativeModel) -> None:
    """Raise :class:`ModelError` when a model lacks what conditioning needs."""
    if not isinstance(model, GenerativeModel):
        raise ModelError(
            f"expected a GenerativeModel, got {type(model).__name__}: subclass dgm_infer.GenerativeModel and define "
            "input_density and observed(u)"
        )
    if isinstance(model, DirectedModel):
        for name in ("global_density", "local_density"):
            if not isinstance(getattr(model, name, None), InputDensity):
                raise ModelError(f"{type(model).__name__}.{name} is not set: give it an InputDensity")
        if model.structure not in STRUCTURES:
            raise ModelError(
                f"{type(model).__name__}.structure = {model.structure!r} is not one of {', '.join(STRUCTURES)}"
            )
        _validate_sizes(model)
    elif not isinstance(getattr(model, "input_density", None), InputDensity):
        raise ModelError(f"{type(model).__name__}.input_density is not set: for example StandardNormal(D)")


def _validate_sizes(model: DirectedModel) -> None:
    name = type(model).__name__
    for field in ("step_inputs", "unit_inputs", "unit_outputs"):
        value = getattr(model, field)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ModelError(f"{name}.{field} = {value!r}: must be a whole number, 1 or more")
    n_local = model.local_density.dim
    if model.structure == "markov" and (n_local == 0 or n_local % model.step_inputs):
        raise ModelError(
            f"{name} declares structure 'markov' with {n_local} local inputs for steps of {model.step_inputs}: "
            "step_inputs, the local inputs of one step, must divide them"
        )
