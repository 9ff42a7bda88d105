"""The sites of a model: finding them, and giving them one router between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from torch import nn

from flexact.errors import FlexActError
from flexact.routing.layer import FlexAct
from flexact.routing.router import Router

SiteRouter: TypeAlias = Router[FlexAct]


def sites_of(model: nn.Module) -> list[FlexAct]:
    """The sites of a model, each once, in depth order as far as it is known."""
    if not isinstance(model, nn.Module):
        raise FlexActError(f"a torch.nn.Module is needed; got {type(model).__name__}.")
    found = [module for module in model.modules() if isinstance(module, FlexAct)]
    routers = routers_of(found)
    if len(routers) != 1:
        return found
    order = {id(site): place for place, site in enumerate(routers[0].sites)}
    return sorted(found, key=lambda site: order[id(site)])


def bound_sites(model: nn.Module) -> list[FlexAct]:
    """`sites_of`, without a walk over all modules where the model itself was converted."""
    for hook in model._forward_pre_hooks.values() if isinstance(model, nn.Module) else ():
        if isinstance(hook, Router):
            return hook.sites
    return sites_of(model)


def routers_of(sites: list[FlexAct]) -> list[SiteRouter]:
    """The routers behind these sites, each once: one for a converted model, one a site for sites on their own."""
    return list({id(site.router): site.router for site in sites}.values())


def bind(model: nn.Module, sites: list[FlexAct], group_of: Callable[[str], Hashable] | None = None) -> SiteRouter:
    """Give the sites of a model one router between them, refreshed at the start of each of the model's forwards.

    group_of: from a site's name to its group, whose sites pick together; by default the config's `share` decides.
    """
    groups = groups_of(sites, group_of)
    router = Router(sites, sites[0].config, standalone=False)
    for site, group in zip(sites, groups, strict=True):
        site.group = group
    model.register_forward_pre_hook(router)
    model.register_load_state_dict_pre_hook(_check_all_before_loading)
    return router


def one_router(model: nn.Module, sites: list[FlexAct]) -> SiteRouter:
    """The router of a converted model; sites built by hand get one together."""
    routers = routers_of(sites)
    if len(routers) == 1:
        if len(routers[0].sites) != len(sites):
            raise FlexActError(
                f"{len(sites)} of the {len(routers[0].sites)} sites that were converted together are in this "
                f"{type(model).__name__}; give the Schedule the whole model."
            )
        return routers[0]
    first = sites[0].config.to_dict()
    for site in sites[1:]:
        fields = site.config.to_dict().items()
        differing = [name for name, value in fields if name != "candidates" and value != first[name]]
        if differing:
            raise FlexActError(
                f"the sites of one model must have the same config, but differ in {', '.join(differing)}. Only their "
                "candidates may differ."
            )
    return bind(model, sites)


def groups_of(sites: list[FlexAct], group_of: Callable[[str], Hashable] | None) -> list[Hashable]:
    """The group of each site; None for one that picks for itself."""
    config = sites[0].config
    if group_of is None:
        return [site.keys if config.picks_together else None for site in sites]
    if config.granularity == "channel":
        raise FlexActError(
            "share has groups of sites, and granularity='channel' lets every channel pick for itself. Use "
            "granularity='layer', or leave share out."
        )
    groups = [group_of(site.name) for site in sites]
    if all(group is None for group in groups):
        raise FlexActError(
            f"share put none of the {len(sites)} sites into a group: it returned None for "
            f"{', '.join(site.name for site in sites[:5])}. Return the same value for sites that are to pick together."
        )
    candidates: dict[Hashable, FlexAct] = {}
    for site, group in zip(sites, groups, strict=True):
        first = candidates.setdefault(group, site)
        if group is not None and first.keys != site.keys:
            raise FlexActError(
                f"share put {first.name} and {site.name} into the group {group!r}, but their candidates differ: "
                f"{', '.join(first.candidates)} and {', '.join(site.candidates)}. Give them different groups, or the "
                "same candidates."
            )
    return groups


def blend(sites: list[FlexAct]) -> None:
    """Let sites whose config leaves open how they pick do so by a blend: for a loop that has no loss to compare by."""
    owners: list[FlexAct | SiteRouter] = [*sites, *routers_of(sites)]
    for owner in owners:
        if owner.config.pick_by == "trial":
            raise FlexActError(
                "pick_by='trial' compares candidates by the loss of each step, which this loop does not pass on. Use "
                "pick_by='blend', or a training loop of your own with schedule.step(loss)."
            )
        owner.config = dataclasses.replace(owner.config, pick_by="blend")


def unbind(model: nn.Module) -> None:
    """Take the hooks of `bind` away."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, Router):
            del model._forward_pre_hooks[key]
    for key, hook in list(model._load_state_dict_pre_hooks.items()):
        if getattr(hook, "hook", None) is _check_all_before_loading:
            del model._load_state_dict_pre_hooks[key]


def _check_all_before_loading(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Check every site before the first tensor is loaded, so that a state of another model changes nothing."""
    for name, module in model.named_modules():
        if isinstance(module, FlexAct):
            module.check_state(state_dict, f"{prefix}{name}.")
