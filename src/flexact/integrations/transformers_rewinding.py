"""Rewinding inside `transformers.Trainer`: its learning-rate schedule, and the starting point in its checkpoints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.policy.schedule import Schedule

START = "flexact_start.pt"
"""In a checkpoint's folder, until the rewind: what the run began with."""


def begins_again(trainer: Any) -> list[Any]:
    """What a Trainer has that begins again with the weights."""
    found = [trainer.lr_scheduler, getattr(trainer.accelerator, "scaler", None)]
    return [one for one in found if one is not None]


def inner(optimizer: Any) -> Any:
    """The optimizer that accelerate's wrapper steps."""
    while not type(optimizer).__module__.startswith("torch.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def restart_learning_rate(trainer: Any, optimizer: Optimizer, schedule: Schedule) -> None:
    """After a rewind: let the Trainer make its learning-rate schedule, with its warm-up, for the steps that are left.

    A schedule that the user made has its own length and is only restarted, which the rewind has done already. In a run
    that is resumed after its rewind, the new one goes on where the saved one stood.
    """
    if schedule.rewound_at is None or not getattr(trainer, "_created_lr_scheduler", False):
        return
    before = trainer.lr_scheduler
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        _set_rate(group, float(group.get("initial_lr", group["lr"])))
    trainer.lr_scheduler = None
    trainer.create_scheduler(schedule.total_steps - schedule.rewound_at, optimizer)
    trainer.callback_handler.lr_scheduler = trainer.lr_scheduler
    if schedule.steps_done > schedule.rewound_at:
        trainer.lr_scheduler.load_state_dict(before.state_dict())
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)


def write_start(folder: Path, start: Any) -> str | None:
    """Write what a run began with into a file of its own, and return its name; None where it is not needed any more."""
    if start is None:
        (folder / START).unlink(missing_ok=True)  # of an earlier save into this folder
        return None
    content = io.BytesIO()
    torch.save(start, content)
    write_whole(folder / START, content.getvalue())
    return START


def read_start(folder: Path) -> Any:
    """What `write_start` wrote."""
    path = folder / START
    if not path.is_file():
        raise FlexActError(f"{path} is not there: a run that rewinds needs it. Resume from another checkpoint.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its many readers raise
        raise FlexActError(
            f"{path} is cut off or damaged ({type(error).__name__}). Resume from another checkpoint."
        ) from None


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
