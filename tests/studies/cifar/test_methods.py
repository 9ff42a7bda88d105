"""Tests of the networks of the image study: what each method changes and which parameters have weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flexact import FlexActError, FlexConfig, extract
from flexact.baselines.learnable import Learnable
from flexact.routing.sites import sites_of
from flexact.studies.cifar.methods import METHODS, build, optimizer_groups, picking_sites
from flexact.studies.cifar_resnets import BasicBlock, ResNet


def extra_parameters(network: nn.Module) -> int:
    """Returns the number of trained parameters of activations."""
    learn = [*picking_sites(network), *(module for module in network.modules() if isinstance(module, Learnable))]
    return sum(parameter.numel() for module in learn for parameter in module.parameters())


@pytest.mark.parametrize(("model", "sites"), [("resnet18", 8), ("resnet34", 16)])
def test_flexact_adds_five_logits_per_block_and_everything_else_keeps_its_relu(model: str, sites: int) -> None:
    for method, expected in (("flexact-penultimate", 1), ("flexact-all", sites)):
        network = build(model, method, classes=10, width=4)
        assert extra_parameters(network) == 5 * expected
        fixed, picking = sites_of(network)[:-expected], sites_of(network)[-expected:]
        assert len(fixed) == 1 + sites - expected
        assert all(site.committed and site.picks == ("relu",) for site in fixed)
        assert picking == picking_sites(network)
        assert not any(site.committed for site in picking)


def test_without_relu_among_the_candidates_other_activations_are_not_sites() -> None:
    network = build("resnet18", "flexact-penultimate", 10, FlexConfig(candidates=("silu", "gelu")), width=4)
    assert [site.name for site in sites_of(network)] == ["layer4.1.relu"]
    assert isinstance(network.relu, nn.ReLU)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("relu", 0), ("mish", 0), ("prelu", 8), ("swish_beta", 8), ("affine", 24), ("parametric", 32), ("deu", 40)],
)
def test_baselines_have_one_set_of_parameters_per_block(method: str, parameters: int) -> None:
    assert extra_parameters(build("resnet18", method, classes=10, width=4)) == parameters


@pytest.mark.parametrize("method", METHODS)
def test_every_method_starts_from_the_same_weights(method: str) -> None:
    torch.manual_seed(0)
    plain = build("resnet18", "relu", classes=10, width=4).state_dict()
    torch.manual_seed(0)
    state = build("resnet18", method, classes=10, width=4).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items() if ".relu." not in f".{name}")


@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_activations_have_no_weight_decay_and_all_others_do(method: str) -> None:
    network = build("resnet18", method, classes=10, width=4)
    groups = optimizer_groups(network, weight_decay=5e-4)
    trained = [(p, group["weight_decay"]) for group in groups for p in group["params"] if p.requires_grad]
    assert sum(p.numel() for p, decay in trained if decay == 0) == extra_parameters(network)
    assert sorted(id(p) for p, _ in trained) == sorted(id(p) for p in network.parameters() if p.requires_grad)


def test_relu_is_a_committed_site_and_its_extraction_the_plain_network() -> None:
    torch.manual_seed(0)
    network = build("resnet18", "relu", classes=10, width=4)
    assert all(site.committed and site.picks == ("relu",) for site in sites_of(network))
    plain = extract(network)
    torch.manual_seed(0)
    expected = ResNet((2, 2, 2, 2), 10, 4)
    assert not sites_of(plain)
    assert plain.state_dict().keys() == expected.state_dict().keys()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain(x), expected(x))


def test_a_fixed_activation_is_in_all_blocks_and_the_stem_keeps_its_relu() -> None:
    torch.manual_seed(0)
    network = build("resnet18", "gelu", classes=10, width=4)
    assert [site.picks[0] for site in sites_of(network)] == ["relu"] + ["gelu"] * 8
    assert extra_parameters(network) == 0
    plain = extract(network)
    torch.manual_seed(0)
    expected = ResNet((2, 2, 2, 2), 10, 4)
    for block in expected.modules():
        if isinstance(block, BasicBlock):
            block.relu = nn.GELU()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(plain(x), expected(x))


def test_picks_can_be_made_by_channel() -> None:
    network = build("resnet18", "flexact-penultimate", 10, FlexConfig(granularity="channel"), width=4)
    assert extra_parameters(network) == 5 * 32


@pytest.mark.parametrize(
    ("model", "method", "message"), [("resnet81", "relu", "resnet18"), ("resnet18", "flexact-al", "flexact-all")]
)
def test_unknown_names_are_refused_with_the_nearest_known_one(model: str, method: str, message: str) -> None:
    with pytest.raises(FlexActError, match=f"did you mean '{message}'"):
        build(model, method, classes=10)
