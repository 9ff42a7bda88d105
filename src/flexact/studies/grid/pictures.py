"""Figures of any grid: a mean line over seeds, and what each site picked over the epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flexact.picture import Line, Picture
from flexact.plots import picks
from flexact.studies.averages import mean_and_deviation
from flexact.studies.grid.study import picked
from flexact.studies.report_page import table

BASELINE, PENULTIMATE, ALL_LAYERS = "#0072b2", "#56b4e9", "#d55e00"
"""The colours of what every grid compares; Okabe and Ito's, which colour-blind readers tell apart."""


def mean_line(name: str, curves: Sequence[Mapping[int, float]], colour: str, dash: str, width: float) -> Line:
    """The mean of several seeds' curves (epoch → figure), with a band of one standard deviation."""
    epochs = sorted({epoch for curve in curves for epoch in curve})
    spread = [mean_and_deviation([curve[epoch] for curve in curves if epoch in curve]) for epoch in epochs]
    means = [mean for mean, _ in spread]
    band = ([mean - std for mean, std in spread], [mean + std for mean, std in spread])
    return Line(name, epochs, means, colour, dash, width, band)


def selection_by_depth(slug: str, title: str, histories: Mapping[int, Sequence[dict[str, Any]]]) -> Picture:
    """Which candidate leads at each site over the epochs: a panel for each seed."""
    panels = []
    for seed, records in histories.items():
        panel = picks(_by_epoch(records)).panels[0]
        label = "epoch" if all("epoch" in record for record in records) else "step"
        panels.append(dataclasses.replace(panel, title=f"seed {seed}", x_label=label))
    return Picture(
        slug,
        f"Selection by depth: {title}",
        "The candidate with the highest probability at each site, the first layer on top, as training goes on.",
        panels,
        across=min(3, len(panels)),
    )


def final_picks(title: str, by_seed: Mapping[int, str]) -> str:
    """A table of site by seed; by_seed: the column `picks` of results.csv."""
    found = {seed: picked(picks) for seed, picks in by_seed.items()}
    sites = dict.fromkeys(site for picks in found.values() for site in picks)
    rows = [(site, *(picks.get(site, "-") for picks in found.values())) for site in sites]
    return f"<h3>Final picks: {title}</h3>\n" + table(("site", *(f"seed {seed}" for seed in found)), rows)


def _by_epoch(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records by epoch where they have it; by step otherwise."""
    if all("epoch" in record for record in records):
        return [{**record, "step": record["epoch"]} for record in records]
    return list(records)
