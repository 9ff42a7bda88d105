"""One cell: an encoder fine-tuned on a task, with fixed or picked activations, and evaluated on the dev rows."""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from flexact import convert
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows
from flexact.studies.glue.data import TextData, measured
from flexact.studies.glue.encoder import build, encoded, transformers_package
from flexact.studies.glue.protocol import PLACEMENTS, Cell, Protocol
from flexact.studies.grid.cell_task import CURVE

CHECKPOINTS, MODEL = "checkpoints", "model"
STATE = "trainer_state.json"
"""The file that a Trainer writes last into a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    metrics: dict[str, float]
    """The task's metrics in percent, of the extracted network on the dev rows."""
    split: str
    """The dev rows: the benchmark's own, or part of its dev file."""
    loss: float
    """The loss of the last epoch."""
    epochs: int
    seconds: float
    step_ms: float
    """Milliseconds per step: the mean over epochs of the median over windows of steps. Includes routing and the steps
    after the commitment."""
    picks: dict[str, str]
    """By site, in depth order; empty if the activations are fixed."""


def train_cell(
    cell: Cell,
    protocol: Protocol,
    data: TextData,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train a cell, or resume it from the checkpoint of its last epoch.

    stop: called after each step; once it returns True, `Stopped` is raised and the epoch is lost.
    """
    if device.type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    transformers_package()
    from flexact.integrations.transformers import FlexActCallback
    from flexact.studies.glue.trainer import CellCallback, curve_of, trainer_for

    data = data.first(protocol.limit)
    train, dev = encoded(data, protocol.folder, protocol.length)
    network = build(protocol.folder, data.task.outputs, cell.seed, data.task.is_regression)
    picks = cell.method in PLACEMENTS
    if picks:
        network = convert(network, PLACEMENTS[cell.method], protocol.config(cell.seed))
    folder.mkdir(parents=True, exist_ok=True)
    trainer = trainer_for(network, train, dev, cell, protocol, device, folder / CHECKPOINTS)
    callback = FlexActCallback(logit_lr=protocol.logit_lr, log=False)
    if picks:
        callback.wrap(trainer)
    own = CellCallback(network, folder, stop, device)
    trainer.add_callback(own)  # after FlexActCallback, to record the state after its step
    with closing(own):
        trainer.train(resume_from_checkpoint=_last_checkpoint(folder / CHECKPOINTS))
    found = trainer.predict(trainer.eval_dataset)
    curve = curve_of(trainer.state)
    loss = curve[-1]["loss"]
    if not math.isfinite(loss) or not all(torch.isfinite(p).all() for p in trainer.model.parameters()):
        raise FlexActError(
            f"the loss of the last epoch is {loss}, or a weight is not finite. Try a smaller lr, in another --out."
        )
    outcome = Outcome(
        metrics=measured(data.task, found.predictions, found.label_ids),
        split=data.split,
        loss=loss,
        epochs=protocol.epochs_of(cell.task),
        seconds=curve[-1]["seconds"],
        step_ms=statistics.fmean(line["step_ms"] for line in curve),
        picks=callback.selection.leading if callback.selection is not None else {},
    )
    curve[-1]["score"] = statistics.fmean(outcome.metrics.values())
    write_rows(folder / CURVE, curve)
    if protocol.keep:
        trainer.save_model(str(folder / MODEL))
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return outcome


def _last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint."""
    complete = [path for path in folder.glob("checkpoint-*") if (path / STATE).is_file()]
    return str(max(complete, key=lambda path: int(path.name.partition("-")[2]))) if complete else None
