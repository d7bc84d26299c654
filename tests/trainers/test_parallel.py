"""Two processes train one model, and mixed precision, by Lightning's flags alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

import generators
from trainers import DigitsData, IWAETraining, VAETraining

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")

ROOT = Path(__file__).parents[2]

# Every process writes what it has at the end: parameters, and the images it saw.
SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Trainer
import generators
from trainers import DigitsData, GANTraining, VAETraining

def train(kind, folder):
    torch.manual_seed(0)
    if kind == "gan":
        gan = generators.GAN(4, (8, 8), channels=(8, 4))
        module = GANTraining(gan, generators.Critic((8, 8), channels=(4, 8)), "wasserstein", critic_steps=2)
    else:
        module = VAETraining(generators.GaussianVAE(4, (8, 8), (16,)))
    seen, step = [], module.training_step

    def counted(batch, batch_idx):
        seen.append(len(batch[0]))
        return step(batch, batch_idx)

    module.training_step = counted
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, **quiet)
    trainer.fit(module, datamodule=DigitsData(batch_size=100))
    networks = [module.generator, *([module.trained, module.critic] if kind == "gan" else [])]
    weights = torch.cat([p.detach().flatten() for network in networks for p in network.parameters()])
    noise = torch.rand(1).item()
    record = {"seen": sum(seen), "noise": noise, "weights": weights.tolist()}
    with open(os.path.join(folder, f"{kind}-rank{trainer.global_rank}.json"), "w") as file:
        json.dump(record, file)
    trainer.save_checkpoint(os.path.join(folder, f"{kind}.ckpt"))

for kind in ("vae", "gan"):
    train(kind, sys.argv[1])
"""


# all kinds train in two processes as in one, below
@pytest.mark.slow
def test_two_processes_share_the_images_and_end_with_the_same_weights(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300, capture_output=True)
    for kind in ("vae", "gan"):
        one, two = (json.loads((tmp_path / f"{kind}-rank{rank}.json").read_text()) for rank in (0, 1))
        # 1400 images an epoch, half of them each
        assert one["seen"] == two["seen"] == 1400
        assert one["weights"] == two["weights"]
        assert one["noise"] != two["noise"], "each process has random numbers of its own"
        loaded = generators.load(tmp_path / f"{kind}.ckpt")
        mine = torch.cat([p.detach().flatten() for p in loaded.parameters()])
        assert mine.tolist() == one["weights"][: len(mine)]


# Trains with draws that depend on the image or the step alone, so that a batch and its two halves have the same.
EQUAL = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import Trainer
from torch.distributions import Normal
import generators
from trainers import DigitsData, GANTraining, IWAETraining, VAETraining
from trainers.data import Labelled

devices, *batches = map(int, sys.argv[1:])

def draws(self, shape=torch.Size()):
    loc = self.loc.detach().expand(self._extended_shape(shape))
    return self.loc + self.scale * 1.4 * (37 * loc + torch.arange(len(loc)).view(-1, *[1] * (loc.ndim - 1))).sin()

Normal.rsample = draws

class InOrder(DigitsData):
    '''The images of a batch as they come, every second one for each of two processes.'''

    def train_dataloader(self):
        rank, n = self.trainer.global_rank, self.trainer.world_size
        return self._loader(Labelled(*(part[rank::n] for part in self.split.training)))

class Latents(GANTraining):
    calls = 0
    def sample(self, n, model, rng=None):
        self.calls += 1
        whole = torch.randn(200, 4, generator=torch.Generator().manual_seed(self.calls), dtype=torch.float64)
        own = whole[self.global_rank :: self.trainer.world_size][:n]
        return model(own).unflatten(-1, model.output_shape)

quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
split = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "use_distributed_sampler": False}
length = {"max_epochs": 2, "limit_train_batches": 7, "enable_checkpointing": False}
for batch in batches:
    torch.manual_seed(0)
    # batch statistics would be those of each process
    gan = generators.GAN(4, (8, 8), channels=(8, 4), normalisation="none")
    modules = {
        "vae": VAETraining(generators.GaussianVAE(4, (8, 8), (16,))),
        "iwae": IWAETraining(generators.IWAE(4, (8, 8), (16,)), samples=5),
        "gan": Latents(gan, generators.Critic((8, 8), channels=(4, 8)), gradient_penalty=0.5, critic_steps=2),
    }
    found = {}
    for kind, module in modules.items():
        trainer = Trainer(accelerator="cpu", precision="64-true", **split, **length, **quiet)
        trainer.fit(module, datamodule=InOrder(batch, binarise="static" if kind == "iwae" else None))
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        found[kind] = weights, dict(trainer.callback_metrics)
    if trainer.is_global_zero:
        torch.save(found, f"{devices}_{batch}.pt")
"""


@pytest.mark.slow
def test_two_processes_with_half_a_batch_each_train_as_one_with_all_of_it(tmp_path):
    (tmp_path / "train.py").write_text(EQUAL)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for sizes in (["1", "200", "100"], ["2", "100"]):
        command = [sys.executable, "train.py", *sizes]
        done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, two, half = (torch.load(tmp_path / f"{name}.pt") for name in ("1_200", "2_100", "1_100"))
    for kind, (weights, metrics) in one.items():
        torch.testing.assert_close(two[kind][0], weights, rtol=0, atol=1e-9)
        torch.testing.assert_close(two[kind][1], metrics)
        # control: as many steps on half of every batch
        assert (half[kind][0] - weights).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["vae", "iwae"])
@pytest.mark.slow
def test_sixteen_bits_train_to_a_bound_like_that_of_thirty_two(kind, tmp_path):
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        torch.manual_seed(0)
        if kind == "vae":
            module = VAETraining(generators.GaussianVAE(4, (8, 8), (32,), sd=0.3), learning_rate=1e-2)
        else:
            module = IWAETraining(generators.IWAE(4, (8, 8), (32,)), 5, learning_rate=1e-2)
        trainer = Trainer(
            accelerator="cpu",
            precision=precision,
            max_epochs=8,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, datamodule=DigitsData(batch_size=100, binarise=None if kind == "vae" else "dynamic"))
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        found[precision] = float(trainer.callback_metrics["val/elbo"])
    assert found["bf16-mixed"] == pytest.approx(found["32-true"], abs=0.5)


def test_grey_images_are_refused_by_a_model_of_binary_ones(tmp_path):
    module = VAETraining(generators.BernoulliVAE(4, (8, 8), (16,)))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match=r"BernoulliVAE describes pixels of 0 or 1, not 0.* binarise"):
        trainer.fit(module, datamodule=DigitsData())
