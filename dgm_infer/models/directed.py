"""Models whose inputs split into parameters and noise of single outputs (math 1.2, J 4.2), and noise for any (J 7)."""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..arguments import positive_numbers
from ..errors import ArgumentError, ModelError
from ..structures import Structure, Units, declared_structure, validate_structure
from .densities import InputDensity, Product, StandardNormal, check_normalised
from .model import GenerativeModel, reference_tensor


class DirectedModel(GenerativeModel):
    """A model whose inputs split into ``u = [u1, u2]``: ``z = g_z(u1)``, ``x = g_{x|z}(z, u2)``.

    ``structure`` declares the form of the Jacobian of ``N`` outputs and determines the cost of conditioning:

    - ``"independent"``: the outputs split into units that depend on z and each on its own local inputs, so that
      ``J = [A | blocks]`` (J 8.2). A unit has ``unit_outputs`` consecutive outputs and ``unit_inputs`` consecutive
      local inputs, one of each by default.
    - ``"markov"``: a state that evolves as ``x_t = f(x_{t-1}, z, u2_t)`` and is observed after every step. The class
      defines :meth:`initial` and :meth:`transition` instead of :meth:`simulate`, and ``step_inputs``, the local inputs
      per step. Given the observed previous state the steps are independent units: whole steps, unless ``unit_outputs``
      and ``unit_inputs`` declare the components of a step independent too.
    - ``"dense"``: anything else.

    Any other name in :data:`dgm_infer.structures.STRUCTURES`, or a :class:`~dgm_infer.structures.Structure` itself,
    works too.
    """

    structure: str | Structure = "dense"
    has_local_inputs = True
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
        """State before the first step: ``[..., S]``, or ``[S]`` if it does not depend on z."""
        raise NotImplementedError(f"{type(self).__name__} defines no initial(z)")

    def transition(self, previous: Tensor, z: dict[str, Tensor], u2_t: Tensor) -> Tensor:
        """One step ``f(x_{t-1}, z, u2_t)``: ``[..., S], [..., step_inputs] -> [..., S]``; leading dimensions
        broadcast."""
        raise NotImplementedError(f"{type(self).__name__} defines no transition(previous, z, u2_t)")

    def one_step_ahead(self, u: Tensor, x: Tensor) -> Tensor:
        """Every state predicted from the previous one in ``x``: ``[..., Du], [..., Dx] -> [..., Dx]``.

        That is ``f(x_{t-1}, z(u1), u2_t)``, which equals x exactly if ``observed(u) = x`` (math 4.7).
        """
        u1, u2 = self.split(u)
        # a dimension for the steps, which share z
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
    def jacobian_structure(self):
        return declared_structure(self)

    @property
    def units(self) -> Units | None:
        """Sizes of the independent units, None for a dense structure."""
        return self.jacobian_structure.units

    @property
    def n_steps(self) -> int:
        """Number of steps that the local inputs split into.

        Raises:
            ModelError: they do not split into whole steps.
        """
        n_local, step = self.local_density.dim, self.step_inputs
        if n_local % step:
            raise ModelError(
                f"{type(self).__name__} has {n_local} local inputs for steps of {step}: step_inputs, the local inputs "
                "of one step, must divide them"
            )
        return n_local // step

    @property
    def can_scale_noise(self):
        return self.jacobian_structure.can_be_scaled and self.local_density.is_standard_normal

    @property
    def adds_noise(self) -> bool:
        """Whether outputs are known to be a function of the global inputs plus fixed numbers times the local ones."""
        return False

    @property
    def can_omit_local_inputs(self):
        # a factor, or a latent variable, of hidden noise inputs needs them
        return not (self.has_log_factor or self.has_local_latents)

    def split(self, u):
        n_global = self.global_density.dim
        return u[..., :n_global], u[..., n_global:]

    def observed(self, u):
        u1, u2 = self.split(u)
        return self.simulate(self.global_latents(u1), u2)

    def named_latents(self, u1: Tensor) -> dict[str, Tensor]:
        """The latent variables to report, given the global inputs: ``[..., L] -> {name: [..., *shape]}``."""
        return self.global_latents(u1)

    def latents(self, u):
        return self.named_latents(self.split(u)[0])

    @property
    def has_local_latents(self) -> bool:
        """Whether a subclass overrides ``latents``, to report latents of the local inputs too."""
        return type(self).latents is not DirectedModel.latents


def validate(model: object) -> None:
    """Raise :class:`ModelError` if a model lacks what conditioning needs."""
    if not isinstance(model, GenerativeModel):
        name = type(model).__name__
        if isinstance(model, nn.Module):
            raise ModelError(
                f"expected a GenerativeModel, got {name}, a network that does not say what its inputs are: wrap it, "
                "generators.from_module(net.eval(), latent=D), or subclass dgm_infer.GenerativeModel"
            )
        raise ModelError(
            f"expected a GenerativeModel, got {name}: subclass dgm_infer.GenerativeModel and define input_density and "
            "observed(u)"
        )
    if isinstance(model, DirectedModel):
        for name in ("global_density", "local_density"):
            _validate_density(model, name)
        validate_structure(model)
        _validate_sizes(model)
    else:
        _validate_density(model, "input_density")


def _validate_density(model: nn.Module, field: str) -> None:
    given, name = getattr(model, field, None), f"{type(model).__name__}.{field}"
    if given is None:
        raise ModelError(f"{name} is not set: give it dgm.StandardNormal(D), or another dgm.models.InputDensity")
    if not isinstance(given, InputDensity):
        raise ModelError(
            f"{name} is of type {type(given).__name__}: give it dgm.StandardNormal(D), with other inputs as functions "
            "of normal ones, such as torch.special.ndtr(u) for uniform ones, or a dgm.models.InputDensity of your own"
        )
    check_normalised(name, given)


def _validate_sizes(model: DirectedModel) -> None:
    name = type(model).__name__
    for field in ("step_inputs", "unit_inputs", "unit_outputs"):
        value = getattr(model, field)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise ModelError(f"{name}.{field} = {value!r}: must be an integer >= 1")
    # raises if they do not split into steps
    _ = model.n_steps


# Relative difference from a straight line up to which noise is taken as added: rounding in 32 bits.
_ADDED = 1e-4


class WithNoise(DirectedModel):
    """A model with independent Gaussian output noise, ``g_y(u, n) = g_x(u) + sd n`` (J 7).

    Its Jacobian has full row rank everywhere; conditioning on it equals a Gaussian ABC kernel of width ``sd``.

    Args:
        model: the noiseless model.
        sd: standard deviation of the noise in units of the output, positive, a number, ``[Dx]`` or of the output's
            shape.
    """

    structure = "independent"

    def __init__(self, model: GenerativeModel, sd: float | Tensor):
        super().__init__()
        validate(model)
        # the noise has the model's dtype: a 32-bit sd must not mix precisions in a 64-bit model
        sd = positive_numbers("WithNoise", "sd", sd, reference_tensor(model).dtype)
        self.model = model
        self.output_shape = model.output_shape
        self.global_density = model.input_density
        shape = torch.Size(self.output_shape)
        self.local_density = StandardNormal(shape.numel())
        if sd.ndim and sd.shape not in (shape, (shape.numel(),)):
            image = f" or {tuple(shape)}" if len(shape) > 1 else ""
            raise ArgumentError(
                f"WithNoise(sd of shape {tuple(sd.shape)}): expected a number or shape ({shape.numel()},){image}"
            )
        self.register_buffer("sd", sd.flatten() if sd.ndim else sd)
        self.sd: Tensor

    def global_latents(self, u1):
        return {"u": u1}

    def simulate(self, z, u2):
        return self.model.observed(z["u"]) + self.sd * u2

    @property
    def adds_noise(self):
        return type(self).simulate is WithNoise.simulate

    def named_latents(self, u1):
        return self.model.latents(u1)

    def log_factor(self, u):
        return self.model.log_factor(self.split(u)[0])

    @property
    def has_log_factor(self):
        return self.model.has_log_factor


class Beneath(NamedTuple):
    """What noise is added to."""

    model: GenerativeModel
    u: Tensor
    """The model's inputs, ``[..., L]``."""
    sd: float
    """Standard deviation of the noise, in root mean square over outputs; 0 for none."""


def beneath_noise(model: GenerativeModel, u: Tensor) -> Beneath:
    """The model beneath the noise that :class:`WithNoise` adds, however many times, at inputs ``u [..., Du]``."""
    square = 0.0
    while isinstance(model, WithNoise):
        square += float(model.sd.square().mean())
        u, model = model.split(u)[0], model.model
    return Beneath(model, u, square**0.5)


def noiseless(model: GenerativeModel, u: Tensor) -> Tensor:
    """Outputs at inputs ``u`` without the noise that the model adds, ``[..., Du] -> [..., Dx]``.

    Raises:
        ModelError: the model has noise that is not known to be added.
    """
    if not isinstance(model, DirectedModel):
        # its outputs have no noise
        return model.observed(u)
    u1, u2 = model.split(u)

    def at(local: Tensor) -> Tensor:
        return model.observed(torch.cat([u1, local], -1))

    x, one = at(torch.zeros_like(u2)), at(u2)
    if not torch.allclose(at(-2 * u2) - x, -2 * (one - x), rtol=_ADDED, atol=_ADDED * float(one.abs().max())):
        raise ModelError(
            f"generate(mean=True): a {type(model).__name__} does not add its noise to its outputs: omit it"
        )
    return noiseless(model.model, u1) if isinstance(model, WithNoise) else x
