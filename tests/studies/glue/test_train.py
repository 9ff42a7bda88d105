"""Tests of a cell of the text study: its result, resuming it, and plain transformers as its oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import flexact
from flexact import FlexActError
from flexact.config import PAPER_CANDIDATES
from flexact.studies.glue import trainer
from flexact.studies.glue.data import TASKS, load, measured
from flexact.studies.glue.encoder import build, encoded, find_encoder, tokenizer_of
from flexact.studies.glue.protocol import Cell, Protocol
from flexact.studies.glue.train import train_cell
from flexact.studies.glue.trainer import ByLength
from flexact.studies.grid.cell_task import read_curve
from flexact.studies.grid.study import picked

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture
def protocol(tiny_encoder: Path) -> Protocol:
    return Protocol(**find_encoder(str(tiny_encoder)), batch=4, lr=1e-3)


def batch(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns rows as the network's inputs."""
    found = tokenizer.pad([{name: one[name] for name in one if name != "label"} for one in rows], return_tensors="pt")
    return {**found, "labels": torch.tensor([row["label"] for row in rows])}


def comparable(outcome: Any) -> dict[str, Any]:
    return {name: value for name, value in outcome._asdict().items() if name not in ("seconds", "step_ms")}


def test_a_fixed_cell_equals_plain_fine_tuning(tiny_encoder: Path, glue_folder: Path, tmp_path: Path) -> None:
    """The same losses and metrics as a loop written by hand: AdamW, warm-up, linear decay, clipping."""
    still = Path(shutil.copytree(tiny_encoder, tmp_path / "still"))
    config = json.loads((still / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    protocol, data = Protocol(**find_encoder(str(still)), batch=4, lr=1e-3), load("rte", glue_folder)
    outcome = train_cell(Cell("rte", "fixed", 3), protocol, data, tmp_path, CPU)
    train, dev = encoded(data, protocol.folder, protocol.length)
    tokenizer = tokenizer_of(protocol.folder)
    network = build(protocol.folder, TASKS["rte"], 3).train()
    plain = {"bias", "LayerNorm"}
    decayed = [p for name, p in network.named_parameters() if not any(word in name for word in plain)]
    others = [p for name, p in network.named_parameters() if any(word in name for word in plain)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 18)
    for epoch in range(3):
        losses = []
        sampler = ByLength(train, 4, seed=3)
        sampler.set_epoch(epoch)
        order = list(sampler)
        for first in range(0, 24, 4):
            loss = network(**batch(tokenizer, [train[row] for row in order[first : first + 4]])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert outcome.loss == pytest.approx(sum(losses) / 6, rel=1e-4)
    with torch.no_grad():
        outputs = network.eval()(**batch(tokenizer, dev)).logits.numpy()
    labels = numpy.array([label for _, label in data.dev])
    assert outcome.metrics == pytest.approx(measured(data.task, outputs, labels))
    assert (outcome.epochs, outcome.picks, outcome.split) == (3, "", "official")
    assert [line["epoch"] for line in read_curve(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("task", ["cola", "mrpc", "stsb", "qnli", "wnli"])
def test_every_task_is_trained_and_measured(task: str, protocol: Protocol, glue_folder: Path, tmp_path: Path) -> None:
    data = load(task, glue_folder)
    outcome = train_cell(Cell(task, "flexact-all", 0), protocol, data, tmp_path, CPU)
    assert tuple(outcome.metrics) == data.task.metrics
    assert outcome.epochs == (5 if task == "wnli" else 3)
    assert list(picked(outcome.picks)) == [
        "bert.encoder.layer.0.intermediate.intermediate_act_fn",
        "bert.pooler.activation",
    ]


def test_a_fixed_gelu_is_the_encoders_own_activation_and_mish_is_not(
    protocol: Protocol, glue_folder: Path, tmp_path: Path
) -> None:
    data = load("rte", glue_folder)
    losses = {
        method: train_cell(Cell("rte", method, 0), protocol, data, tmp_path / method, CPU).loss
        for method in ("fixed", "gelu", "mish")
    }
    assert losses["gelu"] == losses["fixed"]
    assert losses["mish"] != losses["fixed"]


def test_penultimate_is_the_poolers_activation(protocol: Protocol, glue_folder: Path, tmp_path: Path) -> None:
    outcome = train_cell(Cell("wnli", "flexact-penultimate", 0), protocol, load("wnli", glue_folder), tmp_path, CPU)
    assert list(picked(outcome.picks)) == ["bert.pooler.activation"]
    history = flexact.Recorder.load(tmp_path / "history.jsonl")
    assert [record["step"] for record in history][:3] == [0, 1, 2]
    assert history[-1]["picks"] == picked(outcome.picks)
    assert history[-1]["epoch"] == 5.0


def test_a_stopped_cell_starts_again_and_has_the_result_of_an_uninterrupted_one(
    protocol: Protocol, glue_folder: Path, tmp_path: Path
) -> None:
    cell, data = Cell("rte", "flexact-all", 0), load("rte", glue_folder)
    whole = train_cell(cell, protocol, data, tmp_path / "whole", CPU)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 15

    with pytest.raises(FlexActError, match="15 of 18 steps"):
        train_cell(cell, protocol, data, tmp_path / "cut", CPU, stop=stop)
    assert [line["epoch"] for line in read_curve(tmp_path / "cut")] == [1, 2]
    again = train_cell(cell, protocol, data, tmp_path / "cut", CPU)
    assert comparable(again) == comparable(whole)
    assert [line["epoch"] for line in read_curve(tmp_path / "cut")] == [1, 2, 3]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [
        path.name for path in (tmp_path / "whole").iterdir()
    ]


def test_a_nan_loss_raises(protocol: Protocol, glue_folder: Path, tmp_path: Path) -> None:
    wild = Protocol(**{**vars(protocol), "lr": 1e30})
    with pytest.raises(FlexActError, match=r"^the loss of the last epoch is nan.*Try a smaller --lr"):
        train_cell(Cell("rte", "fixed", 0), wild, load("rte", glue_folder), tmp_path, CPU)


def test_a_kept_network_loads(protocol: Protocol, glue_folder: Path, tmp_path: Path) -> None:
    kept = Protocol(**{**vars(protocol), "keep": True})
    train_cell(Cell("rte", "flexact-all", 0), kept, load("rte", glue_folder), tmp_path, CPU)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    flexact.load_picks(model, tmp_path / "model")
    assert model(input_ids=torch.tensor([[2, 5, 3]])).logits.shape == (1, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1; got 0"),
        ({"limit": -1}, "limit must be a whole number of at least 1"),
        ({"lr": float("nan")}, "lr must be a finite number at least 0"),
        ({"policy": "papr"}, "unknown policy 'papr'; did you mean 'paper'"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"candidates": ("relu", "tahn")}, "unknown candidate 'tahn'"),
        (
            {"changes": {"policy": {"logit_step_sizes": 1}}},
            "unknown field of Policy 'logit_step_sizes'; did you mean 'logit_step_size'",
        ),
    ],
)
def test_an_invalid_protocol_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        Protocol(**fields)


def test_every_policy_can_start_from_the_pretrained_network() -> None:
    for policy in ("default", "paper"):
        config = Protocol(policy=policy, candidates=("relu", "tanh")).config(seed=4)
        assert (config.init, config.seed, config.candidates) == ("original", 4, ("relu", "tanh"))
        assert 0 < config.warmup < config.commit_at
    pretrained = {"init": "original", "warmup": 0.3}  # as docs/transformers.md shows for a Trainer
    assert Protocol().config(seed=0) == flexact.FlexConfig(candidates=PAPER_CANDIDATES, **pretrained)
    assert Protocol(policy="paper").config(seed=0) == flexact.FlexConfig.paper(**pretrained)
    assert Protocol(policy="paper").logit_lr is not None
    assert Protocol().logit_lr is None


def test_a_network_trained_in_bf16_is_measured_in_float32(
    protocol: Protocol, glue_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = transformers.TrainingArguments
    monkeypatch.setattr(trainer._package, "TrainingArguments", lambda **given: arguments(**{**given, "bf16": True}))
    data = load("stsb", glue_folder)
    train, dev = encoded(data, protocol.folder, protocol.length)
    network = build(protocol.folder, TASKS["stsb"], 0)
    cell = Cell("stsb", "fixed", 0)
    found = trainer.trainer_for(network, train, dev, cell, protocol, CPU, tmp_path)
    assert found.accelerator.mixed_precision == "bf16"
    found.accelerator.prepare_model(network)  # as training does: from here on, its forward runs under autocast
    scores = torch.from_numpy(found.predict(dev).predictions)
    assert not torch.equal(scores, scores.bfloat16().float())
    with torch.no_grad():
        plain = build(protocol.folder, TASKS["stsb"], 0).eval()
        assert torch.allclose(scores, plain(**batch(tokenizer_of(protocol.folder), dev)).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_cell_on_a_gpu(protocol: Protocol, glue_folder: Path, tmp_path: Path) -> None:
    cuda = torch.device("cuda:0")
    data = load("rte", glue_folder)
    found = {
        method: train_cell(Cell("rte", method, 0), protocol, data, tmp_path / method, cuda)
        for method in ("fixed", "flexact-all")
    }
    assert all(outcome.metrics["accuracy"] >= 0 for outcome in found.values())
    assert len(found["flexact-all"].picks.split()) == 2
