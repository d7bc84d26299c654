"""Where a base starts from that is given no start: the mean of standard normals, of the target's type and device."""

import torch
from torch import Tensor

from ..arguments import available_device, floating_type
from ..target import Target, reference

__all__ = ["origin"]


def origin(
    call: str,
    target: Target,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    unknown: torch.dtype | None = None,
) -> Tensor:
    """Zeros ``[*batch, D]`` of the type and on the device that are given, or else those of the target.

    Args:
        unknown: the type if neither says; None for torch's default.
    """
    like = reference(target)
    known = unknown if like is None else like.dtype
    dtype = known if dtype is None else floating_type(call, "dtype", dtype)
    if device is not None:
        device = available_device(call, "device", device)
    elif like is not None:
        device = like.device
    return torch.zeros(*target.batch_shape, target.dim, dtype=dtype, device=device)
