"""A grid's folder: config.json, results.csv with one line per finished or failed cell, and a folder for each cell.

Only the process that holds the folder's lock writes. Every write is atomic, so a kill leaves a complete file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError
from flexact.io import csv_rows
from flexact.io.atomic_files import made_folder
from flexact.io.result_folder import CONFIG, RESULTS, check_same, enter, read_config, write_config
from flexact.studies.grid.cell_task import locked
from flexact.studies.grid.study import DONE, FAILED, GridCell, GridStudy, Row

CELLS, LOCK = "cells", "grid.lock"
DIGESTS, PLACE = "sha256", "folder"
"""The keys of config.json's "data": the SHA-256 of each data set that the grid has read, and the folder of all."""

_REMEDY = "Restore the file, or remove that line: its cell then resumes from its last checkpoint."


class Store:
    """The folder of one grid."""

    def __init__(self, folder: Path, study: GridStudy) -> None:
        self.folder, self.study = Path(folder), study

    def cell_folder(self, cell: GridCell) -> Path:
        return self.folder / CELLS / cell.name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder. Raises if another grid holds it."""
        lock = self.folder / LOCK
        busy = (
            f"another grid is writing to {self.folder} (HOLDER); wait for it or stop it, or give --out another folder. "
            "To use more devices, give one grid --jobs or --engine ray."
        )
        try:
            with made_folder(self.folder), locked(lock, busy):
                try:
                    yield
                finally:
                    if not (self.folder / CONFIG).exists():
                        lock.unlink()  # the grid did not start, and leaves nothing in the folder
        except (PermissionError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise FlexActError(f"cannot write to {self.folder}: {error.strerror}; give another --out.") from None

    def open(self, config: dict[str, Any], resume: bool, overwrite: bool) -> None:
        """Prepare the folder for a grid with this configuration. Call it while the folder is `held`."""
        writes = (RESULTS, CELLS, *self.study.folders)
        before = enter(self.folder, self.study.name, resume=resume, overwrite=overwrite, writes=writes, ignored={LOCK})
        if before is not None:
            shared = data_of(before)[DIGESTS].keys() & data_of(config)[DIGESTS].keys()
            old, new = (self._comparable(one, shared) for one in (before, config))
            check_same(self.folder, old, new, ("protocol", "data", "versions"))
            config = _joined(before, config)
        if config != before:
            write_config(self.folder, config)
        (self.folder / CELLS).mkdir(exist_ok=True)
        if not (self.folder / RESULTS).exists():
            csv_rows.write(self.folder / RESULTS, self.study.row, [])

    def add(self, row: Row) -> None:
        """Write the result of a cell, in place of an earlier one. Lines are in the order of the cells."""
        rows = self.results() | {row.cell: row}
        places = {cell: place for place, cell in enumerate(self.asked())}
        ordered = sorted(rows.values(), key=lambda row: places.get(row.cell, len(places)))
        csv_rows.write(self.folder / RESULTS, self.study.row, ordered)

    def results(self) -> dict[Any, Row]:
        """The result of each cell that is done or has failed; if a cell has several lines, the last one."""
        path = self.folder / RESULTS
        found: list[Row] = csv_rows.read(path, self.study.row, _REMEDY)
        for number, row in enumerate(found, start=2):
            if row.state not in (DONE, FAILED):
                raise csv_rows.damaged(path, number, f"state is {row.state!r}, not {DONE!r} or {FAILED!r}", _REMEDY)
        return {row.cell: row for row in found}

    def config(self) -> dict[str, Any]:
        """config.json of the grid; raises if the folder has none."""
        found = read_config(self.folder) if self.folder.is_dir() else None
        if found is None or found["study"] != self.study.name:
            command = self.study.command or f"flexact reproduce {self.study.name}"
            raise FlexActError(
                f"{self.folder} holds no grid of `{command}`, or its {CONFIG} is missing. "
                "Give --out the folder of an existing grid."
            )
        return found

    def asked(self) -> list[Any]:
        """All cells of the folder's grids, each once."""
        return self.study.asked(self.config())

    def protocol(self) -> Any:
        """The protocol of the folder's cells."""
        return self.study.protocol.from_dict(self.config().get("protocol", {}))

    def table(self) -> str:
        """table.md of the folder in its present state."""
        return self.study.table(list(self.results().values()), self.protocol(), self.asked())

    def _comparable(self, config: dict[str, Any], datasets: set[str]) -> dict[str, Any]:
        """The parts of a configuration that must not change on resuming, with the digests of these data sets."""
        settings = self.study.protocol.from_dict(config["protocol"]).to_dict()  # adds fields that are newer
        protocol = {name: one for name, one in settings.items() if name not in self.study.operational}
        digests = {name: data_of(config)[DIGESTS][name] for name in sorted(datasets)}
        return config | {"protocol": protocol, "data": {DIGESTS: digests}}


def data_of(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says about the data; a file of an earlier version may lack the digests."""
    return {DIGESTS: {}, **(config.get("data") or {})}


def _joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a resumed grid: the earlier one, with new grids and newly read data sets added."""
    joined = before | {"grids": [*before["grids"], *(grid for grid in now["grids"] if grid not in before["grids"])]}
    digests = data_of(now)[DIGESTS] | data_of(before)[DIGESTS]
    return joined | {"data": data_of(now) | data_of(before) | {DIGESTS: digests}} if digests else joined
