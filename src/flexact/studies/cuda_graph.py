"""Training steps as CUDA graphs, the streams that they run on, and the lock of threads that share a GPU."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexact import Schedule
from flexact.ops import dispatch
from flexact.routing.sites import routers_of, sites_of
from flexact.studies.workers import one_thread

DEVICE = threading.RLock()
"""A lock for several threads that train on one GPU.

All threads may replay graphs at the same time, each on its own stream. Everything else (setup, capture, evaluation)
allocates memory and uses torch's global generator, so only one thread at a time may do it.
"""


@contextmanager
def released() -> Iterator[None]:
    """Release the lock if this thread holds it, and acquire it again afterwards."""
    try:
        DEVICE.release()
    except RuntimeError:  # another thread holds it, or none
        yield
        return
    try:
        yield
    finally:
        DEVICE.acquire()


def wait(device: torch.device) -> None:
    """Wait for the current stream, while other threads may use the device."""
    if device.type == "cuda":
        with released():
            torch.cuda.current_stream(device).synchronize()


def captured_by_thread(
    work: Callable[[], object], network: nn.Module, device: torch.device
) -> tuple[Callable[[], None], list[Any]]:
    """Return a function that replays a training step, and the tables that the replay reads. The caller must keep the
    tables as long as the function, because routers and sites replace theirs at times.

    torch.cuda.graph is not used, because it synchronizes the whole device and collects garbage, which is too slow while
    other threads train.
    """
    wait(device)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        work()
    except BaseException:
        with suppress(RuntimeError):  # leaving a broken capture raises a less specific error
            graph.capture_end()
        raise
    graph.capture_end()
    sites = sites_of(network)
    read: list[Any] = [dict(vars(part)) for one in routers_of(sites) for part in (one, one.call_statistics)]
    return graph.replay, read + [site.picked for site in sites]


EAGER_STEPS = 3
"""Eager steps before a capture: they compile kernels and allocate memory that outlives a step."""


@dataclass(frozen=True)
class Graph:
    """A captured training step, and the memory that it uses."""

    replay: Callable[[], None]
    read: list[Any]
    """The tables that it reads; see `captured_by_thread`."""
    loss: Tensor
    """The loss that it writes."""
    states: dict[Any, dict[str, Any]]
    """The optimizer's state by parameter, which it updates."""


class GraphedTraining(ABC):
    """The training of a network in steps. On a GPU, a step replays a CUDA graph; the first `EAGER_STEPS` steps, and as
    many after each change of the routing, are eager.

    A step reads its data indices and its learning rate from tables on the device, at a position that it advances
    itself. So the host only launches steps, and a rewind only sets the position. After the last row, the first follows.

    order: the integers that the steps read, such as data indices, with one row per step. rates: the learning rates.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, network: nn.Module, device: torch.device, order: Tensor, rates: Sequence[float]) -> None:
        self.network, self.device = network.train(), device
        self._order, self._rates = order.to(device), torch.tensor(rates, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._lr = torch.full((), rates[0], device=device)
        """The learning rate of the step. A captured graph reads it from this tensor."""
        self.schedule: Schedule | None = None
        self.loss = torch.zeros((), device=device)
        """The loss of the last step, on the device."""
        self.graph: Graph | None = None
        self._captures = device.type == "cuda"
        self._eager_steps = 0

    @abstractmethod
    def _work(self) -> None:
        """Do what a graph captures: read the step's row, forward, backward and the optimizer's step. Sets the loss."""

    def _next_row(self) -> Tensor:
        """Set the learning rate of this step, return its row of the order, and advance the place."""
        self._lr.copy_(self._rates.index_select(0, self._place).squeeze(0))
        row = self._order.index_select(0, self._place).squeeze(0)
        self._place.add_(1).remainder_(len(self._rates))
        return row

    def step(self) -> None:
        """Train for one step, without waiting for the device."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._work()
            self._eager_steps += 1
        if self.schedule is not None:
            before, tried = routing_state(self.schedule), self.schedule.router.trying
            self.schedule.step(self.loss)
            if routing_state(self.schedule) != before:
                self._forget_graph(tried)
            if self.schedule.rewound_at == self.schedule.steps_done:
                self._place.fill_(self.schedule.trained_steps)
        if self._captures and self.graph is None and self._eager_steps >= EAGER_STEPS:
            replay, read = captured_by_thread(self._work, self.network, self.device)
            # A rewind gives the optimizer other states, but the graph keeps its own.
            self.graph = Graph(replay, read, self.loss, dict(self.optimizer.state))

    def _forget_graph(self, tried: int | None = None) -> None:
        """Discard the graph, because the network runs other functions or its optimizer has other memory.

        tried: the candidate of a trial that the graph trained.
        """
        if self.graph is not None:
            wait(self.device)  # the graph may still be running
        self.graph, self._eager_steps = None, 0


def routing_state(schedule: Schedule) -> tuple[Any, ...]:
    """Return a tuple that changes when a graph must be captured again: when a candidate is dropped, a warm-up ends, or
    the weights are rewound."""
    if schedule.committed:
        return ()
    router = schedule.router
    sites = tuple(site.dropped_at._version for site in router.sites)
    return (router.warming_up, router.trying, schedule.rewound_at, *sites)


def autocast(device: torch.device, half: bool) -> torch.autocast:
    """Autocast to bf16 on a GPU if `half`. Its cache of cast weights is off, because it must not outlive a capture."""
    return torch.autocast(device.type, torch.bfloat16, enabled=half and device.type == "cuda", cache_enabled=False)


_streams = threading.local()


def _stream_of_this_thread(device: torch.device) -> torch.cuda.Stream:
    """Return the same stream every time. torch hands out 32 streams in turn, so a thread that took a new one per run
    would soon share it with a thread that captures."""
    kept: dict[str, torch.cuda.Stream] = vars(_streams)
    if str(device) not in kept:
        kept[str(device)] = torch.cuda.Stream(device)
    return kept[str(device)]


@contextmanager
def study_stream(device: torch.device) -> Iterator[None]:
    """Run everything on one stream that can be captured: a step is warmed up on the stream that captures it.

    On a CPU, use one thread: several wait for each other in every operator, which takes seconds on busy cores.
    """
    where: AbstractContextManager[Any] = one_thread()
    if device.type == "cuda":
        side = _stream_of_this_thread(device)
        side.wait_stream(torch.cuda.current_stream(device))
        where = torch.cuda.stream(side)
    before = dispatch.wanted()
    try:
        with where:
            yield
    finally:
        dispatch.use(before)
