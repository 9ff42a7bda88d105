"""One cell: an encoder fine-tuned on a task, with fixed or picked activations, and evaluated on the dev rows."""

from __future__ import annotations

import math
import os
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


@dataclass(frozen=True)
class Outcome:
    """The result of a cell, as in `Result`."""

    metrics: dict[str, float]
    split: str
    loss: float
    epochs: int
    seconds: float
    step_ms: float
    picks: dict[str, str]


def train_cell(
    cell: Cell,
    protocol: Protocol,
    data: TextData,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train a cell.

    stop: called after each step; once it returns True, `Stopped` is raised.
    """
    if device.type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    transformers_package()
    from flexact.integrations.transformers import FlexActCallback
    from flexact.studies.glue.trainer import CellCallback, trainer_for

    data = data.first(protocol.limit)
    train, dev = encoded(data, protocol.folder, protocol.length)
    network = build(protocol.folder, data.task, cell.seed, protocol.from_scratch)
    picks = cell.method in PLACEMENTS
    if picks:
        network = convert(network, PLACEMENTS[cell.method], protocol.config(cell.seed))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CURVE).unlink(missing_ok=True)  # of an earlier attempt
    trainer = trainer_for(network, train, dev, cell, protocol, device, folder)
    callback = FlexActCallback(logit_lr=protocol.logit_lr, log=False)
    if picks:
        callback.wrap(trainer)
    own = CellCallback(network, folder, stop, device)
    trainer.add_callback(own)  # after FlexActCallback, to record the state after its step
    with closing(own):
        trainer.train()
    found = trainer.predict(trainer.eval_dataset)
    curve = own.curve
    loss = curve[-1]["loss"]
    if not math.isfinite(loss) or not all(torch.isfinite(p).all() for p in trainer.model.parameters()):
        raise FlexActError(
            f"the loss of the last epoch is {loss}, or a weight is not finite. Try a smaller --lr, with another --out."
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
        trainer.save_model(str(folder / "model"))
    return outcome
