"""Tests that where="all" skips gates and output activations but not hidden activations."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import flexact
from flexact import FlexActError, FlexConfig, convert, selection
from flexact.routing.sites import sites_of

ORIGINAL = FlexConfig(init="original")


class Block(nn.Module):
    """Linear layers and activations by the names that the forwards below use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.relu, self.sigmoid, self.tanh = nn.ReLU(), nn.ReLU(), nn.Sigmoid(), nn.Tanh()
        self.scale = nn.Parameter(torch.ones(4, 4))
        self.fc = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid())
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()])


class SqueezeExcitation(Block):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.sigmoid(self.b(self.act(self.a(x))))
        return self.c(x * scale.view(-1, 4).expand_as(x))


class SqueezeExcitationInAnotherMethod(Block):
    def _scale(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(self.act(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        scale = self._scale(x)
        return self.c(scale * x)


class SqueezeExcitationOfASequence(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).unsqueeze(1)
        return self.c(x * y.squeeze(1))


class GatedLinearUnit(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * torch.sigmoid(self.b(x)))


class Swish(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(x.mul(self.a(x).sigmoid()))


class WrittenOutMish(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x * torch.tanh(F.softplus(x)))


class Cell(Block):
    """An LSTM cell."""

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(torch.cat([self.a(x), self.b(x)], -1))
        keep, output = gates.chunk(2, -1)
        state = keep * x + (1 - keep) * self.tanh(self.c(x))
        return output * state


class Update(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x *= self.sigmoid(x)
        return self.b(x)


class ScaledSigmoid(Block):
    def forward(self, x: Tensor) -> Tensor:
        z = 2.0 * self.sigmoid(self.a(x)) - 1
        return self.c(z * x)


class HardSigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + 3) / 6


class HardGate(Block):
    """A spelling that is common for MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.hard = HardSigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x * self.hard(x))


class SigmoidAttention(Block):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.a(x) @ self.b(x).transpose(-1, -2))
        return self.c(torch.matmul(weights, x))


class NamedGate(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, x, self.gate(x))


class Output(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(self.act(self.a(x)))).squeeze(-1)


class OutputInALoop(Block):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class GatesInALoop(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sigmoid()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.gates):
            weight = block(x)
            x = x + i * weight * self.a(x)
        return x


class OutputByBranch(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.act(x))
        if self.training:
            x = torch.tanh(x)
        else:
            x = 2 * x
            x = torch.tanh(x)
        return x


class TwoOutputs(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.act(self.a(x))
        return self.b(h), F.softplus(self.c(h)) + 1e-6


class OutputOfAPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.tanh(self.a(x)))


class Comprehension(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(sum(torch.tanh(gate(x)) * x for gate in (self.a, self.b)))


class OverwrittenGate(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.tanh_()
        return self.c(h * x)


class Alias(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        gate = h
        return self.c(gate * x)


class Interpolated(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.lerp(x, self.b(x), torch.tanh(self.a(x))))


class OutputInADictionary(Block):
    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"mean": [torch.tanh(self.a(x))]}


class OutputInAnObject(Block):
    def forward(self, x: Tensor) -> Values:
        return Values(mean=torch.tanh(self.a(x)))


class ClampedOutput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.softplus(self.a(x)).clamp(max=9.0), self.b(x)], -1)


class LossInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(torch.tanh(self.a(x)), x)


class Distribution(Block):
    def forward(self, x: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.a(x), F.softplus(self.b(x)))


class Divisor(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) / F.softplus(self.b(x)))


class DivisorByName(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.div(self.a(x), F.softplus(self.b(x))))


class Exponent(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).abs() ** F.softplus(self.b(x)))


class ElementwiseEinsum(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.einsum("bd,de->bd", F.softplus(self.b(x)), self.scale))


class Values(NamedTuple):
    mean: Tensor


SKIPPED = {
    Comprehension: ["tanh_1"],
    OverwrittenGate: ["tanh_1"],
    Alias: ["tanh_1"],
    Interpolated: ["tanh_1"],
    OutputInADictionary: ["tanh_1"],
    OutputInAnObject: ["tanh_1"],
    ClampedOutput: ["softplus"],
    LossInside: ["tanh_1"],
    Distribution: ["softplus"],
    SqueezeExcitation: ["sigmoid"],
    SqueezeExcitationInAnotherMethod: ["sigmoid_1"],
    SqueezeExcitationOfASequence: ["fc.3"],
    GatedLinearUnit: ["sigmoid_1"],
    Swish: ["sigmoid_1"],
    WrittenOutMish: ["softplus", "tanh_1"],
    Cell: ["sigmoid_1", "tanh"],
    Update: ["sigmoid"],
    ScaledSigmoid: ["sigmoid"],
    HardGate: ["hard.relu"],
    SigmoidAttention: ["sigmoid_1"],
    NamedGate: ["gate"],
    Output: ["sigmoid_1"],
    OutputInALoop: ["layers.3"],
    GatesInALoop: ["gates.0.2", "gates.1.2", "gates.2.2"],
    OutputByBranch: ["tanh_1"],
    TwoOutputs: ["softplus"],
    OutputOfAPart: ["fc.3"],
    Divisor: ["softplus"],
    DivisorByName: ["softplus"],
    Exponent: ["softplus"],
    ElementwiseEinsum: ["softplus"],
}


@pytest.mark.parametrize("make", SKIPPED, ids=lambda make: make.__name__)
def test_gates_and_outputs_are_skipped_and_logged(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    names, model = SKIPPED[make], make()
    every = set(selection(convert(copy.deepcopy(model), "*", ORIGINAL)).picks)
    with caplog.at_level(logging.INFO, "flexact"):
        converted = convert(copy.deepcopy(model), config=ORIGINAL)
    assert every - set(selection(converted).picks) >= set(names)
    for name in names:
        assert f"  {name}: a" in caplog.text
    named = convert(copy.deepcopy(model), names, ORIGINAL)
    assert set(selection(named).picks) == set(names)


class SwiGLU(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.a(x)) * self.b(x))


class GatedByReLU(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x)) * self.b(x))


class HiddenTanh(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.tanh(self.a(x))
        return self.b(h), h


class MatrixProduct(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.tanh(x @ self.scale), self.scale) + torch.sigmoid(x) @ self.scale


class TanhInALoop(Block):
    """A spelling that is common in networks for differential equations."""

    def forward(self, x: Tensor) -> Tensor:
        linears = [self.a, self.b, self.c]
        for i, linear in enumerate(linears):
            x = linear(x)
            if i < 2:
                x = torch.tanh(x)
        return x


class TanhBehindALayer(Block):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = torch.tanh(layer(x))
        return self.c(x)


class ListOfTanhs(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.acts = nn.ModuleList([nn.Tanh(), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            x = self.acts[i](self.linears[i](x))
        return self.c(F.dropout(x, 0.5, self.training))


class LastRectifier(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.a(x))


class Loop(Block):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.a(x)


class ProductBehindALoop(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            x = layer(x)
        return x * y


HIDDEN = {
    SwiGLU: ["silu"],
    GatedByReLU: ["act"],
    HiddenTanh: ["tanh"],
    MatrixProduct: ["tanh_1"],
    TanhInALoop: ["tanh_1"],
    TanhBehindALayer: ["tanh_1"],
    ListOfTanhs: ["acts.0", "acts.1"],
    LastRectifier: ["relu"],
    Loop: ["layers.1"],
    ProductBehindALoop: ["layers.1"],
}


@pytest.mark.parametrize("make", HIDDEN, ids=lambda make: make.__name__)
def test_hidden_activations_are_sites(make: Callable[[], nn.Module]) -> None:
    assert set(HIDDEN[make]) <= set(selection(convert(make(), config=ORIGINAL)).picks)


def test_penultimate_is_the_last_hidden_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1), nn.Sigmoid())
    assert list(selection(convert(copy.deepcopy(model), "penultimate")).picks) == ["3"]
    assert list(selection(convert(copy.deepcopy(model), "penultimate", example_inputs=torch.ones(1, 4))).picks) == ["3"]
    assert list(selection(convert(copy.deepcopy(model))).picks) == ["1", "3"]


def test_a_model_without_hidden_activations_is_an_error_that_names_what_was_skipped() -> None:
    with pytest.raises(FlexActError, match=r"name it in where:\n  1: a sigmoid"):
        convert(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()))


def test_the_recommended_call_keeps_the_output_of_an_efficientnet_finite() -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("efficientnet_b0", num_classes=4)
    gates = [name for name, module in model.named_modules() if isinstance(module, (nn.Sigmoid, timm.layers.Sigmoid))]
    converted = convert(model)
    assert len(gates) == 16
    assert not selection(converted).picks.keys() & set(gates)
    assert len(selection(converted).picks) == 49
    for name in ("relu", "gelu", "silu", "elu", "tanh"):
        one = copy.deepcopy(converted)
        for site in one.modules():
            if isinstance(site, flexact.FlexAct):
                site.commit(0, site.candidates.index(name))
        assert one.eval()(torch.randn(2, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("mobilenet_v3_small", {"relu", "hardswish"}),
        ("efficientnet_b0", {"silu"}),
        ("regnet_y_400mf", {"relu"}),
        ("mobilenet_v2", {"relu6"}),
    ],
)
def test_the_hidden_activations_of_torchvisions_networks_are_sites(name: str, functions: set[str]) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = convert(torchvision.models.get_model(name), config=ORIGINAL)
    sites = [module for module in model.modules() if isinstance(module, flexact.FlexAct)]
    assert {type(site.original).__name__.lower() for site in sites} == functions


def test_the_activation_of_a_gated_mlp_of_transformers_is_a_site() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    )
    model = convert(transformers.LlamaForCausalLM(config))
    assert list(selection(model).picks) == [f"model.layers.{i}.mlp.act_fn" for i in range(2)]


def test_a_function_that_is_not_among_the_candidates_is_announced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Hardswish(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.warns(UserWarning, match=r"not among the candidates.*\n  Hardswish\(\): 1; add 'original'"):
        convert(copy.deepcopy(model), config=FlexConfig(candidates=("relu", "gelu")))
    kept = FlexConfig(candidates=("relu", "gelu", "original"))
    assert convert(copy.deepcopy(model), config=kept)[1].candidates == ("relu", "gelu", "hardswish")


def test_an_activation_that_computes_a_weight_is_not_hidden() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    parametrize.register_parametrization(model[2], "weight", nn.Softplus())
    model = flexact.convert(model)
    assert [site.name for site in sites_of(model)] == ["1"]
    assert bool((model[2].weight > 0).all())
