"""Tests of the hooks on the first forwards of a converted model: what they log, and that they have no other effect."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import flexact
from flexact.surgery.watching import unwatch

TABLE = {"relu": F.relu, "sigmoid": torch.sigmoid}


class Hidden(nn.Module):
    """Runs a function from a table, next to a module."""

    def __init__(self, name: str = "relu", fails: bool = False) -> None:
        super().__init__()
        self.linear, self.act, self.name, self.fails = nn.Linear(4, 4), nn.GELU(), name, fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("on purpose")
        return TABLE[self.name](self.act(self.linear(x)))


class OnlyInEval(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(x) if self.training else super().forward(x)


def messages(model: nn.Module, training: bool = True) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.train(training)(torch.randn(2, 4))
    return [str(one.message) for one in caught if "flexact" in str(one.message)]


def test_an_activation_that_runs_and_is_no_site_is_named_once_with_its_line() -> None:
    model = flexact.convert(nn.Sequential(Hidden()))
    (text,) = messages(model)
    line = Hidden.forward.__code__.co_firstlineno + 3
    assert text.splitlines()[0] == "flexact.convert did not see these activations:"
    assert text.splitlines()[1].startswith(f"  0: relu in line {line} of {__file__} is not a site")
    assert messages(model) == messages(model, training=False) == []


def test_each_mode_is_watched_and_then_no_hook_is_left() -> None:
    model = flexact.convert(OnlyInEval())
    before = len(model._forward_pre_hooks)
    assert messages(model) == []
    assert len(messages(model, training=False)) == 1
    assert len(model._forward_pre_hooks) == before - 1
    assert not model._forward_hooks
    assert _get_current_function_mode_stack() == []


def test_a_sigmoid_is_named_only_if_patterns_ask_for_all_functions() -> None:
    assert messages(flexact.convert(Hidden("sigmoid"))) == []
    assert len(messages(flexact.convert(Hidden("sigmoid"), "*"))) == 1


def test_activations_that_where_does_not_ask_for_are_not_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.other = nn.ReLU(), F.silu

        def forward(self, x: Tensor) -> Tensor:
            return self.other(F.gelu(self.act(x)))

    for where in ("act", "gelu", "other"):
        assert messages(flexact.convert(Two(), where)) == []


def test_a_gate_and_missed_activations_on_one_line_are_distinguished() -> None:
    class OneLine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act, self.slope = nn.Linear(4, 4), nn.ReLU(), 0.2

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(F.leaky_relu(TABLE["relu"](self.act(self.linear(x))), self.slope)))

    (text,) = messages(flexact.convert(OneLine()))
    assert "leaky_relu in line" in text
    assert " relu in line" in text
    assert "tanh" not in text


class Inherits(nn.GELU):
    pass


class CallsBase(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_subclasses_of_activations_that_are_no_sites_are_named() -> None:
    (text,) = messages(flexact.convert(nn.Sequential(nn.Linear(4, 4), Inherits(), nn.ReLU(), CallsBase())))
    assert "  1: gelu of Inherits, a subclass of torch's type, is not a site" in text
    assert "  3: gelu of CallsBase" in text


class Parts(nn.Module):
    """Its own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Hidden(), Hidden("sigmoid")


def test_submodules_called_without_the_model_are_watched() -> None:
    model = flexact.convert(Parts())
    (text,) = messages(model.first)
    assert "  first: relu in line" in text
    assert messages(model.first) == messages(model.second) == messages(model.second, training=False) == []
    assert messages(model.first, training=False) == []
    assert not any(module._forward_pre_hooks for module in model.modules() if module is not model)


def test_submodules_called_by_the_model_are_not_watched_on_their_own() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(4, 4), Hidden()))
    assert len(messages(model)) == 1
    assert not model[1]._forward_pre_hooks
    assert _get_current_function_mode_stack() == []


def test_a_forward_that_fails_ends_the_watch_and_raises_its_own_error() -> None:
    model = flexact.convert(Hidden(fails=True))
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.randn(2, 4))
    assert _get_current_function_mode_stack() == []
    model.fails = False
    messages(model)
    assert not model._forward_hooks


def test_copies_and_pickles_are_watched_on_their_own_and_an_extracted_network_is_not() -> None:
    model = flexact.convert(Hidden())
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert len(messages(duplicate)) == 1
    extracted = flexact.extract(flexact.convert(Hidden()), commit=True)
    assert messages(extracted) == []
    assert not extracted._forward_pre_hooks


def _graphs(model: nn.Module) -> int:
    """Returns the number of graphs that three calls are compiled to."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            compiled(torch.randn(2, 4))
    return len(graphs)


def test_a_compiled_model_is_not_watched_and_not_recompiled() -> None:
    model = flexact.convert(Hidden()).eval()
    unwatched = copy.deepcopy(model)
    unwatch(unwatched)
    assert _graphs(model) == _graphs(unwatched)


def test_a_part_of_the_model_that_is_compiled_runs_in_the_watched_forward() -> None:
    class Partly(Hidden):
        def forward(self, x: Tensor) -> Tensor:
            return compiled(super().forward(x))

    compiled = torch.compile(lambda h: torch.relu(h) + 1, backend="eager", fullgraph=True)
    model = flexact.convert(Partly())
    x = torch.randn(2, 4)
    with warnings.catch_warnings(record=True):
        assert torch.equal(model(x), model(x))


def test_the_first_evaluation_of_an_attention_layer_uses_the_fused_path() -> None:
    torch.manual_seed(0)
    model = flexact.convert(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), where="*").eval()
    flexact.commit(model)
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        assert torch.equal(model(x), model(x))
