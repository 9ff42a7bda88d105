"""The options of the overhead study, the implementations of a routed activation, and the rows of overhead.csv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch

from flexact.io.value_checks import check_names, check_whole
from flexact.ops import dispatch
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.engines import devices
from flexact.studies.grid.study import Setting

BASELINE = "relu"
"""Placement and implementation of a network in which nothing is routed."""
MODES = {
    "eager": "Eager",
    "graph": "One CUDA graph per step",
    "compiled": "Compiled",
    "compiled_graph": "Compiled, one CUDA graph per step",
}
"""How a step is run, with its title. In the graph modes, the whole step is replayed from one CUDA graph."""


@dataclass(frozen=True)
class Way:
    """One implementation of a routed activation."""

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
    "measured": Way("closed form or plain, measured", kernels="measured"),
    "compiled_form": Way("closed form, compiled", kernels="compiled"),
    "fused": Way("fused", kernels="triton"),
    "fused_bn": Way("fused with batch norm", kernels="triton", fuse=True),
}


@dataclass(frozen=True)
class Options:
    """The options of one run. The defaults depend on the device; see `chosen`."""

    models: Annotated[tuple[str, ...], Setting("resnet18, resnet34, or both.", "both")]
    modes: Annotated[
        tuple[str, ...],
        Setting(
            "eager, graph (the whole step is replayed from one CUDA graph), compiled, compiled_graph.",
            "all on a GPU, eager on a CPU",
        ),
    ]
    ways: Annotated[
        tuple[str, ...],
        Setting("plain, closed_form, measured, compiled_form, fused, fused_bn.", "all; plain and closed_form on a CPU"),
    ]
    """The implementations, in the order of `WAYS`. The compiled modes measure only the first and the last."""
    repeats: Annotated[int, Setting("Rounds of timing.", "20; 5 on a CPU")]
    batch: Annotated[int, Setting("Images per batch.", "128; 8 on a CPU")]
    width: Annotated[int, Setting("Channels of the first stage; the paper's networks have 64.", "64; 16 on a CPU")]
    device: Annotated[str, Setting("cuda, cuda:N or cpu.", "cuda if there is a GPU")]

    def __post_init__(self) -> None:
        for name, known in (("models", list(BLOCKS)), ("modes", MODES), ("ways", list(WAYS)[1:])):
            check_names(name, getattr(self, name), known)
        for name, most in (("repeats", 1000), ("batch", 65536), ("width", 1024)):
            check_whole(name, getattr(self, name), 1, most)

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of convolutions and activations: bfloat16 by autocast on a GPU."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


def chosen(device: str | None = None, **given: Any) -> Options:
    """Return the options for a device (by default a GPU if there is one). Values in `given` override the defaults."""
    device = devices(device)[0]
    values: dict[str, Any] = {"models": tuple(BLOCKS), "modes": tuple(MODES), "ways": tuple(WAYS)[1:]}
    values |= {"repeats": 20, "batch": 128, "width": 64}
    if device == "cpu":
        values |= {"modes": ("eager",), "ways": ("plain", "closed_form"), "repeats": 5, "batch": 8, "width": 16}
    return Options(device=device, **values | {name: value for name, value in given.items() if value is not None})


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
    """The value; of times, the median over rounds."""
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


def failed(cell: Cell, error: Exception) -> Measurement:
    """Return the row of a step that could not be measured."""
    return Measurement(*cell, TRAIN, error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
