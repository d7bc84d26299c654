"""Attention as torch's plain operations, which have derivatives of every order: fused kernels have only the first."""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.backends import cuda

P = ParamSpec("P")
R = TypeVar("R")
# All fused kernels, also those of the CPU: whether they are on, and how they are switched.
_FUSED = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
_LOCK = threading.Lock()
_depth = 0
_before: list[bool] = []


def differentiable_attention(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose calls of ``scaled_dot_product_attention`` are made by its mathematical kernel.

    The switches are torch's own, of the whole process: they are set while any such function runs, and set back after.
    """

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        _enter()
        try:
            return function(*args, **kwargs)
        finally:
            _leave()

    return plain


def _enter() -> None:
    global _depth
    with _LOCK:
        _depth += 1
        if _depth == 1:
            _before[:] = [enabled() for enabled, _ in _FUSED]
            for _, switch in _FUSED:
                switch(False)


def _leave() -> None:
    global _depth
    with _LOCK:
        _depth -= 1
        if _depth == 0:
            for (_, switch), value in zip(_FUSED, _before, strict=True):
                switch(value)
