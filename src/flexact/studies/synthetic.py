"""The paper's first table: which activation made the data, found by Flex-Act, and missed by the fixed ones."""

from __future__ import annotations

from flexact.baselines import BASELINES
from flexact.config import PAPER_CANDIDATES
from flexact.studies import paper_tables, tables
from flexact.studies.averages import mean_and_deviation
from flexact.studies.models import policy, told_rate
from flexact.studies.names import DEFAULT, title
from flexact.studies.options import Options
from flexact.studies.runner import Study
from flexact.studies.store import Result


def _models(candidates: tuple[str, ...]) -> tuple[str, ...]:
    return (DEFAULT, "flexact-a0.3", "flexact-a0", *candidates, *BASELINES)


def _table(options: Options, results: list[Result]) -> str:
    return "\n\n".join(["# Synthetic regression", _errors(options, results), *_picks(options, results)]) + "\n"


def _errors(options: Options, results: list[Result]) -> str:
    rows = []
    for model in options.models:
        ours = [tables.of(results, model, truth) for truth in options.truths]
        found = tables.right(tables.of(results, model)) if policy(model, options) is not None else ""
        rows.append([model, *map(_error, ours), found])
        paper = paper_tables.synthetic_row(model, options)
        if paper:
            rows.append([tables.PAPERS_ROW, *(paper.get(truth, "") for truth in options.truths), ""])
    header = ["model", *map(title, options.truths), "right picks"]
    where = "on the inputs" if options.hidden else "on the grid over x₁ in [−1, 1]"
    return (
        f"Mean squared error against the noise-free truth {where}: the mean over {tables.seeds(options)}, ± the spread "
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
            cell = tables.of(results, model, truth)
            worst = max(row.mse for row in cell)
            rows.append([model, title(truth), tables.right(cell), tables.picks(cell), f"{worst:.5f}"])
    return ["## Picks", tables.markdown(["model", "truth", "right picks", "picked", "largest error"], rows)]


SYNTHETIC = Study(
    name="synthetic",
    title="Synthetic regression: the paper's first table",
    seeds=5,
    truths=PAPER_CANDIDATES,
    models=_models,
    table=_table,
)
