"""The options of a synthetic study, and the names of models, truths and corrections."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from flexact.candidates import ORIGINAL, known_names
from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.io.value_checks import check_known, check_names, check_once, check_whole, number
from flexact.studies.synthetic.replicas import Cell, Task

DEFAULT = "flexact-default"
"""The model of `FlexConfig()`."""
KAN = "kan"
"""The model that is a Kolmogorov-Arnold layer."""

TITLES = {
    **dict(zip(PAPER_CANDIDATES, ("ReLU", "Sigmoid", "Tanh", "LeakyReLU", "Identity"), strict=True)),
    "none": "no correction",
    "clip_logit_gradient": "logit-gradient clipping",
    "clipped_norm_kl": "KL from clipped norms",
    "output_norm": "output normalisation",
    "grad_norm_kl": "KL from gradient norms",
}
"""The paper's names of its truths and corrections."""

_ALPHA = re.compile(r"flexact-a(\d+)(\.\d+)?")


def title(name: str) -> str:
    """Return the title of a truth or a correction; any other name is returned unchanged."""
    return TITLES.get(name, name)


def alpha_of(model: str) -> float | None:
    """Return α of a model that is named after it; None for any other model.

    >>> alpha_of("flexact-a0.3"), alpha_of("relu")
    (0.3, None)
    """
    found = _ALPHA.fullmatch(model)
    return float(found[1] + (found[2] or "")) if found else None


def canonical(model: str) -> str:
    """Return the canonical name of a model, without redundant zeros.

    >>> canonical("flexact-a0.0"), canonical("flexact-a0.30"), canonical("relu")
    ('flexact-a0', 'flexact-a0.3', 'relu')
    """
    found = _ALPHA.fullmatch(model)
    if not found:
        return model
    fraction = (found[2] or "").rstrip("0").rstrip(".")
    return f"flexact-a{found[1].lstrip('0') or '0'}{fraction}"


POLICIES: tuple[str, ...] = ("default", "paper", "literal")

_POLICY = (
    "Policy of the flexact-a… models and of the corrections: paper (our interpretation of the paper), literal (its "
    "formulas taken literally) or default (FlexConfig())."
)
_HIDDEN = (
    "Width of a two-layer teacher and student; the student starts from its teacher's weights and must find the hidden "
    "activation. 0 for the paper's single unit."
)


@dataclass(frozen=True)
class Options:
    """Which models are trained, on which truths and seeds, and on which task.

    >>> Options(truths=("relu", "tanh"), seeds=2, first_seed=7).cells
    [Cell(truth='relu', seed=7), Cell(truth='relu', seed=8), Cell(truth='tanh', seed=7), Cell(truth='tanh', seed=8)]
    """

    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 5
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 100
    policy: Annotated[str, typer.Option(help=_POLICY)] = "paper"
    truths: tuple[str, ...] = PAPER_CANDIDATES
    candidates: tuple[str, ...] = PAPER_CANDIDATES
    models: tuple[str, ...] = ()
    slope: Annotated[float, typer.Option(help="K in y = a(K·x₁).")] = 5.0
    label_noise: Annotated[float, typer.Option(help="Standard deviation of the noise on the labels.")] = 0.0
    distractors: Annotated[int, typer.Option(help="Number of uninformative inputs.")] = 3
    target_scale: Annotated[float, typer.Option(help="Factor on the labels.")] = 1.0
    hidden: Annotated[int, typer.Option(help=_HIDDEN)] = 0

    def __post_init__(self) -> None:
        check_whole("seeds", self.seeds, 1, 10_000)
        check_whole("first-seed", self.first_seed, 0, 2**40)
        check_whole("epochs", self.epochs, 1, 100_000)
        check_whole("distractors", self.distractors, 0, 10_000)
        check_whole("hidden", self.hidden, 0, 10_000)
        number("--label-noise", self.label_noise, at_least=0)
        for flag, value in (("--slope", self.slope), ("--target-scale", self.target_scale)):
            if number(flag, value) == 0:
                raise FlexActError(f"{flag} 0 leaves nothing to find; give a number other than 0.")
        check_known("policy", self.policy, POLICIES)
        for name in ("truths", "candidates", "models"):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not all(isinstance(one, str) for one in given):
                raise FlexActError(f"--{name} must be names; got {given!r}.")
        object.__setattr__(self, "models", tuple(canonical(model) for model in self.models))
        known = [name for name in known_names() if name != ORIGINAL]
        check_names("truths", self.truths, known)
        check_names("candidates", self.candidates, known)
        check_once("models", self.models)
        if len(self.candidates) < 2:
            raise FlexActError(f"--candidates must name at least two candidates; got {', '.join(self.candidates)}.")

    @property
    def cells(self) -> list[Cell]:
        """The replicas of each model, truth by truth."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [Cell(truth, seed) for truth in self.truths for seed in seeds]

    @property
    def task(self) -> Task:
        return Task(self.slope, self.label_noise, self.distractors, self.target_scale, self.hidden)

    def to_dict(self) -> dict[str, Any]:
        """Return the options in plain JSON types."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Options:
        """Return the inverse of `to_dict`. Missing names keep their defaults."""
        for name in data:
            check_known("option", name, [field.name for field in dataclasses.fields(cls)])
        fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**fields)
