"""What is trained, and how: one cell of the grid, and the protocol that all of its cells share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from flexact.config import PAPER_CANDIDATES, FlexConfig
from flexact.errors import FlexActError, suggestion
from flexact.studies.images.methods import check_names

VERSION = 1
SHORT = 30
"""Epochs of the short budget."""
POLICIES: tuple[str, ...] = ("default", "paper")
PRECISIONS: tuple[str, ...] = ("bf16", "float32")
NORMS: tuple[str, ...] = ("batch", "synced")
RECTIFIERS = ("relu", "leaky_relu", "gelu", "silu", "elu")
"""What the default policy picks from here. With the paper's five the last blocks take Identity and Tanh, which help for
the first epochs and cost a point in the end: docs/images.md."""


@dataclass(frozen=True)
class Cell:
    """One run: a method on a model on a data set from one seed."""

    dataset: str
    model: str
    method: str
    seed: int

    def __post_init__(self) -> None:
        check_names(self.model, self.method)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise FlexActError(f"a seed is a whole number from 0 on; got {self.seed!r}.")

    @property
    def name(self) -> str:
        """For file names.

        >>> Cell("cifar100", "resnet18", "flexact-all", 0).name
        'cifar100-resnet18-flexact-all-0'
        """
        return f"{self.dataset}-{self.model}-{self.method}-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Protocol:
    """How every cell is trained; the paper's by default.

    >>> Protocol.from_dict(Protocol.short(batch=64).to_dict()) == Protocol(epochs=30, batch=64)
    True
    """

    epochs: int = 200
    batch: int = 128
    """Images a step, over all ranks together."""
    lr: float = 0.1
    """At the first step; it falls to 0 along a cosine, step by step."""
    momentum: float = 0.9
    weight_decay: float = 5e-4
    """Of everything but what the activations learn. The paper gives none."""
    nesterov: bool = False
    policy: str = "default"
    """"default" is `FlexConfig()`, "paper" `FlexConfig.paper()`."""
    candidates: tuple[str, ...] | None = None
    """None for the policy's own: `RECTIFIERS`, or the paper's five."""
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    """Other fields of the policy's `FlexConfig` that are changed."""
    precision: str = "bf16"
    """On a GPU; a CPU computes in float32."""
    width: int = 64
    """Channels of the first stage."""
    norm: str = "batch"
    """With several ranks, "batch" normalises with the moments of each rank's own part of the batch, as
    DistributedDataParallel does; "synced" with those of the whole batch, as one process does."""
    evaluate_every: int = 5
    """Epochs from one evaluation to the next; the last one is always evaluated."""
    checkpoint_minutes: float = 1.0
    """From one checkpoint to the next; 0 for one after every epoch."""

    @classmethod
    def short(cls, **changes: Any) -> Protocol:
        """The short budget, with any other changes."""
        return cls(**{"epochs": SHORT, **changes})

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "width", "evaluate_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FlexActError(f"{name} must be a whole number from 1 on; got {value!r}.")
        for name in ("lr", "momentum", "weight_decay", "checkpoint_minutes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise FlexActError(f"{name} must be a finite number from 0 on; got {value!r}.")
        if not isinstance(self.nesterov, bool):
            raise FlexActError(f"nesterov must be True or False; got {self.nesterov!r}.")
        if self.nesterov and self.momentum == 0:
            raise FlexActError("nesterov=True needs a momentum above 0.")
        for name, known in (("policy", POLICIES), ("precision", PRECISIONS), ("norm", NORMS)):
            value = getattr(self, name)
            if value not in known:
                raise FlexActError(
                    f"unknown {name} {value!r};{suggestion(str(value), known)} Known: {', '.join(known)}."
                )
        if self.candidates is None:
            object.__setattr__(self, "candidates", RECTIFIERS if self.policy == "default" else PAPER_CANDIDATES)
        elif not isinstance(self.candidates, str):
            object.__setattr__(self, "candidates", tuple(self.candidates))
        self.config(seed=0)  # checks the candidates and the changes

    def config(self, seed: int) -> FlexConfig:
        """The policy of the methods that pick."""
        if not isinstance(self.changes, dict):
            raise FlexActError(f"changes must be a dictionary of FlexConfig's fields; got {self.changes!r}.")
        base = FlexConfig() if self.policy == "default" else FlexConfig.paper()
        changed = {"candidates": self.candidates, "seed": seed, **self.changes}
        return FlexConfig.from_dict({**base.to_dict(), **changed})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the format's version."""
        fields = dataclasses.asdict(self)
        fields["candidates"] = list(self.candidates or ())
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
