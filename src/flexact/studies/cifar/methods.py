"""The networks that are compared: CIFAR ResNets whose blocks have one activation or another.

Every method changes the activations of the blocks; the stem keeps its ReLU, so that "all layers" are the paper's: 8
sites in ResNet-18 and 16 in ResNet-34, with five candidates 40 and 80 logits. A block's two calls of its activation
share one.

A fixed activation, ReLU above all, runs through the same fused kernels as what picks, as sites that are committed to it
from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flexact import FlexConfig, baselines, commit, convert, param_groups
from flexact.baselines.learnable import Learnable
from flexact.candidates import known_names
from flexact.errors import FlexActError
from flexact.io.option_checks import check_known
from flexact.routing.layer import FlexAct
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BasicBlock, ResNet

MODELS: dict[str, tuple[int, ...]] = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Blocks of each stage."""
BASELINE = "relu"
PLACEMENTS: dict[str, str] = {"flexact-penultimate": "penultimate", "flexact-all": "layer*"}
"""`where` of each method that picks."""
METHODS: tuple[str, ...] = (BASELINE, "prelu", "swish_beta", "affine", "parametric", "splash", *PLACEMENTS)
"""Those of the paper's table."""
FIXED: tuple[str, ...] = tuple(name for name in known_names() if name != BASELINE)
"""Other activations that every block can have instead of picking one."""


def build(
    model: str,
    method: str,
    classes: int,
    config: FlexConfig | None = None,
    width: int = 64,
    blocks: Sequence[int] | None = None,
) -> nn.Module:
    """A network in training mode on the CPU, its weights drawn from torch's generator: the same ones for every method.

    config: the policy of the methods that pick; width: channels of the first stage.
    blocks: blocks of each stage in the place of the model's own, for tests.

    >>> extra_parameters(build("resnet34", "flexact-all", classes=10, width=4))
    80
    """
    check_names(model, method)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise FlexActError(f"width must be the number of channels of the first stage, at least 1; got {width!r}.")
    network: nn.Module = ResNet(MODELS[model] if blocks is None else blocks, classes, width)
    if method in PLACEMENTS:
        by_channel = config is not None and config.granularity == "channel"
        example = torch.zeros(1, 3, 32, 32) if by_channel else None  # channels are counted in a forward
        return convert(network, PLACEMENTS[method], config, example_inputs=example, fuse=True)
    if method == BASELINE or method in FIXED:
        return _committed_to(network, method)
    for block in network.modules():
        if isinstance(block, BasicBlock):
            block._modules["relu"] = baselines.make(method)
    return network


def _committed_to(network: nn.Module, name: str) -> nn.Module:
    """The network with one activation in all blocks; the stem keeps its ReLU."""
    other = "identity" if name == BASELINE else name
    convert(network, config=FlexConfig(candidates=(BASELINE, other)), fuse=True)  # the first of equals is picked
    for site in sites_of(network):
        if name != BASELINE and site.name.startswith("layer"):
            site.drop(torch.tensor([[True, False]]), step=0)
    for site in sites_of(commit(network)):
        site.logits.requires_grad_(False)
    return network


def picking_sites(network: nn.Module) -> list[FlexAct]:
    """Those that still learn what to pick."""
    return [site for site in sites_of(network) if site.logits.requires_grad]


def check_names(model: str, method: str) -> None:
    """Refuse a model or a method that there is none of."""
    for kind, name, known in (("model", model, tuple(MODELS)), ("method", method, METHODS + FIXED)):
        check_known(kind, name, known)


def extra_parameters(network: nn.Module) -> int:
    """How many parameters the activations learn."""
    learn = [*picking_sites(network), *(module for module in network.modules() if isinstance(module, Learnable))]
    return sum(parameter.numel() for module in learn for parameter in module.parameters())


def optimizer_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What the optimizer gets: `flexact.param_groups`, with the parameters of learnable activations not decayed either.

    Decay would pull a PReLU to a ReLU and a parametric unit to zero, and Flex-Act's logits are not decayed.
    """
    groups = param_groups(network, weight_decay=weight_decay)
    groups = groups if picking_sites(network) else groups[:1]
    own = [p for module in network.modules() if isinstance(module, Learnable) for p in module.parameters()]
    if own:
        known = {id(parameter) for parameter in own}
        groups[0]["params"] = [parameter for parameter in groups[0]["params"] if id(parameter) not in known]
        groups.append({"params": own, "weight_decay": 0.0})
    return groups
