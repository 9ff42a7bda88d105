"""What is timed: one training step and one inference call, run eagerly, compiled, or replayed from a CUDA graph.

A training step is forward, loss, backward, the policy's work on the logits (a hook of the optimizer's) and the
optimizer's step; the host's part of the schedule follows. In a graph everything but that part is captured, so nothing
captured may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact import Schedule, param_groups, penalty
from flexact.errors import FlexActError
from flexact.ops import kernels
from flexact.sites import sites_of
from flexact.studies.overhead.networks import WAYS, check_kernels
from flexact.studies.overhead.timing import WARM_UP

COMPILER = "inductor"
"""torch.compile's backend."""
STEPS = 10**9
"""The length of the run that a schedule is told: so long that nothing is dropped while steps are timed."""
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
        kernels.use(WAYS[self.way].kernels)
        self._work()
        self._host_part()

    def warm_up(self) -> None:
        """Let everything be compiled and allocated that the first steps compile and allocate."""
        for _ in range(WARM_UP):
            self.step()
        check_kernels(self.way, self.batch.device)  # a kernel that fails to build is given up at its first call

    def capture(self) -> None:
        """Make one graph of a step; all tensors of it stay where they are."""
        kernels.use(WAYS[self.way].kernels)
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
        """Let everything be compiled and allocated that the first calls compile and allocate."""
        for _ in range(WARM_UP):
            self.step()

    def capture(self) -> None:
        """Make a graph of a forward."""
        self._graph = captured(self.step, self.batch.device)

    def replay(self) -> None:
        """One forward, from the graph."""
        self._graph()


def compiled_forward(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The network's forward under torch.compile, with a code object of its own.

    Compiled code is found by the code object of the function, one after another: networks that shared one would wait
    for each other's guards, and the ninth would not be compiled at all.
    """

    def forward(images: Tensor) -> Tensor:
        out: Tensor = network(images)
        return out

    own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, backend=COMPILER, dynamic=False)
    return compiled


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A replay of what `work` does on the device. It must have run before, on the stream that is current now."""
    if device.type != "cuda":
        raise FlexActError("a CUDA graph needs a CUDA device")
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    cause: Exception | None = None
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
            try:
                work()
            except Exception as error:
                cause = error
                raise
    except Exception as error:  # ending a broken capture raises too, and says less
        raise cause or error from None
    torch.cuda.synchronize(device)
    return graph.replay


@contextmanager
def study_stream(device: torch.device) -> Iterator[None]:
    """Run everything on one stream that can be captured: a step is warmed up on the one that it is captured on.

    On a CPU, in one thread: several wait for each other in every operator, which takes seconds where others want the
    cores too.
    """
    stream: AbstractContextManager[Any] = nullcontext()
    if device.type == "cuda":
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        stream = torch.cuda.stream(side)
    before, threads = kernels.wanted(), torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with stream:
            yield
    finally:
        kernels.use(before)
        torch.set_num_threads(threads)
