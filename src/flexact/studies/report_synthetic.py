"""The figures of the first study: what is picked over the epochs, what is learnt, and what the correction does."""

from __future__ import annotations

from flexact.picture import INK, Line, Panel, Picture, candidate_dash
from flexact.studies.names import DEFAULT
from flexact.studies.report_data import StudyRun
from flexact.studies.report_panels import HOW_TO_READ, file_name, picture, probability_panel, run_colours

_MODEL_COLOURS = {DEFAULT: "#d55e00", "flexact-a0.3": "#8c3fb0", "flexact-a0": "#7f7f7f"}
_BASELINE_COLOURS = ("#a6761d", "#1b9e9e", "#e7298a", "#7fae2e", "#5c6bc0", "#b15928", "#b0a000")


def pictures(run: StudyRun) -> list[Picture | None]:
    return [*selection_over_epochs(run), predicted_curves(run), regularisation(run)]


def selection_over_epochs(run: StudyRun) -> list[Picture | None]:
    """Probabilities over epochs: a figure for each model that picks, a panel for each truth."""
    models = list(dict.fromkeys(model for model, _ in run.history))
    if "flexact-a0.3" in models:
        models = [model for model in models if model != "flexact-a0"]  # `regularisation` has the two side by side
    return [
        picture(
            f"selection-{file_name(model)}",
            f"Selection probabilities over epochs: {model}",
            f"How likely each candidate is as training goes on, for each true activation. {HOW_TO_READ}",
            [probability_panel(run, model, truth, f"truth: {truth}") for truth in run.options.truths],
        )
        for model in models
    ]


def predicted_curves(run: StudyRun) -> Picture | None:
    """Every model's curve against the truth's, a panel for each truth."""
    looks = _model_looks(run)
    panels = []
    for truth in run.options.truths:
        curves = {model: run.curves[model, truth] for model in run.models if (model, truth) in run.curves}
        if curves:
            lines = [
                Line(model, curve.x, curve.prediction, **looks[model])  # type: ignore[arg-type]
                for model, curve in curves.items()
            ]
            first = next(iter(curves.values()))
            lines.append(Line("truth", first.x, first.target, INK, "dash", 1.8))
            panels.append(Panel(f"truth: {truth}", "x₁", "output", lines))
    return picture(
        "curves",
        "Predicted curve against truth",
        "What each model has learnt to predict over x₁, the distractors at 0, as the mean over seeds; the dashed line "
        "is the true function. Names in the legend switch their curves on and off.",
        panels,
    )


def regularisation(run: StudyRun) -> Picture | None:
    """Probabilities without the correction beside those with it, truth by truth."""
    panels = []
    for truth in run.options.truths:
        pair = [probability_panel(run, model, truth) for model in ("flexact-a0", "flexact-a0.3")]
        if all(pair):
            panels += pair
    return picture(
        "regularisation",
        "The effect of regularisation: α = 0 beside α = 0.3",
        f"Selection probabilities without the correction (α = 0) and with it (α = 0.3) for the same truth. "
        f"{HOW_TO_READ}",
        panels,
        across=2,
    )


def _model_looks(run: StudyRun) -> dict[str, dict[str, object]]:
    """How each model's curve is drawn; the baselines of other papers are switched off at first."""
    candidates = run_colours(run)
    looks: dict[str, dict[str, object]] = {}
    baselines = 0
    for model in run.models:
        if model.startswith("flexact"):
            looks[model] = {"colour": _MODEL_COLOURS.get(model, "#b15928"), "width": 3.2}
        elif model in candidates:
            looks[model] = {"colour": candidates[model], "dash": candidate_dash(model), "width": 1.8}
        else:
            colour = _BASELINE_COLOURS[baselines % len(_BASELINE_COLOURS)]
            looks[model] = {"colour": colour, "dash": "dot", "width": 1.8, "shown": False}
            baselines += 1
    return looks
