"""The appendix's sweep of α: from no correction to a strong one, for the Sigmoid truth."""

from __future__ import annotations

from flexact.studies import paper_tables, tables
from flexact.studies.options import Options
from flexact.studies.runner import Study
from flexact.studies.store import Result


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"flexact-a{tenths / 10:.1f}" for tenths in range(11))


def _table(options: Options, results: list[Result]) -> str:
    parts = ["# The weight of the correction, α"]
    for truth in options.truths:
        rows = []
        for model in options.models:
            cell = tables.of(results, model, truth)
            error, selected = paper_tables.ALPHA.get(model, (None, ""))
            theirs = truth == "sigmoid" and options.is_papers_task and error is not None
            rows.append(
                [
                    model.removeprefix("flexact-a"),
                    f"{1e4 * tables.mean(cell, lambda row: row.mse):.2f} ± {1e4 * tables.deviation(cell):.2f}",
                    f"{1e4 * error:.1f}" if theirs and error is not None else "",
                    tables.picks(cell),
                    selected if theirs else "",
                    f"{tables.mean(cell, lambda row: row.probability):.2f}",
                    tables.right(cell),
                ]
            )
        header = ["α", "MSE (×10⁻⁴)", "paper's", "picked", "paper's pick", "probability", "right picks"]
        parts += [f"## Truth: {tables.title(truth)}", tables.markdown(header, rows)]
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
