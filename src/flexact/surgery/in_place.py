"""Calls that overwrite their tensor, and what can take their place so that every reader of it sees the result."""

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
_OWN_SCOPE = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def overwriting(scope: Scope, call: ast.Call, tensor: ast.expr) -> str:
    """The kind of edit for a call that overwrites its tensor: "call" where nobody else can read the tensor, "rebind"
    where that takes its name, or else "overwrite"."""
    if not isinstance(tensor, ast.Name):
        return "call" if is_fresh(scope, tensor) else "overwrite"
    inner = [
        node for node in ast.walk(scope.definition) if isinstance(node, _OWN_SCOPE) and node is not scope.definition
    ]
    statements, at = _statement_of(scope.definition, call)
    if not statements or any(_mentions(node, tensor.id) for node in inner):
        return "overwrite"
    if _last_effect(scope, statements[:at], tensor.id) != "made":
        return "overwrite"
    statement = statements[at]
    if isinstance(statement, ast.Assign) and statement.value is call:
        return "call" if _target(statement) == tensor.id else "rebind"
    if _mentions(statement, tensor.id) > 1:
        return "overwrite"
    return "call" if isinstance(statement, ast.Return) else "rebind"


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


def _last_effect(scope: Scope, statements: list[ast.stmt], name: str) -> str:
    return next(filter(None, (_effect(scope, one, name) for one in reversed(statements))), "")


def _effect(scope: Scope, statement: ast.stmt, name: str) -> str:
    """What a statement does to the tensor of a name: it has "made" it, may have "shared" it with others, or neither."""
    if not _mentions(statement, name) or (isinstance(statement, ast.AugAssign) and _target(statement) == name):
        return ""
    if isinstance(statement, ast.If):
        effects = {_last_effect(scope, branch, name) for branch in (statement.body, statement.orelse)}
        return "shared" if "shared" in effects else "made" if effects == {"made"} else ""
    if not isinstance(statement, ast.Assign) or _target(statement) != name:
        return "shared"
    value = statement.value
    if is_fresh(scope, value):
        return "made"
    if not isinstance(value, ast.Call) or [ast.unparse(one) for one in (*value.args, *value.keywords)] != [name]:
        return "shared"
    called = scope.value(value.func)  # None where a module is left out, so that this does not run
    return "" if called is None or isinstance(called, nn.Module) else "shared"


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
