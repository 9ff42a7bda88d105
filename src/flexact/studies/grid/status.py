"""The state of every cell of a grid, from its folder alone; and the paragraphs that end every table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flexact.io.markdown_tables import counted, markdown
from flexact.studies.grid.cell_task import epochs_in, is_locked
from flexact.studies.grid.store import Store
from flexact.studies.grid.study import DONE, FAILED, LOCK, GridCell, Row

KINDS = ("done", "running", "failed", "stopped", "missing")


def states(store: Store) -> dict[GridCell, tuple[str, str]]:
    """The state of each cell of the folder's grids, one of `KINDS`, and a detail; a stopped cell can be resumed."""
    protocol, results = store.protocol(), store.results()
    cells = store.asked()
    return {cell: _state(store, cell, protocol.epochs_of(cell.data_name), results.get(cell)) for cell in cells}


def _state(store: Store, cell: GridCell, epochs: int, row: Any) -> tuple[str, str]:
    folder = store.cell_folder(cell)
    done = epochs_in(folder)
    epoch = f"epoch {done} of {epochs}" if epochs else ""
    if is_locked(folder / LOCK):
        return "running", epoch
    if row is not None:
        return row.state, "see below" if row.state == FAILED else store.study.summary(row)
    started = done or (folder / LOCK).exists()
    return ("stopped", epoch) if started else ("missing", "")


def table(store: Store) -> str:
    """What `--status` prints: the grid, the state of each cell, the number of cells per state, and errors."""
    found, results = states(store), store.results()
    rows = [(*map(str, cell.to_dict().values()), *state) for cell, state in found.items()]
    columns = store.study.row._fields
    identity = ["data set" if name == "dataset" else name for name in columns[: columns.index("state")]]
    header = (*identity, "state", "progress")
    counts = Counter(kind for kind, _ in found.values())
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    shown = markdown(header, rows, words=[name for name in header if name != "seed"])
    parts = [_about(store), shown, f"{counted(len(found), 'cell')}: {summary}."]
    parts += failed([results[cell] for cell, (kind, _) in found.items() if kind == FAILED])
    return "\n\n".join([*parts, *several_devices(list(results.values()))])


def _about(store: Store) -> str:
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


def notes(results: Sequence[Row], asked: Sequence[GridCell]) -> list[str]:
    """Paragraphs that end a table: several devices, the cells that failed, and those that have not run yet."""
    ended = {row.cell for row in results}
    missing = [cell for cell in asked if cell not in ended]
    parts = several_devices(results) + failed(results)
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
        "different precisions, so a difference between two methods may come from the devices. Times are compared only "
        "between cells on the same device."
    ]
