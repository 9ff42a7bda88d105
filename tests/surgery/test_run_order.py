"""Tests of execution order and channels: a dry run on example inputs shows them and does not change the model."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact

CHANNEL = flexact.FlexConfig(granularity="channel")


def order(model: nn.Module, example_inputs: object, **options: object) -> list[str]:
    return list(flexact.selection(flexact.convert(model, example_inputs=example_inputs, **options)).picks)


class Backwards(nn.Module):
    """Its modules are defined last to first."""

    def __init__(self) -> None:
        super().__init__()
        self.act_c = nn.ELU()
        self.act_b = nn.ReLU()
        self.act_a = nn.GELU()
        self.unused = nn.SiLU()
        self.layers = nn.ModuleList(nn.Linear(4, width) for width in (4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, (self.act_a, self.act_b, self.act_c), strict=True):
            x = act(layer(x))
        return x


def test_sites_come_in_execution_order_with_example_inputs_and_in_definition_order_without() -> None:
    x = torch.randn(2, 4)
    assert order(Backwards(), x) == ["act_a", "act_b", "act_c", "unused"]
    assert list(flexact.selection(flexact.convert(Backwards())).picks) == ["act_c", "act_b", "act_a", "unused"]


def test_penultimate_is_the_last_that_runs_or_without_inputs_the_last_defined() -> None:
    assert order(Backwards(), torch.randn(2, 4), where="penultimate") == ["act_c"]
    assert list(flexact.selection(flexact.convert(Backwards(), "penultimate")).picks) == ["unused"]


class CallsWithin(nn.Module):
    """Functional calls before, between and after a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.keep = F.silu

    def forward(self, x: Tensor) -> Tensor:
        x = self.child(torch.tanh(x))
        x = self.keep(x)
        return F.gelu(x).sigmoid()


def test_functional_calls_and_function_attributes_have_their_position_in_the_order() -> None:
    expected = ["tanh", "child.1", "keep", "gelu", "sigmoid"]
    assert order(CallsWithin(), torch.randn(2, 4), where="*") == expected
    assert order(CallsWithin(), torch.randn(2, 4), where="penultimate") == ["gelu"]


class LastIsShared(nn.Module):
    """The first activation to run is also the last."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.tanh = nn.ReLU(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.tanh(self.relu(x)))


def test_penultimate_counts_an_activations_last_call() -> None:
    assert order(LastIsShared(), torch.randn(2, 4), where="penultimate") == ["relu"]
    per_call = order(LastIsShared(), torch.randn(2, 4), per_call=True)
    assert len(per_call) == 3
    assert per_call[1] == "tanh"
    assert order(LastIsShared(), torch.randn(2, 4), where="penultimate", per_call=True) == [per_call[2]]


def test_calls_of_one_module_under_several_names_are_distinguished() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 7), relu)
    converted = flexact.convert(model, config=CHANNEL, example_inputs=torch.randn(2, 4), per_call=True)
    assert [converted[i].rows for i in (1, 3)] == [5, 7]


class SharedWidths(nn.Module):
    """One attribute called on two widths, with one function call between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 7)
        self.activation = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.c(F.relu(self.b(self.activation(input=self.a(x))))))


def test_channels_are_counted_call_by_call() -> None:
    converted = flexact.convert(SharedWidths(), config=CHANNEL, example_inputs=torch.randn(2, 4), per_call=True)
    sites = [module for module in converted.modules() if isinstance(module, flexact.FlexAct)]
    assert sorted(site.rows for site in sites) == [5, 6, 7]
    assert converted(torch.randn(3, 4)).shape == (3, 7)


def test_one_activation_at_two_widths_is_an_error_that_advises_per_call() -> None:
    with pytest.raises(flexact.FlexActError, match=r"5, 7 channels.*per_call=True"):
        flexact.convert(SharedWidths(), config=CHANNEL, example_inputs=torch.randn(2, 4))
    converted = flexact.convert(nn.ReLU(), config=CHANNEL, example_inputs=torch.randn(2, 4))
    with pytest.raises(flexact.FlexActError, match=r"shape \(2, 6\).*per_call=True"):
        converted(torch.randn(2, 6))


@pytest.mark.parametrize(
    "inputs",
    [torch.randn(2, 4), (torch.randn(2, 4),), [torch.randn(2, 4)], {"input": torch.randn(2, 4)}],
    ids=["tensor", "tuple", "list", "dictionary"],
)
def test_example_inputs_are_the_arguments_of_the_models_call(inputs: object) -> None:
    assert order(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), inputs) == ["1"]


def test_unsuitable_inputs_are_an_error_and_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = repr(model)
    with pytest.raises(flexact.FlexActError, match=r"example_inputs.*RuntimeError"):
        flexact.convert(model, example_inputs=torch.randn(2, 3))
    assert repr(model) == before
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_the_dry_run_does_not_change_mode_statistics_gradients_and_random_state() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x + torch.randn_like(x))

    model = Restless()
    model.layers[1].eval()
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    converted = flexact.convert(model, example_inputs=torch.randn(8, 4, generator=torch.Generator()))
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in converted.layers] == [True, False, True, True]
    assert all(torch.equal(converted.state_dict()[name], value) for name, value in state.items())
    assert all(parameter.grad is None for parameter in converted.parameters())


class Counter:
    def __init__(self) -> None:
        self.count, self.values = 0, [0]


class Stateful(nn.Module):
    """Its forward changes everything that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.torch_generator = torch.Generator().manual_seed(0)
        self.numpy_generator, self.random = np.random.default_rng(0), random.Random(0)
        self.nested, self.tensors, self.array = {"a": [], "b": ({},)}, [torch.zeros(2)], np.zeros(2)
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1, generator=self.torch_generator)
        self.numpy_generator.random()
        self.random.random()
        self.nested["a"].append(1)
        self.nested["b"][0]["c"] = 1
        self.tensors[0] += 1
        self.array += 1
        self.counter.count += 1
        self.counter.values[0] += 1
        return self.act(x)

    def state(self) -> list[object]:
        generators = self.torch_generator.get_state().tolist(), self.numpy_generator.bit_generator.state
        held = [self.nested, self.tensors[0].tolist(), self.array.tolist(), vars(self.counter)]
        return copy.deepcopy([*generators, self.random.getstate(), *held])


@pytest.mark.parametrize("run", [flexact.convert, flexact.inspect])
def test_the_dry_run_restores_all_state_of_the_model(run: Callable[..., object]) -> None:
    model = Stateful()
    before, counter = model.state(), model.counter
    run(model, example_inputs=torch.randn(2, 4))
    assert model.state() == before
    assert model.counter is counter
    model(torch.randn(2, 4))
    assert all(old != new for old, new in zip(before, model.state(), strict=True))


def test_the_activation_of_a_transformer_layer_is_seen_despite_its_fused_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    assert order(model, torch.randn(2, 5, 8)) == ["layers.0.activation", "layers.1.activation"]
    masked = {
        "src": torch.randn(2, 5, 8),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    }
    assert order(nn.TransformerEncoder(layer, 2), masked) == ["layers.0.activation", "layers.1.activation"]


def test_a_site_that_was_not_reached_has_no_channels() -> None:
    with pytest.raises(flexact.FlexActError, match="unused"):
        flexact.convert(Backwards(), config=CHANNEL, example_inputs=torch.randn(2, 4))
    converted = flexact.convert(Backwards(), "act_*", CHANNEL, example_inputs=torch.randn(2, 4))
    assert [site.rows for site in (converted.act_a, converted.act_b, converted.act_c)] == [4, 4, 3]


def test_a_missing_channel_dimension_is_an_error() -> None:
    config = flexact.FlexConfig(granularity="channel", channel_dim=3)
    with pytest.raises(flexact.FlexActError, match="no dimension 3"):
        flexact.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), config=config, example_inputs=torch.randn(2, 4))


def test_the_root_itself_can_be_run() -> None:
    converted = flexact.convert(nn.ReLU(), config=CHANNEL, example_inputs=torch.randn(2, 5))
    assert isinstance(converted, flexact.FlexAct)
    assert converted.rows == 5


class Hidden(nn.Module):
    """Calls activations that are not in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = [
            lambda h: F.relu(h),
            lambda h: F.leaky_relu(h, 0.2),
            lambda h: torch.tanh(h),
        ]

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def test_activations_that_run_and_are_no_sites_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Hidden())
    with pytest.warns(UserWarning, match="left these as they are:\n  2: relu in line .*leaky_relu.*tanh in line"):
        flexact.convert(model, example_inputs=torch.randn(2, 4))
    with pytest.raises(flexact.FlexActError, match="Hidden: cannot be converted: relu in line"):
        flexact.convert(Hidden(), example_inputs=torch.randn(2, 4))


def test_no_message_if_every_activation_that_runs_was_found() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (Backwards, CallsWithin, LastIsShared):
            for per_call in (False, True):
                order(make(), torch.randn(2, 4), per_call=per_call)
