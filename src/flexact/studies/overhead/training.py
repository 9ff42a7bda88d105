"""The networks that the study compares, and their training step: direct, compiled, or replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact import FlexAct, FlexConfig, Schedule, convert, param_groups
from flexact.candidates.registry import lookup
from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.ops import dispatch
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import ResNet
from flexact.studies.cuda_graph import autocast, captured_by_thread
from flexact.studies.overhead.options import BASELINE, WAYS

PLACEMENTS: dict[str, str] = {"penultimate": "penultimate", "all": "layer*"}
"""The argument `where` of each placement. As in the paper, "all" means all blocks without the stem."""


class PlainSite(FlexAct):
    """A site whose candidates, blend and statistics are separate torch operations. It can only be used in training, and
    only before the first drop."""

    def forward(self, h: Tensor) -> Tensor:
        routing = self.routing(h)
        noise = self.router.noise[self.table_rows.start]
        x, sensitivity = plain_blend(h, self.logits, noise, self.temperature, self.keys)
        self.gather(routing, sensitivity.unsqueeze(0))
        return x


def plain_blend(
    h: Tensor, logits: Tensor, noise: Tensor, temperature: Tensor, names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return x = Σ p_k σ_k(h), whose gradients come from autograd, and the mean |σ_k′(h)| with shape (K,)."""
    log_pi = torch.log_softmax(logits, dim=-1)
    p = torch.softmax((log_pi + noise) / temperature, dim=-1)
    values = [lookup(name).function(h) for name in names]
    x = p[0] * values[0]
    for weight, value in zip(p[1:], values[1:], strict=True):
        x = x + weight * value
    with torch.no_grad():
        slopes = [lookup(name).derivative(h, value).abs() for name, value in zip(names, values, strict=True)]
        return x, torch.stack([slope.mean(dtype=torch.float32) for slope in slopes])


def build(
    blocks: Sequence[int],
    width: int,
    placement: str,
    way: str,
    device: torch.device,
    candidates: Sequence[str] = PAPER_CANDIDATES,
) -> nn.Module:
    """Return a ResNet on its device in channels-last layout; the weights are the same in every call. Selects the
    kernels of the implementation, and raises if they do not run on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not the GPU's, which a failed capture leaves unusable
        network: nn.Module = ResNet(blocks, width=width)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if placement == BASELINE:
        return network
    dispatch.use(WAYS[way].kernels)
    check_kernels(way, device)
    config = FlexConfig(candidates=tuple(candidates))
    network = convert(network, PLACEMENTS[placement], config, fuse=WAYS[way].fuse)
    if WAYS[way].plain:
        for site in sites_of(network):
            site.__class__ = PlainSite
    return network


def check_kernels(way: str, device: torch.device) -> None:
    """Raise unless an implementation's kernels are in use: those that fail to compile fall back at their first call."""
    wanted, found = WAYS[way].kernels, dispatch.active(device)
    if wanted not in ("auto", found.name):
        raise FlexActError(f"{wanted} does not run here: {found.reason}")


COMPILER = "inductor"
"""The backend of torch.compile."""
STEPS = 10**9
"""Total steps of the schedule. The first candidates are dropped after 350 steps; timing a ResNet takes fewer."""
CLASSES = 10
WARM_UP = 3
"""Steps before a network is measured."""


class Batch:
    """Random images and labels of CIFAR's shape. They are made on the CPU, so they are the same on every device."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(size, 3, 32, 32, generator=generator)
        self.images = images.to(device, memory_format=torch.channels_last)
        self.labels = torch.randint(CLASSES, (size,), generator=generator).to(device)
        self.device, self.dtype = device, dtype


class Training:
    """A network in training on one batch.

    A step consists of forward, loss, backward, the policy's update of the logits (a hook of the optimizer), the
    optimizer's step and, on the host, the schedule's step.
    """

    loss: Tensor
    """The loss of the last step, on the device."""

    def __init__(self, network: nn.Module, way: str, batch: Batch, compiled: bool) -> None:
        self.network, self.way, self.batch = network.train(), way, batch
        settings: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "fused": batch.device.type == "cuda"}
        self.optimizer = torch.optim.SGD(param_groups(network, weight_decay=5e-4), **settings)
        self.schedule = Schedule(network, STEPS, self.optimizer) if sites_of(network) else None
        self.forward: Callable[[Tensor], Tensor] = network
        self._replay: Callable[[], None] | None = None
        self.step()  # not compiled: a router's first forward takes a different path from later ones
        if compiled:
            self.forward = compiled_forward(network)

    def step(self) -> None:
        """Run one step, from the graph if one was captured."""
        (self._replay or self._on_device)()
        if self.schedule is not None:
            self.schedule.step()

    def warm_up(self) -> None:
        """Run the first steps, which compile and allocate."""
        if dispatch.active(self.batch.device).name == "triton":
            from flexact.ops.triton import extension  # needs Triton

            extension.wait()
        for _ in range(WARM_UP):
            self.step()
        check_kernels(self.way, self.batch.device)

    def capture(self) -> None:
        """Capture a step in a CUDA graph, which later steps replay."""
        if self.batch.device.type != "cuda":
            raise FlexActError("a CUDA graph needs a CUDA device.")
        self._replay, self._read = captured_by_thread(self._on_device, self.network, self.batch.device)

    def _on_device(self) -> None:
        """Run everything that a graph captures."""
        kernels = WAYS[self.way].kernels
        if dispatch.wanted() != kernels:  # the step of another network selected others
            dispatch.use(kernels)  # asks again what runs on the device, which takes longer than a small kernel
        with autocast(self.batch.device, self.batch.dtype == torch.bfloat16):
            loss = F.cross_entropy(self.forward(self.batch.images), self.batch.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


def compiled_forward(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the network's forward under torch.compile, with a code object of its own.

    torch.compile caches by code object: networks that shared one would check each other's guards, and the ninth would
    hit the recompilation limit.
    """

    def forward(images: Tensor) -> Tensor:
        out: Tensor = network(images)
        return out

    own = FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    compiled: Callable[[Tensor], Tensor] = torch.compile(own, backend=COMPILER, dynamic=False)
    return compiled
