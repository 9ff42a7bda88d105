"""What is trained, and how: one cell of the grid, and the protocol that all of its cells share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flexact.errors import FlexActError
from flexact.io.option_checks import check_known, check_seed
from flexact.studies.glue.encoder import AT_HAND, Encoder
from flexact.studies.glue.tasks import task_named
from flexact.studies.grid.protocol import PickingProtocol

BASELINE = "fixed"
PLACEMENTS: dict[str, str] = {"flexact-penultimate": "penultimate", "flexact-all": "all"}
"""`where` of each method that picks: the last activation before the classifier, which is the pooler's, or each one."""
METHODS: tuple[str, ...] = (BASELINE, *PLACEMENTS)
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
        check_known("method", self.method, METHODS)
        check_seed(self.seed)

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
class Protocol(PickingProtocol):
    """How every cell is trained. A site picks from the candidates and what it had before, and starts there.

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
    checkpoint_minutes: float = 2.0
    """From one checkpoint of a run to the next; 0 for none but where it is stopped."""
    keep: bool = False
    """Whether the fine-tuned networks are kept."""

    OWN_CHANGES: ClassVar[Mapping[str, Any]] = {**PickingProtocol.OWN_CHANGES, **PRETRAINED}
    WHOLE: ClassVar[tuple[str, ...]] = ("batch", "length", "epochs", "limit")
    FROM_ZERO: ClassVar[tuple[str, ...]] = ("lr", "warmup", "weight_decay", "checkpoint_minutes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup > 1:
            raise FlexActError(f"warmup is a fraction of the steps, from 0 to 1; got {self.warmup!r}.")

    @classmethod
    def of(cls, encoder: Encoder, **settings: Any) -> Protocol:
        """For an encoder. The one at hand is small, and learns nothing on RTE at the rate that suits BERT-base."""
        if encoder.name == AT_HAND:
            settings = {"lr": 1e-4, **settings}
        return cls(model=encoder.name, sha256=encoder.sha256, folder=str(encoder.folder), **settings)

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.model, Path(self.folder), self.sha256)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the encoder: what `of` takes beside it."""
        fields = (one.name for one in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name not in ("model", "sha256", "folder")}

    def epochs_of(self, dataset: str) -> int:
        return task_named(dataset).epochs if self.epochs is None else self.epochs

    @property
    def logit_lr(self) -> float | None:
        """Where the policy leaves the logits to the optimizer: fine-tuning's own learning rate would not move them."""
        return 0.02 if self.config(0).policy.logit_step == "optimizer" else None
