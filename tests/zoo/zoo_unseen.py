"""Models with activations that are not in the source, and models that inspect their own modules."""

from __future__ import annotations

import functools
import types

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


def is_rectifier(layer):
    return isinstance(layer, nn.ReLU)


def scale_of(layer):
    return 2 if is_rectifier(layer) else 1


RECTIFIERS = nn.ReLU | nn.LeakyReLU
RECTIFIER_LIST = [nn.ReLU, nn.LeakyReLU]


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


@left_alone("threshold in line")
class NoCandidate(Animal):
    def act(self, h):
        return F.threshold(h, 0.1, 0.0)


@left_alone("rrelu in line")
class Noisy(Animal):
    def act(self, h):
        return F.rrelu(h)


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


@left_alone("forward iterates over the parameters")
class TypeOfItsParametersBehindAnActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        return self.relu(self.first(x)) * next(self.parameters()).ndim

    inputs, change, tolerance, recomputes = Animal.inputs, Animal.change, Animal.tolerance, Animal.recomputes


@left_alone("forward iterates over the parameters")
class AsksForAnyParameter(Animal):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, x):
        for layer in self.net:
            y = layer(x)
            x = x + y if next(layer.parameters(), None) is not None else y
        return x


def squares(module):
    return sum(parameter.square().sum() for parameter in module.parameters())


@left_alone("squares, which PenalisesByAFunction.forward calls, iterates over the parameters")
class PenalisesByAFunction(WithModule):
    def forward(self, x):
        return super().forward(x) + squares(self)


@left_alone("act reads getattr(self.leaky")
class ReadsASettingByName(Animal):
    def __init__(self):
        super().__init__()
        self.leaky = nn.LeakyReLU(0.2)

    def act(self, h):
        return self.leaky(h) * getattr(self.leaky, "negative_slope", 1.0)


@left_alone("checks for this type")
class AsksInAClassMethod(WithModule):
    @classmethod
    def run(cls, layers, h):
        for layer in layers:
            h = 2 * h if isinstance(layer, nn.ReLU) else layer(h)
        return h

    def act(self, h):
        return self.run([self.relu], h)


@left_alone("checks for this type")
class AsksByGetName(WithModule):
    def act(self, h):
        for layer in [self.relu]:
            h = 2 * h if layer._get_name() == "ReLU" else layer(h)
        return h


@left_alone("checks for this type")
class AsksInItsIterator(WithModule):
    def __iter__(self):
        return iter([] if isinstance(self.relu, nn.ReLU) else [self.relu])

    def act(self, h):
        for layer in self:
            h = layer(h)
        return self.relu(h)


class HidesAFunction(Animal):
    activation = staticmethod(F.gelu)

    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def act(self, h):
        return self.activation(h)


identical(HidesAFunction)


@identical
class HidesNothing(HidesAFunction):
    activation = None


@identical
class AHookKeepsTheInput(Animal):
    def __init__(self):
        super().__init__()
        self.kept = {}
        self.first.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.kept["first"] = output

    def act(self, h):
        return h

    def forward(self, x):
        h = F.relu(self.first(x), inplace=True)
        return self.second(h + self.kept["first"])


@left_alone("act reads self.leaky.negative_slope")
class ReadsASetting(Animal):
    def __init__(self):
        super().__init__()
        self.leaky = nn.LeakyReLU(0.2)

    def act(self, h):
        return self.leaky(h) * self.leaky.negative_slope


@left_alone("act reads self.leaky.negative_slope")
class ReadsASettingByNext(ReadsASetting):
    def act(self, h):
        return self.leaky(h) * next(iter([self.leaky.negative_slope]))


@identical
class InputByName(WithModule):
    def act(self, h):
        return self.relu(input=h)


@identical
class AsksForTheNewName(Animal):
    def act(self, h):
        return F.relu(h) * (2 if hasattr(self, "relu") else 1) + getattr(self, "relu_1", 0)


class WithBlocks(Animal):
    """Blocks with a functional call, which are rewritten, and with an activation module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Rectified(), Rectified()])
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU())


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return F.relu(self.inner(x))


FACTORS = {Rectified: 2, nn.Linear: 3}


@left_alone("act iterates over the parameters")
class PenalisesAChild(WithBlocks):
    def act(self, h):
        return self.net(h) + 1e-2 * sum(parameter.pow(2).sum() for parameter in self.net.parameters())


@left_alone("act iterates over the parameters")
class PenalisesALoopVariable(WithBlocks):
    def act(self, h):
        for block in self.blocks:
            h = block(h) + sum(parameter.square().sum() for parameter in block.parameters())
        return h


@left_alone("act iterates over the parameters or buffers")
class CountsItsBuffers(WithModule):
    def act(self, h):
        return self.relu(h) + len(list(self.buffers()))


@left_alone("act iterates over the parameters or buffers")
class CountsItsState(WithModule):
    def act(self, h):
        return self.relu(h) + len(self.state_dict())


@identical
class TypeOfItsFirstFloat(WithModule):
    @property
    def kind(self):
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    def act(self, h):
        return self.relu(h.to(self.kind))


@left_alone("its children are iterated over")
class ListsTheChildrenOfALoopVariable(WithBlocks):
    def act(self, h):
        for block in self.blocks:
            for layer in block.children():
                h = layer(h)
        return self.blocks[0](h)


@left_alone("asks for this exact type")
class ComparesTheTypeOfABlock(WithBlocks):
    def act(self, h):
        for block in self.blocks:
            h = block(h) * (2 if type(block) is Rectified else 1)
        return h


@left_alone("asks for this exact type")
class TableOfBlocks(WithBlocks):
    def act(self, h):
        for block in self.blocks:
            h = block(h) * FACTORS[block.__class__]
        return h


def factor_of(block):
    return FACTORS[type(block)]


@left_alone("asks for this exact type")
class AHelperHasATableOfBlocks(WithBlocks):
    def act(self, h):
        for block in self.blocks:
            h = block(h) * factor_of(block)
        return h


@identical
class NamesTheTypeOfABlock(WithBlocks):
    def act(self, h):
        for block in self.blocks:
            h = block(h) * (2 if type(block).__name__ == "Rectified" and isinstance(block, Rectified) else 1)
        return h


@left_alone("act checks for this type")
class MatchesTypes(WithModule):
    def act(self, h):
        match self.relu:
            case nn.ReLU():
                return self.relu(h) + 1
        return self.relu(h)


@left_alone("act checks for this type")
class ComparesNamesOfTypes(WithModule):
    def act(self, h):
        return self.relu(h) + (type(self.relu).__name__ == "ReLU")


@left_alone("act checks for this type")
class SearchesItsText(WithModule):
    def act(self, h):
        return self.relu(h) + ("ReLU" in str(self.relu))


@left_alone("act checks for this type")
class AsksForAUnion(WithModule):
    def act(self, h):
        return self.relu(h) + isinstance(self.relu, RECTIFIERS)


@left_alone("act checks for this type")
class AsksForAList(WithModule):
    def act(self, h):
        return self.relu(h) + (type(self.relu) in RECTIFIER_LIST)


@left_alone("act checks for this type")
class AsksForItsKinds(WithModule):
    def __init__(self):
        super().__init__()
        self.kinds = (nn.ReLU, nn.GELU)

    def act(self, h):
        return self.relu(h) + isinstance(self.relu, self.kinds)


@left_alone("act checks for this type")
class AHelperOfAHelperAsks(WithModule):
    def act(self, h):
        return self.relu(h) * scale_of(self.relu)


class StoresAFunction(Animal):
    def __init__(self):
        super().__init__()
        self.f = F.relu
        self.slope = 0.5
        self.options = {}


@left_alone("animal.f: its owner uses this function other")
class AsksWhetherItIsAModule(StoresAFunction):
    def act(self, h):
        return self.f(h) * (2 if isinstance(self.f, nn.Module) else 1)


@left_alone("animal.f: its owner uses this function other")
class AsksWhichFunction(StoresAFunction):
    def act(self, h):
        return self.f(h) * (2 if self.f is F.relu else 1) + (self.f == torch.relu) + (self.f in (F.relu, F.gelu))


@left_alone("animal.f: its owner uses this function other")
class NamesItsFunction(StoresAFunction):
    def act(self, h):
        return self.f(h) * len(self.f.__name__)


@left_alone("animal.f: its owner uses this function other")
class ReplacesItsFunction(StoresAFunction):
    def act(self, h):
        h = self.f(h)
        self.f = F.gelu
        return h


@left_alone("animal.f: its owner uses this function other")
class FunctionWithASetting(StoresAFunction):
    def __init__(self):
        super().__init__()
        self.f = F.leaky_relu

    def act(self, h):
        return self.f(h, self.slope)


@left_alone("animal.f: its owner uses this function other")
class FunctionWithOptions(StoresAFunction):
    def act(self, h):
        return self.f(h, **self.options)


@left_alone("animal.inner.f: its owner uses this function other")
class AsksForTheFunctionOfAChild(Animal):
    def __init__(self):
        super().__init__()
        self.inner = CallsItsFunction()

    def act(self, h):
        return F.pad(self.inner(h), (0, 3)) * (2 if self.inner.f is F.relu else 1)


@identical
class CallsItsFunction(StoresAFunction):
    def act(self, h):
        return self.f(self.f(h))


@left_alone("relu in line")
class FunctionOfASetting(Animal):
    def __init__(self):
        super().__init__()
        self.settings = types.SimpleNamespace(act=F.relu)

    def act(self, h):
        return self.settings.act(h)

    def change(self):
        self.settings.act = torch.tanh


class Pair:
    """A container with methods of the same names as a tensor's."""

    def __init__(self, left, right):
        self.left, self.right = left, right

    def relu(self):
        return Pair(self.left.clamp(min=0), self.right)

    def relu_(self):
        self.left = self.left.clamp(min=0)
        return self


@identical
class MethodOfAContainer(Animal):
    def act(self, h):
        pair = Pair(h, h.tanh())
        kept = pair
        return pair.relu().left + kept.relu_().right.relu()


@left_alone("its children are iterated over")
class ListsItsAttributes(Animal):
    def act(self, h):
        return F.relu(h) * len(self.__dict__["_modules"])


@left_alone("its children are iterated over")
class ListsItsVariables(Animal):
    def act(self, h):
        return F.relu(h) * len(vars(self)["_modules"])


@left_alone("its children are iterated over")
class ComputesANameToAskFor(Animal):
    def act(self, h):
        name = "re" + "lu"
        return F.relu(h) + hasattr(self, name)


class PassesOnAttributes(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, h):
        return self.base(h)


@left_alone("act reads getattr(self.wrapped, 'negative_slope', 1.0)")
class SettingOfAWrapped(Animal):
    def __init__(self):
        super().__init__()
        self.wrapped = PassesOnAttributes(nn.LeakyReLU(0.3))

    def act(self, h):
        return self.wrapped(h) * getattr(self.wrapped, "negative_slope", 1.0)


class Shifted(torch.Tensor):
    """A tensor with its own method of the same name."""

    def relu(self):
        return self.clamp(min=0) + 1


@identical
class MethodOfASubclass(Animal):
    def act(self, h):
        return h.as_subclass(Shifted).relu().as_subclass(torch.Tensor) + h.relu()


@identical
class CompiledPart(Animal):
    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.compiled = torch.compile(self.part, backend="eager")

    def act(self, h):
        return self.compiled(h)
