"""A selection as a table of text, 120 columns wide at most where the names of the sites allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexact.evidence import SIGNIFICANT

if TYPE_CHECKING:
    from flexact.selection import Row

WIDTH = 120
_DROPPED = "dropped (at step)"
_GAP = "  "
_LEAST = 24
"""Columns that the names of sites, and what was dropped, can have at least."""
_TIE = 1e-6
"""Probabilities that differ by no more are alike."""


def table(rows: Sequence[Row]) -> str:
    """One line a row, and a legend. The columns are those that the phase of the run calls for: probabilities while
    candidates are in the contest, the evidence for the pick after the commitment."""
    contested, committed = [row for row in rows if not row.committed], [row for row in rows if row.committed]
    columns = {"pick": [_pick(row) for row in rows]}
    if contested or not rows:
        columns["probability"] = ["-" if row.committed else f"{row.probability:.3f}" for row in rows]
        columns["margin"] = ["-" if row.committed else f"{row.margin:.3f}" for row in rows]
    if committed:
        leads = [row.lead for row in rows]
        columns["lead"] = ["-" if lead is None else str(lead) for lead in leads]
        columns["z"] = ["-" if lead is None else f"{lead.z:.1f}" for lead in leads]
        columns["steps"] = ["-" if lead is None else str(lead.steps) for lead in leads]
    columns["runner-up"] = ["-" if row.runner_up is None or is_open(row) else row.runner_up for row in rows]
    names = [_printable(row.site) + ("" if row.channel is None else f":{row.channel}") for row in rows]
    dropped = [_dropped(row) for row in rows]
    room = WIDTH - sum(_width(title, cells) + len(_GAP) for title, cells in columns.items()) - len(_GAP)
    for_dropped = min(_LEAST, max(len(_DROPPED), *map(_length, dropped), 0))
    names = _cut(names, max(_LEAST, room - for_dropped))
    columns = {"site": names, **columns}
    room -= _width("site", names)
    columns[_DROPPED] = [_latest(groups, max(_LEAST, room)) for groups in dropped]
    return "\n".join([*_aligned(columns), *_legend(contested, committed)])


def is_open(row: Row) -> bool:
    """Whether the candidates of a row that are still in are alike, as all are before training."""
    left = [p for name, p in row.probabilities.items() if name not in row.dropped]
    return not row.committed and max(left) - min(left) <= _TIE


def _pick(row: Row) -> str:
    if is_open(row):
        return "undecided"
    return row.pick + (" ?" if not row.committed else "" if row.decided else " (undecided)")


def _dropped(row: Row) -> list[str]:
    """What was dropped, by step: "elu tanh (350)"."""
    by_step: dict[int, list[str]] = {}
    for name, step in sorted(row.dropped.items(), key=lambda item: item[1]):
        by_step.setdefault(step, []).append(name)
    return [f"{' '.join(names)} ({step})" for step, names in by_step.items()]


def _length(groups: Sequence[str]) -> int:
    return len(", ".join(groups))


def _latest(groups: Sequence[str], room: int) -> str:
    """As many of the last drops as there is room for."""
    if not groups:
        return "-"
    first = 0
    while first < len(groups) - 1 and _length(groups[first:]) + (2 if first else 0) > room:
        first += 1
    return ("… " if first else "") + ", ".join(groups[first:])


def _cut(names: Sequence[str], room: int) -> list[str]:
    """Names without their middle where they are longer than this; whole where they could not be told apart."""
    head = (room - 1) // 2
    short = [name if len(name) <= room else f"{name[:head]}…{name[head + 1 - room :]}" for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def _printable(name: str) -> str:
    """A name as one line that leaves the terminal alone."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _width(title: str, cells: Sequence[str]) -> int:
    return max(len(cell) for cell in [title, *cells])


def _aligned(columns: dict[str, list[str]]) -> list[str]:
    widths = [_width(title, cells) for title, cells in columns.items()]
    lines = [
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [tuple(columns), *zip(*columns.values(), strict=True)]
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _legend(contested: Sequence[Row], committed: Sequence[Row]) -> list[str]:
    told = {
        "? not committed yet": any(not is_open(row) for row in contested),
        "undecided: no candidate leads yet": any(is_open(row) for row in contested),
        "lead: of the pick over the runner-up when that was dropped ± standard error; z: in standard errors": any(
            row.lead is not None for row in committed
        ),
        f"(undecided): no significant lead (z of {SIGNIFICANT:g} or more) over the runner-up or over what was there "
        "before": any(not row.decided for row in committed),
    }
    return [line for line, applies in told.items() if applies]
