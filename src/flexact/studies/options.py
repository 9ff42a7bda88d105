"""What a synthetic study can be asked for, checked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flexact.candidates import lookup
from flexact.config import PAPER_CANDIDATES, FlexConfig
from flexact.errors import FlexActError, suggestion
from flexact.studies.replicas import Cell, Task

Policy = Literal["default", "paper", "literal"]
POLICIES: tuple[str, ...] = get_args(Policy)

MOST_SEEDS = 10_000
MOST_EPOCHS = 100_000


@dataclass(frozen=True)
class Options:
    """One study's questions: which models, against which truths, from which seeds, on which task.

    >>> Options(truths=("relu", "tanh"), seeds=2, first_seed=7).cells
    [Cell(truth='relu', seed=7), Cell(truth='relu', seed=8), Cell(truth='tanh', seed=7), Cell(truth='tanh', seed=8)]
    """

    seeds: int = 5
    first_seed: int = 0
    epochs: int = 100
    policy: str = "paper"
    truths: tuple[str, ...] = PAPER_CANDIDATES
    candidates: tuple[str, ...] = PAPER_CANDIDATES
    models: tuple[str, ...] = ()
    slope: float = 5.0
    label_noise: float = 0.0
    distractors: int = 3
    target_scale: float = 1.0
    hidden: int = 0

    def __post_init__(self) -> None:
        self._check_integer("seeds", 1, MOST_SEEDS)
        self._check_integer("first_seed", 0, 2**40)
        self._check_integer("epochs", 1, MOST_EPOCHS)
        self._check_integer("distractors", 0, 10_000)
        self._check_integer("hidden", 0, 10_000)
        self._check_number("label_noise", at_least=0)
        for name in ("slope", "target_scale"):
            self._check_number(name, at_least=-math.inf)
            if getattr(self, name) == 0:
                raise FlexActError(f"{_flag(name)} 0 leaves nothing to find; give a number other than 0.")
        if self.policy not in POLICIES:
            raise FlexActError(
                f"unknown policy {self.policy!r};{suggestion(self.policy, POLICIES)} Known: {', '.join(POLICIES)}."
            )
        FlexConfig(candidates=self.candidates)
        if not self.truths:
            raise FlexActError("--truths names nothing; give at least one candidate's name.")
        for truth in self.truths:
            try:
                lookup(truth)
            except FlexActError as error:
                raise FlexActError(str(error).replace("unknown candidate", "unknown truth", 1)) from None
        for name in ("truths", "models"):
            given = getattr(self, name)
            repeated = sorted({one for one in given if given.count(one) > 1})
            if repeated:
                raise FlexActError(f"{_flag(name)} may name each once; repeated: {', '.join(repeated)}.")

    @property
    def cells(self) -> list[Cell]:
        """What each model is trained on, truth by truth."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [Cell(truth, seed) for truth in self.truths for seed in seeds]

    @property
    def task(self) -> Task:
        return Task(
            slope=self.slope,
            label_noise=self.label_noise,
            distractors=self.distractors,
            target_scale=self.target_scale,
            hidden=self.hidden,
        )

    @property
    def is_papers_task(self) -> bool:
        """Whether the paper's numbers are about this task."""
        return self.task == Task()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise FlexActError(f"{_flag(name)} must be a whole number from {low} to {high}; got {value!r}.")

    def _check_number(self, name: str, at_least: float) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or value < at_least:
            what = f"a number of at least {at_least:g}" if at_least > -math.inf else "a finite number"
            raise FlexActError(f"{_flag(name)} must be {what}; got {value!r}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
