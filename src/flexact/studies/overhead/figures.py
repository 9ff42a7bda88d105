"""The study's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flexact.picture import INK, Bars, Line, Panel, Picture
from flexact.studies.overhead import rows as files
from flexact.studies.overhead.networks import BASELINE, WAYS
from flexact.studies.overhead.options import MODES
from flexact.studies.overhead.rows import LaunchRow, OperationRow, OverheadRow, ProfileRow, SweepRow
from flexact.studies.overhead.table import MODE_TITLES, Results
from flexact.studies.paper_tables import OVERHEAD

_COLOURS = {
    "plain": "#999999",
    "closed_form": "#e69f00",
    "compiled_form": "#cc79a7",
    "fused": "#56b4e9",
    "fused_bn": "#0072b2",
}
_PAPERS = "#222222"
_DASHES = {"eager": "dash", "graph": "solid"}


def read_results(folder: Path) -> Results:
    """What a folder's CSV files hold."""
    return Results(
        overhead=files.read(folder / files.OVERHEAD, OverheadRow),
        operation=files.read(folder / files.OPERATION, OperationRow),
        candidates=files.read(folder / files.CANDIDATES, SweepRow),
        depth=files.read(folder / files.DEPTH, SweepRow),
        launches=files.read(folder / files.LAUNCHES, LaunchRow),
        profile=files.read(folder / files.PROFILE, ProfileRow),
    )


def pictures(results: Results) -> list[Picture]:
    """Those that there are data for."""
    made = (
        _ratios(results.overhead, "training", "Training step", lambda row: row.train_ratio, 0),
        _ratios(results.overhead, "memory", "Memory in training", lambda row: row.memory_ratio, 2),
        _against("candidates", "Cost against the number of candidates", results.candidates, lambda row: row.candidates),
        _against("depth", "Cost against depth", results.depth, lambda row: row.sites),
        _launches(results.launches),
    )
    return [picture for picture in made if picture is not None]


def _ratios(
    rows: Sequence[OverheadRow], slug: str, title: str, value: Callable[[OverheadRow], float | None], papers: int
) -> Picture | None:
    """Bars of a ratio by network and placement, a panel a mode, with the paper's beside ours."""
    panels = []
    for mode in MODES:
        own = [row for row in rows if row.mode == mode and row.placement != BASELINE and value(row) is not None]
        if not own:
            continue
        networks = list(dict.fromkeys(row.network for row in own))
        labels = [(network, place) for network in networks for place in ("penultimate", "all")]
        bars = []
        for way in [way for way in _COLOURS if any(row.way == way for row in own)]:
            by_label = {(row.network, row.placement): value(row) or 0.0 for row in own if row.way == way}
            bars.append(Bars(WAYS[way].title, [by_label.get(label, 0.0) for label in labels], _COLOURS[way]))
        paper = [OVERHEAD[label][papers] / OVERHEAD[label[0], BASELINE][papers] for label in labels]
        bars.append(Bars("the paper's", paper, _PAPERS))
        panels.append(Panel(MODE_TITLES[mode], "ratio to ReLU", rows=[f"{n}, {p}" for n, p in labels], bars=bars))
    sentence = "Ratio to the same network with ReLU in the same mode; 1 costs nothing."
    return Picture(f"overhead-{slug}", title, sentence, panels, across=2) if panels else None


def _against(slug: str, title: str, rows: Sequence[SweepRow], x: Callable[[SweepRow], int]) -> Picture | None:
    """Lines of the ratio to ReLU, a panel for the operation and for the step."""
    panels = []
    for what in ("operation", "step"):
        own = [row for row in rows if row.what == what and row.way != BASELINE and row.ratio is not None]
        if not own:
            continue
        lines = []
        for way, mode in dict.fromkeys((row.way, row.mode) for row in own):
            line = sorted((row for row in own if (row.way, row.mode) == (way, mode)), key=x)
            band = [row.ratio_p10 or 0.0 for row in line], [row.ratio_p90 or 0.0 for row in line]
            lines.append(
                Line(
                    f"{WAYS[way].title}, {mode}",
                    [x(row) for row in line],
                    [row.ratio or 0.0 for row in line],
                    _COLOURS[way],
                    _DASHES.get(mode, "solid"),
                    band=band,
                )
            )
        titles = {"operation": "the operation alone", "step": "training step, all sites"}
        panels.append(Panel(titles[what], slug if slug == "candidates" else "sites", "ratio to ReLU", lines=lines))
    sentence = "Medians of interleaved repeats, with a band from the 10th to the 90th percentile."
    return Picture(f"overhead-{slug}", title, sentence, panels, across=2) if panels else None


def _launches(rows: Sequence[LaunchRow]) -> Picture | None:
    own = [row for row in rows if not row.error]
    panels = []
    for way in dict.fromkeys(row.way for row in own):
        line = sorted((row for row in own if row.way == way), key=lambda row: row.sites)
        sites = [row.sites for row in line]
        parts = [
            Line("draw", sites, [row.draw or 0 for row in line], "#0072b2"),
            Line("policy", sites, [row.policy or 0 for row in line], "#d55e00"),
            Line("schedule's step", sites, [row.schedule or 0 for row in line], "#009e73", "dash"),
        ]
        whole = [
            Line("whole step", sites, [row.step or 0 for row in line], INK),
            Line("whole step, ReLU", sites, [row.relu_step or 0 for row in line], INK, "dot"),
        ]
        panels += [
            Panel(f"{WAYS[way].title}: draw and policy", "sites", line[0].counted, lines=parts),
            Panel(f"{WAYS[way].title}: whole step", "sites", line[0].counted, lines=whole),
        ]
    sentence = "How many launches an eager training step has, against the number of sites."
    return Picture("overhead-launches", "Launches against depth", sentence, panels, across=2) if panels else None
