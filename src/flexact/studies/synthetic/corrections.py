"""The ablation of corrections: what straightens the routing, and what does not, for the Sigmoid truth."""

from __future__ import annotations

import math

from flexact.io import markdown_tables as tables
from flexact.observe.figures.description import Bars, Panel
from flexact.observe.figures.picture import Picture
from flexact.report.page import picture
from flexact.studies.averages import mean_and_deviation
from flexact.studies.synthetic import counts
from flexact.studies.synthetic.names import title
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.panels import HOW_TO_READ, probability_panel
from flexact.studies.synthetic.paper import CORRECTIONS as PAPERS
from flexact.studies.synthetic.paper import correction_error
from flexact.studies.synthetic.runner import Study
from flexact.studies.synthetic.store import Result
from flexact.studies.synthetic.study_run import StudyRun


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(PAPERS)


def _table(options: Options, results: list[Result]) -> str:
    parts = ["# Corrections of the routing"]
    for truth in options.truths:
        paper = {model: correction_error(model, truth, options) for model in options.models}
        compared = any(paper.values())
        rows = []
        for model in options.models:
            cell = counts.of(results, model, truth)
            theirs = paper[model]
            row = [title(model), _error(*mean_and_deviation([row.mse for row in cell]))]
            row += [_error(*theirs) if theirs else ""] if compared else []
            rows.append([*row, counts.picks(cell), counts.right(cell)])
        header = ["correction", "MSE", *(["paper's"] if compared else []), "picked", "right picks"]
        parts += [f"## Truth: {title(truth)}", tables.markdown(header, rows)]
    parts.append(f"Mean ± standard deviation over {counts.seeds(options)}.")
    return "\n\n".join(parts) + "\n"


def _error(mean: float, deviation: float) -> str:
    return f"{mean:.5f} ± {deviation:.5f}"


def pictures(run: StudyRun) -> list[Picture | None]:
    return [errors(run), selection_by_correction(run)]


def errors(run: StudyRun) -> Picture | None:
    """Each correction's mean error on a logarithmic axis, beside the paper's where that is about the same thing."""
    panels = []
    compared = False
    for truth in run.options.truths:
        ours = [mean_and_deviation(run.errors(model, truth)) for model in run.models]
        bars = [Bars("ours", [mean for mean, _ in ours], "#0072b2", [std for _, std in ours])]
        paper = [correction_error(model, truth, run.options) for model in run.models]
        if any(paper):
            compared = True
            theirs = [cell or (math.nan, 0.0) for cell in paper]
            bars.append(Bars("paper", [mean for mean, _ in theirs], "#e69f00", [std for _, std in theirs]))
        rows = [title(model) for model in run.models]
        if rows:
            panels.append(Panel(f"truth: {truth}", "mean squared error", "", rows=rows, bars=bars, log_values=True))
    return picture(
        "errors",
        "Error by correction",
        "The error that each correction ends with, on a logarithmic axis: mean over seeds, whiskers of one standard "
        "deviation" + (", beside the paper's." if compared else "."),
        panels,
        across=1,
    )


def selection_by_correction(run: StudyRun) -> Picture | None:
    """Probabilities over epochs, all corrections in one figure."""
    models = list(dict.fromkeys(model for model, _ in run.history))
    return picture(
        "selection",
        "Selection probabilities over epochs",
        f"How likely each candidate is as training goes on, correction by correction. {HOW_TO_READ}",
        [probability_panel(run, model, truth) for model in models for truth in run.options.truths],
    )


CORRECTIONS = Study(
    name="corrections",
    title="Corrections of the routing: the paper's ablation",
    question="Which correction?",
    seeds=5,
    truths=("sigmoid",),
    models=_models,
    table=_table,
    pictures=pictures,
)
