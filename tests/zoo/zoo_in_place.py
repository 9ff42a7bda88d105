"""Models with calls that overwrite their tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo import Animal, identical, left_alone


@identical
class Flag(Animal):
    def act(self, h):
        return F.relu(h, inplace=True)


@identical
class PositionalFlag(Animal):
    def act(self, h):
        return F.relu(h, True)


@identical
class FlagBehindASetting(Animal):
    def act(self, h):
        return F.leaky_relu(h, 0.1, True)


@identical
class FlagOff(Animal):
    def act(self, h):
        return F.relu(h, inplace=False)


@identical
class FlagOfTheModule(Animal):
    def __init__(self):
        super().__init__()
        self.inplace = False

    def act(self, h):
        k = h * 1
        y = F.relu(k, inplace=self.inplace)
        return y + k

    def change(self):
        self.inplace = True


@identical
class FlagOfTheModuleOn(Animal):
    def __init__(self):
        super().__init__()
        self.inplace = True

    def act(self, h):
        k = h * 1
        F.relu(k, inplace=self.inplace)
        return k


@identical
class Function(Animal):
    def act(self, h):
        return torch.relu_(h)


@identical
class FunctionOfFunctional(Animal):
    def act(self, h):
        return F.relu_(h)


@identical
class Method(Animal):
    def act(self, h):
        return h.relu_()


@identical
class ResultUnused(Animal):
    def act(self, h):
        F.relu_(h)
        return h


@identical
class MethodResultUnused(Animal):
    def forward(self, x):
        h = self.first(x)
        h.relu_()
        return self.second(h)


@identical
class FreshLocal(Animal):
    def forward(self, x):
        h = self.first(x)
        h = F.relu(h, inplace=True)
        return self.second(h)


@identical
class FreshReadAgain(Animal):
    def forward(self, x):
        h = self.first(x)
        y = F.relu(h, inplace=True)
        return self.second(y * h)


@identical
class Alias(Animal):
    def forward(self, x):
        h = self.first(x)
        skip = h
        h = F.relu(h, inplace=True)
        return self.second(torch.cos(h) + skip)


@identical
class AliasByIdentity(Animal):
    def __init__(self):
        super().__init__()
        self.skip = nn.Identity()

    def forward(self, x):
        h = self.first(x)
        kept = self.skip(h)
        F.relu_(h)
        return self.second(torch.cos(h) + kept)


@identical
class AliasByDropout(Animal):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = self.first(x)
        return self.second(F.relu(self.drop(h), inplace=True) + h)


@identical
class View(Animal):
    def forward(self, x):
        h = self.first(x)
        F.relu_(h.view(-1))
        return self.second(h)


@identical
class PartOfATensor(Animal):
    def forward(self, x):
        h = self.first(x)
        F.relu_(h[:, :3])
        return self.second(h)


@identical
class PartByMethod(Animal):
    def forward(self, x):
        h = self.first(x)
        h[:, 2:].relu_()
        return self.second(h)


@identical
class ReadBefore(Animal):
    def forward(self, x):
        h = self.first(x)
        kept = h * 2
        h.relu_()
        return self.second(kept + h)


@identical
class ReadInTheSameExpression(Animal):
    def forward(self, x):
        h = self.first(x)
        return self.second(h + F.relu_(h))


@identical
class OfTheArgument(Animal):
    """Overwrites a tensor of its caller."""

    def forward(self, x):
        x = x * 1
        y = self.inner(x)
        return self.second(self.first(y + x))

    def inner(self, h):
        return F.relu(h, inplace=True)


@identical
class OfTheArgumentThenAdded(Animal):
    def forward(self, x):
        x = x + 0
        return self.block(x) + self.second(x)

    def block(self, x):
        h = F.relu(x, inplace=True)
        return self.second(h + x)


@identical
class InALoop(Animal):
    def forward(self, x):
        h = self.first(x)
        parts = []
        for _ in range(2):
            h = h + 1
            parts.append(h)
            F.relu_(h)
        return self.second(sum(parts))


@identical
class InAComprehension(Animal):
    def forward(self, x):
        parts = [self.first(x), self.first(-x)]
        kept = [F.relu_(part) for part in parts]
        return self.second(sum(kept) + parts[0])


@identical
class InALambda(Animal):
    def forward(self, x):
        h = self.first(x)
        (lambda t: F.relu_(t))(h)
        return self.second(h)


@identical
class BesideAddition(Animal):
    def forward(self, x):
        h = self.first(x)
        h += x
        return self.second(F.relu_(h))


@identical
class Temporary(Animal):
    def forward(self, x):
        return self.second(F.relu(self.first(x), inplace=True))


@identical
class TemporarySum(Animal):
    def forward(self, x):
        return self.second(F.relu_(self.first(x) + x))


@identical
class UnderACondition(Animal):
    def forward(self, x):
        h = self.first(x)
        if x.shape[0] > 2:  # noqa: SIM108
            kept = h
        else:
            kept = h * 2
        F.relu_(h)
        return self.second(h + kept)


@identical
class ModuleResultUnused(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.first(x)
        self.relu(h)
        return self.second(h)


@identical
class ModuleWithAlias(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.first(x)
        skip = h
        h = self.relu(h)
        return self.second(torch.cos(h) + skip)


@identical
class ModuleOfTheArgument(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = x * 1
        return self.second(self.block(x) + x)

    def block(self, x):
        return self.first(self.relu(x))


@identical
class ModuleOfFresh(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.first(x)
        h = self.relu(h)
        return self.second(h)


@identical
class WithoutGradients(Animal):
    @torch.no_grad()
    def forward(self, x):
        h = self.first(x)
        g = self.first(h)
        F.relu_(h)
        return self.second(g + h)


@identical
class KeepsWhatIsOverwritten(Animal):
    def keep(self, h):
        self.seen = h
        return h

    def act(self, h):
        h = h * 1.0
        h = self.keep(h)
        F.relu_(h)
        return h + self.seen


@identical
class ReadInFinally(Animal):
    def act(self, h):
        try:
            g = self.first(h)
            return F.relu_(g)
        finally:
            self.last = g.detach().clone()


@identical
class ReadByALambda(Animal):
    def act(self, h):
        def read():
            return g

        g = self.first(h)
        return sum([F.relu_(g), read()])


@identical
class KeptByAHookOfASequential(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6))
        self.kept = []
        self.block.register_forward_hook(self.keep)

    def keep(self, module, args, result):
        self.kept.append(result)

    def act(self, h):
        return F.relu_(self.block(h)) + self.kept.pop()


@left_alone("it works in place, and other code may read its input")
class ModuleOfAChild(Animal):
    def __init__(self):
        super().__init__()
        self.table = nn.ModuleDict({"act": nn.ReLU(inplace=True)})

    def act(self, h):
        self.table["act"](h)
        return h


@left_alone("other than by calling it with one argument")
class FunctionOfAChildWithASetting(Animal):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.function = F.leaky_relu

    def act(self, h):
        return self.inner.function(h, 0.3)


def rectifiers():
    return nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)


@left_alone("it works in place, and other code may read its input")
class FirstOfASequential(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Sequential(nn.Dropout(0.0), nn.ReLU(inplace=True)), nn.Linear(6, 6))

    def act(self, h):
        return self.block(h) + h


@identical
class FirstOfASequentialAfterALayer(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))

    def act(self, h):
        return self.block(self.first(h)) + h


@identical
class AfterALayerOfASequential(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(*rectifiers())

    def act(self, h):
        return self.block(h) + h


@left_alone("it works in place, and other code may read its input")
class LayersOfASequential(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(*rectifiers())

    def act(self, h):
        before = self.block[0](h)
        return self.block[1](before) + before


@left_alone("it works in place, and other code may read its input")
class KeepsEveryOutput(Animal):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(rectifiers())

    def act(self, h):
        kept = []
        for layer in self.layers:
            h = layer(h)
            kept.append(h)
        return sum(kept)


@left_alone("it works in place, and other code may read its input")
class KeepsOutputsOfASequential(Animal):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*rectifiers())

    def act(self, h):
        kept = {}
        for name, layer in self.features._modules.items():
            h = kept[name] = layer(h)
        return kept["0"] + kept["2"]


@left_alone("it works in place, and other code may read its input")
class HookKeepsALayersOutput(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(*rectifiers())
        self.kept = []
        self.block[2].register_forward_hook(self.keep)

    def keep(self, module, args, result):
        self.kept.append(result)

    def act(self, h):
        return self.block(h) + self.kept.pop()


@left_alone("it works in place, and other code may read its input")
class CalledThroughAVariable(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def act(self, h):
        relu = self.relu
        relu(h)
        return h


class InPlace(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)


@identical
class ModuleRenames(InPlace):
    """The result has another name, and nothing reads the overwritten tensor later."""

    def act(self, h):
        g = h * 2
        y = self.relu(g)
        return y + 1


@identical
class ModuleRenamesAndReadsBoth(InPlace):
    def act(self, h):
        g = h * 2
        y = self.relu(g)
        return y + g


@identical
class ModuleRenamesInALoop(InPlace):
    def act(self, h):
        total, g = 0, h * 2
        for i in range(2):
            total = total + g
            g = h * i
            y = self.relu(g)
        return total + y
