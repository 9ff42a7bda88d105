"""Tables as text with aligned columns, in which long names are cut to fit."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 120
"""Maximum width of a table in characters, unless the names in it are too long."""
GAP = "  "


def cut(names: Sequence[str], room: int) -> list[str]:
    """Return names of at most `room` letters. Long ones are cut at the start, or at the end if some would become equal;
    if they would in both cases, all names stay whole.

    >>> cut(["encoder.layer.0.intermediate.act", "encoder.layer.1.intermediate.act", "pool"], room=18)
    ['encoder.layer.0.i…', 'encoder.layer.1.i…', 'pool']
    """
    ends = [name if len(name) <= room else "…" + name[1 - room :] for name in names]
    starts = [name if len(name) <= room else name[: room - 1] + "…" for name in names]
    return next((short for short in (ends, starts) if len(set(short)) == len(set(names))), list(names))


def printable(name: str) -> str:
    """Return a name as one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def width(title: str, cells: Sequence[str]) -> int:
    return max(len(cell) for cell in [title, *cells])


def aligned(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table. columns: the cells of each column by its title."""
    widths = [width(title, cells) for title, cells in columns.items()]
    lines = [
        GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [tuple(columns), *zip(*columns.values(), strict=True)]
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
