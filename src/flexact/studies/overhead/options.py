"""The options of the overhead study, the ways to compute a routed activation, and the rows of its table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexact.errors import FlexActError
from flexact.io.value_checks import check_names, check_whole
from flexact.ops import dispatch
from flexact.studies.cifar_resnets import BLOCKS

BASELINE = "relu"
"""Placement and way of a network in which nothing is routed."""
MODES = ("eager", "graph", "compiled", "compiled_graph")
"""How a step is run. In the graph modes, the whole step is replayed from one CUDA graph."""


@dataclass(frozen=True)
class Way:
    """One way to compute a routed activation."""

    title: str
    kernels: dispatch.Kernels = "auto"
    fuse: bool = False
    """Whether it is fused with the batch norm and the residual addition before it."""
    plain: bool = False
    """Whether it consists of separate torch operations."""


WAYS: dict[str, Way] = {
    BASELINE: Way("ReLU"),
    "plain": Way("plain-written", plain=True),
    "closed_form": Way("closed form", kernels="closed_form"),
    "fused": Way("fused", kernels="triton"),
    "fused_bn": Way("fused with batch norm", kernels="triton", fuse=True),
}


@dataclass(frozen=True)
class Options:
    """The options of one run. The defaults depend on the device; see `chosen`."""

    device: str
    models: tuple[str, ...]
    modes: tuple[str, ...]
    ways: tuple[str, ...]
    """In the order of WAYS. The compiled modes measure only the first and the last."""
    repeats: int
    batch: int
    width: int
    """Channels of the first stage; the paper's networks have 64."""

    def __post_init__(self) -> None:
        for name, known in (("models", list(BLOCKS)), ("modes", MODES), ("ways", list(WAYS)[1:])):
            check_names(name, getattr(self, name), known)
        for name, most in (("repeats", 1000), ("batch", 65536), ("width", 1024)):
            check_whole(name, getattr(self, name), 1, most)
        if self.device not in ("cuda", "cpu"):
            raise FlexActError(f"--device must be cuda or cpu; got {self.device!r}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise FlexActError("--device cuda: torch sees no GPU here; see `flexact doctor`, or give --device cpu.")

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of convolutions and activations: bfloat16 by autocast on a GPU."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


def chosen(device: str | None, quick: bool, **given: Any) -> Options:
    """Return the options for a device (by default a GPU if there is one). Values in `given` override the defaults."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ways: tuple[str, ...] = ("plain", "closed_form")
    if device == "cuda":
        ways += ("fused", "fused_bn")
        values: dict[str, Any] = {"modes": MODES, "repeats": 20, "batch": 128, "width": 64}
    else:
        values = {"modes": ("eager",), "repeats": 5, "batch": 8, "width": 16}
    values |= {"models": tuple(BLOCKS), "ways": ways}
    if quick:
        values |= {"models": ("resnet18",), "repeats": 3}
        for name in ("modes", "ways"):
            values[name] = tuple(one for one in values[name] if "compiled" not in one)
    values |= {name: value for name, value in given.items() if value is not None}
    return Options(device=device, **values)


FILE = "overhead.csv"
TRAIN = "train_ms"
TO_COMPILED = "train_ratio_to_compiled_graph"
"""A replayed step's time relative to the compiled ReLU network, also replayed."""
PEAK, PARAMETERS = "peak_memory_mb", "extra_parameters"


class Cell(NamedTuple):
    """One network of the table, run in one mode."""

    network: str
    placement: str
    """"relu" (nothing is routed), "penultimate" or "all"."""
    way: str
    mode: str

    @property
    def compiled(self) -> bool:
        return self.mode.startswith("compiled")

    @property
    def captured(self) -> bool:
        return self.mode.endswith("graph")

    @property
    def baseline(self) -> Cell:
        """The same network with ReLU in the same mode."""
        return self._replace(placement=BASELINE, way=BASELINE)


class Measurement(NamedTuple):
    """One row of overhead.csv. A failed measurement has an error and no value."""

    network: str
    placement: str
    way: str
    mode: str
    quantity: str
    value: float | None = None
    """For times, the median over rounds."""
    p10: float | None = None
    p90: float | None = None
    ratio: float | None = None
    """Ratio to the network with ReLU in the same mode, for times the median over rounds."""
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    repeats: int = 0
    error: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.network, self.placement, self.way, self.mode)


def by_key(rows: Iterable[Measurement]) -> dict[tuple[Cell, str], Measurement]:
    """Return the successful rows by cell and quantity."""
    return {(row.cell, row.quantity): row for row in rows if row.value is not None}


def failed(cell: Cell, error: Exception) -> Measurement:
    """Return the row of a step that could not be measured."""
    return Measurement(*cell, TRAIN, error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
