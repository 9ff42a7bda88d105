"""What the overhead study can be asked for, checked."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from flexact.errors import FlexActError
from flexact.io.option_checks import check_names, check_whole
from flexact.ops import dispatch

NETWORKS: dict[str, tuple[int, ...]] = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""The paper's networks, by their blocks per stage."""
MODES = ("eager", "graph", "compiled", "compiled_graph")
"""How a step is run; "graph" replays the whole step from one CUDA graph, without and with torch.compile."""
WAYS = ("plain", "closed_form", "compiled_form", "fused", "fused_bn")
"""How the routed activation is written; see `networks.WAYS`."""


@dataclass(frozen=True)
class Options:
    """One run of the study. The defaults depend on the device; see `chosen`."""

    device: str
    models: tuple[str, ...]
    modes: tuple[str, ...]
    ways: tuple[str, ...]
    repeats: int
    batch: int
    width: int
    """Channels of the first stage; 64 is the paper's."""
    minutes: float
    """After this time, counted from when all kernels are built, no further network is built."""
    burst_ms: float
    """How long a repeat runs one contender, roughly."""

    def __post_init__(self) -> None:
        for name, known in (("models", tuple(NETWORKS)), ("modes", MODES), ("ways", WAYS)):
            check_names(name, getattr(self, name), known)
        for name, most in (("repeats", 1000), ("batch", 65536), ("width", 1024)):
            check_whole(name, getattr(self, name), 1, most)
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


def chosen(device: str | None, quick: bool, **given: Any) -> Options:
    """The options for a device ("cuda" where there is a GPU); `given` overrides the defaults where it is not None."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    values: dict[str, Any] = {"models": tuple(NETWORKS), "modes": MODES, "ways": ("plain", "closed_form")}
    if device == "cuda":
        values |= {"ways": (*values["ways"], "fused", "fused_bn"), "repeats": 20, "batch": 128, "width": 64}
        values |= {"minutes": 7.5, "burst_ms": 30.0}
    else:
        own = ("compiled_form",) if dispatch.active("cpu").name == "compiled" else ()
        values |= {"modes": ("eager",), "ways": (*values["ways"], *own), "repeats": 5, "batch": 8, "width": 16}
        values |= {"minutes": 2.0, "burst_ms": 50.0}
    if quick:
        values |= {"models": ("resnet18",), "repeats": 3}
        for name in ("modes", "ways"):
            values[name] = tuple(one for one in values[name] if "compiled" not in one)
    values |= {name: value for name, value in given.items() if value is not None}
    return Options(device=device, **values)
