"""Typed CSV tables: every row is a NamedTuple whose fields are the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole

Row = TypeVar("Row", bound=Any)

REMEDY = "Restore the file, or run the study again with --overwrite."


def write(
    path: Path, kind: type[Row], rows: Iterable[Row], made: Mapping[str, str] | None = None, digits: int = 9
) -> None:
    """Write a table atomically. Any whitespace inside a text, such as a line break, becomes one space.

    made: further columns with the same value in every row, such as device and date.
    digits: the significant digits of a float; nine represent a float32 exactly.
    """
    constant = made or {}
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*kind._fields, *constant])
    writer.writerows([_cell(value, digits) for value in (*row, *constant.values())] for row in rows)
    write_whole(path, table.getvalue())


def _cell(value: Any, digits: int) -> str:
    """Return a value as a CSV cell; None is empty."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return "" if value is None else " ".join(str(value).split())


def read(path: Path, kind: type[Row], remedy: str = REMEDY, made: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a table. Raise an error that names the line if the file is damaged.

    A missing file has no rows. made: the names of further columns, whose values are ignored.
    """
    if not path.is_file():
        return []
    content = read_text(path, remedy)
    if not content.endswith("\n"):
        raise damaged(path, content.count("\n") + 1, "the line is cut off or missing", remedy)
    reader = csv.reader(io.StringIO(content))
    try:
        lines = list(reader)
    except csv.Error as error:
        raise damaged(path, reader.line_num, f"not valid CSV ({error})", remedy) from None
    expected = (*kind._fields, *made)
    if tuple(lines[0]) != expected:
        raise damaged(path, 1, f"expected the columns {','.join(expected)}", remedy)
    types = get_type_hints(kind)
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if len(cells) != len(expected):
            raise damaged(path, number, f"expected {len(expected)} columns, found {len(cells)}", remedy)
        try:
            values = [_value(name, types[name], cell) for name, cell in zip(types, cells, strict=False)]
        except ValueError as error:
            raise damaged(path, number, str(error), remedy) from None
        rows.append(kind(*values))
    return rows


def read_text(path: Path, remedy: str = REMEDY) -> str:
    """Return the text of a file. Raise an error that names the line if it is not UTF-8."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, data[: error.start].count(b"\n") + 1, "not UTF-8 text", remedy) from None


def damaged(path: Path, number: int, what: str, remedy: str = REMEDY) -> FlexActError:
    """Return the error for a damaged line."""
    return FlexActError(f"{path}, line {number}: {what}. The file was edited or damaged. {remedy}")


def _value(name: str, kind: Any, cell: str) -> Any:
    """Convert a cell to the type of its column; an empty cell is None if the type allows it."""
    choices = get_args(kind)
    if choices and cell == "":
        return None
    one = next((choice for choice in choices if choice is not type(None)), kind)
    try:
        return one(cell)
    except ValueError:
        raise ValueError(f"{name} is {cell!r}, not {'a whole number' if one is int else 'a number'}") from None
