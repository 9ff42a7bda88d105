"""Capturing a training step in a CUDA graph, and the stream and threads that a study runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from flexact import Schedule
from flexact.errors import FlexActError
from flexact.ops import dispatch
from flexact.routing.sites import routers_of, sites_of
from flexact.studies.device_lock import wait
from flexact.studies.workers import one_thread


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a replay of what `work` does on the device. `work` must have run before on the current stream."""
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
    except Exception as error:  # leaving a broken capture raises a less specific error
        raise cause or error from None
    torch.cuda.synchronize(device)
    return graph.replay


def captured_by_thread(
    work: Callable[[], object], network: nn.Module, device: torch.device
) -> tuple[Callable[[], None], list[Any]]:
    """Return a replay of a training step, and what must live as long as the replay: the tables that it reads, which
    routers and sites replace at times.

    torch.cuda.graph is not used, because it synchronizes the whole device and collects garbage, which is too slow while
    other threads train.
    """
    wait(device)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    sites = sites_of(network)
    read: list[Any] = [dict(vars(part)) for one in routers_of(sites) for part in (one, one.gathered)]
    return graph.replay, read + [site.picked for site in sites]


def routing_state(schedule: Schedule) -> tuple[Any, ...]:
    """Return a tuple that changes when a graph must be captured again: when a candidate is dropped, a warm-up ends, or
    the weights are rewound."""
    if schedule.committed:
        return ()
    router = schedule.router
    sites = tuple(site.dropped_at._version for site in router.sites)
    return (router.warming_up, router.trying, schedule.rewound_at, *sites)


def autocast(device: torch.device, half: bool) -> torch.autocast:
    """Autocast to bf16, if `half`, on a GPU; without its cache of cast weights, which must not outlive a capture."""
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
