"""The appendix's sweep of α: from no correction to a strong one, for the Sigmoid truth."""

from __future__ import annotations

from flexact.studies import paper_tables, tables
from flexact.studies.averages import mean_and_deviation
from flexact.studies.names import canonical, title
from flexact.studies.options import Options
from flexact.studies.runner import Study
from flexact.studies.store import Result


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(canonical(f"flexact-a{tenths / 10}") for tenths in range(11))


def _table(options: Options, results: list[Result]) -> str:
    parts = ["# The weight of the correction, α"]
    for truth in options.truths:
        paper = {model: paper_tables.alpha_cell(model, truth, options) for model in options.models}
        compared = any(paper.values())
        rows = []
        for model in options.models:
            cell = tables.of(results, model, truth)
            error, deviation = mean_and_deviation([1e4 * row.mse for row in cell])
            probability, _ = mean_and_deviation([row.probability for row in cell])
            theirs = paper[model]
            row = [model.removeprefix("flexact-a"), f"{error:.2f} ± {deviation:.2f}"]
            row += [f"{1e4 * theirs[0]:.1f}" if theirs else ""] if compared else []
            row += [tables.picks(cell)]
            row += [theirs[1] if theirs else ""] if compared else []
            rows.append([*row, f"{probability:.2f}", tables.right(cell)])
        header = ["α", "MSE (×10⁻⁴)", "paper's", "picked", "paper's pick", "probability", "right picks"]
        if not compared:
            header = [name for name in header if not name.startswith("paper's")]
        parts += [f"## Truth: {title(truth)}", tables.markdown(header, rows)]
    parts.append(f"Mean ± standard deviation over {tables.seeds(options)}; the probability is that of the pick.")
    return "\n\n".join(parts) + "\n"


ALPHA = Study(
    name="alpha",
    title="The weight of the correction: the paper's sweep of α",
    seeds=3,
    truths=("sigmoid",),
    models=_models,
    table=_table,
)
