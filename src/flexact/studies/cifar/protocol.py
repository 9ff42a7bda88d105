"""One cell of the image study, and the protocol that all of its cells share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.studies.cifar.methods import FIXED, METHODS, USUAL
from flexact.studies.cifar_data.data import NAMES
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.study import Choices, GridCell, PickingProtocol, Setting

BUDGETS = {"paper": 200, "short": 30}
"""The epochs of each budget."""
RECTIFIERS = ("relu", "leaky_relu", "gelu", "silu")
"""The default candidates of this study. With the paper's five, the last blocks pick Identity and Tanh, which help in
the first epochs and cost a point in the end; ELU is too linear as well (docs/images.md)."""


@dataclass(frozen=True)
class Cell(GridCell):
    """One run: a method on a model on a data set from one seed.

    >>> Cell("cifar100", "resnet18", "flexact-all", 0).name
    'cifar100-resnet18-flexact-all-0'
    """

    dataset: str
    model: str
    method: str
    seed: int

    @property
    def data_name(self) -> str:
        return self.dataset


@dataclass(frozen=True)
class Protocol(PickingProtocol):
    """How every cell is trained; by default as in the paper.

    >>> Protocol.from_dict(Protocol(batch=64).to_dict()) == Protocol(batch=64)
    True
    """

    candidates: Annotated[
        tuple[str, ...] | None,
        Setting("Candidates of every site.", "relu, leaky_relu, gelu, silu; with --policy paper the paper's five"),
    ] = None
    epochs: Annotated[int, Setting("Passes over the data.", "the budget's")] = BUDGETS["paper"]
    batch: Annotated[int, Setting("Images per step.")] = 128
    lr: Annotated[float, Setting("Learning rate of the first step; it decays to 0 along a cosine.")] = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    """The weight decay of everything except the parameters of activations. The paper gives none."""
    width: Annotated[int, Setting("Channels of the first stage.")] = 64
    evaluate_every: int = 5
    """Epochs between two evaluations; the last epoch is always evaluated."""
    benchmark: Annotated[
        bool,
        Setting("Let cuDNN time its algorithms. A resumed cell may then use others, and is not bit-identical."),
    ] = False
    partial: Annotated[bool, Setting("Accept data sets with fewer images than the official ones.")] = False
    checkpoint_minutes: Annotated[float, Setting("Minutes between checkpoints; 0 for one after every epoch.")] = 1.0

    OWN_CANDIDATES: ClassVar[Mapping[str, tuple[str, ...]]] = {"default": RECTIFIERS, "paper": PAPER_CANDIDATES}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config(seed=0).pick_by == "trial":
            raise FlexActError("pick_by='trial' has no checkpoints in this study; leave pick_by as it is.")

    def epochs_of(self, dataset: str) -> int:
        return self.epochs


@dataclass(frozen=True)
class Grid(Choices):
    """The cells of a grid.

    >>> [cell.name for cell in Grid(("cifar10",), ("resnet18",), ("relu",), seeds=2, first_seed=3).cells]
    ['cifar10-resnet18-relu-3', 'cifar10-resnet18-relu-4']
    """

    datasets: Annotated[tuple[str, ...], Setting("cifar10, cifar100, or both.", "both", known=NAMES)] = NAMES
    models: Annotated[tuple[str, ...], Setting("resnet18, resnet34, or both.", "resnet18", known=tuple(BLOCKS))] = (
        "resnet18",
    )
    methods: Annotated[
        tuple[str, ...],
        Setting(
            f"{', '.join(USUAL)}; or another candidate's name, such as elu, for that activation in all blocks.",
            f"the {len(USUAL)} names before the semicolon",
            known=METHODS + FIXED,
        ),
    ] = USUAL

    CELL: ClassVar = Cell


class Result(NamedTuple):
    """One row of results.csv. A failed cell has an error, and NaN or 0 in place of its metrics."""

    dataset: str
    model: str
    method: str
    seed: int
    state: str
    accuracy: float = math.nan
    """The accuracy of the extracted network on the test images, in percent."""
    loss: float = math.nan
    """The loss of the last epoch."""
    epochs: int = 0
    seconds: float = 0.0
    step_ms: float = math.nan
    """Training time per step of the final network: the median over its epochs, plus its share of picking; NaN if the
    cell was trained on several devices, or shared one."""
    picks: str = ""
    """Site and pick in order of depth, as "layer1.0=relu layer1.1=tanh"; empty for methods that do not pick."""
    error: str = ""
    device: str = ""
    """The device, or several ("NVIDIA H200 + cpu") if the run was resumed on another device."""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.dataset, self.model, self.method, self.seed)
