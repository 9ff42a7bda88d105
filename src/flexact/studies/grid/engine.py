"""What an engine is: it runs the cells of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexact.studies.grid.running import Task
from flexact.studies.workers import Answer

Ended = Callable[[Task, Answer], None]
Beat = Callable[[], bool]
"""Called about once a second; True: stop what is running, with a checkpoint, and begin nothing."""
Engine = Callable[[Sequence[Task], Ended, Beat], None]
"""Runs tasks: calls `ended` once for each one that it began, in any order."""
