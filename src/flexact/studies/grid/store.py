"""The grid's folder: config.json, results.csv with one line a finished or failed cell, and a folder for each cell.

Lines are only ever appended, whole, under a lock; where a cell has several (it failed and was tried again), the last
one counts. What a kill left of a line is cut off when the folder is opened again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from flexact.errors import FlexActError
from flexact.studies.grid.locks import Taken, locked
from flexact.studies.grid.study import Cell, GridStudy, Row
from flexact.studies.provenance import SOURCE
from flexact.studies.store import CONFIG, RESULTS, TABLE, differences, read_config, read_text, text
from flexact.writing import made_folder, write_whole

CELLS, LOCK = "cells", "grid.lock"
DONE, FAILED = "done", "failed"
DIGESTS, PLACE = "sha256", "folder"
"""In config.json's "data": the SHA-256 of each data set, and where they lay."""

R = TypeVar("R", bound=Row)


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
        if resume and overwrite:
            raise FlexActError("--resume goes on with a grid and --overwrite starts it again; give one of the two.")
        before = self._earlier(config, resume, overwrite)
        kept = config if before is None else _joined(before, config)
        if kept != before:
            write_whole(self.folder / CONFIG, json.dumps(kept, indent=2) + "\n")
        (self.folder / CELLS).mkdir(exist_ok=True)
        self._mend()

    def append(self, row: R) -> None:
        """Add one line, whole or not at all."""
        self._append([text(getattr(row, name)) for name in self._columns])

    def results(self) -> dict[Any, R]:
        """How each cell ended, the last line of each; what is wrong in the file is told with its line."""
        path = self.folder / RESULTS
        if not path.is_file():
            return {}
        content = read_text(path)
        rows = list(csv.reader(io.StringIO(content[: content.rfind("\n") + 1])))
        if not rows:
            return {}
        if tuple(rows[0]) != self._columns:
            raise _damaged(path, 1, f"expected the columns {','.join(self._columns)}")
        found: list[R] = [_row(self.study.row, path, number, cells) for number, cells in enumerate(rows[1:], start=2)]
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

    def _earlier(self, config: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any] | None:
        """The configuration of the grid that is here already, checked; None where there is none."""
        try:
            found = read_config(self.folder)
        except FlexActError:
            if not overwrite or not (self.folder / CELLS).is_dir():
                raise
            self._clear()
            return None
        if found is None:
            others = {path.name for path in self.folder.iterdir()} - {LOCK, CONFIG + ".new"}
            if others:
                raise FlexActError(
                    f"{self.folder} is not empty and holds no run of a study ({', '.join(sorted(others)[:3])}); give "
                    "--out another folder."
                )
            return None
        if found["study"] != self.study.name:
            raise FlexActError(
                f"{self.folder} holds a run of the study {found['study']!r}, not of {self.study.name!r}; give --out "
                "another folder."
            )
        if overwrite:
            self._clear()
            return None
        if not resume:
            raise FlexActError(
                f"{self.folder} holds a grid already; go on with it, or add cells to it, with --resume, replace it "
                "with --overwrite, or give --out another folder."
            )
        self._check_data(_digests(found), _digests(config))
        changes = differences(self._decisive(found), self._decisive(config), ("protocol", "data", "versions"))
        if changes:
            raise FlexActError(
                f"the grid in {self.folder} has another configuration ({'; '.join(changes)}); --resume needs the same. "
                "Give --out another folder, or --overwrite to start again."
            )
        return found

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
        """A configuration without what decides nothing about the results, and without digests and place of its data.

        Earlier versions wrote "" for that of a source tree.
        """
        protocol = config.get("protocol")
        fields = protocol if isinstance(protocol, dict) else {}
        kept = {name: value for name, value in fields.items() if name not in self.study.operational}
        data = {name: value for name, value in _data(config).items() if name not in (DIGESTS, PLACE)}
        versions = config.get("versions")
        made = dict(versions) if isinstance(versions, dict) else {}
        if made.get("flexact") == "":
            made["flexact"] = SOURCE
        return config | {"protocol": kept, "data": data, "versions": made}

    @property
    def _columns(self) -> tuple[str, ...]:
        names: tuple[str, ...] = self.study.row._fields
        return names

    def _mend(self) -> None:
        """Cut off what a kill left of a line; write the header where it is missing."""
        path = self.folder / RESULTS
        data = path.read_bytes() if path.is_file() else b""
        if not data.endswith(b"\n") and data:
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
        if b"\n" not in data:
            write_whole(path, _line(self._columns))

    def _append(self, cells: Sequence[str]) -> None:
        data = _line(cells).encode("utf-8")
        handle = os.open(self.folder / RESULTS, os.O_WRONLY | os.O_APPEND)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            before = os.fstat(handle).st_size
            try:
                if os.write(handle, data) < len(data):
                    raise OSError(28, os.strerror(28))
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)

    def _clear(self) -> None:
        """Remove what a grid writes, and nothing else."""
        for name in (RESULTS, TABLE, "report.html", CONFIG):
            (self.folder / name).unlink(missing_ok=True)
        for name in (CELLS, "figures", *self.study.folders):
            shutil.rmtree(self.folder / name, ignore_errors=True)


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
    """Of each data set that was read; grids of before these were kept have none."""
    found = _data(config).get(DIGESTS)
    return found if isinstance(found, dict) else {}


def _line(cells: Sequence[str]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([" ".join(cell.split()) for cell in cells])
    return written.getvalue()


def _row(kind: type[Any], path: Path, number: int, cells: list[str]) -> Any:
    types = get_type_hints(kind)
    if len(cells) != len(types):
        raise _damaged(path, number, f"expected {len(types)} columns, found {len(cells)}")
    values: list[Any] = []
    for (name, type_), cell in zip(types.items(), cells, strict=True):
        try:
            values.append(type_(cell))
        except ValueError:
            raise _damaged(path, number, f"{name} is {cell!r}, not a number") from None
    row = kind(*values)
    if row.state not in (DONE, FAILED):
        raise _damaged(path, number, f"state is {row.state!r}, not {DONE!r} or {FAILED!r}")
    return row


def _damaged(path: Path, number: int, what: str) -> FlexActError:
    return FlexActError(
        f"{path}, line {number}: {what}. The file was edited or damaged. Restore the file, or remove that line: its "
        "cell then goes on from its last checkpoint."
    )
