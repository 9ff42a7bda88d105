"""The networks that are compared: where they route, and in which way the routed activation is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexact import FlexAct, FlexConfig, convert, extract
from flexact.candidates import lookup
from flexact.config import PAPER_CANDIDATES
from flexact.errors import FlexActError
from flexact.ops import dispatch
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import ResNet
from flexact.studies.overhead.measurement import BASELINE

FIVE = PAPER_CANDIDATES
PLACEMENTS: dict[str, str] = {"penultimate": "penultimate", "all": "layer*"}
"""`where` of each placement; "all" is all blocks, without the stem, as the paper counts."""


@dataclass(frozen=True)
class Way:
    """One way of computing a routed activation."""

    title: str
    kernels: dispatch.Kernels = "auto"
    fuse: bool = False
    """With the batch norm and the residual addition before it."""
    plain: bool = False


WAYS: dict[str, Way] = {
    BASELINE: Way("ReLU"),
    "plain": Way("plain-written", plain=True),
    "closed_form": Way("closed form", kernels="closed_form"),
    "compiled_form": Way("closed form, compiled", kernels="compiled"),
    "fused": Way("fused", kernels="triton"),
    "fused_bn": Way("fused with batch norm", kernels="triton", fuse=True),
}


class PlainSite(FlexAct):
    """A site as one writes it first: every candidate, its blend and its statistics as separate torch operations."""

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
    """x = Σ p_k σ_k(h) by autograd, and the mean |σ_k′(h)| (K,)."""
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
    blocks: Sequence[int], width: int, placement: str, way: str, candidates: Sequence[str], device: torch.device
) -> nn.Module:
    """A network on its device in channels-last layout, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the CPU's alone: a capture that failed leaves a GPU's unusable
        network: nn.Module = ResNet(blocks, width=width)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if placement == BASELINE:
        return network
    chosen = WAYS[way]
    keywords: dict[str, Any] = {"fuse": True} if chosen.fuse else {}
    with kernels_of(way, device):
        network = convert(network, PLACEMENTS[placement], FlexConfig(candidates=tuple(candidates)), **keywords)
    if chosen.plain:
        for site in sites_of(network):
            site.__class__ = PlainSite
    return network


@contextmanager
def kernels_of(way: str, device: torch.device) -> Iterator[None]:
    """Run with a way's kernels; an error where they are not what would run."""
    before = dispatch.wanted()
    wanted = WAYS[way].kernels
    dispatch.use(wanted)
    try:
        check_kernels(way, device)
        yield
    finally:
        dispatch.use(before)


def check_kernels(way: str, device: torch.device) -> None:
    """That what is in use now is what a way stands for: a measurement of its stand-in would have the wrong name."""
    wanted, found = WAYS[way].kernels, dispatch.active(device)
    if wanted not in ("auto", found.name):
        raise FlexActError(f"{wanted} does not run here: {found.reason}")


def logit_count(network: nn.Module) -> int:
    """How many parameters routing adds."""
    return sum(site.logits.numel() for site in sites_of(network))


def extracted(network: nn.Module) -> nn.Module:
    """What a routed network leaves behind where every site has picked ReLU; the network itself is not touched."""
    sites = sites_of(network)
    if not sites:
        return network
    before = [site.logits.detach().clone() for site in sites]
    with torch.no_grad():
        for site in sites:
            site.logits.view(site.rows, site.k)[:, site.keys.index(BASELINE)] += 100.0
        plain = extract(network, commit=True)
        for site, logits in zip(sites, before, strict=True):
            site.logits.copy_(logits)
    return plain


def same_modules(network: nn.Module, other: nn.Module) -> bool:
    """Whether two networks print the same, module by module, and hold tensors of the same names and shapes."""

    def shapes(one: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in one.state_dict().items()}

    return repr(network) == repr(other) and shapes(network) == shapes(other)
