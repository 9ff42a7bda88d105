"""Rewinding in `transformers.Trainer`: what is reset together with the weights, and the learning-rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from flexact.policy.schedule import Schedule


def stateful_parts(trainer: Any) -> list[Any]:
    """Return the parts of a Trainer that a rewind resets with the weights: LR scheduler and gradient scaler."""
    parts = (trainer.lr_scheduler, getattr(trainer.accelerator, "scaler", None))
    return [part for part in parts if part is not None]


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
