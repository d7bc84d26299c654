"""Generators that transform noise in a fixed number of deterministic steps: their inverse and their density."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.arguments import array, random_seed, whole_number
from dgm_infer.autodiff.jacobian_products import pull_back
from dgm_infer.errors import ArgumentError, ModelError
from dgm_infer.models import reference_tensor
from dgm_infer.settings import Settings

__all__ = ["EstimatedLogProb", "Step", "StepSettings", "SteppedGenerator", "check_floats"]


@dataclass(frozen=True)
class StepSettings(Settings):
    """How steps are inverted and their determinants computed."""

    tolerance: float = 0.75
    """Exponent of the machine precision that the largest residual of an inverse step reaches: 2e-12 in float64, 6e-6
    in float32; a rounding error of the step itself is below it."""
    fixed_points: int = 30
    """Fixed-point iterations of an inverse step before Newton's: where these converge at all, as fast as halving."""
    newton: int = 50
    """Newton iterations of an inverse step."""
    halvings: int = 12
    """Halvings of a Newton step that raises the residual."""
    elements: int = 2**24
    """Numbers in the Jacobians that are held at once: 128 MiB in float64."""
    lanczos: int = 40
    """Lanczos steps of an estimated log determinant; half of them give the error of the quadrature."""


SETTINGS = StepSettings()


class Step(NamedTuple):
    """One step ``F(x) = slope x + ...`` of rows ``[n, D]``, each by itself."""

    function: Callable[[Tensor], Tensor]
    slope: float
    """Derivative of F where the network is constant: fixed-point iterations divide by it."""


class EstimatedLogProb(NamedTuple):
    """An estimate of log p(x) and its standard error, each ``[...]``."""

    log_prob: Tensor
    std_error: Tensor
    """Spread over the probes, and the error of the quadrature."""


class SteppedGenerator(GenerativeModel):
    """``x = loc + scale F_n(... F_1(spread u))``, ``u ~ N(0, I)`` of as many entries as the image has.

    A subclass defines the steps. The map that is sampled, conditioned and whose density :meth:`log_prob` gives is these
    steps themselves, not the differential equation that they approximate. Latent: ``u``, the noise.
    """

    spread: float = 1.0
    """Standard deviation of the noise that the first step starts from."""

    def __init__(self, shape: tuple[int, ...], loc: float, scale: float):
        super().__init__()
        self.output_shape = shape
        self.dim = math.prod(shape)
        self.input_density = StandardNormal(self.dim)
        self.loc, self.scale = loc, scale

    @abstractmethod
    def steps_of(self, like: Tensor) -> list[Step]:
        """The steps from noise to data, in the dtype and on the device of a tensor."""

    def observed(self, u):
        x = self.spread * u.reshape(-1, self.dim)
        for step in self.steps_of(x):
            x = step.function(x)
        return (self.loc + self.scale * x).reshape(u.shape)

    def inverse(self, x) -> Tensor:
        """The noise that an image is made of: ``g(inverse(x)) = x``.

        Every step is solved for its input, by fixed-point iterations where these converge, else by Newton's with the
        Jacobian.

        Args:
            x: images ``[..., *output_shape]``, or flat ``[..., D]``.

        Returns:
            u, ``[..., D]``.

        Raises:
            ArgumentError: images of another shape.
            ModelError: a step has no input for this output, as where many images of noise lead to one.
        """
        rows, lead = self._rows("inverse", x)
        return self._backwards(rows)[0].div(self.spread).reshape(*lead, self.dim)

    @torch.no_grad()
    def log_prob(self, x) -> Tensor:
        """``log p(x) = log N(u; 0, I) - sum_k log|det J_k|``, ``u = inverse(x)``, J_k the Jacobian of step k.

        Exact, in D derivatives of the network per evaluation and a determinant of D x D per step.

        Args:
            x: images ``[..., *output_shape]``, or flat ``[..., D]``.

        Returns:
            nats, ``[...]``.

        Raises:
            ArgumentError, ModelError: as :meth:`inverse`.
        """
        rows, lead = self._rows("log_prob", x)
        u, inputs = self._backwards(rows)
        at_once = max(1, SETTINGS.elements // self.dim**2)
        total = self._log_normal(u)
        for step, points in zip(self.steps_of(rows), inputs, strict=True):
            logs = [torch.linalg.slogdet(_jacobian(step, part)).logabsdet for part in points.split(at_once)]
            total = total - torch.cat(logs)
        return total.reshape(lead)

    @torch.no_grad()
    def estimated_log_prob(self, x, probes: int = 16, seed: int = 0) -> EstimatedLogProb:
        """:meth:`log_prob` without Jacobians, for large images: ``log|det J_k| = tr log(J_k^T J_k) / 2``.

        The trace is estimated by random signs v, ``E[v^T log(J^T J) v]``, each by Lanczos steps with products ``J v``
        and ``J^T w`` (Ubaru, Chen and Saad 2017).

        Args:
            x: images ``[..., *output_shape]``, or flat ``[..., D]``.
            probes: vectors of signs per image and step, at least 2.
            seed: seed of the signs.

        Raises:
            ArgumentError, ModelError: as :meth:`inverse`.
        """
        probes = whole_number("estimated_log_prob", "probes", probes, 2)
        rng = torch.Generator().manual_seed(random_seed("estimated_log_prob", seed))
        rows, lead = self._rows("estimated_log_prob", x)
        u, inputs = self._backwards(rows)
        total, variance, bias = self._log_normal(u), torch.zeros_like(u[:, 0]), torch.zeros_like(u[:, 0])
        for step, points in zip(self.steps_of(rows), inputs, strict=True):
            fine, coarse = _log_determinants(step, points, probes, rng)
            total = total - fine.mean(0)
            variance = variance + fine.var(0) / probes
            bias = bias + (fine - coarse).mean(0)
        error = (variance + bias.square()).sqrt()
        return EstimatedLogProb(total.reshape(lead), error.reshape(lead))

    def _log_normal(self, u: Tensor) -> Tensor:
        """Log density of ``spread u``, with the final scale: ``[n, D] -> [n]``."""
        squares = (u / self.spread).square().sum(-1)
        return -squares / 2 - self.dim * math.log(math.sqrt(2 * math.pi) * self.spread * self.scale)

    def _rows(self, call: str, x) -> tuple[Tensor, torch.Size]:
        """Images as rows ``[n, D]`` before the final scale, in the module's dtype, and their leading dimensions."""
        like = reference_tensor(self)
        x = array(f"{type(self).__name__}.{call}", "x", x)
        shape, n = torch.Size(self.output_shape), len(self.output_shape)
        if x.shape[x.ndim - n :] == shape:
            x = x.flatten(-n) if n > 1 else x
        elif x.ndim < 1 or x.shape[-1] != self.dim:
            expected = f"[..., {', '.join(map(str, shape))}]"
            raise ArgumentError(f"{type(self).__name__}.{call}(x of shape {tuple(x.shape)}): expected {expected}")
        # a function holds no tensor that says a type
        dtype = like.dtype if like.numel() else x.dtype if x.is_floating_point() else like.dtype
        x = x.to(device=like.device, dtype=dtype)
        return (x.reshape(-1, self.dim) - self.loc) / self.scale, x.shape[:-1]

    @torch.no_grad()
    def _backwards(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The noise of rows ``[n, D]``, times ``spread``, and the inputs of every step, in the order of the steps."""
        inputs: list[Tensor] = []
        steps = self.steps_of(rows)
        for k in reversed(range(len(steps))):
            rows = self._solved(steps[k], rows, k, len(steps))
            inputs.insert(0, rows)
        return rows, inputs

    def _solved(self, step: Step, y: Tensor, k: int, n: int) -> Tensor:
        """x with ``F(x) = y``."""
        tolerance = torch.finfo(y.dtype).eps ** SETTINGS.tolerance * y.abs().amax(-1).clamp_min(1)

        def residual(x: Tensor) -> tuple[Tensor, Tensor]:
            difference = step.function(x) - y
            return difference, difference.abs().amax(-1).nan_to_num(torch.inf)

        x = y / step.slope
        best, (difference, least) = x, residual(x)
        for _ in range(SETTINGS.fixed_points):
            if (least <= tolerance).all():
                return best
            x = x - difference / step.slope
            difference, size = residual(x)
            better = size < least
            best, least = torch.where(better.unsqueeze(-1), x, best), torch.where(better, size, least)
        # rows that are not solved, by Newton's method from the best point
        for i in (least > tolerance).nonzero().flatten().split(max(1, SETTINGS.elements // self.dim**2)):
            best[i] = self._newton(step, y[i], best[i], tolerance[i])
        lost = residual(best)[1] > tolerance
        if lost.any():
            raise ModelError(
                f"{type(self).__name__}: no noise was found for which step {k + 1} of {n} gives {int(lost.sum())} of "
                f"these {len(lost)} outputs: the generator's own images have one; take more steps, or sample it, "
                "condition(..., noise=sd)"
            )
        return best

    def _newton(self, step: Step, y: Tensor, x: Tensor, tolerance: Tensor) -> Tensor:
        """Newton's method with halved steps, ``[n, D]``."""
        size = (step.function(x) - y).abs().amax(-1)
        for _ in range(SETTINGS.newton):
            if (size <= tolerance).all():
                break
            # least squares, where a Jacobian is singular
            move, _ = torch.linalg.solve_ex(_jacobian(step, x), step.function(x) - y)
            length, trial, new = torch.ones_like(size), x, size
            for _ in range(SETTINGS.halvings):
                trial = x - length.unsqueeze(-1) * move
                new = (step.function(trial) - y).abs().amax(-1).nan_to_num(torch.inf)
                worse = new > size
                if not worse.any():
                    break
                length = torch.where(worse, length / 2, length)
            gain = new < size
            x, size = torch.where(gain.unsqueeze(-1), trial, x), torch.where(gain, new, size)
            if not gain.any():
                break
        return x


def check_floats(call: str, field: str, network: Callable[..., object]) -> None:
    """Refuse a network whose weights have 16 bits.

    Raises:
        ArgumentError: some do; the message names the first.
    """
    if isinstance(network, nn.Module):
        for name, weight in network.named_parameters():
            if weight.dtype in (torch.float16, torch.bfloat16):
                raise ArgumentError(
                    f"{call}({field}=...): its weights {name} have 16 bits, {weight.dtype}, too few for "
                    f"derivatives and densities: pass {field}.float()"
                )


def _jacobian(step: Step, x: Tensor) -> Tensor:
    """``[n, D] -> [n, D, D]``."""
    return pull_back(step.function, x)[1].transpose(0, 1)


def _log_determinants(step: Step, x: Tensor, probes: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Estimates of ``log|det J|``, ``[probes, n]``, by all Lanczos steps and by half of them."""
    n, dim = x.shape
    signs = torch.randint(0, 2, (probes, n, dim), generator=rng).to(x) * 2 - 1
    points = x.expand(probes, n, dim).reshape(-1, dim)
    value, pull = torch.func.vjp(step.function, points)[:2]
    # J v is the derivative of J^T w with respect to w
    push = torch.func.vjp(lambda w: pull(w)[0], torch.zeros_like(value))[1]

    def product(v: Tensor) -> Tensor:
        return pull(push(v)[0])[0]

    m = min(SETTINGS.lanczos, dim)
    v = signs.reshape(-1, dim) / dim**0.5
    basis, diagonal, beside = [v], [], []
    for k in range(m):
        w = product(basis[k])
        diagonal.append((w * basis[k]).sum(-1))
        if k == m - 1:
            break
        # all vectors before, twice: rounding would bring back those that are found
        before = torch.stack(basis, -1)
        for _ in range(2):
            w = w - (before @ (before.mT @ w.unsqueeze(-1))).squeeze(-1)
        size = w.norm(dim=-1)
        beside.append(size)
        basis.append(w / size.clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(-1))
    results = []
    for length in (m, max(1, m // 2)):
        middle = torch.diag_embed(torch.stack(diagonal[:length], -1))
        if length > 1:
            upper = torch.diag_embed(torch.stack(beside[: length - 1], -1), 1)
            middle = middle + upper + upper.mT
        values, vectors = torch.linalg.eigh(middle)
        floor = torch.finfo(x.dtype).eps ** 2 * values[..., -1:]
        logs = values.clamp_min(floor).log()
        results.append((dim / 2 * (vectors[..., 0, :].square() * logs).sum(-1)).reshape(probes, n))
    return results[0], results[1]
