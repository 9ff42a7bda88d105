"""The studies' figures, from their data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from flexact.picture import INK, Bars, Grid, Line, Panel, Picture, candidate_colours, candidate_dash
from flexact.studies.paper_tables import CORRECTIONS
from flexact.studies.report_data import Study, mean_and_spread

GRID_ALPHAS = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)
"""The values of α that the paper's small-multiple grid shows."""

_MODEL_COLOURS = {"flexact-default": "#d55e00", "flexact-a0.3": "#8c3fb0", "flexact-a0": "#7f7f7f"}
_BASELINE_COLOURS = ("#a6761d", "#1b9e9e", "#e7298a", "#7fae2e", "#5c6bc0", "#b15928", "#b0a000")
_ALPHA_SHADES = ((0x3B, 0x0F, 0x70), (0x3B, 0x52, 0x8B), (0x21, 0x91, 0x8C), (0x5E, 0xC9, 0x62), (0xC2, 0xCB, 0x1B))


def study_pictures(study: Study) -> list[Picture]:
    """The figures of a study; those that lack their data are left out."""
    makers: dict[str, Callable[[Study], list[Picture | None]]] = {
        "synthetic": lambda s: [*selection_over_epochs(s), predicted_curves(s), regularisation(s)],
        "alpha": lambda s: [overlaid_curves(s), error_by_alpha(s), final_probabilities(s), alpha_grid(s)],
        "corrections": lambda s: [correction_errors(s), selection_by_model(s)],
    }
    pictures = makers[study.name](study) if study.name in makers else []
    return [picture for picture in pictures if picture is not None]


# -- synthetic ---------------------------------------------------------------------------------------------------------


def selection_over_epochs(study: Study) -> list[Picture | None]:
    """Probabilities over epochs: a figure for each model that picks, a panel for each truth."""
    models = list(dict.fromkeys(model for model, _ in study.history))
    if "flexact-a0.3" in models:
        models = [model for model in models if model != "flexact-a0"]  # `regularisation` has the two side by side
    pictures = []
    for model in models:
        panels = [_probability_panel(study, model, truth, f"truth: {truth}") for truth in study.truths]
        pictures.append(
            _picture(
                f"selection-{file_name(model)}",
                f"Selection probabilities over epochs: {model}",
                "How likely each candidate is as training goes on, for each true activation: the mean over seeds, with "
                "a band of one standard deviation.",
                [panel for panel in panels if panel is not None],
            )
        )
    return pictures


def selection_by_model(study: Study) -> Picture | None:
    """Probabilities over epochs, all models in one figure."""
    models = list(dict.fromkeys(model for model, _ in study.history))
    panels = [_probability_panel(study, model, truth) for model in models for truth in study.truths]
    return _picture(
        "selection",
        "Selection probabilities over epochs",
        "How likely each candidate is as training goes on, model by model: the mean over seeds, with a band of one "
        "standard deviation.",
        [panel for panel in panels if panel is not None],
    )


def predicted_curves(study: Study) -> Picture | None:
    """Every model's curve against the truth's, a panel for each truth."""
    looks = _model_looks(study)
    panels = []
    for truth in study.truths:
        curves = {model: study.curves[model, truth] for model in study.models if (model, truth) in study.curves}
        if curves:
            lines = [
                Line(model, curve.x, curve.prediction, **looks[model])  # type: ignore[arg-type]
                for model, curve in curves.items()
            ]
            first = next(iter(curves.values()))
            lines.append(Line("truth", first.x, first.target, INK, "dash", 1.8))
            panels.append(Panel(f"truth: {truth}", "x₁", "output", lines))
    return _picture(
        "curves",
        "Predicted curve against truth",
        "What each model has learnt to predict over x₁, the distractors at 0; the dashed line is the true function. "
        "Names in the legend switch their curves on and off.",
        panels,
    )


def regularisation(study: Study) -> Picture | None:
    """Probabilities without the correction beside those with it, truth by truth."""
    panels = []
    for truth in study.truths:
        pair = [_probability_panel(study, model, truth) for model in ("flexact-a0", "flexact-a0.3")]
        if pair[0] is not None and pair[1] is not None:
            panels += pair
    return _picture(
        "regularisation",
        "The effect of regularisation: α = 0 beside α = 0.3",
        "Selection probabilities without the correction (α = 0) and with it (α = 0.3) for the same truth: mean over "
        "seeds, band of one standard deviation.",
        [panel for panel in panels if panel is not None],
        across=2,
    )


def _probability_panel(study: Study, model: str, truth: str, title: str = "") -> Panel | None:
    of_model = study.history.get((model, truth))
    if not of_model:
        return None
    colours = _colours(study)
    lines = []
    for candidate, by_epoch in of_model.items():
        epochs = sorted(by_epoch)
        spread = [mean_and_spread(by_epoch[epoch]) for epoch in epochs]
        band = ([max(0.0, mean - std) for mean, std in spread], [min(1.0, mean + std) for mean, std in spread])
        right = 3.0 if candidate == truth else 1.8
        means = [mean for mean, _ in spread]
        lines.append(Line(candidate, epochs, means, colours[candidate], candidate_dash(candidate), right, band))
    return Panel(title or f"{model}, truth: {truth}", "epoch", "probability", lines, value_range=(-0.02, 1.02))


def _colours(study: Study) -> dict[str, str]:
    """One colour a candidate, the same in all figures of the study."""
    return candidate_colours([*study.candidates, *study.truths])


def _model_looks(study: Study) -> dict[str, dict[str, object]]:
    """How each model's curve is drawn; the baselines of other papers are switched off at first."""
    candidates = _colours(study)
    looks: dict[str, dict[str, object]] = {}
    baselines = 0
    for model in study.models:
        if model.startswith("flexact"):
            looks[model] = {"colour": _MODEL_COLOURS.get(model, "#b15928"), "width": 3.2}
        elif model in candidates:
            looks[model] = {"colour": candidates[model], "dash": candidate_dash(model), "width": 1.8}
        else:
            colour = _BASELINE_COLOURS[baselines % len(_BASELINE_COLOURS)]
            looks[model] = {"colour": colour, "dash": "dot", "width": 1.8, "shown": False}
            baselines += 1
    return looks


# -- alpha -------------------------------------------------------------------------------------------------------------


def alphas(study: Study) -> dict[str, float]:
    """Model → α for the models that are named after theirs, α rising."""
    found = {model: re.fullmatch(r"flexact-a(\d+(?:\.\d+)?)", model) for model in study.models}
    values = {model: float(match[1]) for model, match in found.items() if match}
    return dict(sorted(values.items(), key=lambda item: item[1]))


def overlaid_curves(study: Study) -> Picture | None:
    """The predicted curves of all α on one set of axes, for each truth."""
    panels = []
    for truth in study.truths:
        of_truth = {model: a for model, a in alphas(study).items() if (model, truth) in study.curves}
        lines = []
        for model, alpha in of_truth.items():
            curve = study.curves[model, truth]
            lines.append(Line(f"α = {alpha:g}", curve.x, curve.prediction, _alpha_colour(alpha, of_truth), width=2.0))
        if of_truth:
            lines.append(Line("truth", curve.x, curve.target, INK, "dash", 1.8))
            panels.append(Panel(f"truth: {truth}", "x₁", "output", lines))
    return _picture(
        "curves",
        "Predicted curves for all α",
        "What is predicted over x₁ at each strength of the correction; the dashed line is the true function.",
        panels,
        across=1,
    )


def error_by_alpha(study: Study) -> Picture | None:
    """Mean error against α with its band, the least one starred."""
    panels = []
    for truth in study.truths:
        errors = {
            alpha: mean_and_spread([r.mse for r in study.results if (r.model, r.truth) == (model, truth)])
            for model, alpha in alphas(study).items()
        }
        x = [alpha for alpha, (mean, _) in errors.items() if math.isfinite(mean)]
        if not x:
            continue
        mean = [errors[alpha][0] for alpha in x]
        low = [max(0.0, errors[alpha][0] - errors[alpha][1]) for alpha in x]
        high = [errors[alpha][0] + errors[alpha][1] for alpha in x]
        best = min(x, key=lambda alpha: errors[alpha][0])
        lines = [
            Line("mean error", x, mean, "#0072b2", band=(low, high)),
            Line("least", [best], [errors[best][0]], "#d55e00", star=True),
        ]
        panels.append(Panel(f"truth: {truth}", "α", "mean squared error", lines))
    return _picture(
        "error",
        "Error against α",
        "The error on the noise-free grid at each strength of the correction: mean over seeds, band of one standard "
        "deviation; the star is the least.",
        panels,
        across=1,
    )


def final_probabilities(study: Study) -> Picture | None:
    """The last epoch's probabilities by α and candidate, for each truth."""
    panels = []
    for truth in study.truths:
        rows = {a: final for model, a in alphas(study).items() if (final := _final(study, model, truth))}
        if rows:
            values = [[final.get(name, math.nan) for name in study.candidates] for final in rows.values()]
            names = [f"α = {alpha:g}" for alpha in rows]
            panels.append(Panel(f"truth: {truth}", "", "", rows=names, grid=Grid(study.candidates, values)))
    return _picture(
        "probabilities",
        "Final probabilities by α",
        "The probability that each candidate has at the end of training, the mean over seeds, for each strength of the "
        "correction.",
        panels,
        across=1,
    )


def alpha_grid(study: Study) -> Picture | None:
    """Small multiples: predicted curve against truth, with the final probabilities in the corner."""
    colours = _colours(study)
    found = {
        key: alpha
        for key, alpha in alphas(study).items()
        if any((key, truth) in study.curves for truth in study.truths)
    }
    if set(GRID_ALPHAS) <= set(found.values()):
        found = {model: alpha for model, alpha in found.items() if alpha in GRID_ALPHAS}
    panels = []
    for truth in study.truths:
        for model, alpha in found.items():
            if (model, truth) not in study.curves:
                continue
            curve = study.curves[model, truth]
            lines = [
                Line("prediction", curve.x, curve.prediction, "#d55e00", width=2.4),
                Line("truth", curve.x, curve.target, INK, "dash", 1.6),
            ]
            bars = [(name, p, colours[name]) for name, p in _final(study, model, truth).items()]
            panels.append(Panel(f"α = {alpha:g}, truth: {truth}", "x₁", "output", lines, inset=bars))
    return _picture(
        "grid",
        "Prediction and final probabilities, α by α",
        "The predicted curve against the true one (dashed); the bars in the corner are the final probabilities of the "
        "candidates.",
        panels,
    )


def _final(study: Study, model: str, truth: str) -> dict[str, float]:
    """Candidate → probability in the last epoch, mean over seeds."""
    of_model = study.history.get((model, truth), {})
    return {candidate: mean_and_spread(by_epoch[max(by_epoch)])[0] for candidate, by_epoch in of_model.items()}


def _alpha_colour(alpha: float, all_alphas: dict[str, float]) -> str:
    low, high = min(all_alphas.values()), max(all_alphas.values())
    at = (alpha - low) / (high - low) * (len(_ALPHA_SHADES) - 1) if high > low else 0.0
    first = min(int(at), len(_ALPHA_SHADES) - 2)
    pair = zip(_ALPHA_SHADES[first], _ALPHA_SHADES[first + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - first)):02x}" for a, b in pair)


# -- corrections -------------------------------------------------------------------------------------------------------


def correction_errors(study: Study) -> Picture | None:
    """Each correction's mean error on a logarithmic axis, beside the paper's."""
    panels = []
    paper = _papers_errors(study)
    for truth in study.truths:
        of_truth = [result for result in study.results if result.truth == truth]
        models = list(dict.fromkeys(result.model for result in of_truth))
        ours = [mean_and_spread([result.mse for result in of_truth if result.model == model]) for model in models]
        bars = [Bars("ours", [mean for mean, _ in ours], "#0072b2", [std for _, std in ours])]
        if any(model in paper for model in models):
            theirs = [paper.get(model, (math.nan, 0.0)) for model in models]
            bars.append(Bars("paper", [mean for mean, _ in theirs], "#e69f00", [std for _, std in theirs]))
        panels.append(Panel(f"truth: {truth}", "mean squared error", "", rows=models, bars=bars, log_values=True))
    return _picture(
        "errors",
        "Error by correction",
        "The error that each correction ends with, on a logarithmic axis: mean over seeds, whiskers of one standard "
        "deviation" + (", beside the paper's." if paper else "."),
        panels,
        across=1,
    )


def _papers_errors(study: Study) -> dict[str, tuple[float, float]]:
    """Model → the paper's (mean, deviation), where the study's own table shows it: it does so for the paper's task."""
    shown = {model: text.split(" ± ") for model, text in CORRECTIONS.items() if text in study.table}
    return {model: (float(mean), float(std)) for model, (mean, std) in shown.items()}


def file_name(name: str) -> str:
    """A name with nothing in it that a path or an address reads in its own way."""
    return re.sub(r"[^\w.-]", "_", name)


def _picture(slug: str, title: str, sentence: str, panels: list[Panel], across: int = 3) -> Picture | None:
    return Picture(slug, title, sentence, panels, across) if panels else None
