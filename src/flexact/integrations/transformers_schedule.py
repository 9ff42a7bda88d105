"""The Schedule of a `transformers.Trainer`: its state in checkpoints, and the learning rate after its rewind."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.json_input import parsed_json
from flexact.policy.schedule import Schedule

SCHEDULE = "flexact_schedule.json"
"""File with the state of the schedule, in every checkpoint."""
START = "flexact_start.pt"
"""File with the initial state of the run, in every checkpoint before the rewind."""


def save_schedule(folder: Path, schedule: Schedule) -> None:
    """Write the state of a schedule into a checkpoint."""
    state = schedule.state_dict()
    if state.get("start") is None:
        (folder / START).unlink(missing_ok=True)  # from an earlier save into this folder
    else:
        content = io.BytesIO()
        torch.save(state["start"], content)
        write_whole(folder / START, content.getvalue())
        state["start"] = START
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    write_whole(folder / SCHEDULE, json.dumps(plain) + "\n")


def load_schedule(folder: Path, schedule: Schedule) -> None:
    """Load the state that `save_schedule` wrote into a schedule."""
    path = folder / SCHEDULE
    try:
        saved = parsed_json(path.read_bytes())
    except FileNotFoundError:
        raise FlexActError(
            f"{path} does not exist. Resume from a checkpoint that was written by a Trainer with a FlexActCallback."
        ) from None
    except ValueError as error:
        raise FlexActError(f"{path} is not valid JSON ({error}). Resume from another checkpoint.") from None
    state: dict[str, Any] = dict(saved) if isinstance(saved, dict) else {}
    try:
        if state.get("start") == START:
            state["start"] = _start(folder / START)
        for name, value in schedule.state_dict().items():
            if isinstance(value, torch.Tensor) and isinstance(state.get(name), list | int | float):
                state[name] = torch.tensor(state[name], dtype=value.dtype, device=value.device)
        schedule.load_state_dict(state)
    except (FlexActError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FlexActError(
            f"{path}: {error} Resume with the epochs or max_steps, batch size and gradient accumulation of the run "
            "that wrote it, or from another checkpoint."
        ) from None


def _start(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types
        raise FlexActError(f"{path}, which the rewind needs, is missing or corrupt ({type(error).__name__}).") from None


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


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
