"""A double of a device: tensors that are said to be elsewhere, refuse those of the host, and count the host's waits.

Values are computed on the host; only what a device allows is allowed. Mistakes of devices, and needless waits, then
fail on machines that have no device.
"""

from collections import Counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["DEVICE", "Device", "Generator", "from_device", "to_device"]

# a device that PyTorch knows without having it, on which every library function runs
DEVICE = torch.device("meta")
_HOST = torch.device("cpu")

aten = torch.ops.aten
# operations whose result, or its size, the host needs
_WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero}
_COPIES = {aten._to_copy, aten.copy_, aten.copy}


class _Double(Tensor):
    """A tensor on :data:`DEVICE`, with its values on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor):
        double = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        double.held = values
        return double

    def __deepcopy__(self, memo):
        return _Double(self.held.clone())

    def __repr__(self, **_):  # type: ignore[override]
        return f"_Double({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} of tensors of the device, without the device")


# functions that change the shape of a tensor of their own in place, of which the double would not know
_RESHAPE = {torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile}


class _Constants(TorchFunctionMode):
    """What no dispatch sees: tensors made of Python's numbers, tensors that are reshaped in place."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            made = func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            return made if isinstance(made, _Double) else _Double(made)
        if func is Tensor.new_tensor and isinstance(args[0], _Double):
            return _Double(torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs))
        if func in _RESHAPE and isinstance(args[0], _Double):
            args, kwargs = tree_map_only(_Double, _values, (args, kwargs))
            return _Double(func(*args, **kwargs))
        return func(*args, **kwargs)


class Device(TorchDispatchMode):
    """The device; ``waits`` counts, by operation, how often the host waited for it."""

    def __init__(self):
        super().__init__()
        self._constants = _Constants()
        self.waits: Counter[str] = Counter()

    def __enter__(self):
        self._constants.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._constants.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        doubles = [x for x in given if isinstance(x, _Double)]
        packet = func.overloadpacket
        # a tensor of zeros without memory is one of the host's kernels only
        if packet is aten._efficientzerotensor:
            func, packet = aten.zeros.default, aten.zeros
        destination = kwargs.get("device")
        to_device = bool(doubles) if destination is None else torch.device(destination) == DEVICE
        if destination is not None and to_device:
            kwargs["device"] = _HOST
        if doubles and packet not in _COPIES:
            self._check(func, given)
        if doubles and (packet in _WAITS or not to_device or _selects(packet, args)):
            self.waits[str(packet)] += 1
        if packet in {aten.copy_, aten.copy} and not isinstance(args[0], _Double) and doubles:
            to_device = False
            self.waits[str(packet)] += 1
        result = func(*tree_map_only(_Double, lambda x: x.held, args), **tree_map_only(_Double, _values, kwargs))
        if not to_device:
            return result
        # in place: the argument itself
        own = {id(x.held): x for x in doubles}
        return tree_map_only(Tensor, lambda x: own[id(x)] if id(x) in own else _Double(x), result)

    @staticmethod
    def _check(func, given: list[Tensor]) -> None:
        """As on a device, numbers of the host may be used, its arrays may not."""
        strangers = [x for x in given if not isinstance(x, _Double) and x.ndim > 0]
        if strangers:
            raise RuntimeError(f"{func}: a tensor of shape {tuple(strangers[0].shape)} is on the host, others are not")


def _values(x: _Double) -> Tensor:
    return x.held


def _selects(packet: Any, args: tuple) -> bool:
    """Whether rows are selected by a mask, whose number the host needs."""
    if packet not in {aten.index, aten.index_put, aten.index_put_}:
        return False
    masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype == torch.bool]
    return packet is aten.index and bool(masks)


_OF_HOST = torch.Generator


class _OfDevice(_OF_HOST):
    device = DEVICE  # type: ignore[assignment]


class Generator(_OF_HOST):
    """What ``torch.Generator`` is, for the double too: its numbers are the host's."""

    def __new__(cls, device: torch.device | str = "cpu"):
        return _OfDevice() if torch.device(device) == DEVICE else _OF_HOST(device)


Moved = TypeVar("Moved", Tensor, nn.Module)


def to_device(what: Moved) -> Moved:
    """A tensor on the device, or the module itself with its parameters and buffers there."""
    if isinstance(what, Tensor):
        return _Double(what.detach().clone())
    for part in what.modules():
        for own in (part._parameters, part._buffers):
            own.update({name: _Double(x.detach().clone()) for name, x in own.items() if x is not None})  # type: ignore[misc]
    return what


def from_device(x: Tensor) -> Tensor:
    """The values of a tensor on the device."""
    assert isinstance(x, _Double)
    return x.held
