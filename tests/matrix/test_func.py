"""torch.func and double backward: results equal those of the reference implementation of the blend."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import flexact
from flexact import FlexConfig, Policy
from flexact.ops import reference
from flexact.routing.sites import sites_of
from matrix.models import STEADY, Column, scatter_logits

CHOICES = {"soft": STEADY, "hard": FlexConfig.paper(commit_at=None, policy=Policy.paper(noise=0.0, forward="hard"))}


class Plain(nn.Module):
    """Replaces a site by the reference implementation, which autograd differentiates."""

    def __init__(self, site: flexact.FlexAct) -> None:
        super().__init__()
        self.logits = nn.Parameter(site.logits.detach().clone())
        self.keys, self.hard = site.keys, site.config.policy.forward == "hard"

    def forward(self, h: Tensor) -> Tensor:
        logits = self.logits.view(1, -1)
        alive = torch.ones(1, len(self.keys), dtype=torch.bool)
        return reference.routed_activation(h, logits, torch.zeros(1, len(self.keys)), 1.0, self.keys, alive, self.hard)


def pair(column: Column, choice: str = "soft") -> tuple[nn.Module, nn.Module]:
    """Returns a model, and the same model with the reference implementation as its sites.

    All modules but the sites are in eval mode: torch.func does not support batch norm's running statistics.
    """
    model = in_plain_attention(scatter_logits(column.build(CHOICES[choice])).eval())
    expected_model = in_plain_attention(column.unconverted().eval())
    for name, site in model.named_modules():
        if isinstance(site, flexact.FlexAct):
            site.train()
            expected_model = Plain(site) if column.is_site else _put(expected_model, name, Plain(site))
    return model, expected_model


def in_plain_attention(model: nn.Module) -> nn.Module:
    """Uses plain attention: torch's fused attention has no second derivative, and vmap cannot read its mask."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    return model


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    model.set_submodule(name, module)
    return model


def parameters(model: nn.Module, expected_model: nn.Module) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name, _ in expected_model.named_parameters()}


def loss_of(model: nn.Module, column: Column, batch: Any) -> Any:
    def loss(own: dict[str, Tensor]) -> Tensor:
        return column.loss(lambda *inputs: functional_call(model, own, inputs), batch)

    return loss


def close(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_grad_of_a_functional_call(column: Column, choice: str) -> None:
    model, expected_model = pair(column, choice)
    own = parameters(model, expected_model)
    ours, theirs = (grad(loss_of(one, column, column.batch()))(own) for one in (model, expected_model))
    close(ours, theirs)
    assert any(ours[name].abs().max() > 1e-6 for name in ours if "logits" in name)
    column.loss(model, column.batch()).backward()  # torch.func's wrapped tensors did not leak
    close({name: model.get_parameter(name).grad for name in ours}, theirs)


def test_per_sample_gradients(column: Column) -> None:
    """vmap over grad, with one set of parameters."""
    model, expected_model = pair(column)
    own = parameters(model, expected_model)
    inputs, wanted = column.batch(0, 3)
    inputs = inputs[:1]  # without BERT's mask, whose numbers transformers reads

    def of_one(one: nn.Module) -> Any:
        def gradient(inside: tuple[Tensor, ...], target: Tensor) -> Any:
            batch = tuple(tensor.unsqueeze(0) for tensor in inside), target.unsqueeze(0)
            return grad(loss_of(one, column, batch))(own)

        return vmap(gradient)(inputs, wanted)

    close(of_one(model), of_one(expected_model))


def test_an_ensemble_under_vmap(column: Column) -> None:
    """Calls three models at once, with stacked parameters and buffers."""
    models = [in_plain_attention(scatter_logits(column.build(STEADY), scale).eval()) for scale in (0.5, 1.0, 2.0)]
    for model, drops in zip(models, (0, 1, 4), strict=True):  # the last one is committed
        for site in sites_of(model):
            for step in range(drops):
                site.keep(len(site.alive) - 1, step=step)
    stacked, buffers = stack_module_state(models)
    inputs, _ = column.batch()
    found = vmap(lambda own, state: column.answer(lambda *x: functional_call(models[0], (own, state), x), inputs))(
        stacked, buffers
    )
    with torch.no_grad():
        for one, answer in zip(models, found, strict=True):
            torch.testing.assert_close(answer, column.answer(one, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_double_backward(column: Column, choice: str) -> None:
    """The gradient of a gradient norm, with create_graph=True."""
    results = []
    for one in pair(column, choice):
        own = dict(one.named_parameters())
        first = torch.autograd.grad(column.loss(one, column.batch()), list(own.values()), create_graph=True)
        norm = sum(gradient.square().sum() for gradient in first)
        second = torch.autograd.grad(norm, list(own.values()), allow_unused=True)
        results.append({n: torch.zeros(()) if g is None else g for n, g in zip(own, second, strict=True)})
    ours, theirs = results
    close(ours, {name: theirs[name] for name in ours})


def test_hessian_jacobians_and_jvp_in_the_logits(column: Column) -> None:
    model, expected_model = pair(column)
    name = next(name for name in parameters(model, expected_model) if name.endswith("logits"))
    own = model.get_parameter(name).detach().clone()
    batch = column.batch(0, 2)

    def in_logits(one: nn.Module) -> Any:
        return lambda logits: loss_of(one, column, batch)({name: logits})

    ours, theirs = in_logits(model), in_logits(expected_model)
    for transform in (hessian, jacrev, jacfwd):
        torch.testing.assert_close(transform(ours)(own), transform(theirs)(own), rtol=1e-3, atol=1e-5)
    assert hessian(ours)(own).abs().max() > 1e-6
    direction = (torch.arange(5.0),)
    torch.testing.assert_close(jvp(ours, (own,), direction), jvp(theirs, (own,), direction), rtol=1e-3, atol=1e-5)


def test_noise_is_drawn_inside_a_transform(column: Column) -> None:
    """vmap refuses random numbers, so a site uses a generator of its own."""
    model = in_plain_attention(scatter_logits(column.build(FlexConfig.paper())))
    for module in model.modules():
        module.train(not isinstance(module, nn.BatchNorm2d))  # torch.func does not support its running statistics
    expected_model = copy.deepcopy(model)
    inputs, _ = column.batch()
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def scaled(scale: Tensor) -> Tensor:
        weights = {name: parameter * scale for name, parameter in own.items()}
        return column.answer(lambda *x: functional_call(model, weights, x), inputs)

    expected = column.answer(expected_model, inputs)  # the same step's draw
    for one in vmap(scaled)(torch.ones(2)):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
