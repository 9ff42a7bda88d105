"""The methods of the benchmark, which choose the activations of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexact.studies.grid.fixed_methods import FIXED, fixed
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS

ABLATED: dict[str, dict[str, Any]] = {
    "flexact-sites": {"share": "site"},
    "flexact-blend": {"pick_by": "blend"},
    "flexact-trial": {"pick_by": "trial"},
    "flexact-unrewound": {"rewind": False},
}
"""Flex-Act with one part of its policy changed."""
CHOOSING: tuple[str, ...] = ("flexact", "flexact-alone", "flexact-one", *ABLATED, "random", "race")
"""The methods that choose among a task's candidates."""
REUSING: tuple[str, ...] = ("flexact-alone", "flexact-one", "race")
"""Methods that usually reuse a plain run, or the picks, of another method."""
EVERY_FIXED: tuple[str, ...] = tuple(
    dict.fromkeys(fixed(candidate) for task in TASKS.values() for candidate in task.candidates)
)
KNOWN: tuple[str, ...] = (FIXED, *CHOOSING, *EVERY_FIXED)
USUAL: tuple[str, ...] = (FIXED, "flexact", "flexact-alone", "flexact-one", "random", "race")


def methods_of(task: Task, asked: Sequence[str] = KNOWN) -> list[str]:
    """Return the requested methods that a task has; "fixed" stands for all its fixed methods.

    >>> methods_of(TASKS["resnet-rectifiers"], ("race", "fixed", "fixed-tanh"))
    ['fixed-relu', 'fixed-leaky_relu', 'fixed-gelu', 'fixed-silu', 'race']
    """
    own = [fixed(candidate) for candidate in task.candidates]
    chosen = [method for method in own if FIXED in asked or method in asked]
    return chosen + [method for method in CHOOSING if method in asked]
