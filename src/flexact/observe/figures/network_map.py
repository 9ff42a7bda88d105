"""Pictures of the outcome of a run: a map of the network with its picks, and the margin of each drop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flexact.io.markdown_tables import counted
from flexact.observe.figures.description import (
    Bars,
    Grid,
    Panel,
    candidate_colours,
    without_shared_end,
    without_shared_start,
)
from flexact.observe.figures.outcomes import by_site, channels_note, outcomes
from flexact.observe.figures.picture import Picture
from flexact.observe.history import Records
from flexact.observe.selection_rows import Row

MAX_PANELS = 24
"""Maximum number of panels of `margins`."""
GREY = "#8c959f"
_UNDECIDED = "undecided"
"""The name of a site whose row is `undecided`."""
_TILES = 16
"""Sites in a row of the map."""
_LETTERS = 8
"""Letters of a name that fit into a tile."""
_PALEST = 0.2
"""Opacity of a site without any confidence."""


def network(history: Records, stem: str = "history") -> Picture:
    """Draw the final pick of each site in execution order, by stage; the paler a site, the less sure its pick. Sites
    that committed without significant evidence are grey."""
    colours = candidate_colours(by_site(history[-1:])[0]) | {_UNDECIDED: GREY}
    found = {one.site: one for one in outcomes(history)}
    rows: list[str] = []
    tiles: list[list[Row]] = []
    labels: list[list[str]] = []
    for stage, sites in stages(list(found)):
        for start in range(0, len(sites), _TILES):
            rows.append("" if start else stage or (sites[0] if len(sites) == 1 else "top level"))
            tiles.append([found[site] for site in sites[start : start + _TILES]])
            labels.append(tile_names(sites)[start : start + _TILES])
    used = list(dict.fromkeys(map(_category, found.values())))
    grid = Grid(
        range(_TILES),
        _filled([[float(used.index(_category(one))) for one in row] for row in tiles], math.nan),
        [(name, colours[name]) for name in used],
        _filled([[_note(one) for one in row] for row in tiles], ""),
        _filled([[_PALEST + (1 - _PALEST) * _confidence(one) for one in row] for row in tiles], 1.0),
        _filled(labels, ""),
    )
    return Picture(
        f"{stem}-network",
        "Map of the network",
        f"The pick of each site at step {history[-1]['step']}, from the first layer to the last, one line per "
        "stage. The paler a site, the weaker the evidence for its pick; undecided sites are grey"
        + channels_note(history),
        [Panel(rows=rows, grid=grid)],
        across=1,
    )


def margins(history: Records, stem: str = "history") -> Picture:
    """Draw the margin of each candidate when it was dropped, with its standard error; undecided sites are grey. Sites
    that picked together share a panel."""
    found = outcomes(history)
    colours = candidate_colours(by_site(history[-1:])[0])
    groups: dict[str, list[Row]] = {}
    for one in found:
        if one.dropped:
            groups.setdefault(repr((one.dropped, one.evidence)), []).append(one)
    ranked = sorted(groups.values(), key=lambda group: -math.inf if group[0].lead is None else group[0].lead.z)
    shown = [group for group in groups.values() if group in ranked[:MAX_PANELS]]
    left_out = len(groups) - len(shown)
    return Picture(
        f"{stem}-margins",
        "Margin at each drop",
        "By how much each candidate was behind the leader when it was dropped, with its standard error: a difference "
        "of losses in a trial, of normalised advantages in a blend. Undecided sites are grey."
        + (f" {left_out} panels with the clearest leads are left out." if left_out else ""),
        [_margins_panel(group, colours, len(found)) for group in shown],
        across=min(3, len(shown)),
    )


def stages(sites: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return consecutive sites in groups, by the shortest prefix of their names that gives groups of two or more sites
    on average. Without one, all sites are one group.

    >>> stages(["layer1.0.relu", "layer1.1.relu", "layer2.0.relu", "layer2.1.relu"])
    [('layer1', ['layer1.0.relu', 'layer1.1.relu']), ('layer2', ['layer2.0.relu', 'layer2.1.relu'])]
    >>> stages(["blocks.0.mlp.act", "blocks.1.mlp.act"])
    [('blocks', ['blocks.0.mlp.act', 'blocks.1.mlp.act'])]
    """
    parents = {site: site.split(".")[:-1] for site in sites}
    shared = ""
    for depth in range(1, max(map(len, parents.values()), default=0) + 1):
        start = {site: ".".join(parent[:depth]) for site, parent in parents.items()}
        groups = [(stage, list(members)) for stage, members in groupby(sites, key=start.__getitem__)]
        if len(groups) == 1:
            shared = groups[0][0]
        elif 2 * len(groups) <= len(sites):
            return groups
    return [(shared, list(sites))]


def tile_names(sites: Sequence[str]) -> list[str]:
    """Return the names of a stage's sites without what all of them share; empty where a name does not fit a tile.

    >>> tile_names(["layer1.0.relu", "layer1.1.relu"])
    ['0', '1']
    """
    names = without_shared_end(without_shared_start(sites))
    return [name if len(name) <= _LETTERS else "" for name in names]


def _margins_panel(group: Sequence[Row], colours: Mapping[str, str], count: int) -> Panel:
    """Return the panel of sites with the same drops: one row per candidate, the first that was dropped on top.

    count: the number of all sites.
    """
    first = group[0]
    rows, bars = [], []
    for row, (name, step) in enumerate(first.dropped.items()):
        found = first.evidence.get(name)
        without = " (no evidence)" if found is None else "" if math.isfinite(found.margin) else " (diverged)"
        rows.append(f"{name} at {step}{without}")
        if found is not None and not without:
            values, errors = [math.nan] * len(first.dropped), [0.0] * len(first.dropped)
            values[row], errors[row] = found.margin, found.standard_error
            shown = (_UNDECIDED, GREY) if first.undecided else (name, colours[name])
            bars.append(Bars(shown[0], values, shown[1], errors))
    all_or_some = f"all {count} sites" if len(group) == count else counted(len(group), "site")
    title = first.site if len(group) == 1 else all_or_some
    undecided = " (undecided)" if first.pick and first.undecided else ""
    return Panel(f"{title}: {first.pick or _UNDECIDED}{undecided}", "margin", rows=rows, bars=bars, marks=True)


def _category(one: Row) -> str:
    """Return what a site's colour says: its pick, unless it is undecided."""
    return one.pick if one.pick and not one.undecided else _UNDECIDED


def _confidence(one: Row) -> float:
    """Return a number from 0 to 1. Once committed: the confidence level at which the deciding margin excludes 0 (0.95
    for z = 1.96), and 0 without evidence. Before that, and for sites that pick per channel: the margin between the
    probabilities."""
    if one.deciding is not None:
        return math.erf(max(0.0, one.deciding.z) / math.sqrt(2))
    return 0.0 if one.committed and one.dropped else max(0.0, one.margin)  # the margin is NaN if the run diverged


def _note(one: Row) -> str:
    """Return what the page shows of a site on hover."""
    lead = f", lead {one.lead}" if one.lead is not None else f", probability {one.probability:.3f}"
    decision = "decided" if one.decided else "undecided" if one.committed else "not committed"
    return f"{one.site}\n{one.pick or _UNDECIDED}{lead}\n{decision}, confidence {_confidence(one):.2f}"


def _filled(rows: Sequence[list[Any]], value: Any) -> list[list[Any]]:
    return [row + [value] * (_TILES - len(row)) for row in rows]
