"""Every activation of a model that could become a site.

It is one of three things: a "module" such as nn.ReLU; a "call" such as F.relu(x) in a forward; a "function" kept as an
attribute, such as `self.activation = F.relu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from flexact.activations import (
    function_name,
    is_activation,
    is_activation_function,
    is_activation_type,
    module_of_call,
)
from flexact.sources import made_inline, may_call_again, names_activations
from flexact.tracing import CannotTrace, TracedForward, trace

Kind = Literal["module", "call", "function"]
Place = tuple[tuple[int, int], ...]
"""Where something stands in the order of definition: level by level, the number of a child, or that of the last child
before a forward's own call, and then 0 for the child itself and 1, 2, ... for the calls behind it."""


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
    """For a "call": which calls of the owner's traced forward."""
    function: Callable[..., Any] | None = None
    child: str | None = None
    """The name of the attribute whose call this is; `where` can use it for all of that attribute's calls."""
    place: Place = ()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def answers_to(self) -> list[str]:
        """The names by which `where` can ask for it."""
        return self.names if self.child is None else [*self.names, self.child]


@dataclass
class Findings:
    """All of them in definition order, with a forward's own calls between the children where it makes them; the traced
    forwards by their owner's id; and what cannot be a site and why."""

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
    search = _Search(model, per_call)
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[str, Place] = {}
    for name, module in modules.items():
        parent, _, attribute = name.rpartition(".")
        places[name] = (*places[parent], (list(modules[parent]._modules.keys()).index(attribute), 0)) if name else ()
        if is_activation(module):
            search.add_module(name, module, (id(modules[parent]) if name else 0, attribute), places[name])
        else:
            search.look_into(name, module, modules[parent] if name else None, places[name])
    search.result.found.sort(key=lambda one: one.place)
    return search.result


class _Search:
    def __init__(self, model: nn.Module, per_call: bool) -> None:
        self.model = model
        self.per_call = per_call
        self.result = Findings()
        self._slots: dict[tuple[int, str], Found | None] = {}  # by parent and attribute; None: called several times
        self._shared: dict[int, Found] = {}
        self._visited: set[int] = set()

    def add_module(self, name: str, module: nn.Module, slot: tuple[int, str], place: Place) -> None:
        """An activation module; one that was found before, by another name, gets this name too."""
        if slot not in self._slots:
            found = None if self.per_call else self._shared.get(id(module))
            if found is None:
                found = Found("module", [], module, self.model, place=place)
                self.result.found.append(found)
            self._slots[slot] = self._shared[id(module)] = found
        known = self._slots[slot]
        if known is not None:
            known.names.append(name)

    def look_into(self, name: str, owner: nn.Module, parent: nn.Module | None, place: Place) -> None:
        """Any other module: its own attributes and its own forward."""
        if id(owner) in self._visited:
            return
        self._visited.add(id(owner))
        functions = {attribute: value for attribute, value in vars(owner).items() if is_activation_function(value)}
        try:
            reason = _reason_to_leave(owner, parent)
            if reason is not None:
                raise CannotTrace(reason)
            if not type(owner).__module__.startswith("torch.nn."):
                functions = self._look_into_forward(name, owner, functions, place)
        except CannotTrace as error:
            self.result.left_alone[name or type(owner).__name__] = str(error)
        for attribute, function in functions.items():
            original = module_of_call("call_function", function, (), {})
            if original is not None:
                at = (*place, self._own_place(owner, attribute))
                found = Found("function", [_joined(name, attribute)], original, owner, function=function, place=at)
                self.result.found.append(found)

    def _look_into_forward(
        self, name: str, owner: nn.Module, functions: dict[str, Callable[..., Any]], place: Place
    ) -> dict[str, Callable[..., Any]]:
        """Find the calls of a forward. Returns the function attributes that are not found call by call."""
        made = made_inline(owner)
        if made is not None:
            raise CannotTrace(f"its forward makes a new {made} each time it runs; make it once, in __init__")
        names_some = _calls_some(owner.graph) if isinstance(owner, fx.GraphModule) else names_activations(owner)
        attributes = {key for key, child in owner._modules.items() if child is not None and is_activation(child)}
        attributes |= functions.keys()
        if not names_some and not (self.per_call and attributes and may_call_again(owner, attributes)):
            return functions
        if isinstance(owner, fx.GraphModule):
            raise CannotTrace("a torch.fx.GraphModule has the forward of its graph; convert it before it is traced")
        try:
            forward = trace(owner, self.per_call)
        except CannotTrace as error:
            alone = "" if names_some else "; so each of its activations is one site, however often it is called"
            raise CannotTrace(f"{error}{alone}") from None
        self.result.traced[id(owner)] = forward
        groups: dict[Any, Found] = {}
        taken = set(dir(owner)) | set(owner._modules)
        for i, call in enumerate(forward.calls):
            key: Any = i if self.per_call else repr(call.module)
            if key not in groups:
                base = function_name(call.module) if call.child is None else call.child.replace(".", "_")
                attribute = _free_name(base, taken)
                taken.add(attribute)
                child = None if call.child is None else _joined(name, call.child)
                groups[key] = Found("call", [_joined(name, attribute)], call.module, owner, child=child)
            groups[key].calls.append(i)
            groups[key].place = (*place, self._own_place(owner, call.nodes[-1]))
        self.result.found.extend(groups.values())
        several = {call.child: call.module for call in forward.calls if call.child is not None}
        for parent in owner.modules():
            for attribute, child_module in parent._modules.items():
                if any(child_module is module for module in several.values()):
                    self._slots[id(parent), attribute] = None
        return {attribute: function for attribute, function in functions.items() if attribute not in several}

    def _own_place(self, owner: nn.Module, call: fx.Node | str) -> tuple[int, int]:
        """Where an owner's own call, or the last one of a function that it keeps, stands among its children: behind
        all that its eval forward calls before it, and behind all there are where the forward was not traced."""
        forward = self.result.traced.get(id(owner))
        children = list(owner._modules.keys())
        nodes = list(forward.graphs[-1].nodes) if forward is not None else []
        at = [i for i, node in enumerate(nodes) if node is call or (node.op == "call_module" and node.target == call)]
        if not at:
            return len(children), 1
        before = {str(node.target).partition(".")[0] for node in nodes[: at[-1]] if node.op == "call_module"}
        return max((i for i, child in enumerate(children) if child in before), default=-1), 1 + at[-1]


def _reason_to_leave(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why a module that is or holds an activation can have no site; None for any other module."""
    if isinstance(module, torch.jit.ScriptModule):
        inside = isinstance(parent, torch.jit.ScriptModule)
        return None if inside else "a TorchScript module cannot be changed; convert it before it is scripted"
    if not is_kind_of_activation(module):
        return None
    if "forward" in vars(module):
        return f"the forward of this {type(module).__name__} was replaced on this object alone"
    has_tensors = is_activation_type(type(module)) or any(True for _ in module.parameters())
    return f"{type(module).__name__} {'has tensors of its own' if has_tensors else 'is no candidate'}"


def is_kind_of_activation(module: nn.Module) -> bool:
    """Whether a module is an elementwise activation of torch, timm or transformers, be it a candidate or not."""
    return type(module).__module__ in _HOMES_OF_ACTIVATIONS and not isinstance(module, _NOT_ELEMENTWISE)


_HOMES_OF_ACTIVATIONS = (
    "torch.nn.modules.activation",
    "timm.layers.activations",
    "timm.layers.activations_me",
    "transformers.activations",
)
_NOT_ELEMENTWISE = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)


def _calls_some(graph: fx.Graph) -> bool:
    """Whether a graph calls functional activations; its source writes the call of a deep child as that of a method."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    return any(module_of_call(node.op, node.target, node.args[1:], dict(node.kwargs)) is not None for node in calls)


def _free_name(base: str, taken: set[str]) -> str:
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
