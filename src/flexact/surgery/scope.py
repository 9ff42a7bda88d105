"""What is known about a method without running it: the values of its names, and which tensors only one name holds."""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flexact.surgery.sources import codes_of, contents, definition_of

UNKNOWN = object()
"""The value of an expression that is only known at run time."""
_NEW_FROM_MODULES = {
    f"torch.nn.modules.{name}" for name in ("batchnorm", "conv", "instancenorm", "linear", "normalization")
}
_NEW_FROM_FUNCTIONS = (
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.linear, F.bilinear, torch.matmul, torch.cat, torch.stack),
    *(F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm),
)


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


def is_unobserved(scope: Scope, call: ast.Call, tensor: ast.expr) -> bool:
    """Return whether only the call can read the tensor that it overwrites: the result of an expression, or a local
    variable that holds one and is then assigned, or returned as, the result of the call."""
    if not isinstance(tensor, ast.Name):
        return is_fresh(scope, tensor)
    for node in scope.nodes:
        for _, block in ast.iter_fields(node):
            for i, statement in enumerate(block if isinstance(block, list) else []):
                if _replaces(statement, call, tensor.id):
                    return _is_fresh_after(scope, block[:i], tensor.id)
    return False


def is_fresh(scope: Scope, node: ast.AST) -> bool:
    """Return whether an expression makes a new tensor: arithmetic, or a layer of torch."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.BinOp)
    module = scope.value(node.func)
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    if not isinstance(module, nn.Module):
        return any(module is function for function in _NEW_FROM_FUNCTIONS)
    if type(module).__module__ in _NEW_FROM_MODULES and type(module) is not nn.Identity:
        return True
    return len(node.args) == 1 and not node.keywords and is_fresh(scope, node.args[0])


def _replaces(statement: ast.AST, call: ast.Call, name: str) -> bool:
    """Return whether a statement is `name = call`, or returns the call and does not read the name elsewhere."""
    if isinstance(statement, ast.Return):
        return _mentions(statement, name) == 1 and call in ast.walk(statement)
    return isinstance(statement, ast.Assign) and statement.value is call and _target(statement) == name


def _is_fresh_after(scope: Scope, statements: list[ast.stmt], name: str) -> bool:
    """Return whether a variable holds a tensor, after some statements, that no other variable holds."""
    for statement in reversed(statements):
        if isinstance(statement, ast.Assign) and _target(statement) == name and is_fresh(scope, statement.value):
            return True
        if not _keeps(scope, statement, name):
            return False
    return False


def _keeps(scope: Scope, statement: ast.stmt, name: str) -> bool:
    """Return whether a statement shares a variable's tensor with nothing else: it adds to the tensor, or assigns the
    result of a module that is called with it alone. The module may be None in a branch that does not run."""
    if not _mentions(statement, name) or (isinstance(statement, ast.AugAssign) and _target(statement) == name):
        return True
    if isinstance(statement, ast.If):
        return all(_keeps(scope, one, name) for one in (*statement.body, *statement.orelse))
    value = statement.value if isinstance(statement, ast.Assign) and _target(statement) == name else None
    if not isinstance(value, ast.Call) or [ast.unparse(one) for one in (*value.args, *value.keywords)] != [name]:
        return False
    called = scope.value(value.func)
    return called is None or isinstance(called, nn.Module)


def _target(statement: ast.Assign | ast.AugAssign) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def _mentions(node: ast.AST, name: str) -> int:
    return sum(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))
