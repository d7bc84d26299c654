"""The skeleton of a human figure: joints read from a motion-capture file, and their positions from joint angles."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dgm_infer.errors import CheckpointError

__all__ = ["Joint", "KinematicChain", "read_bvh", "seen_by_cameras"]

# The length of the bone that ends in a joint, by the joint's name without its side.
LENGTH_NAMES = {
    "Spine": "waist",
    "Head": "spine",
    "HeadEnd": "head",
    "Shoulder": "mid-spine",
    "Arm": "half-shoulder",
    "ForeArm": "upper-arm",
    "Hand": "lower-arm",
    "HandEnd": "hand",
    "UpLeg": "half-hip",
    "Leg": "upper-leg",
    "Foot": "lower-leg",
    "ToeBase": "back-foot",
    "ToeBaseEnd": "fore-foot",
}
# Joints that no camera sees, by their names without side.
UNSEEN = ("Hips", "Shoulder", "HandThumb1", "HandThumb1End", "ToeBaseEnd")


class Joint(NamedTuple):
    """A joint of a skeleton, or the end of a limb."""

    name: str
    parent: int
    """Index of its parent joint, -1 for the root."""
    offset: tuple[float, float, float]
    """Offset from the parent, in the parent's frame."""
    axes: str
    """Its rotation is the product of the rotations about these axes, left to right."""


def read_bvh(path: str | os.PathLike) -> list[Joint]:
    """The joints of a motion-capture file (BVH), depth-first in file order; the motion is ignored.

    The end of joint X is named XEnd.

    Raises:
        CheckpointError: the file has no hierarchy.
    """
    joints: list[Joint] = []
    # joints whose braces are open
    path_down: list[int] = []
    words = iter(re.findall(r"[{}]|[^\s{}]+", Path(path).read_text(errors="replace").split("MOTION")[0]))
    try:
        for word in words:
            if word in ("ROOT", "JOINT", "End"):
                parent = path_down[-1] if path_down else -1
                name = next(words)
                name = joints[parent].name + "End" if word == "End" else name
                joints.append(Joint(name, parent, (0, 0, 0), ""))
            elif word == "{":
                path_down.append(len(joints) - 1)
            elif word == "}":
                path_down.pop()
            elif word == "OFFSET":
                x, y, z = (float(next(words)) for _ in range(3))
                joints[-1] = joints[-1]._replace(offset=(x, y, z))
            elif word == "CHANNELS":
                channels = [next(words) for _ in range(int(next(words)))]
                axes = "".join(channel[0] for channel in channels if channel.endswith("rotation"))
                joints[-1] = joints[-1]._replace(axes=axes)
    except (StopIteration, IndexError, ValueError, RuntimeError):
        joints.clear()
    if not joints or path_down:
        raise CheckpointError(f"{path} is damaged or not a motion-capture file (BVH)")
    return joints


class KinematicChain(nn.Module):
    """From joint angles and bone lengths to positions, with the root at the origin.

    With ``R_j`` the product of a joint's rotations about its axes and ``b_j`` its unit offset times its length::

        T_j = T_parent(j) R_j,    p_j = p_parent(j) + T_parent(j) b_j

    The nodes are the joints that a camera sees and their ancestors: :attr:`names`, :attr:`parents`. One product per
    level of the tree composes the rotations, and one product with the matrix of ancestors adds up the bones.

    Args:
        joints: parents before children; every node except the root has a length.
        length_order: position of each length by its name.
        fixed_angles: radians of the angles that do not vary, by lower-case joint and axis.
    """

    ancestors: Tensor
    offsets: Tensor
    length_index: Tensor
    above: Tensor
    carrier: Tensor
    angle_index: Tensor
    fixed_cosine: Tensor
    fixed_sine: Tensor
    handedness: Tensor
    entry_index: Tensor

    def __init__(self, joints: list[Joint], length_order: dict[str, int], fixed_angles: dict[str, float]):
        super().__init__()
        nodes = _visible_or_above(joints)
        position = {joint: node for node, joint in enumerate(nodes)}
        self.names = tuple(joints[i].name for i in nodes)
        self.parents = tuple(position.get(joints[i].parent, -1) for i in nodes)
        lengths = [length_order[LENGTH_NAMES[_sideless(name)]] for name in self.names[1:]]
        offsets = torch.tensor([joints[i].offset for i in nodes[1:]], dtype=torch.float64)
        ancestors = torch.eye(len(nodes), dtype=torch.float64)
        depth = [0] * len(nodes)
        for node, parent in enumerate(self.parents[1:], 1):
            ancestors[node] += ancestors[parent]
            depth[node] = depth[parent] + 1

        # joints that rotate others, level by level
        turning = sorted(set(self.parents[1:]), key=lambda node: depth[node])
        levels = [[node for node in turning if depth[node] == level] for level in range(max(depth))]
        self.level_sizes = [len(level) for level in levels]
        above = [levels[depth[node] - 1].index(self.parents[node]) for node in turning if depth[node] > 0]
        axes = [joints[nodes[i]].axes for i in turning]
        # entry (row, column) of a rotation about axes a, b, c is entry (a b c).index of both of the one about x, y, z
        entries = [
            (3 * axis.index(row) + axis.index(column)) * len(turning) + i
            for row in "XYZ"
            for column in "XYZ"
            for i, axis in enumerate(axes)
        ]

        # the angles are the free ones, in depth-first order over the whole file, then the fixed ones
        names = [f"{joint.name.lower()}_{axis.lower()}" for joint in joints for axis in joint.axes]
        free = [name for name in names if name not in fixed_angles]
        self.n_angles = len(free)
        order = [*free, *fixed_angles]
        turned = [
            f"{self.names[i].lower()}_{axis[k].lower()}"
            for k in range(3)
            for i, axis in zip(turning, axes, strict=True)
        ]
        fixed = torch.tensor(list(fixed_angles.values()), dtype=torch.float64)
        buffers = {
            "ancestors": ancestors[:, 1:],
            "offsets": (offsets / offsets.norm(dim=-1, keepdim=True)).mT.unsqueeze(-1),
            "length_index": torch.tensor(lengths),
            "above": torch.tensor(above),
            "carrier": torch.tensor([turning.index(parent) for parent in self.parents[1:]]),
            "angle_index": torch.tensor([order.index(name) for name in turned]),
            "fixed_cosine": fixed.cos().unsqueeze(-1),
            "fixed_sine": fixed.sin().unsqueeze(-1),
            "handedness": torch.tensor(
                [1.0 if axis in "XYZXY" else -1.0 for axis in axes], dtype=torch.float64
            ).unsqueeze(-1),
            "entry_index": torch.tensor(entries),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, cosine: Tensor, sine: Tensor, lengths: Tensor) -> Tensor:
        """Positions of the nodes: ``[angles, B], [angles, B], [lengths, B] -> [3, nodes, B]``."""
        first, *others = self._rotations(cosine, sine).split(self.level_sizes, 2)
        levels = [first]
        for local, above in zip(others, self.above.split(self.level_sizes[1:]), strict=True):
            carrying = levels[-1].index_select(2, above)
            levels.append(sum(carrying[:, k, None] * local[k] for k in range(3)))
        carrying = torch.cat(levels, 2).index_select(2, self.carrier)
        bones = (carrying * self.offsets).sum(1) * lengths.index_select(0, self.length_index)
        return self.ancestors @ bones

    def _rotations(self, cosine: Tensor, sine: Tensor) -> Tensor:
        """Local rotations of the joints that rotate others, ``[3, 3, turning, B]``."""

        def choose(free: Tensor, fixed: Tensor) -> Tensor:
            angles = torch.cat([free, fixed.expand(-1, free.shape[1])]).index_select(0, self.angle_index)
            return angles.unflatten(0, (3, -1))

        ca, cb, cc = choose(cosine, self.fixed_cosine)
        # for axes in an order other than x, y, z: the same formula in permuted coordinates, mirrored if odd
        sa, sb, sc = choose(sine, self.fixed_sine) * self.handedness
        x_y_z = [
            *(cb * cc, -cb * sc, sb),
            *(ca * sc + sa * sb * cc, ca * cc - sa * sb * sc, -sa * cb),
            *(sa * sc - ca * sb * cc, sa * cc + ca * sb * sc, ca * cb),
        ]
        return torch.cat(x_y_z).index_select(0, self.entry_index).unflatten(0, (3, 3, -1))


def _sideless(name: str) -> str:
    return name.removeprefix("Left").removeprefix("Right")


def seen_by_cameras(name: str) -> bool:
    """Whether a camera sees the joint of this name."""
    return _sideless(name) not in UNSEEN


def _visible_or_above(joints: list[Joint]) -> list[int]:
    """Indices of the joints that a camera sees and of their ancestors."""
    needed = {i for i, joint in enumerate(joints) if seen_by_cameras(joint.name)}
    for i in reversed(range(len(joints))):
        if i in needed and joints[i].parent >= 0:
            needed.add(joints[i].parent)
    return sorted(needed)
