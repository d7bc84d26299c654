"""The objective against closed forms, and what training leaves behind."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import generators
from dgm_infer import GenerativeModel
from dgm_infer.errors import ArgumentError, CheckpointError
from tests.models import layer, linear_vae
from trainers import DigitsData, VAETraining
from trainers.schedule import one_cycle

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore:.*LeafSpec:FutureWarning")


def test_the_elbo_of_the_exact_posterior_is_the_log_evidence():
    vae, weight = linear_vae()
    images = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    evidence = MultivariateNormal(torch.zeros(4), weight @ weight.T + 0.25 * torch.eye(4)).log_prob(images)
    torch.manual_seed(1)
    with torch.no_grad():
        bounds = torch.stack([VAETraining(vae).elbo(images, 100) for _ in range(400)])
    error = bounds.std(0) / math.sqrt(len(bounds))
    assert ((bounds.mean(0) - evidence).abs() < 5 * error).all()
    assert (error < 0.02).all()


def test_a_wrong_posterior_loses_its_divergence_from_the_true_one():
    vae, weight = linear_vae()
    images = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    evidence = MultivariateNormal(torch.zeros(4), weight @ weight.T + 0.25 * torch.eye(4)).log_prob(images)
    with torch.no_grad():
        layer(vae.encoder.network, 0).bias[2:] += math.log(2)
    # two latents, each with twice the sd: KL = 2 (-log 2 + (4 - 1) / 2)
    gap = 2 * (1.5 - math.log(2))
    torch.manual_seed(1)
    with torch.no_grad():
        bounds = torch.stack([VAETraining(vae).elbo(images, 100) for _ in range(400)])
    error = bounds.std(0) / math.sqrt(len(bounds))
    assert ((bounds.mean(0) - (evidence - gap)).abs() < 5 * error).all()
    assert ((bounds.mean(0) - evidence).abs() > 5 * error).all()


def test_the_divergence_is_the_textbook_formula():
    vae = generators.GaussianVAE(3, (2, 2), hidden=(5,))
    with torch.no_grad():
        # a decoder that ignores z: the bound is log N(x; 0, sd^2) - KL without sampling noise
        layer(vae.decoder.network, -1).weight.zero_()
        layer(vae.decoder.network, -1).bias.zero_()
        images = torch.rand(6, 2, 2)
        q = vae.encoder(images.flatten(1)).base_dist
        kl = 0.5 * (q.mean.square() + q.stddev.square() - 1 - 2 * q.stddev.log()).sum(-1)
        likelihood = Normal(0.0, vae.decoder.sd).log_prob(images).sum((-1, -2))
        torch.testing.assert_close(VAETraining(vae).elbo(images), likelihood - kl)


def test_a_weighted_divergence_trains_as_a_larger_sd_does():
    """``ELBO`` with weight w and sd s, times 1/w, has the gradient of the ELBO with sd ``s sqrt(w)``."""
    images = torch.rand(6, 4, 4, generator=torch.Generator().manual_seed(1))
    narrow, wide = (generators.GaussianVAE(2, (4, 4), hidden=[5], sd=sd) for sd in (0.1, 0.4))
    wide.load_state_dict({k: v for k, v in narrow.state_dict().items() if "log_sd" not in k}, strict=False)
    gradients = []
    for model, weight in ((narrow, 16.0), (wide, 1.0)):
        torch.manual_seed(2)
        (VAETraining(model).elbo(images, kl_weight=weight).sum() / weight).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_the_log_holds_the_bound_itself_and_the_weighted_objective_beside_it(monkeypatch):
    images = torch.rand(6, 4, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = generators.GaussianVAE(2, (4, 4), hidden=[5], sd=0.1)
    found = {}
    for weight in (1.0, 16.0):
        module, logged = VAETraining(model, kl_weight=weight), {}
        monkeypatch.setattr(module, "log", lambda name, value, logged=logged, **_: logged.update({name: value.item()}))
        torch.manual_seed(2)
        loss = module.training_step(images, 0).item()
        module.on_train_epoch_end()
        found[weight] = (-loss, logged)
    (plain, alone), (objective, both) = found[1.0], found[16.0]
    # the mean over the epoch is summed in another order
    assert alone == {"train/elbo": pytest.approx(plain)}
    # the same draws, so that the bound is the same number
    assert both["train/elbo"] == pytest.approx(plain)
    assert both["train/objective"] == pytest.approx(objective)
    divergence = kl_divergence(model.encoder(images.flatten(1)), Independent(Normal(torch.zeros(2), 1.0), 1)).mean()
    assert objective == pytest.approx(plain - 15 * divergence.item(), rel=1e-5)


def test_the_learning_rate_rises_then_falls_to_zero():
    rates = [one_cycle(step, 100, 0.3) for step in range(101)]
    assert rates[0] == pytest.approx(0.04)
    assert max(rates) == rates[30] == pytest.approx(1)
    assert rates[100] == pytest.approx(0, abs=1e-9)
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert one_cycle(5, math.inf, 0.3) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("kl_weight", 0), ("learning_rate", 0), ("warm_up", 1), ("validation_samples", 0), ("learning_rate", math.nan)],
)
def test_illegal_fields_are_named(field, value):
    with pytest.raises(ArgumentError, match=f"{field}={value}"):
        VAETraining(generators.GaussianVAE(2, (8, 8)), **{field: value})


def test_images_of_another_shape_are_named():
    with pytest.raises(ArgumentError, match=r"\(8, 8\) for a generator of output_shape \(28, 28\)"):
        VAETraining(generators.GaussianVAE(2, (28, 28))).elbo(torch.zeros(5, 8, 8))


def test_a_generator_that_no_checkpoint_could_describe_is_refused_before_training():
    class Own(GenerativeModel):
        pass

    with pytest.raises(CheckpointError, match="Own cannot be stored"):
        VAETraining(Own())  # type: ignore[arg-type]


def fit(folder, epochs: int, checkpoint=None, latent_dim: int = 4) -> tuple[Trainer, VAETraining]:
    torch.manual_seed(3)
    module = VAETraining(generators.GaussianVAE(latent_dim, (8, 8), (32, 32)))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=DigitsData(batch_size=200), ckpt_path=checkpoint)
    return trainer, module


def test_training_raises_the_bound_and_leaves_a_checkpoint_that_loads(tmp_path):
    data = DigitsData()
    trainer, module = fit(tmp_path, 5)
    torch.manual_seed(3)
    untrained = VAETraining(generators.GaussianVAE(4, (8, 8), (32, 32)))
    with torch.no_grad():
        before = untrained.elbo(data.held_out(), 5).mean()
        after = module.elbo(data.held_out(), 5).mean()
    assert after > before + 20
    assert trainer.callback_metrics["val/elbo"] == pytest.approx(after.item(), abs=10)

    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = generators.load(tmp_path / "a.ckpt")
    assert not loaded.training
    for name, tensor in module.generator.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_a_resumed_run_goes_on_where_the_checkpoint_ends_and_may_be_longer(tmp_path):
    trainer, module = fit(tmp_path, 2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    steps = trainer.global_step
    resumed, longer = fit(tmp_path, 4, tmp_path / "a.ckpt")
    assert resumed.current_epoch == 4
    assert resumed.global_step == 2 * steps
    optimizer = resumed.optimizers[0]
    # Adam's own count continues: its moments came with the checkpoint
    assert {int(state["step"]) for state in optimizer.state.values()} == {2 * steps}
    weights = [training.generator.state_dict()["decoder.network.0.weight"] for training in (longer, module)]
    assert not torch.equal(*weights)


def test_a_checkpoint_of_another_generator_is_refused(tmp_path):
    trainer, _ = fit(tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"holds GaussianVAE\(latent_dim=4.*trains GaussianVAE\(latent_dim=3"):
        fit(tmp_path, 2, tmp_path / "a.ckpt", latent_dim=3)


def test_the_same_seed_gives_the_same_weights(tmp_path):
    (_, one), (_, two) = fit(tmp_path, 2), fit(tmp_path, 2)
    for a, b in zip(one.generator.state_dict().values(), two.generator.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_images_in_colour_are_no_batch_of_grey_ones():
    with pytest.raises(ArgumentError, match=r"\(3, 4, 4\) for a generator of output_shape \(4, 4\)"):
        VAETraining(generators.GaussianVAE(2, (4, 4), hidden=[5])).elbo(torch.rand(2, 3, 4, 4))


def test_the_mean_of_an_epoch_is_summed_in_more_than_16_bits(monkeypatch):
    module, logged = VAETraining(generators.GaussianVAE(2, (4, 4), hidden=[5])), {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: value.item()}))
    for _ in range(2000):
        module.log_mean("a", torch.tensor(3.0, dtype=torch.bfloat16), 8)
    module.on_train_epoch_end()
    assert logged["a"] == pytest.approx(3)


def test_the_mean_of_an_epoch_counts_every_image_once(monkeypatch):
    module, logged = VAETraining(generators.GaussianVAE(2, (4, 4), hidden=[5])), {}
    monkeypatch.setattr(module, "log", lambda name, value, **options: logged.update({name: (value.item(), options)}))
    module.log_mean("a", torch.tensor(1.0, requires_grad=True), 3)
    module.log_mean("a", torch.tensor(5.0), 1)
    module.on_train_epoch_end()
    assert logged["a"][0] == 2.0
    assert logged["a"][1]["batch_size"] == 4
    # the next epoch begins anew
    module.log_mean("a", torch.tensor(7.0), 1)
    module.on_train_epoch_end()
    assert logged["a"][0] == 7.0
