"""How many kernels a piece of work launches, and how long each takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""What a trace calls the events that take time on a GPU."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a run, all its launches together."""

    name: str
    calls: int
    microseconds: float


def kernels_of_run(run: Callable[[], object], device: torch.device) -> list[Kernel]:
    """What one run launches, the longest first. Without a GPU: torch's operators that touch data, untimed."""
    found = _traced(run, device) if device.type == "cuda" else _dispatched(run)
    totals: dict[str, tuple[int, float]] = {}
    for name, duration in found:
        calls, total = totals.get(name, (0, 0.0))
        totals[name] = (calls + 1, total + duration)
    rows = [Kernel(name, calls, total) for name, (calls, total) in totals.items()]
    return sorted(rows, key=lambda row: (-row.microseconds, -row.calls, row.name))


def count(run: Callable[[], object], device: torch.device) -> int:
    """How many launches one run has.

    >>> count(lambda: torch.zeros(3).add(1).view(3, 1), torch.device("cpu"))
    2
    """
    return sum(kernel.calls for kernel in kernels_of_run(run, device))


def _traced(run: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [(event["name"], float(event.get("dur", 0.0))) for event in events if event.get("cat") in _ON_DEVICE]


def _dispatched(run: Callable[[], object]) -> list[tuple[str, float]]:
    names: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and "empty" not in func.name() and func.name() not in _FREE:
                names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        run()
    return [(name, 0.0) for name in names]


_FREE = ("aten::detach", "aten::alias")
"""Operators that launch nothing, besides views and allocations."""
