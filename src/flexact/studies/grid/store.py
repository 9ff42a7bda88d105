"""The grid's folder: config.json, results.csv with one line a finished or failed cell, and a folder for each cell.

Lines are only appended, whole, while the folder's lock is held. Where a cell has several lines (it failed and was tried
again), the last one counts. What a kill left of a line is removed when the folder is opened again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from flexact.errors import FlexActError
from flexact.io import csv_rows
from flexact.io.atomic_files import made_folder, write_whole
from flexact.io.result_folder import CONFIG, RESULTS, TABLE, check_same, enter, read_config, write_config
from flexact.studies.grid.locks import Taken, locked
from flexact.studies.grid.study import Cell, GridStudy

CELLS, LOCK = "cells", "grid.lock"
DONE, FAILED = "done", "failed"
DIGESTS, PLACE = "sha256", "folder"
"""In config.json's "data": the SHA-256 of each data set, and where they lay."""

_REMEDY = "Restore the file, or remove that line: its cell then continues from its last checkpoint."

R = TypeVar("R", bound=Any)


class Store(Generic[R]):
    """One grid's folder."""

    def __init__(self, folder: Path, study: GridStudy) -> None:
        self.folder, self.study = Path(folder), study

    def cell_folder(self, cell: Cell) -> Path:
        return self.folder / CELLS / cell.name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around everything that writes here: a second grid is refused, with the process of the first."""
        if self.folder.exists() and not self.folder.is_dir():
            raise FlexActError(f"{self.folder} is a file; give --out a folder.")
        try:
            with made_folder(self.folder), self._locked():
                yield
        except Taken as taken:
            raise FlexActError(
                f"another grid is writing to {self.folder} ({taken}); wait for it or stop it, or give --out another "
                "folder. To use more devices, give one grid --jobs or --engine ray."
            ) from None
        except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
            raise FlexActError(f"cannot write to {self.folder}: {error.strerror}; give another --out.") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder's lock, whose file is not left in a folder that a refused grid did not get to write to."""
        path = self.folder / LOCK
        new = not path.exists()
        with locked(path):
            try:
                yield
            finally:
                if new and not (self.folder / CONFIG).exists():
                    path.unlink()

    def open(self, config: dict[str, Any], resume: bool, overwrite: bool) -> None:
        """Prepare the folder for a grid of this configuration; call it while the folder is `held`."""
        writes = (RESULTS, CELLS, *self.study.folders)
        before = enter(self.folder, self.study.name, resume=resume, overwrite=overwrite, writes=writes, ignored={LOCK})
        kept = config
        if before is not None:
            self._check_data(_digests(before), _digests(config))
            groups = ("protocol", "data", "versions")
            check_same(self.folder, self._decisive(before), self._decisive(config), groups)
            kept = _joined(before, config)
        if kept != before:
            write_config(self.folder, kept)
        (self.folder / CELLS).mkdir(exist_ok=True)
        self._mend()

    def append(self, row: R) -> None:
        """Add one line, whole or not at all. Only the process that holds the folder calls this."""
        data = csv_rows.line([csv_rows.text(value) for value in row]).encode("utf-8")
        handle = os.open(self.folder / RESULTS, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(handle).st_size
            try:
                if os.write(handle, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)

    def results(self) -> dict[Any, R]:
        """How each cell ended, the last line of each; a line that a kill cut off is left out."""
        path = self.folder / RESULTS
        found: list[R] = csv_rows.read(path, self.study.row, _REMEDY, cut_off=True)
        for number, row in enumerate(found, start=2):
            if row.state not in (DONE, FAILED):
                raise csv_rows.damaged(path, number, f"state is {row.state!r}, not {DONE!r} or {FAILED!r}", _REMEDY)
        return {row.cell: row for row in found}

    def config(self) -> dict[str, Any]:
        """config.json of a grid; an error where the folder has none."""
        found = read_config(self.folder) if self.folder.is_dir() else None
        if found is None or found["study"] != self.study.name:
            raise FlexActError(
                f"{self.folder} holds no grid of `flexact reproduce {self.study.name}`: it has no {CONFIG} of one. "
                "Give its --out: --status, --resume and --retry-failed are for a grid that was begun."
            )
        return found

    def asked(self) -> list[Any]:
        """All cells that the folder's grids were asked for, each once."""
        return self.study.asked(self.config())

    def protocol(self) -> Any:
        """What its cells are trained by."""
        return self.study.protocol.from_dict(self.config().get("protocol", {}))

    def write_table(self, text: str) -> Path:
        """table.md; its path."""
        path = self.folder / TABLE
        write_whole(path, text)
        return path

    def _check_data(self, before: dict[str, str], now: dict[str, str]) -> None:
        """Refuse other data under a name that the grid knows."""
        for name in before.keys() & now.keys():
            if before[name] != now[name]:
                raise FlexActError(
                    f"the grid in {self.folder} was begun with other data of the name {name} (their SHA-256 is "
                    f"{before[name]}, that of these {now[name]}). Give --data the folder it was begun with, --out "
                    "another folder, or --overwrite to start again."
                )

    def _decisive(self, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration without what does not change the results, and without digests and folder of its data."""
        protocol = config.get("protocol")
        fields = protocol if isinstance(protocol, dict) else {}
        kept = {name: value for name, value in fields.items() if name not in self.study.operational}
        data = {name: value for name, value in _data(config).items() if name not in (DIGESTS, PLACE)}
        return config | {"protocol": kept, "data": data}

    def _mend(self) -> None:
        """Cut off what a kill left of a line; write the header where it is missing."""
        path = self.folder / RESULTS
        data = path.read_bytes() if path.is_file() else b""
        if not data.endswith(b"\n") and data:
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
        if b"\n" not in data:
            write_whole(path, csv_rows.line(csv_rows.columns(self.study.row)))


def _joined(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a grid that is gone on with: what is asked for now is added, and data not known before;
    they are where they were found now."""
    grids = list(before.get("grids", []))
    joined = before | {"grids": grids + [grid for grid in now["grids"] if grid not in grids]}
    digests = _digests(now) | _digests(before)
    return joined | {"data": _data(before) | _data(now) | {DIGESTS: digests}} if digests else joined


def place_of_data(config: dict[str, Any]) -> Path | None:
    """Where a grid's data lay when it was begun; None where its config.json does not say."""
    found = _data(config).get(PLACE)
    return Path(found) if isinstance(found, str) else None


def _data(config: dict[str, Any]) -> dict[str, Any]:
    data = config.get("data")
    return data if isinstance(data, dict) else {}


def _digests(config: dict[str, Any]) -> dict[str, str]:
    """Of each data set that was read."""
    found = _data(config).get(DIGESTS)
    return found if isinstance(found, dict) else {}
