"""Converting a model, committing to its picks, and extracting the plain network.

`convert` first finds every site and builds everything it needs, and only then touches the model, so that a failure
leaves the model as it was.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import logging
import warnings
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexact.activations import is_kind_of_activation
from flexact.config import FlexConfig
from flexact.errors import FlexActError, suggestion
from flexact.routing.layer import FlexAct
from flexact.routing.sharding import has_shards
from flexact.routing.sites import bind, groups_of, sites_of
from flexact.surgery.batch_norm_fusion import Fused, find_fused
from flexact.surgery.finding import Findings, Found, find
from flexact.surgery.roles import reason_to_skip
from flexact.surgery.run_order import Seen, run_order
from flexact.surgery.swapping import swap_in, swap_out, take_over_hooks, without_hooks
from flexact.surgery.watching import FirstForwards

_log = logging.getLogger(__name__)
_HIDDEN = ("all", "penultimate")

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]
Share = str | Callable[[str], Hashable]


def convert(
    model: nn.Module,
    where: Where = "all",
    config: FlexConfig | None = None,
    *,
    example_inputs: Any = None,
    per_call: bool = False,
    fuse: bool = False,
    share: Share | None = None,
) -> nn.Module:
    """Make the activations of a model pick, and return the model. Do it before you build optimizer, DDP or compile.

    where: "all", the hidden activations; "penultimate", the last of them; names or patterns ("layer4.*", "*.relu", a
    submodule's name for all in it), one or several; or f(name, module) -> bool. Gates and output activations (see
    `surgery.roles`) are no hidden activations: the first two skip them, and the logger "flexact" lists what was skipped
    at level INFO.
    config: every choice of the method; the best policy we know by default.
    example_inputs: what the model is called with (a tensor, a tuple, or a dictionary of keywords). With it, the order
    of the sites is that of execution rather than of definition, and channels are counted; one eval forward is run.
    per_call: an activation that is called several times is one site by default, and one a call with this.
    fuse: run a site in one go with the nn.BatchNorm2d before it, and with the residual addition between them. The
    forwards in which they follow each other are rewritten; `state_dict` and `extract` are the same as without. The
    logger "flexact" says at level INFO how many sites were fused, and what kept the others from it.
    share: which sites pick together: "model", "site" (none), or a function from a site's name to its group, None for a
    site that picks for itself. By default the config's `share`.

    >>> import torch, flexact
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> flexact.convert(model, where="penultimate")[1]
    FlexAct(candidates=('relu', 'gelu', 'silu', 'elu', 'tanh'))
    """
    config = FlexConfig() if config is None else config
    _check_convertible(model)
    _check_choices(where, config)
    if isinstance(share, str):
        config = dataclasses.replace(config, share=share)  # type: ignore[arg-type]  # checked there
    elif share is not None and not callable(share):
        raise FlexActError(
            f"share must be 'model', 'site', or a function from a site's name to its group; got {share!r:.80}."
        )
    findings = find(model, per_call)
    seen = None if example_inputs is None else run_order(model, findings, example_inputs, where not in _HIDDEN)
    skipped = _no_hidden_ones(model, findings) if where in _HIDDEN else {}
    chosen = _choose(findings, where, seen, skipped)
    if config.granularity == "channel" and seen is None:
        raise FlexActError("granularity='channel' needs example_inputs=..., to count the channels of each site.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    sites = [_site(one, config, seen).to(device) for one in chosen]
    classes = findings.rewritten(chosen)
    lines_left = findings.lines_left(chosen)
    if skipped:
        _log.info("%s", "\n".join(_told("skipped; to convert one of these, name it in where", skipped)))
    told = _told("flexact.convert left these as they are", _asked_for(model, where, findings.left_alone))
    told += _told("these functions are not among the candidates, so their sites cannot keep them", _lost(sites))
    if fuse:
        fused = find_fused(model, chosen, findings, classes)
        classes |= fused.classes
        if fused.classes:
            _log_fused(chosen, fused)
        else:
            told.append(f"flexact.convert fused nothing in this model: {fused.obstacles[0]}")
    if told:
        warnings.warn("\n".join(told), stacklevel=2)
    group_of = share if callable(share) else None
    groups_of(sites, group_of)  # raises an error where they make no sense
    # From here on nothing can fail.
    for owner, cls in classes.items():
        owner.__class__ = cls
    model = swap_in(model, chosen, sites)
    if not isinstance(model, FlexAct):
        bind(model, sites, group_of)
        model.register_forward_pre_hook(FirstForwards(lines_left, sigmoids=where not in _HIDDEN))
    return model


def commit(model: nn.Module) -> nn.Module:
    """Freeze every site's pick: the likeliest candidate of each, which then runs alone; in a trial it is the one that
    is tried, whose weights the model has. Returns the model.

    >>> import torch, flexact
    >>> model = flexact.convert(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    >>> flexact.commit(model)[1].committed
    True
    """
    sites = _sites_or_error(model, "commit")
    _check_logits(sites)
    _commit(sites, sites)
    return model


def extract(model: nn.Module, commit: bool = False, inplace: bool = False) -> nn.Module:
    """The plain network: each site replaced by what it picked, with nothing of this library left inside.

    commit: take the current picks of a model that is not committed yet (of the copy, unless in place).
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
    undecided = [site.name or "FlexAct" for site in sites if not site.committed]
    if undecided and not commit:
        raise FlexActError(
            f"{len(undecided)} of {len(sites)} sites are not committed yet ({', '.join(undecided[:5])}), so the plain "
            "network would not be the one that was trained. Let the Schedule reach its commitment, or take the current "
            "picks with extract(model, commit=True)."
        )
    if has_shards(model):
        raise FlexActError(
            "this model is sharded over ranks, and the plain network is one whole. Collect its state with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), load that into a model converted in "
            "the same way, and extract that one."
        )
    _check_logits(sites)
    _warn_of_lost_weights(model, sites)
    if not inplace:
        with _DetachedCopies():
            model = copy.deepcopy(model)
    _commit(sites_of(model), sites)
    return swap_out(model)


def _commit(sites: list[FlexAct], as_in: list[FlexAct]) -> None:
    """Commit the sites that are not. as_in: the same sites of the model that is in training; a copy is in no trial."""
    for site, trained in zip(sites, as_in, strict=True):
        if not site.committed:
            site.commit(trained.router.step, trained.router.trying)


class _DetachedCopies(TorchFunctionMode):
    """Lets deepcopy take tensors with a gradient history, as a module that caches a result holds: by their values."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return function(*args, **(kwargs or {}))


def _check_logits(sites: list[FlexAct]) -> None:
    """Refuse to pick by logits that are no numbers."""
    lost = [site.name or "FlexAct" for site in sites if not site.committed and not site.has_finite_logits()]
    if lost:
        raise FlexActError(
            f"the logits of {len(lost)} of {len(sites)} sites are NaN or infinite ({', '.join(lost[:5])}), so nothing "
            "can be picked there: training diverged. Go back to an earlier checkpoint and lower the learning rate, or "
            "leave out the candidates that diverge."
        )


def _warn_of_lost_weights(model: nn.Module, sites: list[FlexAct]) -> None:
    """Warn where a run has diverged: whatever was picked, the network returns no numbers."""
    logits = {id(site.logits) for site in sites}
    weights = {name: one for name, one in model.named_parameters() if id(one) not in logits and not one.is_meta}
    lost = [name for name, one in weights.items() if not bool(one.isfinite().all())]
    if lost:
        warnings.warn(
            f"{len(lost)} of {len(weights)} parameters are NaN or infinite ({', '.join(lost[:5])}): training diverged, "
            "and the plain network returns NaN. Go back to an earlier checkpoint and lower the learning rate.",
            stacklevel=3,
        )


def _check_convertible(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise FlexActError(f"convert needs a torch.nn.Module; got {type(model).__name__}.")
    if any(isinstance(module, FlexAct) for module in model.modules()):
        raise FlexActError(
            "this model has FlexAct sites already; a model is converted once. To choose other sites, convert a fresh "
            "one."
        )
    for kind, what in (
        (torch.jit.ScriptModule, "a TorchScript module"),
        (nn.parallel.DistributedDataParallel, "wrapped in DistributedDataParallel"),
    ):
        if isinstance(model, kind):
            raise FlexActError(f"this model is {what}; convert the plain model first, and wrap what convert returns.")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise FlexActError("this model is compiled already; convert the plain model first, then call torch.compile.")


def _check_choices(where: Any, config: Any) -> None:
    if isinstance(config, dict):
        raise FlexActError("config must be a FlexConfig; got a dictionary. Make one with FlexConfig.from_dict(...).")
    if not isinstance(config, FlexConfig):
        raise FlexActError(f"config must be a FlexConfig; got {config!r}.")
    if isinstance(where, type):
        raise FlexActError(
            f"where takes names, or a function of a name and a module; got the class {where.__name__}. To choose by "
            f"type, give where=lambda name, module: isinstance(module, {where.__name__})."
        )
    if isinstance(where, nn.Module) or not (isinstance(where, (str, Sequence, Set)) or callable(where)):
        raise FlexActError(
            f"where must be 'all', 'penultimate', names or patterns, or a function of a name and a module; got "
            f"{where!r}."
        )


def _asked_for(model: nn.Module, where: Where, left_alone: dict[str, str]) -> dict[str, str]:
    """What was left alone, without the activations that `where` would not have chosen anyway. Forwards stay: one that
    could not be looked into may hold what `where` is after."""
    if where in _HIDDEN:
        return left_alone
    patterns = [] if callable(where) else [where] if isinstance(where, str) else list(where)
    modules = dict(model.named_modules(remove_duplicate=False))

    def asked(name: str) -> bool:
        module = modules.get(name)
        if module is None or not is_kind_of_activation(module):
            return True
        return bool(where(name, module)) if callable(where) else any(_matches(name, one) for one in patterns)

    return {name: reason for name, reason in left_alone.items() if asked(name)}


def _told(title: str, lines: dict[str, str]) -> list[str]:
    return [f"{title}:", *(f"  {name}: {text}" for name, text in lines.items())] if lines else []


def _lost(sites: list[FlexAct]) -> dict[str, str]:
    """The functions that sites had before and cannot pick, and where."""
    names: dict[str, list[str]] = {}
    for site in sites:
        if site.original_index < 0:
            names.setdefault(repr(site.original), []).append(site.name or "the model itself")
    return {
        function: f"{', '.join(those[:3])}{f' and {len(those) - 3} more' * (len(those) > 3)}; add 'original' to keep it"
        for function, those in names.items()
    }


def _log_fused(chosen: list[Found], fused: Fused) -> None:
    places = sum(not fused.sites.isdisjoint(one.names) for one in chosen)
    others = "" if places == len(chosen) else f"; the others: {'; '.join(fused.obstacles[:3])}"
    _log.info("fused %d of %d sites%s", places, len(chosen), others)


def _no_hidden_ones(model: nn.Module, findings: Findings) -> dict[str, str]:
    """The gates and output activations of a model by name, with the reason."""
    reasons = {one.name: reason_to_skip(model, one) for one in findings.found}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _choose(findings: Findings, where: Where, seen: dict[int, Seen] | None, skipped: dict[str, str]) -> list[Found]:
    """What `where` asks for, in execution order where that was seen, in definition order otherwise."""
    found = [one for one in findings.found if one.name not in skipped]
    if seen is not None:
        found = sorted(found, key=lambda one: seen[id(one)].first if id(one) in seen else len(seen))
    if callable(where):
        chosen = [one for one in found if any(where(name, one.original) for name in one.answers_to)]
    elif where == "all":
        chosen = list(found)
    elif where == "penultimate":
        if seen is not None:
            found = sorted((one for one in found if id(one) in seen), key=lambda one: seen[id(one)].last)
        chosen = found[-1:]
    else:
        return _matching(findings, found, [where] if isinstance(where, str) else list(where))
    if not chosen:
        told = getattr(where, "__name__", "the function") if callable(where) else repr(where)
        lines = _told("Skipped; to convert one of these, name it in where", skipped)
        raise FlexActError("\n".join([f"no activation matched where={told}. {findings.told()}", *lines]))
    return chosen


def _matching(findings: Findings, found: list[Found], patterns: list[str]) -> list[Found]:
    chosen: set[int] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise FlexActError(f"where takes names or patterns, as strings; got {pattern!r}.")
        matched = {id(one) for one in found for name in one.answers_to if _matches(name, pattern)}
        if not matched:
            known = [*_HIDDEN, *(name for one in found for name in one.answers_to)]
            raise FlexActError(f"no activation matched where={pattern!r}{suggestion(pattern, known)} {findings.told()}")
        chosen |= matched
    if not patterns:
        raise FlexActError(f"where names nothing. {findings.told()}")
    return [one for one in found if id(one) in chosen]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _site(found: Found, config: FlexConfig, seen: dict[int, Seen] | None) -> FlexAct:
    channels = None
    if config.granularity == "channel" and seen is not None:
        if id(found) not in seen:
            raise FlexActError(f"{found.name} was not reached with these example_inputs, so its channels are unknown.")
        channels = seen[id(found)].channels(found.name, config.channel_dim)
    site = FlexAct(config=config, original=without_hooks(found.original), channels=channels)
    take_over_hooks(found.original, site)
    site.name, site.function = found.name, found.function
    site.added, site.rewritten = found.kind == "call", bool(found.calls)
    return site.train((found.original if found.kind == "module" else found.owner).training)


def _sites_or_error(model: nn.Module, verb: str) -> list[FlexAct]:
    if not isinstance(model, nn.Module):
        raise FlexActError(f"{verb} needs a torch.nn.Module; got {model!r}.")
    sites = sites_of(model)
    for site in sites:
        site.check_buffers()
        site.update_alive()  # what averages weights, as an EMA does, may copy buffers without any notice
    if not sites:
        raise FlexActError(
            f"this {type(model).__name__} has no FlexAct sites to {verb}; it was not converted, or is extracted "
            "already."
        )
    return sites
