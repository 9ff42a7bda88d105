"""The activations of a model that can become sites.

There are three kinds: a "module" such as nn.ReLU, a "call" such as F.relu(x) in a method, and a "function" that a
module stores, such as `self.activation = F.relu`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from flexact.candidates.recognition import (
    function_name,
    is_activation,
    is_activation_function,
    is_activation_type,
    is_kind_of_activation,
    module_of_call,
    spelling,
)
from flexact.surgery.calls import Call, Reading
from flexact.surgery.fused_site import is_sequential
from flexact.surgery.rewriting import Edit, edited_class, homes
from flexact.surgery.scope import is_new_from, is_unobserved

Kind = Literal["module", "call", "function"]
Place = tuple[float, ...]
"""The position in definition order: the index of the child on each level. A call has the index of the last child that
is called before it, plus one half."""

_NOTHING = (
    "No activation was found in this model: no activation module, and no call of a function such as F.relu in a "
    "forward. If an activation is called in another way, for example through a table of functions, make it a submodule."
)


@dataclass(eq=False)
class Found:
    """An activation that can become a site, or that is left alone; or a submodule whose calls are left alone."""

    kind: Kind
    names: list[str]
    """The names of the site in the model's tree; several for a shared module."""
    original: nn.Module
    """The module itself, or one that computes the same as the call. Of calls that are left alone, the submodule."""
    owner: nn.Module
    """The submodule that makes the call or stores the function; the model for a module."""
    calls: list[Call] = field(default_factory=list)
    """The calls that have to be rewritten."""
    function: Callable[..., Any] | None = None
    child: str | None = None
    """The name of the attribute that is called; `where` can use it for all calls of that attribute."""
    place: Place = ()
    reason: str = ""
    """Why it is left alone; empty if it can become a site."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def answers_to(self) -> list[str]:
        """The names that `where` can use for it."""
        return self.names if self.child is None else [*self.names, self.child]


class Findings:
    """The activations of a model in definition order, and the readings of its submodules.

    per_call: whether each call of an activation is found separately.
    """

    def __init__(self, model: nn.Module, per_call: bool) -> None:
        self.model = model
        self.per_call = per_call
        self.readings: dict[int, Reading] = {}
        """The readings of the submodules' sources, by the id of the submodule."""
        self.places: dict[str, Place] = {"": ()}
        """The positions of the submodules in definition order, by name."""
        self._by_key: dict[Any, Found] = {}
        self._called: set[tuple[int, str]] = set()  # the parents and names of modules whose calls are sites
        for module in model.modules():
            self.readings[id(module)] = Reading(module, self.readings)
        for reading in self.readings.values():
            for name in ("forward", "__call__"):
                reading.check(name)
                reading.read(name)
            reading.check("__iter__")
        scopes = [scope for reading in self.readings.values() for scope in reading.scopes.values()]
        # hasattr(self, "relu") must not find a site, and self.relu = F.relu(x) must not replace one.
        self._taken = set[str]().union(*(scope.strings | scope.stored for scope in scopes))
        self._modules = dict(model.named_modules(remove_duplicate=False))
        first_names = dict(model.named_modules())
        for name, module in self._modules.items():
            path, _, attribute = name.rpartition(".")
            parent = self._modules[path]
            if name:
                children = list(parent._modules.keys())  # TorchScript's cannot be iterated over directly
                self.places[name] = (*self.places[path], children.index(attribute))
            if is_activation(module):
                self._add_module(name, module)
            elif name in first_names and not isinstance(parent, torch.jit.ScriptModule):
                self._look_into(name, module)
        self._leave_conflicts()

    @property
    def found(self) -> list[Found]:
        """The activations that can become sites, in definition order."""
        return [one for one in self.all if not one.reason]

    @property
    def left_alone(self) -> dict[str, str]:
        """The activations that cannot be sites, or the submodules whose calls cannot, and the reason."""
        return {one.name or type(one.original).__name__: one.reason for one in self.all if one.reason}

    @property
    def all(self) -> list[Found]:
        """All activations in definition order."""
        return sorted(self._by_key.values(), key=lambda one: one.place)

    def leave_alone(self, name: str, reason: str, calls: Sequence[Call] = ()) -> None:
        """Record that a submodule is left alone, as an activation or together with the calls that it makes."""
        owner = self._modules.get(name, self.model)
        kind: Kind = "module" if is_kind_of_activation(owner) else "call"
        place = self.places.get(name, ())
        self._by_key["left alone", name] = Found(kind, [name], owner, owner, [*calls], place=place, reason=reason)

    def reading(self, name: str) -> Reading:
        """Return the reading of a submodule."""
        return self.readings[id(self.model.get_submodule(name))]

    def rewritten(self, chosen: list[Found]) -> dict[nn.Module, type]:
        """Return the new type of each submodule that makes one of the chosen calls."""
        edits: dict[nn.Module, list[Edit]] = {}
        for one in chosen:
            for call in one.calls:
                name = call.child if one.kind == "module" else one.name.rpartition(".")[2]
                edits.setdefault(call.reading.owner, []).append(call.edit._replace(child=str(name)))
        return {owner: edited_class(type(owner), own) for owner, own in edits.items()}

    def lines_left(self, chosen: list[Found]) -> set[tuple[str, int, str]]:
        """Return the files, lines and functions (see `spelling`) of the known calls that are not rewritten."""
        calls = {call for reading in self.readings.values() for call in reading.calls}
        calls -= {call for one in chosen for call in one.calls}
        left = [call for call in calls if call.child is None or call.child in vars(call.reading.owner)]
        return {(*line, spelling(type(call.module).__name__)) for call in left for line in call.lines}

    def summary(self) -> str:
        """Return a summary for error messages."""
        lines = [f"  {name}: {type(one.original).__name__}" for one in self.found for name in one.names]
        lines += [f"  {name}: cannot be converted: {reason}" for name, reason in self.left_alone.items()]
        if len(lines) > 40:
            lines[40:] = [f"  ... and {len(lines) - 40} more"]
        return "\n".join(["Found:", *lines]) if lines else _NOTHING

    def _add_module(self, name: str, module: nn.Module) -> None:
        """Add an activation module, or another name of one that was found before."""
        path, _, attribute = name.rpartition(".")
        slot = id(self._modules[path]), attribute
        if slot in self._called:
            return
        new = Found("module", [], module, self.model, place=self.places[name])
        one = self._by_key.setdefault(slot if self.per_call else id(module), new)
        one.names.append(name)
        one.calls += [call for call in self.readings[slot[0]].calls if call.child == attribute and not call.is_plain]

    def _look_into(self, name: str, owner: nn.Module) -> None:
        """Add the calls and the stored functions of a module that is not an activation."""
        reading, prefix, place = self.readings[id(owner)], f"{name}." if name else "", self.places[name]
        functions = {attribute: value for attribute, value in vars(owner).items() if is_activation_function(value)}
        # The calls that become sites of their own: those of functions, and with per_call those of any attribute that is
        # called several times.
        not_plain = {call.child for call in reading.calls if not call.is_plain} - reading.used_otherwise
        apart = {None, *(functions.keys() & not_plain)}
        if self.per_call:
            count = Counter(call.child for call in reading.calls)
            apart |= {child for child in count if count[child] > 1} - reading.used_otherwise
        calls = [call for call in reading.calls if call.child in apart]
        reasons = [f"it calls {function}, which is scripted" for function in sorted(reading.scripted)]
        reason = _reason_to_leave(owner) or (reading.obstacle() if calls else None)
        if reason is None:
            self._add_calls(prefix, reading, calls, place)
        else:
            reasons.append(reason)
        if reasons:
            self.leave_alone(name, "; ".join(reasons), [] if reason is None else calls)
        for attribute, function in functions.items():
            original = module_of_call(function, (), {})
            at = (*place, reading.places.get(attribute, len(owner._modules)))
            if original is not None and attribute not in apart:
                is_asked = attribute in reading.used_otherwise
                reason = "its owner uses this function other than by calling it with one argument" * is_asked
                names = [prefix + attribute]
                one = Found("function", names, original, owner, function=function, place=at, reason=reason)
                self._by_key[owner, attribute] = one

    def _add_calls(self, prefix: str, reading: Reading, calls: list[Call], place: Place) -> None:
        owner = reading.owner
        taken = self._taken.union(dir(owner))
        for call in calls:
            key: Any = call if self.per_call else (owner, "call", repr(call.module))
            if key not in self._by_key:
                base = function_name(call.module) if call.child is None else call.child.replace(".", "_")
                names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(1)))
                attribute = next(name for name in names if name not in taken)
                taken.add(attribute)
                child = None if call.child is None else prefix + call.child
                self._by_key[key] = Found("call", [prefix + attribute], call.module, owner, child=child)
            self._by_key[key].calls.append(call)
            self._by_key[key].place = (*place, call.place)
            if call.child is not None:
                parent, _, attribute = call.child.rpartition(".")
                self._called.add((id(owner.get_submodule(parent)), attribute))

    def _is_seen(self, name: str) -> bool:
        """Return whether other code may read the tensor that an in-place module overwrites, in a call that is not
        rewritten."""
        path, _, attribute = name.rpartition(".")
        module, parent = self._modules[name], self._modules[path]
        calls = [call for reading in self.readings.values() for call in reading.calls if call.calls(module)]
        if any(call.child != attribute and not call.is_plain for call in calls):
            return True  # a call in a class other than the parent's
        if is_sequential(parent):
            grandparent, _, own = path.rpartition(".")
            is_listed = (
                own in self.readings[id(self._modules[grandparent])].used_otherwise
                or self.readings[id(parent)].is_listed
            )
            return is_listed or not self._is_new(name)
        return not calls and (
            isinstance(parent, (nn.ModuleList, nn.ModuleDict)) or bool(self.readings[id(parent)].scopes)
        )

    def _is_new(self, name: str) -> bool:
        """Return whether nothing else holds the input of a module."""
        path, _, attribute = name.rpartition(".")
        parent = self._modules[path]
        if not is_sequential(parent) or not name:
            scopes = self.readings[id(parent)].scopes.values() if name else ()
            calls = [(scope, call) for scope in scopes for call in scope.calls_of(self._modules[name])]
            return bool(calls) and all(is_unobserved(scope, call, call.args[0]) for scope, call in calls)
        for module in reversed(list(parent)[: list(parent._modules).index(attribute)]):
            if module._forward_hooks:  # they may keep its result
                return False
            if is_new_from(module) or any(True for _ in module.parameters()):
                return True
        return self._is_new(path)

    def _leave_conflicts(self) -> None:
        """Leave an activation alone if a method of an enclosing module depends on its type or on all parameters, or if
        other code may see that it works in place."""
        for one in self.found:
            is_in_place = one.kind == "module" and getattr(one.original, "inplace", False)
            if is_in_place and any(name and self._is_seen(name) for name in one.names):
                one.reason = "it works in place, and other code may read its input; use inplace=False"
            rewritten = {homes(type(call.reading.owner))[0] for call in one.calls}
            parts = [name.split(".") for name in one.names if name]
            around = {".".join(path[:i]) for path in parts for i in range(len(path) + (one.kind == "module"))}
            for name in sorted(around):
                for kind, reason in self.readings[id(self._modules[name])].conflicts.items():
                    is_swapped = one.kind == "module" and isinstance(one.original, kind)
                    if kind is nn.Module or is_swapped or kind in rewritten:
                        one.reason = reason


def _reason_to_leave(module: nn.Module) -> str | None:
    """Return why a module that is or contains an activation cannot have a site; None for any other module."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module cannot be changed; convert it before it is scripted"
    if isinstance(module, fx.GraphModule) and any(map(_is_activation_node, module.graph.nodes)):
        return "the forward of a torch.fx.GraphModule is generated from its graph; convert it before it is traced"
    if not is_kind_of_activation(module):
        return None
    if "forward" in vars(module):
        return f"the forward of this {type(module).__name__} was replaced on this instance only"
    has_tensors = is_activation_type(type(module)) or any(True for _ in module.parameters())
    return f"{type(module).__name__} {'has learnable parameters' if has_tensors else 'is not a candidate'}"


def _is_activation_node(node: fx.Node) -> bool:
    kinds = ("call_function", "call_method")
    return node.op in kinds and module_of_call(node.target, node.args[1:], dict(node.kwargs)) is not None
