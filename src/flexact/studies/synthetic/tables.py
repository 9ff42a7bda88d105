"""table.md of each synthetic study, from the rows of results.csv, next to the paper's where they are comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from flexact.config import PAPER_CANDIDATES
from flexact.io.markdown_tables import PAPERS_ROW, counted, markdown
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.synthetic.models import learned, policy, rate_text
from flexact.studies.synthetic.options import Options, alpha_of, title
from flexact.studies.synthetic.replicas import Task
from flexact.studies.synthetic.store import Result

EPOCHS = 100
"""Epochs in the paper."""

_MSE_ROWS = {
    "flexact-a0.3": ("0.0001 ± 0.0002", "0.0011 ± 0.0006", "0.0001 ± 0.0002", "0.0001 ± 0.0002", "0.0000 ± 0.0000"),
    "flexact-a0": ("0.0001 ± 0.0001", "0.0059 ± 0.0073", "0.0021 ± 0.0028", "0.0001 ± 0.0002", "0.0000 ± 0.0000"),
    "relu": ("0.0000 ± 0.0000", "0.0059 ± 0.0072", "0.4328 ± 0.4287", "0.0004 ± 0.0007", "4.1675 ± 6.7199"),
    "sigmoid": ("2.1360 ± 3.9912", "0.0000 ± 0.0000", "0.4020 ± 0.4536", "2.1365 ± 3.9910", "6.3056 ± 6.5772"),
    "tanh": ("2.2941 ± 3.9616", "0.0141 ± 0.0119", "0.0000 ± 0.0000", "2.2909 ± 3.9623", "4.2737 ± 4.7666"),
    "leaky_relu": ("0.0004 ± 0.0007", "0.0059 ± 0.0072", "0.4286 ± 0.4227", "0.0000 ± 0.0000", "4.0787 ± 6.5640"),
    "identity": ("0.5209 ± 0.4659", "0.0078 ± 0.0061", "0.0985 ± 0.0798", "0.5105 ± 0.4566", "0.0000 ± 0.0000"),
}

SYNTHETIC: dict[str, dict[str, str]] = {
    model: dict(zip(PAPER_CANDIDATES, row, strict=True)) for model, row in _MSE_ROWS.items()
}
"""Table 1 (tab:mse_results): by model, then by truth; ± is the spread over the grid."""

ALPHA: dict[float, tuple[float, str]] = {
    0.0: (60.0e-4, "diffuse (ReLU + LeakyReLU)"),
    0.1: (16.0e-4, "Sigmoid"),
    0.2: (7.0e-4, "Sigmoid"),
    0.3: (3.0e-4, "Sigmoid"),
    **{tenths / 10: (2.0e-4, "Sigmoid") for tenths in range(4, 11)},
}
"""The appendix's sweep (tab:alpha_sweep): the error and the selection by α, for the Sigmoid truth."""

CORRECTIONS: dict[str, tuple[float, float]] = {
    "none": (0.00590, 0.00000),
    "clip_logit_gradient": (0.00590, 0.00000),
    "clipped_norm_kl": (0.04235, 0.00078),
    "output_norm": (0.35629, 0.00938),
    "grad_norm_kl": (0.00110, 0.00060),
}
"""The ablation of corrections (tab:sigmoid_mse): mean and deviation over runs, for the Sigmoid truth."""


def synthetic_row(model: str, options: Options) -> dict[str, str]:
    """Return the paper's errors of a model by truth. Empty if they are not comparable."""
    picks = alpha_of(model) is not None
    same = _same_policy(options) if picks else _same_task(options)
    row = SYNTHETIC.get(model, {}) if same else {}
    return {truth: row[truth] for truth in options.truths if truth in row}


def alpha_cell(model: str, truth: str, options: Options) -> tuple[float, str] | None:
    """Return the sweep's error and selection at a model's α. None if the paper has no comparable value."""
    alpha = alpha_of(model)
    return ALPHA.get(alpha) if alpha is not None and truth == "sigmoid" and _same_policy(options) else None


def correction_error(model: str, truth: str, options: Options) -> tuple[float, float] | None:
    """Return the paper's mean and deviation for a correction. None if the paper has no comparable value."""
    return CORRECTIONS.get(model) if truth == "sigmoid" and _same_policy(options) else None


def _same_task(options: Options) -> bool:
    return options.task == Task() and options.epochs == EPOCHS


def _same_policy(options: Options) -> bool:
    """Return whether Flex-Act runs a reading of the paper's policy with the same candidates on the same task."""
    same_candidates = set(options.candidates) == set(PAPER_CANDIDATES)
    return _same_task(options) and same_candidates and options.policy in ("paper", "literal")


def regression_table(options: Options, results: list[Result]) -> str:
    """Return the errors of all models by truth, and how often each truth was picked."""
    routed = [model for model in options.models if policy(model, options) is not None]
    rows = []
    for model in options.models:
        errors = [_error_and_spread(_of(results, model, truth)) for truth in options.truths]
        right = _right(_of(results, model)) if model in routed else ""
        rows.append([model, *errors, right, str(learned(model, options))])
        paper = synthetic_row(model, options)
        if paper:
            rows.append([PAPERS_ROW, *(paper.get(truth, "") for truth in options.truths), "", ""])
    where = "on the inputs" if options.hidden else "on the grid over x₁ in [−1, 1]"
    about = (
        f"Mean squared error against the noise-free truth {where}: the mean over {counted(options.seeds, 'seed')}, ± "
        "the spread of the squared error there, as the paper prints it. learned: the parameters that the activation "
        "learns besides the unit's weights; those of kan, a Kolmogorov-Arnold layer, replace the unit's weights."
    )
    errors_table = markdown(["model", *map(title, options.truths), "right picks", "learned"], rows)
    parts = ["# Synthetic regression", about, errors_table, *_rates(options)]
    cells = {(model, truth): _of(results, model, truth) for model in routed for truth in options.truths}
    picks = [
        [model, title(truth), _right(cell), _picks(cell), f"{max(row.mse for row in cell):.5f}"]
        for (model, truth), cell in cells.items()
    ]
    if picks:
        header = ["model", "truth", "right picks", "picked", "largest error"]
        parts += ["## Picks", markdown(header, picks)]
    return "\n\n".join(parts) + "\n"


def _error_and_spread(cell: list[Result]) -> str:
    mean, _ = mean_and_deviation([row.mse for row in cell])
    spread, _ = mean_and_deviation([row.spread for row in cell])
    return f"{mean:.4f} ± {spread:.4f}"


def _rates(options: Options) -> list[str]:
    """Return a note if the models are trained at different learning rates."""
    rates = {policy(model, options) is not None: rate_text(model, options) for model in options.models}
    if len(rates) < 2:
        return []
    return [
        f"The Flex-Act models train with Adam at {rates[True]}; the fixed activations and the baselines at "
        f"{rates[False]}, so that each reaches its minimum error."
    ]


def alpha_table(options: Options, results: list[Result]) -> str:
    """Return error, pick and probability by α."""

    def row(model: str, truth: str, own: list[Result]) -> dict[str, str]:
        paper = alpha_cell(model, truth, options)
        return {
            "α": model.removeprefix("flexact-a"),
            "MSE (×10⁻⁴)": _mean_error(own, 1e4, 2),
            "paper's": f"{1e4 * paper[0]:.1f}" if paper else "",
            "picked": _picks(own),
            "paper's pick": paper[1] if paper else "",
            "probability": f"{mean_and_deviation([one.probability for one in own])[0]:.2f}",
            "right picks": _right(own),
        }

    return _variants("The weight of the correction, α", row, "; the probability is that of the pick.", options, results)


def corrections_table(options: Options, results: list[Result]) -> str:
    """Return error and pick by correction."""

    def row(model: str, truth: str, own: list[Result]) -> dict[str, str]:
        paper = correction_error(model, truth, options)
        return {
            "correction": title(model),
            "MSE": _mean_error(own, 1, 5),
            "paper's": "{:.5f} ± {:.5f}".format(*paper) if paper else "",
            "picked": _picks(own),
            "right picks": _right(own),
        }

    return _variants("Corrections of the routing", row, ".", options, results)


def _variants(
    heading: str,
    row: Callable[[str, str, list[Result]], dict[str, str]],
    note: str,
    options: Options,
    results: list[Result],
) -> str:
    """Return one table per truth, without the paper's columns where it has no number for any row."""
    parts = [f"# {heading}"]
    for truth in options.truths:
        rows = [row(model, truth, _of(results, model, truth)) for model in options.models]
        shown = [name for name in rows[0] if not name.startswith("paper's") or any(one[name] for one in rows)]
        parts += [f"## Truth: {title(truth)}", markdown(shown, [[one[name] for name in shown] for one in rows])]
    parts.append(f"Mean ± standard deviation over {counted(options.seeds, 'seed')}{note}")
    return "\n\n".join(parts) + "\n"


def _mean_error(rows: list[Result], scale: float, digits: int) -> str:
    mean, deviation = mean_and_deviation([scale * row.mse for row in rows])
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def _of(results: list[Result], model: str, truth: str | None = None) -> list[Result]:
    """Return a model's rows, for one truth or for all."""
    return [row for row in results if row.model == model and truth in (None, row.truth)]


def _right(rows: list[Result]) -> str:
    """Return how many picks are the truth, as "20/20"."""
    return f"{sum(row.pick == row.truth for row in rows)}/{len(rows)}"


def _picks(rows: list[Result]) -> str:
    """Return the picks, the most frequent first, as "relu 3, leaky_relu 2"."""
    return ", ".join(f"{pick} {count}" for pick, count in Counter(row.pick for row in rows).most_common())
