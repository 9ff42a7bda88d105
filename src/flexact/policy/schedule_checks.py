"""Checks of what a Schedule is given: its number of steps, the loss of a step, and a saved state."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flexact.errors import FlexActError
from flexact.io import value_checks


def checked_steps(total_steps: Any, network_steps: Any) -> int:
    """The one of the two that is given."""
    if (total_steps is None) == (network_steps is None):
        raise FlexActError(
            f"a Schedule needs either total_steps or network_steps; got total_steps={total_steps!r:.80} and "
            f"network_steps={network_steps!r:.80}. Give total_steps, the optimizer steps of the whole run."
        )
    if network_steps is None:
        return value_checks.steps("total_steps", total_steps)
    return value_checks.steps("network_steps", network_steps)


def check_loss(loss: Any) -> None:
    """Refuse a loss that is not one number."""
    is_number = isinstance(loss, float | int) or (isinstance(loss, Tensor) and loss.numel() == 1)
    if loss is not None and not is_number:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise FlexActError(f"schedule.step takes the loss of the step, one number; got {got}. Give its mean.")


def is_lost(loss: Tensor | float | None) -> bool:
    """Whether a loss is known not to be finite, without waiting for a device."""
    on_host = loss is not None and not (isinstance(loss, Tensor) and loss.device.type != "cpu")
    return on_host and not math.isfinite(float(loss))  # type: ignore[arg-type]


def check_run(state: Any, version: int, total_steps: int) -> None:
    """Refuse a state of another version, or of a run with another number of steps."""
    if not isinstance(state, dict):
        raise FlexActError(f"a Schedule's state is a dictionary; got {type(state).__name__}.")
    integers = ("version", "step", "total_steps", "steps_lost")
    missing = [key for key in integers if not isinstance(state.get(key), int)]
    if missing:
        raise FlexActError(f"not a Schedule's state: {', '.join(missing)} missing or no integer in {state!r:.200}.")
    if state["version"] != version:
        raise FlexActError(
            f"this schedule's state has version {state['version']}, and this flexact reads version {version} only. "
            "Resume the run with the flexact that wrote it."
        )
    if state["total_steps"] != total_steps:
        raise FlexActError(
            f"the saved run has {state['total_steps']} steps and this one {total_steps}; make the Schedule with "
            f"total_steps={state['total_steps']} to resume it."
        )
    if not 0 <= state["step"] <= total_steps:
        raise FlexActError(f"step {state['step']} is outside of a run of {total_steps} steps.")


def check_drops(saved: Any, drops: list[int]) -> None:
    """Refuse the state of a run that drops its candidates at other steps."""
    if saved != drops:
        raise FlexActError(
            f"the saved run drops candidates at the steps {saved!r:.80}, and this one at {drops}. Resume it with the "
            "FlexConfig and the steps that it was started with."
        )
