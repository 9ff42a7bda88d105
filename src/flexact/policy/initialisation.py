"""Applies a candidate's own initialisation to the layer before a site."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from flexact.candidates.registry import lookup
from flexact.errors import FlexActError
from flexact.routing.sharding import is_sharded
from flexact.routing.site import Site


def has_init(site: Site, k: int) -> bool:
    """Return whether a candidate of a site has its own initialisation."""
    return lookup(site.keys[k]).init is not None


def check_inits(sites: Sequence[Site], rewinds: bool) -> None:
    """Try each candidate's initialisation on a copy of the layer before the site, so that it cannot fail in the middle
    of a run, and warn about initialisations that will not be applied."""
    brought = [(site, k) for site in sites for k in range(site.k) if has_init(site, k)]
    names = ", ".join(dict.fromkeys(site.candidates[k] for site, k in brought))
    if brought and not rewinds:
        warnings.warn(
            f"the candidates' own initialisations ({names}) are not applied, because this run does not rewind the "
            "weights. Use FlexConfig(rewind=True), or initialise the layers before the sites yourself.",
            stacklevel=4,
        )
        return
    for site, k in brought:
        if site.layer_before is not None:
            _check_init(site.layer_before, site, k)
    unknown = dict.fromkeys(site.label for site, _ in brought if site.layer_before is None)
    if unknown:
        warnings.warn(
            f"the layer before {', '.join(unknown)} is not known, so the initialisation of {names} is not applied "
            "there. Pass example_inputs=... to flexact.convert, which then finds that layer.",
            stacklevel=4,
        )


def initialise(sites: Iterable[Site], candidate: int | None = None) -> None:
    """Initialise the layer before each site whose rows all have the same pick, or, for a given candidate, before all
    sites.

    The random numbers are drawn with the config's seed, the same on every rank; torch's random state does not change.
    """
    chosen: dict[int, tuple[nn.Module, Site, int]] = {}
    for site in sites:
        picks = {candidate} if candidate is not None else set(site.likeliest().tolist())
        k = min(picks)
        if len(picks) == 1 and has_init(site, k) and site.layer_before is not None:
            chosen.setdefault(id(site.layer_before), (site.layer_before, site, k))
    if not chosen:
        return
    devices = {parameter.device for layer, _, _ in chosen.values() for parameter in layer.parameters()}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]), torch.no_grad():
        torch.manual_seed(next(iter(chosen.values()))[1].config.seed)
        for layer, site, k in chosen.values():
            _run(layer, site, k)


def _check_init(layer: nn.Module, site: Site, k: int) -> None:
    if any(is_sharded(parameter) for parameter in layer.parameters()):
        raise FlexActError(
            f"candidate {site.candidates[k]!r} has an initialisation, but the layer before {site.label} is sharded. "
            "Register the candidate without init=..., and initialise before fully_shard."
        )
    trial = copy.deepcopy(layer)
    with torch.random.fork_rng([one.device for one in layer.parameters() if one.is_cuda]), torch.no_grad():
        _run(trial, site, k)


def _run(layer: nn.Module, site: Site, k: int) -> None:
    init = lookup(site.keys[k]).init
    assert init is not None
    try:
        init(layer)
    except Exception as error:
        raise FlexActError(
            f"the initialisation of {site.candidates[k]!r} raised {type(error).__name__} for the layer before "
            f"{site.label}, {layer}: {error}. It must change a given linear layer or convolution in place."
        ) from error
