"""Tests of functional activations: which calls become sites, which do not, and that a rewritten forward computes the
same.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import linecache
import math
import pickle
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import relu as r
from torch.nn.utils import parametrize

import flexact
from flexact.config import PAPER_CANDIDATES
from flexact.surgery.rewriting import Rewritten

PAPER = flexact.FlexConfig(candidates=PAPER_CANDIDATES)
NEAR = dataclasses.replace(PAPER, init="original", init_probability=1 - 1e-6)


class Net(nn.Module):
    """Two layers around the activation in `act`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.p = 0.5

    def act(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


def functional_relu(h: Tensor) -> Tensor:
    return F.relu(h)


class Relu(Net):
    def act(self, h):
        return F.relu(h)


class Method(Net):
    def act(self, h):
        return h.relu()


class ChainedMethod(Net):
    def forward(self, x):
        return self.second(self.first(x).tanh())


class Tanh(Net):
    def act(self, h):
        return torch.tanh(h)


class FunctionalTanh(Net):
    def act(self, h):
        return F.tanh(h)


class ApproximateGelu(Net):
    def act(self, h):
        return F.gelu(h, approximate="tanh")


class LeakyRelu(Net):
    def act(self, h):
        return F.leaky_relu(h, 0.2)


class Alias(Net):
    def act(self, h):
        return r(h)


class FullPath(Net):
    def act(self, h):
        return torch.nn.functional.silu(h)


class InPlaceFlag(Net):
    def act(self, h):
        return F.relu(h, inplace=True)


class InPlacePositional(Net):
    def act(self, h):
        return F.leaky_relu(h, 0.1, True)


class InPlaceFunction(Net):
    def act(self, h):
        return torch.relu_(h)


class InPlaceMethod(Net):
    def act(self, h):
        return h.sigmoid_()


class Keyword(Net):
    def act(self, h):
        return F.relu(input=h)


class ClassAttribute(Net):
    nonlinearity = torch.tanh

    def act(self, h):
        return self.nonlinearity(h)


class StaticAttribute(Net):
    nonlinearity = staticmethod(F.relu)

    def act(self, h):
        return self.nonlinearity(h)


class WithDefault(Net):
    def forward(self, x, scale=2.0, *, shift=1.0):
        return self.second(F.relu(self.first(x)) * scale + shift)


class WithBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(12.0).reshape(2, 6))

    def act(self, h):
        return F.relu(h + self.table[1] * 0.1)


class WithOwnParameter(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def act(self, h):
        return F.relu(h * self.scale.abs())


class WithUnpacking(Net):
    def forward(self, x):
        batch, width = x.shape
        return self.second(F.relu(self.first(x.view(batch, width)))).reshape(batch, -1)


class Pair(NamedTuple):
    value: Tensor
    hidden: Tensor


class WithTuple(Net):
    def forward(self, x):
        h = F.relu(self.first(x))
        return Pair(self.second(h), h).value


SPELLINGS = {
    Relu: "relu",
    Method: "relu",
    ChainedMethod: "tanh",
    Tanh: "tanh",
    FunctionalTanh: "tanh",
    ApproximateGelu: "gelu_tanh",
    LeakyRelu: "original",
    Alias: "relu",
    FullPath: "silu",
    InPlaceFlag: "relu",
    InPlacePositional: "original",
    InPlaceFunction: "relu",
    InPlaceMethod: "sigmoid",
    Keyword: "relu",
    ClassAttribute: "tanh",
    StaticAttribute: "relu",
    WithDefault: "relu",
    WithBuffer: "relu",
    WithOwnParameter: "relu",
    WithUnpacking: "relu",
    WithTuple: "relu",
}


@pytest.mark.parametrize("cls", SPELLINGS, ids=lambda cls: cls.__name__)
def test_every_spelling_becomes_one_site_and_is_restored(cls: type[Net], pick: Callable) -> None:
    plain = cls().eval()
    x = torch.randn(5, 4)
    expected = plain(x)
    converted = flexact.convert(copy.deepcopy(plain), "*", NEAR)
    assert [row.pick for row in flexact.selection(converted)] == [SPELLINGS[cls]]
    assert type(converted) is not cls
    assert isinstance(converted, cls)
    torch.testing.assert_close(converted(x), expected, atol=1e-4, rtol=0)

    extracted = flexact.extract(flexact.commit(pick(converted, None)))
    assert type(extracted) is cls
    assert torch.equal(extracted(x), expected)
    assert dict(extracted.named_modules()).keys() == dict(plain.named_modules()).keys()
    assert pickle.dumps(extracted).count(b"flexact") == 0


@pytest.mark.parametrize("cls", SPELLINGS, ids=lambda cls: cls.__name__)
def test_another_pick_stays_in_the_forward_of_the_same_class(cls: type[Net], pick: Callable) -> None:
    plain = cls().eval()
    names = list(plain.state_dict())
    converted = flexact.commit(pick(flexact.convert(plain, "*", NEAR), "identity"))
    extracted = flexact.extract(converted)
    x = torch.randn(5, 4)
    assert torch.equal(extracted(x), converted(x))
    assert isinstance(extracted, cls)
    assert list(extracted.state_dict()) == names
    assert not any(isinstance(module, flexact.FlexAct) for module in extracted.modules())
    assert [type(module) for module in extracted.children()][-1] is nn.Identity


def test_in_a_longer_forward_only_the_call_is_replaced_by_the_site() -> None:
    """The blend of relu and tanh at equal probabilities is their mean."""

    torch.manual_seed(0)
    plain = Relu()
    converted = flexact.convert(copy.deepcopy(plain), config=flexact.FlexConfig(candidates=("relu", "tanh"))).eval()
    x = torch.randn(7, 4)
    h = plain.first(x)
    torch.testing.assert_close(converted(x), plain.second((F.relu(h) + torch.tanh(h)) / 2))


def test_arguments_and_their_defaults_are_kept() -> None:
    plain = WithDefault().eval()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(2, 4)
    for args, kwargs in (((), {}), ((3.0,), {}), ((), {"scale": 3.0, "shift": 0.0})):
        torch.testing.assert_close(converted(x, *args, **kwargs), plain(x, *args, **kwargs), atol=1e-4, rtol=0)


class Dropping(Net):
    def act(self, h):
        return F.dropout(F.relu(h), p=self.p, training=self.training)


def test_dropout_still_follows_the_mode() -> None:
    torch.manual_seed(0)
    plain = Dropping()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(64, 4)
    for training in (True, False, True):
        plain.train(training)
        converted.train(training)
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        torch.testing.assert_close(converted(x), expected, atol=1e-4, rtol=0)
    assert not torch.equal(converted(x), converted(x))
    assert torch.equal(converted.eval()(x), converted(x))


def test_asking_for_a_forward_that_cannot_be_rewritten_is_an_error_with_the_reason() -> None:
    with pytest.raises(flexact.FlexActError, match=r"for example through a table of functions"):
        flexact.convert(PlainFunction())
    with pytest.raises(flexact.FlexActError, match=r"relu in line [0-9]+ of .*test_rewriting\.py is not a site"):
        flexact.convert(PlainFunction(), example_inputs=torch.randn(2, 4))


class PlainFunction(Net):
    def act(self, h):
        return functional_relu(h)


def test_convert_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    flexact.convert(Relu())
    after_convert = torch.rand(())
    torch.manual_seed(3)
    Relu()
    assert torch.equal(after_convert, torch.rand(()))


def test_an_instance_with_a_forward_of_its_own_is_not_rewritten() -> None:
    model = Relu()
    model.forward = lambda x: F.relu(x)
    with pytest.raises(flexact.FlexActError, match="instance only"):
        flexact.convert(model)


class Gate(nn.Module):
    """`gate` is None because the module sets it so."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4) if gated else None

    def forward(self, x):
        h = F.relu(self.first(x))
        return h if self.gate is None else h * self.gate(x).sigmoid()


def test_a_branch_that_the_modules_own_settings_rule_out_has_no_sites() -> None:
    assert [row.key for row in flexact.selection(flexact.convert(Gate(False), "*"))] == ["relu"]
    assert [row.key for row in flexact.selection(flexact.convert(Gate(True), "*"))] == ["relu", "sigmoid"]


class LearntSlope(Net):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def act(self, h):
        return torch.tanh(h) + torch.where(h > 0, h, self.slope * h)


def test_calls_that_are_no_activations_stay_in_the_rewritten_forward() -> None:
    plain = LearntSlope().eval()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(3, 4)
    torch.testing.assert_close(converted(x), plain(x), atol=1e-4, rtol=0)
    converted(x).sum().backward()
    assert converted.slope.grad is not None


class MathOnNumbers(Net):
    def act(self, h):
        return F.relu(h) * math.tanh(self.p)


def test_math_functions_on_numbers_are_no_sites() -> None:
    assert list(flexact.selection(flexact.convert(MathOnNumbers())).picks) == ["relu"]


def test_the_rewritten_class_names_its_original_class_and_keeps_its_file_and_lines() -> None:
    converted = flexact.convert(Relu())
    assert type(converted).__qualname__ == "Relu"
    assert type(converted).flexact_first is Relu
    new, old = type(converted).act, Relu.act
    assert (new.__code__.co_filename, new.__code__.co_firstlineno) == (
        old.__code__.co_filename,
        old.__code__.co_firstlineno,
    )
    assert new.__globals__ is old.__globals__
    assert inspect.getsource(new) == inspect.getsource(old)


class Failing(Net):
    def act(self, h):
        h = F.relu(h)
        return h.reshape(7, 7)


def test_a_traceback_shows_the_users_own_lines() -> None:
    with pytest.raises(RuntimeError) as caught:
        flexact.convert(Failing())(torch.randn(2, 4))
    shown = "".join(traceback.format_exception(caught.value))
    assert "return h.reshape(7, 7)" in shown
    assert __file__ in shown


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_a_rewritten_forward_is_an_error_since_it_would_compile_the_source_on_disk(pick: Callable) -> None:
    extracted = flexact.extract(pick(flexact.convert(Scriptable(), config=NEAR), "tanh"), commit=True).eval()
    x = torch.randn(3, 4)
    expected = extracted(x)
    with pytest.raises(flexact.FlexActError, match=r"torch\.jit\.script reads the source of Scriptable"):
        torch.jit.script(extracted)
    assert torch.equal(torch.jit.trace(extracted, x)(x), expected)
    assert not torch.equal(expected, extracted.second(F.relu(extracted.first(x))))
    assert torch.equal(pickle.loads(pickle.dumps(extracted))(x), expected)


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


SCRIPT = """
import warnings, torch, flexact
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.relu(F.gelu(self.first(x)))

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    flexact.convert(Net())(torch.ones(2, 4))
print(caught[0].message)
"""


def test_a_class_without_a_source_is_not_rewritten_and_is_named() -> None:
    done = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, check=True)
    assert "  Net: gelu in line 12 of <stdin> is not a site" in done.stdout


def test_a_class_whose_source_has_changed_is_not_rewritten_and_is_named(tmp_path: Path) -> None:
    text = SCRIPT.partition("with warnings")[0]
    file = tmp_path / "net.py"
    file.write_text(text)
    names: dict[str, Any] = {"__name__": "net"}
    exec(compile(text.replace("F.gelu", "F.silu"), str(file), "exec"), names)
    with pytest.warns(UserWarning, match=r"Net: silu in line 12 of .*net\.py is not a site"):
        flexact.convert(names["Net"]())(torch.ones(2, 4))


def test_a_pickle_of_a_class_that_changed_since_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SCRIPT.partition("with warnings")[0]
    monkeypatch.syspath_prepend(tmp_path)
    pickled = b""
    for name, new in (("F.gelu", "F.gelu"), ("F.gelu(", "F.gelu(2 * ")):
        (tmp_path / "changing_net.py").write_text(text.replace(name, new))
        sys.modules.pop("changing_net", None)
        importlib.invalidate_caches()
        linecache.clearcache()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        net = importlib.import_module("changing_net").Net
        pickled = pickled or pickle.dumps(flexact.convert(net()))
    with pytest.raises(flexact.FlexActError, match=r"source of Net\.forward"):
        pickle.loads(pickled)


def test_a_parametrization_added_later_stays_when_the_class_is_restored(pick: Callable) -> None:
    model = flexact.convert(WithOwnParameter(), config=NEAR)
    parametrize.register_parametrization(model, "scale", nn.Softplus())
    x = torch.randn(3, 4)
    expected = flexact.commit(pick(model, None)).eval()(x)
    extracted = flexact.extract(model)
    assert torch.equal(extracted(x), expected)
    assert not isinstance(extracted, Rewritten)
    assert torch.equal(model(x), expected)


def test_modules_of_one_class_share_one_rewritten_class() -> None:
    model = flexact.convert(nn.Sequential(Relu(), Relu()))
    assert type(model[0]) is type(model[1])


def test_a_copy_of_a_rewritten_module_works_on_its_own(pick: Callable) -> None:
    converted = flexact.convert(Relu()).eval()
    duplicate = copy.deepcopy(converted)
    x = torch.randn(3, 4)
    assert torch.equal(duplicate(x), converted(x))
    pick(duplicate, "tanh")
    assert not torch.equal(duplicate(x), converted(x))
    assert duplicate.relu is not converted.relu


class NamedLikeItsActivation(Net):
    """Already has the names that a site would take."""

    relu = "taken"

    def relu_1(self):
        return "taken too"

    def act(self, h):
        return F.relu(h)


def test_a_site_takes_no_name_that_the_module_has() -> None:
    converted = flexact.convert(NamedLikeItsActivation())
    assert converted.relu == "taken"
    assert converted.relu_1() == "taken too"
    assert list(flexact.selection(converted).picks) == ["relu_2"]


class AttributeAndCalls(Net):
    """Calls the same function by an attribute and by its name."""

    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def act(self, h):
        return torch.cos(F.relu(h)) + self.activation(-h)


def test_a_function_attribute_and_direct_calls_are_separate_sites(pick: Callable) -> None:
    plain = AttributeAndCalls().eval()
    x = torch.randn(3, 4)
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    assert set(flexact.selection(converted).picks) == {"activation", "relu"}
    torch.testing.assert_close(converted(x), plain(x), atol=1e-4, rtol=0)
    with torch.no_grad():
        converted.activation.logits.copy_(torch.tensor([0.0, 0, 50, 0, 0]))
        h = plain.first(x)
        expected = plain.second(torch.cos(F.relu(h)) + torch.tanh(-h))
        torch.testing.assert_close(converted(x), expected, atol=1e-4, rtol=0)
    extracted = flexact.extract(flexact.commit(pick(converted, "relu")))
    assert extracted.activation is F.relu
    assert torch.equal(extracted(x), plain(x))


def test_an_extracted_rewritten_model_can_be_converted_again(pick: Callable) -> None:
    """Rewritten twice: the first time one of two calls, the second time the other."""
    first = flexact.extract(flexact.commit(pick(flexact.convert(TwoKinds(), "tanh", PAPER), "sigmoid")))
    x = torch.randn(3, 4)
    expected = first.eval()(x)
    second = flexact.convert(copy.deepcopy(first), "relu", config=NEAR)
    assert list(flexact.selection(second).picks) == ["relu"]
    for duplicate in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        torch.testing.assert_close(duplicate(x), expected, atol=1e-4, rtol=0)
    back = flexact.extract(flexact.commit(pick(second, None)))
    assert type(back) is type(first)
    assert torch.equal(back(x), expected)


class TwoKinds(Net):
    def act(self, h):
        return F.relu(torch.tanh(h) + 0.1)


def test_calls_of_two_functions_are_two_sites_and_can_be_selected_separately() -> None:
    assert set(flexact.selection(flexact.convert(TwoKinds())).picks) == {"relu", "tanh"}
    model = flexact.convert(TwoKinds(), "tanh", flexact.FlexConfig(candidates=("relu", "identity"))).eval()
    x = torch.randn(3, 4)
    h = model.first(x)
    torch.testing.assert_close(model(x), model.second(F.relu((F.relu(h) + h) / 2 + 0.1)))


def test_after_extraction_the_rewritten_class_stays_only_if_a_call_picked_another_function(pick: Callable) -> None:
    model = flexact.convert(nn.Sequential(Relu(), nn.Linear(3, 4), Relu()), config=NEAR)
    pick(model, None)
    pick(model[2], "tanh")
    extracted = flexact.extract(flexact.commit(model))
    assert type(extracted[0]) is Relu
    assert isinstance(extracted[2], Rewritten)


def test_models_without_functional_activations_log_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Softmax(-1), nn.Identity()))


@dataclasses.dataclass(slots=True)
class Slotted:
    gate: object = None


class SettingsInSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Slotted()
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(x) if self.settings.gate is None else x)


def test_a_setting_in_slots_rules_no_running_branch_out() -> None:
    assert [row.key for row in flexact.selection(flexact.convert(SettingsInSlots()))] == ["relu"]
