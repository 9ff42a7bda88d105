"""The finished models in a synthetic study's folder, arranged for figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.store import Point, Result, read_options, read_parts


@dataclass(frozen=True)
class StudyRun:
    """The finished models of one run."""

    options: Options
    models: list[str]
    results: list[Result]
    history: dict[tuple[str, str], dict[str, dict[int, list[float]]]]
    """(model, truth) → candidate → epoch → the probabilities of all seeds."""
    curves: dict[tuple[str, str], list[Point]]
    """(model, truth) → points of the predicted curve."""

    def errors(self, model: str, truth: str) -> list[float]:
        """Return the error of each seed."""
        return [row.mse for row in self.results if (row.model, row.truth) == (model, truth)]


def read_run(folder: Path, config: dict[str, Any]) -> StudyRun:
    """Read a study's folder, whose history.csv and curves.csv may be missing."""
    options = read_options(folder, config)
    parts = read_parts(folder, config["study"], options)
    run = StudyRun(options, list(parts), [row for part in parts.values() for row in part.results], {}, {})
    for part in parts.values():
        for moment in part.history:
            by_epoch = run.history.setdefault((moment.model, moment.truth), {}).setdefault(moment.candidate, {})
            by_epoch.setdefault(moment.epoch, []).append(moment.probability)
        for point in part.curves:
            run.curves.setdefault((point.model, point.truth), []).append(point)
    return run
