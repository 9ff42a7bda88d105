"""The state of every cell of a grid, from its folder alone; and the paragraphs that end every table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexact.io.markdown_tables import counted, markdown
from flexact.studies.grid.cell_task import epochs_in, is_locked
from flexact.studies.grid.store import DONE, FAILED, Store
from flexact.studies.grid.study import LOCK, GridCell, Row

KINDS = ("done", "running", "failed", "stopped", "missing")


@dataclass(frozen=True)
class State:
    """The state of a cell. kind: one of `KINDS`; a stopped cell can be resumed."""

    cell: GridCell
    kind: str
    detail: str


def states(store: Store[Any]) -> list[State]:
    """The states of all cells of the folder's grids."""
    protocol, results = store.protocol(), store.results()
    return [_state(store, cell, protocol.epochs_of(cell.data_name), results.get(cell)) for cell in store.asked()]


def _state(store: Store[Any], cell: GridCell, epochs: int, row: Any) -> State:
    folder = store.cell_folder(cell)
    done = epochs_in(folder)
    epoch = f"epoch {done} of {epochs}" if epochs else ""
    if is_locked(folder / LOCK):
        return State(cell, "running", epoch)
    if row is not None:
        return State(cell, row.state, "see below" if row.state == FAILED else store.study.told(row))
    started = done or any(folder.glob(store.study.checkpoint))
    return State(cell, "stopped", epoch) if started else State(cell, "missing", "")


def table(store: Store[Any]) -> str:
    """What `--status` prints: the grid, the state of each cell, the number of cells per state, and errors."""
    found, results = states(store), store.results()
    rows = [(*map(str, state.cell.to_dict().values()), state.kind, state.detail) for state in found]
    columns = store.study.row._fields
    identity = ["data set" if name == "dataset" else name for name in columns[: columns.index("state")]]
    header = (*identity, "state", "progress")
    counts = Counter(state.kind for state in found)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    shown = markdown(header, rows, words=[name for name in header if name != "seed"])
    parts = [_about(store), shown, f"{counted(len(found), 'cell')}: {summary}."]
    parts += failed([results[state.cell] for state in found if state.kind == FAILED])
    return "\n\n".join([*parts, *several_devices(list(results.values()))])


def _about(store: Store[Any]) -> str:
    """One line about the grid."""
    config, protocol = store.config(), store.protocol()
    epochs = sorted({protocol.epochs_of(cell.data_name) for cell in store.asked()})
    length = " or ".join(map(str, epochs)) + (" epoch" if epochs == [1] else " epochs")
    parts = [
        str(config.get("title", store.study.title)),
        *([length] if any(epochs) else []),
        *protocol.about(),
        *(f"{name} {config[name]}" for name in ("commit", "date") if config.get(name)),
    ]
    return "; ".join(parts) + "."


def not_done(results: Sequence[Row], asked: Sequence[GridCell]) -> list[str]:
    """Paragraphs for a table: the cells that failed, and those that have not run yet."""
    ended = {row.cell for row in results}
    missing = [cell for cell in asked if cell not in ended]
    parts = failed(results)
    if missing:
        parts.append(f"Not done yet, {len(missing)} of {len(asked)}: {', '.join(cell.name for cell in missing)}.")
    return parts


def failed(results: Sequence[Row]) -> list[str]:
    """A paragraph with the error of each cell that failed, if any did; cells with the same error share a line."""
    alike: dict[str, list[Row]] = {}
    for row in results:
        if row.state == FAILED:  # an error may name the folder of its cell
            alike.setdefault(row.error.replace(row.cell.name, ""), []).append(row)
    lines = [f"- {', '.join(row.cell.name for row in rows)}: {rows[0].error}" for rows in alike.values()]
    return ["Failed (try again with --retry-failed):\n\n" + "\n".join(lines)] if lines else []


def several_devices(results: Sequence[Row]) -> list[str]:
    """A paragraph that names the devices on which the cells were trained, if there are several."""
    cells = Counter(row.device for row in results if row.state == DONE)
    if len(cells) < 2:
        return []
    devices = ", ".join(f"{device} ({counted(count, 'cell')})" for device, count in cells.items())
    return [
        f"Trained on several devices: {devices}; results.csv names the device of each cell. GPUs and CPUs compute in "
        "different precisions, so a difference between two methods may come from the devices. Times are compared on "
        "one device."
    ]
