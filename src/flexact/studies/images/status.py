"""Where a grid stands: one line a cell, at any time, from the folder alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexact.studies.images.curves import read_curve
from flexact.studies.images.grid import asked
from flexact.studies.images.locks import is_locked
from flexact.studies.images.protocol import Cell, Protocol
from flexact.studies.images.running import LOCK
from flexact.studies.images.store import FAILED, Store
from flexact.studies.tables import markdown


@dataclass(frozen=True)
class State:
    """Where a cell stands. kind: done, running, failed, stopped (it can go on) or missing."""

    cell: Cell
    kind: str
    told: str


def states(store: Store) -> list[State]:
    """Every cell that the folder's grids were asked for."""
    config = store.config()
    epochs = Protocol.from_dict(config["protocol"]).epochs
    results = store.results()
    found = []
    for cell in asked(config):
        folder = store.cell_folder(cell)
        curve = read_curve(folder)
        at = f"epoch {curve.epochs[-1] if curve.epochs else 0} of {epochs}"
        if is_locked(folder / LOCK):
            left = curve.left(epochs)
            found.append(State(cell, "running", at + ("" if math.isnan(left) else f", {duration(left)} left")))
        elif cell in results and results[cell].state == FAILED:
            found.append(State(cell, FAILED, results[cell].error))
        elif cell in results:
            found.append(State(cell, "done", f"{results[cell].accuracy:.2f} %"))
        elif curve.epochs:
            found.append(State(cell, "stopped", at))
        else:
            found.append(State(cell, "missing", ""))
    return found


def table(found: Sequence[State]) -> str:
    """The states as a table, and how many there are of each."""
    rows = [(s.cell.dataset, s.cell.model, s.cell.method, str(s.cell.seed), s.kind, _short(s.told)) for s in found]
    kinds = ("done", "running", "failed", "stopped", "missing")
    counts = {kind: sum(state.kind == kind for state in found) for kind in kinds}
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return f"{markdown(('data set', 'model', 'method', 'seed', 'state', ''), rows)}\n\n{len(found)} cells: {summary}."


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


def _short(words: str, most: int = 90) -> str:
    words = words.replace("|", "/")
    return words if len(words) <= most else words[: most - 1] + "…"
