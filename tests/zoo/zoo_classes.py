"""Models whose classes are unusual: inheritance, decorators, properties, metaclasses, copying and saving."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import types
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations, parametrize

from zoo import Animal, identical, left_alone

REGISTRY = {}


def logged(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        self.log = [*getattr(self, "log", []), function.__name__]
        return function(self, *args, **kwargs)

    return wrapper


def scaled(factor):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) * factor

        return wrapper

    return decorate


def unnamed(function):
    def wrapper(self, h):
        return function(self, h) + 1

    return wrapper


def registered(function):
    REGISTRY[function.__qualname__] = function
    return function


class Calls:
    """A decorator that is an object."""

    def __init__(self, function):
        self.function = function

    def __get__(self, holder, cls):
        return functools.partial(self.function, holder)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parent(Animal):
    def act(self, h):
        return F.relu(h)


class Grandparent(Animal):
    def forward(self, x):
        return self.second(F.relu(self.first(x)))


class Mixin:
    def act(self, h):
        return F.relu(h) * 2


class Registered(Animal):
    known: ClassVar[list] = []

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Registered.known.append(cls)


class NeedsKeyword(Animal):
    def __init_subclass__(cls, *, tag, **options):
        super().__init_subclass__(**options)
        cls.tag = tag


class Meta(type):
    known: ClassVar[list] = []

    def __new__(mcs, name, bases, namespace, *, tag):
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name, bases, namespace, *, tag):
        super().__init__(name, bases, namespace)
        if tag in Meta.known:
            raise TypeError(f"{tag} is known already")
        Meta.known.append(tag)


@identical
class Inherits(Parent):
    pass


@left_alone("is not a site")
class CallsSuper(Grandparent):
    def forward(self, x):
        return super().forward(x) * 2


@left_alone("is not a site")
class CallsSuperByName(Grandparent):
    def forward(self, x):
        return super(CallsSuperByName, self).forward(x) * 2  # noqa: UP008


@left_alone("is not a site")
class CallsBase(Grandparent):
    def forward(self, x):
        return Grandparent.forward(self, x) * 3


@left_alone("is not a site")
class CallsSuperTwice(CallsSuper):
    def forward(self, x):
        return super().forward(x) + F.relu(x[:, :3])


@left_alone("is not a site")
class CallsSuperHelper(Parent):
    def act(self, h):
        return super().act(h) + torch.tanh(h)


@identical
class FromMixin(Mixin, Animal):
    pass


@left_alone("is not a site")
class SuperInMixin(Mixin, Parent):
    def act(self, h):
        return super().act(h) + 1


@left_alone("is not a site")
class PrivateMethod(Animal):
    def forward(self, x):
        return self.second(self.__hidden(self.first(x)))

    def __hidden(self, h):
        return F.relu(h) * self.__scale()

    def __scale(self):
        return 2.0


@identical
class _Private(Animal):
    def act(self, h):
        self.__seen = h.shape[0]
        return F.relu(h) * self.__seen


@identical
class PrivateChild(Animal):
    def __init__(self):
        super().__init__()
        self.__layer = nn.Linear(6, 6)

    def act(self, h):
        return F.relu(self.__layer(h))


@left_alone("is not a site")
class Property(Animal):
    def forward(self, x):
        self.h = self.first(x)
        return self.second(self.hidden)

    @property
    def hidden(self):
        return F.relu(self.h)


@left_alone("is not a site")
class TypeOfSelf(Animal):
    def forward(self, x):
        return self.second(type(self).act(self, self.first(x)))

    def act(self, h):
        return F.relu(h)


@identical
class ClassOfSelf(Animal):
    def act(self, h):
        return F.relu(h) * len(self.__class__.__name__) * len(__class__.__qualname__)


@identical
class BoundMethod(Animal):
    def forward(self, x):
        act = self.act
        return self.second(act(self.first(x)))

    def act(self, h):
        return F.relu(h)


@identical
class NoGrad(Animal):
    @torch.no_grad()
    def act(self, h):
        return F.relu(h)


@identical
class Autocast(Animal):
    tolerance = 0.02

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return self.second(F.relu(self.first(x)))


@identical
class Wrapped(Animal):
    @logged
    def forward(self, x):
        return self.second(F.relu(self.first(x)))


@identical
class WrappedTwice(Animal):
    @logged
    @scaled(3.0)
    def act(self, h, shift: float = 0.5):
        return F.relu(h) + shift


@identical
class DecoratedAndReturned(Animal):
    @registered
    def act(self, h):
        return F.relu(h)


@left_alone("is not a site")
class WrappedWithoutAName(Animal):
    @unnamed
    def act(self, h):
        return F.relu(h)


@left_alone("is not a site")
class DecoratedByAnObject(Animal):
    @Calls
    def act(self, h):
        return F.relu(h)


@left_alone("is not a site")
class PartialMethod(Animal):
    def base(self, h, scale):
        return F.relu(h) * scale

    act = functools.partialmethod(base, scale=2.0)


@left_alone("is not a site")
class RebindsSelf(Animal):
    def act(self, h):
        me = self
        self = None
        return F.relu(h) * me.p


@left_alone("is not a site")
class NestedSelf(Animal):
    def act(self, h):
        def inner(self):
            return F.relu(self)

        return inner(h)


@left_alone("is not a site")
class NoNamedSelf(Animal):
    def act(*args):
        return F.relu(args[1])


@identical
class OverridesCall(Animal):
    def __call__(self, x):
        return super().__call__(x) * 2

    def act(self, h):
        return F.relu(h)


@identical
class ActivationInCall(Animal):
    def __call__(self, x):
        return F.relu(super().__call__(x))

    def act(self, h):
        return h * 2


@identical
class Abstract(Animal, abc.ABC):
    def act(self, h):
        return F.relu(self.size() * h)

    def size(self):
        return 2


@identical
class InRegistry(Registered):
    def act(self, h):
        return F.relu(h) * len(Registered.known)


@identical
class WithKeyword(NeedsKeyword, tag="zoo"):
    def act(self, h):
        return F.relu(h) * len(self.tag)


@identical
class WithMetaclass(Animal, metaclass=Meta, tag="zoo"):
    def act(self, h):
        return F.relu(h) * len(Meta.known)


@identical
class WithSlots(Animal):
    __slots__ = ("extra",)

    def act(self, h):
        return F.relu(h)


@identical
class OwnGetstate(Animal):
    def __init__(self):
        super().__init__()
        self.handle = lambda: 3  # cannot be pickled

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.handle = lambda: 3

    def act(self, h):
        return F.relu(h) * self.handle()


@identical
class OwnReduce(Animal):
    def __reduce__(self):
        return (self.__class__, (), self.__dict__)

    def act(self, h):
        return F.relu(h)


@identical
class OwnDeepcopy(Animal):
    def __deepcopy__(self, memo):
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__ = copy.deepcopy(self.__dict__, memo)
        duplicate._copied = True
        return duplicate

    def act(self, h):
        return F.relu(h)


@identical
class OwnNew(Animal):
    def __new__(cls, *args):
        made = super().__new__(cls)
        made.born = True
        return made

    def act(self, h):
        return F.relu(h) * self.born


@identical
class Parametrized(Animal):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        parametrize.register_parametrization(self, "weight", Symmetric())

    def act(self, h):
        return F.relu(h @ self.weight)


@identical
class ParametrizationRemoved(Parametrized):
    def change(self):
        parametrize.remove_parametrizations(self, "weight")


@identical
class ParametrizedChild(Animal):
    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(self.first)

    def act(self, h):
        return F.relu(h)


@identical
class OwnGetattr(Animal):
    def __getattr__(self, name):
        if name == "invented":
            return 2.0
        return super().__getattr__(name)

    def act(self, h):
        return F.relu(h) * self.invented


@identical
class OwnSetattr(Animal):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)

    def act(self, h):
        self.last = F.relu(h)
        return self.last


@identical
class SubclassOfActivation(nn.ReLU):
    def inputs(self):
        return (torch.randn(5, 6),), {}

    def change(self):
        self.inplace = False


@identical
class SubclassOfLinear(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        return F.relu(super().forward(x))

    def inputs(self):
        return (torch.randn(5, 6),), {}

    def change(self):
        pass


@left_alone("its children are iterated over")
class IteratesChildren(Animal):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        for child in self.children():
            x = F.relu(child(x))
        return x


@left_alone("its children are iterated over")
class SubclassOfSequential(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return F.relu(super().forward(x)) * 2

    def inputs(self):
        return (torch.randn(5, 6),), {}

    def change(self):
        self.append(nn.Tanh()) if len(self) < 4 else None


def made(factor):
    """A class that closes over values of a function."""
    activation, state = F.relu, {"factor": factor}

    class Enclosing(Animal):
        def act(self, h):
            state["calls"] = state.get("calls", 0) + 1
            return activation(h) * state["factor"] + factor

        def change(self):
            state["factor"] = 5.0

    return Enclosing


Enclosing = identical(made(2.0))


class Outer:
    @identical
    class Inner(Animal):
        def act(self, h):
            return F.relu(h)


@left_alone("its train uses the type of the module")
class SuperOfItsType(Animal):
    def train(self, mode=True):
        return super(type(self), self).train(mode)

    def act(self, h):
        return F.relu(h)


@left_alone("uses the type of the module")
class AsksForItsType(Animal):
    def act(self, h):
        return F.relu(h) * (2 if type(self) is AsksForItsType else 1)


@left_alone("uses the type of the module")
class CountsOnItsClass(Animal):
    calls = 0

    def act(self, h):
        self.__class__.calls += 1
        return F.relu(h)


@identical
class CountsInAClassMethod(Animal):
    calls = 0

    @classmethod
    def count(cls):
        cls.calls += 1

    def act(self, h):
        before = CountsInAClassMethod.calls
        self.count()
        return F.relu(h) * (CountsInAClassMethod.calls - before)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x):
        return F.relu(x @ self.weight)


class LazilyWeighted(LazyModuleMixin, Weighted):
    cls_to_become = Weighted

    def __init__(self):
        super().__init__()
        self.weight = UninitializedParameter()

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            self.weight.materialize((x.shape[-1], 6))
            nn.init.ones_(self.weight)


@left_alone("its first forward changes its class")
class WithALazyChild(Animal):
    def __init__(self):
        super().__init__()
        self.inner = LazilyWeighted()

    def act(self, h):
        return self.inner(h)


@identical
class NamesItsType(Animal):
    def act(self, h):
        return F.relu(h) * len(type(self).__name__)


@identical
class OverwritesInALambda(Animal):
    act = lambda self, h: F.relu_(h) + 1  # noqa: E731


class Settings(NamedTuple):
    gate: object = None


@identical
class SettingsInANamedTuple(Animal):
    def __init__(self):
        super().__init__()
        self.settings = Settings()

    def act(self, h):
        if self.settings.gate is None:
            h = F.relu(h)
        return h


@identical
class SettingOfAProperty(Animal):
    _mask = None

    @property
    def mask(self):
        return self._mask

    def act(self, h):
        if self.mask is None:
            h = F.relu(h)
        return h


@identical
class BranchByTheModeOfAChild(Animal):
    def act(self, h):
        if not self.first.training:
            h = F.relu(h)
        return h


@identical
class BranchByWhatItKeeps(Animal):
    def __init__(self):
        super().__init__()
        self.cache = None

    def act(self, h):
        if self.cache is not None:
            h = F.relu(h + self.cache)
        self.cache = 1.0
        return h


class OwnGELU(nn.GELU):
    """Adds nothing."""


class OwnLeakyReLU(nn.LeakyReLU):
    def __init__(self):
        super().__init__(0.1)


class DoublingGELU(nn.GELU):
    def forward(self, h):
        return super().forward(h) * 2


class CountingReLU(nn.ReLU):
    def count(self):
        return 1


@left_alone("gelu of OwnGELU")
class SubclassOfGELU(Animal):
    def __init__(self):
        super().__init__()
        self.activation = OwnGELU()

    def act(self, h):
        return self.activation(h)


@left_alone("leaky_relu of OwnLeakyReLU")
class SubclassWithAConstructor(SubclassOfGELU):
    def __init__(self):
        super().__init__()
        self.activation = OwnLeakyReLU()


@left_alone("gelu of DoublingGELU")
class SubclassWithAForward(SubclassOfGELU):
    def __init__(self):
        super().__init__()
        self.activation = DoublingGELU()


@identical
class SubclassWithAMethod(SubclassOfGELU):
    def __init__(self):
        super().__init__()
        self.activation = CountingReLU()


@identical
class StoresUnderTheNewName(Animal):
    def act(self, h):
        self.relu = F.relu(h)
        return self.relu


class Odd:
    """Refuses to be compared, hashed or asked for attributes."""

    def __eq__(self, other):
        raise ValueError("no comparison")

    def __hash__(self):
        raise RuntimeError("no hash")

    def __getattr__(self, name):
        raise AttributeError(name) if name.startswith("__") else ImportError(name)


LAZY = types.ModuleType("lazy")
LAZY.__getattr__ = Odd().__getattr__


@identical
class OddAttributes(Animal):
    def __init__(self):
        super().__init__()
        self.mean = np.ones(6, dtype=np.float32)
        self.odd = Odd()

    def act(self, h):
        if self.mean is not None:
            h = h - torch.from_numpy(self.mean)
        if self.odd is None:
            h = LAZY.relu(self.odd(h)) + self.odd.scale
        return F.relu(h)


@identical
class ParentAsksForTheNewName(Animal):
    def __init__(self):
        super().__init__()
        self.block = Parent()

    def act(self, h):
        return F.pad(self.block(h), (0, 3)) * (2 if hasattr(self.block, "relu") else 1)


class WithClassMethods(Animal):
    @classmethod
    def scale(cls, *_):
        return 2.0

    @classmethod
    def flag(cls):
        return True


@identical
class OverridesClassMethods(WithClassMethods):
    def scale(self, h):
        return h.mean() + self.p

    @property
    def flag(self):
        return False

    def act(self, h):
        return F.relu(h) * self.scale(h) * (2.0 if self.flag else 1.0)


class OfTheObject(classmethod):
    """A class method to which an object passes itself."""

    def __get__(self, holder, cls=None):
        return types.MethodType(self.__func__, cls if holder is None else holder)


@identical
class WithAKindOfClassMethod(Animal):
    @OfTheObject
    def scale(self):
        return self.p

    def act(self, h):
        return F.relu(h) * self.scale()


@identical
class CopiesAChild(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def act(self, h):
        return copy.deepcopy(self.block)(h) + F.relu(h)


class Plain(torch.Tensor):
    pass


@identical
class OnASubclassOfTensors(Animal):
    def act(self, h):
        return F.relu(h.as_subclass(Plain)).as_subclass(torch.Tensor)


@left_alone("iterates over the parameters or buffers")
class LoadsTheStateOfAChild(Animal):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.saved = {name: one.clone() for name, one in self.block.state_dict().items()}

    def act(self, h):
        self.block.load_state_dict(self.saved)
        return self.block(h)


@left_alone("iterates over the parameters or buffers")
class AppliesAFunction(Animal):
    def act(self, h):
        found = []
        self.apply(found.append)
        return F.relu(h) * len(found)


@left_alone("its children are iterated over")
class ListsItsChildrenUnbound(Animal):
    def act(self, h):
        return F.relu(h) * len(list(nn.Module.children(self)))


class Layered(Animal):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.LeakyReLU(0.2), nn.Linear(6, 6), nn.ReLU()])


@left_alone("reads getattr(layer, 'negative_slope', 0.0)")
class AsksLayersForASetting(Layered):
    def act(self, h):
        for layer in self.layers:
            h = layer(h) * (1 + getattr(layer, "negative_slope", 0.0))
        return h


@left_alone("reads layer.negative_slope")
class ReadsASettingOfLayers(Layered):
    def act(self, h):
        for layer in self.layers:
            h = layer(h)
            with contextlib.suppress(AttributeError):
                h = h * (1 + layer.negative_slope)
        return h
