"""The human figure: its pictures against a joint-by-joint computation, what bodies look like, and how it conditions."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import dgm_infer as dgm
from dgm_infer.autodiff.jacobian_products import push_forward
from dgm_infer.errors import ArgumentError, CheckpointError
from generators import HumanPose
from generators.pose import read_bvh
from tests.files import reference_folder

FLOAT = torch.float64
SEEN = [
    *("spine", "head", "headend"),
    *("leftarm", "leftforearm", "lefthand", "lefthandend"),
    *("rightarm", "rightforearm", "righthand", "righthandend"),
    *("leftupleg", "leftleg", "leftfoot", "lefttoebase"),
    *("rightupleg", "rightleg", "rightfoot", "righttoebase"),
]
LENGTHS = {
    "spine": "waist",
    "head": "spine",
    "headend": "head",
    "shoulder": "mid-spine",
    "arm": "half-shoulder",
    "forearm": "upper-arm",
    "hand": "lower-arm",
    "handend": "hand",
    "upleg": "half-hip",
    "leg": "upper-leg",
    "foot": "lower-leg",
    "toebase": "back-foot",
    "toebaseend": "fore-foot",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return reference_folder("pose") / "pose"


@pytest.fixture(scope="module", params=[2, 1], ids=["binocular", "monocular"])
def pose(request, folder) -> HumanPose:
    return HumanPose.from_folder(folder, views=request.param)


@pytest.fixture(scope="module")
def binocular(folder) -> HumanPose:
    return HumanPose.from_folder(folder)


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, 140, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def rotation(axis: str, angle: float) -> np.ndarray:
    """Homogeneous, right-handed."""
    i, j = {"X": (1, 2), "Y": (2, 0), "Z": (0, 1)}[axis]
    matrix = np.eye(4)
    matrix[i, i] = matrix[j, j] = math.cos(angle)
    matrix[i, j], matrix[j, i] = -math.sin(angle), math.sin(angle)
    return matrix


def one_figure(folder: Path, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Joints, angles and camera of one input by J Algorithm 2 and math 12.4, a joint at a time: [19, 3], [47], [3]."""
    u_lengths, h, noise, u_camera = np.split(u, [13, 43, 137])
    body, decoder = np.load(folder / "bone_lengths.npz"), np.load(folder / "joint_angle_decoder.npz")
    lengths = np.exp(body["mean"] + body["covar_chol"].T @ u_lengths)
    order = json.loads((folder / "bone_lengths_order.json").read_text())
    fixed = json.loads((folder / "fixed_angles.json").read_text())

    h = np.tanh(h @ decoder["W_0"] + decoder["b_0"])
    for i in range(1, 6):
        h = np.tanh(h @ decoder[f"W_{i}"] + decoder[f"b_{i}"]) + h
    h = h @ decoder["W_6"] + decoder["b_6"]
    r = h[:94] + np.exp(h[94:] / 2) * noise
    angles = np.arctan2(r[47:], r[:47])

    # the hierarchy read line by line, a stack of transforms beside the stack of names
    free = iter(angles)
    positions: dict[str, np.ndarray] = {}
    stack: list[tuple[str, np.ndarray]] = [("", np.eye(4))]
    name, offset = "", np.zeros(3)
    for line in (folder / "skeleton.bvh").read_text().split("MOTION")[0].splitlines()[1:]:
        words = line.split()
        match words[0]:
            case "ROOT" | "JOINT":
                name = words[1].lower()
            case "End":
                name = stack[-1][0] + "end"
            case "OFFSET":
                offset = np.array([float(word) for word in words[1:]])
            case "}":
                stack.pop()
        if words[0] not in ("OFFSET", "CHANNELS"):
            continue
        axes = [word[0] for word in words[2:] if word.endswith("rotation")] if words[0] == "CHANNELS" else None
        if axes is None and not name.endswith("end"):
            continue
        length = (
            lengths[order[LENGTHS[re.sub("^(left|right)", "", name)]]] if np.any(offset) and "thumb" not in name else 0
        )
        local = np.eye(4)
        local[:3, 3] = length * offset / max(np.linalg.norm(offset), 1e-300)
        for axis in axes or ():
            key = f"{name}_{axis.lower()}"
            local = local @ rotation(axis, fixed[key] if key in fixed else next(free))
        transform = stack[-1][1] @ local
        positions[name] = transform[:3, 3]
        stack.append((name, transform))
    assert next(free, None) is None
    camera = np.array([0.1 * u_camera[0], 0.1 * u_camera[1], np.exp(1.5 + 0.5 * u_camera[2])])
    return np.stack([positions[seen] for seen in SEEN]), angles, camera


def test_figures_equal_a_computation_joint_by_joint(binocular, folder):
    u = inputs(20)
    latents = binocular.latents(u)
    for i in range(len(u)):
        joints, angles, camera = one_figure(folder, u[i].numpy())
        torch.testing.assert_close(latents["joints"][i], torch.from_numpy(joints), rtol=0, atol=1e-12)
        torch.testing.assert_close(latents["angles"][i], torch.from_numpy(angles), rtol=0, atol=1e-12)
        torch.testing.assert_close(latents["camera"][i], torch.from_numpy(camera), rtol=0, atol=1e-12)


def test_pictures_equal_a_product_with_the_camera_matrices(pose):
    u = inputs(20)
    latents = pose.latents(u)
    pictures = pose(u).unflatten(-1, pose.output_shape)
    points = torch.cat([latents["joints"], torch.ones(20, 19, 1, dtype=FLOAT)], -1)
    about_y = torch.from_numpy(rotation("Y", math.pi)[:3, :3])
    focal = torch.tensor([math.exp(2), math.exp(2), 1.0], dtype=FLOAT).diag()
    offsets = {2: [0.5, -0.5], 1: [0.0]}[pose.output_shape[0]]
    for view, offset in enumerate(offsets):
        shift = torch.tensor([offset, 0, 0], dtype=FLOAT)
        matrix = torch.cat([about_y.expand(20, 3, 3), (latents["camera"] + shift).unsqueeze(-1)], -1)
        seen = points @ (focal @ matrix).mT
        expected = (seen[..., :2] / seen[..., 2:]).mT
        torch.testing.assert_close(pictures[:, view], expected, rtol=1e-12, atol=1e-12)
    projected = pose.project(latents["joints"].reshape(4, 5, 19, 3), latents["camera"].reshape(4, 5, 3))
    torch.testing.assert_close(projected.flatten(0, 1), pictures, rtol=0, atol=1e-14)


def test_bodies_look_like_bodies(binocular):
    latents = binocular.latents(inputs(4000))
    joints = {name.lower(): latents["joints"][:, i] for i, name in enumerate(binocular.joint_names)}
    assert list(joints) == SEEN
    # standing people, mostly: without the decoder's skip connections most heads are below the hips
    assert (joints["head"][:, 1] > 0.3).double().mean() > 0.9
    assert (joints["leftfoot"][:, 1] < -0.3).double().mean() > 0.9
    # left is left
    assert (joints["leftupleg"] - joints["rightupleg"])[:, 0].mean() > 0.1
    # feet point towards the camera
    assert (joints["lefttoebase"] - joints["leftfoot"])[:, 2].mean() > 0.05
    for bone in (("arm", "forearm"), ("forearm", "hand"), ("upleg", "leg"), ("leg", "foot"), ("foot", "toebase")):
        left, right = ((joints[side + bone[0]] - joints[side + bone[1]]).norm(dim=-1) for side in ("left", "right"))
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
        assert 0.1 < left.mean() < 0.6


def test_bone_lengths_are_log_normal_with_the_given_covariance(binocular, folder):
    stored = np.load(folder / "bone_lengths.npz")
    logs = binocular.latents(inputs(20_000))["bone_lengths"].log()
    covariance = torch.from_numpy(stored["covar"])
    sd = covariance.diagonal().sqrt()
    z = (logs.mean(0) - torch.from_numpy(stored["mean"])) / sd * math.sqrt(len(logs))
    assert z.abs().max() < 5
    correlation = logs.T.corrcoef() - covariance / (sd.unsqueeze(-1) * sd)
    assert correlation.abs().max() < 5 / math.sqrt(len(logs))


def test_two_views_vary_in_fewer_directions_than_they_have_numbers(binocular):
    jacobian = torch.func.vmap(torch.func.jacrev(binocular))(inputs(5))
    assert torch.linalg.matrix_rank(jacobian).tolist() == [50] * 5


def test_a_joint_behind_the_camera_leaves_no_picture(pose):
    u = inputs(6)
    # in the last three, z is 4 cm, less than some limb reaches forward
    u[3:, -1] = (math.log(0.04) - 1.5) / 0.5
    joints = pose.latents(u)["joints"]
    assert (joints[3:, :, 2].amax(-1) > 0.04).all()
    visible = pose(u).isfinite()
    assert visible[:3].all()
    assert not visible[3:].any()


def test_few_prior_draws_are_behind_the_camera(binocular):
    u = inputs(20_000)
    # the camera integrated out: P(z <= nearest joint), with log z ~ N(1.5, 0.5^2)
    nearest = binocular.latents(u)["joints"][..., 2].amax(-1).clamp_min(1e-9)
    probability = torch.special.ndtr((nearest.log() - 1.5) / 0.5)
    error = probability.std() / math.sqrt(len(u))
    assert error < 5e-6
    # 7.0e-5 +- 1e-6 of 100 000 draws
    assert abs(probability.mean() - 7.0e-5) < 5 * error


@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 4), (0,)])
def test_leading_dimensions_are_independent(pose, leading):
    u = inputs(*leading)
    x = pose(u)
    assert x.shape == (*leading, math.prod(pose.output_shape))
    shapes = {"joints": (19, 3), "camera": (3,), "bone_lengths": (13,), "angles": (47,)}
    assert {name: tuple(value.shape) for name, value in pose.latents(u).items()} == {
        name: (*leading, *shape) for name, shape in shapes.items()
    }
    assert pose.figure(u).shape == (*leading, 22, 3)
    for row in np.ndindex(leading):
        torch.testing.assert_close(x[row], pose(u[row]), rtol=0, atol=1e-12)


def test_single_precision(folder):
    u = inputs(50)
    double, single = HumanPose.from_folder(folder), HumanPose.from_folder(folder).float()
    x = single(u.float())
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), double(u), rtol=0, atol=1e-4)


def test_derivatives_are_those_of_finite_differences(pose):
    u, v = inputs(3), inputs(seed=1)
    product = push_forward(pose, u, v.unsqueeze(0))[1][0]
    torch.testing.assert_close(product, (pose(u + 1e-6 * v) - pose(u - 1e-6 * v)) / 2e-6, rtol=1e-6, atol=1e-7)
    jacobian = torch.func.vmap(torch.func.jacrev(pose))(u)
    torch.testing.assert_close(jacobian @ v, product, rtol=1e-10, atol=1e-10)


def test_bones_form_a_tree_over_the_figure(binocular):
    bones = binocular.bones
    assert len(bones) == 21
    assert {node for _, node in bones} == set(range(1, 22))
    figure = binocular.figure(inputs(1))[0]
    lengths = binocular.latents(inputs(1))["bone_lengths"][0]
    for parent, node in bones:
        assert (lengths - (figure[parent] - figure[node]).norm()).abs().min() < 1e-12


@pytest.mark.slow
def test_conditioning_keeps_to_the_observed_picture(pose):
    model = dgm.WithNoise(pose, sd=0.01)
    u = inputs(2, seed=3)
    noise = torch.randn(2, math.prod(pose.output_shape), generator=torch.Generator().manual_seed(4), dtype=FLOAT)
    y = model(torch.cat([u, noise], -1)).reshape(2, *pose.output_shape)
    fibre = dgm.condition(model, y)
    kernel = dgm.ConstrainedHMC(0.05, n_steps=3, n_geodesic=2)
    draws = dgm.sample(fibre, kernel, chains=2, warmup=0, draws=3, seed=5, progress=False)
    assert draws.stats["constraint_error"].max() < 1e-8 * y.abs().max().clamp_min(1)
    assert draws.stats["acceptance_rate"].mean() > 0.5
    assert draws.latents["joints"].shape == (2, 3, 2, 19, 3)


def test_a_wrong_number_of_views_is_named(folder):
    with pytest.raises(ArgumentError, match="views=3"):
        HumanPose.from_folder(folder, views=3)


@pytest.mark.parametrize("name", ["skeleton.bvh", "joint_angle_decoder.npz", "bone_lengths.npz", "fixed_angles.json"])
def test_a_missing_or_damaged_file_is_named_in_one_line(folder, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / name).write_bytes((copy / name).read_bytes()[:50])
    with pytest.raises(CheckpointError, match=str(copy)) as caught:
        HumanPose.from_folder(copy)
    assert "\n" not in str(caught.value)
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}.*matt-graham/differentiable-generative-models"):
        HumanPose.from_folder(copy)


def test_a_hierarchy_is_read_depth_first(tmp_path):
    text = """HIERARCHY
    ROOT A { OFFSET 0 0 0 CHANNELS 6 Xposition Yposition Zposition Zrotation Xrotation Yrotation
      JOINT B { OFFSET 1 2 3 CHANNELS 3 Yrotation Zrotation Xrotation End Site { OFFSET 0 0 4 } }
      JOINT C { OFFSET 0 5 0 CHANNELS 1 Xrotation } }
    MOTION Frames: 0"""
    (tmp_path / "some.bvh").write_text(text)
    joints = read_bvh(tmp_path / "some.bvh")
    assert [(joint.name, joint.parent, joint.axes) for joint in joints] == [
        ("A", -1, "ZXY"),
        ("B", 0, "YZX"),
        ("BEnd", 1, ""),
        ("C", 0, "X"),
    ]
    assert joints[2].offset == (0, 0, 4)


@pytest.mark.parametrize("text", ["", "HIERARCHY ROOT A {", "ROOT", "JOINT A { OFFSET 1 2 } }"])
def test_what_is_no_hierarchy_is_refused(tmp_path, text):
    (tmp_path / "some.bvh").write_text(text)
    with pytest.raises(CheckpointError, match=r"some\.bvh is damaged"):
        read_bvh(tmp_path / "some.bvh")
