"""Files written whole or not at all: a reader, or a run that goes on after a kill, never meets half of one."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under another name (its own and ".new"), and then rename it."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)  # what a kill left, or a link that somebody put there
    try:
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """A folder, made with its parents where there is none. After an error, those that were made and are empty go."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # of the first that is not empty
            for one in new:
                one.rmdir()
        raise


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file whose columns are the names of the first row; its folder is made where there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())
