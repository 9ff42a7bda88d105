"""table.md of the synthetic studies, from the rows of results.csv, next to the paper's where they are comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

from flexact.config import PAPER_CANDIDATES
from flexact.io.markdown_tables import PAPERS_ROW, counted, markdown
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.synthetic.options import Options, alpha_of, learned, policy
from flexact.studies.synthetic.replicas import FALLING_FROM, LEARNING_RATE
from flexact.studies.synthetic.store import Result

_ROWS = {
    "flexact-a0.3": ("0.0001 ± 0.0002", "0.0011 ± 0.0006", "0.0001 ± 0.0002", "0.0001 ± 0.0002", "0.0000 ± 0.0000"),
    "flexact-a0": ("0.0001 ± 0.0001", "0.0059 ± 0.0073", "0.0021 ± 0.0028", "0.0001 ± 0.0002", "0.0000 ± 0.0000"),
    "relu": ("0.0000 ± 0.0000", "0.0059 ± 0.0072", "0.4328 ± 0.4287", "0.0004 ± 0.0007", "4.1675 ± 6.7199"),
    "sigmoid": ("2.1360 ± 3.9912", "0.0000 ± 0.0000", "0.4020 ± 0.4536", "2.1365 ± 3.9910", "6.3056 ± 6.5772"),
    "tanh": ("2.2941 ± 3.9616", "0.0141 ± 0.0119", "0.0000 ± 0.0000", "2.2909 ± 3.9623", "4.2737 ± 4.7666"),
    "leaky_relu": ("0.0004 ± 0.0007", "0.0059 ± 0.0072", "0.4286 ± 0.4227", "0.0000 ± 0.0000", "4.0787 ± 6.5640"),
    "identity": ("0.5209 ± 0.4659", "0.0078 ± 0.0061", "0.0985 ± 0.0798", "0.5105 ± 0.4566", "0.0000 ± 0.0000"),
}
SYNTHETIC = {model: dict(zip(PAPER_CANDIDATES, row, strict=True)) for model, row in _ROWS.items()}
"""Table 1 (tab:mse_results): by model, then by truth; ± is the spread over the grid."""

VARIANTS: dict[str, tuple[str, str]] = {
    "flexact-a0": ("0.00600", "diffuse (ReLU + LeakyReLU)"),
    "flexact-a0.1": ("0.00160", "Sigmoid"),
    "flexact-a0.2": ("0.00070", "Sigmoid"),
    "flexact-a0.3": ("0.00030", "Sigmoid"),
    **{f"flexact-a{tenths / 10:g}": ("0.00020", "Sigmoid") for tenths in range(4, 11)},
    "none": ("0.00590 ± 0.00000", ""),
    "clip_logit_gradient": ("0.00590 ± 0.00000", ""),
    "clipped_norm_kl": ("0.04235 ± 0.00078", ""),
    "output_norm": ("0.35629 ± 0.00938", ""),
    "grad_norm_kl": ("0.00110 ± 0.00060", ""),
}
"""The sweep of α (tab:alpha_sweep) and the ablation of corrections (tab:sigmoid_mse; ± is the deviation over runs), on
the Sigmoid truth: error and selection by model."""


def synthetic_row(model: str, options: Options) -> dict[str, str]:
    """Return the paper's errors of a model by truth. Empty if they are not comparable."""
    comparable = _same_task(options) if alpha_of(model) is None else _same_policy(options)
    row = SYNTHETIC.get(model, {}) if comparable else {}
    return {truth: row[truth] for truth in options.truths if truth in row}


def variants(options: Options) -> Mapping[str, tuple[str, str]]:
    """Return the paper's rows of the sweep and the ablation. Empty if they are not comparable."""
    return VARIANTS if options.truths == ("sigmoid",) and _same_policy(options) else {}


def _same_task(options: Options) -> bool:
    names = ("epochs", "slope", "label_noise", "distractors", "target_scale", "hidden")
    return all(getattr(options, name) == getattr(Options, name) for name in names)


def _same_policy(options: Options) -> bool:
    """Return whether Flex-Act runs an interpretation of the paper's policy, with its candidates, on its task."""
    same_candidates = set(options.candidates) == set(PAPER_CANDIDATES)
    return _same_task(options) and same_candidates and options.policy in ("paper", "literal")


def table(title: str, options: Options, results: Sequence[Result]) -> str:
    """Return table.md: if there are several truths, the errors of all models; and what each model picked."""
    parts, models = [f"# {title}"], list(options.models)
    if len(options.truths) > 1:
        parts += _errors(options, results)
        models = [model for model in models if policy(model, options) is not None]
    if models:
        parts += ["## Picks", _picks(models, options, results)]
        parts.append(f"Mean ± standard deviation over {counted(options.seeds, 'seed')}; probability: that of the pick.")
    return "\n\n".join(parts) + "\n"


def _errors(options: Options, results: Sequence[Result]) -> list[str]:
    """Return the errors of all models by truth, and how often each truth was picked."""
    rows = []
    for model in options.models:
        cells = [_of(results, model, truth) for truth in options.truths]
        errors = [f"{fmean(row.mse for row in cell):.4f} ± {fmean(row.spread for row in cell):.4f}" for cell in cells]
        right = "" if policy(model, options) is None else _right(_of(results, model))
        rows.append([model, *errors, right, str(learned(model, options))])
        paper = synthetic_row(model, options)
        if paper:
            rows.append([PAPERS_ROW, *(paper.get(truth, "") for truth in options.truths), "", ""])
    where = "on the inputs" if options.hidden else "on the grid over x₁ in [−1, 1]"
    about = (
        f"Mean squared error against the noise-free truth {where}: the mean over {counted(options.seeds, 'seed')}, ± "
        "the spread of the squared error there, as the paper prints it. learned: the parameters that the activation "
        "learns besides the unit's weights; those of kan, a Kolmogorov-Arnold layer, replace the unit's weights. "
        f"The models that pick train with Adam at {LEARNING_RATE:g}; the fixed activations and the baselines at "
        f"{FALLING_FROM * LEARNING_RATE:g}, falling linearly to 0, so that each reaches its minimum error."
    )
    return [about, markdown(["model", *options.truths, "right picks", "learned"], rows)]


def _picks(models: Sequence[str], options: Options, results: Sequence[Result]) -> str:
    """Return the error and the picks of each model and truth, without the paper's columns if they are empty."""
    rows, papers = [], variants(options)
    for model, truth in product(models, options.truths):
        own = _of(results, model, truth)
        rows.append(
            {
                "model": model,
                "truth": truth,
                "MSE": "{:.5f} ± {:.5f}".format(*mean_and_deviation([row.mse for row in own])),
                "paper's": papers.get(model, ("", ""))[0],
                "picked": ", ".join(f"{pick} {n}" for pick, n in Counter(row.pick for row in own).most_common()),
                "paper's pick": papers.get(model, ("", ""))[1],
                "probability": f"{mean_and_deviation([row.probability for row in own])[0]:.2f}",
                "right picks": _right(own),
            }
        )
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    return markdown(shown, [[row[name] for name in shown] for row in rows])


def _of(results: Sequence[Result], model: str, truth: str | None = None) -> list[Result]:
    """Return a model's rows, for one truth or for all."""
    return [row for row in results if row.model == model and truth in (None, row.truth)]


def _right(rows: Sequence[Result]) -> str:
    """Return how many picks are the truth, as "20/20"."""
    return f"{sum(row.pick == row.truth for row in rows)}/{len(rows)}"
