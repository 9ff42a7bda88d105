"""table.md of a grid: one table per data set and model, with the paper's numbers next to ours, and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexact.io.markdown_tables import counted, markdown
from flexact.studies.cifar.methods import BASELINE, USUAL
from flexact.studies.cifar.protocol import Cell, Protocol, Result
from flexact.studies.cifar_data.data import NAMES
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid import status
from flexact.studies.grid.statistics import (
    Comparison,
    by_method,
    effects_table,
    explained,
    gain_and_p,
    paired,
    spread,
    step_costs,
)
from flexact.studies.grid.study import DONE

CIFAR_EPOCHS = 200

_METHODS = ("relu", "prelu", "swish_beta", "affine", "parametric", "flexact-penultimate", "flexact-all")
_PLACES = (("cifar10", "resnet18"), ("cifar100", "resnet18"), ("cifar10", "resnet34"), ("cifar100", "resnet34"))
_MEANS = (
    (95.35, 94.94, 94.76, 94.65, 94.39, 95.52, 95.68),
    (77.72, 77.62, 77.38, 76.79, 76.92, 79.22, 79.29),
    (95.31, 94.95, 94.93, 94.72, 94.45, 95.48, 95.75),
    (78.62, 78.76, 78.72, 78.26, 77.96, 79.32, 79.42),
)
_DEVIATIONS = (
    (0.06, 0.51, 0.58, 0.05, 0.47, 0.05, 0.05),
    (0.11, 0.38, 0.46, 0.59, 0.11, 0.11, 0.11),
    (0.06, 0.57, 0.52, 0.50, 0.45, 0.05, 0.05),
    (0.11, 0.11, 0.11, 0.11, 0.11, 0.11, 0.11),
)
_P_VALUES = (
    ("", "0.154", "0.075", "<0.001", "0.009", "0.012", "<0.001"),
    ("", "0.643", "0.237", "0.019", "<0.001", "<0.001", "<0.001"),
    ("", "0.212", "0.193", "0.074", "0.013", "0.018", "<0.001"),
    ("", "0.312", "0.469", "0.022", "<0.001", "<0.001", "<0.001"),
)
CIFAR: dict[tuple[str, str, str], tuple[float, float, str]] = {
    (*place, method): (mean, deviation, p)
    for place, means, deviations, p_values in zip(_PLACES, _MEANS, _DEVIATIONS, _P_VALUES, strict=True)
    for method, mean, deviation, p in zip(_METHODS, means, deviations, p_values, strict=True)
}
"""Accuracy in percent, its standard deviation, and the p-value of a paired t-test against ReLU, by data set, model and
method. The paper's AReLU row is `parametric`; the paper has no SPLASH row."""


def in_order(dataset: str, model: str) -> tuple[int, int]:
    """The sort key of the parts of tables and figures."""
    return NAMES.index(dataset), list(BLOCKS).index(model)


def _place(method: str) -> tuple[int, str]:
    """The sort key of the rows of a table."""
    return USUAL.index(method) if method in USUAL else len(USUAL), method


TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "resnet18": "ResNet-18",
    "resnet34": "ResNet-34",
    "relu": "ReLU",
    "prelu": "PReLU",
    "swish_beta": "Swish-β",
    "affine": "aff({id, ReLU, tanh})",
    "convex": "conv({id, ReLU, tanh})",
    "parametric": "parametric ReLU (AReLU)",
    "splash": "SPLASH",
    "deu": "DEU",
    "gelu": "GELU",
    "silu": "SiLU",
    "mish": "Mish",
    "flexact-penultimate": "Flex-Act (penultimate)",
    "flexact-all": "Flex-Act (all layers)",
}
_HEADER = ("method", "seeds", "accuracy in %", "gain", "p", "paper's accuracy", "paper's p")


def title(name: str) -> str:
    """The name of a data set, model or method for readers."""
    return TITLES.get(name, name)


def table(results: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """The table in Markdown, with a list of the cells that are not done."""
    done = [row for row in results if row.state == DONE]
    parts = [f"# CIFAR with ResNets, {counted(protocol.epochs, 'epoch')}", _explained(protocol)]
    methods, notes, meaning = [BASELINE], [], list[str]()
    for dataset, model in sorted({(row.dataset, row.model) for row in done}, key=lambda both: in_order(*both)):
        rows = by_method(row for row in done if (row.dataset, row.model) == (dataset, model))
        found = {
            method: {seed: row.accuracy for seed, row in rows[method].items()} for method in sorted(rows, key=_place)
        }
        methods += found
        relu = found.get(BASELINE, {})
        against = {method: None if method == BASELINE else paired(own, relu) for method, own in found.items()}
        place = f"{title(model)} on {title(dataset)}"
        lines = [_row(dataset, model, method, own, against[method]) for method, own in found.items()]
        parts.append(f"## {place}\n\n" + markdown(_HEADER, lines))
        if statistics := effects_table({title(method): one for method, one in against.items()}):
            parts.append(statistics)
            meaning = [explained(title(BASELINE))]
        for method, one in against.items():
            if one is not None and one.why:
                notes.append(f"- no p-value for {title(method)}, {place}: {one.why}.")
    if notes:
        parts.append("\n".join(notes))
    parts += meaning
    if done:
        methods = list(dict.fromkeys(methods))
        parts.append(step_costs(done, methods, lambda row: f"{title(row.model)}, {title(row.dataset)}", title))
    return "\n\n".join([*parts, *status.notes(results, asked)]) + "\n"


def _row(
    dataset: str, model: str, method: str, accuracies: Mapping[int, float], against: Comparison | None
) -> tuple[str, ...]:
    mean, deviation, p = CIFAR.get((dataset, model, method), (None, None, ""))
    paper = "-" if mean is None else f"{mean:.2f} ± {deviation:.2f}"
    return title(method), str(len(accuracies)), spread(accuracies), *gain_and_p(against), paper, p or "-"


def _explained(protocol: Protocol) -> str:
    budget = "as here" if protocol.epochs == CIFAR_EPOCHS else f"here {protocol.epochs}"
    return (
        "Accuracy of the extracted network on the test images, mean ± standard deviation over seeds. gain: in points "
        f"over ReLU on the same seeds; p: two-sided paired t-test against ReLU over those seeds. Flex-Act "
        f"picks from {', '.join(protocol.candidates or ())} (policy: {protocol.policy_and_changes}). The paper's "
        f"figures are from {CIFAR_EPOCHS} epochs ({budget}) and 10 runs, with its own five candidates."
    )
