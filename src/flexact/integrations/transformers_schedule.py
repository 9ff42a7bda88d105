"""The Schedule of a `transformers.Trainer`: its state in checkpoints, and the learning rate after its rewind."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.policy.schedule import Schedule

SCHEDULE = "flexact_schedule.pt"
"""File with the state of the schedule, in every checkpoint. Before the rewind it contains the initial weights."""


def save_schedule(folder: Path, schedule: Schedule) -> None:
    """Write the state of a schedule into a checkpoint."""
    content = io.BytesIO()
    torch.save(schedule.state_dict(), content)
    write_whole(folder / SCHEDULE, content.getvalue())


def load_schedule(folder: Path, schedule: Schedule) -> None:
    """Load the state that `save_schedule` wrote into a schedule."""
    path = folder / SCHEDULE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types
        raise FlexActError(
            f"cannot read {path} ({type(error).__name__}). Resume from a whole checkpoint of a Trainer with a "
            "FlexActCallback."
        ) from None
    try:
        schedule.load_state_dict(state)
    except FlexActError as error:
        raise FlexActError(
            f"{path}: {error} Resume with the epochs or max_steps, batch size and gradient accumulation of the run "
            "that wrote it, or from another checkpoint."
        ) from None


def restart_learning_rate(trainer: Any, optimizer: Optimizer, schedule: Schedule) -> None:
    """Make the Trainer create a new learning-rate schedule, with warm-up, for the steps that remain after a rewind.

    Does nothing before a rewind, or if the user passed an LR scheduler, which the rewind itself has reset. If the run
    was resumed after its rewind, the new scheduler resumes from the saved state.
    """
    if schedule.rewound_at is None or not getattr(trainer, "_created_lr_scheduler", False):
        return
    saved = trainer.lr_scheduler
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = float(group.get("initial_lr", group["lr"]))
    trainer.lr_scheduler = None
    trainer.create_scheduler(schedule.total_steps - schedule.rewound_at, optimizer)
    trainer.callback_handler.lr_scheduler = trainer.lr_scheduler
    if schedule.steps_done > schedule.rewound_at:
        trainer.lr_scheduler.load_state_dict(saved.state_dict())
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
