"""The operation alone: one large tensor, against ReLU, GELU and what the device can copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexact.ops import SENSITIVITY, kernels, routed_activation
from flexact.studies.overhead.deadline import Deadline
from flexact.studies.overhead.networks import BASELINE, WAYS, check_kernels, plain_blend
from flexact.studies.overhead.options import CANDIDATES, PAPERS_K, Options
from flexact.studies.overhead.rows import OperationRow, told, with_times
from flexact.studies.overhead.steps import captured
from flexact.studies.overhead.timing import WARM_UP, Run, interleaved, ratios, spread

DIRECTIONS = ("forward", "backward", "both")
_TENSORS = {"forward": 2, "backward": 3, "both": 5}
"""How many times the size of the tensor a direction must read or write: h, x; h, δ, ∂h."""
COPY, GELU = "copy", "gelu"

Blend = Callable[[Tensor], Any]


@dataclass(frozen=True)
class _Key:
    operation: str
    direction: str
    mode: str


class Operation:
    """An activation and its gradients on one tensor: `forward`, `backward` and `both` are what is timed."""

    def __init__(self, h: Tensor, delta: Tensor, blend: Blend, parameters: Sequence[Tensor] = ()) -> None:
        self.h, self.delta, self.blend = h, delta, blend
        self.inputs = (h, *parameters)
        self.kept: Tensor | None = None
        """What `backward` goes back from."""

    def forward(self) -> Tensor:
        out = self.blend(self.h)
        x: Tensor = out[0] if isinstance(out, tuple) else out
        return x

    def backward(self) -> None:
        if self.kept is None:
            self.kept = self.forward()
        torch.autograd.grad(self.kept, self.inputs, self.delta, retain_graph=True)

    def both(self) -> None:
        torch.autograd.grad(self.forward(), self.inputs, self.delta)


def routed(way: str, h: Tensor, delta: Tensor, k: int) -> Operation:
    """A routed activation of the first k candidates, with the statistics of the default policy."""
    names = CANDIDATES[:k]
    logits = torch.zeros(k, device=h.device, requires_grad=True)
    temperature = torch.ones((), device=h.device)
    if WAYS[way].plain:
        noise = torch.zeros(k, device=h.device)
        return Operation(h, delta, lambda h: plain_blend(h, logits, noise, temperature, names), [logits])
    p = torch.full((1, k), 1 / k, device=h.device)
    wanted = WAYS[way].kernels

    def blend(h: Tensor) -> Any:
        kernels.use(wanted)
        return routed_activation(h, logits, p, p, temperature, names, range(k), 1, SENSITIVITY)

    return Operation(h, delta, blend, [logits])


def tensors(options: Options) -> tuple[Tensor, Tensor]:
    """h, which needs a gradient, and δ: what 64 channels of 32×32 leave, channels-last."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.elements // (64 * 32 * 32), 64, 32, 32)

    def random() -> Tensor:
        host = torch.randn(shape, generator=generator)
        return host.to(options.where, options.dtype, memory_format=torch.channels_last)

    return random().requires_grad_(), random()


def measure(options: Options, deadline: Deadline) -> list[OperationRow]:
    """Time each operation in each direction; on a GPU also from graphs, where the host's part is gone."""
    h, delta = tensors(options)
    operations: dict[str, Operation] = {
        BASELINE: Operation(h, delta, F.relu),
        GELU: Operation(h, delta, F.gelu),
        **{way: routed(way, h, delta, PAPERS_K) for way in options.ways if not WAYS[way].fuse},
    }
    runs: dict[_Key, Run] = {}
    errors: dict[_Key, str] = {}
    modes = ("eager", "graph") if options.device == "cuda" else ("eager",)
    target = torch.empty_like(delta)

    def copy() -> None:
        target.copy_(delta)

    for mode in modes:
        for name in (COPY, *operations):
            for direction in DIRECTIONS if name != COPY else ("forward",):
                key = _Key(name, direction, mode)
                try:
                    deadline.check()
                    run = copy if name == COPY else getattr(operations[name], direction)
                    runs[key] = prepared(run, name, mode, options.where)
                except Exception as error:
                    errors[key] = told(error)
    times, failed = interleaved(runs, options.repeats, options.where, options.burst_ms / 3, deadline)
    errors |= {key: told(error) for key, error in failed.items()}
    return [
        _row(key, times, errors.get(key, ""), options) for key in [*runs, *(key for key in errors if key not in runs)]
    ]


def prepared(run: Run, way: str, mode: str, device: torch.device) -> Run:
    """Warm an operation up, and make a graph of it where one is asked for."""
    if way in WAYS:
        kernels.use(WAYS[way].kernels)
    for _ in range(WARM_UP):
        run()
    if way in WAYS:
        check_kernels(way, device)
    return captured(run, device) if mode == "graph" else run


def _row(key: _Key, times: dict[_Key, list[float]], error: str, options: Options) -> OperationRow:
    measured: dict[str, Any] = {}
    if key in times:
        size = options.elements * options.dtype.itemsize

        def speed(one: _Key) -> float:
            return _TENSORS[one.direction] * size / (spread(times[one]).median * 1e6)

        measured = with_times(spread(times[key]), "ms") | {"gb_per_s": speed(key)}
        base, copied = _Key(BASELINE, key.direction, key.mode), _Key(COPY, "forward", key.mode)
        if base in times and key.operation != COPY:
            measured |= with_times(ratios(times[key], times[base]), "ratio")
        if copied in times:
            measured["of_copy"] = speed(key) / speed(copied)
    return OperationRow(
        **vars(key),
        elements=options.elements,
        dtype=str(options.dtype).removeprefix("torch."),
        candidates=PAPERS_K if key.operation in options.ways else None,
        error=error,
        **measured,
    )
