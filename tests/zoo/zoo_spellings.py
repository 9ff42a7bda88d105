"""Models with different spellings of an activation's call."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn as tnn
import torch.nn.functional as F
from torch import nn
from torch.nn import functional
from torch.nn.functional import relu
from torch.nn.functional import silu as swish

from zoo import Animal, identical, left_alone

ALIAS = F.relu
TABLE = {"relu": F.relu, "tanh": torch.tanh}
ACTIVATIONS = [F.relu]
MODULE = nn.ReLU()
SLOPE = 0.2
HALF = functools.partial(F.leaky_relu, negative_slope=0.5)


def plain_function(h):
    return F.relu(h)


def outer_function(h):
    return plain_function(h) * 2


def squared(h):
    return h**2


class Library:
    """Holds functions, and is no module."""

    relu = staticmethod(F.relu)

    def act(self, h):
        return F.relu(h)


LIBRARY = Library()


@identical
class Functional(Animal):
    def act(self, h):
        return F.relu(h)


@identical
class FromModule(Animal):
    def act(self, h):
        return functional.relu(h)


@identical
class FromImport(Animal):
    def act(self, h):
        return relu(h)


@identical
class RenamedImport(Animal):
    def act(self, h):
        return swish(h)


@identical
class FullPath(Animal):
    def act(self, h):
        return torch.nn.functional.gelu(h)


@identical
class ShortPath(Animal):
    def act(self, h):
        return tnn.functional.elu(h)


@identical
class ThroughNn(Animal):
    def act(self, h):
        return nn.functional.mish(h)


@identical
class TorchFunction(Animal):
    def act(self, h):
        return torch.relu(h)


@identical
class TorchTanh(Animal):
    def act(self, h):
        return torch.tanh(h)


@identical
class Expit(Animal):
    def act(self, h):
        return torch.special.expit(h)


@identical
class TensorMethod(Animal):
    def act(self, h):
        return h.relu()


@identical
class ChainedMethod(Animal):
    def forward(self, x):
        return self.second(self.first(x).relu())


@identical
class MethodOfExpression(Animal):
    def act(self, h):
        return (h + 1).sigmoid()


@identical
class MethodOfSubscript(Animal):
    def act(self, h):
        return torch.cat([h[:, :3].tanh(), h[:, 3:].tanh()], 1)


@left_alone("is not a site")
class UnboundMethod(Animal):
    def act(self, h):
        return torch.Tensor.relu(h)


@identical
class MethodOfParameter(Animal):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def act(self, h):
        return h * self.scale.relu()


@identical
class GlobalAlias(Animal):
    def act(self, h):
        return ALIAS(h)


@identical
class KeywordTensor(Animal):
    def act(self, h):
        return F.relu(input=h)


@identical
class WithSettings(Animal):
    def act(self, h):
        return F.leaky_relu(h, 0.2)


@identical
class WithKeywordSettings(Animal):
    def act(self, h):
        return F.leaky_relu(input=h, negative_slope=0.3)


@identical
class NegativeConstant(Animal):
    def act(self, h):
        return F.leaky_relu(h, -0.3)


@identical
class ApproximateGelu(Animal):
    def act(self, h):
        return F.gelu(h, approximate="tanh")


@left_alone("is not a site")
class BuiltinWithPositions(Animal):
    def act(self, h):
        return F.softplus(h, 2, 10)


@identical
class BuiltinWithKeywords(Animal):
    def act(self, h):
        return F.softplus(h, beta=2.0)


@identical
class Nested(Animal):
    def act(self, h):
        return F.relu(torch.tanh(F.relu(h)))


@identical
class TwoKinds(Animal):
    def act(self, h):
        return F.relu(h) + torch.tanh(h) - F.silu(-h)


@identical
class OverSeveralLines(Animal):
    def act(self, h):
        return F.relu(
            h + 1,
        ) + F.relu(  # and once more
            -h
        )


@identical
class OnOneLine(Animal):
    def act(self, h): return F.relu(h)  # fmt: skip


@identical
class ByLambda(Animal):
    act = lambda self, h: F.relu(h)  # noqa: E731


@identical
class WithUnicode(Animal):
    def act(self, h):
        größe = "→ äöü"
        return F.relu(h) * len(größe) + F.relu(-h)


@identical
class WithDocstring(Animal):
    def act(self, h):
        """Several lines,

        of which one is indented.
        """
        return F.relu(h)


@identical
class StaticAttribute(Animal):
    nonlinearity = staticmethod(F.relu)

    def act(self, h):
        return self.nonlinearity(h)


@identical
class BuiltinClassAttribute(Animal):
    nonlinearity = torch.tanh

    def act(self, h):
        return self.nonlinearity(h)


@identical
class FunctionAttribute(Animal):
    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def act(self, h):
        return self.activation(h)


@identical
class FunctionAttributeWithSettings(Animal):
    def __init__(self):
        super().__init__()
        self.activation = F.leaky_relu

    def act(self, h):
        return self.activation(h, 0.2) + self.activation(-h, negative_slope=0.1)


@identical
class FunctionAttributeInPlace(Animal):
    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def act(self, h):
        self.activation(h, inplace=True)
        return h


@identical
class OverwritingFunctionAttribute(Animal):
    def __init__(self):
        super().__init__()
        self.activation = torch.relu_

    def act(self, h):
        self.activation(h)
        return h


@left_alone("animal.activation: its owner uses this function other")
class FunctionAttributeAsValue(Animal):
    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def act(self, h):
        function = self.activation
        return function(h)


@identical
class ModuleAsValue(Animal):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU()

    def act(self, h):
        for layer in (self.first, self.activation):
            h = layer(h)
        return h


@identical
class ModuleAndFunction(Animal):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def act(self, h):
        return self.relu(h) + F.relu(-h)


@identical
class NumbersOfMath(Animal):
    def act(self, h):
        return F.relu(h) * math.tanh(self.p)


@identical
class OtherNameForTheModule(Animal):
    def forward(net, x):
        return net.second(net.act(net.first(x)))

    def act(this, h):
        return F.relu(h)


@identical
class TakenNames(Animal):
    relu = "taken"

    def relu_1(self):
        return "taken too"

    def act(self, h):
        return F.relu(h) * len(self.relu + self.relu_1())


@left_alone("is not a site")
class PlainFunction(Animal):
    def act(self, h):
        return plain_function(h)


@left_alone("is not a site")
class FunctionOfFunction(Animal):
    def act(self, h):
        return outer_function(h)


@left_alone("is not a site")
class MethodOfAnotherObject(Animal):
    def act(self, h):
        return LIBRARY.act(h)


@identical
class FunctionOfAnotherClass(Animal):
    def act(self, h):
        return Library.relu(h)


@left_alone("is not a site")
class LocalAlias(Animal):
    def act(self, h):
        f = F.elu
        return f(h)


@left_alone("is not a site")
class ByMap(Animal):
    def act(self, h):
        return sum(map(F.relu, [h, -h]))


@left_alone("is not a site")
class ByGetattr(Animal):
    def act(self, h):
        return getattr(F, "relu")(h)  # noqa: B009


@left_alone("is not a site")
class FromATable(Animal):
    def act(self, h):
        return TABLE["relu"](h)


@left_alone("is not a site")
class FromAList(Animal):
    def act(self, h):
        for f in ACTIVATIONS:
            h = f(h)
        return h


@left_alone("is not a site")
class FromAnOwnList(Animal):
    def __init__(self):
        super().__init__()
        self.functions = [torch.relu]

    def act(self, h):
        return self.functions[0](h)


@left_alone("is not a site")
class ModulesInAPlainList(Animal):
    def __init__(self):
        super().__init__()
        self.functions = [nn.ReLU()]

    def act(self, h):
        return self.functions[0](h)


@left_alone("is not a site")
class GlobalModule(Animal):
    def act(self, h):
        return MODULE(h)


@left_alone("is not a site")
class GlobalPartial(Animal):
    def act(self, h):
        return HALF(h)


@left_alone("is not a site")
class OwnPartial(Animal):
    def __init__(self):
        super().__init__()
        self.half = functools.partial(F.leaky_relu, negative_slope=0.5)

    def act(self, h):
        return self.half(h)


@left_alone("is not a site")
class MadeInline(Animal):
    def act(self, h):
        return nn.ReLU()(h)


@left_alone("is not a site")
class OwnSetting(Animal):
    def __init__(self):
        super().__init__()
        self.slope = 0.2

    def act(self, h):
        return F.leaky_relu(h, self.slope)

    def change(self):
        self.slope = 0.7


@left_alone("is not a site")
class GlobalSetting(Animal):
    def act(self, h):
        return F.leaky_relu(h, SLOPE)


@left_alone("is not a site")
class LearntSetting(Animal):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.2))

    def act(self, h):
        return F.leaky_relu(h, float(self.slope))


@left_alone("is not a site")
class UnpackedArguments(Animal):
    def act(self, h):
        arguments = (h, 0.2)
        return F.leaky_relu(*arguments)


@left_alone("is not a site")
class UnpackedKeywords(Animal):
    def act(self, h):
        settings = {"negative_slope": 0.2}
        return F.leaky_relu(h, **settings)


@left_alone("is not a site")
class ImportedInside(Animal):
    def act(self, h):
        import torch.nn.functional as inside

        return inside.relu(h)


@left_alone("is not a site")
class ShadowedByArgument(Animal):
    def act(self, h, F=functional):
        return F.relu(h)


@left_alone("is not a site")
class AsDefault(Animal):
    def act(self, h, f=F.relu):
        return f(h)


@left_alone("is not a site")
class StaticMethod(Animal):
    def act(self, h):
        return self.static(h)

    @staticmethod
    def static(h):
        return F.relu(h)


@left_alone("is not a site")
class ClassMethod(Animal):
    def act(self, h):
        return self.of_class(h)

    @classmethod
    def of_class(cls, h):
        return F.relu(h)


@left_alone("is not a site")
class ClassMethodOfClassMethod(Animal):
    def act(self, h):
        return self.deep(h)

    @classmethod
    def deep(cls, h):
        return cls.deeper(h)

    @classmethod
    def deeper(cls, h):
        return F.relu(h)


@identical
class OwnFunctionOfTheSameName(Animal):
    """Named like an activation, but none; the real one is next to it."""

    def act(self, h):
        return squared(self.gelu(h)) + F.relu(h)

    def gelu(self, h):
        return h * 0.5
