"""The engines of a comparison: those of every grid, and this process itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from flexact.errors import FlexActError
from flexact.io.value_checks import check_known
from flexact.studies.compare.functions import Functions
from flexact.studies.compare.protocol import ALONE
from flexact.studies.grid.cell_task import Engine, Task
from flexact.studies.grid.engines import devices, streams_engine
from flexact.studies.grid.engines import engine as grid_engine
from flexact.studies.workers import Answer

ENGINES = ("local", "inline", "ray")


def engine_for(functions: Functions, name: str, device: str | None, jobs: int | None, address: str | None) -> Engine:
    """An engine by its name. Functions that cannot be sent to another process run in this one, with a warning."""
    check_known("engine", name, ENGINES)
    if name != "inline":
        try:
            functions.packed()
        except FlexActError as error:
            if name == "ray" or (jobs or 1) > 1:
                raise
            warnings.warn(f"the runs are trained in this process, one at a time: {error}", stacklevel=4)
        else:
            own = grid_engine(name, device, jobs, address)
            one_at_a_time = name == "local" and (jobs or len(devices(device))) == 1
            return own if one_at_a_time else _picks_first(own)
    if (jobs or 1) > 1:
        raise FlexActError(f"engine='inline' trains one run at a time; got jobs={jobs}. Use engine='local'.")
    return streams_engine(devices(device)[0], 1)


def _picks_first(engine: Engine) -> Engine:
    """The engine for parallel runs: runs that need the picks of other runs start after all others have ended.
    If one runs at a time, the order of the cells is enough."""

    def run(tasks: Sequence[Task], ended: Callable[[Task, Answer], None], beat: Callable[[], bool]) -> None:
        for alone in (False, True):
            part = [task for task in tasks if (task.cell.method == ALONE) is alone]
            if part and not beat():
                engine(part, ended, beat)

    return run
