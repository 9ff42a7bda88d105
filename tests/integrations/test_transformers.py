"""Tests of FlexActCallback in transformers.Trainer: a run equals a loop written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flexact
import forked
from flexact.config import PAPER_CANDIDATES
from flexact.routing.sites import sites_of

transformers = pytest.importorskip("transformers")
from flexact.integrations.transformers import FlexActCallback  # noqa: E402

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HERE = Path(__file__).parent
Build = Callable[..., Any]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def final_logits(trainer: Any) -> torch.Tensor:
    return torch.cat([site.logits.detach() for site in trainer.flexact.schedule.router.sites])


def test_three_lines_train_commit_and_leave_a_plain_model(routed: Build, trainer_of: Build) -> None:
    callback = FlexActCallback()
    trainer = callback.wrap(trainer_of(routed()))
    trainer.train()
    assert callback.schedule.total_steps == trainer.state.max_steps == 12
    assert callback.schedule.committed
    assert callback.schedule.steps_done == 12
    assert sites_of(trainer.model) == []
    assert len(callback.selection) == 3
    assert isinstance(trainer, transformers.Trainer)


def test_the_run_equals_a_loop_written_by_hand(routed: Build, trainer_of: Build, rows: Any) -> None:
    trainer = FlexActCallback().wrap(trainer_of(routed(settings=STILL), weight_decay=0.1, max_grad_norm=1.0))
    trainer.train()

    model = routed(settings=STILL).train()
    decayed = set(trainer.get_decay_parameter_names(model))
    weights = [(name, p) for name, p in model.named_parameters() if not name.endswith(".logits")]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for name, p in weights if name in decayed], "weight_decay": 0.1},
            {"params": [p for name, p in weights if name not in decayed], "weight_decay": 0.0},
            {"params": [site.logits for site in sites_of(model)], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    schedule = flexact.Schedule(model, 12, optimizer)
    found = []
    transformers.set_seed(42)
    loader = trainer.get_train_dataloader()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 - schedule.steps_done / 12)
            loss = model(**batch).loss + flexact.penalty(model)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            found.append(loss.item())
    assert found == pytest.approx(losses(trainer), rel=1e-4)
    assert flexact.selection(model).picks == trainer.flexact.selection.picks


def test_logits_have_a_parameter_group_of_their_own_without_weight_decay(routed: Build, trainer_of: Build) -> None:
    model = routed(logit_step="optimizer")
    trainer = FlexActCallback(logit_lr=0.05).wrap(trainer_of(model, weight_decay=0.1))
    groups = trainer.create_optimizer().param_groups
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.1, 1e-3), (0.0, 1e-3), (0.0, 0.05)]
    logits = [site.logits for site in sites_of(model)]
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in logits}
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


def test_the_penalty_is_in_the_training_loss_and_not_in_the_evaluation_loss(routed: Build, trainer_of: Build) -> None:
    paper = flexact.FlexConfig.paper().to_dict()
    paper = {key: value for key, value in paper.items() if key not in ("flexact_config", "init", "candidates")}
    model = routed(settings=STILL, **paper)
    trainer = FlexActCallback().wrap(trainer_of(model))
    seen = []

    class Look(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            batch = next(iter(trainer.get_eval_dataloader()))
            with torch.no_grad():
                model.train()
                total = trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(8)).item()
                extra = flexact.penalty(model).item()
                plain = model(**batch).loss.item()
                model.eval()
                silent = trainer.compute_loss(model, dict(batch)).item() - model(**batch).loss.item()
            seen.append((total - plain, extra, silent))

    trainer.add_callback(Look())
    trainer.train()
    differences, penalties, in_eval = zip(*seen, strict=True)
    assert differences == pytest.approx(penalties, abs=1e-5)
    assert penalties[0] > 0.01
    assert penalties[-1] == 0  # committed
    assert max(map(abs, in_eval)) == 0


def test_accumulated_micro_batches_are_one_step(routed: Build, trainer_of: Build) -> None:
    alone = {"candidates": PAPER_CANDIDATES, "share": "site"}
    whole = FlexActCallback().wrap(trainer_of(routed(settings=STILL, **alone)))
    parts = FlexActCallback().wrap(
        trainer_of(routed(settings=STILL, **alone), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    )
    for trainer in (whole, parts):
        trainer.model_accepts_loss_kwargs = False  # BERT's loss is always a mean over the micro-batch
        trainer.train()
    assert parts.flexact.schedule.steps_done == 12
    assert losses(parts) == pytest.approx(losses(whole), rel=2e-3)
    assert torch.allclose(final_logits(parts), final_logits(whole), atol=0.1)


def test_a_trainer_blends_and_refuses_a_trial(routed: Build, trainer_of: Build) -> None:
    """The Trainer passes no loss to its callbacks at the end of a step."""
    trainer = FlexActCallback().wrap(trainer_of(routed()))
    assert {site.config.pick_by for site in sites_of(trainer.model)} == {"blend"}
    assert sites_of(trainer.model)[0].router.config.pick_by == "blend"
    with pytest.raises(flexact.FlexActError, match="pick_by='trial'"):
        FlexActCallback().wrap(trainer_of(routed(init="uniform", pick_by="trial")))


def test_the_penalty_of_micro_batches_is_averaged(routed: Build, trainer_of: Build) -> None:
    """The Trainer divides the loss for a model that takes no loss keywords; otherwise the model has divided it."""
    model = routed(alpha_kind="absolute", settings=STILL)
    trainer = FlexActCallback().wrap(trainer_of(model, gradient_accumulation_steps=4))
    for accepts in (True, False):
        trainer.model_accepts_loss_kwargs = accepts
        trainer.flexact.schedule = flexact.Schedule(model, 12)
        trainer.current_gradient_accumulation_steps = 4
        batch = next(iter(trainer.get_eval_dataloader()))
        items = torch.tensor(32) if accepts else None
        model.train()
        loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
        penalty = flexact.penalty(model)
        assert penalty > 0
        expected = penalty / 4 if accepts else penalty  # otherwise the Trainer divides all of it
        assert (loss - model(**batch).loss).item() == pytest.approx(expected.item(), rel=1e-4)


def test_gradient_checkpointing_changes_nothing(routed: Build, trainer_of: Build) -> None:
    plain = FlexActCallback().wrap(trainer_of(routed(noise=1.0)))
    saving = FlexActCallback().wrap(trainer_of(routed(noise=1.0), gradient_checkpointing=True))
    for trainer in (plain, saving):
        transformers.set_seed(0)
        trainer.train()
    assert losses(saving) == pytest.approx(losses(plain), rel=1e-5)
    assert torch.allclose(final_logits(saving), final_logits(plain), atol=1e-3)


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(routed: Build, trainer_of: Build, tmp_path: Path) -> None:
    """Interrupted before the commitment, at step 8, and after it."""
    whole = FlexActCallback().wrap(trainer_of(routed(noise=1.0), "whole", save_strategy="steps", save_steps=5))
    whole.train()
    for cut in (5, 10):
        resumed = FlexActCallback().wrap(trainer_of(routed(seed=7, noise=1.0), "resumed"))
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{cut}"))
        assert losses(resumed) == losses(whole)  # the checkpoint contains the log of the first part
        assert resumed.flexact.selection.to_dict() == whole.flexact.selection.to_dict()
        for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_probabilities_go_to_tensorboard_and_into_the_log(
    routed: Build, trainer_of: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = FlexActCallback().wrap(trainer_of(routed("penultimate"), report_to="tensorboard"))
    trainer.train()
    name = "flexact/bert.pooler.activation/tanh"
    logged = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
    assert list(logged) == list(range(1, trainer.flexact.schedule.commit_step + 1))
    assert logged[trainer.flexact.schedule.commit_step] in (0.0, 1.0)
    found = events.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    scalars = {event.step: event.value for event in found.Scalars(f"train/{name}")}
    assert scalars == pytest.approx(logged)


@pytest.mark.parametrize("with_bar", [False, True])
def test_probabilities_are_kept_out_of_the_console(
    with_bar: bool, routed: Build, trainer_of: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    class Logger(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.extend(logs)

    trainer = trainer_of(routed("penultimate"), callbacks=[Logger()], disable_tqdm=not with_bar)
    if not with_bar:
        trainer.add_callback(transformers.PrinterCallback)
    FlexActCallback().wrap(trainer).train()
    shown = capsys.readouterr()
    assert "'loss'" in shown.out + shown.err
    assert "flexact/" not in shown.out + shown.err
    assert seen.count("flexact/bert.pooler.activation/tanh") == trainer.flexact.schedule.commit_step
    assert seen.count("loss") == 12


def test_logging_can_be_turned_off(routed: Build, trainer_of: Build) -> None:
    trainer = FlexActCallback(log=False).wrap(trainer_of(routed("penultimate")))
    trainer.train()
    assert not any("flexact" in key for entry in trainer.state.log_history for key in entry)


def test_evaluation_after_the_run_uses_the_extracted_model(routed: Build, trainer_of: Build, rows: Any) -> None:
    trainer = FlexActCallback().wrap(trainer_of(routed()))
    trainer.train()
    model = trainer.model.eval()
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-4)


def test_a_model_can_keep_its_sites(routed: Build, trainer_of: Build) -> None:
    trainer = FlexActCallback(extract=False).wrap(trainer_of(routed()))
    trainer.train()
    assert all(site.committed for site in sites_of(trainer.model))


def test_a_run_that_ends_early_warns_and_commits_to_the_current_leaders(routed: Build, trainer_of: Build) -> None:
    class StopEarly(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    trainer = FlexActCallback().wrap(trainer_of(routed(), callbacks=[StopEarly()]))
    with pytest.warns(UserWarning, match="3 of 12 steps .*3 sites"):
        trainer.train()
    assert sites_of(trainer.model) == []


def outputs_of(*programs: forked.Program) -> list[dict[str, Any]]:
    """Returns what each program prints as JSON."""
    return [json.loads(line) for out in forked.outputs(*programs) for line in out.splitlines() if line[:1] == "{"]


@pytest.mark.slow
def test_two_ranks_keep_identical_logits(tmp_path: Path) -> None:
    printed = outputs_of(*forked.ranks(2, HERE / "train_tiny.py", tmp_path))
    assert sorted(one["rank"] for one in printed) == [0, 1]
    first, second = printed
    assert first["logits"] == second["logits"]
    assert first["picks"] == second["picks"]
    assert len(first["logits"]) == 13  # the start, and every step
    assert first["logits"][0] != first["logits"][-1]


@pytest.mark.slow
def test_bf16_trains_with_logits_in_float32(tmp_path: Path) -> None:
    # Without AMX, which some sandboxes do not allow.
    without = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    (printed,) = outputs_of(forked.Program(HERE / "train_tiny.py", tmp_path, "bf16", settings=without))
    assert printed["dtypes"] == {"logits": ["torch.float32"], "layers": ["torch.bfloat16"]}
    assert printed["losses"] == pytest.approx([0.69] * 12, abs=0.1)
    assert printed["logits"][0] != printed["logits"][-1]


@pytest.mark.slow
def test_torch_compile_gives_the_same_losses_within_the_recompile_limit(routed: Build, trainer_of: Build) -> None:
    """Layers with six candidates and a pooler with five: candidates are dropped at eight steps."""
    settings = {**STILL, "num_hidden_layers": 1}
    steps = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 16}
    plain = FlexActCallback().wrap(trainer_of(routed(settings=settings), **steps))
    plain.train()
    compiling = {"torch_compile": True, "torch_compile_backend": "eager"}
    compiled = FlexActCallback().wrap(trainer_of(routed(settings=settings), **steps, **compiling))
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled.train()
    torch._dynamo.reset()
    assert torch._dynamo.config.recompile_limit == limit
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)
    assert compiled.flexact.selection.picks == plain.flexact.selection.picks
    assert sites_of(compiled.model) == []


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_a_gpu(precision: str, routed: Build, trainer_of: Build) -> None:
    """The first steps of fp16 overflow. Logits must stay finite."""
    trainer = FlexActCallback().wrap(trainer_of(routed(), use_cpu=False, **{precision: True}))
    trainer.train()
    assert final_logits(trainer).isfinite().all()
    assert trainer.flexact.schedule.committed
