"""Tests of what conversion and extraction keep: copies of torch's own layers, hooks, parametrizations, caches."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

import flexact
from flexact import FlexAct, FlexConfig, convert, extract

ORIGINAL = FlexConfig(candidates=("relu", "tanh", "silu", "identity"), init="original")


def decoder_layer(**options: object) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


def with_activation(layer: nn.TransformerDecoderLayer, function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns the same torch layer made with another activation, as the oracle."""
    duplicate = decoder_layer(activation=function)
    duplicate.load_state_dict({name: value for name, value in layer.state_dict().items() if "activation" not in name})
    return duplicate


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


# Layers that restore their own activation


@pytest.mark.parametrize("activation", ["gelu", nn.GELU()], ids=["function", "module"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, lambda model: pickled(pickled(model))])
def test_copies_of_a_converted_decoder_layer_run_its_pick(
    activation: object, duplicate: Callable[[nn.Module], nn.Module], pick: Callable
) -> None:
    torch.manual_seed(0)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    layer = convert(decoder_layer(activation=activation), config=ORIGINAL)
    expected = with_activation(layer, torch.tanh)(x, memory)
    committed = flexact.commit(pick(layer, "tanh"))
    for model in (committed, duplicate(committed), extract(committed), duplicate(extract(committed))):
        assert torch.equal(model(x, memory), expected)
    assert type(extract(committed).activation) is nn.Tanh
    assert extract(committed).state_dict().keys() == decoder_layer().state_dict().keys()


def test_an_extracted_decoder_layer_that_kept_its_function_is_restored(pick: Callable) -> None:
    plain = decoder_layer(activation="gelu")
    back = extract(flexact.commit(pick(convert(copy.deepcopy(plain), config=ORIGINAL), None)))
    assert vars(back).keys() == vars(plain).keys()
    assert back.activation is F.gelu
    assert "activation" not in back._modules


def test_layers_cloned_from_a_converted_decoder_layer_have_sites_of_their_own(pick: Callable) -> None:
    torch.manual_seed(0)
    layer = convert(decoder_layer(), config=ORIGINAL)
    decoder = nn.TransformerDecoder(layer, 2)
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    expected = nn.TransformerDecoder(with_activation(layer, torch.tanh), 2)(x, memory)
    # torch's own clones of a decoder layer keep its function only in __dict__, as this one does
    assert len({id(clone.activation) for clone in decoder.layers}) == 2
    assert all(clone.activation is clone._modules["activation"] for clone in decoder.layers)
    assert torch.equal(extract(flexact.commit(pick(decoder, "tanh")))(x, memory), expected)


def test_a_transformer_is_the_same_after_a_round_trip_and_its_copies_run_its_picks(pick: Callable) -> None:
    torch.manual_seed(0)
    plain = nn.Transformer(8, 2, 1, 2, 16, 0.0, batch_first=True)
    other = nn.Transformer(8, 2, 1, 2, 16, 0.0, batch_first=True, activation=F.silu)
    other.load_state_dict(plain.state_dict())
    source, target = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    kept = extract(flexact.commit(pick(convert(copy.deepcopy(plain), config=ORIGINAL), None)))
    assert torch.equal(pickled(kept)(source, target), plain(source, target))
    picked = extract(flexact.commit(pick(convert(copy.deepcopy(plain), config=ORIGINAL), "silu")))
    assert torch.equal(pickled(picked)(source, target), other(source, target))


# Hooks


class Calls:
    """Adds hooks of every kind to one module, which count how often they ran."""

    def __init__(self, module: nn.Module) -> None:
        self.counts = dict.fromkeys(("before", "after", "gradient before", "gradient after"), 0)
        self.handles = [
            module.register_forward_pre_hook(lambda module, args: self.note("before")),
            module.register_forward_hook(lambda module, args, kwargs, output: self.note("after"), with_kwargs=True),
            module.register_full_backward_pre_hook(lambda module, gradient: self.note("gradient before")),
            module.register_full_backward_hook(lambda module, inputs, outputs: self.note("gradient after")),
        ]

    def note(self, what: str) -> None:
        self.counts[what] += 1

    def of_a_step(self, model: nn.Module) -> list[int]:
        self.counts = dict.fromkeys(self.counts, 0)
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        return list(self.counts.values())


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_hooks_of_a_replaced_activation_run_at_every_stage_and_can_be_removed(name: str, pick: Callable) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    calls = Calls(model[1])
    model = convert(model, config=ORIGINAL)
    assert calls.of_a_step(model) == [1, 1, 1, 1]
    assert calls.of_a_step(pick(model, name)) == [1, 1, 1, 1]
    assert calls.of_a_step(flexact.commit(model)) == [1, 1, 1, 1]
    assert calls.of_a_step(extract(model)) == [1, 1, 1, 1]
    extract(model, inplace=True)
    assert calls.of_a_step(model) == [1, 1, 1, 1]
    for handle in calls.handles:
        handle.remove()
    assert calls.of_a_step(model) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_hooks_of_an_activation_that_is_called_several_times_run_for_each_call(name: str, pick: Callable) -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 4))
    calls = Calls(relu)
    for per_call in (False, True):
        copied = convert(copy.deepcopy(model), config=ORIGINAL, per_call=per_call)
        assert calls.of_a_step(copied) == [2, 2, 2, 2]
        assert calls.of_a_step(flexact.commit(pick(copied, name))) == [2, 2, 2, 2]
        assert calls.of_a_step(extract(copied)) == [2, 2, 2, 2]


def test_a_hook_that_changes_the_result_does_so_after_conversion_too(pick: Callable) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(3, 4)
    expected = model(x)
    converted = convert(copy.deepcopy(model), config=ORIGINAL)
    assert torch.equal(extract(flexact.commit(pick(converted, None)))(x), expected)


class CallsRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(*[nn.Linear(4, 4), nn.ReLU()] * 2), CallsRelu])
def test_hooks_on_a_site_run_once_per_call_before_and_after_the_commitment(
    make: Callable[[], nn.Module], name: str, pick: Callable
) -> None:
    model = convert(make(), config=ORIGINAL)
    (site,) = flexact.routing.sites.sites_of(model)
    calls = Calls(site)
    expected = [2 if isinstance(model, nn.Sequential) else 1] * 4
    assert calls.of_a_step(model) == expected
    assert calls.of_a_step(flexact.commit(pick(model, name))) == expected


# Settings


def test_numpy_settings_are_distinguished() -> None:
    slopes = (np.float32(0.2), np.float32(0.9), np.float64(0.5), 0.1)
    model = nn.Sequential(*[nn.LeakyReLU(slope) for slope in slopes], nn.Linear(1, 1))
    near = dataclasses.replace(ORIGINAL, init_probability=1 - 1e-6)
    sites = [module for module in convert(model, config=near).modules() if isinstance(module, FlexAct)]
    h = torch.tensor([-1.0])
    for site, slope in zip(sites, slopes, strict=True):
        torch.testing.assert_close(site.eval()(h), F.leaky_relu(h, float(slope)), atol=1e-4, rtol=0)
        assert torch.equal(flexact.commit(site)(h), F.leaky_relu(h, float(slope)))


def test_a_numpy_setting_that_is_only_close_to_a_candidates_is_another_function() -> None:
    site = convert(nn.Sequential(nn.LeakyReLU(np.float32(0.01)), nn.Linear(1, 1)), config=ORIGINAL)[0]
    assert "leaky_relu" not in site.keys


@pytest.mark.parametrize("change", ["forward", "tensor"])
def test_an_activation_that_was_changed_on_its_own_is_kept_with_a_warning(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    if change == "forward":
        model[1].forward = lambda x: x * 3
    else:
        model[1].negative_slope = torch.tensor(0.3)
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match=r"  1: .*LeakyReLU"):
        converted = convert(copy.deepcopy(model), config=ORIGINAL)
    assert torch.equal(extract(flexact.commit(converted))(x), model(x))


# Parametrizations after conversion


class Neuron(nn.Linear):
    """A layer with its own weight and its activation in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


@pytest.mark.parametrize("name", ["relu", "tanh"])
@pytest.mark.parametrize("normalise", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrization_added_after_conversion_is_kept_by_extraction(
    name: str, normalise: Callable, pick: Callable
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Neuron(4, 4), nn.Linear(4, 4)).eval()
    plain = copy.deepcopy(model)
    plain[0].forward = lambda x: getattr(torch, name)(nn.Linear.forward(plain[0], x))
    convert(model, config=ORIGINAL)
    torch.manual_seed(1)
    normalise(plain[0])
    torch.manual_seed(1)
    normalise(model[0])
    x = torch.randn(3, 4)
    extracted = extract(flexact.commit(pick(model, name)))
    assert torch.equal(extracted(x), plain(x))
    assert is_parametrized(extracted[0], "weight")
    assert isinstance(extracted[0], Neuron)
    assert torch.equal(model(x), plain(x))
    remove_parametrizations(extracted[0], "weight")
    torch.testing.assert_close(extracted(x), plain(x))
    assert type(extracted[0]) is Neuron or name != "relu"


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_norm_hook_added_after_conversion_is_kept_by_extraction(pick: Callable) -> None:
    model = convert(nn.Sequential(Neuron(4, 4), nn.Linear(4, 4)), config=ORIGINAL)
    nn.utils.weight_norm(model[0])
    x = torch.randn(3, 4)
    expected = flexact.commit(pick(model, "relu"))(x)
    extracted = extract(model)
    assert torch.equal(extracted(x), expected)
    extracted(x).sum().backward()
    assert extracted[0].weight_g.grad is not None


# Cached tensors


class Caching(nn.Module):
    """Caches a tensor computed from its weight, with its autograd history, like the attention biases of timm's
    levit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.act = nn.ReLU()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training or "bias" not in self.cache:
            self.cache["bias"] = self.bias * 2
        return self.act(x + self.cache["bias"])


def test_a_model_that_caches_tensors_with_autograd_history_can_be_extracted(pick: Callable) -> None:
    model = nn.Sequential(Caching(), nn.Linear(4, 4)).eval()
    x = torch.randn(3, 4)
    expected = model(x)
    model = flexact.commit(pick(convert(model, config=ORIGINAL), None))
    model(x)
    extracted = extract(model)
    assert torch.equal(extracted(x), expected)
    assert model[0].cache["bias"].grad_fn is not None  # the trained model keeps its own
    extracted.train()(x).sum().backward()
    assert extracted[0].bias.grad is not None
    assert model[0].bias.grad is None
