"""What all cells of a benchmark share: their length, and the policy that picks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from flexact.config import FlexConfig
from flexact.studies.grid.protocol import GridProtocol
from flexact.studies.picks.task import Task


@dataclass(frozen=True)
class Protocol(GridProtocol):
    """How every cell is trained.

    >>> Protocol.from_dict(Protocol(steps=40).to_dict()) == Protocol(steps=40)
    True
    """

    steps: int | None = None
    """Of a plain run; None for each task's own number."""

    WHOLE: ClassVar[tuple[str, ...]] = ("steps",)

    def about(self) -> list[str]:
        return [] if self.steps is None else [f"{self.steps} steps a plain run"]

    def shortened(self, task: Task) -> Task:
        """The task with as many steps as the protocol says."""
        return task if self.steps is None else dataclasses.replace(task, steps=self.steps)


def policy(task: Task, seed: int, **changes: Any) -> FlexConfig:
    """Flex-Act as it comes: the task's candidates, and nothing else changed but what an ablation changes."""
    return FlexConfig(candidates=task.candidates, seed=seed, **changes)
