"""The activations of a model that become sites, and the reasons why the others do not."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexact.candidates.recognition import is_kind_of_activation
from flexact.candidates.registry import known_names
from flexact.errors import FlexActError, suggestion
from flexact.routing.layer import FlexAct
from flexact.routing.sharding import fsdp_modules
from flexact.surgery.finding import Findings, Found
from flexact.surgery.roles import reason_to_skip
from flexact.surgery.run_order import Seen, run_order

HIDDEN = ("all", "penultimate")
Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Choice:
    """The activations of a model, and which of them become sites."""

    findings: Findings
    seen: dict[int, Seen] | None
    """The calls of the activations, from one forward; None without example inputs. See `run_order`."""
    skipped: dict[str, str]
    """The gates and output activations that `where` does not name, and the reason."""
    sites: list[Found]
    """Those that become sites, in execution order where that was seen, in definition order otherwise."""


def choose(model: nn.Module, where: Where, example_inputs: Any, per_call: bool, graph: bool = False) -> Choice:
    """Choose what becomes a site. The model is unchanged afterwards.

    graph: as in `run_order`; the other arguments are those of `convert`.
    """
    findings, seen = Findings(model, per_call), None
    if example_inputs is not None:
        seen = run_order(model, findings, example_inputs, where not in HIDDEN, graph)
    reasons = {one.name: reason_to_skip(findings, one) for one in findings.found} if where in HIDDEN else {}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    return Choice(findings, seen, skipped, _chosen(findings, where, seen, skipped))


def check_chosen(choice: Choice, where: Where) -> None:
    """Raise if nothing was chosen."""
    if not choice.sites:
        told = getattr(where, "__name__", "the function") if callable(where) else repr(where)
        lines = listed("Skipped; to convert one of these, name it in where", choice.skipped)
        raise FlexActError("\n".join([f"no activation matched where={told}. {choice.findings.told()}", *lines]))


def _chosen(findings: Findings, where: Where, seen: dict[int, Seen] | None, skipped: dict[str, str]) -> list[Found]:
    """Return what `where` selects, in execution order if it is known, otherwise in definition order."""
    found = [one for one in findings.found if one.name not in skipped]
    if seen is not None:
        found = sorted(found, key=lambda one: seen[id(one)].first if id(one) in seen else math.inf)
    if callable(where):
        return [one for one in found if any(where(name, one.original) for name in one.answers_to)]
    if where == "all":
        return found
    if where == "penultimate":
        if seen is not None:
            found = sorted((one for one in found if id(one) in seen), key=lambda one: seen[id(one)].last)
        return found[-1:]
    return _matching(findings, found, _patterns(where))


def _matching(findings: Findings, found: list[Found], patterns: list[str]) -> list[Found]:
    chosen: set[int] = set()
    for pattern in patterns:
        matched = {id(one) for one in found for name in one.answers_to if _matches(name, pattern)}
        if not matched:
            known = [*HIDDEN, *(name for one in found for name in one.answers_to)]
            hint = suggestion(pattern, known)
            hint += " Functions to pick from are given by name: candidates=..." * (pattern in known_names())
            raise FlexActError(f"no activation matched where={pattern!r}{hint} {findings.told()}")
        chosen |= matched
    if not patterns:
        raise FlexActError(f"where is empty. {findings.told()}")
    return [one for one in found if id(one) in chosen]


def _patterns(where: str | Sequence[str]) -> list[str]:
    return [where] if isinstance(where, str) else list(where)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def check_convertible(model: nn.Module, verb: str) -> None:
    """Raise if a model cannot be converted."""
    if not isinstance(model, nn.Module):
        raise FlexActError(f"{verb} needs a torch.nn.Module; got {type(model).__name__}.")
    if any(isinstance(module, FlexAct) for module in model.modules()):
        raise FlexActError(
            "this model has FlexAct sites already; a model is converted once. To choose other sites, convert a fresh "
            "one."
        )
    wrap = "and wrap what convert returns"
    for is_unsuitable, what, then in (
        (isinstance(model, torch.jit.ScriptModule), "a TorchScript module", wrap),
        (isinstance(model, nn.parallel.DistributedDataParallel), "wrapped in DistributedDataParallel", wrap),
        (isinstance(model, nn.DataParallel), "wrapped in DataParallel", wrap),
        (
            fsdp_modules(model, "FSDPModule", "FullyShardedDataParallel"),
            "sharded by FSDP",
            "and shard what convert returns",
        ),
        (hasattr(model, "_orig_mod") or model._compiled_call_impl, "compiled already", "then call torch.compile"),
    ):
        if is_unsuitable:
            raise FlexActError(f"this model is {what}; convert the plain model first, {then}.")


def check_where(where: Any) -> None:
    """Raise if `where` has an unsupported type. The error does not print the value, which may be a large tensor."""
    if isinstance(where, type):
        raise FlexActError(
            f"where takes names, or a function of a name and a module; got the class {where.__name__}. To choose by "
            f"type, give where=lambda name, module: isinstance(module, {where.__name__})."
        )
    patterns = where if isinstance(where, (Sequence, Set)) else () if callable(where) else [where]
    wrong = [one for one in patterns if not isinstance(one, str)]
    wrong += [where] if isinstance(where, nn.Module) else []
    if wrong:
        raise FlexActError(
            "where must be 'all', 'penultimate', names or patterns as strings, or a function of a name and a module; "
            f"got a {type(wrong[0]).__name__}. Give other arguments by name: config=..., example_inputs=..."
        )


def asked_for(model: nn.Module, where: Where, left_alone: dict[str, str]) -> dict[str, str]:
    """Return what was left alone, without the activations that `where` does not select. Submodules whose forward could
    not be read are kept, because they may contain an activation that `where` selects."""
    modules = dict(model.named_modules(remove_duplicate=False))

    def asked(name: str) -> bool:
        if where in HIDDEN or name not in modules or not is_kind_of_activation(modules[name]):
            return True
        if callable(where):
            return where(name, modules[name])
        return any(_matches(name, pattern) for pattern in _patterns(where))

    return {name: reason for name, reason in left_alone.items() if asked(name)}


def listed(title: str, lines: dict[str, str]) -> list[str]:
    """Return a title and one line per name and reason; an empty list if there are no names."""
    return [f"{title}:", *(f"  {name}: {text}" for name, text in lines.items())] if lines else []
