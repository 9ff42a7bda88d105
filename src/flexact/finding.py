"""Every activation of a model that could become a site.

It is one of three things: a "module" such as nn.ReLU; a "call" such as F.relu(x) in a forward; a "function" kept as an
attribute, such as `self.activation = F.relu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from flexact.activations import function_name, is_activation, is_activation_function, module_of_call
from flexact.tracing import CannotTrace, TracedForward, calls_functions, trace

Kind = Literal["module", "call", "function"]


@dataclass(eq=False)
class Found:
    """An activation that could become a site."""

    kind: Kind
    names: list[str]
    """Where it is, or will be, in the model's tree; several for a shared module."""
    original: nn.Module
    """The module itself, or the one that does what the call does."""
    owner: nn.Module
    """The submodule whose forward or attribute it is; the model for a module."""
    calls: list[int] = field(default_factory=list)
    """Which calls of the owner's traced forward; empty where nothing is traced."""
    function: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class Findings:
    """All of them in definition order, the traced forwards by their owner's id, and what cannot be a site and why."""

    found: list[Found] = field(default_factory=list)
    traced: dict[int, TracedForward] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    def told(self) -> str:
        """What was seen, for an error."""
        lines = [f"  {name}: {type(one.original).__name__}" for one in self.found for name in one.names]
        lines += [f"  {name}: cannot be converted: {reason}" for name, reason in self.left_alone.items()]
        if not lines:
            return (
                "No activation was seen in this model at all: no activation module, no functional call in the source "
                "of a forward. If a forward makes its activation in some other way, put flexact.FlexAct there by hand."
            )
        shown = lines[:40] + ([f"  ... and {len(lines) - 40} more"] if len(lines) > 40 else [])
        return "Seen:\n" + "\n".join(shown)


def find(model: nn.Module, per_call: bool) -> Findings:
    """Look at every submodule once. With per_call, an activation called several times is found once a call."""
    result = Findings()
    shared: dict[int, Found] = {}
    visited: set[int] = set()
    called_in_traced: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        # nn.Identity stands for "nothing here" far more often than for an activation.
        if is_activation(module) and not isinstance(module, nn.Identity):
            if name in called_in_traced:
                continue
            if id(module) in shared and not per_call:
                shared[id(module)].names.append(name)
            else:
                shared[id(module)] = Found("module", [name], module, model)
                result.found.append(shared[id(module)])
        elif id(module) not in visited:
            visited.add(id(module))
            result.found.extend(_functions(name, module))
            _add_calls(result, name, module, per_call, called_in_traced)
            reason = _reason_to_leave(module)
            if reason:
                result.left_alone[name or type(module).__name__] = reason
    return result


def _functions(name: str, module: nn.Module) -> list[Found]:
    found = []
    for attribute, value in vars(module).items():
        original = module_of_call("call_function", value, (), {}) if is_activation_function(value) else None
        if original is not None:
            found.append(Found("function", [_joined(name, attribute)], original, module, function=value))
    return found


def _add_calls(result: Findings, name: str, owner: nn.Module, per_call: bool, called: set[str]) -> None:
    if type(owner).__module__.startswith("torch.nn.") or isinstance(owner, torch.jit.ScriptModule):
        return
    functional = calls_functions(owner)
    children = [child for child, module in owner.named_children() if per_call and is_activation(module)]
    if not functional and not children:
        return
    try:
        forward = trace(owner, per_call)
    except CannotTrace as error:
        # Without the trace a child called several times stays one site, as by default.
        result.left_alone[name or type(owner).__name__] = str(error)
        return
    result.traced[id(owner)] = forward
    groups: dict[Any, Found] = {}
    taken = set(dir(owner)) | set(owner._modules)
    kind: Kind
    for i, call in enumerate(forward.calls):
        key: Any = i if per_call else repr(call.module)
        if key not in groups:
            if call.child is not None and _joined(name, call.child) not in called:
                attribute, kind = call.child, "module"  # the first call keeps the child's own place
                called.add(_joined(name, attribute))
            else:
                attribute, kind = _free_name(call.child or function_name(call.module), taken), "call"
            taken.add(attribute)
            groups[key] = Found(kind, [_joined(name, attribute)], call.module, owner)
        groups[key].calls.append(i)
    result.found.extend(groups.values())


def _reason_to_leave(module: nn.Module) -> str | None:
    """Why an activation of torch's that is no candidate is no site; None for any other module."""
    if type(module).__module__ != "torch.nn.modules.activation" or isinstance(module, _NOT_ELEMENTWISE):
        return None
    has_weights = any(True for _ in module.parameters())
    return f"{type(module).__name__} {'has weights of its own' if has_weights else 'is no candidate'}"


_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)


def _free_name(base: str, taken: set[str]) -> str:
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
