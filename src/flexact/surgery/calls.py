"""The activation calls in the source of a module's methods.

Only common ways of writing such a call are recognised. Any other call is not changed, and
`flexact.surgery.watching` warns about it when it runs.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

from flexact.candidates.recognition import (
    ELEMENTWISE,
    is_activation,
    is_activation_function,
    is_activation_type,
    module_of_call,
)
from flexact.surgery.rewriting import Edit, edits_of, function_of, functions_of, place_of
from flexact.surgery.scope import UNKNOWN, Scope, attribute_of, is_unobserved, tensor_of
from flexact.surgery.sources import CannotRewrite, codes_of, contents, definition_of

_LISTS_ALL = {"modules", "named_modules"}
_LISTS_CHILDREN = {"__dict__", "_modules", "children", "named_children"} | _LISTS_ALL
_LISTS_TENSORS = {"parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict"}
_APPLIES = {"apply", "_apply"}
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_ASKS = {"isinstance", "issubclass", "type", "__class__", "_get_name", "forward", "str", "repr"}


@dataclass(eq=False)
class Call:
    """An activation call in a method."""

    reading: Reading
    edit: Edit
    node: ast.Call
    module: nn.Module
    """A module that computes the same as the call."""
    child: str | None
    """The path of the child module, or the name of the stored function, that is called; None for other functions."""
    is_plain: bool
    """Whether a site can be called with the same arguments."""
    place: float
    """As `Reading.place`."""

    def calls(self, module: nn.Module) -> bool:
        """Return whether this is a call of a given module, which the owner or a submodule of it holds."""
        names = [] if self.child is None or self.child in vars(self.reading.owner) else self.child.split(".")
        return bool(names) and functools.reduce(attribute_of, names, self.reading.owner) is module

    @property
    def lines(self) -> Iterator[tuple[str, int]]:
        """The file and the lines of the call."""
        file = self.scope.function.__code__.co_filename
        return ((file, line) for line in range(self.node.lineno, int(self.node.end_lineno or 0) + 1))

    @property
    def scope(self) -> Scope:
        """The method in which the call is."""
        return self.reading.scopes[self.edit.method]


class Reading:
    """The result of reading a module's forward, and the methods that it calls through `self`."""

    def __init__(self, owner: nn.Module, readings: dict[int, Reading]) -> None:
        self.owner = owner
        self.scopes: dict[str, Scope] = {}
        """The methods that were read."""
        self.calls: list[Call] = []
        self.used_otherwise: set[str] = set()
        """The attributes that a method assigns, or uses for more than calls with one argument."""
        self.place = -0.5
        """The index of the last child that is used in the source read so far, plus one half."""
        self.places: dict[str, float] = {}
        """The place of the last use of each child and stored function."""
        self.is_listed = False
        """Whether the children are listed somewhere, so that an additional child would be noticed."""
        self.conflicts: dict[type, str] = {}
        """The types of submodules that a site must not replace, and the reason, which begins with the method."""
        self.scripted: set[str] = set()
        """The scripted functions with activations that the methods call."""
        self.readings = readings
        self._functions = functions_of(type(owner)) if _has_source(owner) else []
        self._checked: set[str] = set()
        self._scopes: dict[types.FunctionType, Scope] = {}

    def note(self, path: str) -> None:
        """Note the use of a child or a stored function at this point."""
        children, name = list(self.owner._modules.keys()), path.partition(".")[0]
        self.places[path] = self.place
        if name in children:
            self.place = max(self.place, children.index(name) + 0.5)

    def read(self, name: str) -> None:
        """Read a method and the methods that it calls. A method that cannot be rewritten is skipped."""
        with contextlib.suppress(CannotRewrite):
            if self._functions and name not in self.scopes:
                scope = self.scopes[name] = self._scope(function_of(type(self.owner), name)[1])
                body = scope.definition.body
                for node in body if isinstance(body, list) else [body]:
                    _Reader(self, scope, name).visit(node)

    @functools.cached_property
    def methods(self) -> list[tuple[str, Scope]]:
        """All methods whose source is available, with their names."""
        found = []
        for name, function in self._functions:
            if function.__code__.co_argcount and not function.__module__.startswith("torch."):
                with contextlib.suppress(CannotRewrite):
                    found.append((name, self._scope(function)))
        return found

    def _scope(self, function: types.FunctionType) -> Scope:
        if function not in self._scopes:
            self._scopes[function] = Scope(function, self.owner)
        return self._scopes[function]

    def check(self, name: str) -> None:
        """Check all methods of this name for code that breaks if an activation becomes a site or the module changes its
        class."""
        if name in self._checked:
            return
        self._checked.add(name)
        method = f"{type(self.owner).__name__}.{name}"
        for own_name, function in self._functions:
            if own_name == name or (name.startswith("__") and own_name.endswith(name)):
                self._checked.add(own_name)
                own = (inspect.getattr_static(self.owner, one, None) for one in function.__code__.co_names)
                for kind in _types_asked(function, frozenset(_types_in(own)), _first_parameter(function)):
                    exact = "asks for this exact type, which rewriting changes"
                    how = "checks for this type" if is_activation_type(kind) else exact
                    self.conflicts[kind] = f"{method} {how}"
                with contextlib.suppress(CannotRewrite):
                    if function.__module__ != nn.Sequential.__module__:  # a container lists its own children
                        self._check(method, self._scope(function))

    def _check(self, method: str, scope: Scope) -> None:
        """Note which attributes a method reads of a submodule that it names, or of any that a variable may hold."""
        calls = scope.nodes_of(ast.Call)
        called = {call.func for call in calls}
        firsts = {
            one for call in calls if scope.value(call.func) is next and len(call.args) == 1 for one in ast.walk(call)
        }
        for holder, name, node, by in _reads(scope, method):
            is_super = isinstance(holder, ast.Call) and scope.value(holder.func) is super
            value = self.owner if is_super else scope.value(holder)
            known = self.readings.get(id(value))
            if known is not None:
                known.check(name)
            elif value is not UNKNOWN:
                continue
            reading = known or self  # a variable may hold any submodule
            is_named = known is not None or node in called or name == "_modules"
            if is_named and name in _LISTS_CHILDREN:
                for module in reading.owner.modules() if known is None or name in _LISTS_ALL else [reading.owner]:
                    self.readings[id(module)].is_listed = True
            is_first = node in firsts and not _begins_with_activation(reading.owner)
            if (is_named and name in _LISTS_TENSORS and not is_first) or (known is not None and name in _APPLIES):
                reading.conflicts[nn.Module] = f"{by} iterates over the parameters or buffers, and a site adds some"
            if (node not in called and attribute_of(value, name) is UNKNOWN) or is_activation(reading.owner):
                for one in reading.settings.get(name, ()):
                    one.conflicts[nn.Module] = f"{by} reads {ast.unparse(node)}"

    @functools.cached_property
    def settings(self) -> dict[str, list[Reading]]:
        """The activations in the module, by the names of their settings."""
        found: dict[str, list[Reading]] = {}
        for module in filter(is_activation, self.owner.modules()):
            for name in vars(module).keys() - _OF_ALL_MODULES:
                found.setdefault(name, []).append(self.readings[id(module)])
        return found

    def obstacle(self) -> str | None:
        """Return why the methods must not be rewritten; None if they may."""
        if "forward" in vars(self.owner):
            return "its forward was replaced on this instance only"
        if self.is_listed or isinstance(self.owner, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return "its children are iterated over, and a site would be one of them"
        if isinstance(self.owner, LazyModuleMixin) and self.owner.cls_to_become is not None:
            return "its first forward changes its class; run it once before the conversion"
        for name, function in self._functions:
            # `super(type(self), self)` recurses forever in a subclass.
            before = "" if name in self._checked else r"super\("
            if _uses_type_of(function, _first_parameter(function), before):
                return f"its {name} uses the type of the module, which rewriting changes"
        return None


class _Reader(ast.NodeVisitor):
    """Visits the nodes of one method in the order of evaluation."""

    def __init__(self, reading: Reading, scope: Scope, method: str) -> None:
        self.reading = reading
        self.scope = scope
        self.method = method

    def visit(self, node: ast.AST) -> None:
        """Skip a branch that the module's settings rule out, so that it has no site that never runs."""
        if node not in self.scope.idle:
            super().visit(node)

    def visit_Attribute(self, node: ast.Attribute | ast.Name) -> None:
        """Visit a name or an attribute that is not called."""
        if not isinstance(node.ctx, ast.Load) or self._used(node):
            self._note_other_use(node)
        elif self.scope.value(node) is UNKNOWN and isinstance(node, ast.Attribute):
            self.visit(node.value)

    visit_Name = visit_Attribute

    def visit_Call(self, node: ast.Call) -> None:
        value = self.scope.value(node.func)
        if value is UNKNOWN:
            self.visit(node.func)
        for argument in [*node.args, *node.keywords]:
            self.visit(argument)
        path = self._used(node.func)
        holder = self.scope.value(node.func.value) if isinstance(node.func, ast.Attribute) else self.reading.owner
        # An attribute of any other object may change.
        is_lasting = isinstance(holder, (types.ModuleType, nn.Module, type))
        is_function = is_lasting and is_activation_function(value)
        if is_function or (path and isinstance(value, nn.Module) and is_activation(value)):
            is_added = self._add(node, value, path)
            is_of_child = is_function and path is not None and "." in path  # a call in its own class can be rewritten
            if not is_added or (is_of_child and not self.reading.calls[-1].is_plain):
                self._note_other_use(node.func)
        elif value is UNKNOWN and isinstance(node.func, ast.Attribute):
            if (holder is UNKNOWN or isinstance(holder, Tensor)) and not node.args and not node.keywords:
                self._add(node, node.func.attr, None)  # the method of a tensor, such as x.relu()
        elif isinstance(value, torch.jit.ScriptFunction) and any(
            f"aten::{name}" in str(value.graph) for name in ELEMENTWISE
        ):
            self.reading.scripted.add(ast.unparse(node.func))

    def _used(self, node: ast.AST) -> str | None:
        """Return the path of a submodule, or the name of a function that the module stores. If it is a method, read
        it."""
        path, value, owner = self.scope.path(node), self.scope.value(node), self.reading.owner
        if path and (path.partition(".")[0] in owner._modules or is_activation_function(vars(owner).get(path))):
            self.reading.note(path)
            return path
        is_own = isinstance(value, types.MethodType) and value.__self__ is owner
        if is_own and isinstance(node, ast.Attribute) and node.attr not in vars(owner):
            self.reading.read(node.attr)
        return None

    def _note_other_use(self, node: ast.expr) -> None:
        if isinstance(node, ast.Attribute) and (reading := self.reading.readings.get(id(self.scope.value(node.value)))):
            reading.used_otherwise.add(node.attr)

    def _add(self, node: ast.Call, target: Any, child: str | None) -> bool:
        """Add an activation call, if its arguments are a tensor and constants. Return whether they are."""
        reading, place, tensor = self.reading, place_of(node, self.scope.function), tensor_of(node)
        edit = edits_of(reading.owner).get((self.method, place))
        settings = _settings(node, target)
        if edit is not None:  # an earlier conversion replaced it by the call of a child
            made, child, is_plain = reading.owner.get_submodule(edit.child), edit.child, True
            reading.note(child)
            module = made if is_activation(made) else None
        elif tensor is None or settings is None or not self.scope.self_name:
            return False
        else:
            module = module_of_call(target, (), settings)
            overwrites = settings.get("inplace") and not is_unobserved(self.scope, node, tensor)
            kind = "overwrite" if overwrites else "call"
            edit = Edit(self.method, f"{kind} method" if isinstance(target, str) else kind, place)
            is_plain = not overwrites and (isinstance(target, str) or len(node.args) + len(node.keywords) == 1)
        if module is not None:
            reading.calls.append(Call(reading, edit, node, module, child, is_plain, reading.place))
        return module is not None


def _reads(scope: Scope, method: str) -> Iterator[tuple[ast.expr, str, ast.expr, str]]:
    """Yield the attributes that a method reads: the holder, the name, the expression, and what reads it. The method may
    do so itself, with a function such as getattr, or in a function to which it passes the holder."""
    for node in scope.nodes_of(ast.Attribute):
        yield node.value, node.attr, node, method
    for call in scope.nodes_of(ast.Call):
        function, names, by = scope.value(call.func), set[str](), method
        if any(function is one for one in (getattr, hasattr, vars, dir)) and call.args:
            name = scope.value(call.args[1]) if len(call.args) > 1 else UNKNOWN
            is_plain_getattr = function is getattr and len(call.args) == 2  # it finds only what is there
            names = {name} if isinstance(name, str) else set() if is_plain_getattr else {"__dict__"}
        elif isinstance(function, types.FunctionType):
            names = {name for code in codes_of(function.__code__) for name in code.co_names}
            if f"{function.__module__}.".startswith("torch."):
                names = {function.__name__}  # nn.Module.children(self)
            names, by = names & (_LISTS_CHILDREN | _LISTS_TENSORS), f"{function.__name__}, which {method} calls,"
        for holder, name in itertools.product(call.args, names):
            yield holder, name, call, by


def _begins_with_activation(owner: nn.Module) -> bool:
    """Return whether the parameters of a site would come before all other ones."""
    for module in owner.modules():
        if is_activation(module) or any(True for _ in module.parameters(recurse=False)):
            return is_activation(module)
    return False


def _has_source(module: nn.Module) -> bool:
    """Return whether a module's methods are the user's: not those of torch.nn, of a graph or of TorchScript."""
    if is_activation(module) or isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        return False
    own = next(cls for cls in type(module).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")
    return not f"{own.__module__}.".startswith("torch.nn.")


def _settings(node: ast.Call, target: Any) -> dict[str, Any] | None:
    """Return the arguments of an activation call except the tensor; None if one is not constant. Only the argument
    `inplace` may be an expression, which counts as True; the rewritten call evaluates it."""
    names = list(inspect.signature(target).parameters) if inspect.isfunction(target) else ["input"]
    given = dict(zip(names, node.args, strict=False)) | {str(one.arg): one.value for one in node.keywords}
    given.pop("input", None)
    if isinstance(given.get("inplace"), (ast.Name, ast.Attribute)) and len(node.args) == 1:
        given["inplace"] = ast.Constant(True)
    try:
        settings = {name: ast.literal_eval(value) for name, value in given.items()}
    except ValueError:
        return None
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_in_place = name.endswith("_") or getattr(target, "inplace", False)
    return None if len(node.args) > len(names) else settings | {"inplace": True} if is_in_place else settings


@functools.lru_cache(maxsize=4096)
def _types_asked(function: types.FunctionType, own: frozenset[type], me: str, depth: int = 3) -> frozenset[type]:
    """Return the module types that a function, or one that it calls, may test for: activation types, and every type if
    it uses the exact type of anything but `me`.

    own: the types that the attributes of its module hold.
    """
    codes = codes_of(function.__code__)
    names = {name for code in codes for name in code.co_names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [function.__globals__.get(name) for name in names]
    held += [contents(cell) for name, cell in cells if name != "__class__"]
    modules = [vars(one) for one in held if isinstance(one, types.ModuleType)]
    found: set[type] = set()
    if names & _ASKS or any(dis.opmap["MATCH_CLASS"] in code.co_code[::2] for code in codes):
        within = [module.get(name) for module in modules for name in names]
        found.update(own, _types_in((*held, *within, *names, *(code.co_consts for code in codes))))
        if not _uses_type_of(function, rf"(?!{me}(\)|\.__class__))[\w.\[\]]+"):
            found = set(filter(is_activation_type, found))
    for one in held if depth else ():
        if isinstance(one, types.FunctionType) and not f"{one.__module__}.".startswith("torch."):
            found |= _types_asked(one, frozenset(), "", depth - 1)
    return frozenset(kind for kind in found if issubclass(kind, nn.Module) and kind is not nn.Module)


def _uses_type_of(function: types.FunctionType, what: str, before: str = "") -> bool:
    """Return whether a function reads the type of something, for more than its name. what: a regular expression."""
    if not {"type", "__class__"} & {name for code in codes_of(function.__code__) for name in code.co_names}:
        return False
    with contextlib.suppress(CannotRewrite):
        pattern = rf"{before}(\btype\({what}\)|\b{what}\.__class__)(?!\.__(name|qualname|module|doc)__)"
        return re.search(pattern, ast.unparse(definition_of(function))) is not None
    return False


def _first_parameter(function: types.FunctionType) -> str:
    return next(iter(function.__code__.co_varnames), "self")


def _types_in(values: Iterable[Any], levels: int = 3) -> Iterator[type]:
    """Return the types among some values: themselves, by their names in torch.nn, or in a container or a union."""
    for value in values:
        one = getattr(nn, value, None) if isinstance(value, str) else value
        items: Any = one.__args__ if isinstance(one, types.UnionType) else one
        if isinstance(one, type):
            yield one
        elif levels and type(items) in (tuple, list, set, frozenset, dict):
            yield from _types_in(itertools.islice(items, 100), levels - 1)
