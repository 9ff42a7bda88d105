"""Checks of a Schedule's arguments: its number of steps, the loss of a step, and a saved state."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flexact.errors import FlexActError
from flexact.io import value_checks


def checked_steps(total_steps: Any, network_steps: Any) -> int:
    """Return whichever of the two is given. Raise unless exactly one is."""
    if (total_steps is None) == (network_steps is None):
        raise FlexActError(
            f"a Schedule needs either total_steps or network_steps; got {total_steps!r:.80} and {network_steps!r:.80}. "
            "Give total_steps, the optimizer steps of the whole run."
        )
    name, given = ("total_steps", total_steps) if network_steps is None else ("network_steps", network_steps)
    return value_checks.steps(name, given)


def check_loss(loss: Any) -> None:
    """Raise if a loss is not a single number."""
    is_number = isinstance(loss, float | int) or (isinstance(loss, Tensor) and loss.numel() == 1)
    if loss is not None and not is_number:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise FlexActError(f"schedule.step takes the loss of the step, one number; got {got}. Give its mean.")


def is_known_nonfinite(loss: Tensor | float | None) -> bool:
    """Return whether a loss in host memory is NaN or infinite; False for a loss on a device, to avoid a sync."""
    on_device = isinstance(loss, Tensor) and loss.device.type != "cpu"
    return loss is not None and not on_device and not math.isfinite(float(loss))


def check_run(state: Any, version: int, total_steps: int) -> None:
    """Raise if a state has another version, or is from a run with another number of steps."""
    if not isinstance(state, dict):
        raise FlexActError(f"a Schedule's state is a dictionary; got {type(state).__name__}.")
    integers = ("version", "step", "total_steps", "steps_lost")
    missing = [key for key in integers if not isinstance(state.get(key), int)]
    if missing:
        raise FlexActError(f"not a Schedule's state: {', '.join(missing)} missing or not an integer in {state!r:.200}.")
    if state["version"] != version:
        raise FlexActError(
            f"the saved run has version {state['version']}, but this flexact only reads version {version}. Resume it "
            "with the flexact that wrote it."
        )
    if state["total_steps"] != total_steps:
        raise FlexActError(
            f"the saved run has {state['total_steps']} steps, but this one {total_steps}; create the Schedule with "
            f"total_steps={state['total_steps']} to resume it."
        )
    if not 0 <= state["step"] <= total_steps:
        raise FlexActError(f"step {state['step']} is outside a run of {total_steps} steps.")


def check_drops(saved: Any, drops: list[int]) -> None:
    """Raise if the saved run drops its candidates at other steps."""
    if saved != drops:
        raise FlexActError(
            f"the saved run drops candidates at the steps {saved!r:.80}, but this one drops them at {drops}. Resume it "
            "with the FlexConfig and the number of steps that it was started with."
        )
