"""Generative models: deterministic functions of random inputs with a known density (J 4, T 4.2)."""

from functools import cached_property

import torch
from torch import Tensor, nn

from .errors import ArgumentError, ModelError
from .inputs import InputDensity, Product, StandardNormal

__all__ = ["STRUCTURES", "DirectedModel", "GenerativeModel", "WithNoise", "reference_tensor"]

STRUCTURES = ("independent", "dense")


class GenerativeModel(nn.Module):
    """A differentiable generative model ``x = g_x(u)``, ``u ~ p_u``.

    A subclass sets ``input_density`` and defines :meth:`observed`; every method takes any leading dimensions
    and treats them as independent.
    """

    input_density: InputDensity

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
        except AttributeError as error:
            # nn.Module would report it as an attribute output_shape that is missing
            raise ModelError(f"{type(self).__name__}.observed fails: {error}") from error
        return tuple(output.shape)


class DirectedModel(GenerativeModel):
    """A model whose inputs split into ``u = [u1, u2]``: ``z = g_z(u1)``, ``x = g_{x|z}(z, u2)``.

    ``structure`` declares the Jacobian: ``"independent"`` when output i depends on z and on ``u2_i`` alone, so
    that ``J = [A | diag(d)]`` (J 8.2); ``"dense"`` otherwise.
    """

    structure: str = "dense"
    global_density: InputDensity
    local_density: InputDensity

    def global_latents(self, u1: Tensor) -> dict[str, Tensor]:
        """Latent variables ``g_z(u1)``: ``[..., L] -> {name: [..., *shape]}``."""
        raise NotImplementedError(f"{type(self).__name__} defines no global_latents(u1)")

    def simulate(self, z: dict[str, Tensor], u2: Tensor) -> Tensor:
        """Outputs ``g_{x|z}(z, u2)``: ``[..., N] -> [..., Dx]``."""
        raise NotImplementedError(f"{type(self).__name__} defines no simulate(z, u2)")

    @cached_property
    def input_density(self) -> InputDensity:  # type: ignore[override]
        return Product(self.global_density, self.local_density)

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
    elif not isinstance(getattr(model, "input_density", None), InputDensity):
        raise ModelError(f"{type(model).__name__}.input_density is not set: for example StandardNormal(D)")
