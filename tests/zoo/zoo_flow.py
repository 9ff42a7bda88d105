"""Models with unusual control flow, modes and side effects, or that change after the conversion."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo import Animal, identical, left_alone


class Pair(NamedTuple):
    value: Tensor
    hidden: Tensor


@dataclass
class Answer:
    value: Tensor
    name: str = "answer"


class Config:
    def __init__(self):
        self.flag = False
        self.scale = 2.0


class Drop(nn.Module):
    """Its method reads its own mode."""

    def __init__(self):
        super().__init__()
        self.p = 0.5

    def apply_to(self, h):
        return F.dropout(h, self.p, self.training)

    def forward(self, h):
        return self.apply_to(h)


class Counted(nn.Linear):
    """Has a side effect when it is called."""

    def __init__(self):
        super().__init__(6, 6)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x) * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


@identical
class Dropout(Animal):
    def act(self, h):
        return F.dropout(F.relu(h), self.p, self.training)


@identical
class DropoutOfAChild(Animal):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def act(self, h):
        return F.dropout(F.relu(h), self.drop.p, self.drop.training)

    def change(self):
        self.drop.p = 0.2


@identical
class ModeOfAChild(Animal):
    def __init__(self):
        super().__init__()
        self.drop = Drop()

    def act(self, h):
        return self.drop.apply_to(F.relu(h))


@left_alone("is not a site")
class ActivationInAChildsMethod(Animal):
    def __init__(self):
        super().__init__()
        self.child = MethodsOfItsOwn()

    def act(self, h):
        return self.child.encode(h)


class MethodsOfItsOwn(nn.Module):
    def encode(self, h):
        return F.relu(h) * 2

    def forward(self, h):
        return torch.tanh(h)


@identical
class OtherInTraining(Animal):
    def act(self, h):
        return F.relu(h) if self.training else torch.tanh(h)


@identical
class MoreInTraining(Animal):
    def act(self, h):
        if self.training:
            h = torch.tanh(h)
        return F.relu(h)


@identical
class ByArgument(Animal):
    def forward(self, x, mask=None):
        h = F.relu(self.first(x))
        if mask is None:
            mask = torch.ones_like(h)
        return self.second(h * mask)


@identical
class ByKeyword(Animal):
    def forward(self, x, *, scale=2.0, shift: float = 1.0) -> Tensor:
        return self.second(F.relu(self.first(x)) * scale + shift)

    def inputs(self):
        return (torch.randn(5, 6),), {"shift": 0.5}


@identical
class PositionalOnly(Animal):
    def forward(self, x, /, scale=3.0):
        return self.second(F.relu(self.first(x))) * scale


@identical
class ManyArguments(Animal):
    def forward(self, x, *others, **named):
        h = F.relu(self.first(x))
        for other in (*others, *named.values()):
            h = h + other
        return self.second(h)

    def inputs(self):
        return (torch.randn(5, 6), torch.randn(5, 6)), {"y": torch.randn(6)}


@identical
class ByType(Animal):
    def forward(self, x):
        if isinstance(x, (list, tuple)):
            x = torch.cat(x)
        return self.second(F.relu(self.first(x)))

    def inputs(self):
        return ([torch.randn(2, 6), torch.randn(3, 6)],), {}


@identical
class ByAttribute(Animal):
    def forward(self, x):
        return self.second(F.relu(self.first(x.tensors if hasattr(x, "tensors") else x)))


@identical
class ByValue(Animal):
    def forward(self, x):
        h = F.relu(self.first(x))
        return self.second(h) if h.sum() > 1 else self.second(-h)


@identical
class ByShape(Animal):
    def forward(self, x):
        batch, width = x.shape
        h = F.relu(self.first(x.view(batch, width)))
        return self.second(h).reshape(batch, -1)


@identical
class ByGradMode(Animal):
    def act(self, h):
        return F.relu(h) if torch.is_grad_enabled() else h


@identical
class Loop(Animal):
    def act(self, h):
        for _ in range(3):
            h = F.relu(h) + 0.1
        return h


@identical
class WhileLoop(Animal):
    def act(self, h):
        n = 0
        while n < h.shape[0]:
            h, n = F.relu(h), n + 2
        return h


@identical
class Comprehension(Animal):
    def act(self, h):
        return torch.stack([F.relu(row) for row in h])


@identical
class Generator(Animal):
    def act(self, h):
        return sum(F.relu(h * i) for i in range(3))


@identical
class LambdaInside(Animal):
    def act(self, h):
        f = lambda t: F.relu(t) * self.p  # noqa: E731
        return f(h)


@identical
class FunctionInside(Animal):
    def act(self, h):
        def inner(t):
            return F.relu(t) + self.p

        return inner(h)


@identical
class TryBlock(Animal):
    def act(self, h):
        try:
            return F.relu(h.reshape(7, 7))
        except RuntimeError:
            return torch.tanh(h)
        finally:
            self.p = 0.25


@identical
class WithBlock(Animal):
    def act(self, h):
        with torch.no_grad():
            h = F.relu(h)
        return h


@identical
class WithAutocast(Animal):
    def act(self, h):
        with torch.autocast("cpu", torch.bfloat16):
            h = F.relu(self.first(h))
        return h.float()


@identical
class ExitStack(Animal):
    def act(self, h):
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.nullcontext())
            return F.relu(h)


@identical
class Walrus(Animal):
    def act(self, h):
        if (n := F.relu(h)).sum() > 0:
            return n
        return -n


@identical
class Match(Animal):
    def act(self, h):
        match h.dim():
            case 2:
                return F.relu(h)
            case n:
                return h * n


@identical
class Assertion(Animal):
    def act(self, h):
        assert h.shape[-1] == 6, f"got {h.shape}"
        return F.relu(h)


@identical
class GlobalStatement(Animal):
    def act(self, h):
        global _calls
        _calls += 1
        return F.relu(h)


_calls = 0


@identical
class Checkpointed(Animal):
    recomputes = True

    def forward(self, x):
        return self.second(checkpoint(self.inner, x, use_reentrant=False))

    def inner(self, x):
        return F.relu(self.first(x))


@identical
class CheckpointedFunctionInside(Animal):
    recomputes = True

    def forward(self, x):
        def inner(t):
            return F.relu(self.first(t))

        return self.second(checkpoint(inner, x, use_reentrant=False))


@identical
class OwnBackward(Animal):
    def act(self, h):
        return F.relu(Doubled.apply(h))


@identical
class Mapped(Animal):
    def act(self, h):
        return F.relu(torch.func.vmap(torch.cos)(h))


@identical
class NumpyScalar(Animal):
    def act(self, h):
        return F.relu(h) / np.sqrt(6)


@identical
class NumpyArray(Animal):
    def act(self, h):
        return F.relu(h) * torch.from_numpy(np.arange(6, dtype=np.float32))


@identical
class FreshTensor(Animal):
    def act(self, h):
        return F.relu(h) * torch.arange(6) + torch.randn(6)


@identical
class OwnGenerator(Animal):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def act(self, h):
        return F.relu(h) * float(self.generator.random())


@identical
class ByChance(Animal):
    def act(self, h):
        return F.relu(h) if random.random() < 0.5 else torch.tanh(-h)


@identical
class MixedByChance(Animal):
    def act(self, h):
        return F.relu(h) * np.random.beta(1.0, 1.0)  # noqa: NPY002


@identical
class Stores(Animal):
    def act(self, h):
        self.features = F.relu(h)
        return self.features


@identical
class Appends(Animal):
    def __init__(self):
        super().__init__()
        self.history = []

    def act(self, h):
        h = F.relu(h)
        self.history.append(h.detach().sum())
        return h


@identical
class Counts(Animal):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def act(self, h):
        self.count.add_(1)
        self.calls += 1
        return F.relu(h) * self.count


@identical
class SetsByName(Animal):
    def act(self, h):
        setattr(self, f"seen_{h.shape[0]}", int(h.shape[0]))
        return F.relu(h)


@identical
class Prints(Animal):
    def act(self, h):
        print("forward")
        return F.relu(h)


@identical
class Remembers(Animal):
    def __init__(self):
        super().__init__()
        self.memory = deque(maxlen=2)

    def act(self, h):
        self.memory.append(h.detach().mean())
        return F.relu(h) + sum(self.memory)


@identical
class ReturnsOrderedDict(Animal):
    def forward(self, x):
        h = F.relu(self.first(x))
        return OrderedDict(value=self.second(h), hidden=h)


@identical
class ReturnsDefaultDict(Animal):
    def forward(self, x):
        found = defaultdict(list)
        found["h"].append(F.relu(self.first(x)))
        return found


@identical
class ReturnsNamedTuple(Animal):
    def forward(self, x):
        h = F.relu(self.first(x))
        return Pair(self.second(h), h)


@identical
class ReturnsDataclass(Animal):
    def forward(self, x):
        return Answer(self.second(F.relu(self.first(x))))


@identical
class ReturnsMixture(Animal):
    def forward(self, x):
        h = F.relu(self.first(x))
        return {"a": [h, None, 3], "b": (self.second(h), "text")}


@identical
class Generates(Animal):
    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            h = F.relu(h)
            yield h


@identical
class AdapterLater(Animal):
    def __init__(self):
        super().__init__()
        self.adapter = None

    def act(self, h):
        h = F.relu(h)
        if self.adapter is not None:
            h = h + self.adapter(h)
        return h

    def change(self):
        torch.manual_seed(1)
        self.adapter = nn.Linear(6, 6)


@identical
class MaskLater(Animal):
    def __init__(self):
        super().__init__()
        self.mask = None

    def act(self, h):
        h = F.relu(h)
        return h if self.mask is None else h * self.mask

    def change(self):
        self.mask = torch.tensor([1.0, 0, 1, 0, 1, 0])


@identical
class LayersLater(Animal):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])

    def act(self, h):
        for layer in self.layers:
            h = F.relu(layer(h))
        return h

    def change(self):
        torch.manual_seed(1)
        self.layers.append(nn.Linear(6, 6))


@identical
class SettingsLater(Animal):
    def __init__(self):
        super().__init__()
        self.cfg = Config()

    def act(self, h):
        h = F.relu(h) * self.cfg.scale
        return h + 1 if self.cfg.flag else h

    def change(self):
        self.cfg.flag, self.cfg.scale = True, 3.0


@identical
class ActivationLater(Animal):
    """A branch that does not run yet keeps its own function."""

    def __init__(self):
        super().__init__()
        self.gated = False

    def act(self, h):
        h = F.relu(h)
        if self.gated:
            h = h * torch.sigmoid(h)
        return h


@identical
class DeviceOfTheModule(Animal):
    def __init__(self):
        super().__init__()
        self.device = "cpu"

    def act(self, h):
        return F.relu(h).to(self.device)

    def change(self):
        self.device = torch.float64
        self.second.double()


@identical
class CallsOfAChildCount(Animal):
    def __init__(self):
        super().__init__()
        self.first = Counted()

    def act(self, h):
        return F.relu(h) * self.first.calls


@identical
class NestedContainers(Animal):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"in": nn.Linear(6, 6), "lambda": nn.Linear(6, 6)})

    def act(self, h):
        for name in ("in", "lambda"):
            h = F.relu(self.blocks[name](h))
        return h


@identical
class SharedChild(Animal):
    def __init__(self):
        super().__init__()
        self.again = self.first

    def act(self, h):
        return F.relu(self.again(F.relu(h)))


@identical
class Recursive(Animal):
    def act(self, h, depth=2):
        h = F.relu(h)
        return h if depth == 0 else self.act(h * 2 - 1, depth - 1)


@identical
class BatchNorm(Animal):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def act(self, h):
        return F.relu(self.norm(h))
