"""table.md of a grid: one table per data set and model, with the paper's numbers next to ours."""

from __future__ import annotations

import math
from collections import Counter
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
    figure,
    gain_and_p,
    mean_and_deviation,
    paired,
    spread,
    times,
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
    device: str
    """The device of the times, the same for all methods of a model and data set; empty if nothing was timed."""
    step_ms: float
    """Training time per step of the final network, mean over seeds; NaN if it was not measured on that device."""
    against: Comparison | None
    """The comparison with ReLU; None for ReLU itself, and if no seed of ReLU is done."""
    cost: float
    """The time of a step relative to ReLU's; NaN if either is missing."""


def summaries(results: Iterable[Result]) -> list[Summary]:
    """One summary for each data set, model and method with a finished cell, in a fixed order."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for row in results:
        if row.state == DONE:
            groups.setdefault((row.dataset, row.model, row.method), []).append(row)
    return [_summary(key, groups) for key in sorted(groups, key=lambda key: in_order(*key))]


def in_order(dataset: str, model: str, method: str = BASELINE) -> tuple[int, int, int]:
    """The sort key of tables and figures."""
    place = USUAL.index(method) if method in USUAL else len(USUAL)
    return NAMES.index(dataset), list(BLOCKS).index(model), place


def _summary(key: tuple[str, str, str], groups: Mapping[tuple[str, str, str], list[Result]]) -> Summary:
    rows, baseline = groups[key], groups.get((*key[:2], BASELINE), [])
    device = _timed_on([row for other, its in groups.items() if other[:2] == key[:2] for row in its])
    accuracies = {row.seed: row.accuracy for row in sorted(rows, key=lambda row: row.seed)}
    comparison = None
    if key[2] != BASELINE:
        comparison = paired(accuracies, {row.seed: row.accuracy for row in baseline})
    step, reference = _step(rows, device), _step(baseline, device)
    cost = step / reference if reference > 0 else math.nan
    return Summary(*key, accuracies, device, step, comparison, cost)


def _timed_on(rows: list[Result]) -> str:
    """The device on which times are compared: the one with the most timings of ReLU, then with the most timings."""
    timed = [row for row in rows if math.isfinite(row.step_ms)]
    cells = Counter(row.device for row in timed)
    of_baseline = Counter(row.device for row in timed if row.method == BASELINE)
    return max(cells, key=lambda device: (of_baseline[device], cells[device]), default="")


def _step(rows: list[Result], device: str) -> float:
    times = [row.step_ms for row in rows if row.device == device and math.isfinite(row.step_ms)]
    return mean_and_deviation(times)[0] if times else math.nan


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
_HEADER = ("method", "seeds", "accuracy in %", "gain", "p", "ms per step", "cost", "paper's accuracy", "paper's p")
_TIMES = ("ms per step", "cost")


def title(name: str) -> str:
    """The name of a data set, model or method for readers."""
    return TITLES.get(name, name)


def table(results: Sequence[Result], protocol: Protocol, asked: Sequence[Cell]) -> str:
    """The table in Markdown, with a list of the cells that are not done."""
    found = summaries(results)
    timed = not found or any(math.isfinite(one.step_ms) for one in found)
    header = [name for name in _HEADER if timed or name not in _TIMES]
    parts = [f"# CIFAR with ResNets, {counted(protocol.epochs, 'epoch')}", _explained(protocol, timed)]
    notes, meaning = [], list[str]()
    for (dataset, model), group in groupby(found, key=lambda one: (one.dataset, one.model)):
        rows, place = list(group), f"{title(dataset)}, {title(model)}"
        lines = [[_row(one)[name] for name in header] for one in rows]
        parts.append(f"## {title(model)} on {title(dataset)}\n\n" + markdown(header, lines))
        if statistics := effects_table({title(one.method): one.against for one in rows}):
            parts.append(statistics)
            meaning = [explained(title(BASELINE))]
        devices = {row.device for row in results if (row.dataset, row.model) == (dataset, model)}
        if len(devices) > 1 and rows[0].device:
            notes.append(f"- times on {place} were measured on {rows[0].device} only.")
        for one in rows:
            if one.against is not None and one.against.why:
                notes.append(f"- no p-value for {title(one.method)} on {place}: {one.against.why}.")
    if notes:
        parts.append("\n".join(notes))
    parts += meaning + several_devices(results) + not_done(results, asked)
    return "\n\n".join(parts) + "\n"


def _row(one: Summary) -> dict[str, str]:
    """The cells of a line, by column."""
    paper = CIFAR.get((one.dataset, one.model, one.method))
    cells = (
        title(one.method),
        str(len(one.accuracies)),
        spread(one.accuracies),
        *gain_and_p(one.against),
        figure(one.step_ms),
        times(one.cost),
        "-" if paper is None else f"{paper[0]:.2f} ± {paper[1]:.2f}",
        "-" if paper is None or not paper[2] else paper[2],
    )
    return dict(zip(_HEADER, cells, strict=True))


def _explained(protocol: Protocol, timed: bool) -> str:
    times = (
        "cost: training time per step of the final network, with picking, relative to ReLU's; none if cells shared a "
        "device."
        if timed
        else "Cells shared a device, so times are left out."
    )
    budget = "as here" if protocol.epochs == CIFAR_EPOCHS else f"here {protocol.epochs}"
    return (
        "Accuracy of the extracted network on the test images, mean ± standard deviation over seeds. gain: in points "
        f"over ReLU on the same seeds; p: two-sided paired t-test against ReLU over those seeds. {times} Flex-Act "
        f"picks from {', '.join(protocol.candidates or ())} (policy: {protocol.policy_and_changes}). The paper's "
        f"figures are from {CIFAR_EPOCHS} epochs ({budget}) and 10 runs, with its own five candidates."
    )
