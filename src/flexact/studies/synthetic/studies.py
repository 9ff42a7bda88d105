"""The three synthetic studies of the paper, which differ in their models, tables and figures, and their pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from flexact.baselines import BASELINES
from flexact.config import PAPER_CANDIDATES
from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import PAPERS_ROW
from flexact.io.result_folder import TABLE
from flexact.observe.figures.description import INK, Bars, Line, Panel, candidate_colours, candidate_dash
from flexact.observe.figures.picture import Picture
from flexact.report.page import Section, markdown, picture
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.synthetic import tables
from flexact.studies.synthetic.options import DEFAULT, KAN, Options, alpha_of, canonical, title
from flexact.studies.synthetic.store import Part, Result, read_options, read_parts
from flexact.studies.synthetic.tables import CORRECTIONS as PAPER_CORRECTIONS
from flexact.studies.synthetic.tables import alpha_cell, correction_error

_COLOURS = ("#a6761d", "#1b9e9e", "#e7298a", "#7fae2e", "#5c6bc0", "#b15928", "#b0a000")
"""Colours of models that are neither candidates nor named after their α."""
_SHADES = ("#3b0f70", "#3b528b", "#21918c", "#5ec962", "#c2cb1b")
"""Colours of models by α, in equal steps from the smallest α to the largest."""


Parts = dict[str, Part]
"""The rows of each finished model."""


def selection(options: Options, parts: Parts) -> Picture | None:
    """Draw probabilities over epochs, with a panel per truth and model."""
    return picture(
        "selection",
        "Selection probabilities over epochs",
        "The probability of each candidate over the epochs, for each true activation and model. The bold line is the "
        "truth. A line is the mean over seeds, with a band of one standard deviation until the picks are made; from "
        "then on it is the share of seeds with that pick.",
        [_probabilities(options, parts[model], model, truth) for truth in options.truths for model in parts],
    )


def _probabilities(options: Options, part: Part, model: str, truth: str) -> Panel | None:
    by_candidate = _history(part, truth)
    if not by_candidate:
        return None
    epochs = sorted(next(iter(by_candidate.values())))
    unpicked = [any(p not in (0.0, 1.0) for own in by_candidate.values() for p in own[epoch]) for epoch in epochs]
    colours = _candidate_colours(options)
    lines = []
    for candidate, by_epoch in by_candidate.items():
        means, deviations = zip(*(mean_and_deviation(by_epoch[epoch]) for epoch in epochs), strict=True)
        spread = [(mean, std * more) for mean, std, more in zip(means, deviations, unpicked, strict=True)]
        band = ([max(0.0, mean - std) for mean, std in spread], [min(1.0, mean + std) for mean, std in spread])
        width = 3.0 if candidate == truth else 1.8
        lines.append(Line(candidate, epochs, means, colours[candidate], candidate_dash(candidate), width, band))
    return Panel(f"{title(model)}, truth: {truth}", "epoch", "probability", lines, value_range=(-0.02, 1.02))


def _history(part: Part, truth: str) -> dict[str, dict[int, list[float]]]:
    """Return candidate → epoch → the probabilities of all seeds."""
    found: dict[str, dict[int, list[float]]] = {}
    for moment in part.history:
        if moment.truth == truth:
            found.setdefault(moment.candidate, {}).setdefault(moment.epoch, []).append(moment.probability)
    return found


def curves(options: Options, parts: Parts) -> Picture | None:
    """Draw every model's predicted curve, with a panel per truth."""
    looks = _looks(options, list(parts))
    panels = []
    for truth in options.truths:
        found = {model: [point for point in part.curves if point.truth == truth] for model, part in parts.items()}
        own = {model: points for model, points in found.items() if points}
        if own:
            lines = [
                Line(model, [point.x1 for point in points], [point.prediction for point in points], **looks[model])
                for model, points in own.items()
            ]
            points = next(iter(own.values()))
            x, target = [point.x1 for point in points], [point.target for point in points]
            panels.append(
                Panel(f"truth: {truth}", "x₁", "output", [*lines, Line("truth", x, target, INK, "dash", 1.8)])
            )
    return picture(
        "curves",
        "Predicted curve against truth",
        "The prediction of each model over x₁ with the distractors at 0, as the mean over seeds. The dashed line is "
        "the true function. Click a name in the legend to show or hide its curve.",
        panels,
        across=1 if len(panels) == 1 else 3,
    )


def errors(options: Options, parts: Parts) -> Picture | None:
    """Draw each model's mean error on a logarithmic axis, next to the paper's if it is comparable."""
    panels = []
    for truth in options.truths if parts else ():
        ours = [mean_and_deviation([row.mse for row in part.results if row.truth == truth]) for part in parts.values()]
        bars = [Bars("ours", [mean for mean, _ in ours], "#0072b2", [std for _, std in ours])]
        swept = {model: alpha_cell(model, truth, options) for model in parts}
        paper = [(cell[0], 0.0) if cell else correction_error(model, truth, options) for model, cell in swept.items()]
        if any(paper):
            theirs = [cell or (math.nan, 0.0) for cell in paper]
            bars.append(Bars("paper", [mean for mean, _ in theirs], "#e69f00", [std for _, std in theirs]))
        rows = [title(model) for model in parts]
        panels.append(Panel(f"truth: {truth}", "mean squared error", "", rows=rows, bars=bars, log_values=True))
    return picture(
        "errors",
        "Error by model",
        "The error at the end of training on a logarithmic axis: mean over seeds, whiskers of one standard deviation.",
        panels,
        across=1,
    )


def final_probabilities(options: Options, parts: Parts) -> Picture | None:
    """Draw the probabilities of the last epoch, with a row per model and a panel per truth."""
    colours = _candidate_colours(options)
    panels = []
    for truth in options.truths:
        final = {
            model: {name: mean_and_deviation(by_epoch[max(by_epoch)])[0] for name, by_epoch in own.items()}
            for model, part in parts.items()
            if (own := _history(part, truth))
        }
        bars = [Bars(name, [one.get(name, 0.0) for one in final.values()], colours[name]) for name in colours]
        if final:
            rows = [title(model) for model in final]
            panels.append(
                Panel(f"truth: {truth}", "probability", rows=rows, bars=bars, stacked=True, value_range=(0.0, 1.0))
            )
    return picture(
        "probabilities",
        "Final probabilities by model",
        "The probability of each candidate at the end of training, as the mean over seeds.",
        panels,
        across=1,
    )


def _candidate_colours(options: Options) -> dict[str, str]:
    """Return one colour per candidate, the same in all figures of the study."""
    return candidate_colours([*options.candidates, *options.truths])


def _looks(options: Options, models: list[str]) -> dict[str, dict[str, Any]]:
    """Return colour, dash and width of each model's curve. Baselines of other papers are hidden at first."""
    candidates = _candidate_colours(options)
    alphas = sorted(alpha for model in models if (alpha := alpha_of(model)) is not None)
    looks: dict[str, dict[str, Any]] = {}
    others = cycle(_COLOURS)
    for model in models:
        alpha = alpha_of(model)
        if model == DEFAULT:
            looks[model] = {"colour": "#d55e00", "width": 3.2}
        elif alpha is not None:
            share = alphas.index(alpha) / max(1, len(alphas) - 1)
            looks[model] = {"colour": _SHADES[round(share * (len(_SHADES) - 1))], "width": 2.4}
        elif model in candidates:
            looks[model] = {"colour": candidates[model], "dash": candidate_dash(model), "width": 1.8}
        else:
            looks[model] = {"colour": next(others), "dash": "dot", "width": 1.8, "shown": False}
    return looks


@dataclass(frozen=True)
class Study:
    """One table of the paper."""

    name: str
    title: str
    question: str
    """The heading of its page."""
    seeds: int
    truths: tuple[str, ...]
    models: Callable[[tuple[str, ...]], tuple[str, ...]]
    """The default models, given the candidates."""
    table: Callable[[Options, list[Result]], str]
    """Markdown, from the rows of results.csv."""
    pictures: tuple[Callable[[Options, dict[str, Part]], Picture | None], ...]
    """The figures of the finished models; each returns None if its data is missing."""


MODERN = ("gelu", "silu", "mish")
"""Fixed activations that are common today, besides the candidates."""
SYNTHETIC = Study(
    name="synthetic",
    title="Synthetic regression: the paper's first table",
    question="Which activation made the data?",
    seeds=5,
    truths=PAPER_CANDIDATES,
    models=lambda candidates: tuple(
        dict.fromkeys((DEFAULT, "flexact-a0.3", "flexact-a0", *candidates, *MODERN, *BASELINES, KAN))
    ),
    table=tables.regression_table,
    pictures=(selection, curves),
)
ALPHA = Study(
    name="alpha",
    title="The weight of the correction: the paper's sweep of α",
    question="How strong should the correction be?",
    seeds=3,
    truths=("sigmoid",),
    models=lambda candidates: tuple(canonical(f"flexact-a{tenths / 10}") for tenths in range(11)),
    table=tables.alpha_table,
    pictures=(curves, errors, final_probabilities),
)
CORRECTIONS = Study(
    name="corrections",
    title="Corrections of the routing: the paper's ablation",
    question="Which correction?",
    seeds=5,
    truths=("sigmoid",),
    models=lambda candidates: tuple(PAPER_CORRECTIONS),
    table=tables.corrections_table,
    pictures=(errors, selection),
)
STUDIES = {study.name: study for study in (SYNTHETIC, ALPHA, CORRECTIONS)}


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the table and the figures of a run. An unfinished run shows its finished models."""
    study, options = STUDIES[config["study"]], read_options(folder, config)
    parts = read_parts(folder, study.name, options)
    body = markdown(read_text(folder / TABLE), muted=PAPERS_ROW) if (folder / TABLE).is_file() else ""
    if not parts:
        body += "<p>No results yet.</p>"
    drawn = [one for draw in study.pictures if (one := draw(options, parts)) is not None]
    return [Section(study.question, body, drawn)]
