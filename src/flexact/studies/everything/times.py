"""How long the cells of a stage take, from the seconds per step that committed results contain."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flexact.studies.everything.stages import Stage
from flexact.studies.synthetic.options import DEFAULT, alpha_of

IMAGE_STEPS = 50_000 // 128
"""Steps of an epoch of CIFAR."""
_EPOCHS = 100
"""Epochs of a synthetic study."""

Row = dict[str, str]


@dataclass(frozen=True)
class Estimate:
    """The time of a stage, one cell after the other."""

    hours: float
    """NaN if nothing comparable was measured."""
    device: str
    """The device of the measurements."""
    note: str = ""


class Measured:
    """The measurements in a folder of results, such as the repository's `results`."""

    def __init__(self, results: Path, device: str) -> None:
        """device: the present one, whose measurements are preferred."""
        self._results, self._device = results, device

    def estimate(self, stage: Stage) -> Estimate:
        """The time of a stage. Cells of a kind that was not measured count as the slowest kind that was."""
        kinds: dict[str, Callable[[Stage], Estimate]] = {
            "cifar": self._images,
            "glue": self._text,
            "picks": self._picks,
            "overhead": lambda stage: Estimate(math.nan, "", "minutes on a GPU"),
        }
        return kinds.get(stage.study, self._synthetic)(stage)

    def _images(self, stage: Stage) -> Estimate:
        rows, device = self._rows("cifar/steps.csv")
        if not rows:
            return Estimate(math.nan, "", "not measured")
        # The picking steps are few, and a committed network is the rest of the run.
        by_method = {row["method"]: float(row["step_ms"]) for row in rows if row["stage"] != "picking"}
        slowest = max(by_method.values())
        learned = ("prelu", "swish_beta", "affine", "parametric", "splash", "deu")
        overhead, _ = self._rows("overhead/overhead.csv")
        plain = {
            row["network"]: float(row["value"])
            for row in overhead
            if (row["way"], row["mode"], row["quantity"]) == ("relu", "graph", "train_ms")
        }
        times = {name: value / plain["resnet18"] for name, value in plain.items()} if "resnet18" in plain else {}
        steps = stage.settings["epochs"] * IMAGE_STEPS
        seconds = 0.0
        for cell in stage.cells:
            usual = slowest if cell.method in learned else by_method["relu"]  # fixed activations run fused, as ReLU
            step = by_method.get(cell.method, usual) * times.get(cell.model, 2.0 if cell.model == "resnet34" else 1.0)
            seconds += steps * step / 1000
        absent = sorted({cell.method for cell in stage.cells if cell.method in learned} - set(by_method))
        note = f"{', '.join(absent)} not measured; assumed as slow as the slowest method" if absent else ""
        return Estimate(seconds / 3600, device, note)

    def _text(self, stage: Stage) -> Estimate:
        if stage.settings["model"]:
            return Estimate(math.nan, "", f"{stage.settings['model']} was not measured")
        alone, device = self._rows("glue/cost/results.csv")
        shared, _ = self._rows("glue/results.csv")
        by_cell = _means(((row["task"], row["method"]), float(row["seconds"])) for row in alone or shared)
        if not by_cell:
            return Estimate(math.nan, "", "not measured")
        slowest = max(by_cell.values())
        seconds = sum(by_cell.get((cell.task, cell.method), slowest) for cell in stage.cells)
        return Estimate(seconds / 3600, device, "measured with all-MiniLM-L6-v2")

    def _picks(self, stage: Stage) -> Estimate:
        rows, device = self._rows("picks/results.csv")
        alone, _ = self._rows("picks/times.csv")
        if not rows:
            return Estimate(math.nan, "", "not measured")
        steps = _means(((row["task"], row["method"]), float(row["steps"])) for row in rows if row["state"] == "done")
        rates = _means((row["task"], float(row["seconds"]) / float(row["steps"])) for row in alone)
        for row in rows:  # tasks that were not timed alone: their fastest cell, which shared the device least
            if row["state"] == "done" and float(row["steps"]) > 0 and row["task"] not in {one["task"] for one in alone}:
                rate = float(row["seconds"]) / float(row["steps"])
                rates[row["task"]] = min(rates.get(row["task"], math.inf), rate or math.inf)
        most = max(steps.values())
        seconds = sum(
            steps.get((cell.task, cell.method), most) * rates.get(cell.task, max(rates.values()))
            for cell in stage.cells
        )
        return Estimate(seconds / 3600, device)

    def _synthetic(self, stage: Stage) -> Estimate:
        rows, device = self._rows("replicas.csv")
        by_model = {row["model"]: float(row["together_s"]) / float(row["epochs"]) for row in rows}
        if not by_model:
            return Estimate(math.nan, "", "not measured")
        slowest = max(by_model.values())
        routed = by_model.get("flexact-a0.3", slowest)
        seconds = 0.0
        for model in stage.cells:
            picks = alpha_of(model) is not None or stage.study == "corrections" or model == DEFAULT
            seconds += _EPOCHS * by_model.get(model, routed if picks else slowest)
        return Estimate(seconds / 3600, device)

    def _rows(self, name: str) -> tuple[list[Row], str]:
        """The rows of a file from the present device, or from the device with the most rows; and that device."""
        path = self._results / name
        if not path.is_file():
            return [], ""
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        devices = Counter(row["device"] for row in rows)
        if not devices:
            return [], ""
        chosen = self._device if self._device in devices else devices.most_common(1)[0][0]
        return [row for row in rows if row["device"] == chosen], chosen


def total(estimates: Sequence[Estimate]) -> float:
    """The hours of all stages that have an estimate."""
    return math.fsum(one.hours for one in estimates if not math.isnan(one.hours))


def _means(pairs: Iterable[tuple[object, float]]) -> dict[object, float]:
    found: dict[object, list[float]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: fmean(values) for key, values in found.items()}
