"""Print the table of docs/overhead.md from the CSVs of `benchmarks/cost.py`.

python benchmarks/cost_table.py [results/cost]
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from cost_rows.lines import LINES, Entry, Key, Line, goal

from flexact.io.markdown_tables import markdown

COLUMNS = {"H200": "cuda.csv", "CPU": "cpu.csv"}
_DASH = "–"
Rows = list[dict[str, str]]
Values = Mapping[Key, float]


def table(folder: Path) -> str:
    """Return the table, and a sentence for each device that says how its column was made."""
    files = {device: _read(folder / name) for device, name in COLUMNS.items()}
    columns = [{(row["case"], row["quantity"]): float(row["value"]) for row in rows} for rows in files.values()]
    lines = [[line.title, _goals(line.entries), *(_cell(line, values) for values in columns)] for line in LINES]
    made = [f"{device}: {_made(rows)}." for device, rows in files.items()]
    return "\n".join([markdown(["", "goal", *COLUMNS], lines), "", *made])


def _read(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _goals(entries: Sequence[Entry]) -> str:
    """Return the goals of a line: one if they are equal."""
    found = [_goal(entry.goal) for entry in entries]
    return found[0] if len(set(found)) == 1 else " / ".join(found)


def _goal(maximum: float | Key) -> str:
    if isinstance(maximum, tuple):
        return "≤ plain torch"
    return _DASH if math.isinf(maximum) else f"≤ {maximum:g}"


def _cell(line: Line, values: Values) -> str:
    """Return the values of a line, in bold if they are above their goals."""
    found = [_value(entry.key, line.digits, values) for entry in line.entries]
    return _DASH if set(found) == {_DASH} else " / ".join(found)


def _value(key: Key, digits: int, values: Values) -> str:
    value = values.get(key, math.nan)
    if math.isnan(value):
        return _DASH
    text = f"{round(value, digits) + 0.0:.{digits}f}"  # a sum that cancels is not shown as -0.00
    return f"**{text}**" if value > goal(key, values) else text


def _made(rows: Rows) -> str:
    first, took = rows[0], sum(float(row.get("took_s") or "nan") for row in rows)
    measured = "" if math.isnan(took) else f", measured in {took / 60:.1f} minutes"
    return f"{first['device']}, torch {first['torch']}, commit {first['commit']}, {first['date']}{measured}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/cost"))
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    main()
