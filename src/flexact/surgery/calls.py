"""The activation calls in the source of a module's methods.

Only common ways of writing such a call are recognized. Any other call stays as it is, and
`flexact.surgery.watching` warns about it when it runs.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexact.activations import (
    ELEMENTWISE,
    is_activation,
    is_activation_function,
    is_activation_type,
    is_method,
    module_of_call,
)
from flexact.surgery.rewriting import Edit, Revision, function_of, homes, merged, place_of, rewritten_class, tensor_of
from flexact.surgery.scope import UNKNOWN, Scope, is_unobserved
from flexact.surgery.sources import CannotRewrite, codes_of, definition_of, digest, rewrapped

_LISTS_CHILDREN = {"_modules", "children", "modules", "named_children", "named_modules"}
_OWN_TYPE = r"(type\({0}\)|{0}\.__class__)(?!\.__(name|qualname|module|doc)__)"


@dataclass(eq=False)
class Call:
    """An activation call in a method."""

    reading: Reading
    method: str
    edit: Edit
    module: nn.Module
    """A module that computes the same as the call."""
    child: str | None
    """The path of the child module, or the name of the stored function, that is called; None for other functions."""
    is_plain: bool
    """Whether a site can be called with the same arguments."""

    @property
    def lines(self) -> Iterator[tuple[str, int]]:
        """The file and the lines of the call."""
        code, (start, _, end, _) = self.reading.scopes[self.method].function.__code__, self.edit.place
        return ((code.co_filename, code.co_firstlineno + line) for line in range(start, end + 1))


class Reading:
    """The result of reading a module's forward, and the methods that it calls through `self`."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self._functions = _functions(type(owner))
        self.scopes: dict[str, Scope] = {}
        """The methods that were read."""
        self.calls: list[Call] = []
        self.order: list[Call | str] = []
        """The calls, and the names of the children that are called or used, in source order."""
        self.values: set[str] = set()
        """The children that are used without being called."""
        self.listed: set[int] = set()
        """The ids of modules whose children are listed, so that an additional child would be noticed."""
        self.conflicts: dict[type, str] = {}
        """The types of submodules that a site must not replace, and the reason."""
        self.obstacle: str | None = _obstacle_to_subclass(self._functions)
        """The reason why the module's type must not change; None if it may."""
        self.scripted: set[str] = set()
        """The scripted functions with activations inside that are called."""
        self.edited = {
            (revision.name, edit.place): edit
            for revision in getattr(owner, "flexact_recipe", ())
            for edit in revision.edits
        }
        self.foreign: list[tuple[nn.Module, str]] = []
        """The attributes of submodules that the methods use."""
        self._checked: set[str] = set()
        for name in ("forward", "__call__"):
            self.check(name)
            self.read(name)

    def read(self, name: str) -> None:
        """Read a method and the methods that it calls. A method that cannot be rewritten is skipped."""
        if name in self.scopes:
            return
        try:
            value, function = function_of(type(self.owner), name)
            if vars(nn.Module).get(name) is value:
                return
            rewrapped(value, function, function)
            scope = self.scopes[name] = Scope(function, self.owner)
        except CannotRewrite:
            return
        _Reader(self, scope, name).visit_all(scope.definition.body)

    def check(self, name: str) -> None:
        """Find what the methods of a name, in the type or its bases, do that a site or another type would change."""
        if name not in self._checked:
            self._checked.add(name)
            for own_name, function in self._functions:
                if own_name == name or (name.startswith("__") and own_name.endswith(name)):
                    self._check(name, function)

    def _check(self, name: str, function: types.FunctionType) -> None:
        for kind in _types_checked(function):
            self.conflicts[kind] = f"its {name} checks for this type"
        try:
            scope = Scope(function, self.owner)
        except CannotRewrite:
            return
        for node in (node for node in scope.nodes if isinstance(node, ast.Attribute)):
            holder = scope.value(node.value)
            is_super = isinstance(node.value, ast.Call) and scope.value(node.value.func) is super
            if node.attr in _LISTS_CHILDREN:
                self.listed.add(id(holder))
            elif is_super or holder is self.owner:
                self.check(node.attr)
            elif isinstance(holder, nn.Module) and is_activation(holder):
                self.conflicts[type(holder)] = f"its {name} reads {ast.unparse(node)}"
            elif isinstance(holder, nn.Module):
                self.foreign.append((holder, node.attr))
        text = ast.unparse(scope.definition)
        if scope.me and re.search(_OWN_TYPE.format(scope.me), text):
            self.obstacle = f"its {name} uses the type of the module, which rewriting changes"
        if scope.me and re.search(rf"(?<!next\(){scope.me}\.(named_)?parameters\(", text):
            self.conflicts[nn.Module] = f"its {name} iterates over the parameters, and a site adds its own"

    def rewritten(self, first: type, edits: dict[str, list[Edit]]) -> type:
        """Return the subclass of a type whose methods have these edits."""
        revisions = [Revision(name, digest(self.scopes[name].definition), tuple(own)) for name, own in edits.items()]
        return rewritten_class(first, merged(first, revisions))


class _Reader(ast.NodeVisitor):
    """Visits the nodes of one method in the order of evaluation."""

    def __init__(self, reading: Reading, scope: Scope, method: str) -> None:
        self.reading = reading
        self.scope = scope
        self.method = method

    def visit_all(self, body: ast.expr | list[ast.stmt]) -> None:
        for node in body if isinstance(body, list) else [body]:
            self.visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        """Skip a branch that the module's settings rule out, so that it has no site that never runs."""
        self.visit(node.test)
        truth = self.scope.truth(node.test)
        if truth is not False:
            self.visit_all(node.body)
        if truth is not True:
            self.visit_all(node.orelse)

    visit_IfExp = visit_If

    def visit_Attribute(self, node: ast.Attribute | ast.Name) -> None:
        """A name that is not called."""
        if not isinstance(node.ctx, ast.Load):
            return
        value, path = self.scope.value(node), self._own_path(node)
        if path:
            self.reading.values.add(path)
            self.reading.order.append(path)
        elif value is UNKNOWN and isinstance(node, ast.Attribute):
            self.visit(node.value)
        else:
            self._follow(value, node)

    visit_Name = visit_Attribute

    def visit_Call(self, node: ast.Call) -> None:
        value, path = self.scope.value(node.func), self._own_path(node.func)
        if value is UNKNOWN:
            self.visit(node.func)
        for argument in [*node.args, *node.keywords]:
            self.visit(argument)
        if path and isinstance(value, nn.Module):
            self.reading.order.append(path)
            if is_activation(value):
                self._add(node, value, path)
        elif is_activation_function(value):
            self._add(node, value, path)
            self.reading.order += [path] if path else []
        elif self._is_method_of_tensor(node, value):
            self._add(node, node.func.attr, None)  # type: ignore[attr-defined]
        elif isinstance(value, torch.jit.ScriptFunction):
            if any(f"aten::{name}" in str(value.graph) for name in ELEMENTWISE):
                self.reading.scripted.add(ast.unparse(node.func))
        else:
            self._follow(value, node.func)

    def _own_path(self, node: ast.AST) -> str | None:
        """Return the path of a submodule, or the name of a function that the module stores."""
        path, owner = self.scope.path(node), self.reading.owner
        if path and (path.partition(".")[0] in owner._modules or is_activation_function(vars(owner).get(path))):
            return path
        return None

    def _is_method_of_tensor(self, node: ast.Call, value: Any) -> bool:
        """Return whether a call is that of a tensor's method, such as `x.relu()`, as far as the source tells."""
        if not isinstance(node.func, ast.Attribute) or not is_method(node.func.attr) or node.args or node.keywords:
            return False
        holder = self.scope.value(node.func.value)
        return value is UNKNOWN and (holder is UNKNOWN or isinstance(holder, Tensor))

    def _follow(self, value: Any, node: ast.AST) -> None:
        """Read a method of the module that is called or passed on."""
        is_own = isinstance(value, types.MethodType) and value.__self__ is self.reading.owner
        if is_own and isinstance(node, ast.Attribute) and node.attr not in vars(self.reading.owner):
            self.reading.read(node.attr)

    def _add(self, node: ast.Call, target: Any, child: str | None) -> None:
        """Add an activation call, if its arguments are a tensor and constants."""
        reading, place, tensor = self.reading, place_of(node, self.scope.function), tensor_of(node)
        edit = reading.edited.get((self.method, place))
        if edit is not None:  # an earlier conversion replaced it by the call of a child
            call = Call(reading, self.method, edit, reading.owner.get_submodule(edit.child), edit.child, True)
            reading.calls += [call] if is_activation(call.module) else []
            reading.order.append(edit.child)
            return
        settings = _settings(node, target)
        if not self.scope.me or tensor is None or settings is None:
            return
        inplace = settings.pop("inplace", False)
        module: nn.Module | None = target if isinstance(target, nn.Module) and not settings else None
        if not isinstance(target, nn.Module):
            kind = "call_method" if isinstance(target, str) else "call_function"
            module = module_of_call(kind, target, (), settings)
        if module is None:
            return
        is_observed = bool(inplace) and not is_unobserved(self.scope, node, tensor)
        kind = "overwrite if" if isinstance(inplace, ast.expr) else "overwrite" if is_observed else "call"
        is_plain = isinstance(target, str) or len(node.args) + len(node.keywords) == 1
        call = Call(reading, self.method, Edit(kind, place), module, child, is_plain and kind == "call")
        reading.calls.append(call)
        reading.order.append(call)


def _settings(node: ast.Call, target: Any) -> dict[str, Any] | None:
    """Return the arguments of an activation call beside the tensor; None if one is not constant. The expression of a
    keyword `inplace` need not be."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    names = list(inspect.signature(target).parameters) if inspect.isfunction(target) else ["input"]
    if len(node.args) > len(names) or any(isinstance(one, ast.Starred) for one in node.args):
        return None
    given = dict(zip(names, node.args, strict=False)) | {str(one.arg): one.value for one in node.keywords}
    given.pop("input", None)
    settings: dict[str, Any] = {}
    if isinstance(given.get("inplace"), (ast.Name, ast.Attribute)) and len(node.args) == 1:
        settings["inplace"] = given.pop("inplace")
    try:
        settings |= {name: ast.literal_eval(value) for name, value in given.items()}
    except ValueError:
        return None
    if name.endswith("_") or getattr(target, "inplace", False):
        settings["inplace"] = True
    return settings


def _functions(cls: type) -> list[tuple[str, types.FunctionType]]:
    """Return the functions in a type and its bases by name; also those inside properties and decorators."""
    held = [item for home in homes(cls) if home is not nn.Module for item in vars(home).items()]
    inner = [(name, getattr(value, "fget", None) or getattr(value, "func", None) or value) for name, value in held]
    unwrapped = [(name, inspect.unwrap(value)) for name, value in inner if callable(value)]
    return [(name, value) for name, value in unwrapped if isinstance(value, types.FunctionType)]


def _obstacle_to_subclass(functions: list[tuple[str, types.FunctionType]]) -> str | None:
    """Return why a type with these methods can have no subclass: `super(type(self), self)` never ends in one."""
    for name, function in functions:
        if "super" in function.__code__.co_names:
            with contextlib.suppress(CannotRewrite):
                if re.search(r"super\(" + _OWN_TYPE.format("self"), ast.unparse(definition_of(function))):
                    return f"its {name} calls super with the type of the object, which never ends in a subclass"
    return None


def _types_checked(function: types.FunctionType, depth: int = 1) -> Iterator[type]:
    """Return the activation types that a function, or one that it calls, may compare with a module's type."""
    names = {name for code in codes_of(function.__code__) for name in code.co_names}
    held = [function.__globals__.get(name) for name in names]
    if names & {"isinstance", "type", "__class__", "forward"}:
        for one in (*held, *(getattr(nn, name, None) for name in names)):
            kinds = [kind for kind in (one if isinstance(one, tuple) else (one,)) if isinstance(kind, type)]
            yield from filter(is_activation_type, kinds)
    for one in held if depth else ():
        if isinstance(one, types.FunctionType) and not f"{one.__module__}.".startswith("torch."):
            yield from _types_checked(one, depth - 1)
