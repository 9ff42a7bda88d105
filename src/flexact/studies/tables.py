"""The studies' tables in Markdown: ours, and the paper's under it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from flexact.studies.names import counted
from flexact.studies.options import Options
from flexact.studies.store import Result

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


def of(results: list[Result], model: str, truth: str | None = None) -> list[Result]:
    """A model's rows, for one truth or for all."""
    return [row for row in results if row.model == model and truth in (None, row.truth)]


def right(rows: list[Result]) -> str:
    """How many picks are the truth, as "20/20"."""
    return f"{sum(row.pick == row.truth for row in rows)}/{len(rows)}"


def picks(rows: list[Result]) -> str:
    """What was picked, the most frequent first, as "relu 3, leaky_relu 2"."""
    counts = {pick: sum(row.pick == pick for row in rows) for pick in dict.fromkeys(row.pick for row in rows)}
    return ", ".join(f"{pick} {count}" for pick, count in sorted(counts.items(), key=lambda item: -item[1]))


def seeds(options: Options) -> str:
    """How many, in words."""
    return counted(options.seeds, "seed")
