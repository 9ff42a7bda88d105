"""One cell: an encoder fine-tuned on a task, with its activations fixed or picking, and measured on the dev rows."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flexact import convert
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.studies.glue.data import TextData
from flexact.studies.glue.encoder import build, transformers_package
from flexact.studies.glue.metrics import measured
from flexact.studies.glue.protocol import PLACEMENTS, Cell, Protocol
from flexact.studies.glue.tokens import encoded

OUTCOME, CHECKPOINTS, MODEL = "outcome.json", "checkpoints", "model"
STATE = "trainer_state.json"
"""Written last into a Trainer's checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """What a cell came to."""

    metrics: dict[str, float]
    """The task's, in percent, of the extracted network on the dev rows."""
    split: str
    """Which rows: the benchmark's own, or a part of its dev file."""
    loss: float
    """Of the last epoch."""
    epochs: int
    seconds: float
    step_ms: float
    """Milliseconds a step, the mean over epochs: of routing, and of training on with what was picked."""
    picks: dict[str, str]
    """By site, in depth order; none where the activations are fixed."""


def train_cell(
    cell: Cell,
    protocol: Protocol,
    data: TextData,
    folder: Path,
    device: torch.device,
    report: Callable[[Any], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Run a cell to its end, from where its folder stands.

    report: is told of each epoch. stop: asked after every step; where it says so, the run saves and raises `Stopped`.
    """
    finished = folder / OUTCOME
    if finished.is_file():
        return _read(finished, cell, protocol)
    if device.type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    transformers_package()
    from flexact.integrations.transformers import FlexActCallback
    from flexact.studies.glue.trainer import trainer_for
    from flexact.studies.glue.watching import Watch

    data = data.first(protocol.limit)
    train, dev = encoded(data, protocol.encoder, protocol.length)
    network = build(protocol.encoder, data.task.outputs, cell.seed, data.task.is_regression)
    picks = cell.method in PLACEMENTS
    if picks:
        network = convert(network, PLACEMENTS[cell.method], protocol.config(cell.seed))
    folder.mkdir(parents=True, exist_ok=True)
    watch = Watch(network, folder, protocol.checkpoint_minutes, report, stop, device)
    trainer = trainer_for(network, train, dev, cell, protocol, device, folder / CHECKPOINTS, [])
    callback = FlexActCallback(logit_lr=protocol.logit_lr, log=False)
    if picks:
        callback.wrap(trainer)
    trainer.add_callback(watch)  # after the other: it records what a step left
    with watch.at_work():
        trainer.train(resume_from_checkpoint=_last(folder / CHECKPOINTS))
    found = trainer.predict(trainer.eval_dataset)
    loss = watch.curve[-1]["loss"]
    if not math.isfinite(loss) or not all(torch.isfinite(p).all() for p in trainer.model.parameters()):
        raise FlexActError(f"the loss of the last epoch is {loss}, or a weight is; try a smaller lr, in another --out.")
    outcome = Outcome(
        metrics=measured(data.task, found.predictions, found.label_ids),
        split=data.split,
        loss=loss,
        epochs=protocol.epochs_of(cell.task),
        seconds=watch.curve[-1]["seconds"],
        step_ms=statistics.fmean(line["step_ms"] for line in watch.curve),
        picks=callback.selection.leading if callback.selection is not None else {},
    )
    watch.write_score(statistics.fmean(outcome.metrics.values()))
    if protocol.keep:
        trainer.save_model(str(folder / MODEL))
    about = {"cell": cell.to_dict(), "protocol": protocol.to_dict(), "outcome": asdict(outcome)}
    write_whole(finished, json.dumps(about, indent=1) + "\n")
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return outcome


def _last(folder: Path) -> str | None:
    """The newest checkpoint that is whole."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / STATE).is_file()]
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None


def _read(path: Path, cell: Cell, protocol: Protocol) -> Outcome:
    try:
        about = json.loads(path.read_bytes())
        if about["cell"] != cell.to_dict() or about["protocol"]["sha256"] != protocol.sha256:
            raise FlexActError(f"{path} is of another run; remove {path.parent} to train this cell.")
        return Outcome(**about["outcome"])
    except (ValueError, KeyError, TypeError) as error:
        raise FlexActError(
            f"{path} is cut off or damaged ({type(error).__name__}: {error}). Remove {path.parent} to train it anew."
        ) from None
