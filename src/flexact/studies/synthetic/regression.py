"""The paper's first table: which activation made the data, found by Flex-Act, and missed by the fixed ones."""

from __future__ import annotations

from flexact.baselines import BASELINES
from flexact.config import PAPER_CANDIDATES
from flexact.io import markdown_tables as tables
from flexact.observe.figures.description import INK, Line, Panel, candidate_dash
from flexact.observe.figures.picture import Picture
from flexact.report.page import file_name, picture
from flexact.studies.averages import mean_and_deviation
from flexact.studies.synthetic import counts
from flexact.studies.synthetic.models import policy, told_rate
from flexact.studies.synthetic.names import DEFAULT, title
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.panels import HOW_TO_READ, probability_panel, run_colours
from flexact.studies.synthetic.paper import synthetic_row
from flexact.studies.synthetic.runner import Study
from flexact.studies.synthetic.store import Result
from flexact.studies.synthetic.study_run import StudyRun


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return (DEFAULT, "flexact-a0.3", "flexact-a0", *candidates, *BASELINES)


def _table(options: Options, results: list[Result]) -> str:
    return "\n\n".join(["# Synthetic regression", _errors(options, results), *_picks(options, results)]) + "\n"


def _errors(options: Options, results: list[Result]) -> str:
    rows = []
    for model in options.models:
        ours = [counts.of(results, model, truth) for truth in options.truths]
        found = counts.right(counts.of(results, model)) if policy(model, options) is not None else ""
        rows.append([model, *map(_error, ours), found])
        paper = synthetic_row(model, options)
        if paper:
            rows.append([tables.PAPERS_ROW, *(paper.get(truth, "") for truth in options.truths), ""])
    header = ["model", *map(title, options.truths), "right picks"]
    where = "on the inputs" if options.hidden else "on the grid over x₁ in [−1, 1]"
    return (
        f"Mean squared error against the noise-free truth {where}: the mean over {counts.seeds(options)}, ± the spread "
        f"of the squared error there, as the paper prints it.\n\n{tables.markdown(header, rows)}{_rates(options)}"
    )


def _error(cell: list[Result]) -> str:
    mean, _ = mean_and_deviation([row.mse for row in cell])
    spread, _ = mean_and_deviation([row.spread for row in cell])
    return f"{mean:.4f} ± {spread:.4f}"


def _rates(options: Options) -> str:
    """That not all models are trained at one learning rate, where that is so."""
    rates = {policy(model, options) is not None: told_rate(model, options) for model in options.models}
    if len(rates) < 2:
        return ""
    return (
        f"\n\nThe Flex-Act models train with Adam at {rates[True]}; the fixed activations and the baselines at "
        f"{rates[False]}, so that each comes to its least error."
    )


def _picks(options: Options, results: list[Result]) -> list[str]:
    routed = [model for model in options.models if policy(model, options) is not None]
    if not routed:
        return []
    rows = []
    for model in routed:
        for truth in options.truths:
            cell = counts.of(results, model, truth)
            worst = max(row.mse for row in cell)
            rows.append([model, title(truth), counts.right(cell), counts.picks(cell), f"{worst:.5f}"])
    return ["## Picks", tables.markdown(["model", "truth", "right picks", "picked", "largest error"], rows)]


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


SYNTHETIC = Study(
    name="synthetic",
    title="Synthetic regression: the paper's first table",
    question="Which activation made the data?",
    seeds=5,
    truths=PAPER_CANDIDATES,
    models=_models,
    table=_table,
    pictures=pictures,
)
