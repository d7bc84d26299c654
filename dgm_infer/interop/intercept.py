"""Random calls of plain torch code become draws from a tape; nothing is patched, and nothing remains after the run."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ModelError
from .constants import Constants, is_wrapped, unwrapped
from .reparametrisation import Reparametrisation, cauchy, exponential, gamma, location_scale, uniform_between
from .straight_line import LEAVING, writes
from .tape import Tape, present_line, within_distributions


class Promotion(TorchFunctionMode):
    """While active, code computes in one floating-point type, on one device.

    New tensors follow it, and what meets in two floating-point types is promoted to the wider one.

    Args:
        dtype: the type.
        device: the device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.dtype, self.device = dtype, device
        bits = torch.finfo(dtype).bits
        self._narrower = {narrow for narrow in _FLOATS if torch.finfo(narrow).bits < bits}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = self.special(func)
        return self.call(func, args, kwargs) if special is None else special(self, func, args, kwargs)

    def special(self, func: Callable[..., Any]) -> "Special | None":
        """What to do in place of a call."""
        return _MAKING.get(func)

    def call(self, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            args, kwargs, changed = self._promoted(args, kwargs)
            if not changed:
                raise
            return func(*args, **kwargs)
        # a vector of 32 bits makes the product with a number of 64 bits one of 32
        if isinstance(result, Tensor) and result.dtype in self._narrower and not _keeps_type(func):
            args, kwargs, _ = self._promoted(args, kwargs)
            return func(*args, **kwargs)
        return result

    def made(self, tensor: Any, *, is_new: bool = False, may_be_written: bool = True) -> Any:
        """A tensor with memory of its own that the program made, of numbers if it is new."""
        return tensor

    def _promoted(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
        """Arguments with tensors of narrower types, or of other devices, moved to the tape's; whether any were."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        moved = [isinstance(leaf, Tensor) and self._is_elsewhere(leaf) for leaf in leaves]
        leaves = [self._moved(leaf) if move else leaf for leaf, move in zip(leaves, moved, strict=True)]
        return *pytree.tree_unflatten(leaves, tree), any(moved)

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return tensor.dtype in self._narrower or tensor.device != self.device

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.dtype in self._narrower else tensor.dtype)


class Interception(Promotion):
    """While active, ``torch.randn`` and the like take their numbers from a tape.

    Code computes in the tape's dtype and device. ``.sample()`` of torch's distributions keeps its gradient.

    Attributes:
        cuts: lines that cut the graph by ``detach()`` or ``no_grad()``.
    """

    def __init__(self, tape: Tape):
        super().__init__(tape.dtype, tape.device)
        self.tape = tape
        self.cuts: list[str] = []
        # under vmap a tensor that does not depend on the inputs cannot be written to: zeros of theirs make it do so
        self._anchor = None if tape.u is None else tape.u.new_zeros(())
        # a program may branch on them
        self._constants = Constants() if self._anchor is not None and is_wrapped(self._anchor) else None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._constants is None:
            return super().__torch_function__(func, types, args, kwargs)
        if func in LEAVING and self._constants.has(args[0]):
            # a graph that is being captured would refuse to give a number
            with _disable_current_modes():
                return func(*(unwrapped(arg) if self._constants.has(arg) else arg for arg in args), **kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        self._constants.follow(func, args, kwargs, result)
        return result

    def special(self, func):
        return _SPECIAL.get(func)

    def made(self, tensor, *, is_new=False, may_be_written=True):
        if self._anchor is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return tensor
        if not may_be_written:
            return tensor
        made = tensor + self._anchor
        if self._constants is not None and (is_new or not is_wrapped(tensor) or self._constants.has(tensor)):
            self._constants.add(made)
        return made

    def draw(self, func: Callable[..., Any], args: tuple, kwargs: dict, form: Reparametrisation) -> Tensor:
        if kwargs.get("out") is not None or (kwargs.get("dtype") or torch.float).is_complex:
            raise ModelError(f"{self.tape.name} draws in a way that is not supported (out=, complex), {present_line()}")
        if self.tape.u is not None:
            return self.tape.draw(form)
        return self.tape.record(form, func(*args, **kwargs).detach().to(self.tape.dtype))


Special = Callable[[Any, Callable[..., Any], tuple, dict], Any]


def _size(args: tuple, kwargs: dict) -> torch.Size:
    size = kwargs.get("size", args)
    if len(size) == 1 and isinstance(size[0], tuple | list):
        size = size[0]
    return torch.Size([int(n) for n in size])


def _size_of_first(args: tuple, kwargs: dict) -> torch.Size:
    return (args[0] if args else kwargs["input"]).shape


def _standard(form: Callable[..., Reparametrisation], size: Callable[[tuple, dict], torch.Size]) -> Special:
    """A function that makes draws of N(0, 1), or of the unit interval."""
    return lambda mode, func, args, kwargs: mode.draw(func, args, kwargs, form(0.0, 1.0, size(args, kwargs)))


def _normal(mode, func, args, kwargs):
    mean, std = _parameters(args, kwargs, ("mean", 0.0), ("std", 1.0))
    size = args[2] if len(args) > 2 else kwargs.get("size")
    # torch.broadcast_shapes would load the compiler
    shape = torch.Size(size) if size is not None else (mean + std).shape
    return mode.draw(func, args, kwargs, location_scale(mean, std, shape))


def _standard_gamma(mode, func, args, kwargs):
    return mode.draw(func, args, kwargs, gamma(args[0].to(mode.tape.dtype)))


def _in_place(form: Callable[..., Reparametrisation], *names: tuple[str, float]) -> Special:
    """A method that fills a tensor with draws."""

    def fill(mode: Interception, func: Callable[..., Any], args: tuple, kwargs: dict) -> Tensor:
        tensor = args[0]
        made = form(*_parameters(args[1:], kwargs, *names), tensor.shape)
        if mode.tape.u is None:
            mode.draw(func, args, kwargs, made)
            return tensor
        return tensor.copy_(mode.draw(func, args, kwargs, made))

    return fill


def _log_normal(mean: Any, std: Any, shape: torch.Size) -> Reparametrisation:
    normal = location_scale(mean, std, shape)
    return Reparametrisation("normal", shape, lambda v: normal.value(v).exp(), lambda x: (x.log() - mean) / std)


def _parameters(args: tuple, kwargs: dict, *names: tuple[str, float]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name, default) for i, (name, default) in enumerate(names)]


def _factory(mode, func, args, kwargs):
    """New tensors are of the tape's type and device."""
    made = func(*args, **kwargs)
    if made.is_floating_point() and made.dtype != mode.dtype and not (args and isinstance(args[0], Tensor)):
        made = func(*args, **{**kwargs, "dtype": mode.dtype})
    if kwargs.get("device") is None and made.device != mode.device:
        made = made.to(mode.device)
    is_new = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs)))
    return mode.made(made, is_new=is_new, may_be_written=func not in _CONSTANTS)


def _as_tensor(mode, func, args, kwargs):
    if args and isinstance(args[0], Tensor):
        return mode.call(func, args, kwargs)
    return _factory(mode, func, args, kwargs)


def _copy(mode, func, args, kwargs):
    return mode.made(func(*args, **kwargs))


def _new(mode, func, args, kwargs):
    made = func(*args, **kwargs)
    return mode.made(made.to(mode.dtype) if made.is_floating_point() else made)


def _cut(mode, func, args, kwargs):
    # distributions detach what their own checks use
    if args[0].is_floating_point() and not within_distributions(3):
        mode.cuts.append(present_line())
    # vmap has no .data
    return args[0].detach() if func == _DATA else func(*args, **kwargs)


def _masked(mode, func, args, kwargs):
    """``tensor[mask] = number``, which vmap cannot do where the mask is random."""
    tensor, mask, value = args
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or getattr(value, "ndim", 0):
        return func(*args, **kwargs)
    return tensor.masked_fill_(mask.reshape(*mask.shape, *(1,) * (tensor.ndim - mask.ndim)), value)


def _masked_scatter(mode, func, args, kwargs):
    """Data whose missing values are random: each is found by its number among them."""
    tensor, mask, source = args
    places = (mask.reshape(-1).cumsum(0) - 1).clamp_min(0)
    mask, tensor = torch.broadcast_tensors(mask, tensor)
    return torch.where(mask, source.reshape(-1)[places].reshape(mask.shape), tensor)


def _set_grad_enabled(mode, func, args, kwargs):
    if not args[0]:
        # sample() of a distribution is rsample() without gradient
        if within_distributions(6):
            return None
        mode.cuts.append(present_line())
    return func(*args, **kwargs)


def _is_all_true(mode, func, args, kwargs):
    # the distributions' checks of their arguments, which one chain of many, or one draw of the prior, may not pass
    if mode.tape.u is None and mode.tape.invalid is None and not func(*args, **kwargs):
        mode.tape.invalid = present_line()
    return True


def _clamp_in_place(mode, func, args, kwargs):
    # of draws that distributions round away from 0, where a smooth function of inputs never is
    if mode.tape.u is None:
        return func(*args, **kwargs)
    # vmap has no clamp_ of its own
    return args[0] if within_distributions(3) else args[0].copy_(args[0].clamp(*args[1:], **kwargs))


def _keeps_type(func: Callable[..., Any]) -> bool:
    """Whether the result has the type of an argument, whatever the others are."""
    return writes(func) or func.__name__ == "__get__"


def _refused(what: str) -> Special:
    def refuse(mode: Interception, func: Callable[..., Any], args: tuple, kwargs: dict) -> NoReturn:
        raise ModelError(f"{mode.tape.name} {what} (torch.{func.__name__}), {present_line()}")

    return refuse


def _dropout(mode, func, args, kwargs):
    if (kwargs.get("training", True) and (args[1:2] or (kwargs.get("p", 0.5),))[0]) and args[2:3] != (False,):
        return _DISCRETE(mode, func, args, kwargs)
    return func(*args, **kwargs)


_DISCRETE = _refused(
    "draws discrete numbers, which conditioning cannot move continuously: take their mean, a continuous relaxation, "
    "or sum over them"
)
_REJECTION = _refused(
    "draws by rejection, without a function of its random numbers: for Beta and Dirichlet, divide Gamma variables by "
    "their sum"
)
_COMPOSITE = _refused("draws in a function that hides its random numbers: write it with torch.rand or torch.randn")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# what is built once and not written to
_CONSTANTS = {torch.eye, torch.arange, torch.linspace, torch.logspace}
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
# what makes tensors, in the type and on the device of the code
_MAKING: dict[Any, Special] = {
    Tensor.new: _new,
    Tensor.float: lambda mode, func, args, kwargs: args[0].to(mode.dtype),
    torch.as_tensor: _as_tensor,
}
_MAKING |= dict.fromkeys(
    [torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.scalar_tensor, *_CONSTANTS], _factory
)
_SPECIAL: dict[Any, Special] = {
    **_MAKING,
    torch.randn: _standard(location_scale, _size),
    torch.rand: _standard(uniform_between, _size),
    torch.randn_like: _standard(location_scale, _size_of_first),
    torch.rand_like: _standard(uniform_between, _size_of_first),
    torch.normal: _normal,
    torch._standard_gamma: _standard_gamma,  # type: ignore[attr-defined]
    Tensor.normal_: _in_place(location_scale, ("mean", 0.0), ("std", 1.0)),
    Tensor.uniform_: _in_place(uniform_between, ("from", 0.0), ("to", 1.0)),
    Tensor.exponential_: _in_place(exponential, ("lambd", 1.0)),
    Tensor.log_normal_: _in_place(_log_normal, ("mean", 1.0), ("std", 2.0)),
    Tensor.cauchy_: _in_place(cauchy, ("median", 0.0), ("sigma", 1.0)),
    Tensor.clone: _copy,
    Tensor.detach: _cut,
    Tensor.clamp_: _clamp_in_place,
    _DATA: _cut,
    Tensor.__setitem__: _masked,
    Tensor.masked_scatter: _masked_scatter,
    torch.masked_scatter: _masked_scatter,
    torch._C._set_grad_enabled: _set_grad_enabled,
    torch._is_all_true: _is_all_true,  # type: ignore[attr-defined]
    torch._sample_dirichlet: _REJECTION,  # type: ignore[attr-defined]
    F.gumbel_softmax: _COMPOSITE,
    F.rrelu: _COMPOSITE,
}
_SPECIAL |= dict.fromkeys([torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like], _copy)
_SPECIAL |= dict.fromkeys(
    [
        torch.bernoulli,
        torch.poisson,
        torch.binomial,
        torch.multinomial,
        torch.randint,
        torch.randint_like,
        torch.randperm,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.multinomial,
        Tensor.random_,
        Tensor.geometric_,
    ],
    _DISCRETE,
)
_SPECIAL |= dict.fromkeys(
    [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout], _dropout
)
