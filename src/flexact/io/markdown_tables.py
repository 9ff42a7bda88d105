"""Tables in Markdown, and counts in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

PAPERS_ROW = "- paper's"
"""The first cell of a row with the paper's numbers."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> str:
    """A table whose columns line up in plain text too; the first is to the left, the others to the right.

    words: the headings of further columns that are to the left.

    >>> print(markdown(("a", "b"), [("x", "1.5"), ("yy", "2")]))
    | a  |   b |
    | -- | --: |
    | x  | 1.5 |
    | yy |   2 |
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(2, *(len(line[i]) for line in lines)) for i in range(len(header))]
    left = [i == 0 or name in words for i, name in enumerate(header)]
    rule = ["-" * width if to_left else "-" * (width - 1) + ":" for width, to_left in zip(widths, left, strict=True)]
    aligned = [
        [
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ]
        for line in (lines[0], rule, *lines[1:])
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in aligned)


def counted(number: int, noun: str) -> str:
    """How many there are of something.

    >>> counted(1, "cell"), counted(2, "cell")
    ('1 cell', '2 cells')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
