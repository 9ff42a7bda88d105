"""Tests of rewinding in the Trainers of transformers and Lightning: afterwards the run is that of the plain network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact

transformers = pytest.importorskip("transformers")
L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from flexact.integrations import lightning as in_lightning  # noqa: E402
from flexact.integrations.transformers import FlexActCallback  # noqa: E402
from flexact.integrations.transformers_schedule import SCHEDULE  # noqa: E402

Build = Callable[..., Any]
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
REWINDS = {"rewind": True, "commit_at": 0.5, "candidates": ("relu", "tanh")}
SETTINGS = {"num_train_epochs": 4, "warmup_steps": 3, "weight_decay": 0.1}
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:GPU available")


def logged(trainer: Any, what: str) -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if "loss" in entry]


# transformers


def test_after_the_rewind_the_trainer_fine_tunes_the_plain_network(
    routed: Build, tiny_bert: Build, trainer_of: Build
) -> None:
    """From the pretrained weights, with a warm-up and a learning rate that reaches 0 in the remaining 12 steps."""
    model = routed(settings=STILL, **REWINDS)
    batches: list[dict[str, torch.Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        batches.append({name: kwargs[name].clone() for name in ("input_ids", "attention_mask", "labels")})

    noting = model.register_forward_pre_hook(note, with_kwargs=True)
    trainer = FlexActCallback().wrap(trainer_of(model, **SETTINGS))
    trainer.train()
    noting.remove()
    assert trainer.flexact.schedule.rewound_at == 12
    assert trainer.flexact.schedule.total_steps == 24

    plain = flexact.load_picks(tiny_bert(**STILL), trainer.flexact.selection).train()
    decayed = set(trainer.get_decay_parameter_names(plain))
    groups = [
        {"params": [p for name, p in plain.named_parameters() if name in decayed], "weight_decay": 0.1},
        {"params": [p for name, p in plain.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 3, 12)
    losses, rates = [], []
    for batch in batches[12:]:
        loss = plain(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
    assert logged(trainer, "loss")[12:] == pytest.approx(losses, rel=1e-4)
    assert logged(trainer, "learning_rate")[12:] == pytest.approx([0.0, *rates[:-1]])
    for (name, ours), theirs in zip(trainer.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_a_resumed_trainer_rewinds_to_the_same_weights(routed: Build, trainer_of: Build, tmp_path: Path) -> None:
    """Resumes before the rewind, right after it, and later."""
    saving = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": None}
    whole = FlexActCallback().wrap(trainer_of(routed(**REWINDS), "whole", **SETTINGS, **saving))
    whole.train()
    for cut in (4, 12, 16):
        checkpoint = tmp_path / "whole" / f"checkpoint-{cut}"
        assert (torch.load(checkpoint / SCHEDULE, weights_only=True)["start"] is None) == (cut >= 12)
        resumed = FlexActCallback().wrap(trainer_of(routed(seed=7, **REWINDS), "resumed", **SETTINGS))
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.flexact.schedule.rewound_at == 12
        assert logged(resumed, "loss") == logged(whole, "loss")
        assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
        for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_users_own_learning_rate_schedule_is_restarted(routed: Build, trainer_of: Build) -> None:
    model = routed(**REWINDS)
    optimizer = torch.optim.AdamW(flexact.param_groups(model, weight_decay=0.1), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    trainer = FlexActCallback().wrap(trainer_of(model, num_train_epochs=4, optimizers=(optimizer, scheduler)))
    trainer.train()
    assert trainer.lr_scheduler is scheduler
    rates = logged(trainer, "learning_rate")
    assert rates[12:] == rates[:12] == pytest.approx([1e-3 * 0.9**step for step in range(12)])


def test_objects_wrapped_by_accelerate_are_reset_too() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = flexact.convert(network(), config=flexact.FlexConfig(**REWINDS))
    optimizer = torch.optim.Adam(flexact.param_groups(model), lr=0.05)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, warmed_up(optimizer))
    schedule = flexact.Schedule(model, 24, optimizer, rewinds=[scheduler])
    losses, rates = [], []
    for x, y in 4 * list(DataLoader(rows(), batch_size=8)):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        schedule.step()
        losses.append(loss.item())
    plain = flexact.load_picks(network(), flexact.selection(model))
    assert losses[12:] == by_hand(plain)[0]
    assert rates[12:] == rates[:12] == by_hand(network())[1]


# Lightning


def rows() -> TensorDataset:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Lit(L.LightningModule):
    """A converted network with a learning-rate warm-up."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = flexact.convert(network(seed), config=flexact.FlexConfig(**REWINDS))
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(flexact.param_groups(self), lr=0.05)
        return [optimizer], [{"scheduler": warmed_up(optimizer), "interval": "step"}]


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1.0) * 0.95**step)


def by_hand(plain: nn.Module) -> tuple[list[float], list[float]]:
    """Returns losses and learning rates of two epochs of a plain network."""
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    scheduler, losses, rates = warmed_up(optimizer), [], []
    for x, y in 2 * list(DataLoader(rows(), batch_size=8)):
        rates.append(optimizer.param_groups[0]["lr"])
        loss = nn.functional.cross_entropy(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, rates


def fitted(module: Lit, folder: Path, ckpt_path: Any = None, callbacks: Any = ()) -> Any:
    callback = in_lightning.FlexActCallback()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = L.Trainer(
        max_epochs=4,
        callbacks=[callback, *callbacks],
        default_root_dir=folder,
        enable_checkpointing=bool(callbacks),
        **quiet,
    )
    trainer.fit(module, DataLoader(rows(), batch_size=8), ckpt_path=ckpt_path)
    return callback


def test_after_the_rewind_lightning_is_bit_identical_to_the_plain_network(tmp_path: Path) -> None:
    module = Lit()
    callback = fitted(module, tmp_path)
    assert callback.schedule.rewound_at == 12  # after two of four epochs
    picks = {name.removeprefix("net."): pick for name, pick in callback.selection.picks.items()}
    candidates = {"relu": nn.ReLU, "tanh": nn.Tanh}
    plain = network()
    for name, pick in picks.items():
        plain[int(name)] = candidates[pick]()
    losses, rates = by_hand(plain)
    assert module.losses[12:] == losses
    assert module.rates[12:] == module.rates[:12] == rates
    for (name, ours), theirs in zip(
        callback.extracted.net.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_a_resumed_fit_rewinds_to_the_same_weights(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    whole = Lit()
    fitted(whole, tmp_path, callbacks=[saving])
    for cut in (1, 2, 3):
        resumed = Lit(seed=7)
        callback = fitted(resumed, tmp_path, ckpt_path=tmp_path / f"epoch={cut - 1}.ckpt")
        assert callback.schedule.rewound_at == 12
        assert resumed.losses == whole.losses[6 * cut :]
        assert resumed.rates == whole.rates[6 * cut :]
        torch.testing.assert_close(dict(resumed.state_dict()), dict(whole.state_dict()), rtol=0, atol=0, equal_nan=True)
