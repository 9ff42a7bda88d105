"""Tables of text: aligned columns, names cut to fit."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 120
"""Maximum width of a table in characters, unless the names in it are too long."""
GAP = "  "


def cut(names: Sequence[str], room: int) -> list[str]:
    """Cut the middle out of names longer than `room`; return all names whole if two of them would become equal."""
    head = (room - 1) // 2
    short = [name if len(name) <= room else f"{name[:head]}…{name[head + 1 - room :]}" for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def printable(name: str) -> str:
    """A name as one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def width(title: str, cells: Sequence[str]) -> int:
    return max(len(cell) for cell in [title, *cells])


def aligned(columns: dict[str, list[str]]) -> list[str]:
    """The lines of a table, from the cells of each column by its title."""
    widths = [width(title, cells) for title, cells in columns.items()]
    lines = [
        GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [tuple(columns), *zip(*columns.values(), strict=True)]
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
