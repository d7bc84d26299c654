"""Networks as strangers write them, from two latents to few numbers, and what becomes of each.

A row is a builder and how the network is wrapped; ``refused`` has words of the one line that says why it is not
conditioned. All others are, and their posteriors are those of quadrature.
"""

import copy
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Stranger:
    """A network of another's, and what is expected of it."""

    make: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``from_module``."""
    dtype: torch.dtype = torch.float64
    """Of ``condition``."""
    refused: str | None = None
    """Words of the refusal; None where it is conditioned."""
    latent: Any = 2


def wrapped(function: Callable[..., Any], **parts: nn.Module) -> Callable[[], nn.Module]:
    """A module with parts, whose forward is ``function(module, z, ...)``."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *args, **kwargs):
            return function(self, *args, **kwargs)

    return Net


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh, out: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in zip((2, *widths), (*widths, out), strict=True):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


def between(layer: Callable[[], nn.Module], width: int = 8) -> Callable[[], nn.Module]:
    """``Linear, layer, Linear``."""
    return lambda: nn.Sequential(nn.Linear(2, width), layer(), nn.Linear(width, 4))


def images(*layers: nn.Module, channels: int = 4, side: int = 2) -> nn.Sequential:
    """Latents made small images ``[n, C, side, side]`` before the layers."""
    return nn.Sequential(nn.Linear(2, channels * side**2), nn.Unflatten(1, (channels, side, side)), nn.Tanh(), *layers)


class PixelNorm(nn.Module):
    def forward(self, x):
        return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int):
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(channels, 2), nn.SiLU(), nn.Linear(2, channels), nn.Sigmoid())

    def forward(self, x):
        return x * self.gate(x.mean((2, 3)))[:, :, None, None]


class Functional(nn.Module):
    """A layer of a function."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class GroupNorm32(nn.GroupNorm):
    """As in the code of guided diffusion: normalised in 32 bits."""

    def forward(self, input):
        return super().forward(input.float()).type(input.dtype)


class Attention(nn.Module):
    """One head over four tokens."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.embed, self.qkv, self.attend = nn.Linear(2, 16), nn.Linear(4, 12), attend

    def forward(self, z):
        q, k, v = self.qkv(self.embed(z).unflatten(1, (4, 4)).tanh()).chunk(3, -1)
        return self.attend(q, k, v).flatten(1)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.heads = nn.Linear(2, 16), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, z):
        x = self.embed(z).unflatten(1, (4, 4))
        return self.heads(x, x, x, need_weights=False)[0].flatten(1)


class Encoder(nn.Module):
    def __init__(self, layers: nn.Module):
        super().__init__()
        self.embed, self.layers = nn.Linear(2, 16), layers

    def forward(self, z):
        return self.layers(self.embed(z).unflatten(1, (4, 4))).flatten(1)


class Rotary(nn.Module):
    """Rotary embeddings by complex numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(2, 16), nn.Linear(16, 4)
        self.register_buffer("angles", torch.linspace(0, 1, 8).reshape(4, 2))

    def forward(self, z):
        x = torch.view_as_complex(self.embed(z).reshape(-1, 4, 2, 2).contiguous())
        x = x * torch.polar(torch.ones_like(self.angles), self.angles)
        return self.out(torch.view_as_real(x).flatten(1).tanh())


class Recurrent(nn.Module):
    """Every step of a recurrent layer over four steps."""

    def __init__(self, layer: nn.Module, width: int = 3):
        super().__init__()
        self.embed, self.layer, self.out = nn.Linear(2, 12), layer, nn.Linear(width, 1)

    def forward(self, z):
        states, _ = self.layer(self.embed(z).unflatten(1, (4, 3)))
        return self.out(states).squeeze(-1)


class Cells(nn.Module):
    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell, self.out = cell, nn.Linear(3, 1)

    def forward(self, z):
        state, outputs = None, []
        for _ in range(3):
            state = self.cell(z, state)
            h = state[0] if isinstance(state, tuple) else state
            outputs.append(self.out(h))
        return torch.cat(outputs, 1)


class Modulated(nn.Module):
    """A modulated, demodulated convolution of StyleGAN2 behind a mapping network, with its noise a buffer."""

    def __init__(self, channels: int = 3):
        super().__init__()
        self.mapping = nn.Sequential(PixelNorm(), nn.Linear(2, 4), nn.LeakyReLU(0.2), nn.Linear(4, channels))
        self.constant = nn.Parameter(torch.randn(1, channels, 4, 4))
        self.weight = nn.Parameter(torch.randn(1, channels, 3, 3))
        self.register_buffer("noise", torch.randn(1, 1, 4, 4))

    def forward(self, z):
        weight = self.weight * (1 + self.mapping(z))[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = self.constant.expand(len(z), -1, -1, -1).reshape(1, -1, 4, 4)
        return F.conv2d(x, weight.flatten(0, 1), padding=1, groups=len(z)).transpose(0, 1) + 0.1 * self.noise


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 1, 3, padding=1)
        self.embed = nn.Linear(2, 16)

    def forward(self, z):
        x = F.silu(self.first(self.embed(z).reshape(-1, 1, 4, 4)))
        return self.last(torch.cat([x, self.up(F.silu(self.down(x)))], 1))


class Coupling(nn.Module):
    """Affine couplings (RealNVP)."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(3))

    def forward(self, z):
        a, b = z.chunk(2, -1)
        for net in self.nets:
            s, t = net(a).chunk(2, -1)
            a, b = b * s.tanh().exp() + t, a
        return torch.cat([a, b], -1)


class Planar(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.tensor([1.0, -0.5])), nn.Parameter(torch.tensor([0.5, 0.3]))

    def forward(self, z):
        for _ in range(2):
            z = z + self.u * torch.tanh(z @ self.w + 0.3).unsqueeze(-1)
        return z


class Spline(nn.Module):
    """A monotone spline by searchsorted and gather."""

    knots: Tensor
    values: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("knots", torch.linspace(-6, 6, 13))
        self.register_buffer("values", torch.linspace(-6, 6, 13) + 0.5 * torch.linspace(-6, 6, 13).sin())

    def forward(self, z):
        i = torch.searchsorted(self.knots, z.detach().contiguous()).clamp(1, 12)
        low, high = self.knots[i - 1], self.knots[i]
        t = (z - low) / (high - low)
        s = t * t * (3 - 2 * t)
        return self.values[i - 1] * (1 - s) + self.values[i] * s + 0.2 * z


class Ode(nn.Module):
    """A neural ODE by Euler's method."""

    def __init__(self):
        super().__init__()
        self.field = mlp(8, out=2)

    def forward(self, z):
        for _ in range(4):
            z = z + 0.25 * self.field(z)
        return z


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.net = nn.Embedding(3, 2), nn.Linear(4, 4)

    def forward(self, z, label):
        return torch.tanh(self.net(torch.cat([z, self.table(label)], -1)))


class Noisy(nn.Module):
    """Draws the noise of every call."""

    def __init__(self):
        super().__init__()
        self.net = mlp(8)

    def forward(self, z, noise=None):
        x = self.net(z)
        return x + 0.1 * (torch.randn_like(x) if noise is None else noise)


class Locked(nn.Module):
    """With a lock, a logger, a generator and an open file beside its weights."""

    def __init__(self):
        super().__init__()
        self.net, self.lock, self.logger = mlp(8), threading.Lock(), logging.getLogger("stranger")
        self.numbers = (i for i in range(3))

    def forward(self, z):
        with self.lock:
            self.logger.debug("called")
            return self.net(z)


class Cached(nn.Module):
    """Keeps its last output, with its history."""

    def __init__(self):
        super().__init__()
        self.net = mlp(8)
        self.last = self.net(torch.zeros(1, 2))

    def forward(self, z):
        self.last = self.net(z)
        return self.last


class Graph(nn.Module):
    """A graph convolution by a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", (torch.eye(4) + torch.eye(4).roll(1, 0)).to_sparse())
        self.embed = nn.Linear(2, 4)

    def forward(self, z):
        return torch.sparse.mm(self.adjacency, self.embed(z).T).T.tanh()


class Codebook(nn.Module):
    """A vector-quantised latent, straight through."""

    def __init__(self):
        super().__init__()
        self.codes, self.net = nn.Parameter(torch.randn(8, 2)), mlp(8)

    def forward(self, z):
        nearest = self.codes[torch.cdist(z, self.codes).argmin(-1)]
        return self.net(z + (nearest - z).detach())


class OldStyle(torch.autograd.Function):
    """A function of the old style, with forward(ctx, x)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.exp()


class Halves(nn.Module):
    """A network in 16 bits inside one of 32."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.inner, self.dtype = mlp(8).to(dtype), dtype

    def forward(self, z):
        return self.inner(z.to(self.dtype)).to(z.dtype)


class Hyper(nn.Module):
    """Weights made by a network."""

    def __init__(self):
        super().__init__()
        self.net = mlp(8, out=6)
        self.register_buffer("grid", torch.linspace(-1, 1, 4))

    def forward(self, z):
        a, b, c = self.net(z).unflatten(1, (3, 2)).unbind(1)
        return (torch.sin(self.grid[:, None] * a[:, None] + b[:, None]) * c[:, None]).sum(-1)


class Kernelised(nn.Module):
    """A Gaussian process's mean and root: a Cholesky factor inside."""

    x: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("x", torch.linspace(0.2, 1, 4))

    def forward(self, z):
        scale = 0.3 + F.softplus(z[:, 0])[:, None, None]
        k = torch.exp(-0.5 * ((self.x[:, None] - self.x) / scale).square()) + 0.1 * torch.eye(4).to(z)
        root = torch.linalg.cholesky(k)
        return (root @ self.x.unsqueeze(-1)).squeeze(-1) * z[:, 1:]


class Eager(nn.Module):
    """Changes its parts in forward, as lazily made layers do."""

    def __init__(self):
        super().__init__()
        self.layer: Any = None

    def forward(self, z):
        if self.layer is None:
            self.layer = nn.Linear(2, 4).to(z)
        return self.layer(z).tanh()


class Output(OrderedDict):
    """An output with attributes, as in transformers and diffusers."""

    def __getattr__(self, name):
        return self[name]


def spectral_old(used: bool) -> nn.Module:
    net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 4)))
    if used:
        net(torch.randn(4, 2)).sum().backward()
    return net


def weight_old(used: bool) -> nn.Module:
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 8)), nn.Tanh(), nn.Linear(8, 4))
    if used:
        net(torch.randn(4, 2)).sum().backward()
    return net


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    net = mlp(8)
    prune.random_unstructured(net[0], "weight", amount=0.2)
    return net


def normalised(layer: nn.Module) -> nn.Module:
    """With statistics of some data."""
    net = nn.Sequential(nn.Linear(2, 8), layer, nn.Tanh(), nn.Linear(8, 4))
    for _ in range(5):
        net(torch.randn(64, 2))
    return net


def hooked() -> nn.Module:
    net = mlp(8)
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


def averaged() -> nn.Module:
    from torch.optim.swa_utils import AveragedModel

    net = mlp(8)
    mean = AveragedModel(net, multi_avg_fn=None)
    mean.update_parameters(net)
    return mean


def quantised() -> nn.Module:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(mlp(8), {nn.Linear}, dtype=torch.qint8)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))


def scripted() -> nn.Module:
    return torch.jit.script(mlp(8))


def traced() -> Any:
    return torch.jit.trace(mlp(8), torch.zeros(3, 2))


def frozen() -> nn.Module:
    return torch.jit.freeze(torch.jit.script(mlp(8).eval()))


def fourier(z: Tensor) -> Tensor:
    spectrum = torch.complex(z, z.flip(-1))
    return torch.fft.irfft(F.pad(spectrum, (0, 1)), n=4)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return torch.einsum("nid,njd,nje->nie", q, k, v) / torch.einsum("nid,njd->ni", q, k).unsqueeze(-1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)


def sampled(z: Tensor) -> Tensor:
    """A picture looked up where the latents say."""
    picture = torch.linspace(-1, 1, 9).to(z).reshape(1, 1, 3, 3).square().expand(len(z), -1, -1, -1)
    places = torch.stack([z, 0.5 * z], 1).tanh().unsqueeze(1)
    return F.grid_sample(picture, places, align_corners=True).flatten(1)


def warped(z: Tensor) -> Tensor:
    """A spatial transformer."""
    turn = torch.stack([z.cos(), z.sin()], -1)
    theta = torch.cat([turn, 0.1 * z.unsqueeze(-1)], -1)
    picture = torch.linspace(-1, 1, 16).to(z).reshape(1, 1, 4, 4).cos().expand(len(z), -1, -1, -1)
    return F.grid_sample(picture, F.affine_grid(theta, [len(z), 1, 3, 3], align_corners=False), align_corners=False)


def experts(hard: bool) -> Callable[[], nn.Module]:
    def forward(net, z):
        gates = net.gate(z).softmax(-1)
        if hard:
            gates = F.one_hot(gates.argmax(-1), 3).to(gates) * gates
        return sum(gates[:, i : i + 1] * expert(z) for i, expert in enumerate(net.experts))

    return wrapped(forward, gate=nn.Linear(2, 3), experts=nn.ModuleList(mlp(4) for _ in range(3)))


def numpy_inside(net, z):
    return torch.from_numpy(net.net(z).detach().numpy())


def without_gradient(net, z):
    with torch.no_grad():
        return net.net(z)


def in_inference(net, z):
    with torch.inference_mode():
        return net.net(z)


def under_autocast(net, z):
    with torch.autocast("cpu", torch.bfloat16):
        return net.net(z)


def stopped(net, z):
    return net.net(z) + 0.5 * z[:, :1].detach() * z[:, 1:]


def in_place(net, z):
    x = net.net(z)
    x += 1
    x[:, 0] = x[:, 0] * 2
    return x


def on_numbers(net, z):
    return net.net(z) if float(z.sum()) > 0 else 2 * net.net(z)


SILU = {"activation": nn.SiLU}
S = Stranger
TABLE: dict[str, Stranger] = {
    # ------------------------------------------------------------------------------------------- activations and norms
    **{
        kind.__name__: S(lambda kind=kind: mlp(8, 8, activation=kind))
        for kind in (nn.Tanh, nn.SiLU, nn.GELU, nn.ELU, nn.Softplus, nn.Mish, nn.SELU, nn.CELU, nn.Softsign)
    },
    **{
        kind.__name__: S(lambda kind=kind: mlp(8, activation=kind))
        for kind in (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Hardswish, nn.ReLU6, nn.LogSigmoid, nn.Tanhshrink)
    },
    "ReLU in place": S(lambda: mlp(8, activation=lambda: nn.ReLU(inplace=True))),
    "sine": S(between(lambda: Functional(torch.sin))),
    "GLU": S(lambda: nn.Sequential(nn.Linear(2, 8), nn.GLU(), nn.Linear(4, 4))),
    "LayerNorm": S(between(lambda: nn.LayerNorm(8))),
    "RMSNorm": S(between(lambda: nn.RMSNorm(8))),
    "PixelNorm": S(between(PixelNorm)),
    "residual": S(between(lambda: Residual(nn.Linear(8, 8), nn.SiLU()))),
    "BatchNorm1d": S(lambda: normalised(nn.BatchNorm1d(8))),
    "BatchNorm1d without statistics": S(
        lambda: normalised(nn.BatchNorm1d(8, track_running_stats=False)), refused="batch statistics"
    ),
    "Dropout": S(between(lambda: nn.Dropout(0.5))),
    "dropout of every call": S(
        between(lambda: Functional(lambda x: F.dropout(x, 0.5, training=True))), refused="different outputs"
    ),
    "weight norm, old": S(lambda: weight_old(False)),
    "weight norm, old, used": S(lambda: weight_old(True)),
    "weight norm": S(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 8)), nn.Tanh(), nn.Linear(8, 4))),
    "spectral norm, old": S(lambda: spectral_old(False)),
    "spectral norm, old, used": S(lambda: spectral_old(True)),
    "spectral norm": S(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(2, 8)), nn.Tanh(), nn.Linear(8, 4))
    ),
    "orthogonal": S(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(2, 8)), nn.Tanh(), nn.Linear(8, 4))),
    "pruned": S(pruned),
    "clamped": S(between(lambda: Functional(lambda x: x.clamp(-0.5, 0.5)))),
    # ---------------------------------------------------------------------------------------------------------- images
    "DCGAN": S(
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 4, 2, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(True),
            nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        ),
        {"output_range": (-1, 1)},
        latent=(2, 1, 1),
    ),
    "nearest": S(lambda: images(nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 3, padding=1))),
    "bilinear": S(
        lambda: images(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.Conv2d(4, 1, 3, padding=1))
    ),
    "bicubic": S(lambda: images(Functional(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")))),
    "area": S(lambda: images(Functional(lambda x: F.interpolate(x, size=1, mode="area")))),
    "pixel shuffle": S(lambda: images(nn.Conv2d(4, 8, 1), nn.PixelShuffle(2))),
    "output padding": S(lambda: images(nn.ConvTranspose2d(4, 1, 3, 2, 1, output_padding=1))),
    "depthwise": S(lambda: images(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 2, 1))),
    "dilated": S(lambda: images(nn.Conv2d(4, 2, 2, padding=1, dilation=2))),
    "reflected": S(lambda: images(nn.ReflectionPad2d(1), nn.Conv2d(4, 1, 3))),
    "circular": S(lambda: images(nn.Conv2d(4, 1, 3, padding=1, padding_mode="circular"))),
    "replicated": S(lambda: images(nn.ReplicationPad2d(1), nn.Conv2d(4, 1, 3))),
    "sound": S(lambda: nn.Sequential(nn.Linear(2, 8), nn.Unflatten(1, (2, 4)), nn.SiLU(), nn.Conv1d(2, 1, 3))),
    "volume": S(lambda: nn.Sequential(nn.Linear(2, 8), nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 1, 2), nn.Tanh())),
    "U-Net": S(UNet),
    "ResNet": S(
        lambda: images(Residual(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()), nn.Conv2d(4, 1, 1))
    ),
    "squeeze and excitation": S(lambda: images(Squeeze(4), nn.Conv2d(4, 1, 1))),
    "InstanceNorm": S(lambda: images(nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 1, 1))),
    "GroupNorm": S(lambda: images(nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1))),
    "GroupNorm32": S(lambda: images(GroupNorm32(2, 4), nn.Conv2d(4, 1, 1)), refused="dtype=torch.float32"),
    "GroupNorm32 in 32 bits": S(lambda: images(GroupNorm32(2, 4), nn.Conv2d(4, 1, 1)), dtype=torch.float32),
    "max pool": S(lambda: images(nn.MaxPool2d(2))),
    "average pool": S(lambda: images(nn.AvgPool2d(2))),
    "adaptive pool": S(lambda: images(nn.AdaptiveAvgPool2d(1))),
    "progressive": S(lambda: images(nn.Conv2d(4, 4, 3, padding=1), nn.LeakyReLU(0.2), PixelNorm(), nn.Conv2d(4, 1, 1))),
    "StyleGAN2": S(Modulated),
    "channels last": S(lambda: images(nn.Conv2d(4, 1, 1)).to(memory_format=torch.channels_last)),
    "grid_sample": S(lambda: Functional(sampled)),
    "spatial transformer": S(lambda: Functional(warped)),
    # ------------------------------------------------------------------------------------------------------- attention
    "attention": S(lambda: Attention(plain_attention)),
    "scaled_dot_product_attention": S(lambda: Attention(F.scaled_dot_product_attention)),
    "causal attention": S(lambda: Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))),
    "linear attention": S(lambda: Attention(linear_attention)),
    "MultiheadAttention": S(Heads),
    "TransformerEncoderLayer": S(lambda: Encoder(encoder_layer(activation="gelu"))),
    "TransformerEncoder": S(
        lambda: Encoder(nn.TransformerEncoder(encoder_layer(norm_first=True), 2, enable_nested_tensor=False))
    ),
    "rotary": S(Rotary),
    # ------------------------------------------------------------------------------------------------------- recurrent
    "RNN": S(lambda: Recurrent(nn.RNN(3, 3, batch_first=True))),
    "GRU": S(lambda: Recurrent(nn.GRU(3, 3, batch_first=True))),
    "LSTM": S(lambda: Recurrent(nn.LSTM(3, 3, batch_first=True))),
    "LSTM, both ways": S(lambda: Recurrent(nn.LSTM(3, 3, batch_first=True, bidirectional=True), 6)),
    "GRUCell": S(lambda: Cells(nn.GRUCell(2, 3))),
    "LSTMCell": S(lambda: Cells(nn.LSTMCell(2, 3))),
    # --------------------------------------------------------------------------------------------- flows and functions
    "RealNVP": S(Coupling),
    "planar": S(Planar),
    "spline": S(Spline),
    "neural ODE": S(Ode),
    "hypernetwork": S(Hyper),
    "Gaussian process": S(Kernelised),
    "Fourier features": S(between(lambda: Functional(lambda x: torch.cat([x[:, :4].sin(), x[:, 4:].cos()], -1)))),
    "FFT": S(lambda: Functional(fourier)),
    "einsum": S(lambda: Functional(lambda z: torch.einsum("ni,nj->nij", z, z.tanh()))),
    "cumsum": S(between(lambda: Functional(lambda x: F.softplus(x).cumsum(-1)))),
    "cdist": S(lambda: Functional(lambda z: torch.cdist(z, torch.eye(2).to(z) + 3))),
    "matrix_exp": S(lambda: Functional(lambda z: torch.matrix_exp(z[:, :, None] * z[:, None].tanh()))),
    "solve": S(
        lambda: Functional(lambda z: torch.linalg.solve(torch.diag_embed(1 + z.square()) + 0.3, z.unsqueeze(-1)))
    ),
    "sorted": S(lambda: Functional(lambda z: z.sort(-1).values)),
    "inner vmap": S(lambda: Functional(lambda z: torch.vmap(lambda row: row.sin() * row.sum())(z))),
    "inner gradient": S(
        lambda: Functional(torch.vmap(torch.func.grad(lambda row: row.sin().prod() + row.square().sum())))
    ),
    "soft experts": S(experts(False)),
    "hard experts": S(experts(True)),
    "checkpoint": S(wrapped(lambda net, z: checkpoint(net.net, z, use_reentrant=False), net=mlp(8))),
    "checkpoint, reentrant": S(
        wrapped(lambda net, z: checkpoint(net.net, z, use_reentrant=True), net=mlp(8)), refused="use_reentrant=False"
    ),
    "in place": S(wrapped(in_place, net=mlp(8))),
    # -------------------------------------------------------------------------------------------- arguments and outputs
    "label": S(Labelled, {"arguments": {"label": torch.tensor(1)}}),
    "label as a float": S(Labelled, {"arguments": {"label": 1.0}}, refused="torch.tensor(1)"),
    "dictionary": S(wrapped(lambda net, z: {"sample": net.net(z)}, net=mlp(8)), {"select": "sample"}),
    "output with attributes": S(wrapped(lambda net, z: Output(sample=net.net(z)), net=mlp(8)), {"select": "sample"}),
    "tuple": S(wrapped(lambda net, z: (net.net(z), None), net=mlp(8))),
    "noise of every call": S(Noisy, refused="inputs={'noise'"),
    "noise fixed": S(Noisy, {"arguments": {"noise": torch.zeros(4)}}),
    "time step": S(
        wrapped(lambda net, z, t: net.net(z) * t.view(-1, 1), net=mlp(8)), {"arguments": {"t": torch.tensor(0.5)}}
    ),
    # -------------------------------------------------------------------------------------------------- how it is made
    "scripted": S(scripted),
    "traced": S(traced),
    "frozen": S(frozen, refused="dtype=torch.float32"),
    "frozen in 32 bits": S(frozen, dtype=torch.float32),
    "average of weights": S(averaged),
    "DataParallel": S(lambda: nn.DataParallel(mlp(8))),
    "copied": S(lambda: copy.deepcopy(mlp(8))),
    "quantised": S(quantised, refused="quantized"),
    "lazy": S(lazy, refused="call it once"),
    "lock and logger": S(Locked),
    "cached output": S(Cached),
    "hook": S(hooked),
    "16 bits": S(lambda: mlp(8).half()),
    "16 bits inside": S(lambda: Halves(torch.bfloat16), refused="without float() or half()"),
    "64 bits": S(lambda: mlp(8).double()),
    "autocast": S(wrapped(under_autocast, net=mlp(8))),
    "sparse": S(Graph),
    "complex buffer": S(
        wrapped(lambda net, z: z, net=nn.ParameterDict({"w": torch.ones(2, dtype=torch.complex64)})), refused="complex"
    ),
    # --------------------------------------------------------------------------------------------------------- refused
    "without gradient": S(wrapped(without_gradient, net=mlp(8)), refused="no_grad()"),
    "inference mode": S(wrapped(in_inference, net=mlp(8)), refused="no_grad()"),
    "NumPy inside": S(wrapped(numpy_inside, net=mlp(8)), refused="derivative"),
    "stop-gradient": S(wrapped(stopped, net=mlp(8)), refused="do not match"),
    "codebook": S(Codebook, refused="do not match"),
    "old autograd.Function": S(between(lambda: Functional(OldStyle.apply))),
    "branch on the batch": S(wrapped(on_numbers, net=mlp(8)), refused="branch"),
    "made at the first call": S(Eager, refused="call it once"),
}
