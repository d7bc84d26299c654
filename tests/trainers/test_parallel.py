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
from trainers import DigitsData, GANTraining, IWAETraining, VAETraining

kind, folder = sys.argv[1:]
torch.manual_seed(0)
if kind == "gan":
    gan = generators.GAN(4, (8, 8), channels=(8, 4))
    module = GANTraining(gan, generators.Critic((8, 8), channels=(4, 8)), "wasserstein", critic_steps=2)
elif kind == "iwae":
    module = IWAETraining(generators.IWAE(4, (8, 8), (16,)), samples=5)
else:
    module = VAETraining(generators.GaussianVAE(4, (8, 8), (16,)))
seen = 0
step = module.training_step

def counted(batch, batch_idx):
    global seen
    seen += len(batch[0])
    return step(batch, batch_idx)

module.training_step = counted
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, **quiet)
binarise = "dynamic" if kind == "iwae" else None
trainer.fit(module, datamodule=DigitsData(batch_size=100, binarise=binarise))
networks = [module.generator, *([module.trained, module.critic] if kind == "gan" else [])]
weights = torch.cat([p.detach().flatten() for network in networks for p in network.parameters()])
noise = torch.rand(1).item()
record = {"seen": seen, "noise": noise, "weights": weights.tolist()}
with open(os.path.join(folder, f"rank{trainer.global_rank}.json"), "w") as file:
    json.dump(record, file)
trainer.save_checkpoint(os.path.join(folder, "end.ckpt"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vae", "iwae", "gan"])
def test_two_processes_share_the_images_and_end_with_the_same_weights(kind, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "train.py", kind, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=300,
        capture_output=True,
    )
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    # 1400 images an epoch, half of them each
    assert one["seen"] == two["seen"] == 1400
    assert one["weights"] == two["weights"]
    assert one["noise"] != two["noise"], "each process has random numbers of its own"
    loaded = generators.load(tmp_path / "end.ckpt")
    mine = torch.cat([p.detach().flatten() for p in loaded.parameters()])
    assert mine.tolist() == one["weights"][: len(mine)]


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
