"""Tests of which modules and calls are activations, and which candidate each of them is."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flexact
from flexact.candidates.recognition import (
    function_name,
    is_activation,
    is_activation_function,
    key_of,
    module_of_call,
)
from flexact.candidates.registry import BUILT_IN, known_names, lookup

POINTS = torch.linspace(-7, 7, 141)

BY_NAME = {own.name: own.module() for own in BUILT_IN if own.name not in ("identity", "gelu_tanh")}
"""The module of each candidate with a type of its own; test_registry.py compares all of them with torch's."""


@pytest.mark.parametrize("name", BY_NAME)
def test_every_type_of_the_candidate_list_is_its_candidate(name: str) -> None:
    assert is_activation(BY_NAME[name])
    assert key_of(BY_NAME[name]) == name
    assert function_name(BY_NAME[name]) == name


def test_settings_that_make_another_candidate() -> None:
    assert key_of(nn.GELU("tanh")) == "gelu_tanh"
    assert key_of(nn.CELU()) == "elu"


@pytest.mark.parametrize("module", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.LeakyReLU(inplace=True)])
def test_in_place_is_not_a_setting_of_the_function(module: nn.Module) -> None:
    assert key_of(module) in known_names()


@pytest.mark.parametrize(
    "module",
    [
        nn.LeakyReLU(0.2),
        nn.ELU(alpha=0.5),
        nn.CELU(alpha=0.5),
        nn.Hardtanh(0, 20),
        nn.Hardshrink(0.1),
        nn.Softshrink(0.1),
        nn.Softplus(beta=2.0),
        nn.Softplus(threshold=5),
    ],
    ids=repr,
)
def test_other_settings_are_another_function(module: nn.Module) -> None:
    assert is_activation(module)
    assert key_of(module) not in known_names()
    assert torch.equal(lookup(key_of(module)).function(POINTS), module(POINTS))


def test_same_type_and_settings_are_one_function_and_others_are_not() -> None:
    assert key_of(nn.LeakyReLU(0.2)) == key_of(nn.LeakyReLU(0.2, inplace=True))
    assert key_of(nn.LeakyReLU(0.2)) != key_of(nn.LeakyReLU(0.3))


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.Linear(2, 2),
        nn.Softmax(-1),
        nn.PReLU(),
        nn.Dropout(),
        nn.BatchNorm1d(3),
        nn.MultiheadAttention(2, 1),
    ],
    ids=repr,
)
def test_other_modules_are_none(module: nn.Module) -> None:
    assert not is_activation(module)


def test_transformers_squared_relu_is_a_candidate() -> None:
    from transformers.activations import ACT2FN

    assert is_activation(ACT2FN["relu2"])
    assert key_of(ACT2FN["relu2"]) == function_name(ACT2FN["relu2"]) == "relu_squared"
    assert torch.equal(lookup("relu_squared").function(POINTS), ACT2FN["relu2"](POINTS))


@pytest.mark.parametrize("name", ["relu_squared", "sine", "snake", "gelu_tanh", "star_relu", "hard_mish"])
def test_an_extracted_network_with_a_module_of_flexact_can_be_converted_again(name: str) -> None:
    config = flexact.FlexConfig(candidates=("relu", name))
    model = flexact.convert(nn.Sequential(nn.Linear(3, 3), lookup(name).module()), config=config)
    with torch.no_grad():
        model[1].logits[1] = 1.0
    plain = flexact.extract(model, commit=True)
    assert type(plain[1]) is type(lookup(name).module())
    assert flexact.convert(plain, config=config)[1].candidates == ("relu", name)


def _converts(act: nn.Module) -> nn.Module | str:
    """Converts a linear layer and an activation. Returns the converted chain, or the messages if it is not
    converted.
    """
    config = flexact.FlexConfig(init="original", init_probability=1 - 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return flexact.convert(nn.Sequential(nn.Linear(3, 3), act), "1", config).eval()
        except flexact.FlexActError as error:
            return str(error)


def _timm_activations() -> list[str]:
    from timm.layers import create_act

    return sorted(set(create_act._ACT_LAYER_DEFAULT) - {"identity"})


def _transformers_activations() -> list[str]:
    from transformers.activations import ACT2CLS

    return sorted(set(ACT2CLS) - {"linear"})


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_every_activation_of_timm_and_transformers_is_converted_or_named(library: str) -> None:
    from timm.layers.create_act import get_act_layer
    from transformers.activations import ACT2FN

    no_sites = set()
    for name in _timm_activations() if library == "timm" else _transformers_activations():
        act = get_act_layer(name)() if library == "timm" else ACT2FN[name]
        converted = _converts(act)
        if isinstance(converted, str):
            assert "1: cannot be converted" in converted, name
            no_sites.add(name)
        else:
            assert isinstance(converted[1], flexact.FlexAct), name
            h = torch.randn(5, 3)
            with torch.no_grad():
                torch.testing.assert_close(converted(h), act(converted[0](h)), atol=1e-4, rtol=0, msg=name)
    expected = {"timm": {"prelu"}, "transformers": {"prelu", "xielu"}}  # these have weights
    assert no_sites == expected[library]


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_every_activation_of_timm_and_transformers_without_weights_is_a_built_in_candidate(library: str) -> None:
    """By its name, by its type, and by its values and slopes."""
    from timm.layers import create_act
    from transformers.activations import ACT2FN

    points = torch.linspace(-12, 12, 481, dtype=torch.float64)
    layers = {**create_act._ACT_LAYER_DEFAULT, **create_act._ACT_LAYER_ME}
    for name in _timm_activations() if library == "timm" else _transformers_activations():
        if name in ("prelu", "xielu"):
            continue
        for act in (layers[name](), create_act._ACT_LAYER_DEFAULT[name]()) if library == "timm" else (ACT2FN[name],):
            own = lookup(name)
            assert own is lookup(key_of(act)), name
            h = points.clone().requires_grad_()
            value = act(h)
            (slope,) = torch.autograd.grad(value.sum(), h)
            torch.testing.assert_close(own.function(points), value.detach(), rtol=1e-9, atol=1e-9, msg=name)
            torch.testing.assert_close(own.derivative(points, own.function(points)), slope, rtol=1e-9, atol=1e-8)


def test_every_elementwise_module_of_torch_without_weights_and_needed_settings_is_a_built_in_candidate() -> None:
    homes = [getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__]
    without = {nn.Threshold, nn.RReLU, nn.PReLU, nn.GLU, nn.MultiheadAttention}  # settings, noise, weights, halves
    without |= {nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin}  # not elementwise
    for kind in set(homes) - without:
        assert key_of(kind()) in known_names(), kind


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (F.relu, (), {}, nn.ReLU()),
        (F.relu, (), {"inplace": True}, nn.ReLU()),
        (F.relu_, (), {}, nn.ReLU()),
        (torch.relu, (), {}, nn.ReLU()),
        (torch.tanh, (), {}, nn.Tanh()),
        (torch.sigmoid, (), {}, nn.Sigmoid()),
        (torch.special.expit, (), {}, nn.Sigmoid()),
        (F.leaky_relu, (0.2,), {}, nn.LeakyReLU(0.2)),
        (F.leaky_relu, (0.2, True), {}, nn.LeakyReLU(0.2)),
        (F.leaky_relu, (), {"negative_slope": 0.3}, nn.LeakyReLU(0.3)),
        (F.elu, (0.5,), {}, nn.ELU(0.5)),
        (F.gelu, (), {"approximate": "tanh"}, nn.GELU("tanh")),
        (F.softplus, (2, 10), {}, nn.Softplus(2, 10)),
        (F.silu, (), {}, nn.SiLU()),
        (F.mish, (), {}, nn.Mish()),
        (F.selu, (), {}, nn.SELU()),
        (F.relu6, (), {}, nn.ReLU6()),
        (F.hardswish, (), {}, nn.Hardswish()),
        (F.softsign, (), {}, nn.Softsign()),
        (F.celu, (), {}, nn.CELU()),
        (F.celu, (0.5,), {}, nn.CELU(0.5)),
        (F.celu_, (), {}, nn.CELU()),
        (F.hardsigmoid, (), {}, nn.Hardsigmoid()),
        (F.hardtanh, (0, 20), {}, nn.Hardtanh(0, 20)),
        (F.hardtanh, (), {"min_val": -2.0, "max_val": 2.0}, nn.Hardtanh(-2.0, 2.0)),
        (F.hardtanh_, (), {}, nn.Hardtanh()),
        (F.logsigmoid, (), {}, nn.LogSigmoid()),
        (F.tanhshrink, (), {}, nn.Tanhshrink()),
        (F.hardshrink, (0.1,), {}, nn.Hardshrink(0.1)),
        (torch.hardshrink, (), {}, nn.Hardshrink()),
        (F.softshrink, (), {"lambd": 0.2}, nn.Softshrink(0.2)),
    ],
)
def test_a_functional_call_and_its_module_compute_the_same(function, args, kwargs, expected) -> None:
    module = module_of_call(function, args, kwargs)
    assert repr(module) == repr(expected)
    assert torch.equal(module(POINTS), function(POINTS.clone(), *args, **kwargs))


@pytest.mark.parametrize("name", ["relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_"])
def test_a_method_and_its_module_compute_the_same(name: str) -> None:
    module = module_of_call(name, (), {})
    assert torch.equal(module(POINTS), getattr(POINTS.clone(), name)())


def test_a_call_with_a_computed_setting_or_an_output_tensor_is_no_site() -> None:
    assert module_of_call(F.leaky_relu, (torch.tensor(0.1),), {}) is None
    assert module_of_call(torch.tanh, (), {"out": torch.empty(3)}) is None


def test_a_sine_that_is_called_is_no_site() -> None:
    """Positional encodings and rotary embeddings call it."""
    assert module_of_call(torch.sin, (), {}) is None
    assert module_of_call("sin", (), {}) is None


@pytest.mark.parametrize("value", [F.dropout, torch.add, torch.sin, "relu", [F.relu], None, 3])
def test_other_objects_are_no_activation_functions(value: object) -> None:
    assert not is_activation_function(value)
