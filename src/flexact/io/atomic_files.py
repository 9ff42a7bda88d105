"""Atomic file writes: after a crash, a reader or a resumed run finds the old file or the new one, never half a file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: write and fsync `<name>.new`, then rename it."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # left by a crash, or a symbolic link that someone planted
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Create a folder and its parents if they are missing. On an error, remove the created folders that are empty."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # raised by the first folder that is not empty
            for path in created:
                path.rmdir()
        raise


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file atomically, with the keys of the first row as columns. Create its folder if it is missing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())
