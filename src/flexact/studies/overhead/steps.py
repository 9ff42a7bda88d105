"""What is measured: a training step and an inference call, run eagerly, compiled, or replayed from a CUDA graph.

A training step is forward, loss, backward, the policy's update of the logits (a hook of the optimizer) and the
optimizer's step. The schedule's step follows on the host; a graph captures everything but that.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact import Schedule, param_groups, penalty
from flexact.ops import dispatch
from flexact.routing.sites import sites_of
from flexact.studies.cuda_graph import captured
from flexact.studies.overhead.measurement import PEAK, SAVED
from flexact.studies.overhead.networks import WAYS, check_kernels
from flexact.studies.overhead.timing import WARM_UP

COMPILER = "inductor"
"""torch.compile's backend."""
STEPS = 10**9
"""The total steps of the schedule: so many that no candidate is dropped while steps are timed."""
CLASSES = 10


class Batch:
    """Images and labels of CIFAR's shape, made on the CPU: the same on every device."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(size, 3, 32, 32, generator=generator)
        self.images = images.to(device, memory_format=torch.channels_last)
        self.labels = torch.randint(CLASSES, (size,), generator=generator).to(device)
        self.device, self.dtype = device, dtype

    def autocast(self) -> torch.autocast:
        """Without the cache of cast weights, which must not outlive a capture."""
        half = self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False)


class Training:
    """A network in training: `step` is one step of it."""

    loss: Tensor
    """Of the last step, on the device."""

    def __init__(self, network: nn.Module, way: str, batch: Batch, compiled: bool) -> None:
        self.network, self.way, self.batch = network.train(), way, batch
        on_gpu = batch.device.type == "cuda"
        self.routed = bool(sites_of(network))
        settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "fused": on_gpu}
        self.optimizer = torch.optim.SGD(param_groups(network, weight_decay=5e-4), **settings)
        self.schedule = Schedule(network, STEPS, self.optimizer) if self.routed else None
        self.forward: Callable[[Tensor], Tensor] = network
        self.step()  # eagerly also where it is compiled: a router's first forward takes another path than the others
        if compiled:
            self.forward = compiled_forward(network)

    def step(self) -> None:
        """One step."""
        dispatch.use(WAYS[self.way].kernels)
        self._work()
        self._host_part()

    def warm_up(self) -> None:
        """Run the first steps, which compile and allocate."""
        for _ in range(WARM_UP):
            self.step()
        check_kernels(self.way, self.batch.device)  # a kernel that fails to build falls back at its first call

    def capture(self) -> None:
        """Capture one step."""
        dispatch.use(WAYS[self.way].kernels)
        self._graph = captured(self._work, self.batch.device)
        self._host_part()

    def replay(self) -> None:
        """One step, from the graph."""
        self._graph()
        self._host_part()

    def _host_part(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def _work(self) -> None:
        with self.batch.autocast():
            loss = F.cross_entropy(self.forward(self.batch.images), self.batch.labels)
            if self.routed:
                loss = loss + penalty(self.network)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


class Inference:
    """A plain network in eval mode: `step` is one forward."""

    output: Tensor

    def __init__(self, network: nn.Module, batch: Batch, compiled: bool) -> None:
        self.network, self.batch = network.eval(), batch
        self.forward = compiled_forward(network) if compiled else network

    def step(self) -> None:
        """One forward."""
        with torch.inference_mode(), self.batch.autocast():
            self.output = self.forward(self.batch.images)

    def warm_up(self) -> None:
        """Run the first calls, which compile and allocate."""
        for _ in range(WARM_UP):
            self.step()

    def capture(self) -> None:
        """Capture one forward."""
        self._graph = captured(self.step, self.batch.device)

    def replay(self) -> None:
        """One forward, from the graph."""
        self._graph()


def compiled_forward(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The network's forward under torch.compile, with a code object of its own.

    torch.compile caches by code object: networks that shared one would check each other's guards, and the ninth would
    hit the recompilation limit.
    """

    def forward(images: Tensor) -> Tensor:
        out: Tensor = network(images)
        return out

    own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, backend=COMPILER, dynamic=False)
    return compiled


class Memory:
    """What a training step keeps in memory. Create it before the network: what is allocated by then is not counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.quantity = PEAK if device.type == "cuda" else SAVED
        if device.type == "cuda":
            self._settle()
            self._before = torch.cuda.memory_allocated(device)

    def of(self, run: Callable[[], None]) -> float:
        """MB: on a GPU the peak during a run, weights included; on a CPU what autograd saves for backward."""
        if self.device.type != "cuda":
            return saved_for_backward(run) / 2**20
        self._settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self._before) / 2**20

    def _settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)


def saved_for_backward(run: Callable[[], None]) -> int:
    """Bytes that autograd keeps during a run, each storage once, parameters included.

    >>> h = torch.randn(256, requires_grad=True)
    >>> saved_for_backward(lambda: h.tanh().sum().backward())
    1024
    """
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in sizes:
            kept.append(tensor.detach())
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def release(device: torch.device) -> None:
    """Free what a network left: compiled code, graphs, cached memory."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
