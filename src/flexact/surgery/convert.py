"""Converting a model, committing to its picks, and extracting the plain network.

`convert` first finds every site and builds everything it needs, and only then touches the model, so that a failure
leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flexact.candidates.registry import ORIGINAL, lookup
from flexact.config import FlexConfig
from flexact.errors import FlexActError, suggestion
from flexact.routing.layer import FlexAct
from flexact.routing.sharding import has_shards
from flexact.routing.site_arguments import config_of
from flexact.routing.sites import bind, groups_of, sites_of
from flexact.surgery.batch_norm_fusion import find_fused
from flexact.surgery.choosing import (
    HIDDEN,
    Where,
    asked_for,
    check_chosen,
    check_convertible,
    check_where,
    choose,
    listed,
)
from flexact.surgery.copying import copied
from flexact.surgery.finding import Found
from flexact.surgery.layer_before import layer_in_sequence
from flexact.surgery.run_order import Seen
from flexact.surgery.swapping import swap_in, swap_out, take_over_hooks
from flexact.surgery.watching import watch

_log = logging.getLogger(__name__)

Share = str | Callable[[str], Hashable]


def convert(
    model: nn.Module,
    where: Where = "all",
    config: FlexConfig | None = None,
    *,
    candidates: Sequence[str] | None = None,
    example_inputs: Any = None,
    per_call: bool = False,
    fuse: bool = False,
    share: Share | None = None,
) -> nn.Module:
    """Replace the activations of a model by sites that pick, and return the model.

    Call it before you create the optimizer, wrap the model in DDP or compile it.

    where: "all", the hidden activations; "penultimate", the last of them; names or patterns ("layer4.*", "*.relu", a
    submodule's name for all in it), one or several; or f(name, module) -> bool. Gates and output activations (see
    `surgery.roles`) are not hidden: "all" and "penultimate" skip them, and the logger "flexact" logs their names at
    level INFO.
    config: all settings of the method; by default the best configuration known.
    candidates: the names of the functions to pick from; short for `config=FlexConfig(candidates=...)`.
    example_inputs: what the model is called with (a tensor, a tuple, or a dictionary of keywords). With it, the order
    of the sites is that of execution rather than of definition, and channels are counted. A copy of the model is run
    once in eval mode.
    per_call: whether each call of an activation is a site of its own; by default all its calls share one site.
    fuse: whether to fuse a site with the nn.BatchNorm2d before it, and with the residual addition between them. The
    forwards in which they follow each other are rewritten; `state_dict` and `extract` are the same as without it.
    The logger "flexact" logs at level INFO how many sites were fused, and why the others were not.
    share: which sites pick together: "model", "site" (none), or a function that maps a site's name to its
    group, or to None if the site picks alone. By default the config's `share`.

    >>> import torch, flexact
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> flexact.convert(model, where="penultimate")[1]
    FlexAct(candidates=('relu', 'gelu', 'silu', 'elu', 'tanh'))
    """
    check_convertible(model, "convert")
    check_where(where)
    config = config_of(candidates, config)
    if share in ("model", "site"):
        config = dataclasses.replace(config, share=share)  # type: ignore[arg-type]  # one of the two words
    elif share is not None and not callable(share):
        raise FlexActError(
            f"share={share!r:.80} is not a choice{suggestion(str(share), ('model', 'site'))} Give 'model', 'site', or "
            "a function from a site's name to its group."
        )
    inits = any(name != ORIGINAL and lookup(name).init is not None for name in config.candidates)
    choice = choose(model, where, example_inputs, per_call, graph=inits)
    check_chosen(choice, where)
    findings, chosen, seen, skipped = choice.findings, choice.sites, choice.seen, choice.skipped
    if config.granularity == "channel" and seen is None:
        raise FlexActError("granularity='channel' needs example_inputs=..., to count the channels of each site.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with torch.inference_mode(False):  # otherwise the sites could not be trained
        sites = [_site(one, config, seen).to(device) for one in chosen]
    if inits:
        for one, site in zip(chosen, sites, strict=True):
            object.__setattr__(site, "layer_before", _layer_before(model, one, seen))  # not as a submodule
    classes = findings.rewritten(chosen)
    lines_left = findings.lines_left(chosen)
    if skipped:
        _log.info("%s", "\n".join(listed("skipped; to convert one of these, name it in where", skipped)))
    warned = listed("flexact.convert left these as they are", asked_for(findings, where))
    warned += listed("these functions are not among the candidates, so their sites cannot keep them", _lost(sites))
    if fuse:
        fused = find_fused(model, chosen, findings, classes)
        classes |= fused.classes
        if fused.classes:
            count = sum(not fused.sites.isdisjoint(one.names) for one in chosen)
            others = "" if count == len(chosen) else f"; the others: {fused.obstacle}"
            _log.info("fused %d of %d sites%s", count, len(chosen), others)
        else:
            warned.append(f"flexact.convert fused nothing in this model: {fused.obstacle}")
    if warned:
        warnings.warn("\n".join(warned), stacklevel=2)
    group_of = share if callable(share) else None
    groups_of(sites, group_of)  # raises if the groups are invalid
    # From here on nothing can fail.
    for owner, cls in classes.items():
        object.__setattr__(owner, "__class__", cls)  # the module's own __setattr__ may refuse
    model = swap_in(model, chosen, sites)
    if not isinstance(model, FlexAct):
        bind(model, sites, group_of)
        watch(model, lines_left, sigmoids=where not in HIDDEN)
    return model


def commit(model: nn.Module) -> nn.Module:
    """Freeze every site's pick, and return the model. Only the picked candidate then runs.

    The pick is the likeliest candidate or, in a trial, the one being tried, whose weights the model has.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> flexact.commit(model)[1].committed
    True
    """
    sites = _sites_or_error(model, "commit")
    _check_logits(sites)
    _commit(sites)
    return model


def extract(model: nn.Module, commit: bool = False, inplace: bool = False) -> nn.Module:
    """Return the plain network: each site is replaced by its pick, and the logits and the router are removed.

    commit: if the model is not committed yet, commit it to its current picks (only the copy, unless in place).
    inplace: change this model instead of a copy of it.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> flexact.extract(model, commit=True)
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
      (1): ReLU()
    )
    """
    sites = _sites_or_error(model, "extract")
    uncommitted = [site.label for site in sites if not site.committed]
    if uncommitted and not commit:
        steps = "Let the Schedule reach its commitment"
        if any(site.router.scheduled and site.router.step == 0 for site in sites):
            steps = "schedule.step(loss) was never called: call it after every optimizer step"
        raise FlexActError(
            f"{len(uncommitted)} of {len(sites)} sites are not committed yet ({', '.join(uncommitted[:5])}), so the "
            f"plain network would not be the one that was trained. {steps}, or take the current picks with "
            "extract(model, commit=True)."
        )
    if has_shards(model):
        raise FlexActError(
            "this model is sharded over ranks, but extract needs all of its weights. Collect its state with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), load that into a model converted in "
            "the same way, and extract that one."
        )
    _check_logits(sites)
    _warn_of_lost_weights(model, sites)
    if not inplace:
        model = copied(model, kind=FlexAct)
    _commit(sites_of(model))
    return swap_out(model)


def _commit(sites: list[FlexAct]) -> None:
    """Commit the sites that are not committed yet, in a trial to the candidate that is being trained."""
    for site in sites:
        if not site.committed:
            site.commit(site.router.step, site.router.trying)


def _check_logits(sites: list[FlexAct]) -> None:
    """Raise if the logits of a site that is not committed are NaN or infinite."""
    lost = [site.label for site in sites if not site.committed and not site.has_finite_logits()]
    if lost:
        raise FlexActError(
            f"the logits of {len(lost)} of {len(sites)} sites are NaN or infinite ({', '.join(lost[:5])}), so nothing "
            "can be picked there: training diverged. Go back to an earlier checkpoint and lower the learning rate, or "
            "leave out the candidates that diverge."
        )


def _warn_of_lost_weights(model: nn.Module, sites: list[FlexAct]) -> None:
    """Warn if weights are NaN or infinite: whatever was picked, the network then returns NaN."""
    logits = {id(site.logits) for site in sites}
    weights = {
        name: one for name, one in model.named_parameters() if not (id(one) in logits or one.is_meta or is_lazy(one))
    }
    lost = [name for name, one in weights.items() if not bool(one.isfinite().all())]
    if lost:
        warnings.warn(
            f"{len(lost)} of {len(weights)} parameters are NaN or infinite ({', '.join(lost[:5])}): training diverged, "
            "and the plain network returns NaN. Go back to an earlier checkpoint and lower the learning rate.",
            stacklevel=3,
        )


def _lost(sites: list[FlexAct]) -> dict[str, str]:
    """Return the original functions that are not among the candidates of their sites, and the names of those sites."""
    names: dict[str, list[str]] = {}
    for site in sites:
        if site.original_index < 0:
            names.setdefault(repr(site.original), []).append(site.name or "the model itself")
    return {
        function: f"{', '.join(those[:3])}{f' and {len(those) - 3} more' * (len(those) > 3)}; add 'original' to keep it"
        for function, those in names.items()
    }


def _site(found: Found, config: FlexConfig, seen: dict[int, Seen] | None) -> FlexAct:
    channels = None
    if config.granularity == "channel" and seen is not None:
        if id(found) not in seen:
            raise FlexActError(f"{found.name} was not reached with these example_inputs, so its channels are unknown.")
        channels = seen[id(found)].channels(found.name, config.channel_dim)
    site = FlexAct(config=config, original=found.original, channels=channels)
    take_over_hooks(found.original, site)
    site.name, site.function = found.name, found.function
    site.added, site.rewritten = found.kind == "call", bool(found.calls)
    return site.train((found.original if found.kind == "module" else found.owner).training)


def _layer_before(model: nn.Module, found: Found, seen: dict[int, Seen] | None) -> nn.Module | None:
    """Return the layer whose output an activation takes, from the example forward if there was one; None if unknown."""
    if seen is None:
        layers = {layer_in_sequence(model, name) for name in found.names}
    else:
        layers = seen[id(found)].before if id(found) in seen else set()
    return next(iter(layers)) if len(layers) == 1 else None


def _sites_or_error(model: nn.Module, verb: str) -> list[FlexAct]:
    if not isinstance(model, nn.Module):
        raise FlexActError(f"{verb} needs a torch.nn.Module; got {model!r}.")
    sites = sites_of(model)
    for site in sites:
        site.update_alive()  # averaging weights, as in an EMA, may overwrite buffers unnoticed
    if not sites:
        raise FlexActError(
            f"this {type(model).__name__} has no FlexAct sites to {verb}; it was not converted, or is extracted "
            "already."
        )
    return sites
