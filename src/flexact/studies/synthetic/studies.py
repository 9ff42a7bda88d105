"""The three synthetic studies of the paper, each with its models and defaults, and the page of all three."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

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
from flexact.studies.synthetic.options import DEFAULT, KAN, Options, policy
from flexact.studies.synthetic.store import Part, read_parts
from flexact.studies.synthetic.tables import variants


@dataclass(frozen=True)
class Study:
    """One table of the paper."""

    name: str
    title: str
    defaults: Options


SYNTHETIC = Study(
    "synthetic",
    "Synthetic regression: which activation made the data?",
    Options(
        models=(
            DEFAULT,
            "flexact-a0.3",
            "flexact-a0",
            *PAPER_CANDIDATES,
            "elu",
            "gelu",
            "silu",
            "mish",
            *BASELINES,
            KAN,
        )
    ),
)
ALPHA = Study(
    "alpha",
    "The weight of the correction: the paper's sweep of α",
    Options(seeds=3, truths=("sigmoid",), models=tuple(f"flexact-a{tenths / 10:g}" for tenths in range(11))),
)
CORRECTIONS = Study(
    "corrections",
    "Corrections of the routing: the paper's ablation",
    Options(
        truths=("sigmoid",), models=("none", "clip_logit_gradient", "clipped_norm_kl", "output_norm", "grad_norm_kl")
    ),
)
STUDIES = {study.name: study for study in (SYNTHETIC, ALPHA, CORRECTIONS)}


def sections(folder: Path, config: dict[str, Any]) -> list[Section]:
    """Return the table and the figures of a run. An unfinished run shows its finished models."""
    options = Options.from_dict(config["options"] if isinstance(config.get("options"), dict) else {})
    parts = read_parts(folder, options)
    body = markdown(read_text(folder / TABLE), muted=PAPERS_ROW) if (folder / TABLE).is_file() else ""
    if not parts:
        return [Section("Results", body + "<p>No results yet.</p>", [])]
    drawn = [draw(options, parts) for draw in (selection, curves, errors)]
    return [Section("Results", body, [one for one in drawn if one is not None])]


@style()
def selection(options: Options, parts: dict[str, Part]) -> Picture | None:
    """Draw probabilities over epochs, with a panel per truth and model that picks."""
    colours = candidate_colours([*options.candidates, *options.truths])
    found = {}
    for truth, model in product(options.truths, parts):
        lines = {candidate: _line(parts[model], truth, candidate) for candidate in options.candidates}
        if all(x for x, _, _ in lines.values()):
            found[truth, model] = lines
    if not found:
        return None
    figure, axes = drawing.panels(len(found), across=3)
    for ax, ((truth, model), lines) in zip(axes, found.items(), strict=True):
        for candidate, (epochs, means, deviations) in lines.items():
            spread = list(zip(means, deviations, strict=True))
            band = ([max(0.0, mean - std) for mean, std in spread], [min(1.0, mean + std) for mean, std in spread])
            width = 2.4 if candidate == truth else 1.4
            drawing.line(ax, candidate, epochs, means, colours[candidate], candidate_dash(candidate), width, band)
        ax.set(title=f"{model}, truth: {truth}", xlabel="epoch", ylabel="probability", ylim=(-0.02, 1.02))
    return Picture(
        "selection",
        "Selection probabilities over epochs",
        "The probability of each candidate over the epochs, for each true activation and model. The bold line is the "
        "truth. A line is the mean over seeds, with a band of one standard deviation until the picks are made; from "
        "then on it is the share of seeds with that pick.",
        drawing.finished(figure),
    )


@style()
def curves(options: Options, parts: dict[str, Part]) -> Picture | None:
    """Draw every model's predicted curve, with a panel per truth."""
    colours = candidate_colours([*options.candidates, *options.truths, *parts])
    targets = {truth: _line(next(iter(parts.values())), truth, "target") for truth in options.truths}
    truths = [truth for truth, (x, _, _) in targets.items() if x]
    if not truths:
        return None
    figure, axes = drawing.panels(len(truths), across=3)
    for ax, truth in zip(axes, truths, strict=True):
        for model, part in parts.items():
            x, y, _ = _line(part, truth, "prediction")
            dash, width = ("-", 2.2) if policy(model, options) is not None else (candidate_dash(model), 1.4)
            drawing.line(ax, model, x, y, colours[model], dash, width)
        x, target, _ = targets[truth]
        drawing.line(ax, "truth", x, target, dash="--", width=1.4)
        ax.set(title=f"truth: {truth}", xlabel="x₁", ylabel="output")
    return Picture(
        "curves",
        "Predicted curve against truth",
        "The prediction of each model over x₁ with the distractors at 0, as the mean over seeds. The dashed black line "
        "is the true function.",
        drawing.finished(figure),
    )


def _line(part: Part, truth: str, name: str) -> tuple[list[float], list[float], list[float]]:
    """Return x, y and deviation of a line of lines.csv."""
    points = [point for point in part.points if (point.truth, point.line) == (truth, name)]
    return [point.x for point in points], [point.y for point in points], [point.deviation for point in points]


@style()
def errors(options: Options, parts: dict[str, Part]) -> Picture | None:
    """Draw the error of each model next to the paper's. None if there are several truths: the table has those."""
    if len(options.truths) > 1:
        return None
    shown = {"ours": ([mean_and_deviation([row.mse for row in part.results]) for part in parts.values()], "#0072b2")}
    if papers := variants(options):
        theirs = [float(papers[model][0].split()[0]) if model in papers else math.nan for model in parts]
        shown["paper"] = ([(error, math.nan) for error in theirs], "#e69f00")
    figure, (ax,) = drawing.panels(inches=drawing.row_inches(len(parts), len(shown)))
    for number, (name, (cells, colour)) in enumerate(shown.items()):
        means, deviations = zip(*cells, strict=True)
        at, height = drawing.side_by_side(len(parts), number, len(shown)), 0.8 / len(shown)
        ax.barh(at, means, height, xerr=deviations, color=colour, ecolor=INK, capsize=2, label=name)
    smallest = min((mean for cells, _ in shown.values() for mean, _ in cells if mean > 0), default=0.1)
    ax.set(title=f"truth: {options.truths[0]}", xlabel="mean squared error", xscale="log")
    ax.set_xlim(left=smallest / 3)
    ax.xaxis.set_major_formatter("{x:g}")  # the default is a formula, which would be shown as text
    ax.xaxis.set_minor_formatter("")
    drawing.name_rows(ax, list(parts))
    return Picture(
        "errors",
        "Error by model",
        "The error at the end of training on a logarithmic axis: mean over seeds, whiskers of one standard deviation.",
        drawing.finished(figure),
    )
