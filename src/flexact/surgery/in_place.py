"""Calls that overwrite their tensor: whether anything else can see that they do."""

from __future__ import annotations

import ast

import torch
import torch.nn.functional as F
from torch import nn

from flexact.surgery.scope import Scope

_MAKES_NEW = {f"torch.nn.modules.{name}" for name in ("batchnorm", "conv", "instancenorm", "linear", "normalization")}
_FUNCTIONS_MAKE_NEW = (
    *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.linear, F.bilinear, torch.matmul, torch.cat, torch.stack),
    *(F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm),
)


def is_unseen(scope: Scope, call: ast.Call, tensor: ast.expr) -> bool:
    """Whether nothing but the call itself can read the tensor that it overwrites: an expression's result, or a variable
    that holds one and gets the call's result, or is returned with it."""
    if not isinstance(tensor, ast.Name):
        return is_fresh(scope, tensor)
    block, at = _statement_of(scope.definition, call)
    if not block:
        return False
    statement = block[at]
    is_rebound = isinstance(statement, ast.Assign) and statement.value is call and _target(statement) == tensor.id
    if not is_rebound and not (isinstance(statement, ast.Return) and _mentions(statement, tensor.id) == 1):
        return False
    for before in reversed(block[:at]):
        if isinstance(before, ast.Assign) and _target(before) == tensor.id and is_fresh(scope, before.value):
            return True
        if not _keeps(scope, before, tensor.id):
            return False
    return False


def is_fresh(scope: Scope, node: ast.AST) -> bool:
    """Whether an expression makes a tensor that nothing else can hold: arithmetic, or a layer of torch's own."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.BinOp)
    module = scope.value(node.func)
    while type(module) is nn.Sequential and len(module):
        module = module[-1]
    if not isinstance(module, nn.Module):
        return any(module is function for function in _FUNCTIONS_MAKE_NEW)
    if type(module).__module__ in _MAKES_NEW and type(module) is not nn.Identity:
        return True
    return len(node.args) == 1 and not node.keywords and is_fresh(scope, node.args[0])


def _keeps(scope: Scope, statement: ast.stmt, name: str) -> bool:
    """Whether a statement gives nobody else the tensor of a variable: it adds to it, or calls a module with it alone,
    which may be None, and left out."""
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


def _statement_of(definition: ast.AST, node: ast.AST) -> tuple[list[ast.stmt], int]:
    """The innermost block that has a node, and the place of its statement there."""
    found: tuple[list[ast.stmt], int] = ([], 0)
    for outer in ast.walk(definition):  # from the outside in
        for _, block in ast.iter_fields(outer):
            for i, statement in enumerate(block if isinstance(block, list) else []):
                if isinstance(statement, ast.stmt) and any(one is node for one in ast.walk(statement)):
                    found = block, i
    return found
