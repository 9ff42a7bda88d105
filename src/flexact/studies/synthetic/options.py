"""What a synthetic study can be asked for, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from flexact.candidates import ORIGINAL, known_names
from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.io.option_checks import check_known, check_once, check_whole
from flexact.studies.synthetic.names import canonical
from flexact.studies.synthetic.replicas import Cell, Task

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
        check_whole("seeds", self.seeds, 1, MOST_SEEDS)
        check_whole("first-seed", self.first_seed, 0, 2**40)
        check_whole("epochs", self.epochs, 1, MOST_EPOCHS)
        check_whole("distractors", self.distractors, 0, 10_000)
        check_whole("hidden", self.hidden, 0, 10_000)
        self._check_number("label_noise", at_least=0)
        for name in ("slope", "target_scale"):
            self._check_number(name, at_least=-math.inf)
            if getattr(self, name) == 0:
                raise FlexActError(f"{_flag(name)} 0 leaves nothing to find; give a number other than 0.")
        check_known("policy", self.policy, POLICIES)
        for name in ("truths", "candidates", "models"):
            self._check_names(name)
        object.__setattr__(self, "models", tuple(canonical(model) for model in self.models))
        _check_known("truth", self.truths)
        _check_known("candidate", self.candidates)
        if not self.truths:
            raise FlexActError("--truths names nothing; give at least one candidate's name.")
        if len(self.candidates) < 2:
            told = ", ".join(self.candidates) or "none"
            raise FlexActError(f"--candidates must name at least two candidates to pick from; got {told}.")
        for name in ("truths", "candidates", "models"):
            check_once(name, getattr(self, name))

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Options:
        """The inverse of `to_dict`; what it does not name keeps its default."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in data:
            check_known("option", name, known)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**fields)

    def _check_names(self, name: str) -> None:
        given = getattr(self, name)
        if not isinstance(given, tuple) or not all(isinstance(one, str) for one in given):
            raise FlexActError(f"{_flag(name)} must be names; got {given!r}.")

    def _check_number(self, name: str, at_least: float) -> None:
        value = getattr(self, name)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not math.isfinite(value) or value < at_least:
            what = f"a number of at least {at_least:g}" if at_least > -math.inf else "a finite number"
            raise FlexActError(f"{_flag(name)} must be {what}; got {value!r}.")


def _check_known(kind: str, names: tuple[str, ...]) -> None:
    known = known_names()
    for name in names:
        if name == ORIGINAL:
            raise FlexActError(
                f"{ORIGINAL!r} stands for what a converted network had at a site, and the networks of a study are not "
                f"converted; name the {kind} itself. Known: {', '.join(known)}."
            )
        check_known(kind, name, known)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
