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
    is_kind_of_activation,
    module_of_call,
)
from flexact.surgery.calls import Call, Reading
from flexact.surgery.rewriting import rewritten_class
from flexact.surgery.sources import codes_of

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
    calls: list[Call] = field(default_factory=list)
    """The calls that have to be rewritten for it."""
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
    """All of them in definition order, with a forward's own calls between the children where it makes them; what the
    sources say, by the owner's id; and what cannot be a site and why."""

    found: list[Found] = field(default_factory=list)
    readings: dict[int, Reading] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)

    def rewritten(self, chosen: list[Found]) -> dict[nn.Module, type]:
        """The new type of each submodule that owns a call of the chosen."""
        names: dict[Reading, dict[Call, str]] = {}
        for one in chosen:
            for call in one.calls:
                name = call.child if one.kind == "module" else one.name.rpartition(".")[2]
                names.setdefault(call.reading, {})[call] = str(name)
        return {
            reading.owner: rewritten_class(type(reading.owner), reading.recipe(by_call))
            for reading, by_call in names.items()
        }

    def lines_left(self, chosen: list[Found]) -> set[tuple[str, int]]:
        """The files and lines of the calls that are known and stay what they are."""
        taken = {call for one in chosen for call in one.calls}
        readings = self.readings.values()
        calls = {call for reading in readings for call in (*reading.calls, *reading.unreached)} - taken
        return {line for call in calls for line in call.lines if call.child is None or call.child in vars(call.owner)}

    def told(self) -> str:
        """What was seen, for an error."""
        lines = [f"  {name}: {type(one.original).__name__}" for one in self.found for name in one.names]
        lines += [f"  {name}: cannot be converted: {reason}" for name, reason in self.left_alone.items()]
        if not lines:
            return (
                "No activation was seen in this model at all: no activation module, no call of a function such as "
                "F.relu in the methods behind a forward. If it is called in some other way, as a function from a table "
                "or from elsewhere, make it a module of the model's, or put flexact.FlexAct there by hand."
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
    _leave_what_is_asked_for(search.result, modules)
    return search.result


def _leave_what_is_asked_for(findings: Findings, modules: dict[str, nn.Module]) -> None:
    """Leave an activation alone where a method of a module around it asks for its type, or for all parameters."""
    for one in list(findings.found):
        parts = [name.split(".") for name in one.names if name]
        around = {".".join(path[:i]) for path in parts for i in range(len(path))}
        for name in sorted(around):
            reading = findings.readings.get(id(modules[name]))
            for kind, reason in reading.asked.items() if reading is not None else ():
                if kind is nn.Module or (one.kind == "module" and isinstance(one.original, kind)):
                    told = f"{reason}, so {', '.join(one.names)} stays as it is"
                    findings.left_alone[name or type(modules[name]).__name__] = told
                    findings.found = [other for other in findings.found if other is not one]


def read(model: nn.Module) -> dict[int, Reading]:
    """What the sources behind all forwards say, by the id of the module."""
    modules = [module for module in model.modules() if not is_activation(module) and _is_users(module)]
    known = {id(module) for module in model.modules()}
    readings = {id(module): Reading(module, known) for module in modules}
    waiting = [(module, name) for module in modules for name in ("forward", "__call__")]
    while waiting:
        module, name = waiting.pop(0)
        if id(module) in readings:
            reading = readings[id(module)]
            reading.read(name)
            waiting += reading.foreign
            reading.foreign.clear()
    for reading in readings.values():
        reading.read_the_rest()
    return readings


def _is_users(module: nn.Module) -> bool:
    """Whether a module's type is not one of torch's own, nor one without a source."""
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        return False
    types = [cls for cls in type(module).__mro__ if cls.__module__ != "torch.nn.utils.parametrize"]
    return not f"{types[0].__module__}.".startswith("torch.nn.")


class _Search:
    def __init__(self, model: nn.Module, per_call: bool) -> None:
        self.model = model
        self.per_call = per_call
        self.result = Findings(readings=read(model))
        self._slots: dict[tuple[int, str], Found | None] = {}  # by parent and attribute; None: called several times
        self._shared: dict[int, Found] = {}
        self._visited: set[int] = set()
        self._listed = {one for reading in self.result.readings.values() for one in reading.listed}

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
            calls = self.result.readings[slot[0]].calls if slot[0] in self.result.readings else []
            known.calls += [call for call in calls if call.child == slot[1] and not call.is_plain]

    def look_into(self, name: str, owner: nn.Module, parent: nn.Module | None, place: Place) -> None:
        """Any other module: its own attributes and its own forward."""
        if id(owner) in self._visited:
            return
        self._visited.add(id(owner))
        functions = {attribute: value for attribute, value in vars(owner).items() if is_activation_function(value)}
        reading = self.result.readings.get(id(owner))
        reasons = [reason] if (reason := _reason_to_leave(owner, parent)) is not None else []
        if reading is not None and not reasons:
            calls = self._own_calls(reading, functions)
            reasons += reading.notes
            if calls and reading.obstacle is not None:
                reasons.append(reading.obstacle)
            elif calls and "forward" in vars(owner):
                reasons.append("its forward was replaced on this object alone")
            elif calls and (isinstance(owner, _CONTAINERS) or id(owner) in self._listed):
                reasons.append("its children are gone through one by one, and a site would be one of them")
            else:
                self._add_calls(name, owner, calls, place)
            functions = {key: value for key, value in functions.items() if key not in {call.child for call in calls}}
        if reasons:
            self.result.left_alone[name or type(owner).__name__] = "; ".join(reasons)
        for attribute, function in functions.items():
            original = module_of_call("call_function", function, (), {})
            if original is not None:
                at = (*place, self._own_place(owner, attribute))
                found = Found("function", [_joined(name, attribute)], original, owner, function=function, place=at)
                self.result.found.append(found)

    def _own_calls(self, reading: Reading, functions: dict[str, Callable[..., Any]]) -> list[Call]:
        """The calls that become sites of their own: those of functions, and with per_call those of any attribute that
        is called several times."""
        by_child: dict[str | None, list[Call]] = {}
        for call in reading.calls:
            by_child.setdefault(call.child, []).append(call)
        several = {
            child
            for child, calls in by_child.items()
            if child is None
            or (child in functions and not all(call.is_plain for call in calls))
            or (self.per_call and len(calls) > 1 and child not in reading.values)
        }
        return [call for call in reading.calls if call.child in several]

    def _add_calls(self, name: str, owner: nn.Module, calls: list[Call], place: Place) -> None:
        groups: dict[Any, Found] = {}
        codes = [code for _, scope in self.result.readings[id(owner)].methods() for code in codes_of(scope.code)]
        asked = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
        taken = {*dir(owner), *owner._modules, *asked}  # by hasattr(self, "relu")
        for call in calls:
            key: Any = call if self.per_call else repr(call.module)
            if key not in groups:
                base = function_name(call.module) if call.child is None else call.child.replace(".", "_")
                attribute = _free_name(base, taken)
                taken.add(attribute)
                child = None if call.child is None else _joined(name, call.child)
                groups[key] = Found("call", [_joined(name, attribute)], call.module, owner, child=child)
            groups[key].calls.append(call)
            groups[key].place = (*place, self._own_place(owner, call))
        self.result.found.extend(groups.values())
        for child in {call.child for call in calls} - {None}:
            parent, _, attribute = str(child).rpartition(".")
            self._slots[id(owner.get_submodule(parent)), attribute] = None

    def _own_place(self, owner: nn.Module, call: Call | str) -> tuple[int, int]:
        """Where an owner's own call, or the last one of a function that it keeps, stands among its children: behind
        all that its source calls before it, and behind all there are where that does not say."""
        reading = self.result.readings.get(id(owner))
        order = reading.order if reading is not None else []
        children = list(owner._modules.keys())
        if call not in order:
            return len(children), 1
        at = len(order) - 1 - order[::-1].index(call)
        before = {one.partition(".")[0] for one in order[:at] if isinstance(one, str)}
        return max((i for i, child in enumerate(children) if child in before), default=-1), 1 + at


def _reason_to_leave(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why a module that is or holds an activation can have no site; None for any other module."""
    if isinstance(module, torch.jit.ScriptModule):
        inside = isinstance(parent, torch.jit.ScriptModule)
        return None if inside else "a TorchScript module cannot be changed; convert it before it is scripted"
    if isinstance(module, fx.GraphModule) and any(map(_is_activation_node, module.graph.nodes)):
        return "a torch.fx.GraphModule has the forward of its graph; convert it before it is traced"
    if not is_kind_of_activation(module):
        return None
    if "forward" in vars(module):
        return f"the forward of this {type(module).__name__} was replaced on this object alone"
    has_tensors = is_activation_type(type(module)) or any(True for _ in module.parameters())
    return f"{type(module).__name__} {'has tensors of its own' if has_tensors else 'is no candidate'}"


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_activation_node(node: fx.Node) -> bool:
    kinds = ("call_function", "call_method")
    return node.op in kinds and module_of_call(node.op, node.target, node.args[1:], dict(node.kwargs)) is not None


def _free_name(base: str, taken: set[str]) -> str:
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
