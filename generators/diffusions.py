"""Diffusion models as functions of noise, by deterministic steps (Song, Meng and Ermon 2021)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dgm_infer.arguments import allocatable, array, choice, function, interval, mapping, sizes, whole_number, within
from dgm_infer.arguments.values import shown
from dgm_infer.errors import ArgumentError, ModelError, cause
from dgm_infer.models import frozen_copy, reference_tensor

from .steps import Step, SteppedGenerator, check_floats

__all__ = ["DiffusionGenerator", "from_diffusion"]

Prediction = Literal["noise", "data", "velocity"]
DiffusionSolver = Literal["ddim", "heun"]
# diffusers' names
_PREDICTIONS: dict[str, Prediction] = {"epsilon": "noise", "sample": "data", "v_prediction": "velocity"}


class Level(NamedTuple):
    """A level of noise, ``x_t = alpha x_1 + sigma e``."""

    time: float | int
    """As the network takes it: an integer where timesteps are."""
    alpha: float
    sigma: float


class DiffusionGenerator(SteppedGenerator):
    """``x = g(u)`` by the deterministic steps of a diffusion model; see :func:`from_diffusion`. Latent: ``u``."""

    def __init__(
        self,
        network: Callable[..., Any],
        levels: Sequence[Level],
        shape: tuple[int, ...],
        prediction: Prediction,
        solver: DiffusionSolver,
        arguments: Mapping[str, Any],
        guidance: float,
        null: Mapping[str, Any],
        data_range: tuple[float, float],
    ):
        super().__init__(shape, 0.0, 1.0)
        self.network, self.levels = network, list(levels)
        self.spread = math.hypot(levels[0].alpha, levels[0].sigma)
        self.prediction, self.solver, self.guidance = prediction, solver, guidance
        self.data_range = data_range
        self.names = {"argument": tuple(arguments), "null": tuple({**arguments, **null} if guidance != 1 else ())}
        for kind, given in (("argument", arguments), ("null", {**arguments, **null})):
            for name in self.names[kind]:
                self.register_buffer(f"{kind}_{name}", torch.as_tensor(given[name]).detach().clone())
        self.training = isinstance(network, nn.Module) and any(part.training for part in network.modules())

    def steps_of(self, like):
        return [
            Step(self._step(start, end), end.alpha / start.alpha if start.alpha else 1.0)
            for start, end in zip(self.levels, self.levels[1:], strict=False)
        ]

    def _step(self, start: Level, end: Level) -> Callable[[Tensor], Tensor]:
        def ddim(x: Tensor) -> Tensor:
            data, noise = self.predicted(x, start)
            return end.alpha * data + end.sigma * noise

        if self.solver == "ddim" or end.sigma == 0:
            return ddim

        def heun(x: Tensor) -> Tensor:
            # Euler's step of dy/dh = e, y = x / alpha, h = sigma / alpha, is DDIM's: the mean of the two ends' slopes
            data, noise = self.predicted(x, start)
            later = self.predicted(end.alpha * data + end.sigma * noise, end)[1]
            change = end.sigma / end.alpha - start.sigma / start.alpha
            return end.alpha * (x / start.alpha + change * (noise + later) / 2)

        return heun

    def predicted(self, x: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        """The data and the noise that rows ``[n, D]`` of a level consist of, as the network has it."""
        out = self._call(self.network, x, level, "argument")
        if self.guidance != 1:
            null = self._call(self.network, x, level, "null")
            out = null + self.guidance * (out - null)
        _, alpha, sigma = level
        if self.prediction == "data":
            return out, (x - alpha * out) / sigma
        if self.prediction == "velocity":
            # of levels with alpha^2 + sigma^2 = 1
            return alpha * x - sigma * out, alpha * out + sigma * x
        return (x - sigma * out) / alpha, out

    def _call(self, network: Callable[..., Any], x: Tensor, level: Level, kind: str) -> Tensor:
        n = len(x)
        if isinstance(level.time, int):
            t = torch.full((n,), level.time, dtype=torch.int64, device=x.device)
        else:
            t = torch.full((n,), level.time, dtype=x.dtype, device=x.device)
        given = {name: getattr(self, f"{kind}_{name}") for name in self.names[kind]}
        out = network(x.reshape(n, *self.output_shape), t, **{k: v.expand(n, *v.shape) for k, v in given.items()})
        # azula's posterior, diffusers' output, or a tuple
        for name in ("mean", "sample"):
            if not isinstance(out, Tensor) and isinstance(found := getattr(out, name, None), Tensor):
                out = found
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or out.numel() != x.numel():
            what = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"type {type(out).__name__}"
            takes = f"({n}, {', '.join(map(str, self.output_shape))})"
            raise ModelError(f"{type(network).__name__} returns {what} for x {takes}: expected a tensor of x's shape")
        return out.reshape(x.shape)

    def latents(self, u):
        return {"u": u}

    def implausible(self, x):
        low, high = self.data_range
        slack = (high - low) / 4
        share = ((x < low - slack) | (x > high + slack)).double().mean().item()
        if share <= _SHARE and x.isfinite().all():
            return None
        return (
            f"{100 * share:.2g} % of the pixels at prior draws are far outside the range of the data, ({low:g}, "
            f"{high:g}): the network may predict something else than {self.prediction!r} (prediction=), take other "
            "times, need more steps, or have data of another range (data_range=)"
        )

    def check_network(self) -> None:
        """Call the network for two rows and for three, at the noisiest level.

        Raises:
            ModelError: it fails, or returns another shape.
        """
        like = reference_tensor(self)
        net = self.network
        net = frozen_copy(net, like.dtype, like.device) if isinstance(net, nn.Module) else net
        level = self.levels[0]
        for n in (2, 3):
            x = torch.linspace(-1, 1, n * self.dim, dtype=like.dtype, device=like.device).reshape(n, -1)
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    self._call(net, x, level, "argument")
            except ModelError:
                raise
            except Exception as error:
                kind = "whole timesteps" if isinstance(level.time, int) else "times in [0, 1]"
                raise ModelError(
                    f"{type(net).__name__} fails for x ({n}, {', '.join(map(str, self.output_shape))}) and {kind}, "
                    f"such as {level.time}: {cause(error)} (a schedule of alphas_cumprod gives whole timesteps, a "
                    "function of t times in [0, 1]; labels are arguments={...}; for another call give lambda x, t: ...)"
                ) from error


# Share of pixels far outside the data's range that is implausible.
_SHARE = 0.02


def from_diffusion(
    denoiser: Callable[..., Any],
    schedule: Any = None,
    steps: int = 10,
    *,
    shape: Sequence[int] | int,
    prediction: Prediction | None = None,
    solver: DiffusionSolver = "ddim",
    arguments: Mapping[str, Any] | None = None,
    guidance: float = 1.0,
    null: Mapping[str, Any] | None = None,
    data_range: tuple[float, float] = (-1.0, 1.0),
) -> DiffusionGenerator:
    """A diffusion model as a function of noise ``x = g(u)``: a fixed number of deterministic steps.

    Levels of noise are ``x_t = alpha_t x_1 + sigma_t e``. A DDIM step from t to r is ``alpha_r x_1 + sigma_r e`` of the
    predicted data and noise; Heun's averages the noise of both ends (Karras et al. 2022), and its last step is DDIM's.
    No predicted data are clipped.

    Args:
        denoiser: the network, called ``denoiser(x [n, *shape], t [n], **arguments)``; a denoiser of ``azula``; a
            U-Net of ``diffusers``, or a pipeline with ``unet`` and ``scheduler``.
        schedule: the noise levels: a vector ``alphas_cumprod`` (``alpha_t^2``) of whole timesteps; a function of t in
            [0, 1], 1 for noise, that returns ``(alpha, sigma)``; a ``DDIMScheduler`` of ``diffusers``; None for the
            denoiser's own (``azula``, a pipeline).
        steps: number of steps.
        shape: shape of an image.
        prediction: what the network returns: noise, data, or velocity ``alpha e - sigma x_1`` (Salimans and Ho 2022);
            None for that of the scheduler or denoiser, else noise.
        solver: ddim or heun.
        arguments: fixed arguments of the network by name, of one image: ``{"class_labels": torch.tensor(3)}``.
        guidance: weight w of classifier-free guidance, ``null + w (conditional - null)``; 1 for none.
        null: the arguments without a label, ``{"class_labels": torch.tensor(10)}``; needed for guidance.
        data_range: range of the data; :func:`dgm_infer.check` says when images are far outside of it.

    Raises:
        ArgumentError: a stochastic sampler, whose noise is not an input; a scheduler that clips; guidance without a
            null label; weights of 16 bits; an illegal number.
        ModelError: the network does not take such rows, times and arguments, or returns another shape.
    """
    call = "from_diffusion"
    shape = sizes(call, "shape", (shape,) if isinstance(shape, int) else shape)
    steps = whole_number(call, "steps", steps)
    denoiser, schedule, own = _parts(denoiser, schedule)
    allocatable(call, "shape", shape, 4 * math.prod(shape), "give the shape of one output")
    check_floats(call, "denoiser", denoiser)
    prediction = choice(call, "prediction", own if prediction is None else prediction, get_args(Prediction))
    choice(call, "solver", solver, get_args(DiffusionSolver))
    given = mapping(call, "arguments", arguments, "{'class_labels': torch.tensor(3)}")
    without = mapping(call, "null", null, "{'class_labels': torch.tensor(10)}")
    guidance = within(call, "guidance", guidance, 0)
    if guidance != 1 and not without:
        raise ArgumentError(
            f"from_diffusion(guidance={guidance:g}): guidance compares with a network without a label: give it, "
            "null={'class_labels': torch.tensor(10)}"
        )
    data_range = interval(call, "data_range", data_range)
    levels = _levels(schedule, steps)
    if levels[0].alpha == 0 and (prediction == "noise" or solver == "heun"):
        raise ArgumentError(
            f"from_diffusion(prediction={prediction!r}, solver={solver!r}): the first level of this schedule is pure "
            "noise, alpha 0, which prediction='velocity' or 'data' with solver='ddim' allow"
        )
    model = DiffusionGenerator(denoiser, levels, shape, prediction, solver, given, guidance, without, data_range)
    model.check_network()
    return model


def _parts(denoiser: Any, schedule: Any) -> tuple[Callable[..., Any], Any, Prediction]:
    """The network, its schedule, and what it predicts."""
    name = type(denoiser).__name__
    if hasattr(denoiser, "unet") and hasattr(denoiser, "scheduler"):
        denoiser, schedule = denoiser.unet, denoiser.scheduler if schedule is None else schedule
    if name.endswith("Sampler") and hasattr(denoiser, "denoiser"):
        raise ArgumentError(
            f"from_diffusion(denoiser={name}): a sampler may draw noise that is not an input: pass its denoiser, whose "
            "steps are made here"
        )
    function("from_diffusion", "denoiser", denoiser, "a network e(x, t)")
    own: Prediction = "noise"
    if schedule is None:
        schedule, own = getattr(denoiser, "schedule", None), "data"
        if schedule is None:
            raise ArgumentError(
                f"from_diffusion(schedule=None): {name} has no schedule: give alphas_cumprod, a function of t in "
                "[0, 1] that returns (alpha, sigma), or a DDIMScheduler"
            )
    if hasattr(schedule, "set_timesteps"):
        own = _check_scheduler(schedule)
    return denoiser, schedule, own


def _check_scheduler(scheduler: Any) -> Prediction:
    """What a scheduler of diffusers says that the network predicts.

    Raises:
        ArgumentError: it is not a DDIMScheduler, or one that clips.
    """
    name, config = type(scheduler).__name__, scheduler.config
    remedy = "DDIMScheduler.from_config(scheduler.config, clip_sample=False)"
    if name != "DDIMScheduler":
        raise ArgumentError(
            f"from_diffusion(schedule={name}): draws noise that is not an input, or takes steps that are not DDIM's: "
            f"give {remedy}"
        )
    if config.clip_sample or config.thresholding:
        raise ArgumentError(
            f"from_diffusion(schedule={name}): clips predicted images (clip_sample or thresholding), where no noise "
            f"moves them: give {remedy}"
        )
    if config.prediction_type not in _PREDICTIONS:
        raise ArgumentError(
            f"from_diffusion(schedule={name}): its prediction_type {config.prediction_type!r} is unknown"
        )
    return _PREDICTIONS[config.prediction_type]


def _levels(schedule: Any, steps: int) -> list[Level]:
    """The levels that steps go through, from noise to data."""
    if hasattr(schedule, "set_timesteps"):
        alphas, last = schedule.alphas_cumprod.double(), float(schedule.final_alpha_cumprod)
        _check_steps(steps, len(alphas))
        schedule.set_timesteps(steps)
        times = [int(t) for t in schedule.timesteps]
        ends = [t - len(alphas) // steps for t in times]
        # diffusers steps to the timestep before by the number of steps, which is the next of a regular grid
        regular = all(end == after for end, after in zip(ends, times[1:], strict=False))
        if not regular or len(times) != steps:
            raise ArgumentError(
                f"from_diffusion(steps={steps}): the scheduler's timesteps {times[:3]}... are not evenly spaced: "
                f"choose steps that divide {len(alphas)} and timestep_spacing 'leading' or 'trailing'"
            )
        ending = float(alphas[ends[-1]]) if ends[-1] >= 0 else last
        return [_level(t, float(alphas[t])) for t in times] + [_level(0, ending)]
    if callable(schedule):
        allocatable("from_diffusion", "steps", steps, 2**10 * steps, "take fewer steps")
        levels = []
        for t in torch.linspace(1, 0, steps + 1, dtype=torch.float64):
            try:
                alpha, sigma = map(float, schedule(t))  # type: ignore[arg-type]
            except Exception as error:
                raise ArgumentError(
                    f"from_diffusion(schedule={shown(schedule)}): fails for t = {float(t):g}: {cause(error)}; must "
                    "return (alpha, sigma)"
                ) from error
            levels.append(Level(float(t), alpha, sigma))
        if not (levels[0].sigma > 0 and levels[-1].alpha > 0 and levels[0].sigma > levels[-1].sigma):
            raise ArgumentError(
                f"from_diffusion(schedule={shown(schedule)}): (alpha, sigma) is {levels[0][1:]} at t = 1 and "
                f"{levels[-1][1:]} at t = 0: must be noise at 1 and data at 0"
            )
        return levels
    alphas = array("from_diffusion", "schedule", schedule, torch.float64)
    if alphas.ndim != 1 or len(alphas) < 1 or not ((alphas >= 0) & (alphas <= 1)).all() or alphas[0] < alphas[-1]:
        raise ArgumentError(
            f"from_diffusion(schedule={shown(schedule)}): must be alphas_cumprod, numbers that fall from 1 to 0"
        )
    _check_steps(steps, len(alphas))
    times = [round(len(alphas) * (1 - k / steps)) - 1 for k in range(steps)]
    return [_level(t, float(alphas[t])) for t in times] + [_level(0, 1.0)]


def _check_steps(steps: int, n: int) -> None:
    if steps > n:
        raise ArgumentError(
            f"from_diffusion(steps={steps}): the schedule has {n} timesteps: take at most as many steps"
        )


def _level(time: int, square: float) -> Level:
    return Level(time, square**0.5, max(1 - square, 0.0) ** 0.5)
