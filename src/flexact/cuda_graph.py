"""CapturedStep: a training step as a CUDA graph, which is captured again whenever the network changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from flexact.errors import FlexActError
from flexact.policy.schedule import Schedule
from flexact.policy.step_hooks import listen
from flexact.routing.call_statistics import rank_count
from flexact.routing.site import version_of

WARM_UP = 3
"""Eager steps before a capture. They compile kernels and allocate the optimizer's state, which outlives a step."""
MANY = 50
"""Consecutive steps without a graph after which a warning is given."""
_NEVER_CAPTURED = (
    f"{MANY} consecutive steps were not captured in a CUDA graph, because the shapes of the batch or a hyperparameter "
    "of the optimizer keep changing. Pad the batches, and create the optimizer with a learning rate on the GPU: "
    "lr=torch.tensor(0.1, device='cuda')."
)


class CapturedStep:
    """A training step that runs as one CUDA graph on a GPU, and eagerly on other devices.

    function: takes the tensors of a batch, computes the loss and its gradients, steps the optimizer, sets the gradients
    to None, and returns the loss. It must not read values on the host, for example by `.item()`.
    schedule: the `Schedule` of the model. Its `step(loss)` stays in the training loop.

    Call it with the tensors of a batch. It moves them to the model's device, and returns the detached loss. The first
    three steps are eager, and so are three after each change of what a graph holds: a drop, the commitment, a rewind,
    other shapes, another optimizer state, or other hyperparameters. With several ranks, all steps are eager.

    >>> import torch, flexact
    >>> from flexact.cuda_graph import CapturedStep
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> schedule = flexact.Schedule(model, 10, optimizer)
    >>> def train(x, y):
    ...     loss = torch.nn.functional.mse_loss(model(x), y)
    ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
    ...     return loss
    >>> step = CapturedStep(train, schedule)
    >>> for _ in range(10):
    ...     schedule.step(step(torch.randn(4, 2), torch.zeros(4, 1)))
    >>> schedule.committed
    True
    """

    def __init__(self, function: Callable[..., Tensor], schedule: Schedule) -> None:
        self._function, self._schedule = function, schedule
        self._optimizers: dict[int, Optimizer] = {}
        self._running = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._read_by_graph: list[Any] = []
        self._shapes: list[Any] = []
        self._captured_shapes: list[Any] = []
        self._held: tuple[Any, ...] = ()
        self._warm_up = self._eager_steps = 0
        listen(self._note)

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    def reset(self) -> None:
        """Discard the graph, so that the step is captured again. Call this after a change that is not noticed, for
        example of a parameter's `requires_grad`."""
        if self._graph is not None and self._stream is not None:
            self._stream.synchronize()  # the graph may still be running
        self._graph, self._read_by_graph, self._warm_up = None, [], 0

    def __call__(self, *batch: Tensor) -> Tensor:
        if others := [value for value in batch if not isinstance(value, Tensor)]:
            raise FlexActError(f"a CapturedStep takes the tensors of a batch; got {others[0]!r:.80}.")
        device = self._schedule.router.device
        if device.type != "cuda" or rank_count() > 1:
            return self._run([tensor.to(device) for tensor in batch])
        # One stream for eager steps, captures and replays: a step is warmed up on the stream that captures it.
        self._stream = self._stream or torch.cuda.Stream(device)
        outer = torch.cuda.current_stream(device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            loss = self._replayed_or_run(batch, device)
        outer.wait_stream(self._stream)
        return loss.clone()  # the next replay overwrites the loss

    def _replayed_or_run(self, batch: Sequence[Tensor], device: torch.device) -> Tensor:
        if (held := self._held_by_a_graph()) != self._held:
            self.reset()
            self._held = held
        shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
        if shapes != self._shapes:
            self._shapes, self._warm_up = shapes, 0
        if self._graph is None or shapes != self._captured_shapes:
            if self._warm_up < WARM_UP:
                self._warm_up += 1
                self._eager_steps += 1
                if self._eager_steps == MANY:
                    warnings.warn(_NEVER_CAPTURED, stacklevel=3)
                loss = self._run([tensor.to(device, non_blocking=True) for tensor in batch])
                self._held = self._held_by_a_graph()  # the first step finds the optimizers
                return loss
            self._graph = self._capture(batch, device)
            self._captured_shapes = shapes
        for own, tensor in zip(self._inputs, batch, strict=True):
            own.copy_(tensor, non_blocking=True)
        self._graph.replay()
        self._eager_steps = 0
        return self._loss

    def _run(self, batch: Sequence[Tensor]) -> Tensor:
        self._running = True
        try:
            loss = self._function(*batch)
        finally:
            self._running = False
        if not isinstance(loss, Tensor):
            raise FlexActError(f"the function of a CapturedStep must return the loss, a tensor; got {loss!r:.80}.")
        return loss.detach()

    def _capture(self, batch: Sequence[Tensor], device: torch.device) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(device)  # the graph of other shapes, which is discarded, may still be running
        self._inputs = [torch.empty_like(tensor, device=device) for tensor in batch]
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            # "thread_local", because threads that load data may use CUDA meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    self._loss = self._run([own.detach() for own in self._inputs])
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:  # leaving a broken capture raises a less specific error
            if isinstance(cause, FlexActError):
                raise cause from None
            raise FlexActError(
                f"this step cannot be captured in a CUDA graph: {cause or error!s:.300} A step must not read values on "
                "the host (.item(), a GradScaler). SGD needs fused=True, and most other optimizers capturable=True."
            ) from cause or error
        # The router and the sites replace tables at times, for example in an evaluation. Those that the graph reads
        # must live as long as it does.
        router = self._schedule.router
        self._read_by_graph = [dict(vars(router)), dict(vars(router.call_statistics))]
        self._read_by_graph += [site.picked for site in router.sites]
        self._read_by_graph += [optimizer.state for optimizer in self._optimizers.values()]
        return graph

    def _note(self, optimizer: Optimizer) -> None:
        """Keep an optimizer that the function steps; called before each step of any optimizer."""
        if self._running:
            self._optimizers[id(optimizer)] = optimizer

    def _held_by_a_graph(self) -> tuple[Any, ...]:
        """Return a value that changes when a graph of this step is outdated."""
        router = self._schedule.router
        routing = (router.warming_up, router.trying, self._schedule.rewound_at)
        drops = [version_of(site.dropped_at) for site in router.sites]
        hyperparameters = [
            (key, id(value) if isinstance(value, Tensor) else value)
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for key, value in (*group.items(), ("state", id(optimizer.state)))
            if key != "params"
        ]
        return (*routing, *drops, *hyperparameters)
