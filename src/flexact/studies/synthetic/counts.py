"""What the rows of a synthetic study say together: right picks, and how often each candidate was picked."""

from __future__ import annotations

from flexact.io.markdown_tables import counted
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.store import Result


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
