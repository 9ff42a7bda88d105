"""The activation calls in the methods behind a module's forward, as their source has them.

Common ways of writing such a call are understood. Others are left as they are, and named when they run (see
`flexact.surgery.watching`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexact.activations import (
    ELEMENTWISE,
    SIGMOIDS,
    function_name,
    is_activation,
    is_activation_function,
    is_activation_type,
    is_method,
    module_of_call,
)
from flexact.surgery.in_place import is_unseen
from flexact.surgery.rewriting import Edit, Recipe, Revision, function_of, homes, merged, place_of, tensor_of
from flexact.surgery.scope import UNKNOWN, Scope
from flexact.surgery.sources import CannotRewrite, codes_of, definition_of, digest, rewrapped

_LISTS_CHILDREN = {"_modules", "children", "modules", "named_children", "named_modules"}


class Method(NamedTuple):
    """A method of one of the classes behind a module, and its name in a subclass that rewrites it."""

    home: int
    attribute: str
    name: str


@dataclass(eq=False)
class Call:
    """One activation call of a method."""

    reading: Reading
    method: Method
    edit: Edit
    module: nn.Module
    """The module that does what the call does."""
    child: str | None
    """The attribute that is called, where it is one: a child module, or a function that the module keeps."""
    is_plain: bool
    """Whether it has the tensor as its only argument, so that a site can be called in its place."""

    @property
    def owner(self) -> nn.Module:
        return self.reading.owner

    @property
    def lines(self) -> Iterator[tuple[str, int]]:
        """The lines of a file on which it stands."""
        _, function = function_of(type(self.owner), self.method.home, self.method.attribute)
        first, (start, _, end, _) = function.__code__.co_firstlineno, self.edit.place
        return ((function.__code__.co_filename, first + line) for line in range(start, end + 1))


class _Link(NamedTuple):
    """A call such as `super().forward(x)`."""

    caller: Method
    edit: Edit
    method: Method


class Reading:
    """What the source behind a module's forward says.

    known: the ids of all modules of the model.
    """

    def __init__(self, owner: nn.Module, known: set[int]) -> None:
        self.owner = owner
        self.calls: list[Call] = []
        self.order: list[Call | str] = []
        """The calls, and the names of the children that are called or used, in the order of the source."""
        self.values: set[str] = set()
        """The children that are used without a call."""
        self.obstacle: str | None = _obstacle_to_subclass(type(owner))
        """Why the module's type must stay as it is."""
        self.foreign: list[tuple[nn.Module, str]] = []
        """Methods of other modules than forward that this one calls."""
        self.listed: set[int] = set()
        """The ids of modules whose children are gone through, so that a new one among them would be, too."""
        self.asked: dict[type, str] = {}
        """The types of modules below this one that no site may take the place of, and why."""
        self.notes: list[str] = []
        """What is left alone, and why."""
        self.unreached: list[Call] = []
        """The calls of functions in methods that forward does not call."""
        self.known = known
        self._homes = homes(type(owner))
        self._links: list[_Link] = []
        self._digests: dict[Method, str] = {}
        self._edited = {
            (revision.home, revision.attribute, edit.place): edit
            for revision in getattr(type(owner), "flexact_recipe", ())
            for edit in revision.edits
        }

    def read(self, name: str) -> None:
        """Read a method and what it calls."""
        if (method := self._method(name)) is not None:
            self._read(method)

    def read_the_rest(self) -> None:
        """Read the methods that forward does not call, as far as the source tells."""
        other = Reading(self.owner, self.known)
        for home in self._homes:
            if home is not nn.Module and not home.__module__.startswith("torch."):
                for name, value in vars(home).items():
                    if isinstance(value, types.FunctionType) and not name.startswith("__"):
                        other.read(name)
        self.unreached = [call for call in other.calls if call.child is None and call.method not in self._digests]
        names = {call.method.attribute for call in self.unreached if function_name(call.module) not in SIGMOIDS}
        self.notes += [f"its {name} has activations, and forward does not call it" for name in sorted(names)]

    def recipe(self, names: dict[Call, str]) -> Recipe:
        """How to rewrite the methods so that these calls are calls of the children of these names."""
        edits: dict[Method, list[Edit]] = {}
        for call, name in names.items():
            edits.setdefault(call.method, []).append(call.edit._replace(child=name))
        return self.recipe_of(type(self.owner), edits)

    def recipe_of(self, first: type, edits: dict[Method, list[Edit]]) -> Recipe:
        """The same for any edits of a type, by method, and for whoever calls such a method by super()."""
        waiting = list(edits)
        while waiting:
            method = waiting.pop()
            for link in self._links:
                if link.method == method and link.edit not in edits.get(link.caller, []):
                    edits.setdefault(link.caller, []).append(link.edit)
                    waiting.append(link.caller)
        revisions = [
            Revision(method.name, method.home, method.attribute, self._digests[method], tuple(found))
            for method, found in edits.items()
        ]
        return merged(first, revisions)

    def methods(self) -> Iterable[tuple[Method, Scope]]:
        """The methods that were read."""
        for method in self._digests:
            _, function = function_of(type(self.owner), method.home, method.attribute)
            yield method, Scope(function, definition_of(function), self.owner)

    def _method(self, name: str, behind: int = -1) -> Method | None:
        """The method of a name; behind: in a class behind this one, as super() has it."""
        for home, cls in enumerate(self._homes):
            if home > behind and name in vars(cls):
                return Method(home, name, name if behind < 0 else f"flexact_{home}_{name}")
        return None

    def _read(self, method: Method) -> None:
        if method in self._digests or self._homes[method.home] is nn.Module:
            return
        try:
            value, function = function_of(type(self.owner), method.home, method.attribute)
            self.asked |= dict.fromkeys(_types_asked_for(function), f"{method.attribute} names their type")
            definition = definition_of(function)
            rewrapped(value, function, function)
        except CannotRewrite:
            return
        self._digests[method] = digest(definition)
        scope = Scope(function, definition, self.owner)
        if scope.asks_for_its_type():
            self.obstacle = f"its {method.attribute} asks for the type of the module, which a rewritten one changes"
        if scope.me and re.search(rf"(?<!next\(){scope.me}\.(named_)?parameters\(", ast.unparse(definition)):
            self.asked[nn.Module] = f"{method.attribute} goes through the parameters, and a site has some"
        _Reader(self, scope, method).read()


class _Reader:
    """Reads one method."""

    def __init__(self, reading: Reading, scope: Scope, method: Method) -> None:
        self.reading = reading
        self.scope = scope
        self.method = method

    def read(self) -> None:
        for one in ast.walk(self.scope.definition):
            holder = self.scope.value(one.value) if isinstance(one, ast.Attribute) else UNKNOWN
            if isinstance(one, ast.Attribute) and one.attr in _LISTS_CHILDREN:
                self.reading.listed.add(id(holder))
            elif isinstance(holder, nn.Module) and is_activation(holder):
                self.reading.asked[type(holder)] = f"{self.method.attribute} has {ast.unparse(one)}"
        body: Any = self.scope.definition.body
        for node in body if isinstance(body, list) else [body]:
            self._visit(node)

    def _visit(self, node: ast.AST) -> None:
        """In the order of evaluation: what a node needs comes before it."""
        if isinstance(node, ast.Call):
            self._visit_call(node)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            if isinstance(node.ctx, ast.Load):
                self._visit_value(node)
        elif isinstance(node, (ast.If, ast.IfExp)):
            self._visit(node.test)
            truth = self.scope.truth(node.test)  # what cannot run now stays as it is, should it run later
            for branch in (node.body if truth is not False else [], node.orelse if truth is not True else []):
                for statement in branch if isinstance(branch, list) else [branch]:
                    self._visit(statement)
        else:
            for child in ast.iter_child_nodes(node):
                self._visit(child)

    def _visit_value(self, node: ast.Attribute | ast.Name) -> None:
        """A name that is not called."""
        value, path = self.scope.value(node), self._own_path(node)
        if path:
            self.reading.values.add(path)
            self.reading.order.append(path)
        elif isinstance(value, (property, functools.cached_property, types.MethodType)):
            self._visit_method(value, node)
        elif isinstance(node, ast.Attribute) and value is UNKNOWN:
            self._visit(node.value)

    def _visit_call(self, node: ast.Call) -> None:
        value, path = self.scope.value(node.func), self._own_path(node.func)
        above = self._above(node)
        if value is UNKNOWN and above is None:
            self._visit(node.func)
        for argument in [*node.args, *node.keywords]:
            self._visit(argument)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if above is not None:
            self.reading._read(above)
            edit = Edit("super", place_of(node, self.scope.function), above.name)
            self.reading._links.append(_Link(self.method, edit, above))
        elif path and isinstance(value, nn.Module):
            self.reading.order.append(path)
            if is_activation(value):
                self._activation(node, value, path)
        elif is_activation_function(value):
            self._activation(node, value, path)
            self.reading.order += [path] if path else []
        elif is_method(name) and (getattr(Tensor, name) is value or self._is_of_tensor(node, value)):
            self._activation(node, name, None)
        elif isinstance(value, torch.jit.ScriptFunction):
            if any(f"aten::{name}" in str(value.graph) for name in ELEMENTWISE):
                self.reading.notes.append(f"it calls {ast.unparse(node.func)}, which is scripted")
        elif value is not UNKNOWN:
            self._visit_method(value, node.func)

    def _own_path(self, node: ast.AST) -> str | None:
        """The path to a submodule, or to a function that the module keeps."""
        path, owner = self.scope.path(node), self.reading.owner
        if path and (path.partition(".")[0] in owner._modules or is_activation_function(vars(owner).get(path))):
            return path
        return None

    def _is_of_tensor(self, node: ast.Call, value: Any) -> bool:
        """Whether `x.relu()` is the method of a tensor, as far as the source tells."""
        if not isinstance(node.func, ast.Attribute) or node.args or node.keywords:
            return False
        holder = self.scope.value(node.func.value)
        return isinstance(holder, Tensor) or (holder is UNKNOWN and value is UNKNOWN)

    def _above(self, node: ast.Call) -> Method | None:
        """The method that `super().forward` is."""
        func = node.func
        if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Call):
            return None
        if self.scope.value(func.value.func) is not super:
            return None
        named = self.scope.value(func.value.args[0]) if func.value.args else self.scope.home
        known = self.reading._homes
        return self.reading._method(self.scope.mangled(func.attr), known.index(named)) if named in known else None

    def _visit_method(self, value: Any, node: ast.AST) -> None:
        """A method of this module, or of another one of the model."""
        holder = self.scope.value(node.value) if isinstance(node, ast.Attribute) else UNKNOWN
        name = self.scope.mangled(node.attr) if isinstance(node, ast.Attribute) else ""
        is_bound = not isinstance(value, types.FunctionType) and getattr(value, "__self__", holder) is holder
        if not isinstance(holder, nn.Module) or not is_bound or name in vars(holder):
            return
        if holder is self.reading.owner:
            self.reading.read(name)
        elif id(holder) in self.reading.known and name != "forward" and not is_activation(holder):
            self.reading.foreign.append((holder, name))

    def _activation(self, node: ast.Call, target: Any, child: str | None) -> None:
        """An activation's call, which can be a site's, unless nothing else can stand in its place."""
        reading, place, tensor = self.reading, place_of(node, self.scope.function), tensor_of(node)
        edit = reading._edited.get((self.method.home, self.method.attribute, place))
        if edit is not None:  # by an earlier conversion: the call of a child
            call = Call(reading, self.method, edit, reading.owner.get_submodule(edit.child), edit.child, True)
            reading.calls += [call] if is_activation(call.module) else []
            reading.order.append(edit.child)
            return
        settings, inplace = _settings(node, target)
        if not self.scope.me or tensor is None or settings is None:
            return
        if isinstance(target, nn.Module):
            module: nn.Module | None = target if not settings else None
            inplace = inplace or getattr(target, "inplace", False)
        else:
            kind = "call_method" if isinstance(target, str) else "call_function"
            module = module_of_call(kind, target, (), settings)
        if module is None:
            return
        kind = "overwrite" if inplace and not is_unseen(self.scope, node, tensor) else "call"
        if isinstance(inplace, ast.expr):
            kind = "overwrite if"
        plain = isinstance(target, str) or len(node.args) + len(node.keywords) == 1
        call = Call(reading, self.method, Edit(kind, place), module, child, plain and kind == "call")
        reading.calls.append(call)
        reading.order.append(call)


def _settings(node: ast.Call, target: Any) -> tuple[dict[str, Any] | None, Any]:
    """The constants that a call has beside the tensor, by name, None where they are none; and whether it overwrites the
    tensor: a constant, or the expression that says so."""
    if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
        return None, False
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    inplace: Any = name.endswith("_")
    try:
        names = list(inspect.signature(target).parameters) if callable(target) else []
    except ValueError:  # torch's builtin functions do not say
        names = ["input", *_BUILTINS.get(name, ())]
    given = dict(zip(names, node.args, strict=False))
    given |= {str(keyword.arg): keyword.value for keyword in node.keywords}
    settings: dict[str, Any] = {}
    for name, value in list(given.items())[not isinstance(target, str) and bool(node.args) :]:
        try:
            settings[name] = ast.literal_eval(value)
        except ValueError:
            if name == "inplace":
                inplace = value
            elif name != "input":
                return None, False
    return settings, settings.pop("inplace", False) or inplace


_BUILTINS = {"softplus": ("beta", "threshold"), "leaky_relu_": ("negative_slope",), "elu_": ("alpha",)}


def _obstacle_to_subclass(cls: type) -> str | None:
    """A `super` that starts from the type of the object, which never ends in a subclass."""
    for home in homes(cls):
        for name, value in vars(home).items() if not home.__module__.startswith("torch.") else ():
            if isinstance(value, types.FunctionType) and "super" in value.__code__.co_names:
                try:
                    text = ast.unparse(definition_of(value))
                except CannotRewrite:
                    continue
                if "super(type(self)" in text or "super(self.__class__" in text:
                    return f"its {name} calls super with the type of the object, which never ends in a subclass"
    return None


def _types_asked_for(function: types.FunctionType, depth: int = 1) -> Iterator[type]:
    """The activation types that a function, or one that it calls, may compare with the types of modules, or whose
    forward it may call."""
    names = {name for code in codes_of(function.__code__) for name in code.co_names}
    held = [function.__globals__.get(name) for name in names]
    if names & {"isinstance", "type", "__class__", "forward"}:
        for one in (*held, *(getattr(nn, name, None) for name in names)):
            kinds = [kind for kind in (one if isinstance(one, tuple) else (one,)) if isinstance(kind, type)]
            yield from filter(is_activation_type, kinds)
    for one in held if depth else ():
        if isinstance(one, types.FunctionType) and not f"{one.__module__}.".startswith("torch."):
            yield from _types_asked_for(one, depth - 1)
