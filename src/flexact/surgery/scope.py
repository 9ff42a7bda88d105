"""What the names in a function's source stand for, as far as that can be known without running it."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from typing import Any, NamedTuple

from torch import nn

from flexact.surgery.sources import Definition, codes_of, contents

_FIELDS = (types.MemberDescriptorType, type(NamedTuple("Pair", [("left", int)]).left))  # type: ignore[attr-defined]
"""How the fields of slotted classes and of named tuples are kept."""
UNKNOWN = object()
"""What a name stands for that only a run can tell."""


class Scope:
    """A method with what its names stand for; the first parameter stands for the module `first`."""

    def __init__(self, function: types.FunctionType, definition: Definition, first: nn.Module) -> None:
        self.function = function
        self.definition = definition
        code = self.code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        self._names = {**vars(builtins), **function.__globals__, **{name: contents(cell) for name, cell in cells}}
        self._bound = _bound_names(code, definition)
        self.me = code.co_varnames[0] if code.co_argcount else ""
        nodes = list(ast.walk(definition))
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)]
        if [*stored, *(node.arg for node in nodes if isinstance(node, ast.arg))].count(self.me) != 1:
            self.me = ""  # it has another value somewhere
        self.first = first
        self.home = self._names.get("__class__")
        self._stored = {
            node.attr for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        }

    def value(self, node: ast.AST) -> Any:
        """What an expression stands for; UNKNOWN for most."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id == self.me:
                return self.first
            return UNKNOWN if node.id in self._bound else self._names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            base = self.value(node.value)
            return UNKNOWN if base is UNKNOWN else attribute_of(base, self.mangled(node.attr))
        if isinstance(node, ast.Subscript):
            base = self.value(node.value)
            if isinstance(base, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and isinstance(node.slice, ast.Constant):
                return base._modules.get(str(node.slice.value), UNKNOWN)
        if isinstance(node, ast.Call) and len(node.args) == 1 and self.value(node.func) is type:
            base = self.value(node.args[0])
            return UNKNOWN if base is UNKNOWN else type(base)
        return UNKNOWN

    def truth(self, node: ast.AST) -> bool | None:
        """Whether a condition holds by the module's own settings; None where that depends on more."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)) and len(node.ops) == 1:
            sides = [self._setting(side) for side in (node.left, node.comparators[0])]
            return None if UNKNOWN in sides else (sides[0] is sides[1]) == isinstance(node.ops[0], ast.Is)
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(part) for part in node.values]
            decides = isinstance(node.op, ast.Or)
            return decides if decides in parts else None if None in parts else not decides
        value = self._setting(node)
        return bool(value) if value is None or isinstance(value, (bool, int, float, str)) else None

    def _setting(self, node: ast.AST) -> Any:
        """The value of an expression that stays the same from call to call: no mode of a module, nothing that is
        computed when it is asked for, nothing that the function itself sets."""
        name = node.attr if isinstance(node, ast.Attribute) else ""
        value = self.value(node)
        is_computed = isinstance(value, (property, functools.cached_property))
        return UNKNOWN if name == "training" or name in self._stored or is_computed else value

    def asks_for_its_type(self) -> bool:
        """Whether the function looks at the type of the module, which is another one once it is rewritten. Reading an
        attribute of the type is no such look."""
        nodes = list(ast.walk(self.definition)) if self.me else []
        read = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        asked = [node for node in nodes if isinstance(node, (ast.Call, ast.Attribute)) and id(node) not in read]
        return any(self.value(node) is type(self.first) for node in asked)

    def mangled(self, attribute: str) -> str:
        """A private name as Python writes it in the class."""
        home = self.function.__qualname__.split(".")[:-1]
        if not attribute.startswith("__") or attribute.endswith("__") or not home or home[-1] == "<locals>":
            return attribute
        return f"_{home[-1].lstrip('_')}{attribute}"

    def path(self, node: ast.AST) -> str | None:
        """The name of a submodule or an attribute of the module: "inner.1" for `self.inner[1]`."""
        if isinstance(node, ast.Name):
            return "" if node.id == self.me else None
        if isinstance(node, ast.Attribute):
            name = self.mangled(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = str(node.slice.value)
        else:
            return None
        base = self.path(node.value)
        return None if base is None else f"{base}.{name}" if base else name


def attribute_of(value: Any, name: str) -> Any:
    """An attribute, with no property run and no `__getattr__` but that of modules."""
    if isinstance(value, types.ModuleType):
        return getattr(value, name, UNKNOWN)
    if isinstance(value, nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            if name in vars(value).get(table, {}):
                return vars(value)[table][name]
    if name == "__class__":
        return type(value)
    cls = value if isinstance(value, type) else type(value)
    found = inspect.getattr_static(value, name, UNKNOWN)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, cls)
    if isinstance(found, _FIELDS) and not isinstance(value, type):
        return getattr(value, name, UNKNOWN)
    if isinstance(value, type) or name in getattr(value, "__dict__", {}):
        return found
    return types.MethodType(found, value) if isinstance(found, types.FunctionType) else found


def _bound_names(code: types.CodeType, definition: Definition) -> set[str]:
    """Every name that a function binds, itself or in a function inside it."""
    declared = [node.names for node in ast.walk(definition) if isinstance(node, (ast.Global, ast.Nonlocal))]
    return {name for one in codes_of(code) for name in (*one.co_varnames, *one.co_cellvars)}.union(*declared)
