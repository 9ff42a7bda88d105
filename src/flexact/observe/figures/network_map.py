"""Pictures of the outcome of a run: a map of the network with its picks, and the margin of each drop."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from flexact.errors import FlexActError
from flexact.observe.figures import drawing
from flexact.observe.figures.colours import GREY, candidate_colours
from flexact.observe.figures.drawing import Picture, style
from flexact.observe.figures.outcomes import by_site, outcomes
from flexact.observe.history import Records
from flexact.observe.selection_rows import Row, alike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 12
"""Maximum number of panels of `margins`."""
_UNDECIDED = "undecided"
"""The name of a site whose row is `undecided`."""
_TILES = 16
"""Sites in a row of the map."""
_PALEST = 0.2
"""Opacity of a site without any confidence."""


@style()
def network(history: Records, stem: str = "history") -> Picture:
    """Draw the final pick of each site in execution order, by stage; the paler a site, the less sure its pick. Sites
    that committed without significant evidence are grey. Each tile shows the number of its block."""
    found = {one.site: one for one in outcomes(history)}
    colours = candidate_colours(by_site(history[-1:])[0]) | {_UNDECIDED: GREY}
    lines = [
        (stage, start, sites[start : start + _TILES])
        for stage, sites in stages(list(found))
        for start in range(0, len(sites), _TILES)
    ]
    figure, (ax,) = drawing.panels(inches=drawing.row_inches(len(lines)))
    for y, (stage, _, sites) in enumerate(lines):
        for x, site in enumerate(sites):
            block, one = re.search(r"\d+", site.removeprefix(stage)), found[site]
            _draw_tile(ax, x, y, block[0] if block else "", colours[_category(one)], _confidence(one))
    drawing.name_rows(ax, ["" if start else stage or "top level" for stage, start, _ in lines])
    ax.set(xlim=(-0.5, _TILES - 0.5), xticks=[])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return Picture(
        f"{stem}-network",
        "Map of the network",
        f"The pick of each site at step {history[-1]['step']}, from the first layer to the last, one line per "
        "stage. The paler a site, the weaker the evidence for its pick; undecided sites are grey.",
        drawing.finished(figure, {name: colours[name] for name in map(_category, found.values())}),
    )


def _draw_tile(ax: Axes, x: int, y: int, block: str, colour: str, confidence: float) -> None:
    from matplotlib.patches import Rectangle

    face = (colour, _PALEST + (1 - _PALEST) * confidence)
    ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=2))
    if block:
        box = {"facecolor": ("white", 0.7), "linewidth": 0, "pad": 1}
        ax.text(x, y, block, ha="center", va="center", fontsize=7, bbox=box)


@style()
def margins(history: Records, stem: str = "history") -> Picture:
    """Draw the margin of each candidate when it was dropped, with its standard error; undecided sites are grey. Sites
    that picked together share a panel."""
    groups = [(name, row) for name, row in alike(outcomes(history)) if row.dropped]
    if not groups:
        raise FlexActError("no candidate has been dropped in this history, so there are no margins to draw.")
    colours = candidate_colours(by_site(history[-1:])[0])
    ranked = sorted(groups, key=lambda group: -math.inf if group[1].lead is None else group[1].lead.z)
    shown = [group for group in groups if group in ranked[:MAX_PANELS]]
    left_out = len(groups) - len(shown)
    most = max(len(row.dropped) for _, row in shown)
    figure, axes = drawing.panels(len(shown), across=3, inches=drawing.row_inches(most))
    for ax, (name, row) in zip(axes, shown, strict=True):
        _draw_margins(ax, name, row, colours)
    return Picture(
        f"{stem}-margins",
        "Margin at each drop",
        "By how much each candidate was behind the leader when it was dropped, with its standard error: a difference "
        "of losses in a trial, of normalised advantages in a blend. Undecided sites are grey."
        + (f" {left_out} panels with the clearest leads are left out." if left_out else ""),
        drawing.finished(figure),
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


def _draw_margins(ax: Axes, title: str, site: Row, colours: Mapping[str, str]) -> None:
    """Draw the panel of a site: one row per candidate, the first that was dropped on top."""
    rows, marks = [], []
    for row, (name, step) in enumerate(site.dropped.items()):
        found = site.evidence.get(name)
        without = " (no evidence)" if found is None else "" if math.isfinite(found.margin) else " (diverged)"
        rows.append(f"{name} at {step}{without}")
        if found is not None and not without:
            marks.append((found.margin, row, found.standard_error, GREY if site.undecided else colours[name]))
    if marks:
        x, y, errors, own = zip(*marks, strict=True)
        ax.errorbar(x, y, xerr=errors, fmt="none", ecolor=own)
        ax.scatter(x, y, color=own)
    drawing.name_rows(ax, rows)
    drawing.rule_rows(ax, len(rows))
    undecided = " (undecided)" if site.pick and site.undecided else ""
    ax.set(title=f"{title}: {site.pick or _UNDECIDED}{undecided}", xlabel="margin")


def _category(one: Row) -> str:
    """Return what the colour of a site stands for: its pick, or `_UNDECIDED`."""
    return one.pick if one.pick and not one.undecided else _UNDECIDED


def _confidence(one: Row) -> float:
    """Return a number from 0 to 1. After the commitment, it is the confidence level at which the deciding margin
    excludes 0 (0.95 for z = 1.96), or 0 without evidence. Before it, and for sites that pick per channel, it is the
    margin between the probabilities."""
    if one.deciding is not None:
        return math.erf(max(0.0, one.deciding.z) / math.sqrt(2))
    return 0.0 if one.committed and one.dropped else max(0.0, one.margin)  # the margin is NaN if the run diverged
