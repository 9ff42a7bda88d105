"""What is trained, and how: one cell of the grid, and the protocol that all of its cells share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.io.option_checks import check_seed
from flexact.studies.cifar.methods import check_names
from flexact.studies.grid.protocol import PickingProtocol

SHORT = 30
"""Epochs of the short budget."""
NORMS: tuple[str, ...] = ("batch", "synced")
RECTIFIERS = ("relu", "leaky_relu", "gelu", "silu")
"""What the default policy picks from here. With the paper's five the last blocks take Identity and Tanh, which help for
the first epochs and cost a point in the end; ELU is too linear as well: docs/images.md."""


@dataclass(frozen=True)
class Cell:
    """One run: a method on a model on a data set from one seed."""

    dataset: str
    model: str
    method: str
    seed: int

    def __post_init__(self) -> None:
        check_names(self.model, self.method)
        check_seed(self.seed)

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
class Protocol(PickingProtocol):
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
    width: int = 64
    """Channels of the first stage."""
    norm: str = "batch"
    """With several ranks, "batch" normalises with the moments of each rank's own part of the batch, as
    DistributedDataParallel does; "synced" with those of the whole batch, as one process does."""
    evaluate_every: int = 5
    """Epochs from one evaluation to the next; the last one is always evaluated."""
    checkpoint_minutes: float = 1.0
    """From one checkpoint to the next; 0 for one after every epoch."""

    OWN_CANDIDATES: ClassVar[Mapping[str, tuple[str, ...]]] = {"default": RECTIFIERS, "paper": PAPER_CANDIDATES}
    WHOLE: ClassVar[tuple[str, ...]] = ("epochs", "batch", "width", "evaluate_every")
    FROM_ZERO: ClassVar[tuple[str, ...]] = ("lr", "momentum", "weight_decay", "checkpoint_minutes")
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {**PickingProtocol.CHOICES, "norm": NORMS}

    @classmethod
    def short(cls, **changes: Any) -> Protocol:
        """The short budget, with any other changes."""
        return cls(**{"epochs": SHORT, **changes})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.nesterov, bool):
            raise FlexActError(f"nesterov must be True or False; got {self.nesterov!r}.")
        if self.nesterov and self.momentum == 0:
            raise FlexActError("nesterov=True needs a momentum above 0.")

    def epochs_of(self, dataset: str) -> int:
        return self.epochs
