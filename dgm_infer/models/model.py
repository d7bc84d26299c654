"""Generative models, functions of inputs with a density (J 4, T 4.2), and frozen copies of users' modules."""

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..arguments import default_type, random_seed, whole_number
from ..errors import ModelError, cause
from ..structures import Dense, Structure
from .densities import InputDensity

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module) -> Module:
    """A copy of a module, which stays as it is.

    ``copy.deepcopy`` refuses two kinds of attributes. Tensors computed from others, such as the weight that hooks of
    ``spectral_norm`` and ``weight_norm`` compute at every call, or a cached output, are copied without their history.
    What cannot be copied, such as a lock, an open file or a generator, is shared with the module.

    Raises:
        ModelError: the module cannot be copied.
    """
    # deepcopy takes what it finds there, by identity, for copies
    memo: dict[int, Any] = {
        id(tensor): tensor.detach().clone() for value in _attributes(module) for tensor in _computed(value)
    }
    try:
        try:
            other = copy.deepcopy(module, dict(memo))
        except TypeError:
            # functions last: a method is copied with its object
            for value in sorted(_attributes(module), key=callable):
                if not _copies(value, memo):
                    memo[id(value)] = value
            other = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{type(module).__name__} cannot be copied ({cause(error)}): store what is not a part of the network "
            "outside of it"
        ) from error
    # TorchScript copies parameters with a history
    for mine, parameter in zip(module.parameters(), other.parameters(), strict=True):
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_(mine.requires_grad)
    return other


def evaluation_copy(module: Module) -> Module:
    """A copy in evaluation mode whose parameters need no gradients.

    Raises:
        ModelError: the module cannot be copied.
    """
    other = copied(module).eval()
    # one by one, as TorchScript has no requires_grad_() of modules
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    return other


def in_evaluation(module: Module) -> Module:
    """The module, or a copy in evaluation mode if a part of it is in training mode, as layers that see a whole batch
    and dropout then compute something else.

    Raises:
        ModelError: it cannot be copied.
    """
    return evaluation_copy(module) if any(part.training for part in module.modules()) else module


def frozen_copy(module: Module, dtype: torch.dtype, device: torch.device) -> Module:
    """A copy in evaluation mode, with this dtype and device, whose parameters need no gradients.

    Raises:
        ModelError: it cannot be copied, or its weights cannot be computed with: see :func:`check_weights`.
    """
    check_weights(module)
    other = evaluation_copy(module).to(device=device, dtype=dtype)
    for part in other.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.layout is not torch.strided:
                # products with sparse matrices have derivatives of the first order only
                part.register_buffer(name, buffer.to_dense(), name not in part._non_persistent_buffers_set)
    return other


def check_weights(model: nn.Module) -> None:
    """Refuse weights that are NaN, complex, quantized, on the meta device or not made yet.

    A copy in a real type would halve complex ones, and of quantized ones there are no derivatives.

    Raises:
        ModelError: some are; the message names the first.
    """
    for name, part in model.named_modules():
        if ".quantized" in type(part).__module__:
            raise ModelError(
                f"{type(model).__name__}: its layer {name} is quantized, without derivatives: use the network before "
                "its quantization"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{type(model).__name__}: its weights {name} are not initialized: call it once, with one input"
            )
        if tensor.is_nested:
            raise ModelError(f"{type(model).__name__}: its tensor {name} is nested: store rows of one length")
        if tensor.device.type == "meta" and type(tensor) in (Tensor, nn.Parameter):
            raise ModelError(
                f"{type(model).__name__}: its weights {name} are on the meta device, without numbers: load them, "
                "load_state_dict(..., assign=True)"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_complex():
            raise ModelError(
                f"{type(model).__name__}: its buffer {name} is of {buffer.dtype}: must be real, such as "
                "torch.view_as_real(...)"
            )
    for name, weight in model.named_parameters():
        where = f"{type(model).__name__}: its weights {name}"
        if weight.is_complex():
            raise ModelError(f"{where} are of {weight.dtype}: must be real")
        lost = int(weight.isnan().sum())
        if lost:
            raise ModelError(
                f"{where} are NaN, {lost} of {weight.numel()}: its training diverged; load or train others"
            )


def _attributes(module: nn.Module) -> Iterator[Any]:
    """What is stored in a module and its parts besides modules, parameters and buffers."""
    for part in module.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            yield from (value for name, value in vars(part).items() if name not in nn.Module().__dict__)


def _computed(value: Any) -> Iterator[Tensor]:
    """The tensors with a history in a value, or in the containers that it consists of."""
    if isinstance(value, Tensor) and not value.is_leaf:
        yield value
    elif isinstance(value, dict):
        yield from _computed(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for part in value:
            yield from _computed(part)


def _copies(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except TypeError:
        return False
    return True


class GeneratedImages(NamedTuple):
    """Images of a model and the latents that generated them, exact draws of their posteriors but for a log factor."""

    images: Tensor
    """``[n, *output_shape]``."""
    latents: Tensor
    """``[n, Dz]``; of a :class:`GenerativeModel` its inputs, ``[n, Du]``."""


class GenerativeModel(nn.Module):
    """A differentiable generative model ``x = g_x(u)``, ``u ~ p_u``.

    A subclass sets ``input_density`` and defines :meth:`observed`; every method accepts any leading dimensions and
    treats them as independent.
    """

    input_density: InputDensity
    output_range: tuple[float, float] | None = None
    """Interval (low, high) of all outputs, edges excluded unless the outputs are discrete; None for all numbers."""
    structure: str | Structure = "dense"
    """Structure of the Jacobian: only a :class:`DirectedModel` has another one."""
    lost_mass: Mapping[str, float] = MappingProxyType({})
    """Shares of priors that the inputs cannot reach, by name: of programs with densities that round."""
    has_local_inputs = False
    """Whether some inputs belong to single outputs, as in a :class:`DirectedModel`."""

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

    def implausible(self, x: Tensor) -> str | None:
        """What outputs ``[n, Dx]`` at prior draws say against the model, in one line; None if nothing does."""
        return None

    def generate(self, n: int, seed: int) -> GeneratedImages:
        """``n`` outputs of inputs from their density, in the dtype and on the device of the model, in evaluation
        mode; :meth:`log_factor` weighs none of them.

        Raises:
            ArgumentError: ``n`` is not an integer >= 1, or the seed not one >= 0.
            ModelError: the model is in training mode, and cannot be copied.
        """
        n, seed = whole_number("generate", "n", n), random_seed("generate", seed)
        like = reference_tensor(self)
        rng = torch.Generator(like.device).manual_seed(seed)
        u = self.input_density.sample((n,), generator=rng, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            return GeneratedImages(in_evaluation(self).observed(u).reshape(n, *self.output_shape), u)

    @property
    def has_log_factor(self) -> bool:
        return type(self).log_factor is not GenerativeModel.log_factor or "log_factor" in vars(self)

    @property
    def jacobian_structure(self) -> Structure:
        """The structure that :attr:`structure` declares."""
        return Dense()

    def split(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs that all outputs may depend on, and those of single outputs: ``[..., Du] -> [..., L], [..., N]``."""
        return u, u[..., :0]

    @property
    def can_scale_noise(self) -> bool:
        """Whether local inputs are normal noise, whose standard deviation can be scaled."""
        return False

    @property
    def can_omit_local_inputs(self) -> bool:
        """Whether local inputs that no observed output depends on can be omitted while conditioning."""
        return False

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of one output, with ``prod(output_shape) = Dx``; flat by default."""
        like = reference_tensor(self)
        try:
            with torch.no_grad():
                zeros = torch.zeros(self.input_density.dim, dtype=like.dtype, device=like.device)
                output = in_evaluation(self).observed(zeros)
        except Exception as error:
            # nn.Module would report an AttributeError as a missing attribute output_shape
            raise ModelError(f"{type(self).__name__}.observed fails for one row of zeros: {cause(error)}") from error
        if not isinstance(output, Tensor):
            raise ModelError(f"{type(self).__name__}.observed returns a {type(output).__name__}: expected a tensor")
        return tuple(output.shape)


def reference_tensor(module: nn.Module) -> Tensor:
    """A floating-point parameter or buffer, whose dtype and device are the module's; an empty tensor if none."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0, dtype=default_type())
