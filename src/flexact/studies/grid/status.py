"""Where a grid stands: one line a cell, at any time, from the folder alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexact.io.markdown_tables import counted, markdown
from flexact.studies.grid.curves import read_curve
from flexact.studies.grid.locks import is_locked
from flexact.studies.grid.running import LOCK
from flexact.studies.grid.store import DONE, FAILED, Store
from flexact.studies.grid.study import Cell, Row


@dataclass(frozen=True)
class State:
    """Where a cell stands. kind: done, running, failed, stopped (it can go on) or missing."""

    cell: Cell
    kind: str
    told: str


def states(store: Store[Any]) -> list[State]:
    """Every cell that the folder's grids were asked for."""
    cells, protocol, results = store.asked(), store.protocol(), store.results()
    found = []
    for cell in cells:
        epochs = protocol.epochs_of(cell.dataset)
        folder = store.cell_folder(cell)
        curve = read_curve(folder)
        at = f"epoch {curve.epochs[-1] if curve.epochs else 0} of {epochs}" if epochs else ""
        if is_locked(folder / LOCK):
            left = curve.left(epochs)
            found.append(State(cell, "running", at + ("" if math.isnan(left) else f", {duration(left)} left")))
        elif cell in results and results[cell].state == FAILED:
            found.append(State(cell, FAILED, results[cell].error))
        elif cell in results:
            found.append(State(cell, "done", store.study.told(results[cell])))
        elif curve.epochs or any(folder.glob(store.study.checkpoint)):
            found.append(State(cell, "stopped", at))
        else:
            found.append(State(cell, "missing", ""))
    return found


def table(store: Store[Any]) -> str:
    """What the grid is, the states as a table, how many there are of each, and why cells failed."""
    found, headings, results = states(store), store.study.headings, store.results()
    rows = [
        (
            *(str(state.cell.to_dict()[name]) for name in headings),
            state.kind,
            "see below" if state.kind == FAILED else state.told,
        )
        for state in found
    ]
    header = (*headings.values(), "state", "where it stands")
    kinds = ("done", "running", "failed", "stopped", "missing")
    counts = {kind: sum(state.kind == kind for state in found) for kind in kinds}
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    shown = markdown(header, rows, words=[name for name in header if name != headings["seed"]])
    parts = [_about(store), shown, f"{counted(len(found), 'cell')}: {summary}."]
    parts += failed([results[state.cell] for state in found if state.kind == FAILED])
    return "\n\n".join([*parts, *several_devices(list(results.values()))])


def _about(store: Store[Any]) -> str:
    """What the grid is, in a line."""
    config, protocol = store.config(), store.protocol()
    epochs = sorted({protocol.epochs_of(cell.dataset) for cell in store.asked()})
    told = " or ".join(map(str, epochs)) + (" epoch" if epochs == [1] else " epochs")
    parts = [
        str(config.get("title", store.study.title)),
        *([told] if any(epochs) else []),
        *protocol.about(),
        *(f"{name} {config[name]}" for name in ("commit", "date") if config.get(name)),
    ]
    return "; ".join(parts) + "."


def not_done(results: Sequence[Row], asked: Sequence[Cell]) -> list[str]:
    """Paragraphs for a table: the cells that failed, and those that are still to come."""
    ended = {row.cell for row in results}
    missing = [cell for cell in asked if cell not in ended]
    parts = failed(results)
    if missing:
        parts.append(f"Not done yet, {len(missing)} of {len(asked)}: {', '.join(cell.name for cell in missing)}.")
    return parts


def failed(results: Sequence[Row]) -> list[str]:
    """A paragraph with the error of each cell that failed, where any did."""
    lines = [f"- {row.cell.name}: {row.error}" for row in results if row.state == FAILED]
    return ["Failed (try again with --retry-failed):\n\n" + "\n".join(lines)] if lines else []


def several_devices(results: Sequence[Row]) -> list[str]:
    """A paragraph that names the devices the finished cells were trained on, where they are not one."""
    cells = Counter(row.device for row in results if row.state == DONE)
    if len(cells) < 2:
        return []
    told = ", ".join(f"{device} ({counted(count, 'cell')})" for device, count in cells.items())
    return [
        f"Trained on several devices: {told}; results.csv says which cell on which. A GPU and a CPU compute in other "
        "precisions, so a difference between two methods may be one between devices. Times are compared on one device."
    ]


def duration(seconds: float) -> str:
    """A time in the two units that matter.

    >>> duration(42), duration(75), duration(7300)
    ('42 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
