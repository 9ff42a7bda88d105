"""The appendix's sweep of α: from no correction to a strong one, for the Sigmoid truth."""

from __future__ import annotations

import math

from flexact.io import markdown_tables as tables
from flexact.observe.figures.description import INK, Grid, Line, Panel
from flexact.observe.figures.picture import Picture
from flexact.report.page import picture
from flexact.studies.averages import mean_and_deviation
from flexact.studies.synthetic import counts
from flexact.studies.synthetic.names import alpha_of, canonical, title
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.panels import final_probabilities, run_colours
from flexact.studies.synthetic.paper import alpha_cell
from flexact.studies.synthetic.runner import Study
from flexact.studies.synthetic.store import Result
from flexact.studies.synthetic.study_run import StudyRun


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(canonical(f"flexact-a{tenths / 10}") for tenths in range(11))


def _table(options: Options, results: list[Result]) -> str:
    parts = ["# The weight of the correction, α"]
    for truth in options.truths:
        paper = {model: alpha_cell(model, truth, options) for model in options.models}
        compared = any(paper.values())
        rows = []
        for model in options.models:
            cell = counts.of(results, model, truth)
            error, deviation = mean_and_deviation([1e4 * row.mse for row in cell])
            probability, _ = mean_and_deviation([row.probability for row in cell])
            theirs = paper[model]
            row = [model.removeprefix("flexact-a"), f"{error:.2f} ± {deviation:.2f}"]
            row += [f"{1e4 * theirs[0]:.1f}" if theirs else ""] if compared else []
            row += [counts.picks(cell)]
            row += [theirs[1] if theirs else ""] if compared else []
            rows.append([*row, f"{probability:.2f}", counts.right(cell)])
        header = ["α", "MSE (×10⁻⁴)", "paper's", "picked", "paper's pick", "probability", "right picks"]
        if not compared:
            header = [name for name in header if not name.startswith("paper's")]
        parts += [f"## Truth: {title(truth)}", tables.markdown(header, rows)]
    parts.append(f"Mean ± standard deviation over {counts.seeds(options)}; the probability is that of the pick.")
    return "\n\n".join(parts) + "\n"


GRID_ALPHAS = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)
"""The values of α that the paper's small-multiple grid shows."""

_SHADES = ((0x3B, 0x0F, 0x70), (0x3B, 0x52, 0x8B), (0x21, 0x91, 0x8C), (0x5E, 0xC9, 0x62), (0xC2, 0xCB, 0x1B))


def pictures(run: StudyRun) -> list[Picture | None]:
    return [overlaid_curves(run), error_by_alpha(run), probabilities_by_alpha(run), small_multiples(run)]


def alphas(run: StudyRun) -> dict[str, float]:
    """Model → α for the models that are named after theirs, α rising."""
    values = {model: alpha for model in run.models if (alpha := alpha_of(model)) is not None}
    return dict(sorted(values.items(), key=lambda item: item[1]))


def overlaid_curves(run: StudyRun) -> Picture | None:
    """The predicted curves of all α on one set of axes, for each truth."""
    panels = []
    for truth in run.options.truths:
        of_truth = {model: a for model, a in alphas(run).items() if (model, truth) in run.curves}
        lines = []
        for model, alpha in of_truth.items():
            curve = run.curves[model, truth]
            lines.append(Line(f"α = {alpha:g}", curve.x, curve.prediction, _colour(alpha, of_truth), width=2.0))
        if of_truth:
            lines.append(Line("truth", curve.x, curve.target, INK, "dash", 1.8))
            panels.append(Panel(f"truth: {truth}", "x₁", "output", lines))
    return picture(
        "curves",
        "Predicted curves for all α",
        "What is predicted over x₁ at each strength of the correction, as the mean over seeds; the dashed line is the "
        "true function.",
        panels,
        across=1,
    )


def error_by_alpha(run: StudyRun) -> Picture | None:
    """Mean error against α with its band, the least one starred."""
    where = "on the inputs" if run.options.hidden else "on the noise-free grid"
    panels = []
    for truth in run.options.truths:
        errors = {alpha: mean_and_deviation(run.errors(model, truth)) for model, alpha in alphas(run).items()}
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
    return picture(
        "error",
        "Error against α",
        f"The error {where} at each strength of the correction: mean over seeds, band of one standard deviation; the "
        "star is the least.",
        panels,
        across=1,
    )


def probabilities_by_alpha(run: StudyRun) -> Picture | None:
    """The last epoch's probabilities by α and candidate, for each truth."""
    candidates = run.options.candidates
    panels = []
    for truth in run.options.truths:
        rows = {a: final for model, a in alphas(run).items() if (final := final_probabilities(run, model, truth))}
        if rows:
            values = [[final.get(name, math.nan) for name in candidates] for final in rows.values()]
            names = [f"α = {alpha:g}" for alpha in rows]
            panels.append(Panel(f"truth: {truth}", "", "", rows=names, grid=Grid(candidates, values)))
    return picture(
        "probabilities",
        "Final probabilities by α",
        "The probability that each candidate has at the end of training, the mean over seeds, for each strength of the "
        "correction.",
        panels,
        across=1,
    )


def small_multiples(run: StudyRun) -> Picture | None:
    """Predicted curve against truth, α by α, with the final probabilities in the corner."""
    colours = run_colours(run)
    found = alphas(run)
    if set(GRID_ALPHAS) <= set(found.values()):
        found = {model: alpha for model, alpha in found.items() if alpha in GRID_ALPHAS}
    panels = []
    for truth in run.options.truths:
        for model, alpha in found.items():
            if (model, truth) not in run.curves:
                continue
            curve = run.curves[model, truth]
            lines = [
                Line("prediction", curve.x, curve.prediction, "#d55e00", width=2.4),
                Line("truth", curve.x, curve.target, INK, "dash", 1.6),
            ]
            bars = [(name, p, colours[name]) for name, p in final_probabilities(run, model, truth).items()]
            panels.append(Panel(f"α = {alpha:g}, truth: {truth}", "x₁", "output", lines, inset=bars))
    return picture(
        "grid",
        "Prediction and final probabilities, α by α",
        "The predicted curve, as the mean over seeds, against the true one (dashed); the bars in the corner are the "
        "final probabilities of the candidates.",
        panels,
    )


def _colour(alpha: float, all_alphas: dict[str, float]) -> str:
    low, high = min(all_alphas.values()), max(all_alphas.values())
    at = (alpha - low) / (high - low) * (len(_SHADES) - 1) if high > low else 0.0
    first = min(int(at), len(_SHADES) - 2)
    pair = zip(_SHADES[first], _SHADES[first + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - first)):02x}" for a, b in pair)


ALPHA = Study(
    name="alpha",
    title="The weight of the correction: the paper's sweep of α",
    question="How strong should the correction be?",
    seeds=3,
    truths=("sigmoid",),
    models=_models,
    table=_table,
    pictures=pictures,
)
