"""The activation calls in the methods behind a module's forward, as their source has them."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from flexact.activations import (
    is_activation,
    is_activation_function,
    is_activation_type,
    is_method,
    makes_activations,
    module_of_call,
)
from flexact.surgery.hints import activation_names, names_activation, obstacle_to_subclass, parameter_names
from flexact.surgery.in_place import overwriting
from flexact.surgery.rewriting import Edit, Recipe, Revision, function_of, homes, merged, place_of, tensor_of
from flexact.surgery.scope import UNKNOWN, Scope, is_tensor_method
from flexact.surgery.sources import CannotRewrite, definition_of, digest, rewrapped, unwrapped


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


class _Link(NamedTuple):
    """A call of a method by something else than its name, as `super().forward(x)`."""

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
        self.reasons: list[str] = []
        """What is left alone, and why."""
        self.obstacle: str | None = obstacle_to_subclass(type(owner))
        """Why the module's type must stay as it is."""
        self.foreign: list[tuple[nn.Module, str]] = []
        """Methods of other modules than forward that this one calls."""
        self.listed: set[int] = set()
        """The ids of modules whose children are gone through, so that a new one among them would be, too."""
        self._known = known
        self._homes = homes(type(owner))
        self._links: list[_Link] = []
        self._digests: dict[Method, str] = {}
        self._outside: set[Any] = set()
        self._edited = {
            (revision.home, revision.attribute, edit.place): edit
            for revision in getattr(type(owner), "flexact_recipe", ())
            for edit in revision.edits
        }

    def read(self, name: str) -> None:
        """Read a method and what it calls."""
        if (method := self._method(name)) is not None:
            self._read(method)

    def recipe(self, names: dict[Call, str]) -> Recipe:
        """How to rewrite the methods so that these calls are calls of the children of these names."""
        edits: dict[Method, list[Edit]] = {}
        for call, name in names.items():
            edits.setdefault(call.method, []).append(call.edit._replace(child=name))
        return self.recipe_of(type(self.owner), edits)

    def recipe_of(self, first: type, edits: dict[Method, list[Edit]]) -> Recipe:
        """The same for any edits of a type, by method, and for whoever calls such a method by more than its name."""
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

    def _leave(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _read(self, method: Method) -> None:
        if method in self._digests or self._homes[method.home] is nn.Module:
            return
        self._digests[method] = ""
        function = unwrapped(vars(self._homes[method.home])[method.attribute])
        try:
            value, function = function_of(type(self.owner), method.home, method.attribute)
            definition = definition_of(function)
            rewrapped(value, function, function)
        except CannotRewrite as error:
            del self._digests[method]
            if names_activation(function):
                self._leave(f"{method.attribute} has activations, but {error}")
            return
        self._digests[method] = digest(definition)
        scope = Scope(function, definition, self.owner)
        if scope.asks_for_its_type():
            self.obstacle = f"its {method.attribute} asks for the type of the module, which a rewritten one changes"
        _Reader(self, scope, method, f"its {method.attribute}").read()


class _Reader:
    """Reads one function."""

    def __init__(self, reading: Reading, scope: Scope, method: Method | None, title: str) -> None:
        self.reading = reading
        self.scope = scope
        self.method = method
        self.title = title

    def read(self) -> None:
        function = self.scope.function
        given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if any(map(self._holds_activation, given)):
            self._leave("has an activation as the default of a parameter")
        for one in ast.walk(self.scope.definition):
            if isinstance(one, ast.Attribute) and one.attr in _LISTS_CHILDREN:
                self.reading.listed.add(id(self.scope.value(one.value)))
        body: Any = self.scope.definition.body
        for node in body if isinstance(body, list) else [body]:
            self._visit(node)

    def _leave(self, problem: str) -> None:
        self.reading._leave(f"{self.title} {problem}")

    def _visit(self, node: ast.AST) -> None:
        """In the order of evaluation: what a node needs comes before it."""
        if isinstance(node, ast.Call):
            self._visit_call(node)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            if isinstance(node.ctx, ast.Load):
                self._visit_value(node)
        elif isinstance(node, ast.Subscript) and makes_activations(self.scope.value(node.value)):
            self._leave(f"makes a new {ast.unparse(node)} each time it runs; make it once, in __init__")
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
        value, path = self.scope.value(node), self._path(node)
        if path and self._is_own(path):
            self.reading.values.add(path)
            self.reading.order.append(path)
        elif value is F:
            self._leave("looks up functions of torch.nn.functional by name")
        elif isinstance(value, (property, functools.cached_property, types.MethodType)):
            self._visit_function(value, node)
        elif self._holds_activation(value):
            self._leave(f"uses {ast.unparse(node)} without calling it")
        elif isinstance(node, ast.Attribute) and value is UNKNOWN:
            self._visit(node.value)

    def _visit_call(self, node: ast.Call) -> None:
        value, path = self.scope.value(node.func), self._path(node.func)
        above = self._above(node)
        if value is UNKNOWN and above is None:
            self._visit(node.func)
        for argument in [*node.args, *node.keywords]:
            self._visit(argument)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if above is not None:
            self._link(node, "super", above)
        elif isinstance(value, nn.Module) and path and self._is_own(path):
            self.reading.order.append(path)
            if is_activation(value):
                self._activation(node, value, path)
        elif is_activation_function(value):
            self._activation(node, value, path if path and self._is_own(path) else None)
            self.reading.order += [path] if path and self._is_own(path) else []
        elif is_method(name) and (is_tensor_method(value, name) or self._is_of_tensor(node, value)):
            self._activation(node, name, None)
        elif isinstance(value, type) and is_activation_type(value):
            self._leave(f"makes a new {value.__name__} each time it runs; make it once, in __init__")
        elif value is not UNKNOWN:
            self._visit_function(value, node.func, node)
        elif name in activation_names() and node.args:
            self._leave(f"calls {ast.unparse(node.func)}, of which the source does not say what it is")

    def _path(self, node: ast.AST) -> str | None:
        return self.scope.path(node) if self.scope.first is self.reading.owner else None

    def _is_own(self, path: str) -> bool:
        """Whether a path leads to a submodule, or a function that the module keeps."""
        owner = self.reading.owner
        top = path.partition(".")[0]
        return top in owner._modules or (path in vars(owner) and is_activation_function(vars(owner)[path]))

    def _is_of_tensor(self, node: ast.Call, value: Any) -> bool:
        """Whether `x.relu()` is the method of a tensor, as far as the source tells."""
        if not isinstance(node.func, ast.Attribute) or node.args or node.keywords:
            return False
        holder = self.scope.value(node.func.value)
        return isinstance(holder, Tensor) or (holder is UNKNOWN and value is UNKNOWN)

    def _above(self, node: ast.Call) -> Method | None:
        """The method that `super().forward` is."""
        func = node.func
        if not isinstance(func, ast.Attribute) or not isinstance(func.value, ast.Call) or self.method is None:
            return None
        if self.scope.value(func.value.func) is not super:
            return None
        named = self.scope.value(func.value.args[0]) if func.value.args else self.scope.home
        known = self.reading._homes
        return self.reading._method(self.scope.mangled(func.attr), known.index(named)) if named in known else None

    def _link(self, node: ast.Call, kind: str, method: Method) -> None:
        self.reading._read(method)
        if self.method is not None:
            edit = Edit(kind, place_of(node, self.scope.function), method.name)
            self.reading._links.append(_Link(self.method, edit, method))

    def _visit_function(self, value: Any, node: ast.AST, call: ast.Call | None = None) -> None:
        """A method of the module, or any other function that may have activations."""
        reading = self.reading
        holder = self.scope.value(node.value) if isinstance(node, ast.Attribute) else UNKNOWN
        name = self.scope.mangled(node.attr) if isinstance(node, ast.Attribute) else ""
        is_bound = not isinstance(value, types.FunctionType) and getattr(value, "__self__", holder) is holder
        if isinstance(holder, nn.Module) and is_bound and name not in vars(holder):
            if holder is reading.owner:
                reading.read(name)
            elif id(holder) in reading._known and name != "forward" and not is_activation(holder):
                reading.foreign.append((holder, name))
        elif call is not None and (base := self._base(call, value)) is not None:
            self._link(call, "base", base)
        else:
            self._visit_outside(value, ast.unparse(node))

    def _base(self, node: ast.Call, function: Any) -> Method | None:
        """The method that is called as `Base.forward(self, x)`."""
        first = node.args[0] if node.args and self.method is not None else None
        if isinstance(first, ast.Name) and first.id == self.scope.me:
            for home, cls in enumerate(self.reading._homes):
                for name, value in vars(cls).items():
                    if value is function and cls is not nn.Module:
                        return Method(home, name, f"flexact_{home}_{name}")
        return None

    def _visit_outside(self, value: Any, text: str) -> None:
        """A function that is no method of the module: one with activations is named."""
        if self._holds_activation(value):
            self._leave(f"calls {text}, which is no module of the model")
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        module = f"{getattr(function, '__module__', '')}."
        if not isinstance(function, types.FunctionType) or module.startswith(("torch.", "flexact.")):
            return
        if function in self.reading._outside:
            return
        self.reading._outside.add(function)
        title = f"{self.title} calls {text}, which" if self.method is not None else self.title
        try:
            scope = Scope(function, definition_of(function), getattr(value, "__self__", UNKNOWN))
        except CannotRewrite as error:
            if names_activation(function):
                self._leave(f"calls {text}, which has activations, but {error}")
            return
        _Reader(self.reading, scope, None, title).read()

    def _holds_activation(self, value: Any) -> bool:
        """Whether something is, or has in it, an activation that is none of the model's modules."""
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, (list, tuple, set)):
            return any(map(self._holds_activation, value))
        if isinstance(value, dict):
            return any(map(self._holds_activation, value.values()))
        if isinstance(value, nn.Module):
            return is_activation(value) and id(value) not in self.reading._known
        return is_activation_function(value)

    def _activation(self, node: ast.Call, target: Any, child: str | None) -> None:
        """An activation's call: a site's from now on, or named with the reason why it cannot be."""
        text = ast.unparse(node)
        tensor = tensor_of(node)
        if self.method is None:
            self._leave(f"calls {ast.unparse(node.func)} and is no method of this module")
            return
        place = place_of(node, self.scope.function)
        edit = self.reading._edited.get((self.method.home, self.method.attribute, place))
        if edit is not None:  # by an earlier conversion: the call of a child
            call = Call(self.reading, self.method, edit, self.reading.owner.get_submodule(edit.child), edit.child, True)
            self.reading.calls += [call] if is_activation(call.module) else []
            self.reading.order.append(edit.child)
            return
        if not self.scope.me:
            self._leave(f"calls {text}, and its first parameter is not the module throughout")
            return
        starred = any(isinstance(one, ast.Starred) for one in node.args) or any(
            one.arg is None for one in node.keywords
        )
        if starred or tensor is None:
            self._leave(f"calls {text}, whose tensor is not among its arguments")
            return
        settings, inplace = self._settings(node, target)
        if isinstance(target, nn.Module):
            module: nn.Module | None = target if not settings else None
            inplace = inplace or getattr(target, "inplace", False)
        elif settings is None:
            module = None
        else:
            kind = "call_method" if isinstance(target, str) else "call_function"
            module = module_of_call(kind, target, (), settings)
        if module is None:
            self._leave(f"calls {text}, whose settings are no constants")
            return
        kind = "call"
        if isinstance(inplace, ast.expr):
            kind = "overwrite if"
        elif inplace:
            kind = overwriting(self.scope, node, tensor)
        if kind.startswith("overwrite") and isinstance(self.scope.definition, ast.Lambda):
            self._leave(f"calls {text}, which overwrites its tensor, in a lambda")
            return
        plain = isinstance(target, str) or len(node.args) + len(node.keywords) == 1
        call = Call(self.reading, self.method, Edit(kind, place), module, child, plain and kind == "call")
        self.reading.calls.append(call)
        self.reading.order.append(call)

    def _settings(self, node: ast.Call, target: Any) -> tuple[dict[str, Any] | None, Any]:
        """The constants that a call has beside the tensor, by name, None where they are none; and whether it
        overwrites the tensor: a constant, or the expression that says so."""
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        inplace: Any = name.endswith("_")
        given = dict(zip(parameter_names(target), node.args, strict=False))
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


_LISTS_CHILDREN = {"_modules", "children", "modules", "named_children", "named_modules"}
