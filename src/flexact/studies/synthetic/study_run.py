"""The run in a synthetic study's folder, arranged for its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.store import Result, read_options, read_parts


@dataclass(frozen=True)
class Curve:
    """What a model predicts over the grid of x₁, and what it should."""

    x: list[float]
    prediction: list[float]
    target: list[float]


@dataclass(frozen=True)
class StudyRun:
    """The finished models of a study's folder."""

    name: str
    options: Options
    models: list[str]
    results: list[Result]
    history: dict[tuple[str, str], dict[str, dict[int, list[float]]]]
    """(model, truth) → candidate → epoch → the probabilities of all seeds."""
    curves: dict[tuple[str, str], Curve]
    """(model, truth) → curve."""

    def errors(self, model: str, truth: str) -> list[float]:
        """The error of each seed."""
        return [row.mse for row in self.results if (row.model, row.truth) == (model, truth)]


def read_run(folder: Path, config: dict[str, Any]) -> StudyRun:
    """The run that a study's config.json lies beside; figures do without a missing history.csv or curves.csv."""
    options = read_options(folder, config)
    parts = read_parts(folder, config["study"], options)
    history: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}
    curves: dict[tuple[str, str], Curve] = {}
    for part in parts.values():
        for moment in part.history:
            of_candidate = history.setdefault((moment.model, moment.truth), {}).setdefault(moment.candidate, {})
            of_candidate.setdefault(moment.epoch, []).append(moment.probability)
        for point in part.curves:
            curve = curves.setdefault((point.model, point.truth), Curve([], [], []))
            curve.x.append(point.x1)
            curve.prediction.append(point.prediction)
            curve.target.append(point.target)
    results = [row for part in parts.values() for row in part.results]
    return StudyRun(config["study"], options, list(parts), results, history, curves)
