"""table.md of a grid: one table per data set and model, with the paper's numbers next to ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from flexact.io.markdown_tables import counted, markdown
from flexact.studies.cifar.methods import BASELINE
from flexact.studies.cifar.paper import CIFAR, CIFAR_EPOCHS
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.statistics import Summary, summaries
from flexact.studies.cifar.study import Result
from flexact.studies.grid.effects import effect, effects_table, explained
from flexact.studies.grid.statistics import figure, gain_and_p, spread, times
from flexact.studies.grid.status import not_done, several_devices

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
        relu = next((one.accuracies for one in rows if one.method == BASELINE), {})
        others = {title(one.method): effect(one.accuracies, relu) for one in rows if one.method != BASELINE}
        if statistics := effects_table(others):
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
        "cost: time of a training step relative to ReLU's, median over epochs; none if cells shared a device."
        if timed
        else "Cells shared a device, so times are left out."
    )
    budget = "as here" if protocol.epochs == CIFAR_EPOCHS else f"here {protocol.epochs}"
    return (
        "Accuracy of the extracted network on the test images, mean ± standard deviation over seeds. gain: in points "
        f"over ReLU on the same seeds; p: two-sided paired t-test against ReLU over those seeds. {times} Flex-Act "
        f"picks from {', '.join(protocol.candidates or ())} (policy: {protocol.policy}). The paper's figures are from "
        f"{CIFAR_EPOCHS} epochs ({budget}) and 10 runs, with its own five candidates."
    )
