"""Files written whole or not at all: a reader, or a run that goes on after a kill, never meets half of one."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
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


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file whose columns are the names of the first row; its folder is made where there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())
