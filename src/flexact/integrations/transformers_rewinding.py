"""Rewinding in `transformers.Trainer`: the learning-rate schedule after it, and the initial state in checkpoints."""

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
"""File with the initial state of the run, in every checkpoint before the rewind."""


def stateful_parts(trainer: Any) -> list[Any]:
    """Return the parts of a Trainer that a rewind resets with the weights: LR scheduler and gradient scaler."""
    parts = (trainer.lr_scheduler, getattr(trainer.accelerator, "scaler", None))
    return [part for part in parts if part is not None]


def unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside accelerate's wrapper."""
    while not type(optimizer).__module__.startswith("torch.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def restart_learning_rate(trainer: Any, optimizer: Optimizer, schedule: Schedule) -> None:
    """Let the Trainer create a new learning-rate schedule, with warm-up, for the steps that remain after a rewind.

    Does nothing before a rewind, or if the user passed an LR scheduler, which the rewind itself has reset. If the run
    was resumed after its rewind, the new scheduler resumes from the saved state.
    """
    if schedule.rewound_at is None or not getattr(trainer, "_created_lr_scheduler", False):
        return
    saved = trainer.lr_scheduler
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        _set_rate(group, float(group.get("initial_lr", group["lr"])))
    trainer.lr_scheduler = None
    trainer.create_scheduler(schedule.total_steps - schedule.rewound_at, optimizer)
    trainer.callback_handler.lr_scheduler = trainer.lr_scheduler
    if schedule.steps_done > schedule.rewound_at:
        trainer.lr_scheduler.load_state_dict(saved.state_dict())
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            _set_rate(group, rate)


def write_start(folder: Path, start: Any) -> str | None:
    """Write the initial state of a run and return the file name, or delete the file and return None if `start` is."""
    if start is None:
        (folder / START).unlink(missing_ok=True)  # from an earlier save into this folder
        return None
    content = io.BytesIO()
    torch.save(start, content)
    write_whole(folder / START, content.getvalue())
    return START


def read_start(folder: Path) -> Any:
    """Return the initial state that `write_start` wrote."""
    path = folder / START
    if not path.is_file():
        raise FlexActError(f"{path} does not exist, but this run needs it to rewind. Resume from another checkpoint.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types
        raise FlexActError(
            f"{path} is truncated or corrupt ({type(error).__name__}). Resume from another checkpoint."
        ) from None


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
