"""The rows of a selection: the pick of a site and its evidence, in plain JSON types and as a table of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flexact.candidates.registry import known_names
from flexact.io.markdown_tables import counted
from flexact.io.text_tables import GAP, WIDTH, aligned, cut, printable, width
from flexact.policy.evidence import SIGNIFICANT, Contest

TIE = 1e-6
"""Probabilities that differ by at most this are equal."""
_MIN_WIDTH = 24
"""Minimum width of the names of sites, in characters."""


@dataclass(frozen=True)
class Row:
    """One site, or one of its channels: the pick, and by how much it leads."""

    site: str
    channel: int | None
    original: str | None
    """The original activation, if it is a candidate; otherwise None."""
    pick: str | None
    """The candidate that leads now. None while those left are equally likely, as before training and in a trial."""
    probability: float
    runner_up: str | None
    """Before the commitment: the second likeliest candidate. After it: the candidate that was dropped last; if several
    were, the one with the smallest margin in standard errors."""
    margin: float
    """The probability of the pick minus that of the next remaining candidate."""
    committed: bool
    decided: bool
    """Whether the row is committed on significant evidence: that its pick is better than the original or, if that was
    kept or is unknown, than the runner-up."""
    probabilities: dict[str, float]
    dropped: dict[str, int]
    """The step at which each dropped candidate was dropped."""
    evidence: dict[str, Contest]
    """The margin of each dropped candidate when it was dropped; candidates dropped without evidence are left out. In a
    blend, the evidence against the original is that of the first round in which it was significantly behind."""
    trying: str | None = None
    """The candidate that is being trained, in a trial; otherwise None."""

    @property
    def key(self) -> str:
        """The site, or `site:channel` for a channel."""
        return self.site if self.channel is None else f"{self.site}:{self.channel}"

    @property
    def lead(self) -> Contest | None:
        """The evidence against the runner-up; None before the commitment, and where there is none."""
        return self.evidence.get(self.runner_up) if self.committed and self.runner_up is not None else None

    @property
    def over_original(self) -> Contest | None:
        """The evidence against the original, if the pick is another candidate; None if there is none."""
        return None if self.original in (None, self.pick) else self.deciding

    @property
    def deciding(self) -> Contest | None:
        """The evidence on which `decided` rests; None before the commitment, and where there is none."""
        rival = self.runner_up if self.original in (None, self.pick) else self.original
        return self.evidence.get(rival) if self.committed and rival is not None else None

    @property
    def undecided(self) -> bool:
        """Whether nothing favours one candidate: before the commitment all are equally likely, and after it there is no
        significant evidence for the pick."""
        return (self.committed and not self.decided) or (self.pick is None and self.trying is None)


def alike(rows: Iterable[Row]) -> list[tuple[str, Row]]:
    """One row per group of sites that picked together, with its name: that of the only site, or the number of sites."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(replace(row, site="", channel=None)), []).append(row)
    return [(one[0].key if len(one) == 1 else counted(len(one), "site"), one[0]) for one in groups.values()]


def plain(value: Any) -> Any:
    """The value with None in place of every non-finite number, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def columns_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The cells of each column by its title, without the names of the sites. Before the commitment the columns show
    probabilities, after it the evidence for the pick. Most columns are left out if they are empty."""
    leads = [row.lead for row in rows]
    against = [row.over_original for row in rows]
    columns = {
        "pick": [_pick(row) for row in rows],
        "probability": ["-" if row.committed else f"{row.probability:.3f}" for row in rows],
        "margin": ["-" if row.committed else f"{row.margin:.3f}" for row in rows],
        "lead": ["-" if lead is None else str(lead) for lead in leads],
        "z": ["-" if lead is None else f"{lead.z:.1f}" for lead in leads],
        "steps": ["-" if lead is None else str(lead.steps) for lead in leads],
        "runner-up": [row.runner_up or "-" for row in rows],
        "z (original)": ["-" if found is None else f"{found.z:.1f}" for found in against],
        "dropped (at step)": [", ".join(drops_by_step(row.dropped)) or "-" for row in rows],
    }
    always = ("pick", "runner-up", "dropped (at step)")
    return {title: cells for title, cells in columns.items() if title in always or set(cells) != {"-"}}


def table(rows: Sequence[Row], names: Sequence[str] | None = None) -> str:
    """Return one line per row and a legend. Names of sites are cut if the lines are longer than 120 characters.

    names: the names of the rows; by default those of their sites.
    """
    columns = columns_of(rows)
    room = WIDTH - sum(width(title, cells) + len(GAP) for title, cells in columns.items())
    names = cut([printable(name) for name in names or [row.key for row in rows]], max(_MIN_WIDTH, room))
    return "\n".join([*aligned({"site": names, **columns}), *legend(rows, columns)])


def _pick(row: Row) -> str:
    if row.trying is not None:
        return f"trying {row.trying}"
    if row.pick is None:
        return "undecided"
    return row.pick + (" ?" if not row.committed else "" if row.decided else " (undecided)")


def drops_by_step(dropped: Mapping[str, int]) -> list[str]:
    """Return the dropped candidates by step.

    >>> drops_by_step({"sine": 500, "elu": 350, "tanh": 350})
    ['elu tanh (350)', 'sine (500)']
    """
    ordered = sorted(dropped, key=dropped.__getitem__)
    return [f"{' '.join(names)} ({step})" for step, names in groupby(ordered, key=dropped.__getitem__)]


def legend(rows: Sequence[Row], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines that explain what the columns of these rows contain."""
    picks = columns["pick"]
    applies = {
        "? not committed yet": any(pick.endswith("?") for pick in picks),
        "undecided: no candidate leads yet": "undecided" in picks,
        "trying: the candidate that the trial trains now": any(row.trying is not None for row in rows),
        "lead: the pick's advantage over the runner-up when the runner-up was dropped, ± standard error; z: their "
        "ratio": "lead" in columns,
        "z (original): the lead over the original activation, in standard errors": "z (original)" in columns,
        f"(undecided): no significant lead (z >= {SIGNIFICANT:g}) over the original, or over the runner-up if the "
        "original was kept": any(row.committed and not row.decided for row in rows),
        "A negative lead means that the runner-up had the better evidence: the original was kept because that evidence "
        "was not significant, or the mixing weights and the evidence disagree.": any(
            row.lead is not None and row.lead.margin < 0 for row in rows
        ),
    }
    return [line for line, has_a_case in applies.items() if has_a_case] + _misleading_names(rows)


def _misleading_names(rows: Sequence[Row]) -> list[str]:
    """A note on sites whose attribute is named after another function than their pick; `extract` keeps such names."""
    found: dict[str, str] = {}
    for row in rows:
        name = row.site.rpartition(".")[2].rstrip("_0123456789")
        if name in known_names() and row.pick not in (None, name):
            found[row.site] = str(row.pick)
    if not found:
        return []
    site, pick = next(iter(found.items()))
    more = f", and {counted(len(found) - 1, 'other')} likewise" if len(found) > 1 else ""
    return [f"extract keeps module names: the module named {printable(site)} is now a {pick}{more}"]
