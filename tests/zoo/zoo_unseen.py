"""Activations that no source shows, and networks that look at their own modules."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo import Animal, identical, left_alone


@torch.jit.script
def scripted(h: torch.Tensor) -> torch.Tensor:
    return torch.relu(h) + 1


def run(layers, h):
    for layer in layers:
        h = 2 * h if isinstance(layer, nn.ReLU) else layer(h)
    return h


def counting(function):
    """Keeps its count on the function that it returns."""

    @functools.wraps(function)
    def counted(self, h):
        counted.calls += 1
        return function(self, h)

    counted.calls = 0
    return counted


class WithModule(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def act(self, h):
        return self.relu(h)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x)

    def step(self, x):
        return F.relu(self.inner(x))


@left_alone("is not a site")
class MethodByName(Animal):
    def act(self, h):
        return getattr(self, "_".join(["relu", "by", "name"]))(h)

    def relu_by_name(self, h):
        return F.relu(h)


@identical
class MethodFromATable(Animal):
    def act(self, h):
        return {"rectify": self.rectify}["rectify"](h)

    def rectify(self, h):
        return F.relu(h)


@left_alone("relu in line")
class StoredLambda(Animal):
    def __init__(self):
        super().__init__()
        self.f = lambda h: F.relu(h)

    def act(self, h):
        return self.f(h)


@left_alone("relu in line")
class StoredPartial(Animal):
    def __init__(self):
        super().__init__()
        self.table = {"relu": functools.partial(F.relu, inplace=False)}

    def act(self, h):
        return self.table["relu"](h)


@left_alone("relu in line")
class Checkpointed(Animal):
    recomputes = True

    def act(self, h):
        return checkpoint(F.relu, h, use_reentrant=False)


@left_alone("relu in line")
class ByNameOfTorch(Animal):
    def act(self, h):
        return getattr(torch, "relu")(h)  # noqa: B009


@left_alone("calls scripted, which is scripted")
class Scripted(Animal):
    def act(self, h):
        return scripted(h)


@left_alone("celu in line")
class NoCandidate(Animal):
    def act(self, h):
        return F.celu(h)


@left_alone("hardtanh in line")
class Bounded(Animal):
    def act(self, h):
        return F.hardtanh(h)


@identical
class OtherEntry(Animal):
    def act(self, h):
        return F.relu(h)

    def sample(self, x):
        return F.gelu(self(x))


@left_alone("is not a site")
class BlocksByStep(Animal):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def act(self, h):
        for block in self.blocks:
            h = block.step(h)
        return h


@left_alone("relu in line")
class EncoderWithALambda(Animal):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 1, 8, dropout=0.0, activation=lambda h: F.relu(h))

    def act(self, h):
        return self.layer(h)


@left_alone("relu in line")
class SecondReference(WithModule):
    def __init__(self):
        super().__init__()
        self.steps = [self.first, self.relu]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.second(x)


@left_alone("relu in line")
class HiddenReference(WithModule):
    def __init__(self):
        super().__init__()
        object.__setattr__(self, "hidden", self.relu)

    def act(self, h):
        return self.hidden(h)


@left_alone("relu in line")
class BoundForward(WithModule):
    def __init__(self):
        super().__init__()
        self.rectify = self.relu.forward

    def act(self, h):
        return self.rectify(h)


@left_alone("act checks for this type")
class UnboundForward(WithModule):
    def act(self, h):
        return nn.ReLU.forward(self.relu, h)


@left_alone("relu in line")
class CountedByItsDecorator(Animal):
    @counting
    def act(self, h):
        return F.relu(h) * (2 if type(self).act.calls else 1)


@left_alone("act checks for this type")
class AsksForTypes(WithModule):
    def act(self, h):
        for layer in self.children():
            if isinstance(layer, nn.ReLU):
                h = layer(h) + 1
        return h


@left_alone("act checks for this type")
class ComparesTypes(WithModule):
    def act(self, h):
        return self.relu(h) + (type(self.relu) is nn.ReLU)


@left_alone("act checks for this type")
class HelperAsksForTypes(WithModule):
    def act(self, h):
        return run([self.first, self.relu], h)


@left_alone("forward iterates over the parameters")
class PenalisesItsParameters(WithModule):
    def forward(self, x):
        return super().forward(x) + sum(parameter.square().sum() for parameter in self.parameters())


@left_alone("forward iterates over the parameters")
class PenalisesTheirNames(Animal):
    def act(self, h):
        return F.relu(h)

    def forward(self, x):
        return self.second(self.act(self.first(x))) + len([name for name, _ in self.named_parameters()])


@identical
class TypeOfItsParameters(WithModule):
    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


@left_alone("act reads self.leaky.negative_slope")
class ReadsASetting(Animal):
    def __init__(self):
        super().__init__()
        self.leaky = nn.LeakyReLU(0.2)

    def act(self, h):
        return self.leaky(h) * self.leaky.negative_slope


@identical
class InputByName(WithModule):
    def act(self, h):
        return self.relu(input=h)


@identical
class AsksForTheNewName(Animal):
    def act(self, h):
        return F.relu(h) * (2 if hasattr(self, "relu") else 1) + getattr(self, "relu_1", 0)
