"""The ablation of corrections: what straightens the routing, and what does not, for the Sigmoid truth."""

from __future__ import annotations

from flexact.studies import paper_tables, tables
from flexact.studies.options import Options
from flexact.studies.runner import Study
from flexact.studies.store import Result

_NAMES = {
    "none": "no correction",
    "clip_logit_gradient": "logit-gradient clipping",
    "clipped_norm_kl": "KL from clipped norms",
    "output_norm": "output normalisation",
    "grad_norm_kl": "KL from gradient norms",
}


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_NAMES)


def _table(options: Options, results: list[Result]) -> str:
    parts = ["# Corrections of the routing"]
    for truth in options.truths:
        rows = []
        for model in options.models:
            cell = tables.of(results, model, truth)
            theirs = truth == "sigmoid" and options.is_papers_task
            rows.append(
                [
                    _NAMES.get(model, model),
                    f"{tables.mean(cell, lambda row: row.mse):.5f} ± {tables.deviation(cell):.5f}",
                    paper_tables.CORRECTIONS.get(model, "") if theirs else "",
                    tables.picks(cell),
                    tables.right(cell),
                ]
            )
        header = ["correction", "MSE", "paper's", "picked", "right picks"]
        parts += [f"## Truth: {tables.title(truth)}", tables.markdown(header, rows)]
    parts.append(f"Mean ± standard deviation over {tables.seeds(options)}.")
    return "\n\n".join(parts) + "\n"


CORRECTIONS = Study(
    name="corrections",
    title="Corrections of the routing: the paper's ablation",
    seeds=5,
    truths=("sigmoid",),
    models=_models,
    table=_table,
)
