"""The three synthetic studies of the paper, which differ in their models, and their pages."""

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
from flexact.observe.figures.description import INK, Bars, Line, Panel, candidate_colours, candidate_dash
from flexact.observe.figures.picture import Picture
from flexact.report.page import Section, markdown, picture
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.synthetic.models import policy
from flexact.studies.synthetic.options import DEFAULT, KAN, Options
from flexact.studies.synthetic.store import Part, read_parts
from flexact.studies.synthetic.tables import variants


@dataclass(frozen=True)
class Study:
    """One table of the paper, with the defaults of its options."""

    name: str
    title: str
    seeds: int
    truths: tuple[str, ...]
    models: tuple[str, ...]

    def options(self, **given: Any) -> Options:
        """Return the options of a run."""
        own: dict[str, Any] = {"seeds": self.seeds, "truths": self.truths, "models": self.models}
        return Options(**own | given)


SYNTHETIC = Study(
    "synthetic",
    "Synthetic regression: which activation made the data?",
    seeds=5,
    truths=PAPER_CANDIDATES,
    models=(DEFAULT, "flexact-a0.3", "flexact-a0", *PAPER_CANDIDATES, "gelu", "silu", "mish", *BASELINES, KAN),
)
ALPHA = Study(
    "alpha",
    "The weight of the correction: the paper's sweep of α",
    seeds=3,
    truths=("sigmoid",),
    models=tuple(f"flexact-a{tenths / 10:g}" for tenths in range(11)),
)
CORRECTIONS = Study(
    "corrections",
    "Corrections of the routing: the paper's ablation",
    seeds=5,
    truths=("sigmoid",),
    models=("none", "clip_logit_gradient", "clipped_norm_kl", "output_norm", "grad_norm_kl"),
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


def selection(options: Options, parts: dict[str, Part]) -> Picture | None:
    """Draw probabilities over epochs, with a panel per truth and model that picks."""
    colours = candidate_colours([*options.candidates, *options.truths])
    panels = []
    for truth, model in product(options.truths, parts):
        lines = []
        for candidate in options.candidates:
            epochs, means, deviations = _line(parts[model], truth, candidate)
            spread = list(zip(means, deviations, strict=True))
            band = ([max(0.0, mean - std) for mean, std in spread], [min(1.0, mean + std) for mean, std in spread])
            width = 3.0 if candidate == truth else 1.8
            lines.append(Line(candidate, epochs, means, colours[candidate], candidate_dash(candidate), width, band))
        if all(line.x for line in lines):
            name = f"{model}, truth: {truth}"
            panels.append(Panel(name, "epoch", "probability", lines, value_range=(-0.02, 1.02)))
    return picture(
        "selection",
        "Selection probabilities over epochs",
        "The probability of each candidate over the epochs, for each true activation and model. The bold line is the "
        "truth. A line is the mean over seeds, with a band of one standard deviation until the picks are made; from "
        "then on it is the share of seeds with that pick.",
        panels,
    )


def curves(options: Options, parts: dict[str, Part]) -> Picture | None:
    """Draw every model's predicted curve, with a panel per truth. Baselines of other papers are hidden at first."""
    own = [*options.candidates, *options.truths]
    colours = candidate_colours([*own, *parts])
    panels = []
    for truth in options.truths:
        lines = []
        for model, part in parts.items():
            x, y, _ = _line(part, truth, "prediction")
            picks = policy(model, options) is not None
            dash, width = ("solid", 2.4) if picks else (candidate_dash(model), 1.8)
            lines.append(Line(model, x, y, colours[model], dash, width, shown=picks or model in own))
        x, target, _ = _line(next(iter(parts.values())), truth, "target")
        if x:
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


def _line(part: Part, truth: str, name: str) -> tuple[list[float], list[float], list[float]]:
    """Return x, y and deviation of a line of lines.csv."""
    points = [point for point in part.points if (point.truth, point.line) == (truth, name)]
    return [point.x for point in points], [point.y for point in points], [point.deviation for point in points]


def errors(options: Options, parts: dict[str, Part]) -> Picture | None:
    """Draw the error of each model beside the paper's. None if there are several truths, as the table has them."""
    if len(options.truths) > 1:
        return None
    ours = [mean_and_deviation([row.mse for row in part.results]) for part in parts.values()]
    bars = [Bars("ours", [mean for mean, _ in ours], "#0072b2", [deviation for _, deviation in ours])]
    if papers := variants(options):
        theirs = [float(papers[model][0].split()[0]) if model in papers else math.nan for model in parts]
        bars.append(Bars("paper", theirs, "#e69f00"))
    return Picture(
        "errors",
        "Error by model",
        "The error at the end of training on a logarithmic axis: mean over seeds, whiskers of one standard deviation.",
        [Panel(f"truth: {options.truths[0]}", "mean squared error", "", rows=list(parts), bars=bars, log_values=True)],
        across=1,
    )
