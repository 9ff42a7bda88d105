"""The tiny networks for fuzzing, and functions that check whether one has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flexact

WIDTH = 4


class Functional(nn.Module):
    """Calls its activations as functions, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(F.relu(self.first(F.relu(x)))))


class Block(nn.Module):
    """A residual block: batch norm, addition, one activation called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.first(x)))
        return self.relu(self.norm2(self.second(y)) + x)


class Sampled(nn.Sequential):
    """Has a second method that bypasses its call and so the hooks on it."""

    def sample(self, x: Tensor) -> Tensor:
        return self.forward(x)


def _mlp() -> nn.Module:
    return Sampled(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def _two_parts() -> nn.Module:
    """Two networks in one, with an optimizer for each."""
    return Sampled(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))


def _shared() -> nn.Module:
    activation = nn.SiLU()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH), activation)


def _images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 1), Block(), nn.Flatten(), nn.Linear(8, 1))


def _by_hand() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        flexact.FlexAct(candidates=("relu", "tanh", "silu")),
        flexact.FlexAct(),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (3, WIDTH)),
    "two parts": (_two_parts, (3, WIDTH)),
    "functional": (Functional, (3, WIDTH)),
    "shared": (_shared, (3, WIDTH)),
    "images": (_images, (3, 1, 2, 2)),
    "by hand": (_by_hand, (3, WIDTH)),
    "an activation": (nn.Tanh, (3, WIDTH)),
    "no activation": (lambda: nn.Linear(WIDTH, 1), (3, WIDTH)),
}
"""The function that builds each network, and the shape of its input."""


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns everything that a refused call must not change: the bits of all tensors, types, flags and hooks."""
    tensors = {name: _facts(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    modules = {
        name: (type(module), module.training, _own_hooks(module), sorted(module._modules))
        for name, module in model.named_modules(remove_duplicate=False)
    }
    sites = {
        name: (module.alive, module.committed, module.router.step, module.config)
        for name, module in model.named_modules()
        if isinstance(module, flexact.FlexAct)
    }
    return {"tensors": tensors, "modules": modules, "sites": sites}


def _own_hooks(module: nn.Module) -> int:
    """Returns the number of forward pre-hooks, except those that watch a first forward and then remove themselves."""
    hooks = module._forward_pre_hooks.values()
    return sum(type(hook).__module__ != "flexact.surgery.watching" for hook in hooks)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), tensor.requires_grad, hashlib.sha256(data).digest()
