"""What all cells of a benchmark share: their length, and Flex-Act's policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from flexact.config import FlexConfig
from flexact.studies.grid.protocol import GridProtocol
from flexact.studies.picks.task import Task


@dataclass(frozen=True)
class Protocol(GridProtocol):
    """The settings of all cells.

    >>> Protocol.from_dict(Protocol(steps=40).to_dict()) == Protocol(steps=40)
    True
    """

    steps: int | None = None
    """Steps of a plain run; None for each task's own number."""

    WHOLE: ClassVar[tuple[str, ...]] = ("steps",)

    def about(self) -> list[str]:
        return [] if self.steps is None else [f"{self.steps} steps per plain run"]

    def shortened(self, task: Task) -> Task:
        """Return the task with the protocol's number of steps."""
        return task if self.steps is None else dataclasses.replace(task, steps=self.steps)


def policy(task: Task, seed: int, **changes: Any) -> FlexConfig:
    """Return the default policy with the task's candidates. changes: overrides of an ablation."""
    return FlexConfig(candidates=task.candidates, seed=seed, **changes)
