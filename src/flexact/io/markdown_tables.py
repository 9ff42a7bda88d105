"""Tables in Markdown, and numbers with their nouns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

PAPERS_ROW = "- paper's"
"""The first cell of a row with the paper's numbers."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> str:
    """Return a table whose columns are aligned in plain text too: the first to the left, the others to the right.

    words: the headings of further columns that are aligned to the left.

    >>> print(markdown(("a", "b"), [("x", "1.5"), ("yy", "2")]))
    | a  |   b |
    | -- | --: |
    | x  | 1.5 |
    | yy |   2 |
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(2, *(len(line[i]) for line in lines)) for i in range(len(header))]
    sides = ["<" if i == 0 or name in words else ">" for i, name in enumerate(header)]
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for width, side in zip(widths, sides, strict=True)]
    aligned = [
        [f"{cell:{side}{width}}" for cell, width, side in zip(line, widths, sides, strict=True)]
        for line in (lines[0], rule, *lines[1:])
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in aligned)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if needed.

    >>> counted(1, "cell"), counted(2, "cell")
    ('1 cell', '2 cells')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
