"""A selection as a table of text, at most 120 characters wide unless the names of the sites are too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexact.candidates import known_names
from flexact.io.markdown_tables import counted
from flexact.io.text_tables import GAP, WIDTH, aligned, cut, printable, width
from flexact.observe.selection_row import Row
from flexact.policy.evidence import SIGNIFICANT

_DROPPED, _DROPPED_IN_TEXT = "dropped at", "dropped (at step)"
_LEAST = 24
"""Minimum width, in characters, of the names of sites and of the list of drops."""


def columns_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The cells by title, without the names of the sites. The columns are those that the phase of the run calls for:
    probabilities while candidates are in the contest, the evidence for the pick after the commitment."""
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
    columns[_DROPPED] = [", ".join(drops_by_step(row.dropped)) or "-" for row in rows]
    return columns


def table(rows: Sequence[Row]) -> str:
    """One line per row, and a legend."""
    columns = columns_of(rows)
    del columns[_DROPPED]  # cut below to what there is room for
    names = [printable(row.key) for row in rows]
    dropped = [drops_by_step(row.dropped) for row in rows]
    room = WIDTH - sum(width(title, cells) + len(GAP) for title, cells in columns.items()) - len(GAP)
    for_dropped = min(_LEAST, max(len(_DROPPED_IN_TEXT), *map(_length, dropped), 0))
    names = cut(names, max(_LEAST, room - for_dropped))
    columns = {"site": names, **columns}
    room -= width("site", names)
    columns[_DROPPED_IN_TEXT] = [_latest(groups, max(_LEAST, room)) for groups in dropped]
    return "\n".join([*aligned(columns), *legend(rows)])


def _pick(row: Row) -> str:
    if row.trying is not None:
        return f"trying {row.trying}"
    if row.pick is None:
        return "undecided"
    return row.pick + (" ?" if not row.committed else "" if row.decided else " (undecided)")


def drops_by_step(dropped: Mapping[str, int]) -> list[str]:
    """What was dropped, by step.

    >>> drops_by_step({"sine": 500, "elu": 350, "tanh": 350})
    ['elu tanh (350)', 'sine (500)']
    """
    by_step: dict[int, list[str]] = {}
    for name, step in sorted(dropped.items(), key=lambda item: item[1]):
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


def legend(rows: Sequence[Row]) -> list[str]:
    """The explanations that these rows call for."""
    contested, committed = [row for row in rows if not row.committed], [row for row in rows if row.committed]
    compared = [row for row in contested if row.trying is None]
    told = {
        "? not committed yet": any(row.pick is not None for row in compared),
        "undecided: no candidate leads yet": any(row.pick is None for row in compared),
        "trying: the candidate that the trial trains now": any(row.trying is not None for row in contested),
        "lead: the pick's advantage over the runner-up when the runner-up was dropped, ± standard error; z: their "
        "ratio": any(row.lead is not None for row in committed),
        "z (original): the lead over the original activation, in standard errors": any(
            row.over_original is not None for row in committed
        ),
        f"(undecided): no significant lead (z >= {SIGNIFICANT:g}) over the original, or over the runner-up if the "
        "original was kept": any(not row.decided for row in committed),
        "A negative lead means that the runner-up had the better evidence: the original stayed because that lead was "
        "not significant, or the mixing weights and the evidence disagree.": any(
            row.lead is not None and row.lead.margin < 0 for row in committed
        ),
    }
    return [line for line, applies in told.items() if applies] + _misleading_names(rows)


def _misleading_names(rows: Sequence[Row]) -> list[str]:
    """A note on sites whose attribute is named after another function than their pick; `extract` keeps such names."""
    functions = {name.replace("_", "") for name in known_names()}
    found: dict[str, str] = {}
    for row in rows:
        attribute = row.site.rpartition(".")[2]
        name = attribute.lower().replace("_", "").rstrip("0123456789")
        if name in functions and row.pick is not None and name != row.pick.replace("_", ""):
            found.setdefault(row.site, row.pick)
    if not found:
        return []
    site, pick = next(iter(found.items()))
    more = f", and {counted(len(found) - 1, 'other')} likewise" if len(found) > 1 else ""
    return [f"extract keeps module names: the module named {printable(site)} is now a {pick}{more}"]
