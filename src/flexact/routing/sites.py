"""The sites of a model: finding them, and binding them to one router."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from flexact.errors import FlexActError
from flexact.routing.layer import FlexAct
from flexact.routing.router import Router


def sites_of(model: nn.Module) -> list[FlexAct]:
    """Return the sites of a model, each once, in depth order if it is known."""
    if not isinstance(model, nn.Module):
        raise FlexActError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    found: list[FlexAct] = []
    seen: set[nn.Module] = set()
    left: list[nn.Module | None] = [model]
    while left:  # twice as fast as model.modules(); `penalty` needs the sites in every step
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        if isinstance(module, FlexAct):
            found.append(module)
        elif children := module._modules:
            left.extend(reversed(children.values()))
    return sorted(found, key=lambda site: site.index) if len(routers_of(found)) == 1 else found


def routers_of(sites: Sequence[FlexAct]) -> list[Router]:
    """Return the routers of these sites, each once. A converted model has one; standalone sites have one each."""
    return list({id(site.router): site.router for site in sites}.values())


def bind(model: nn.Module, sites: list[FlexAct], group_of: Callable[[str], Hashable] | None = None) -> Router:
    """Bind the sites of a model to one router, which is refreshed at the start of each forward of the model.

    group_of: maps a site's name to its group; the sites of a group pick together. By default, see `FlexConfig.share`.
    """
    groups = groups_of(sites, group_of)
    router = Router(sites, standalone=False)
    for site, group in zip(sites, groups, strict=True):
        site.group = group
    model.register_forward_pre_hook(router)
    model.register_load_state_dict_pre_hook(_check_all_before_loading)
    return router


def one_router(model: nn.Module, sites: list[FlexAct]) -> Router:
    """Return the router of a converted model. Sites that were created one by one are bound to one router first."""
    routers = routers_of(sites)
    if len(routers) == 1:
        if len(routers[0].sites) != len(sites):
            raise FlexActError(
                f"this {type(model).__name__} has only {len(sites)} of the {len(routers[0].sites)} sites that were "
                "converted together; give the Schedule the whole model."
            )
        return routers[0]
    first = sites[0].config
    if any(dataclasses.replace(site.config, candidates=first.candidates) != first for site in sites):
        raise FlexActError("the sites of one model must have the same config; only their candidates may differ.")
    return bind(model, sites)


def groups_of(sites: list[FlexAct], group_of: Callable[[str], Hashable] | None) -> list[Hashable]:
    """Return the group of each site; None for a site that picks alone."""
    config = sites[0].config
    if group_of is None:
        return [site.keys if config.picks_together else None for site in sites]
    if config.granularity == "channel":
        raise FlexActError(
            "share puts sites into groups, but with granularity='channel' every channel picks alone. Use "
            "granularity='layer', or omit share."
        )
    groups = [group_of(site.name) for site in sites]
    if all(group is None for group in groups):
        raise FlexActError(
            f"share put none of the {len(sites)} sites into a group: it returned None for "
            f"{', '.join(site.name for site in sites[:5])}. Return the same value for sites that are to pick together."
        )
    first_of: dict[Hashable, FlexAct] = {}
    for site, group in zip(sites, groups, strict=True):
        try:
            first = first_of.setdefault(group, site)
        except TypeError:
            raise FlexActError(
                f"share returned {group!r:.80} for {site.name}, which cannot be a group. Return a string, a number, a "
                "tuple of these, or None."
            ) from None
        if group is not None and first.keys != site.keys:
            raise FlexActError(
                f"share put {first.name} and {site.name} into the group {group!r}, but their candidates differ: "
                f"{', '.join(first.candidates)} and {', '.join(site.candidates)}. Give them different groups, or the "
                "same candidates."
            )
    return groups


def blend(sites: list[FlexAct]) -> None:
    """Change pick_by="auto" to "blend" in the configs of sites, for a training loop that does not pass the loss."""
    owners: list[FlexAct | Router] = [*sites, *routers_of(sites)]
    for owner in owners:
        if owner.config.pick_by == "trial":
            raise FlexActError(
                "pick_by='trial' compares candidates by the loss of each step, which this loop does not pass. Use "
                "pick_by='blend', or write your own training loop with schedule.step(loss)."
            )
        owner.config = dataclasses.replace(owner.config, pick_by="blend")


def unbind(model: nn.Module) -> None:
    """Remove the hooks of `bind`."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, Router):
            del model._forward_pre_hooks[key]
    for key, hook in list(model._load_state_dict_pre_hooks.items()):
        if getattr(hook, "hook", None) is _check_all_before_loading:
            del model._load_state_dict_pre_hooks[key]


def _check_all_before_loading(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Check every site before the first tensor is loaded, so that a state of another model changes nothing."""
    own = [name for name in state_dict if name.startswith(prefix)]
    if own and not any(name.endswith("dropped_at") for name in own):  # hooks are not told whether loading is strict
        warnings.warn(
            "this state is from a plain model, but this model is converted. Load the weights before convert, or use "
            "flexact.load_picks for a network whose picks were saved; with strict=False the sites keep their state.",
            stacklevel=6,  # the call of load_state_dict
        )
    for name, module in model.named_modules():
        if isinstance(module, FlexAct):
            module.check_state(state_dict, f"{prefix}{name}.")
