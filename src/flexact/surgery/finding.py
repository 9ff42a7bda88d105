"""The activations of a model that can become sites.

There are three kinds: a "module" such as nn.ReLU, a "call" such as F.relu(x) in a method, and a "function" that a
module stores, such as `self.activation = F.relu`.
"""

from __future__ import annotations

import itertools
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
from flexact.surgery.rewriting import Edit

Kind = Literal["module", "call", "function"]
Place = tuple[float, ...]
"""The position in definition order: the index of a child on each level; a call is half a step behind the last child
that is called before it."""


_NOTHING = (
    "No activation was found in this model: no activation module, and no call of a function such as F.relu in a "
    "forward. If an activation is called in another way, for example through a table of functions, make it a submodule."
)


@dataclass(eq=False)
class Found:
    """An activation that can become a site."""

    kind: Kind
    names: list[str]
    """The names of the site in the model's tree; several for a shared module."""
    original: nn.Module
    """The module itself, or one that computes the same as the call."""
    owner: nn.Module
    """The submodule that makes the call or stores the function; the model for a module."""
    calls: list[Call] = field(default_factory=list)
    """The calls that have to be rewritten."""
    function: Callable[..., Any] | None = None
    child: str | None = None
    """The name of the attribute that is called; `where` can use it for all calls of that attribute."""
    place: Place = ()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def answers_to(self) -> list[str]:
        """The names that `where` can use for it."""
        return self.names if self.child is None else [*self.names, self.child]


@dataclass
class Findings:
    """The activations of a model in definition order, and what was learned about its submodules."""

    found: list[Found] = field(default_factory=list)
    readings: dict[int, Reading] = field(default_factory=dict)
    """What the sources say, by the id of the submodule."""
    left_alone: dict[str, str] = field(default_factory=dict)
    """The submodules whose activations cannot be sites, and the reason."""

    def rewritten(self, chosen: list[Found]) -> dict[nn.Module, type]:
        """Return the new type of each submodule that makes one of the chosen calls."""
        edits: dict[Reading, dict[str, list[Edit]]] = {}
        for one in chosen:
            for call in one.calls:
                name = call.child if one.kind == "module" else one.name.rpartition(".")[2]
                own = edits.setdefault(call.reading, {}).setdefault(call.method, [])
                own.append(call.edit._replace(child=str(name)))
        return {reading.owner: reading.rewritten(type(reading.owner), own) for reading, own in edits.items()}

    def lines_left(self, chosen: list[Found]) -> set[tuple[str, int]]:
        """Return the files and lines of the known calls that are not rewritten."""
        calls = {call for reading in self.readings.values() for call in reading.calls}
        calls -= {call for one in chosen for call in one.calls}
        return {
            line
            for call in calls
            for line in call.lines
            if call.child is None or call.child in vars(call.reading.owner)
        }

    def told(self) -> str:
        """Return a summary for error messages."""
        lines = [f"  {name}: {type(one.original).__name__}" for one in self.found for name in one.names]
        lines += [f"  {name}: cannot be converted: {reason}" for name, reason in self.left_alone.items()]
        if len(lines) > 40:
            lines[40:] = [f"  ... and {len(lines) - 40} more"]
        return "\n".join(["Found:", *lines]) if lines else _NOTHING


def find(model: nn.Module, per_call: bool) -> Findings:
    """Find all activations. With per_call, each call of an activation is found separately."""
    search = _Search(model, per_call)
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[str, Place] = {}
    for name, module in modules.items():
        parent, _, attribute = name.rpartition(".")
        places[name] = (*places[parent], list(modules[parent]._modules.keys()).index(attribute)) if name else ()
        if is_activation(module):
            search.add_module(name, module, (id(modules[parent]) if name else 0, attribute), places[name])
        else:
            search.look_into(name, module, modules[parent] if name else None, places[name])
    search.result.found.sort(key=lambda one: one.place)
    _leave_conflicts(search.result, modules)
    return search.result


def _leave_conflicts(findings: Findings, modules: dict[str, nn.Module]) -> None:
    """Leave an activation alone if a method of a module around it depends on its type or on all parameters."""
    for one in list(findings.found):
        parts = [name.split(".") for name in one.names if name]
        around = {".".join(path[:i]) for path in parts for i in range(len(path))}
        for name in sorted(around):
            reading = findings.readings.get(id(modules[name]))
            for kind, reason in reading.conflicts.items() if reading is not None else ():
                if kind is nn.Module or (one.kind == "module" and isinstance(one.original, kind)):
                    told = f"{reason}, so {', '.join(one.names)} is left as it is"
                    findings.left_alone[name or type(modules[name]).__name__] = told
                    findings.found = [other for other in findings.found if other is not one]


def _has_source(module: nn.Module) -> bool:
    """Return whether a module's methods are the user's: not those of torch.nn, of a graph or of TorchScript."""
    if is_activation(module) or isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        return False
    own = next(cls for cls in type(module).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")
    return not f"{own.__module__}.".startswith("torch.nn.")


class _Search:
    def __init__(self, model: nn.Module, per_call: bool) -> None:
        self.model = model
        self.per_call = per_call
        readings = {id(module): Reading(module) for module in model.modules() if _has_source(module)}
        waiting = [use for reading in readings.values() for use in reading.foreign]
        for module, name in waiting:  # grows meanwhile
            if (reading := readings.get(id(module))) is not None:
                reading.foreign.clear()
                reading.check(name)
                waiting += reading.foreign
        self.result = Findings(readings=readings)
        self._slots: dict[tuple[int, str], Found | None] = {}  # by parent and attribute; None: its calls were found
        self._shared: dict[int, Found] = {}
        self._visited: set[int] = set()
        self._listed = {one for reading in readings.values() for one in reading.listed}

    def add_module(self, name: str, module: nn.Module, slot: tuple[int, str], place: Place) -> None:
        """Add an activation module, or another name of one that was found before."""
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
        """Add the calls and the stored functions of any other module."""
        if id(owner) in self._visited:
            return
        self._visited.add(id(owner))
        functions = {attribute: value for attribute, value in vars(owner).items() if is_activation_function(value)}
        reading = self.result.readings.get(id(owner))
        reasons = [reason] if (reason := _reason_to_leave(owner, parent)) is not None else []
        if reading is not None and not reasons:
            calls = self._own_calls(reading, functions)
            reasons = [f"it calls {function}, which is scripted" for function in sorted(reading.scripted)]
            if calls and (obstacle := self._obstacle(reading)) is not None:
                reasons.append(obstacle)
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

    def _obstacle(self, reading: Reading) -> str | None:
        """Return why the methods of a module must not be rewritten."""
        owner = reading.owner
        if reading.obstacle is None and "forward" in vars(owner):
            return "its forward was replaced on this object alone"
        if isinstance(owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or id(owner) in self._listed:
            return "its children are iterated over, and a site would be one of them"
        return reading.obstacle

    def _own_calls(self, reading: Reading, functions: dict[str, Callable[..., Any]]) -> list[Call]:
        """Return the calls that become sites of their own: those of functions, and with per_call those of any
        attribute that is called several times."""
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
        taken = {*dir(owner), *owner._modules}
        for scope in self.result.readings[id(owner)].scopes.values():
            taken |= scope.strings  # hasattr(self, "relu") must not find a site
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

    def _own_place(self, owner: nn.Module, call: Call | str) -> float:
        """Return the position of a call, or of the last call of a stored function, among the owner's children."""
        reading, children = self.result.readings.get(id(owner)), list(owner._modules.keys())
        if reading is None or call not in reading.order:
            return len(children)
        before = reading.order[: -1 - reading.order[::-1].index(call)]
        names = {one.partition(".")[0] for one in before if isinstance(one, str)}
        return max((i for i, child in enumerate(children) if child in names), default=-1) + 0.5


def _reason_to_leave(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Return why a module that is or contains an activation cannot have a site; None for any other module."""
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
    return f"{type(module).__name__} {'has tensors of its own' if has_tensors else 'is not a candidate'}"


def _is_activation_node(node: fx.Node) -> bool:
    kinds = ("call_function", "call_method")
    return node.op in kinds and module_of_call(node.op, node.target, node.args[1:], dict(node.kwargs)) is not None


def _free_name(base: str, taken: set[str]) -> str:
    names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(1)))
    return next(name for name in names if name not in taken)


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
