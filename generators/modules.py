"""Generators from existing networks: a module, a ``torch.hub`` repository, weights in a file."""

import copy
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dgm_infer import GenerativeModel, Product, StandardNormal, WithNoise
from dgm_infer.arguments import (
    allocatable,
    choice,
    file_path,
    flag,
    function,
    instance,
    interval,
    mapping,
    sizes,
    whole_number,
)
from dgm_infer.arguments.values import shown
from dgm_infer.errors import ArgumentError, CheckpointError, ModelError, cause
from dgm_infer.models import InputDensity, frozen_copy, reference_tensor

from .smoothing import Smoothing, smooth_copy
from .weights import load_weights

__all__ = ["NetworkGenerator", "from_hub", "from_module"]

Latent = int | Sequence[int] | InputDensity
Function = Callable[..., Any]


class NetworkGenerator(GenerativeModel):
    """``x = transform(net(z, ...))`` of any network; see :func:`from_module`, which makes one.

    Latents: ``z`` in the network's shape, and each of the other inputs by its name.
    """

    smoothing: Smoothing | None = None
    """What ``from_module(smooth=)`` changed, with the largest difference in the images; None without it."""

    def __init__(
        self,
        net: Function,
        latent: Latent,
        output_range: tuple[float, float] | None,
        transform: Function | None,
        inputs: Mapping[str, Latent | Sequence[Latent]],
        arguments: Mapping[str, Any],
        select: int | str,
    ):
        super().__init__()
        # modules are registered as parts, so that they move and are copied with this one
        self.net, self.transform = net, transform
        single, self.lists = _single_inputs(inputs)
        densities = {name: _density(name, value) for name, value in (("z", latent), *single.items())}
        self.shapes = {name: shape for name, (shape, _) in densities.items()}
        parts = [density for _, density in densities.values()]
        self.input_density = parts[0] if len(parts) == 1 else Product(*parts)
        self.output_range = output_range
        self.select = select
        dtype = reference_tensor(self).dtype
        arguments = {name: _as_torch(value, dtype) for name, value in arguments.items()}
        self.options = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
        self.tensors = [name for name in arguments if name not in self.options]
        for name in self.tensors:
            self.register_buffer(f"argument_{name}", arguments[name].detach().clone())
        # tensors in lists move and are cast with the others
        self.listed = {name: type(v) for name, v in self.options.items() if _is_list_of_tensors(v)}
        self.counts = {name: len(self.options[name]) for name in self.listed}
        for name in self.listed:
            for i, value in enumerate(self.options.pop(name)):
                self.register_buffer(f"argument_{name}_{i}", value.detach().clone())
        parts = [module for part in (net, transform) if isinstance(part, nn.Module) for module in part.modules()]
        # the mode is that of the network's parts: check() and condition() report what is wrong with it
        self.training = any(getattr(module, "training", False) for module in parts) if parts else self.training
        self.output_shape = self._measured(_label_remedy(arguments))

    def smoothed(self, beta: float) -> "NetworkGenerator":
        """The generator of a smooth copy of the network: see :func:`from_module`."""
        net, smoothing = smooth_copy(self.net, beta)
        # the network itself is not copied twice
        other = copy.copy(self)
        other._modules, other.net = dict(self._modules), net
        other.training = False
        other.smoothing = smoothing.measured(self.prior_images(16), other.prior_images(16))
        return other

    def latents(self, u):
        parts = u.split([math.prod(shape) for shape in self.shapes.values()], -1)
        return {name: part.unflatten(-1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def observed(self, u):
        return self._images(u).reshape(*u.shape[:-1], math.prod(self.output_shape))

    def _images(self, u: Tensor) -> Tensor:
        """``[..., Du] -> [rows, *output_shape]``, with the single leading dimension that networks expect."""
        z, *others = (rows.reshape(-1, *rows.shape[u.ndim - 1 :]) for rows in self.latents(u).values())
        n = len(z)
        inputs: dict[str, Any] = dict(zip(list(self.shapes)[1:], others, strict=True))
        for name, names in self.lists.items():
            inputs[name] = [inputs.pop(part) for part in names]
        fixed = {name: getattr(self, f"argument_{name}") for name in self.tensors}
        fixed: dict[str, Any] = {name: value.expand(n, *value.shape) for name, value in fixed.items()}
        for name, kind in self.listed.items():
            fixed[name] = kind(getattr(self, f"argument_{name}_{i}") for i in range(self.counts[name]))
        x = self.net(z, **inputs, **fixed, **self.options)
        if not isinstance(x, Tensor):
            x = _selected(x, self.select)
        x = x if self.transform is None else self.transform(x)
        if not isinstance(x, Tensor) or x.ndim < 1 or len(x) != n:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
            raise ModelError(f"the network returns outputs of {what} for {n} latents: expected [{n}, ...]")
        return x

    def _measured(self, label: str) -> tuple[int, ...]:
        name = _name(self.net)
        try:
            shape = tuple(self.prior_images(2).shape[1:])
            # a label [n, 1] makes embeddings [n, 1, D], and added to latents [n, D] these are [n, n, D]
            if label and (other := tuple(self.prior_images(3).shape[1:])) != shape:
                raise ModelError(f"{name} returns images of shape {shape} for 2 latents, {other} for 3")
            return shape
        except ModelError as error:
            if label:
                raise ModelError(f"{error} ({label})") from error
            raise
        except Exception as error:
            label = label or _float_label_remedy(self, str(error))
            shapes = ", ".join(f"{key} {(2, *shape)}" for key, shape in self.shapes.items())
            raise ModelError(
                f"{name} fails for inputs of shape {shapes}: {cause(error)} (latent= is the shape of one latent, "
                f"inputs= of its other random inputs, arguments= what stays fixed{label and f'; {label}'})"
            ) from error

    def prior_images(self, n: int) -> Tensor:
        """The images of the same ``n`` prior draws at every call, in evaluation mode: ``[n, *output_shape]``."""
        # on a copy: the modes and statistics of the caller's network stay as they are
        like = reference_tensor(self)
        frozen = frozen_copy(self, like.dtype, like.device)
        before = len(list(frozen.parameters()))
        u = self.input_density.sample((n,), generator=torch.Generator().manual_seed(0), dtype=like.dtype)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = frozen._images(u.to(like.device))
        if len(list(frozen.parameters())) != before:
            raise ModelError(f"{_name(self.net)} makes layers at its first call: call it once before")
        return found


def from_module(
    net: Function,
    latent: Latent,
    *,
    output_range: tuple[float, float] | None = None,
    noise: float | Tensor | None = None,
    transform: Function | None = None,
    inputs: Mapping[str, Latent | Sequence[Latent]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    select: int | str = 0,
    smooth: float | None = None,
    weights: str | os.PathLike | None = None,
    key: str | None = None,
    trust: bool = False,
) -> NetworkGenerator | WithNoise:
    """Make any network ``z -> image`` a generator to condition: ``x = transform(net(z, **inputs, **arguments))``.

    Pass the network in evaluation mode, in which it generates. :func:`dgm_infer.check` reports whether it can be
    conditioned.

    Args:
        net: a module or function of ``z [n, *latent]`` that returns images ``[n, *output_shape]``, or a tuple, list or
            mapping that contains them.
        latent: length of z, or its shape such as (C, H, W), with independent N(0, 1) entries; or its density.
        output_range: open interval that contains the transformed images: (-1, 1) for tanh. None for any.
        noise: standard deviation of Gaussian output noise, which makes more pixels than latents observable; None for
            none.
        transform: function applied to the images, such as ``lambda x: (x + 1) / 2``.
        inputs: the network's other random inputs by argument name, each given like ``latent``: the noise images of a
            StyleGAN. For an argument that takes a list of them, the list of their shapes: they are the latents
            ``noise_0``, ``noise_1`` and so on.
        arguments: fixed arguments by name: class labels, truncation, fixed noise. Tensors, also of NumPy, are those of
            one image, and are repeated for every row: a class label is a scalar tensor, such as ``torch.tensor(3)``.
            Lists of tensors are passed as they are.
        select: index or key of the images among several outputs.
        smooth: use a copy of the network, in evaluation mode, with softplus of this ``beta`` in place of ReLU (leaky
            and clamped ones likewise) and batch normalisations folded: log|J J^T| jumps at every kink of a ReLU, which
            short steps do not cure. The result's ``smoothing`` holds the largest difference in the images; 10 is a good
            start. None for the network as it is.
        weights: a file with the network's weights: ``.safetensors``, or written by ``torch.save``.
        key: key of the weights in that file, or the prefix of their names, if it holds several networks that fit.
        trust: also load a file whose pickle may run any code.

    Returns:
        a ``NetworkGenerator``, or with ``noise`` a ``WithNoise``.

    Raises:
        ArgumentError: a shape, a range or the noise is illegal.
        ModelError: the network does not take such inputs, or returns no images.
        CheckpointError: the weights are missing, damaged, refused, belong to another network, or are of several.
    """
    function("from_module", "net", net, "a torch.nn.Module")
    if transform is not None:
        function("from_module", "transform", transform, "lambda x: (x + 1) / 2")
    if weights is not None:
        if not isinstance(net, nn.Module):
            raise ArgumentError(f"from_module(weights={weights!r}): {_name(net)} is not a torch.nn.Module")
        load_weights(net, file_path("from_module", "weights", weights), key, trust)
    inputs = mapping("from_module", "inputs", inputs, "{'noise': (1, 8, 8)}")
    arguments = mapping("from_module", "arguments", arguments, "{'label': torch.tensor(3)}")
    if not isinstance(select, int | str) or isinstance(select, bool):
        raise ArgumentError(f"from_module(select={shown(select)}): must be an index or a key, such as 0 or 'sample'")
    if key is not None:
        instance("from_module", "key", key, str, "'state_dict'")
    flag("from_module", "trust", trust)
    for name in inputs:
        if name == "z" or name in arguments:
            raise ArgumentError(
                f"from_module(inputs={name!r}): the name is already used by the latents or by arguments"
            )
    if output_range is not None:
        output_range = interval("from_module", "output_range", output_range)
    model = NetworkGenerator(net, latent, output_range, transform, inputs, arguments, select)
    if smooth is not None:
        model = model.smoothed(smooth)
    if noise is None:
        return model
    noisy = WithNoise(model, noise)
    # only the flag: train() would change the caller's network
    noisy.training = model.training
    return noisy


def from_hub(
    repository: str | os.PathLike,
    entry: str,
    latent: Latent,
    *,
    source: Literal["local", "github"] = "local",
    entry_arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> NetworkGenerator | WithNoise:
    """A generator from a network of a ``torch.hub`` repository, in evaluation mode; runs the repository's code.

    Args:
        repository: the folder with ``hubconf.py``; with ``source="github"``, ``owner/name[:branch]``.
        entry: function of ``hubconf.py`` that returns the network.
        latent: as in :func:`from_module`.
        source: ``local`` never downloads the repository; ``github`` does. The entry itself may download more.
        entry_arguments: arguments of that function, such as ``{"pretrained": True}``.
        options: the other arguments of :func:`from_module`.

    Raises:
        CheckpointError: the repository or entry does not exist, or fails.
        ArgumentError, ModelError: as in :func:`from_module`.
    """
    choice("from_hub", "source", source, ("local", "github"))
    file_path("from_hub", "repository", repository)
    repository = os.fspath(repository)
    if source == "local" and not (Path(repository) / "hubconf.py").is_file():
        raise CheckpointError(
            f"{repository} is not a torch.hub repository: it has no hubconf.py (source='github' downloads owner/name)"
        )
    try:
        arguments = dict(entry_arguments or {})
        # the caller has named it: that is the trust that torch would ask for
        net = torch.hub.load(repository, entry, source=source, trust_repo=True, verbose=False, **arguments)  # type: ignore[arg-type]
    except Exception as error:
        raise CheckpointError(
            f"entry {entry!r} of the torch.hub repository {repository} fails: {cause(error)}"
        ) from error
    if not isinstance(net, nn.Module):
        raise CheckpointError(f"entry {entry!r} of {repository} returns a {type(net).__name__}, not a torch.nn.Module")
    return from_module(net.eval(), latent, **options)


def _density(name: str, latent: Latent) -> tuple[tuple[int, ...], InputDensity]:
    """Shape of one latent, and the density of its flat entries."""
    if isinstance(latent, InputDensity):
        return (latent.dim,), latent
    what = "latent" if name == "z" else f"inputs[{name!r}]"
    if isinstance(latent, Sequence):
        shape = sizes("from_module", what, latent)
    else:
        try:
            shape = (whole_number("from_module", what, latent),)
        except ArgumentError as error:
            raise ArgumentError(
                f"{error}, a shape such as (1, 4, 4), or a density: dgm.StandardNormal(16), dgm.Logistic(16)"
            ) from None
    # that of the two latents that the network is tried with
    allocatable("from_module", what, latent, 2 * math.prod(shape), "give the shape of one latent")
    return shape, StandardNormal(math.prod(shape))


def _label_remedy(arguments: Mapping[str, Any]) -> str:
    """What to write in place of an integer or a vector of them, if it is meant as a class label; empty without one."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.ndim == 1 and len(value):
            value = int(value[0])
        if type(value) is int:
            return f"if {name} is a class label, pass a scalar tensor: arguments={{{name!r}: torch.tensor({value})}}"
    return ""


def _float_label_remedy(model: NetworkGenerator, error: str) -> str:
    """What to write in place of a class label as a float, if the network fails for want of an integer."""
    if not re.search(r"indices|\bLong\b|int64|integer|index tensor", error):
        return ""
    given = {name: getattr(model, f"argument_{name}") for name in model.tensors} | model.options
    for name, value in given.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
            return (
                f"if {name} is a class label, pass a scalar tensor: arguments={{{name!r}: torch.tensor({int(value)})}}"
            )
    return ""


def _single_inputs(
    inputs: Mapping[str, Latent | Sequence[Latent]],
) -> tuple[dict[str, Latent], dict[str, list[str]]]:
    """Inputs by name, ``noise_0`` and so on for an argument ``noise`` that takes a list of them, and those lists."""
    single: dict[str, Any] = {}
    lists: dict[str, list[str]] = {}
    for name, value in inputs.items():
        if isinstance(value, list | tuple) and any(isinstance(part, Sequence | InputDensity) for part in value):
            lists[name] = [f"{name}_{i}" for i in range(len(value))]
            single |= dict(zip(lists[name], value, strict=True))
        else:
            single[name] = value
    return single, lists


def _as_torch(value: Any, dtype: torch.dtype) -> Any:
    """NumPy's arrays and numbers as those of torch and Python, those in a list too; arrays of floats in this type."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value, dtype=dtype if value.dtype.kind == "f" else None)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list) and any(isinstance(part, np.ndarray) for part in value):
        return [_as_torch(part, dtype) for part in value]
    return value


def _is_list_of_tensors(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(part, Tensor) for part in value)


def _selected(outputs: Any, select: int | str) -> Tensor:
    try:
        chosen = outputs[select]
    except (LookupError, TypeError) as error:
        keys = f": {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) else ""
        raise ModelError(
            f"the network returns a {type(outputs).__name__}{keys}; select={select!r} is not in it: say which output "
            "is the image, from_module(select=...)"
        ) from error
    if not isinstance(chosen, Tensor):
        raise ModelError(f"the network's output {select!r} is a {type(chosen).__name__}, not a tensor: change select")
    return chosen


def _name(net: Function) -> str:
    return type(net).__name__ if isinstance(net, nn.Module) else getattr(net, "__name__", type(net).__name__)
