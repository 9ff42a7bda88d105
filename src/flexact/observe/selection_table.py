"""A selection as a table of text, 120 columns wide at most where the names of the sites allow it."""

from __future__ import annotations

from collections.abc import Sequence

from flexact.observe.selection_row import Row
from flexact.policy.evidence import SIGNIFICANT

WIDTH = 120
_DROPPED = "dropped (at step)"
_GAP = "  "
_LEAST = 24
"""Columns that the names of sites, and what was dropped, can have at least."""


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
    columns["runner-up"] = [row.runner_up or "-" for row in rows]
    if any(row.over_original is not None for row in committed):
        against = [row.over_original for row in rows]
        columns["z (original)"] = ["-" if found is None else f"{found.z:.1f}" for found in against]
    names = [_printable(row.site) + ("" if row.channel is None else f":{row.channel}") for row in rows]
    dropped = [_dropped(row) for row in rows]
    room = WIDTH - sum(_width(title, cells) + len(_GAP) for title, cells in columns.items()) - len(_GAP)
    for_dropped = min(_LEAST, max(len(_DROPPED), *map(_length, dropped), 0))
    names = _cut(names, max(_LEAST, room - for_dropped))
    columns = {"site": names, **columns}
    room -= _width("site", names)
    columns[_DROPPED] = [_latest(groups, max(_LEAST, room)) for groups in dropped]
    return "\n".join([*_aligned(columns), *_legend(contested, committed)])


def _pick(row: Row) -> str:
    if row.pick is None:
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
        "? not committed yet": any(row.pick is not None for row in contested),
        "undecided: no candidate leads yet": any(row.pick is None for row in contested),
        "lead: of the pick over the runner-up when that was dropped ± standard error; z: in standard errors": any(
            row.lead is not None for row in committed
        ),
        "z (original): the lead over what was there before": any(row.over_original is not None for row in committed),
        f"(undecided): no significant lead (z of {SIGNIFICANT:g} or more) over what was there before, or, where that "
        "stays, over the runner-up": any(not row.decided for row in committed),
    }
    return [line for line, applies in told.items() if applies]
