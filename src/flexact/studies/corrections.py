"""The ablation of corrections: what straightens the routing, and what does not, for the Sigmoid truth."""

from __future__ import annotations

from flexact.studies import paper_tables, tables
from flexact.studies.averages import mean_and_deviation
from flexact.studies.names import title
from flexact.studies.options import Options
from flexact.studies.runner import Study
from flexact.studies.store import Result


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(paper_tables.CORRECTIONS)


def _table(options: Options, results: list[Result]) -> str:
    parts = ["# Corrections of the routing"]
    for truth in options.truths:
        paper = {model: paper_tables.correction_error(model, truth, options) for model in options.models}
        compared = any(paper.values())
        rows = []
        for model in options.models:
            cell = tables.of(results, model, truth)
            theirs = paper[model]
            row = [title(model), _error(*mean_and_deviation([row.mse for row in cell]))]
            row += [_error(*theirs) if theirs else ""] if compared else []
            rows.append([*row, tables.picks(cell), tables.right(cell)])
        header = ["correction", "MSE", *(["paper's"] if compared else []), "picked", "right picks"]
        parts += [f"## Truth: {title(truth)}", tables.markdown(header, rows)]
    parts.append(f"Mean ± standard deviation over {tables.seeds(options)}.")
    return "\n\n".join(parts) + "\n"


def _error(mean: float, deviation: float) -> str:
    return f"{mean:.5f} ± {deviation:.5f}"


CORRECTIONS = Study(
    name="corrections",
    title="Corrections of the routing: the paper's ablation",
    seeds=5,
    truths=("sigmoid",),
    models=_models,
    table=_table,
)
