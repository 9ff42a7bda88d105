"""In-place calls: whether any other code can observe that a tensor was overwritten."""

from __future__ import annotations

import ast

import torch
import torch.nn.functional as F
from torch import nn

from flexact.surgery.scope import Scope

_NEW_FROM_MODULES = {
    f"torch.nn.modules.{name}" for name in ("batchnorm", "conv", "instancenorm", "linear", "normalization")
}
_NEW_FROM_FUNCTIONS = (
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.linear, F.bilinear, torch.matmul, torch.cat, torch.stack),
    *(F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm),
)


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
