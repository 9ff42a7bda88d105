"""Tests that every model of the zoo computes the same after conversion, or is left unchanged with a warning that
names it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import random
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, GeneratorType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo_classes
import zoo_flow
import zoo_in_place
import zoo_spellings
import zoo_unseen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

import flexact
from flexact.candidates.recognition import _METHODS, is_activation_function
from flexact.routing.sites import sites_of
from zoo import EXPECTED

HOUSES = [house.__name__ for house in (zoo_classes, zoo_flow, zoo_in_place, zoo_spellings, zoo_unseen)]
ANIMALS = [cls for cls in EXPECTED if cls.__module__ in HOUSES]  # pytest may import them by another name, too
CONFIG = flexact.FlexConfig(candidates=("softsign", "original"), init="original", init_probability=1 - 1e-6)
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "torch.save": lambda model: _saved_and_loaded(model),
}


class Cage(nn.Module):
    """A model of the zoo next to an activation module, so that there is always something to convert."""

    def __init__(self, animal: nn.Module) -> None:
        super().__init__()
        self.animal = animal
        self.outside = nn.ReLU()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.animal(*args, **kwargs)


class Instead(TorchFunctionMode):
    """Runs softsign for every activation call: an independent way to compute a network with that pick."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        is_one = is_activation_function(function) or (name in _METHODS and function is getattr(Tensor, name, None))
        if not is_one:
            return function(*args, **(kwargs or {}))
        given = kwargs or {}
        if isinstance(function, FunctionType):
            given = inspect.signature(function).bind(*args, **given).arguments
        tensor = args[0] if args else given["input"]
        if name.endswith("_") or given.get("inplace"):
            return tensor.copy_(F.softsign(tensor.clone()))
        return F.softsign(tensor)


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def caged(cls: type[nn.Module]) -> Cage:
    """Builds the same model every time."""
    seed()
    return Cage(cls())


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def parts(value: Any) -> Iterator[Any]:
    """Returns the types, the tensors and the other values of a result or a state."""
    yield type(value)
    if isinstance(value, GeneratorType):
        value = list(value)
    if isinstance(value, dict):
        for key in value:
            yield key
            yield from parts(value[key])
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        for one in value:
            yield from parts(one)
    elif dataclasses.is_dataclass(value):
        yield from parts(vars(value))
    elif isinstance(value, (Tensor, bool, int, float, str)) and not is_lazy(value):
        yield value


def effects(animal: nn.Module) -> dict[str, Any]:
    """Returns everything that a forward may have changed in a model."""
    own = {name: value for name, value in vars(animal).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if not callable(value)} | dict(
        animal.named_buffers(recurse=False)
    )


def seen(model: Cage, training: bool, backward: bool = True) -> list[Any]:
    """Returns everything observable of one forward and backward."""
    seed()
    model.train(training)
    model.zero_grad()
    args, kwargs = model.animal.inputs()
    for one in args:
        if isinstance(one, Tensor):
            one.requires_grad_()
    result = list(parts(model(*args, **kwargs)))
    tensors = [one for one in result if isinstance(one, Tensor) and one.requires_grad]
    if tensors and backward:
        sum(one.float().square().sum() for one in tensors).backward()
    gradients = [(name, one.grad) for name, one in model.named_parameters() if not name.endswith("logits")]
    own = [one.grad for one in args if isinstance(one, Tensor)]
    return [*result, *parts(gradients), *parts(own), *parts(effects(model.animal)), torch.rand(()), random.random()]


def same(left: list[Any], right: list[Any], tolerance: float = 0.0) -> bool:
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or a.requires_grad != b.requires_grad:
                return False
            if not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
                return False
        elif isinstance(a, float) and isinstance(b, float):
            if abs(a - b) > tolerance:
                return False
        elif a != b:
            return False
    return True


def calls_of_hooks(model: Cage, training: bool) -> list[tuple[str, str]]:
    """Records which hooks run in a forward, and in what order. Those of activations are separate."""
    calls: list[tuple[str, str]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (flexact.FlexAct, nn.ReLU)) and type(module) is not type(model.animal):
            continue
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: calls.append((name, "before")) or None))
        handles.append(module.register_forward_hook(lambda *_, name=name: calls.append((name, "after")) or None))
    seen(model, training)
    for handle in handles:
        handle.remove()
    return calls


def choose(model: nn.Module, name: str | None) -> nn.Module:
    for site in sites_of(model):
        with torch.no_grad():
            index = site.logits.argmax() if name is None else torch.tensor(site.candidates.index(name))
            site.logits.copy_(5.0 * F.one_hot(index, site.k))
    return flexact.commit(model)


def convert(model: Cage) -> Cage:
    flexact.convert(model, "*", CONFIG)  # gates and outputs, too
    return model


MODES = (True, False, True)


@pytest.mark.parametrize("cls", ANIMALS, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore")
def test_conversion_changes_nothing_observable(cls: type[nn.Module]) -> None:
    plain = caged(cls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = convert(caged(cls))
        for training in MODES:
            assert same(seen(converted, training), seen(plain, training), getattr(cls, "tolerance", 1e-3))
    warned = "\n".join(str(one.message) for one in caught if "flexact" in str(one.message))
    reason = EXPECTED[cls]
    if reason is None:
        assert warned == ""
        assert [site for site in sites_of(converted) if site.name != "outside"]
    else:
        assert "  animal" in warned
        assert reason in warned
    assert isinstance(converted.animal, cls)
    assert inspect.signature(type(converted.animal).forward) == inspect.signature(cls.forward)
    assert inspect.signature(converted.animal.forward) == inspect.signature(plain.animal.forward)
    assert calls_of_hooks(converted, True) == calls_of_hooks(plain, True)


@pytest.mark.parametrize("cls", ANIMALS, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore")
def test_committed_to_the_original_it_is_bit_identical_and_follows_later_changes(cls: type[nn.Module]) -> None:
    plain = caged(cls)
    converted = choose(convert(caged(cls)), None)
    extracted = flexact.extract(converted)
    assert type(extracted.animal) is type(plain.animal) or "Parametrized" in type(plain.animal).__name__
    assert list(extracted.state_dict()) == list(plain.state_dict())
    for training in MODES:
        expected = seen(plain, training)
        assert same(seen(converted, training), expected)
        assert same(seen(extracted, training), expected)
    for model in (plain, converted, extracted):
        model.animal.change()
    for training in MODES:
        expected = seen(plain, training)
        assert same(seen(converted, training), expected)
        assert same(seen(extracted, training), expected)


@pytest.mark.parametrize("cls", ANIMALS, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore")
def test_copies_and_pickles_compute_the_same_as_the_converted_model(cls: type[nn.Module]) -> None:
    for how, copied in COPIES.items():
        try:
            copied(caged(cls))
        except Exception:  # the plain model cannot be copied in this way, so the converted one need not be
            continue
        for model in (convert(caged(cls)), choose(convert(caged(cls)), "softsign")):
            duplicate = copied(model)
            assert isinstance(duplicate.animal, cls), how
            for training in (True, False):
                assert same(seen(duplicate, training), seen(model, training)), how


@pytest.mark.parametrize(
    "cls", [cls for cls, reason in EXPECTED.items() if reason is None], ids=lambda cls: cls.__name__
)
@pytest.mark.filterwarnings("ignore")
def test_another_pick_computes_the_plain_network_with_that_function(cls: type[nn.Module]) -> None:
    plain = caged(cls)
    converted = choose(convert(caged(cls)), "softsign")
    extracted = flexact.extract(converted)
    assert not any(isinstance(module, flexact.FlexAct) for module in extracted.modules())
    for training in MODES:
        backward = not getattr(cls, "recomputes", False)
        with Instead():
            expected = seen(plain, training, backward)
        assert same(seen(converted, training, backward), expected, 1e-6)
        assert same(seen(extracted, training, backward), expected, 1e-6)


CALLS = {
    "read": [
        {"where": "*"},
        {"where": "penultimate"},
        {"where": lambda name, module: "animal" in name, "per_call": True},
    ],
    "run": [{"where": "all", "per_call": True}, {"where": "penultimate"}],
}
"""Calls without example inputs, and with them."""


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("cls", ANIMALS, ids=lambda cls: cls.__name__)
@pytest.mark.filterwarnings("ignore")
def test_inspect_lists_exactly_what_convert_converts_and_changes_nothing(cls: type[nn.Module], how: str) -> None:
    for call in CALLS[how]:
        args, kwargs = caged(cls).animal.inputs()
        given = call | ({"example_inputs": kwargs or args} if how == "run" and not (args and kwargs) else {})
        try:
            converted = flexact.convert(caged(cls), **given)
        except flexact.FlexActError:
            if call["where"] in ("all", "penultimate", "*"):  # the wrapper has a ReLU, but no forward reaches it
                assert call["where"] == "penultimate"
                assert "example_inputs" in given
            assert flexact.inspect(caged(cls), **given).converted == []
            continue
        model = caged(cls)
        before = inner_state(model)
        inspection = flexact.inspect(model, **given)
        assert same(inner_state(model), before)
        assert inspection.converted == [site.name for site in sites_of(converted)]
        assert all(row.converted != bool(row.reason) for row in inspection.rows)


def inner_state(model: nn.Module) -> list[Any]:
    """Returns the types, attributes and tensors of all submodules, and the random states."""
    modules = {name: (id(type(module)), vars(module)) for name, module in model.named_modules()}
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    return [one.detach().clone() if isinstance(one, Tensor) else one for one in parts((modules, states))]


def test_the_zoo_is_large() -> None:
    assert len(ANIMALS) >= 150
