"""The networks that the study compares, with ReLU and with routed activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexact import FlexAct, FlexConfig, convert
from flexact.candidates import lookup
from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.ops import dispatch
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import ResNet
from flexact.studies.overhead.options import BASELINE, WAYS

PLACEMENTS: dict[str, str] = {"penultimate": "penultimate", "all": "layer*"}
"""The argument `where` of each placement. As in the paper, "all" means all blocks without the stem."""


class PlainSite(FlexAct):
    """A straightforward site: candidates, blend and statistics are separate torch operations."""

    def forward(self, h: Tensor) -> Tensor:
        if not self.training or self.committed:
            return super().forward(h)
        routing = self.routing(h)
        noise = self.router.noise[self.view.first_row]
        x, sensitivity = plain_blend(h, self.logits, noise, self.temperature, self.keys)
        self.gather(routing, sensitivity.unsqueeze(0))
        return x


def plain_blend(
    h: Tensor, logits: Tensor, noise: Tensor, temperature: Tensor, names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return x = Σ p_k σ_k(h), whose gradients come from autograd, and the mean |σ_k′(h)| with shape (K,)."""
    log_pi = torch.log_softmax(logits, dim=-1)
    p = torch.softmax((log_pi + noise) / temperature, dim=-1)
    values = [lookup(name).function(h) for name in names]
    x = p[0] * values[0]
    for weight, value in zip(p[1:], values[1:], strict=True):
        x = x + weight * value
    with torch.no_grad():
        slopes = [lookup(name).derivative(h, value).abs() for name, value in zip(names, values, strict=True)]
        return x, torch.stack([slope.mean(dtype=torch.float32) for slope in slopes])


def build(
    blocks: Sequence[int],
    width: int,
    placement: str,
    way: str,
    device: torch.device,
    candidates: Sequence[str] = PAPER_CANDIDATES,
) -> nn.Module:
    """Return a ResNet on its device in channels-last layout; the weights are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # not the GPU's, which a failed capture leaves unusable
        network: nn.Module = ResNet(blocks, width=width)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if placement == BASELINE:
        return network
    use_kernels(way, device)
    keywords: dict[str, Any] = {"fuse": True} if WAYS[way].fuse else {}
    network = convert(network, PLACEMENTS[placement], FlexConfig(candidates=tuple(candidates)), **keywords)
    if WAYS[way].plain:
        for site in sites_of(network):
            site.__class__ = PlainSite
    return network


def use_kernels(way: str, device: torch.device) -> None:
    """Select the kernels of an implementation in WAYS. Raises if a fallback would run in their place."""
    dispatch.use(WAYS[way].kernels)
    check_kernels(way, device)


def check_kernels(way: str, device: torch.device) -> None:
    """Raise unless an implementation's kernels are in use: those that fail to build fall back at their first call."""
    wanted, found = WAYS[way].kernels, dispatch.active(device)
    if wanted not in ("auto", found.name):
        raise FlexActError(f"{wanted} does not run here: {found.reason}")


def logit_count(network: nn.Module) -> int:
    """Return the number of parameters that routing adds."""
    return sum(site.logits.numel() for site in sites_of(network))
