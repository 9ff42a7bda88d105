"""The small networks, each with its batch, its loss and its way of picking."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact


class Block(nn.Module):
    """A transformer block with causal attention, or a Mixer block without attention."""

    def __init__(self, width: int, length: int, *, attends: bool) -> None:
        super().__init__()
        self.attends, self.heads = attends, 4
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.tokens = nn.Sequential(nn.Linear(length, length), nn.GELU(), nn.Linear(length, length))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normalised = self.first(x)
        if self.attends:
            parts = self.qkv(normalised).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        else:
            mixed = self.tokens(normalised.transpose(1, 2)).transpose(1, 2)
        x = x + mixed
        return x + self.channels(self.second(x))


class UNet(nn.Module):
    """Two levels of convolutions with batch norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down, self.middle = _convolutions(3, width), _convolutions(width, 2 * width)
        self.up = _convolutions(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = self.down(x)
        low = F.interpolate(self.middle(F.max_pool2d(left, 2)), scale_factor=2)
        return self.out(self.up(torch.cat([left, low], dim=1)))


def _convolutions(before: int, after: int) -> nn.Sequential:
    widths = itertools.pairwise((before, after, after))
    layers = [(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def _transformer(*, attends: bool) -> nn.Sequential:
    return nn.Sequential(*(Block(64, 64, attends=attends) for _ in range(4)))


def _mlp(widths: tuple[int, ...], act: type[nn.Module]) -> nn.Sequential:
    layers = [(nn.Linear(a, b), act()) for a, b in itertools.pairwise(widths[:-1])]
    return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(*widths[-2:]))


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=10)


def _square(out: Tensor, x: Tensor) -> Tensor:
    return out.float().square().mean()


def second_derivative(out: Tensor, x: Tensor) -> Tensor:
    """Return the mean squared residual of u″ = −u."""
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (curvature + out).square().mean()


def _scaled_sigmoid(h: Tensor) -> Tensor:
    return h * torch.sigmoid(1.5 * h)


flexact.register_candidate("scaled_sigmoid", _scaled_sigmoid)


class Case(NamedTuple):
    """A network, the shape of its batch, its loss, and how it picks."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    loss: Callable[[Tensor, Tensor], Tensor] = _square
    config: flexact.FlexConfig = flexact.FlexConfig()


BLEND = flexact.FlexConfig(pick_by="blend")
CUSTOM = flexact.FlexConfig(candidates=("original", "relu", "silu", "scaled_sigmoid"))
PHYSICS_TRIAL = flexact.FlexConfig(candidates=("tanh", "gelu", "silu", "elu", "relu"))
PHYSICS_BLEND = flexact.FlexConfig(candidates=("tanh", "sine", "silu", "gelu"), pick_by="blend")
_MLP = partial(_mlp, (64, 64, 64, 10), nn.ReLU)
_PHYSICS = partial(_mlp, (1, 64, 64, 64, 1), nn.Tanh)

CASES = {
    "mlp": Case(_MLP, (64, 64)),
    "mlp-blend": Case(_MLP, (64, 64), config=BLEND),
    "mixer": Case(partial(_transformer, attends=False), (32, 64, 64)),
    "gpt": Case(partial(_transformer, attends=True), (32, 64, 64)),
    "gpt-custom": Case(partial(_transformer, attends=True), (32, 64, 64), config=CUSTOM),
    "unet": Case(UNet, (8, 3, 64, 64)),
    "convnext": Case(partial(_timm, "convnext_atto"), (8, 3, 64, 64)),
    "mobilenet": Case(partial(_timm, "mobilenetv3_small_100"), (8, 3, 96, 96)),
    "timm-resnet": Case(partial(_timm, "resnet18"), (4, 3, 64, 64)),
    "physics-trial": Case(_PHYSICS, (512, 1), second_derivative, PHYSICS_TRIAL),
    "physics-blend": Case(_PHYSICS, (512, 1), second_derivative, PHYSICS_BLEND),
}
