"""Tests that every activation of a model is found by its name in the module tree, or named with the reason why it is
no site.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact.surgery.finding import Findings

NEAR = flexact.FlexConfig(init="original", init_probability=1 - 1e-6)


def names(model: nn.Module, per_call: bool = False) -> list[str]:
    return [name for one in Findings(model, per_call).found for name in one.names]


class Twice(nn.Module):
    """One module, called twice, as in a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.first(x))
        return self.relu(self.second(out) + x)


class FunctionalTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + x)


class AttributeTwice(nn.Module):
    """A function kept as an attribute, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.activation = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.second(self.activation(self.first(x))) + x)


class SharedByName(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act1 = self.act2 = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act2(self.second(self.act1(self.first(x))))


class SharedBlocks(nn.Module):
    """One block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = Twice()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class InnerCalledTwice(nn.Module):
    """Calls a grandchild itself, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.act = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[1](self.inner[0](x))
        x = self.inner[1](self.inner[0](x))
        return F.silu(x)


class InALoop(InnerCalledTwice):
    """A call in a loop counts once."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner[1](self.inner[0](x))
        return x


def shared_sequence() -> nn.Sequential:
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)


CASES = {
    Twice: (["relu"], 1, 2),
    FunctionalTwice: (["relu"], 1, 2),
    AttributeTwice: (["activation"], 1, 2),
    SharedByName: (["act1", "act2"], 1, 2),
    SharedBlocks: (["a.relu", "b.relu"], 1, 2),
    shared_sequence: (["1", "3"], 1, 2),
    InnerCalledTwice: (["silu", "inner.1"], 2, 3),
    InALoop: (["inner.1"], 1, 1),
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_shared_activation_is_one_site_by_default_and_one_per_call_on_request(make: Callable) -> None:
    expected_names, sites, sites_per_call = CASES[make]
    assert sorted(names(make())) == sorted(expected_names)
    assert len(flexact.selection(flexact.convert(make()))) == sites
    assert len(flexact.selection(flexact.convert(make(), "*", per_call=True))) == sites_per_call


@pytest.mark.parametrize("per_call", [False, True])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_shared_activations_compute_the_same_and_are_restored(make: Callable, per_call: bool, pick: Callable) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    x = torch.randn(6, 4)
    expected = plain(x)
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR, per_call=per_call)
    torch.testing.assert_close(converted(x), expected, atol=1e-4, rtol=0)
    extracted = flexact.extract(flexact.commit(pick(converted, None)))
    assert torch.equal(extracted(x), expected)
    described = [(name, type(module)) for name, module in plain.named_modules(remove_duplicate=False)]
    assert [(name, type(module)) for name, module in extracted.named_modules(remove_duplicate=False)] == described


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_each_call_can_pick_independently(make: Callable) -> None:
    """Every site's logits must affect the output."""
    torch.manual_seed(0)
    model = flexact.convert(make(), per_call=True)
    model(torch.randn(6, 4)).square().sum().backward()
    for site in (module for module in model.modules() if isinstance(module, flexact.FlexAct)):
        assert site.logits.grad is not None, site.name
        assert site.logits.grad.abs().sum() > 0, site.name


@pytest.mark.parametrize("make", [Twice, AttributeTwice, FunctionalTwice])
def test_one_of_two_calls_can_be_chosen_alone(make: Callable) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    all_names = names(make(), per_call=True)
    assert len(all_names) == 2
    config = flexact.FlexConfig(candidates=("tanh", "sigmoid"))
    x = torch.randn(5, 4)

    def blend(h: Tensor) -> Tensor:
        return (torch.tanh(h) + torch.sigmoid(h)) / 2

    with torch.no_grad():
        first = flexact.convert(copy.deepcopy(plain), all_names[0], config, per_call=True)
        torch.testing.assert_close(first(x), F.relu(plain.second(blend(plain.first(x))) + x))
        second = flexact.convert(copy.deepcopy(plain), all_names[1], config, per_call=True)
        torch.testing.assert_close(second(x), blend(plain.second(F.relu(plain.first(x))) + x))


def test_the_name_of_a_module_called_twice_selects_both_calls() -> None:
    model = flexact.convert(nn.Sequential(Twice(), Twice()), "1.relu", per_call=True)
    assert len(flexact.selection(model)) == 2
    assert all(name.startswith("1.") for name in flexact.selection(model).picks)


class AlsoAsValue(Twice):
    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.first(x))
        function = self.relu
        return self.relu(function(self.second(out)))


def test_an_activation_that_is_also_used_as_a_value_is_one_site() -> None:
    assert names(AlsoAsValue(), per_call=True) == ["relu"]


def test_identity_is_no_activation_with_or_without_per_call() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skip = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.skip(x)) + self.skip(x)

    for per_call in (False, True):
        assert names(Skips(), per_call) == ["relu"]


class Inline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.ReLU()(self.first(x))


class InlineByName(Inline):
    def forward(self, x: Tensor) -> Tensor:
        act = torch.nn.GELU(approximate="tanh")
        return act(self.first(x))


@pytest.mark.parametrize(("cls", "message"), [(Inline, "relu"), (InlineByName, "gelu")])
def test_an_activation_created_in_the_forward_is_reported(cls: type[nn.Module], message: str) -> None:
    x = torch.randn(2, 4)
    with pytest.warns(
        UserWarning, match=f"did not see these activations:\n  1: {message} in line [0-9]+ of .*is not a site"
    ):
        flexact.convert(nn.Sequential(nn.ReLU(), cls()))(x)
    with pytest.raises(flexact.FlexActError, match=f"{cls.__name__}: cannot be converted: {message} in line"):
        flexact.convert(cls(), example_inputs=x)


def test_activations_that_are_no_candidates_are_reported_with_the_reason() -> None:
    model = nn.Sequential(
        nn.ReLU(), nn.PReLU(), nn.Threshold(0.1, 0), nn.RReLU(), nn.Softmax(-1), nn.MultiheadAttention(4, 1)
    )
    left_alone = Findings(model, per_call=False).left_alone
    assert left_alone == {
        "1": "PReLU has learnable parameters",
        "2": "Threshold is not a candidate",
        "3": "RReLU is not a candidate",
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_is_reported_once() -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
    assert list(Findings(nn.Sequential(nn.ReLU(), part), per_call=False).left_alone) == ["1"]


def test_a_graph_module_keeps_its_functional_calls_and_is_reported() -> None:
    graph = torch.fx.symbolic_trace(FunctionalTwice())
    assert "convert it before it is traced" in str(Findings(nn.Sequential(graph), per_call=False).left_alone["0"])


def test_a_graph_module_with_activation_modules_alone_is_not_reported() -> None:
    block = nn.Sequential()
    block.relu = nn.ReLU()
    found = Findings(torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(block))), per_call=False)
    assert [one.name for one in found.found] == ["0.0.relu"]
    assert found.left_alone == {}


def test_a_graph_module_with_activation_modules_is_converted() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    converted = flexact.convert(torch.fx.symbolic_trace(plain), config=NEAR)
    x = torch.randn(3, 4)
    torch.testing.assert_close(converted(x), plain(x), atol=1e-4, rtol=0)
    assert torch.equal(flexact.extract(converted, commit=True)(x), plain(x))


def test_function_attributes_are_found_and_other_attributes_are_not() -> None:
    model = AttributeTwice()
    model.activations = [F.relu]
    model.norm = F.layer_norm
    assert names(model) == ["activation"]


def test_activations_of_a_subclass_of_a_torch_type_are_found() -> None:
    class Loud(nn.ReLU):
        pass

    plain = nn.Sequential(nn.Linear(4, 4), Loud()).eval()
    converted = flexact.convert(copy.deepcopy(plain), config=NEAR)
    assert list(flexact.selection(converted).picks) == ["1.relu"]
    x = torch.randn(3, 4)
    torch.testing.assert_close(converted(x), plain(x), atol=1e-4, rtol=0)


def test_definition_order_is_kept() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.ReLU(), nn.Linear(1, 1), nn.GELU()), nn.SiLU())
    assert names(model) == ["0", "1.0", "1.2", "2"]


class Head(nn.Module):
    """`fc2` is defined first, and the module before its relu has activations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2 = nn.Linear(4, 4)
        self.keep = F.silu
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.fc1 = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(self.body(self.keep(torch.sigmoid(x))))))


class KeepsAFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation = F.relu
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x))


def test_a_forwards_own_calls_come_after_the_children_that_it_called_before() -> None:
    assert names(Head()) == ["sigmoid", "keep", "body.1", "relu"]
    assert names(nn.Sequential(Head(), nn.GELU())) == ["0.sigmoid", "0.keep", "0.body.1", "0.relu", "1"]
    assert names(FunctionalTwice(), per_call=True) == ["relu", "relu_1"]


def test_a_function_of_an_untraced_forward_comes_after_all_children() -> None:
    assert names(KeepsAFunction()) == ["body.1", "activation"]


def test_penultimate_is_the_last_call_and_not_the_stems(resnets: ModuleType) -> None:
    assert names(resnets.FunctionalResNet())[-1].startswith("layer4.")
    assert list(flexact.selection(flexact.convert(Head(), "penultimate")).picks) == ["relu"]
