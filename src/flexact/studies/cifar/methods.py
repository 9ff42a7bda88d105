"""The networks of the comparison: CIFAR ResNets whose blocks have different activations.

Every method changes the activations of the blocks, and the stem keeps its ReLU, as in the paper: "all layers" are 8
sites in ResNet-18 and 16 in ResNet-34, with 40 and 80 logits for five candidates. The two calls of a block's activation
share one site.

A fixed activation runs through the same fused kernels as one that picks, as a site that is committed from the start.
Learnable activations (`flexact.baselines`) are ordinary modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flexact import FlexConfig, baselines, convert, param_groups
from flexact.baselines.learnable import Learnable
from flexact.candidates.registry import known_names
from flexact.io.value_checks import check_known
from flexact.routing.layer import FlexAct
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS, BasicBlock, ResNet

BASELINE = "relu"
PLACEMENTS: dict[str, slice] = {"flexact-penultimate": slice(-1, None), "flexact-all": slice(None)}
"""The blocks that pick, for each method that picks."""
LEARNABLE: tuple[str, ...] = ("prelu", "swish_beta", "affine", "convex", "parametric", "splash", "deu")
"""The methods that are baselines of `flexact.baselines`."""
METHODS: tuple[str, ...] = (BASELINE, *LEARNABLE, *PLACEMENTS)
"""The methods that the paper compares or discusses."""
FIXED: tuple[str, ...] = tuple(name for name in known_names() if name != BASELINE)
"""Other activations that all blocks can have."""
USUAL: tuple[str, ...] = (BASELINE, "gelu", "silu", "mish", *METHODS[1:])
"""The default methods, in the order of the tables: those of the paper, and the activations that are common today."""


def build(model: str, method: str, classes: int, config: FlexConfig | None = None, width: int = 64) -> nn.Module:
    """A network in training mode on the CPU. Its weights are drawn from torch's generator, the same for every method.

    config: the policy of the methods that pick; width: channels of the first stage.
    """
    check_known("model", model, BLOCKS)
    check_known("method", method, METHODS + FIXED)
    network: nn.Module = ResNet(BLOCKS[model], classes, width)
    if method in PLACEMENTS:
        return _picking(network, PLACEMENTS[method], config or FlexConfig())
    if method == BASELINE or method in FIXED:
        return _committed_to(network, method)
    for block in network.modules():
        if isinstance(block, BasicBlock):
            block._modules["relu"] = baselines.make(method)
    return network


def _picking(network: nn.Module, blocks: slice, config: FlexConfig) -> nn.Module:
    """The network in which some blocks pick and the other activations keep their ReLU."""
    modules = network.named_modules()
    picking = [f"{name}.relu" for name, module in modules if isinstance(module, BasicBlock)][blocks]
    where = "all" if BASELINE in config.candidates else picking  # a site can only be committed to a candidate
    by_channel = config.granularity == "channel"
    example = torch.zeros(1, 3, 32, 32) if by_channel else None  # a forward pass counts the channels
    share = dict.fromkeys(picking, "blocks").get if config.share == "model" and not by_channel else None
    convert(network, where, config, example_inputs=example, fuse=True, share=share)
    for site in sites_of(network):
        if site.name not in picking:
            _fix(site, BASELINE)
    return network


def _committed_to(network: nn.Module, name: str) -> nn.Module:
    """The network with one fixed activation in all blocks; the stem keeps its ReLU."""
    other = "identity" if name == BASELINE else name
    convert(network, config=FlexConfig(candidates=(BASELINE, other)), fuse=True, share="site")
    for site in sites_of(network):
        _fix(site, name if site.name.startswith("layer") else BASELINE)
    return network


def _fix(site: FlexAct, name: str) -> None:
    """Commit a site to a candidate from the start."""
    site.commit(candidate=site.candidates.index(name))
    site.logits.requires_grad_(False)


def picking_sites(network: nn.Module) -> list[FlexAct]:
    """The sites whose logits are trained."""
    return [site for site in sites_of(network) if site.logits.requires_grad]


def optimizer_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameter groups of the optimizer: weight decay applies to everything except the parameters of activations.

    Decay would pull a PReLU to a ReLU and a parametric unit to zero, and Flex-Act's logits are not decayed either.
    """
    groups = param_groups(network, weight_decay=weight_decay)
    groups = groups if picking_sites(network) else groups[:1]
    own = [p for module in network.modules() if isinstance(module, Learnable) for p in module.parameters()]
    if own:
        known = {id(parameter) for parameter in own}
        groups[0]["params"] = [parameter for parameter in groups[0]["params"] if id(parameter) not in known]
        groups.append({"params": own, "weight_decay": 0.0})
    return groups
