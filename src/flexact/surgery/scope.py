"""The values of names in the source of a method, as far as they are known without running it."""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from typing import Any

from torch import nn

from flexact.surgery.sources import codes_of, contents, definition_of

UNKNOWN = object()
"""The value of an expression that is only known at run time."""


class Scope:
    """A method's source and the values of its names. Its first parameter is the module `owner`."""

    def __init__(self, function: types.FunctionType, owner: nn.Module) -> None:
        self.function = function
        self.owner = owner
        self.definition = definition_of(function)
        self.nodes = list(ast.walk(self.definition))
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        self._names = {**vars(builtins), **function.__globals__, **{name: contents(cell) for name, cell in cells}}
        self._bound = {name for one in codes_of(code) for name in (*one.co_varnames, *one.co_cellvars)}
        for node in self.nodes:
            self._bound |= set(node.names) if isinstance(node, (ast.Global, ast.Nonlocal)) else set()
        stored = [node for node in self.nodes if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)]
        self._stored = {node.attr for node in stored if isinstance(node, ast.Attribute)}
        self.strings = {node.value for node in self.nodes if isinstance(node, ast.Constant) and type(node.value) is str}
        self.me = code.co_varnames[0] if code.co_argcount else ""
        names = [node.id for node in stored if isinstance(node, ast.Name)]
        names += [node.arg for node in self.nodes if isinstance(node, ast.arg)]
        if names.count(self.me) != 1:  # the name has another value somewhere
            self.me = ""

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id == self.me:
                return self.owner
            return UNKNOWN if node.id in self._bound else self._names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            base = self.value(node.value)
            return UNKNOWN if base is UNKNOWN else _attribute(base, node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            base = self.value(node.value)
            if isinstance(base, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
                return base._modules.get(str(node.slice.value), UNKNOWN)
        return UNKNOWN

    def truth(self, node: ast.AST) -> bool | None:
        """Return whether a condition on the module's settings holds; None if it depends on anything else."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)) and len(node.ops) == 1:
            sides = [self._setting(side) for side in (node.left, node.comparators[0])]
            return None if UNKNOWN in sides else (sides[0] is sides[1]) == isinstance(node.ops[0], ast.Is)
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(part) for part in node.values]
            decisive = isinstance(node.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        value = self._setting(node)
        return bool(value) if value is None or isinstance(value, (bool, int, float, str)) else None

    def _setting(self, node: ast.AST) -> Any:
        """Return the value of an expression that is the same in every call: no mode, nothing that the method sets."""
        name = node.attr if isinstance(node, ast.Attribute) else ""
        return UNKNOWN if name == "training" or name in self._stored else self.value(node)

    def path(self, node: ast.AST) -> str | None:
        """Return the name of a submodule or an attribute of the module: "inner.1" for `self.inner[1]`."""
        if isinstance(node, ast.Name):
            return "" if node.id == self.me else None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = str(node.slice.value)
        else:
            return None
        base = self.path(node.value)
        return None if base is None else f"{base}.{name}" if base else name


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running a property or a user's `__getattr__`."""
    if isinstance(value, types.ModuleType):
        return getattr(value, name, UNKNOWN)
    if isinstance(value, nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            if name in vars(value).get(table, {}):
                return vars(value)[table][name]
    found = inspect.getattr_static(value, name, UNKNOWN)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(value, type) or name in getattr(value, "__dict__", {}):
        return found
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, value)
    return UNKNOWN if hasattr(found, "__get__") else found
