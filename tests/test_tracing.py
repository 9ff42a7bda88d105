"""Functional activations: which calls become sites, what is left alone, and that a rewritten forward does the same."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import relu as r
from torch.utils.checkpoint import checkpoint

import flexact
from flexact.config import PAPER_CANDIDATES
from flexact.rewriting import Rewritten, first_class

PAPER = flexact.FlexConfig(candidates=PAPER_CANDIDATES)
NEAR = dataclasses.replace(PAPER, init="original", init_probability=1 - 1e-6)


class Net(nn.Module):
    """Two layers around whatever `act` says."""

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


class UnboundMethod(Net):
    def act(self, h):
        return torch.Tensor.sigmoid(h)


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


class LocalAlias(Net):
    def act(self, h):
        f = F.elu
        return f(h, alpha=0.5)


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


class PlainFunction(Net):
    def act(self, h):
        return functional_relu(h)


class ClassAttribute(Net):
    nonlinearity = torch.tanh

    def act(self, h):
        return self.nonlinearity(h)


class StaticAttribute(Net):
    nonlinearity = staticmethod(F.relu)

    def act(self, h):
        return self.nonlinearity(h)


class Inherited(Relu):
    def forward(self, x):
        return super().forward(x) * 2


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
    ApproximateGelu: "original",
    LeakyRelu: "original",
    Alias: "relu",
    FullPath: "silu",
    LocalAlias: "original",
    InPlaceFlag: "relu",
    InPlacePositional: "original",
    InPlaceFunction: "relu",
    InPlaceMethod: "sigmoid",
    Keyword: "relu",
    PlainFunction: "relu",
    ClassAttribute: "tanh",
    StaticAttribute: "relu",
    Inherited: "relu",
    WithDefault: "relu",
    WithBuffer: "relu",
    WithOwnParameter: "relu",
    WithUnpacking: "relu",
    WithTuple: "relu",
}


@pytest.mark.parametrize("cls", SPELLINGS, ids=lambda cls: cls.__name__)
def test_every_spelling_becomes_one_site_and_goes_back(cls: type[Net], pick: Callable) -> None:
    plain = cls().eval()
    x = torch.randn(5, 4)
    expected = plain(x)
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
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
    converted = flexact.commit(pick(flexact.convert(plain, config=NEAR), "identity"))
    extracted = flexact.extract(converted)
    x = torch.randn(5, 4)
    assert torch.equal(extracted(x), converted(x))
    assert isinstance(extracted, cls)
    assert list(extracted.state_dict()) == names
    assert not any(isinstance(module, flexact.FlexAct) for module in extracted.modules())
    assert [type(module) for module in extracted.children()][-1] is nn.Identity


def test_a_call_inside_a_longer_forward_is_given_to_the_site_and_nothing_else() -> None:
    """The blend of relu and tanh at equal probabilities is their mean."""

    torch.manual_seed(0)
    plain = Relu()
    converted = flexact.convert(copy.deepcopy(plain), config=flexact.FlexConfig(candidates=("relu", "tanh"))).eval()
    x = torch.randn(7, 4)
    h = plain.first(x)
    torch.testing.assert_close(converted(x), plain.second((F.relu(h) + torch.tanh(h)) / 2))


def test_arguments_and_their_defaults_stay() -> None:
    plain = WithDefault().eval()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(2, 4)
    for args, kwargs in (((), {}), ((3.0,), {}), ((), {"scale": 3.0, "shift": 0.0})):
        torch.testing.assert_close(converted(x, *args, **kwargs), plain(x, *args, **kwargs), atol=1e-4, rtol=0)


class Dropping(Net):
    def act(self, h):
        return F.dropout(F.relu(h), p=self.p, training=self.training)


@pytest.mark.filterwarnings("ignore:these settings are fixed")
def test_dropout_keeps_following_the_mode() -> None:
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


class OnlyInTraining(Net):
    def act(self, h):
        if self.training:
            h = h * 2
        return F.relu(h)


class TwiceInTraining(Net):
    def act(self, h):
        if self.training:
            h = torch.tanh(h)
        return F.relu(h)


def test_a_forward_that_branches_on_the_mode_keeps_both_branches() -> None:
    plain = OnlyInTraining()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(4, 4)
    for training in (True, False):
        expected = plain.train(training)(x)
        torch.testing.assert_close(converted.train(training)(x), expected, atol=1e-4, rtol=0)


class Masked(Net):
    def forward(self, x, mask=None):
        h = F.relu(self.first(x))
        if mask is None:
            mask = torch.ones_like(h)
        return self.second(h * mask)


class MaskedInHelper(Net):
    def forward(self, x, mask=None):
        return self.second(self.masked(F.relu(self.first(x)), mask))

    def masked(self, h, mask):
        return h if mask is None else h * mask


class ByType(Net):
    def forward(self, x):
        if isinstance(x, (list, tuple)):
            x = torch.cat(x)
        return self.second(F.relu(self.first(x)))


class ByTensor(Net):
    def forward(self, x):
        if not torch.is_tensor(x):
            x = torch.cat(x)
        return self.second(F.relu(self.first(x)))


class ByAttribute(Net):
    def forward(self, x):
        return self.second(F.relu(self.first(x.tensors if hasattr(x, "tensors") else x)))


class ByValue(Net):
    def forward(self, x):
        h = F.relu(self.first(x))
        return self.second(h) if h.sum() > 0 else self.second(-h)


class ByGradMode(Net):
    def act(self, h):
        return F.relu(h) if torch.is_grad_enabled() else h


class NoGrad(Net):
    def act(self, h):
        with torch.no_grad():
            h = F.relu(h)
        return h


class Decorated(Net):
    @torch.no_grad()
    def forward(self, x):
        return self.second(F.relu(self.first(x)))


class Trying(Net):
    def act(self, h):
        try:
            return F.relu(h)
        except RuntimeError:
            return h


class Storing(Net):
    def act(self, h):
        self.features = F.relu(h)
        return self.features


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def act(self, h):
        self.count.add_(1)
        return F.relu(h)


class Keeping(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def act(self, h):
        self.seen.append(h)
        return F.relu(h)


class Noisy(Net):
    def act(self, h):
        return F.relu(h + torch.randn(6))


class SkippedByChance(Net):
    def act(self, h):
        return F.relu(h) if random.random() < 0.5 else F.relu(-h)


class MixedByChance(Net):
    def act(self, h):
        return F.relu(h) * numpy.random.beta(1.0, 1.0)  # noqa: NPY002


class FrozenTensor(Net):
    def act(self, h):
        return F.relu(h) * torch.arange(6)


class OverwritesAPart(Net):
    def act(self, h):
        F.relu_(h[:, :3])
        return h


class ByModeOtherActivations(Net):
    def act(self, h):
        return F.relu(h) if self.training else torch.tanh(h)


class Checkpointed(Net):
    def act(self, h):
        return F.relu(checkpoint(functional_relu, h, use_reentrant=False))


class CheckpointedByPath(Net):
    def act(self, h):
        return torch.utils.checkpoint.checkpoint(F.relu, h, use_reentrant=False)


class CheckpointedByAttribute(Net):
    def __init__(self):
        super().__init__()
        self.run = functools.partial(checkpoint, use_reentrant=False)

    def act(self, h):
        return F.relu(self.run(torch.cos, h))


class Mapped(Net):
    def act(self, h):
        return F.relu(torch.func.vmap(torch.cos)(h))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class OwnBackward(Net):
    def act(self, h):
        return F.relu(Doubled.apply(h))


class StoringByAnotherName(Net):
    def forward(this, x):
        this.features = F.relu(this.first(x))
        return this.second(this.features)


LEFT_ALONE = {
    Checkpointed: "uses checkpoint, which a trace loses",
    CheckpointedByPath: "uses torch.utils.checkpoint.checkpoint, which a trace loses",
    CheckpointedByAttribute: "uses self.run, which a trace loses",
    Mapped: "uses torch.func.vmap, which a trace loses",
    OwnBackward: "uses Doubled.apply, which a trace loses",
    StoringByAnotherName: "changes this.features",
    Masked: "decides by the argument 'mask' (mask is None)",
    MaskedInHelper: "calls masked, which decides by the argument 'mask'",
    ByType: "isinstance(x, (list, tuple))",
    ByTensor: "torch.is_tensor(x)",
    ByAttribute: "hasattr(x, 'tensors')",
    ByValue: "torch.fx cannot trace its forward",
    UnboundMethod: "torch.fx cannot trace its forward",
    ByGradMode: "torch.is_grad_enabled()",
    NoGrad: "with torch.no_grad()",
    Decorated: "decorated with @torch.no_grad()",
    Trying: "try block",
    Storing: "changes self.features",
    Counting: "changes self.count",
    Keeping: "changes self.seen",
    Noisy: "random numbers",
    SkippedByChance: "random numbers",
    MixedByChance: "random numbers",
    FrozenTensor: "a tensor of its own",
    OverwritesAPart: "in place",
    ByModeOtherActivations: "other activations in training",
    TwiceInTraining: "other activations in training",
}


@pytest.mark.parametrize("cls", LEFT_ALONE, ids=lambda cls: cls.__name__)
def test_what_a_trace_would_get_wrong_is_left_alone_and_named_with_the_reason(cls: type[Net]) -> None:
    model = nn.ModuleDict({"odd": cls(), "plain": nn.Sequential(nn.ReLU())})
    before = {name: value for name, value in vars(model["odd"]).items() if not name.startswith("_")}
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="left these as they are") as caught:
        flexact.convert(model)
    after_convert = torch.rand(())
    told = str(caught[0].message)
    assert "odd: " in told
    assert LEFT_ALONE[cls] in told
    assert type(model["odd"]) is cls
    assert {name: value for name, value in vars(model["odd"]).items() if not name.startswith("_")} == before
    assert isinstance(model["plain"][0], flexact.FlexAct)
    torch.manual_seed(3)
    assert torch.equal(after_convert, torch.rand(()))


def test_a_left_alone_forward_that_was_asked_for_is_an_error_with_the_reason() -> None:
    with pytest.raises(flexact.FlexActError, match="mask is None"):
        flexact.convert(Masked())


def test_convert_draws_no_random_numbers_even_where_a_trace_does() -> None:
    random.seed(1)
    numpy.random.seed(1)  # noqa: NPY002
    expected = random.random(), numpy.random.rand()  # noqa: NPY002
    random.seed(1)
    numpy.random.seed(1)  # noqa: NPY002
    for cls in (SkippedByChance, MixedByChance):
        with pytest.raises(flexact.FlexActError):
            flexact.convert(cls())
    assert (random.random(), numpy.random.rand()) == expected  # noqa: NPY002


def test_an_instance_with_a_forward_of_its_own_is_left_alone() -> None:
    model = Relu()
    model.forward = lambda x: F.relu(x)
    with pytest.raises(flexact.FlexActError, match="replaced on this object alone"):
        flexact.convert(model)


class Gate(nn.Module):
    """`gate` is None by the module's own choice, which a trace sees rightly."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4) if gated else None

    def forward(self, x):
        gate = None if self.gate is None else self.gate(x)
        x = F.relu(self.first(x))
        return x if gate is None else x * gate.sigmoid()


def test_a_choice_by_the_modules_own_settings_is_traced() -> None:
    assert list(flexact.selection(flexact.convert(Gate(False))).picks) == ["relu"]
    assert list(flexact.selection(flexact.convert(Gate(True))).picks) == ["relu", "sigmoid"]


class OverwritesItsInput(Net):
    """What was overwritten is read again by its old name."""

    def act(self, h):
        F.relu_(h)
        return h


class SkipsOverwritten(Net):
    def act(self, h):
        skip = h
        h = F.relu(h, inplace=True)
        return torch.cos(h) + skip


class ReadsBeforeOverwriting(Net):
    def act(self, h):
        kept = h * 2
        h.relu_()
        return kept + h


@pytest.mark.parametrize("cls", [OverwritesItsInput, SkipsOverwritten, ReadsBeforeOverwriting])
def test_an_in_place_call_changes_what_is_read_later_and_nothing_before(cls: type[Net]) -> None:
    plain = cls().eval()
    x = torch.randn(6, 4)
    with torch.no_grad():
        expected = plain(x)
        torch.testing.assert_close(flexact.convert(copy.deepcopy(plain), config=NEAR)(x), expected, atol=1e-4, rtol=0)


class LearntSlope(Net):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def act(self, h):
        return torch.tanh(h) + torch.where(h > 0, h, self.slope * h)


def test_what_is_no_activation_stays_in_the_rewritten_forward() -> None:
    plain = LearntSlope().eval()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(3, 4)
    torch.testing.assert_close(converted(x), plain(x), atol=1e-4, rtol=0)
    converted(x).sum().backward()
    assert converted.slope.grad is not None


class MathOnNumbers(Net):
    def act(self, h):
        return F.relu(h) * math.tanh(self.p)


@pytest.mark.filterwarnings("ignore:these settings are fixed")
def test_math_functions_on_numbers_are_no_sites() -> None:
    assert list(flexact.selection(flexact.convert(MathOnNumbers())).picks) == ["relu"]


def test_the_rewritten_forward_can_be_read_and_says_which_class_it_is_of() -> None:
    converted = flexact.convert(Relu())
    assert "self.relu(" in inspect.getsource(type(converted).forward)
    assert type(converted).__qualname__ == "Relu"
    assert first_class(converted) is Relu
    assert first_class(nn.Linear(1, 1)) is nn.Linear


def test_modules_of_one_class_share_one_rewritten_class() -> None:
    model = flexact.convert(nn.Sequential(Relu(), Relu()))
    assert type(model[0]) is type(model[1])


def test_a_copy_of_a_rewritten_module_works_on_its_own(pick: Callable) -> None:
    converted = flexact.convert(Relu()).eval()
    twin = copy.deepcopy(converted)
    x = torch.randn(3, 4)
    assert torch.equal(twin(x), converted(x))
    pick(twin, "tanh")
    assert not torch.equal(twin(x), converted(x))
    assert twin.relu is not converted.relu


class NamedLikeItsActivation(Net):
    """Has the names that a site would take already."""

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
    """The same function by an attribute and by its name."""

    def __init__(self):
        super().__init__()
        self.activation = F.relu

    def act(self, h):
        return torch.cos(F.relu(h)) + self.activation(-h)


def test_a_function_attribute_and_direct_calls_are_apart(pick: Callable) -> None:
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
    """Twice rewritten: the first time one of two calls, the second time the other."""
    first = flexact.extract(flexact.commit(pick(flexact.convert(TwoKinds(), "tanh", PAPER), "sigmoid")))
    x = torch.randn(3, 4)
    expected = first.eval()(x)
    second = flexact.convert(copy.deepcopy(first), "relu", config=NEAR)
    assert list(flexact.selection(second).picks) == ["relu"]
    for twin in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        torch.testing.assert_close(twin(x), expected, atol=1e-4, rtol=0)
    back = flexact.extract(flexact.commit(pick(second, None)))
    assert type(back) is type(first)
    assert torch.equal(back(x), expected)


class TwoKinds(Net):
    def act(self, h):
        return F.relu(torch.tanh(h) + 0.1)


def test_calls_of_two_functions_are_two_sites_and_can_be_chosen_apart() -> None:
    assert set(flexact.selection(flexact.convert(TwoKinds())).picks) == {"relu", "tanh"}
    model = flexact.convert(TwoKinds(), "tanh", flexact.FlexConfig(candidates=("relu", "identity"))).eval()
    x = torch.randn(3, 4)
    h = model.first(x)
    torch.testing.assert_close(model(x), model.second(F.relu((F.relu(h) + h) / 2 + 0.1)))


def test_extraction_leaves_the_marker_class_only_where_a_call_picked_another_function(pick: Callable) -> None:
    model = flexact.convert(nn.Sequential(Relu(), nn.Linear(3, 4), Relu()), config=NEAR)
    pick(model, None)
    pick(model[2], "tanh")
    extracted = flexact.extract(flexact.commit(model))
    assert type(extracted[0]) is Relu
    assert isinstance(extracted[2], Rewritten)


def test_nothing_is_said_about_models_without_functional_activations() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Softmax(-1), nn.Identity()))


class AnotherNameForSelf(Net):
    def forward(this, x):
        return this.second(this.helper(this.first(x)))

    def helper(net, h):
        return F.relu(h)


def test_the_module_may_have_any_name_in_its_forward() -> None:
    plain = AnotherNameForSelf().eval()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    x = torch.randn(3, 4)
    torch.testing.assert_close(converted(x), plain(x), atol=1e-4, rtol=0)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale, self.flag, self.unread = 2.0, True, 3

    def act(self, h):
        h = F.relu(h) * self.scale if self.flag else h
        return h * 2 if self.training else h


def test_the_settings_that_a_rewritten_forward_fixes_are_named() -> None:
    with pytest.warns(UserWarning, match="these settings are fixed by the conversion") as caught:
        flexact.convert(nn.Sequential(Scaled(), nn.Tanh(), Scaled()))
    assert [line for line in str(caught[0].message).splitlines() if "Scaled" in line] == ["  Scaled: flag, scale"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flexact.convert(nn.Sequential(Scaled(), nn.Tanh()), "1")
