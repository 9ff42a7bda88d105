"""The figures of the ablation of corrections."""

from __future__ import annotations

import math

from flexact.picture import Bars, Panel, Picture
from flexact.studies.averages import mean_and_deviation
from flexact.studies.names import title
from flexact.studies.paper_tables import correction_error
from flexact.studies.report_data import StudyRun
from flexact.studies.report_panels import HOW_TO_READ, picture, probability_panel


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
