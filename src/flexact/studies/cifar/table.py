"""table.md of a grid: one table per data set and model, with the paper's numbers next to ours, and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from flexact.io.markdown_tables import counted, markdown
from flexact.studies.cifar.methods import BASELINE, USUAL
from flexact.studies.cifar.protocol import Cell, Protocol, Result
from flexact.studies.cifar_data.data import NAMES
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.statistics import (
    Comparison,
    effects_table,
    explained,
    gain_and_p,
    paired,
    spread,
    step_costs,
)
from flexact.studies.grid.status import not_done, several_devices
from flexact.studies.grid.store import DONE

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
"""Accuracy in percent, its deviation, and the p-value of a paired t-test against ReLU, by data set, model and method.
The paper's AReLU row is `parametric`; the paper has no SPLASH row."""


@dataclass(frozen=True)
class Summary:
    """One method on one model and data set."""

    dataset: str
    model: str
    method: str
    accuracies: Mapping[int, float]
    """In percent, by seed."""
    against: Comparison | None
    """The comparison with ReLU; None for ReLU itself, and if no seed of ReLU is done."""


def summaries(done: Iterable[Result]) -> list[Summary]:
    """One summary for each data set, model and method, in a fixed order."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in sorted(done, key=lambda row: (in_order(row.dataset, row.model, row.method), row.seed)):
        found.setdefault((row.dataset, row.model, row.method), {})[row.seed] = row.accuracy
    summaries = []
    for (dataset, model, method), accuracies in found.items():
        relu = {} if method == BASELINE else found.get((dataset, model, BASELINE), {})
        summaries.append(Summary(dataset, model, method, accuracies, paired(accuracies, relu)))
    return summaries


def in_order(dataset: str, model: str, method: str = BASELINE) -> tuple[int, int, int, str]:
    """The sort key of tables and figures."""
    place = USUAL.index(method) if method in USUAL else len(USUAL)
    return NAMES.index(dataset), list(BLOCKS).index(model), place, method


TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "resnet18": "ResNet-18",
    "resnet34": "ResNet-34",
    "relu": "ReLU",
    "prelu": "PReLU",
    "swish_beta": "Swish-β",
    "affine": "aff({id, ReLU, tanh})",
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
    found = summaries(done)
    parts = [f"# CIFAR with ResNets, {counted(protocol.epochs, 'epoch')}", _explained(protocol)]
    notes, meaning = [], list[str]()
    for (dataset, model), group in groupby(found, key=lambda one: (one.dataset, one.model)):
        rows, place = list(group), f"{title(model)} on {title(dataset)}"
        parts.append(f"## {place}\n\n" + markdown(_HEADER, map(_row, rows)))
        if statistics := effects_table({title(one.method): one.against for one in rows}):
            parts.append(statistics)
            meaning = [explained(title(BASELINE))]
        for one in rows:
            if one.against is not None and one.against.why:
                notes.append(f"- no p-value for {title(one.method)}, {place}: {one.against.why}.")
    if notes:
        parts.append("\n".join(notes))
    parts += meaning
    if done:
        methods = dict.fromkeys([BASELINE, *(one.method for one in found)])
        parts.append(step_costs(done, list(methods), lambda row: f"{title(row.model)}, {title(row.dataset)}", title))
    return "\n\n".join([*parts, *several_devices(results), *not_done(results, asked)]) + "\n"


def _row(one: Summary) -> tuple[str, ...]:
    mean, deviation, p = CIFAR.get((one.dataset, one.model, one.method), (None, None, ""))
    paper = "-" if mean is None else f"{mean:.2f} ± {deviation:.2f}"
    accuracy = spread(one.accuracies)
    return title(one.method), str(len(one.accuracies)), accuracy, *gain_and_p(one.against), paper, p or "-"


def _explained(protocol: Protocol) -> str:
    budget = "as here" if protocol.epochs == CIFAR_EPOCHS else f"here {protocol.epochs}"
    return (
        "Accuracy of the extracted network on the test images, mean ± standard deviation over seeds. gain: in points "
        f"over ReLU on the same seeds; p: two-sided paired t-test against ReLU over those seeds. Flex-Act "
        f"picks from {', '.join(protocol.candidates or ())} (policy: {protocol.policy_and_changes}). The paper's "
        f"figures are from {CIFAR_EPOCHS} epochs ({budget}) and 10 runs, with its own five candidates."
    )
