"""How long a stage takes, from the times in a folder of results such as the repository's `results`."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flexact.studies.cifar.methods import BASELINE, FIXED
from flexact.studies.everything.stages import Stage
from flexact.studies.synthetic.options import alpha_of

IMAGE_STEPS = 50_000 // 128
"""Steps of an epoch of CIFAR."""
_EPOCHS = 100
"""Epochs of a synthetic study."""
_FILES = {
    "cifar": "cifar/steps.csv",
    "glue": "glue/cost/results.csv",
    "picks": "picks/results.csv",
    **dict.fromkeys(("synthetic", "alpha", "corrections"), "replicas.csv"),
}

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Estimate:
    """The time of a stage, one cell after the other."""

    hours: float
    """NaN if nothing comparable was measured."""
    device: str = ""
    """The device of the measurements."""
    note: str = ""


class Means(dict[Hashable, float]):
    """The mean of the values of each key. A key that was not measured counts as the largest mean."""

    def __init__(self, pairs: Iterable[tuple[Hashable, float]]) -> None:
        values: dict[Hashable, list[float]] = {}
        for key, value in pairs:
            values.setdefault(key, []).append(value)
        super().__init__({key: fmean(own) for key, own in values.items()})

    def __missing__(self, key: Hashable) -> float:
        return max(self.values())


def estimate(stage: Stage, results: Path, device: str) -> Estimate:
    """The time of a stage. device: the present one, whose measurements are preferred."""
    if stage.study == "overhead":
        return Estimate(math.nan, note="minutes on a GPU")
    if model := stage.settings.get("model"):
        return Estimate(math.nan, note=f"{model} was not measured")
    rows, measured_on = _rows(results / _FILES[stage.study], device)
    if not rows:
        return Estimate(math.nan, note="not measured")
    note = ""
    if stage.study == "cifar":
        overhead, _ = _rows(results / "overhead/overhead.csv", device)
        seconds, note = _images(stage, rows, overhead)
    elif stage.study == "glue":
        by_cell = Means(((row["task"], row["method"]), float(row["seconds"])) for row in rows)
        seconds, note = sum(by_cell[cell.task, cell.method] for cell in stage.cells), "measured with all-MiniLM-L6-v2"
    elif stage.study == "picks":
        seconds = _picks(stage, rows, _rows(results / "picks/times.csv", device)[0])
    else:
        by_model = Means((row["model"], float(row["together_s"]) / float(row["epochs"])) for row in rows)
        routed = [model for model in stage.cells if alpha_of(model) is not None or stage.study == "corrections"]
        alike = dict.fromkeys(routed, "flexact-a0.3")  # all that route take as long
        seconds = _EPOCHS * sum(by_model[model if model in by_model else alike.get(model)] for model in stage.cells)
    return Estimate(seconds / 3600, measured_on, note)


def _images(stage: Stage, rows: Rows, overhead: Rows) -> tuple[float, str]:
    """The seconds of a stage of CIFAR, and a note. overhead: the rows that compare the two ResNets."""
    # The picking steps are few, and a committed network is the rest of the run.
    by_method = Means((row["method"], float(row["step_ms"]) / 1000) for row in rows if row["stage"] != "picking")
    plain = {
        row["network"]: float(row["value"])
        for row in overhead
        if (row["way"], row["mode"], row["quantity"]) == (BASELINE, "graph", "train_ms")
    }
    factors = {"resnet34": plain["resnet34"] / plain["resnet18"] if plain.keys() >= {"resnet18", "resnet34"} else 2.0}
    seconds, absent = 0.0, set()
    for cell in stage.cells:
        kind = BASELINE if cell.method in FIXED and cell.method not in by_method else cell.method  # both run fused
        seconds += stage.settings["epochs"] * IMAGE_STEPS * by_method[kind] * factors.get(cell.model, 1.0)
        absent |= {kind} - by_method.keys()
    note = f"{', '.join(sorted(absent))} not measured; assumed as slow as the slowest method" if absent else ""
    return seconds, note


def _picks(stage: Stage, rows: Rows, alone: Rows) -> float:
    """The seconds of a stage of the benchmark of picks. alone: cells that did not share the device."""
    done = [row for row in rows if row["state"] == "done"]
    steps = Means(((row["task"], row["method"]), float(row["steps"])) for row in done)
    rates = Means((row["task"], float(row["seconds"]) / float(row["steps"])) for row in alone)
    shared: dict[str, list[float]] = {}
    for row in done:
        if float(row["seconds"]) > 0 and float(row["steps"]) > 0:
            shared.setdefault(row["task"], []).append(float(row["seconds"]) / float(row["steps"]))
    for task in shared.keys() - rates.keys():
        rates[task] = min(shared[task])  # the cell that shared the device least
    return sum(steps[cell.task, cell.method] * rates[cell.task] for cell in stage.cells)


def _rows(path: Path, device: str) -> tuple[Rows, str]:
    """The rows of a file from a device, or else from the device with the most rows; and that device."""
    if not path.is_file():
        return [], ""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    devices = Counter(row["device"] for row in rows)
    if devices and device not in devices:
        device = devices.most_common(1)[0][0]
    return [row for row in rows if row["device"] == device], device
