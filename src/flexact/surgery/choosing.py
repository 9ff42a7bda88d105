"""Which models can be converted, which of their activations become sites, and why the others do not."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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
        given = getattr(where, "__name__", "the function") if callable(where) else repr(where)
        lines = listed("Skipped; to convert one of these, name it in where", choice.skipped)
        raise FlexActError("\n".join([f"no activation matched where={given}. {choice.findings.summary()}", *lines]))


def _chosen(findings: Findings, where: Where, seen: dict[int, Seen] | None, skipped: dict[str, str]) -> list[Found]:
    """Return what `where` selects, in execution order if it is known, otherwise in definition order."""
    found = [one for one in findings.found if one.name not in skipped]
    if seen is not None:
        found = sorted(found, key=lambda one: seen[id(one)].first if id(one) in seen else math.inf)
    if where == "all":
        return found
    if where == "penultimate":
        if seen is not None:
            found = sorted((one for one in found if id(one) in seen), key=lambda one: seen[id(one)].last)
        return found[-1:]
    if not callable(where):
        _check_patterns(findings, found, _patterns(where))
    return [one for one in found if _selects(where, one)]


def _check_patterns(findings: Findings, found: list[Found], patterns: list[str]) -> None:
    """Raise unless there are patterns, and each of them matches an activation."""
    if not patterns:
        raise FlexActError(f"where is empty. {findings.summary()}")
    for pattern in patterns:
        if not any(_selects(pattern, one) for one in found):
            hint = suggestion(pattern, [*HIDDEN, *(name for one in found for name in one.answers_to)])
            hint += " Functions to pick from are given by name: candidates=..." * (pattern in known_names())
            raise FlexActError(f"no activation matched where={pattern!r}{hint} {findings.summary()}")


def _selects(where: Where, one: Found) -> bool:
    if callable(where):
        return any(where(name, one.original) for name in one.answers_to)
    names = [(name, pattern) for name in one.answers_to for pattern in _patterns(where)]
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for name, pattern in names)


def _patterns(where: str | Sequence[str]) -> list[str]:
    return [where] if isinstance(where, str) else list(where)


def check_convertible(model: nn.Module, verb: str) -> None:
    """Raise if a model cannot be converted."""
    if not isinstance(model, nn.Module):
        raise FlexActError(f"{verb} needs a torch.nn.Module; got {type(model).__name__}.")
    if any(isinstance(module, FlexAct) for module in model.modules()):
        raise FlexActError(
            "this model has FlexAct sites already, and a model can be converted only once. To choose other sites, "
            "convert a newly built model."
        )
    for is_unsuitable, what in (
        (isinstance(model, torch.jit.ScriptModule), "a TorchScript module"),
        (isinstance(model, nn.parallel.DistributedDataParallel), "wrapped in DistributedDataParallel"),
        (isinstance(model, nn.DataParallel), "wrapped in DataParallel"),
        (fsdp_modules(model, "FSDPModule", "FullyShardedDataParallel"), "sharded by FSDP"),
        (hasattr(model, "_orig_mod") or model._compiled_call_impl, "compiled already"),
    ):
        if is_unsuitable:
            raise FlexActError(
                f"this model is {what}; convert the plain model first, and wrap, shard or compile what convert returns."
            )


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


def asked_for(findings: Findings, where: Where) -> dict[str, str]:
    """Return what is left alone, and the reason, without the activation modules that `where` does not select. Calls
    that are left alone are always included, because it is not known whether `where` selects them."""
    left = [one for one in findings.all if one.reason]
    return {
        one.name or type(one.original).__name__: one.reason
        for one in left
        if where in HIDDEN or one.kind != "module" or _selects(where, one)
    }


def listed(title: str, lines: dict[str, str]) -> list[str]:
    """Return a title and one line per name and reason; an empty list if there are no names."""
    return [f"{title}:", *(f"  {name}: {text}" for name, text in lines.items())] if lines else []
