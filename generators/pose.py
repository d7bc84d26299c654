"""A human figure seen by one or two cameras (math 12.4, J 10.3, J Algorithm 2)."""

import json
import math
import os
from typing import Self
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from dgm_infer import GenerativeModel, StandardNormal
from dgm_infer.arguments import file_path
from dgm_infer.errors import ArgumentError, CheckpointError, cause

from .arrays import read_arrays
from .skeleton import Joint, KinematicChain, read_bvh, seen_by_cameras

__all__ = ["HumanPose", "Joint", "read_bvh"]

FOCAL_LENGTH = math.exp(2)
# Mean and standard deviation of the camera's x, y (metres) and log z.
CAMERA_MEAN, CAMERA_SD = (0.0, 0.0, 1.5), (0.1, 0.1, 0.5)
# Offsets of the camera's x in metres, one per view.
VIEW_OFFSETS = {1: (0.0,), 2: (0.5, -0.5)}


class HumanPose(GenerativeModel):
    """Pictures of a human figure: 19 joints seen by two cameras side by side, or by one.

    Inputs ``u = [lengths 13, h 30, noise 2 x 47, camera 3]``, all standard normal, ``Du = 140``::

        bone lengths    exp(mean + L u_lengths), metres
        joint angles    atan2(s, c), (c, s) = mean(h) + sd(h) * u_noise, of a variational auto-encoder's decoder
        joints          rotations and bones composed along the skeleton, hips at the origin, metres
        camera          x, y ~ N(0, 0.1^2), log z ~ N(1.5, 0.5^2), metres
        picture         (X, Y, Z) -> e^2 (-X + x + o, Y + y) / (z - Z), o = 0.5, -0.5 for two views and 0 for one

    Output ``[view, coordinate, joint]``, joints in the order of :attr:`joint_names`: ``Dx = 76`` or 38. Two views
    vary in at most 57 directions, so condition on ``WithNoise(model, sd=0.01)``. A draw with a joint at or behind
    the camera has no picture: its outputs are NaN, which every kernel rejects (0.015 % of prior draws).

    Latents: ``joints [19, 3]``, ``camera [3]``, ``bone_lengths [13]``, ``angles [47]`` (radians).

    Args:
        joints: the skeleton, parents before children.
        decoder: ``[..., 30] -> [..., 188]``: means of the cosines and of the sines, log variances of both.
        length_mean: ``[13]`` mean of the log lengths.
        length_factor: ``[13, 13]``, L with ``L L^T`` the covariance of the log lengths.
        length_order: position of each length by its name.
        fixed_angles: angles in radians that do not vary, by lower-case joint and axis: ``"leftleg_y"``.
        views: 2 or 1.
    """

    seen: Tensor
    length_mean: Tensor
    length_factor: Tensor
    camera_mean: Tensor
    camera_sd: Tensor
    view_offsets: Tensor

    def __init__(
        self,
        joints: list[Joint],
        decoder: "AngleDecoder",
        length_mean: Tensor,
        length_factor: Tensor,
        length_order: dict[str, int],
        fixed_angles: dict[str, float],
        *,
        views: int = 2,
    ):
        super().__init__()
        if views not in VIEW_OFFSETS:
            raise ArgumentError(f"HumanPose(views={views!r}): must be 1 or 2 cameras")
        self.decoder = decoder
        self.chain = KinematicChain(joints, length_order, fixed_angles)
        self.joint_names = tuple(name for name in self.chain.names if seen_by_cameras(name))
        seen = [self.chain.names.index(name) for name in self.joint_names]
        dtype = length_mean.dtype
        buffers = {
            "seen": torch.tensor(seen),
            "length_mean": length_mean.unsqueeze(-1),
            "length_factor": length_factor,
            "camera_mean": torch.tensor(CAMERA_MEAN, dtype=dtype).unsqueeze(-1),
            "camera_sd": torch.tensor(CAMERA_SD, dtype=dtype).unsqueeze(-1),
            "view_offsets": torch.tensor(VIEW_OFFSETS[views], dtype=dtype)[:, None, None],
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)
        n_angles = self.chain.n_angles
        if decoder.n_angles != n_angles:
            raise CheckpointError(
                f"the decoder returns {decoder.n_angles} angles, the skeleton has {n_angles} free ones"
            )
        self.sizes = (len(length_mean), decoder.n_codes, 2 * n_angles, 3)
        self.input_density = StandardNormal(sum(self.sizes))
        self.output_shape = (views, 2, len(seen))

    @classmethod
    def from_folder(cls, folder: str | os.PathLike, *, views: int = 2) -> Self:
        """The published model, in float64.

        Args:
            folder: contains ``joint_angle_decoder.npz``, ``bone_lengths.npz``, ``bone_lengths_order.json``,
                ``fixed_angles.json`` and ``skeleton.bvh``, directly or in its subfolder ``pose``.
            views: 2 or 1.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        folder = file_path("HumanPose.from_folder", "folder", folder)
        folder = folder / "pose" if (folder / "pose").is_dir() else folder
        try:
            layers = read_arrays(folder / "joint_angle_decoder.npz")
            indices = range(len(layers) // 2)
            decoder = AngleDecoder([layers[f"W_{i}"] for i in indices], [layers[f"b_{i}"] for i in indices])
            lengths = read_arrays(folder / "bone_lengths.npz")
            return cls(
                read_bvh(folder / "skeleton.bvh"),
                decoder,
                lengths["mean"],
                # the released factor is upper triangular
                lengths["covar_chol"].mT,
                json.loads((folder / "bone_lengths_order.json").read_text()),
                json.loads((folder / "fixed_angles.json").read_text()),
                views=views,
            )
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} does not exist: the pose model's files are published on GitHub, "
                "matt-graham/differentiable-generative-models"
            ) from error
        except (OSError, LookupError, ValueError, TypeError, RuntimeError, EOFError, BadZipFile) as error:
            if isinstance(error, ArgumentError):
                raise
            raise CheckpointError(f"the pose model in {folder} is damaged: {cause(error)}") from error

    @property
    def bones(self) -> list[tuple[int, int]]:
        """Pairs of nodes of :meth:`figure` joined by a bone."""
        return [(parent, node) for node, parent in enumerate(self.chain.parents) if parent >= 0]

    def figure(self, u: Tensor) -> Tensor:
        """Positions of all nodes joined by :attr:`bones`, hidden ones too: ``[..., 140] -> [..., nodes, 3]``."""
        return _rows(self._figure(*self._parts(u)[:3]).movedim(0, 1), u)

    def project(self, points: Tensor, camera: Tensor) -> Tensor:
        """Pictures of points: ``[..., P, 3], [..., 3] -> [..., views, 2, P]``; NaN if any is behind the camera."""
        batch = torch.broadcast_shapes(points.shape[:-2], camera.shape[:-1])
        points, camera = points.expand(*batch, -1, -1), camera.expand(*batch, -1)
        columns = points.flatten(0, -3) if batch else points.unsqueeze(0)
        return _rows(self._project(columns.permute(2, 1, 0), camera.reshape(-1, 3).mT), camera)

    def observed(self, u):
        lengths, h, noise, camera = self._parts(u)
        joints = self._figure(lengths, h, noise).index_select(1, self.seen)
        return _rows(self._project(joints, self._camera(camera)).flatten(0, 2), u)

    def latents(self, u):
        lengths, h, noise, camera = self._parts(u)
        cosine, sine = self.decoder(h, noise)
        latents = {
            "joints": self._figure(lengths, h, noise).index_select(1, self.seen).movedim(0, 1),
            "camera": self._camera(camera),
            "bone_lengths": self._bone_lengths(lengths),
            "angles": torch.atan2(sine, cosine),
        }
        return {name: _rows(value, u) for name, value in latents.items()}

    # Chains are the last dimension throughout: small products become few long vector operations.

    def _parts(self, u: Tensor) -> tuple[Tensor, ...]:
        """``[..., 140] -> [13, B], [30, B], [94, B], [3, B]``."""
        return u.reshape(-1, u.shape[-1]).mT.contiguous().split(self.sizes)

    def _bone_lengths(self, u_lengths: Tensor) -> Tensor:
        return (self.length_mean + self.length_factor @ u_lengths).exp()

    def _camera(self, u_camera: Tensor) -> Tensor:
        x, y, log_z = self.camera_mean + self.camera_sd * u_camera
        return torch.stack([x, y, log_z.exp()])

    def _project(self, points: Tensor, camera: Tensor) -> Tensor:
        """``[3, P, B], [3, B] -> [views, 2, P, B]``."""
        across, up, back = points
        x, y, z = camera
        depth = z - back
        across = x + self.view_offsets - across
        picture = torch.stack([across, (up + y).expand_as(across)], 1) * (FOCAL_LENGTH / depth)
        return torch.where((depth > 0).all(0), picture, torch.nan)

    def _figure(self, u_lengths: Tensor, h: Tensor, noise: Tensor) -> Tensor:
        """Positions of all nodes, ``[3, nodes, B]``."""
        cosine, sine = self.decoder(h, noise)
        scale = (cosine.square() + sine.square()).rsqrt()
        return self.chain(cosine * scale, sine * scale, self._bone_lengths(u_lengths))


class AngleDecoder(nn.Module):
    """``h_0 = tanh(W_0 h)``, ``h_l = tanh(W_l h_{l-1}) + h_{l-1}``, and a linear last layer (J Algorithm 2).

    The last layer's outputs are the means of the cosines and of the sines, and the log variances of both.

    Args:
        weights, biases: parameters of the layers, ``x @ weight + bias``.
    """

    def __init__(self, weights: list[Tensor], biases: list[Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(weight.mT.contiguous() for weight in weights).requires_grad_(False)
        self.biases = nn.ParameterList(bias.unsqueeze(-1) for bias in biases).requires_grad_(False)
        self.n_codes = weights[0].shape[0]
        self.n_angles = weights[-1].shape[1] // 4

    def forward(self, h: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, of any radius: ``[codes, B], [2 angles, B] -> [angles, B], [angles, B]``."""
        first, *hidden, last = zip(self.weights, self.biases, strict=True)
        h = torch.tanh(first[0] @ h + first[1])
        for weight, bias in hidden:
            h = torch.tanh(weight @ h + bias) + h
        mean, log_variance = (last[0] @ h + last[1]).chunk(2)
        cosine, sine = (mean + (0.5 * log_variance).exp() * noise).chunk(2)
        return cosine, sine


def _rows(columns: Tensor, u: Tensor) -> Tensor:
    """``[*shape, B] -> [..., *shape]``, with the leading dimensions of ``u``."""
    return columns.movedim(-1, 0).reshape(*u.shape[:-1], *columns.shape[:-1])
