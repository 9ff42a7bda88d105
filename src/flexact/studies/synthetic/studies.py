"""The three synthetic studies of the paper, which differ in their models, tables and figures, and their pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexact.baselines import BASELINES
from flexact.config import PAPER_CANDIDATES
from flexact.io.csv_rows import read_text
from flexact.io.markdown_tables import PAPERS_ROW
from flexact.io.result_folder import TABLE
from flexact.observe.figures import drawing
from flexact.observe.figures.colours import INK, candidate_colours, candidate_dash
from flexact.observe.figures.drawing import Picture, style
from flexact.report.page import Section, markdown
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.synthetic import tables
from flexact.studies.synthetic.options import DEFAULT, KAN, Options, alpha_of, canonical, title
from flexact.studies.synthetic.store import Part, Point, Result, read_options, read_parts
from flexact.studies.synthetic.tables import CORRECTIONS as PAPER_CORRECTIONS
from flexact.studies.synthetic.tables import alpha_cell, correction_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#a6761d", "#1b9e9e", "#e7298a", "#7fae2e", "#5c6bc0", "#b15928", "#b0a000")
"""Colours of models that are neither candidates nor named after their α."""
_SHADES = ("#3b0f70", "#3b528b", "#21918c", "#5ec962", "#c2cb1b")
"""Colours of models by α, in equal steps from the smallest α to the largest."""


Parts = dict[str, Part]
"""The rows of each finished model."""


@style()
def selection(options: Options, parts: Parts) -> Picture | None:
    """Draw probabilities over epochs, with a panel per truth and model."""
    found = {
        (truth, model): by_candidate
        for truth in options.truths
        for model, part in parts.items()
        if (by_candidate := _history(part, truth))
    }
    if not found:
        return None
    figure, axes = drawing.panels(len(found), across=3)
    for ax, ((truth, model), by_candidate) in zip(axes, found.items(), strict=True):
        _draw_probabilities(ax, by_candidate, truth, _candidate_colours(options))
        ax.set_title(f"{title(model)}, truth: {truth}")
    return Picture(
        "selection",
        "Selection probabilities over epochs",
        "The probability of each candidate over the epochs, for each true activation and model. The bold line is the "
        "truth. A line is the mean over seeds, with a band of one standard deviation until the picks are made; from "
        "then on it is the share of seeds with that pick.",
        drawing.finished(figure),
    )


def _draw_probabilities(
    ax: Axes, by_candidate: dict[str, dict[int, list[float]]], truth: str, colours: dict[str, str]
) -> None:
    epochs = sorted(next(iter(by_candidate.values())))
    unpicked = [any(p not in (0.0, 1.0) for own in by_candidate.values() for p in own[epoch]) for epoch in epochs]
    for candidate, by_epoch in by_candidate.items():
        means, deviations = zip(*(mean_and_deviation(by_epoch[epoch]) for epoch in epochs), strict=True)
        spread = [(mean, std * more) for mean, std, more in zip(means, deviations, unpicked, strict=True)]
        band = ([max(0.0, mean - std) for mean, std in spread], [min(1.0, mean + std) for mean, std in spread])
        width = 2.4 if candidate == truth else 1.4
        drawing.line(ax, candidate, epochs, means, colours[candidate], candidate_dash(candidate), width, band)
    ax.set(xlabel="epoch", ylabel="probability", ylim=(-0.02, 1.02))


def _history(part: Part, truth: str) -> dict[str, dict[int, list[float]]]:
    """Return candidate → epoch → the probabilities of all seeds."""
    found: dict[str, dict[int, list[float]]] = {}
    for moment in part.history:
        if moment.truth == truth:
            found.setdefault(moment.candidate, {}).setdefault(moment.epoch, []).append(moment.probability)
    return found


@style()
def curves(options: Options, parts: Parts) -> Picture | None:
    """Draw every model's predicted curve, with a panel per truth."""
    looks = _looks(options, list(parts))
    truths = [truth for truth in options.truths if any(_points(part, truth) for part in parts.values())]
    if not truths:
        return None
    figure, axes = drawing.panels(len(truths), across=3)
    for ax, truth in zip(axes, truths, strict=True):
        for model, part in parts.items():
            if points := _points(part, truth):
                x, target = [point.x1 for point in points], [point.target for point in points]
                drawing.line(ax, model, x, [point.prediction for point in points], **looks[model])
        drawing.line(ax, "truth", x, target, dash="--", width=1.4)
        ax.set(title=f"truth: {truth}", xlabel="x₁", ylabel="output")
    return Picture(
        "curves",
        "Predicted curve against truth",
        "The prediction of each model over x₁ with the distractors at 0, as the mean over seeds. The dashed black line "
        "is the true function.",
        drawing.finished(figure),
    )


def _points(part: Part, truth: str) -> list[Point]:
    return [point for point in part.curves if point.truth == truth]


@style()
def errors(options: Options, parts: Parts) -> Picture | None:
    """Draw each model's mean error on a logarithmic axis, next to the paper's if it is comparable."""
    if not parts:
        return None
    rows = len(parts)
    figure, axes = drawing.panels(len(options.truths), inches=drawing.row_inches(rows, 2))
    for ax, truth in zip(axes, options.truths, strict=True):
        ours = [mean_and_deviation([row.mse for row in part.results if row.truth == truth]) for part in parts.values()]
        swept = {model: alpha_cell(model, truth, options) for model in parts}
        paper = [
            (cell[0], math.nan) if cell else correction_error(model, truth, options) for model, cell in swept.items()
        ]
        shown = {"ours": (ours, "#0072b2")}
        if any(paper):
            shown["paper"] = ([cell or (math.nan, math.nan) for cell in paper], "#e69f00")
        for number, (name, (cells, colour)) in enumerate(shown.items()):
            means, deviations = zip(*cells, strict=True)
            at, height = drawing.side_by_side(rows, number, len(shown)), 0.8 / len(shown)
            ax.barh(at, means, height, xerr=deviations, color=colour, ecolor=INK, capsize=2, label=name)
        smallest = min((mean for cells, _ in shown.values() for mean, _ in cells if mean > 0), default=0.1)
        ax.set(title=f"truth: {truth}", xlabel="mean squared error", xscale="log")
        ax.set_xlim(left=smallest / 3)
        ax.xaxis.set_major_formatter("{x:g}")  # the default is a formula, which would be shown as text
        ax.xaxis.set_minor_formatter("")
        drawing.name_rows(ax, [title(model) for model in parts])
    return Picture(
        "errors",
        "Error by model",
        "The error at the end of training on a logarithmic axis: mean over seeds, whiskers of one standard deviation.",
        drawing.finished(figure),
    )


@style()
def final_probabilities(options: Options, parts: Parts) -> Picture | None:
    """Draw the probabilities of the last epoch, with a row per model and a panel per truth."""
    found = {truth: final for truth in options.truths if (final := _final_probabilities(parts, truth))}
    if not found:
        return None
    figure, axes = drawing.panels(len(found), inches=drawing.row_inches(len(parts)))
    for ax, (truth, final) in zip(axes, found.items(), strict=True):
        ends = [0.0] * len(final)
        for name, colour in _candidate_colours(options).items():
            shares = [one.get(name, 0.0) for one in final.values()]
            ax.barh(range(len(final)), shares, left=ends, color=colour, label=name)
            ends = [end + share for end, share in zip(ends, shares, strict=True)]
        drawing.name_rows(ax, [title(model) for model in final])
        ax.set(title=f"truth: {truth}", xlabel="probability", xlim=(0.0, 1.0))
    return Picture(
        "probabilities",
        "Final probabilities by model",
        "The probability of each candidate at the end of training, as the mean over seeds.",
        drawing.finished(figure),
    )


def _final_probabilities(parts: Parts, truth: str) -> dict[str, dict[str, float]]:
    """Return model → candidate → the mean probability over seeds at the last epoch."""
    histories = {model: _history(part, truth) for model, part in parts.items()}
    return {
        model: {name: mean_and_deviation(by_epoch[max(by_epoch)])[0] for name, by_epoch in own.items()}
        for model, own in histories.items()
        if own
    }


def _candidate_colours(options: Options) -> dict[str, str]:
    """Return one colour per candidate, the same in all figures of the study."""
    return candidate_colours([*options.candidates, *options.truths])


def _looks(options: Options, models: list[str]) -> dict[str, dict[str, Any]]:
    """Return colour, dash and width of each model's curve."""
    candidates = _candidate_colours(options)
    alphas = sorted(alpha for model in models if (alpha := alpha_of(model)) is not None)
    looks: dict[str, dict[str, Any]] = {}
    others = cycle(_COLOURS)
    for model in models:
        alpha = alpha_of(model)
        if model == DEFAULT:
            looks[model] = {"colour": "#d55e00", "width": 2.6}
        elif alpha is not None:
            share = alphas.index(alpha) / max(1, len(alphas) - 1)
            looks[model] = {"colour": _SHADES[round(share * (len(_SHADES) - 1))], "width": 1.9}
        elif model in candidates:
            looks[model] = {"colour": candidates[model], "dash": candidate_dash(model), "width": 1.4}
        else:
            looks[model] = {"colour": next(others), "dash": ":", "width": 1.4}
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
