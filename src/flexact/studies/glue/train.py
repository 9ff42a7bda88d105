"""One cell: an encoder fine-tuned on a task, with fixed or picked activations, and evaluated on the dev rows."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from flexact import convert
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows
from flexact.studies.glue.data import TextData, measured
from flexact.studies.glue.encoder import build, encoded, transformers_package
from flexact.studies.glue.protocol import FIXED, PLACEMENTS, Cell, Protocol, Result
from flexact.studies.grid.cell_task import CURVE
from flexact.studies.grid.study import DONE, picks_column


def train_cell(
    cell: Cell,
    protocol: Protocol,
    data: TextData,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a cell.

    stop: called after each step; once it returns True, `Stopped` is raised.
    """
    if device.type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    transformers_package()
    from flexact.integrations.transformers import FlexActCallback
    from flexact.studies.glue.trainer import CellCallback, trainer_for

    train, dev = encoded(data, protocol.folder, protocol.length)
    activation = cell.method if cell.method in FIXED else None
    network = build(protocol.folder, data.task, cell.seed, protocol.from_scratch, activation)
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
    metrics: dict[str, Any] = measured(data.task, found.predictions, found.label_ids)
    curve[-1]["score"] = statistics.fmean(metrics.values())
    write_rows(folder / CURVE, curve)
    if protocol.keep:
        trainer.save_model(str(folder / "model"))
    return Result(
        **cell.to_dict(),
        state=DONE,
        **metrics,
        split=data.split,
        loss=loss,
        epochs=protocol.epochs_of(cell.task),
        seconds=curve[-1]["seconds"],
        step_ms=statistics.fmean(line["step_ms"] for line in curve),
        picks="" if callback.selection is None else picks_column(callback.selection.leading),
    )
