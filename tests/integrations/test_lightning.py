"""Tests of FlexActCallback for Lightning: a run in its Trainer equals a loop written by hand."""

from __future__ import annotations

import copy
import csv
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import flexact
import forked
from configs import flat
from flexact.routing.sites import sites_of

L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402

from flexact.integrations.lightning import FlexActCallback  # noqa: E402

HERE = Path(__file__).parent
Fit = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*fewer than the logging interval", "ignore:GPU available"
)


def rows() -> TensorDataset:
    """48 points of two classes."""
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Lit(L.LightningModule):
    """A converted network, as a user would build it."""

    def __init__(self, seed: int = 0, lr: float = 0.05, decay: float = 0.0, **choices: Any) -> None:
        super().__init__()
        self.net = flexact.convert(network(seed), config=flat(**choices))
        self.lr, self.decay = lr, decay
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(flexact.param_groups(self, weight_decay=self.decay), lr=self.lr)


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Fits a module for two epochs of six batches, on the CPU, without output. Returns the callback."""

    def run(module: Any, ckpt_path: Any = None, loader: Any = None, callback: Any = None, **settings: Any) -> Any:
        callback = FlexActCallback() if callback is None else callback
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        sizes = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path, "enable_model_summary": False}
        others = settings.pop("others", [])
        trainer = L.Trainer(callbacks=[callback, *others], **{**quiet, **sizes, **settings})
        trainer.fit(module, DataLoader(rows(), batch_size=8) if loader is None else loader, ckpt_path=ckpt_path)
        return callback

    return run


def by_hand(module: Lit, batch_size: int = 8, accumulate: int = 1, clip: float | None = None, epochs: int = 2) -> Lit:
    """The same run as a loop written by hand."""
    optimizer = module.configure_optimizers()
    loader = DataLoader(rows(), batch_size=batch_size)
    schedule = flexact.Schedule(module, epochs * len(loader) // accumulate, optimizer)
    module.train()
    for number, batch in enumerate([batch for _ in range(epochs) for batch in loader], start=1):
        ((module.training_step(batch, 0) + flexact.penalty(module)) / accumulate).backward()
        if number % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(sum(module.losses[-accumulate:]) / accumulate)
    return module


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    """Asserts that runs are bit-identical; evidence that was not collected is NaN."""
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0, equal_nan=True)


PAPER = {
    name: value
    for name, value in flexact.FlexConfig.paper().to_dict().items()
    if name not in ("flexact_config", "candidates")
}


@pytest.mark.parametrize(
    "choices", [{}, PAPER, {"noise": 1.0, "logit_step": "optimizer"}], ids=["best", "paper", "optimizer"]
)
@pytest.mark.parametrize(
    ("batch_size", "accumulate", "clip"), [(8, 1, None), (4, 2, 0.05)], ids=["plain", "clipped parts"]
)
def test_the_run_equals_a_loop_written_by_hand(
    choices: dict[str, Any], batch_size: int, accumulate: int, clip: float | None, fit: Fit
) -> None:
    module = Lit(decay=0.1, **choices)
    callback = fit(
        module,
        loader=DataLoader(rows(), batch_size=batch_size),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )
    assert callback.schedule.steps_done == callback.schedule.total_steps == 12
    expected = by_hand(Lit(decay=0.1, **choices), batch_size, accumulate, clip)
    assert module.losses == expected.losses
    assert_same_state(module, expected)
    start = torch.cat([site.logits.detach() for site in sites_of(Lit())])
    assert not torch.equal(torch.cat([site.logits.detach() for site in sites_of(module)]), start)


TRIAL = {"trial_steps": 4, "pick_by": "trial"}  # its two activations differ, so the default is a blend


@pytest.mark.parametrize(("batch_size", "accumulate"), [(8, 1), (4, 2)], ids=["plain", "parts"])
def test_a_trial_compares_the_losses_of_the_steps(batch_size: int, accumulate: int, fit: Fit) -> None:
    module = Lit(**TRIAL)
    tried: list[Any] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            tried.append(sites_of(module)[0].router.trying)

    loader = DataLoader(rows(), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*needs the loss")
        callback = fit(module, loader=loader, accumulate_grad_batches=accumulate, max_epochs=4, others=[Look()])
    assert callback.schedule.committed
    assert {0, 1, 2, 3, 4, None} == set(tried)
    expected = by_hand(Lit(**TRIAL), batch_size, accumulate, epochs=4)
    assert module.losses == expected.losses
    assert_same_state(module, expected)


@pytest.mark.parametrize("choices", [TRIAL, {"noise": 1.0}], ids=["trial", "blend"])
def test_a_resumed_fit_has_the_losses_of_an_uninterrupted_one(
    choices: dict[str, Any], fit: Fit, tmp_path: Path
) -> None:
    """Interrupted before the commitment, in epoch 2 or 3, and after it."""
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    whole = Lit(**choices)
    first = fit(whole, max_epochs=4, others=[saving], enable_checkpointing=True)
    assert 6 < first.schedule.commit_step <= 18
    for cut in (1, 3):
        resumed = Lit(seed=7, **choices)
        second = fit(resumed, max_epochs=4, ckpt_path=tmp_path / f"epoch={cut - 1}.ckpt")
        assert resumed.losses == whole.losses[6 * cut :]
        assert second.selection.to_dict() == first.selection.to_dict()
        assert_same_state(resumed, whole)


def test_a_skipped_batch_in_a_trial_counts_with_the_last_loss(fit: Fit) -> None:
    class Skips(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss

    callback = fit(Skips(**TRIAL), max_epochs=4)
    assert callback.schedule.committed
    assert callback.schedule.steps_done == 24


def test_the_module_stays_committed_and_the_extracted_one_is_plain(fit: Fit) -> None:
    module = Lit()
    callback = fit(module)
    assert callback.schedule.committed
    assert all(site.committed for site in sites_of(module))
    plain = callback.extracted
    assert isinstance(plain, Lit)
    assert sites_of(plain) == []
    x = torch.randn(5, 4)
    assert torch.equal(plain.eval()(x), module.eval()(x))
    assert callback.selection.picks == flexact.selection(module).picks
    assert "training_step" not in vars(module)
    assert "training_step" not in vars(plain)


def test_a_lightning_module_that_was_converted_itself(fit: Fit) -> None:
    """Its own forward has a functional call, and Lightning calls its `training_step` instead of the module."""

    class Functional(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(self.net(x)) - 1

    module = flexact.convert(Functional())
    callback = fit(module)
    expected = by_hand(flexact.convert(Functional()))
    assert module.losses == expected.losses
    assert len(callback.selection) == 3
    x = torch.randn(5, 4)
    assert torch.equal(callback.extracted.eval()(x), module.eval()(x))


def test_the_penalty_is_in_the_loss_for_every_return_type_of_training_step(fit: Fit) -> None:
    class AsDictionary(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "size": len(batch[0])}

    class Skips(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss

    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs["loss"].item() - module.losses[-1])
            assert outputs["size"] == 8

    module = AsDictionary(**PAPER)
    callback = fit(module, others=[Look()])
    before, after = seen[: callback.schedule.commit_step], seen[callback.schedule.commit_step :]
    assert min(before) > 1e-4
    assert after == pytest.approx([0.0] * len(after), abs=1e-7)
    skipping = fit(Skips(**PAPER))
    assert skipping.schedule.steps_done == 12


def test_a_copy_made_during_the_run_has_a_step_of_its_own(fit: Fit) -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                copies.append(copy.deepcopy(module))

    module = Lit()
    fit(module, others=[Copy()])
    steps = len(module.losses)
    copies[0].training_step(next(iter(DataLoader(rows(), batch_size=8))), 0)
    assert len(module.losses) == steps
    assert len(copies[0].losses) == 4


def test_checkpoints_of_a_finished_run_fit_the_module_and_give_the_plain_network(fit: Fit, tmp_path: Path) -> None:
    class Tested(Lit):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("outputs", self(batch[0]).sum())

    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    module = Tested()
    callback = fit(module, others=[saving], enable_checkpointing=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", callbacks=[callback], **quiet)
    loader = DataLoader(rows(), batch_size=48)
    (tested,) = trainer.test(Tested(seed=3), loader, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert tested["outputs"] == pytest.approx(callback.extracted(rows()[:][0]).sum().item(), abs=1e-5)
    loaded = Lit.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    x = torch.randn(5, 4)
    assert torch.equal(flexact.extract(loaded).eval()(x), callback.extracted.eval()(x))


def test_probabilities_go_to_the_loggers_until_the_commitment(fit: Fit, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen: dict[int, float] = {}

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen[trainer.global_step - 1] = flexact.selection(module)[0].probabilities["tanh"]

    loggers = [CSVLogger(tmp_path / "csv", name=""), TensorBoardLogger(tmp_path / "events", name="")]
    callback = fit(Lit(), others=[Look()], logger=loggers, log_every_n_steps=2)
    expected = {step: p for step, p in seen.items() if step % 2 == 1 and step <= callback.schedule.commit_step}
    assert len(expected) >= 3
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        written = {int(row["step"]): float(row["flexact/net.1/tanh"]) for row in csv.DictReader(file)}
    assert written == pytest.approx(expected)
    found = events.EventAccumulator(str(tmp_path / "events" / "version_0"))
    found.Reload()
    assert {e.step: e.value for e in found.Scalars("flexact/net.1/tanh")} == pytest.approx(expected, rel=1e-5)


def test_logging_can_be_turned_off(fit: Fit, tmp_path: Path) -> None:
    fit(Lit(), callback=FlexActCallback(log=False), logger=CSVLogger(tmp_path, name=""), log_every_n_steps=1)
    assert not (tmp_path / "version_0" / "metrics.csv").exists()


def test_a_run_that_ends_early_warns_and_can_be_resumed(fit: Fit, tmp_path: Path) -> None:
    class StopEarly(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 6

    whole, module = Lit(), Lit()
    fit(whole, max_epochs=4)
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    with pytest.warns(UserWarning, match="6 of 24 steps .*2 sites"):
        callback = fit(module, max_epochs=4, others=[StopEarly(), saving], enable_checkpointing=True)
    assert sites_of(callback.extracted) == []
    assert not any(site.committed for site in sites_of(module))
    resumed = Lit()
    fit(resumed, max_epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert module.losses + resumed.losses == whole.losses


def test_an_exception_leaves_the_module_unchanged(fit: Fit) -> None:
    class Breaks(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("broken data")
            return super().training_step(batch, batch_idx)

    module = Breaks()
    with pytest.raises(RuntimeError, match="broken data"):
        fit(module)
    assert "training_step" not in vars(module)


def test_bf16_trains_with_logits_in_float32(fit: Fit) -> None:
    module = Lit()
    kinds = set()
    module.net[0].register_forward_hook(lambda *call: kinds.add(call[-1].dtype))
    callback = fit(module, precision="bf16-mixed")
    assert kinds == {torch.bfloat16}
    assert all(site.logits.dtype == torch.float32 for site in sites_of(module))
    assert callback.schedule.committed
    assert all(map(torch.isfinite, map(torch.tensor, module.losses)))


def test_a_compiled_module_has_the_same_losses(fit: Fit) -> None:
    plain, module = Lit(candidates=("relu", "tanh")), Lit(candidates=("relu", "tanh"))
    fit(plain)
    torch._dynamo.reset()
    callback = fit(torch.compile(module, backend="eager"))
    torch._dynamo.reset()
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert sites_of(callback.extracted) == []


# Misuse, reported before the first step


def test_a_callback_used_for_two_fits(fit: Fit) -> None:
    callback = fit(Lit())
    with pytest.raises(flexact.FlexActError, match="already been used"):
        fit(Lit(), callback=callback)


def test_a_module_that_was_not_converted(fit: Fit) -> None:
    module = Lit()
    module.net = network()
    with pytest.raises(flexact.FlexActError, match=r"no FlexAct sites.*flexact\.convert"):
        fit(module)


def test_manual_optimization(fit: Fit) -> None:
    module = Lit()
    module.automatic_optimization = False
    with pytest.raises(flexact.FlexActError, match=r"schedule\.step\(\)"):
        fit(module)


def test_an_optimizer_that_decays_the_logits_it_moves_or_has_none(fit: Fit) -> None:
    class Decays(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), weight_decay=0.1)

    class Forgets(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for name, p in self.named_parameters() if "logits" not in name], lr=0.1)

    with pytest.raises(flexact.FlexActError, match=r"logits of 2 sites \(1, 3\)"):
        fit(Decays(logit_step="optimizer"))
    fit(Decays())  # the policy moves them
    with pytest.raises(flexact.FlexActError, match="2 of 2 sites"):
        fit(Forgets())


def test_a_run_of_unknown_length(fit: Fit) -> None:
    class Endless(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from rows()

    loader = DataLoader(Endless(), batch_size=8)
    with pytest.raises(flexact.FlexActError, match="max_epochs=2"):
        fit(Lit(), loader=loader)
    with pytest.raises(flexact.FlexActError, match=r"max_epochs=-1.*Pass max_steps="):
        fit(Lit(), max_epochs=-1, max_time={"minutes": 1})
    assert fit(Lit(), loader=loader, max_epochs=None, max_steps=10).schedule.total_steps == 10


def test_a_checkpoint_without_flexact_state(fit: Fit, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(Lit(), others=[saving], enable_checkpointing=True)
    with pytest.raises(flexact.FlexActError, match=r"network_steps=12.*18"):
        fit(Lit(), max_epochs=3, ckpt_path=tmp_path / "epoch=0.ckpt")
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    checkpoint["callbacks"] = {}
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(flexact.FlexActError, match=r"step 6.*step 0"):
            fit(Lit(), ckpt_path=tmp_path / "foreign.ckpt")


def test_an_unsupported_strategy(fit: Fit) -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    module = Lit()
    callback = FlexActCallback()
    trainer = type("Trainer", (), {"strategy": FSDPStrategy()})()
    with pytest.raises(flexact.FlexActError, match=r"FSDPStrategy.*strategy='ddp'"):
        callback.setup(trainer, module, "fit")


# Several processes


def fitted(package: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Runs fit_lightning.py, alone or on several ranks, and returns the JSON that each prints."""
    program = HERE / "fit_lightning.py"
    started = forked.ranks(ranks, program, package) if ranks > 1 else [forked.Program(program, package)]
    return [json.loads(line) for out in forked.outputs(*started) for line in out.splitlines() if line[:1] == "{"]


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_the_whole_batch_and_a_callback_of_the_other_package() -> None:
    ranks = sorted(fitted("lightning.pytorch", ranks=2), key=lambda printed: printed["rank"])
    assert [printed["rank"] for printed in ranks] == [0, 1]
    assert ranks[0]["logits"] == ranks[1]["logits"]
    assert ranks[0]["picks"] == ranks[1]["picks"]
    (alone,) = fitted("pytorch_lightning")
    assert alone["base"] == "pytorch_lightning.callbacks.callback"
    assert alone["committed"]
    assert torch.allclose(torch.tensor(ranks[0]["logits"]), torch.tensor(alone["logits"]), atol=1e-6)
    assert ranks[0]["picks"] == alone["picks"]
    assert ranks[0]["outputs"] == pytest.approx(alone["outputs"], abs=1e-5)
    assert alone["logits"][0] != alone["logits"][-1]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_half_precision_on_a_gpu(precision: str, fused: bool, fit: Fit) -> None:
    """The first steps of fp16 overflow. Logits must stay finite."""

    class Fused(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(flexact.param_groups(self), lr=0.05, fused=fused)

    module = Fused()
    callback = fit(module, precision=precision, accelerator="gpu", devices=1)
    assert all(site.logits.isfinite().all() for site in sites_of(module))
    assert callback.schedule.committed
