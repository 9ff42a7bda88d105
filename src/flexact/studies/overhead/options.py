"""What the overhead study can be asked for, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flexact.errors import FlexActError, suggestion
from flexact.ops import kernels

NETWORKS: dict[str, tuple[int, ...]] = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""The paper's networks, by their blocks a stage."""
MODES = ("eager", "graph", "compiled", "compiled_graph")
"""How a step is run; "graph" replays the whole step from one CUDA graph, without and with torch.compile."""
WAYS = ("plain", "closed_form", "compiled_form", "fused", "fused_bn")
"""How the routed activation is written; see `networks.WAYS`."""
CANDIDATES = (
    "relu",
    "sigmoid",
    "tanh",
    "leaky_relu",
    "identity",
    "gelu",
    "silu",
    "elu",
    "softplus",
    "mish",
    "selu",
    "hardswish",
    "relu6",
    "softsign",
    "relu_squared",
    "sine",
)
"""All built-in ones, the paper's five first; K of them are the first K."""
PAPERS_K = 5


@dataclass(frozen=True)
class Options:
    """One run of the study. The sizes differ by device: `defaults` has them."""

    device: str
    models: tuple[str, ...]
    modes: tuple[str, ...]
    ways: tuple[str, ...]
    repeats: int
    batch: int
    width: int
    """Channels of the first stage; 64 is the paper's."""
    minutes: float
    """So long after the kernels of all ways are built nothing more is begun, but for what is cheap."""
    burst_ms: float
    """A repeat runs a contender for about so long."""
    elements: int
    """Of the tensor that the operation alone runs on."""
    ks: tuple[int, ...]
    depths: tuple[tuple[int, ...], ...]
    """Blocks a stage of each network of the depth sweep."""

    def __post_init__(self) -> None:
        for name, known in (("models", tuple(NETWORKS)), ("modes", MODES), ("ways", WAYS)):
            _check_names(name, getattr(self, name), known)
        for name, most in (("repeats", 1000), ("batch", 65536), ("width", 1024)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise FlexActError(f"--{name} must be a whole number from 1 to {most}; got {value!r}.")
        if not (math.isfinite(self.minutes) and self.minutes > 0):
            raise FlexActError(f"--minutes must be a number above 0; got {self.minutes!r}.")
        if self.device not in ("cuda", "cpu"):
            raise FlexActError(f"--device must be cuda or cpu; got {self.device!r}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise FlexActError("--device cuda: torch sees no GPU here; `flexact doctor` says more. Give --device cpu.")

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """What convolutions and activations compute in: bfloat16 by autocast on a GPU."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def sweep_ways(self) -> tuple[str, ...]:
        """What the sweeps over K and depth measure: the fused ways, or else the last one asked for."""
        return tuple(way for way in self.ways if way.startswith("fused")) or self.ways[-1:]

    @property
    def sweep_modes(self) -> tuple[str, ...]:
        """How the sweeps run a step: from a graph where there is one, since a GPU's host hides the rest."""
        return ("eager", "graph") if self.device == "cuda" else ("eager",)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


def defaults(device: str, quick: bool = False) -> dict[str, Any]:
    """The sizes of a run: what a card needs to be busy, or what a CPU does in two minutes."""
    if device == "cuda":
        sizes: dict[str, Any] = {
            "models": ("resnet18", "resnet34"),
            "modes": MODES,
            "ways": ("plain", "closed_form", "fused", "fused_bn"),
            "repeats": 20,
            "batch": 128,
            "width": 64,
            "minutes": 7.5,
            "burst_ms": 30.0,
            "elements": 1 << 26,
            "ks": (2, 5, 8, 11, 14),
            "depths": ((1,), (1, 1), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3), (3, 4, 6, 3)),
        }
    else:
        own = kernels.active("cpu").name
        sizes = {
            "models": ("resnet18", "resnet34"),
            "modes": ("eager",),
            "ways": ("plain", "closed_form", *(("compiled_form",) if own == "compiled" else ())),
            "repeats": 5,
            "batch": 8,
            "width": 16,
            "minutes": 2.0,
            "burst_ms": 50.0,
            "elements": 1 << 20,
            "ks": (2, 5, 14),
            "depths": ((1,), (1, 1), (1, 1, 1, 1)),
        }
    if quick:
        sizes |= {"models": ("resnet18",), "repeats": 3, "ks": (2, 5, 14), "depths": ((1,), (1, 1))}
        for name in ("modes", "ways"):
            sizes[name] = tuple(one for one in sizes[name] if "compiled" not in one)
    return sizes


def chosen(device: str | None, quick: bool, **given: Any) -> Options:
    """The options for a device ("cuda" where there is a GPU), with what was given in the place of the defaults."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    values = {name: value for name, value in given.items() if value is not None}
    return Options(device=device, **{**defaults(device, quick), **values})


def _check_names(option: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    given = list(given)
    if not given:
        raise FlexActError(f"--{option} names nothing; known: {', '.join(known)}.")
    for name in given:
        if name not in known:
            raise FlexActError(
                f"unknown name {name!r} in --{option}{suggestion(name, known)} Known: {', '.join(known)}."
            )
    repeated = sorted({name for name in given if given.count(name) > 1})
    if repeated:
        raise FlexActError(f"--{option} may name each once; repeated: {', '.join(repeated)}.")
