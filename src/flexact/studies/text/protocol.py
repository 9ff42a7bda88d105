"""What is trained, and how: one cell of the grid, and the protocol that all of its cells share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexact.config import PAPER_CANDIDATES, FlexConfig
from flexact.errors import FlexActError, suggestion
from flexact.studies.text.encoder import Encoder
from flexact.studies.text.tasks import task_named

VERSION = 1
BASELINE = "fixed"
PLACEMENTS: dict[str, str] = {"flexact-penultimate": "penultimate", "flexact-all": "all"}
"""`where` of each method that picks: the last activation before the classifier, which is the pooler's, or each one."""
METHODS: tuple[str, ...] = (BASELINE, *PLACEMENTS)
POLICIES: tuple[str, ...] = ("default", "paper")
PRETRAINED: dict[str, Any] = {"init": "original", "warmup": 0.3}
"""Of every policy here: start at what the network had, and let a fresh head settle before anything moves; docs/text.md
has the run in which the pooler went astray without."""


@dataclass(frozen=True)
class Cell:
    """One run: a method on a task from one seed."""

    task: str
    method: str
    seed: int

    def __post_init__(self) -> None:
        task_named(self.task)
        if self.method not in METHODS:
            raise FlexActError(
                f"unknown method {self.method!r};{suggestion(str(self.method), METHODS)} Known: {', '.join(METHODS)}."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise FlexActError(f"a seed is a whole number from 0 on; got {self.seed!r}.")

    @property
    def dataset(self) -> str:
        """What the grid calls it."""
        return self.task

    @property
    def name(self) -> str:
        """For file names.

        >>> Cell("rte", "flexact-all", 0).name
        'rte-flexact-all-0'
        """
        return f"{self.task}-{self.method}-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Protocol:
    """How every cell is trained.

    >>> Protocol.from_dict(Protocol(batch=16).to_dict()) == Protocol(batch=16)
    True
    """

    model: str = ""
    """The encoder's name."""
    sha256: str = ""
    """Of its weights."""
    folder: str = ""
    """Where it lies."""
    epochs: int | None = None
    """Passes over the data; None for each task's own number."""
    batch: int = 32
    lr: float = 5e-5
    """After the warm-up; it then falls linearly to 0."""
    warmup: float = 0.1
    """The fraction of the steps over which the learning rate rises."""
    weight_decay: float = 0.01
    length: int = 128
    """Tokens of a row; what is longer is cut."""
    limit: int | None = None
    """Rows of each file that are used; None for all."""
    policy: str = "default"
    """"default" is `FlexConfig()`, "paper" `FlexConfig.paper()`, both from a pretrained start."""
    candidates: tuple[str, ...] = PAPER_CANDIDATES
    """What a site picks from, besides what it had before."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other fields of the policy's `FlexConfig` that are changed."""
    precision: str = "bf16"
    """On a GPU; a CPU computes in float32."""
    checkpoint_minutes: float = 2.0
    """From one checkpoint of a run to the next; 0 for none but where it is stopped."""
    keep: bool = False
    """Whether the fine-tuned networks are kept."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", *(one for one in ("epochs", "limit") if getattr(self, one) is not None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FlexActError(f"{name} must be a whole number from 1 on; got {value!r}.")
        for name in ("lr", "warmup", "weight_decay", "checkpoint_minutes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise FlexActError(f"{name} must be a finite number from 0 on; got {value!r}.")
        if self.warmup > 1:
            raise FlexActError(f"warmup is a fraction of the steps, from 0 to 1; got {self.warmup!r}.")
        for name, known in (("policy", POLICIES), ("precision", ("bf16", "float32"))):
            value = getattr(self, name)
            if value not in known:
                raise FlexActError(
                    f"unknown {name} {value!r};{suggestion(str(value), known)} Known: {', '.join(known)}."
                )
        if not isinstance(self.candidates, str):
            object.__setattr__(self, "candidates", tuple(self.candidates))
        self.config(seed=0)  # checks the candidates and the changes

    @classmethod
    def of(cls, encoder: Encoder, **settings: Any) -> Protocol:
        """For an encoder."""
        return cls(encoder.name, encoder.sha256, str(encoder.folder), **settings)

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.model, Path(self.folder), self.sha256)

    def epochs_of(self, task: str) -> int:
        """Passes over a task's data."""
        return task_named(task).epochs if self.epochs is None else self.epochs

    def config(self, seed: int) -> FlexConfig:
        """The policy of the methods that pick: it starts at what the network had before."""
        if not isinstance(self.changes, dict):
            raise FlexActError(f"changes must be a dictionary of FlexConfig's fields; got {self.changes!r}.")
        base = FlexConfig() if self.policy == "default" else FlexConfig.paper()
        changed = {"candidates": self.candidates, "seed": seed, **PRETRAINED, **self.changes}
        return FlexConfig.from_dict({**base.to_dict(), **changed})

    @property
    def logit_lr(self) -> float | None:
        """Where the policy leaves the logits to the optimizer: fine-tuning's own learning rate would not move them."""
        return 0.02 if self.config(0).logit_step == "optimizer" else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the format's version."""
        fields = dataclasses.asdict(self)
        fields["candidates"] = list(self.candidates)
        return {"flexact_protocol": VERSION, **fields}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Protocol:
        """The inverse of `to_dict`; fields it does not name keep their defaults."""
        version = data.get("flexact_protocol") if isinstance(data, dict) else None
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise FlexActError(f"not a Protocol: expected {{'flexact_protocol': {VERSION}, ...}}; got {data!r:.80}.")
        if version > VERSION:
            raise FlexActError(f"this protocol has version {version}, and this flexact reads up to {VERSION}; update.")
        known = [one.name for one in dataclasses.fields(cls)]
        given = {key: value for key, value in data.items() if key != "flexact_protocol"}
        for key in given:
            if key not in known:
                raise FlexActError(f"unknown field {key!r};{suggestion(str(key), known)} Known: {', '.join(known)}.")
        return cls(**given)
