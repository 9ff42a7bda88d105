"""Static analysis of a method: the values of its names, what reads its variables, and which tensors it shares."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections import ChainMap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flexact.surgery.sources import Node, codes_of, contents, definition_of, nodes_in, nodes_of

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
        self.nodes = nodes_in(function)
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {name: contents(cell) for name, cell in cells}
        self._names = ChainMap[str, Any](held, function.__globals__, vars(builtins))
        self._bound = {name for one in codes_of(code) for name in (*one.co_varnames, *one.co_cellvars)}
        self._bound.update(*(node.names for node in self.nodes if isinstance(node, (ast.Global, ast.Nonlocal))))
        stored = [node for node in self.nodes if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)]
        self.stored = {node.attr for node in stored if isinstance(node, ast.Attribute)}
        self.strings = {node.value for node in self.nodes if isinstance(node, ast.Constant) and type(node.value) is str}
        names = [node.id for node in stored if isinstance(node, ast.Name)]
        names += [node.arg for node in self.nodes if isinstance(node, ast.arg)]
        first = code.co_varnames[0] if code.co_argcount else ""
        self.self_name = first if names.count(first) == 1 else ""  # otherwise it has another value somewhere

    def nodes_of(self, kind: type[Node]) -> list[Node]:
        """Return the nodes of one type."""
        return [node for node in self.nodes if isinstance(node, kind)]

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        first, *names = names_of(node) or [""]
        value = UNKNOWN if first in self._bound else self._names.get(first, UNKNOWN)
        if first and first == self.self_name:
            value = self.owner
        for name in names:
            try:
                value = UNKNOWN if value is UNKNOWN else attribute_of(value, name)
            except Exception:  # a lazy module that cannot be imported, or an object whose attributes raise errors
                return UNKNOWN
        return value

    def truth(self, node: ast.AST) -> bool | None:
        """Return whether a condition on the module's settings holds; None if it depends on anything else."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)) and len(node.ops) == 1:
            left, right = self._setting(node.left), self._setting(node.comparators[0])
            is_known = left is not UNKNOWN and right is not UNKNOWN
            return (left is right) == isinstance(node.ops[0], ast.Is) if is_known else None
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(part) for part in node.values]
            decisive = isinstance(node.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        value = self._setting(node)
        return bool(value) if value is None or isinstance(value, (bool, int, float, str)) else None

    def _setting(self, node: ast.AST) -> Any:
        """Return the value of an expression; UNKNOWN if it is the mode or an attribute that the method assigns."""
        name = node.attr if isinstance(node, ast.Attribute) else ""
        return UNKNOWN if name == "training" or name in self.stored else self.value(node)

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @functools.cached_property
    def idle(self) -> set[ast.AST]:
        """The nodes in branches that the module's settings rule out."""
        branches = (self._branches(node) for node in self.nodes if isinstance(node, (ast.If, ast.IfExp)))
        return {node for _, ruled_out in branches for one in ruled_out for node in ast.walk(one)}

    def _branches(self, node: ast.If | ast.IfExp) -> tuple[list[ast.AST], list[ast.AST]]:
        """Return the branch that the module's settings choose, and the other one; both empty if that is unclear."""
        truth = self.truth(node.test)
        branches: list[Any] = [node.body, node.orelse] if truth else [node.orelse, node.body]
        chosen, other = (branch if isinstance(branch, list) else [branch] for branch in branches)
        return ([], []) if truth is None else (chosen, other)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return a node and the nodes around it, from the inside to the outside."""
        yield node
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        return next(one for one in self.around(node) if isinstance(one, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        lists = (value for _, value in ast.iter_fields(self.parents[statement]) if isinstance(value, list))
        return next(value for value in lists if statement in value)

    def always_follows(self, later: ast.stmt, node: ast.AST, by_settings: bool = True) -> bool:
        """Return whether a statement runs whenever the end of the block of a node, or of a node around it, is reached:
        it is in that block, or in a branch there that the module's settings choose."""
        around = [one for one in self.around(node) if isinstance(one, ast.stmt) and one is not self.definition]
        while not any(one in self.block(later) for one in around):
            parent = self.parents[later]
            if not by_settings or not isinstance(parent, ast.If) or later not in self._branches(parent)[0]:
                return False
            later = parent
        return True

    def nodes_between(self, first: ast.AST, last: ast.AST) -> list[ast.AST]:
        """Return two nodes and those between them in the source, in which Python also evaluates simple expressions."""
        placed: list[Any] = [node for node in self.nodes if hasattr(node, "end_lineno")]
        return [node for node in placed if start_of(node) >= start_of(first) and end_of(node) <= end_of(last)]

    def reads(self, name: str, assignment: ast.AST, by_settings: bool = True) -> list[ast.Name]:
        """Return the reads of a variable that may see the value of an assignment: those before the next assignment that
        always replaces it (see `always_follows`), and in a loop those of the next iteration."""
        start, end = end_of(assignment), (10**9, 0)
        names = [node for node in self.nodes_of(ast.Name) if node.id == name]
        for node in names:
            statement = self.statement(node)
            is_later = isinstance(node.ctx, ast.Store) and start < end_of(node) and end_of(statement) < end
            if is_later and self.always_follows(statement, assignment, by_settings):
                end = end_of(statement)
        reads = [one for one in names if isinstance(one.ctx, ast.Load) or isinstance(self.parents[one], ast.AugAssign)]
        loops = [loop for loop in self.around(assignment) if isinstance(loop, (ast.For, ast.While))]
        again = {loop for loop in loops if isinstance(loop, ast.While) or not calls_of_variable(loop, assignment)}
        return [
            node
            for node in reads
            if start < end_of(node) <= end or (end_of(node) < start and not again.isdisjoint(self.around(node)))
        ]

    def calls_of(self, module: nn.Module) -> list[ast.Call]:
        """Return the calls of a module with one argument."""
        return [call for call in self.nodes_of(ast.Call) if len(call.args) == 1 and self.value(call.func) is module]

    def path(self, node: ast.AST) -> str | None:
        """Return the name of a submodule or an attribute of the module: "inner.1" for `self.inner[1]`."""
        first, *names = names_of(node) or [""]
        return ".".join(names) if first and first == self.self_name and "*" not in names else None


def start_of(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


def end_of(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


def calls_of_variable(loop: ast.For, tree: ast.AST) -> list[ast.Call]:
    """Return the calls of a loop's variable, which is a different layer in each iteration."""
    return [
        call
        for call in nodes_of(ast.Call, tree)
        if isinstance(call.func, ast.Name) and call.func.id in targets_of(loop)
    ]


def targets_of(loop: ast.For | ast.comprehension) -> set[str]:
    return {node.id for node in nodes_of(ast.Name, loop.target)}


def names_of(node: ast.AST) -> list[str]:
    """Return ["self", "fc", "2"] for self.fc[2], with "*" for a variable index; empty unless it starts at a name."""
    names: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        else:
            names.insert(0, str(node.slice.value) if isinstance(node.slice, ast.Constant) else "*")
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def attribute_of(value: Any, name: str) -> Any:
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


def tensor_of(call: ast.Call) -> ast.expr | None:
    """Return the input of an activation call: its first argument, or the tensor whose method it is."""
    if not call.args and not call.keywords:
        return call.func.value if isinstance(call.func, ast.Attribute) else None
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "input")]
    return given[0] if given and not isinstance(given[0], ast.Starred) else None


def is_unobserved(scope: Scope, call: ast.Call, tensor: ast.expr) -> bool:
    """Return whether only the call can read the tensor that it overwrites: the result of an expression, or a local
    variable that holds one, if the result of the call replaces it, or nothing reads the variable later."""
    if not isinstance(tensor, ast.Name) or isinstance(scope.definition, ast.Lambda):
        return is_fresh(scope, tensor)
    inner = [one for one in scope.nodes if isinstance(one, (ast.Lambda, ast.FunctionDef)) and one != scope.definition]
    last = [statement for one in scope.nodes if isinstance(one, ast.Try) for statement in one.finalbody]
    if any(mentions(node, tensor.id) for node in (*inner, *last)):
        return False
    statement = scope.statement(call)
    if assigned(statement, tensor.id) is not call:
        is_read_later = not isinstance(statement, ast.Return) and scope.reads(tensor.id, statement)
        if is_read_later or mentions(statement, tensor.id) > 1:
            return False
    block = scope.block(statement)
    return is_unshared_after(scope, block[: block.index(statement)], tensor.id, False)


def is_unshared_after(scope: Scope, block: Sequence[ast.AST], name: str, is_unshared: bool) -> bool:
    """Return whether a variable is the only reference to its tensor after these statements.

    is_unshared: whether it is before them.
    """
    for statement in block:
        value = assigned(statement, name)
        if isinstance(statement, ast.If):
            branches = statement.body, statement.orelse
            is_unshared = all(is_unshared_after(scope, branch, name, is_unshared) for branch in branches)
        elif value is not None:
            is_unshared = is_fresh(scope, value, name if is_unshared else "")
        elif target_of(statement) != name:
            is_unshared = is_unshared and not mentions(statement, name)
    return is_unshared


def is_fresh(scope: Scope, node: ast.AST, unshared: str = "") -> bool:
    """Return whether nothing else holds the tensor of an expression: an unshared variable, arithmetic, the call of a
    layer of torch, or of another module whose only argument is such a tensor. A layer that is None is never called."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.BinOp) or (isinstance(node, ast.Name) and node.id == unshared)
    module = scope.value(node.func)
    if any(module is function for function in _NEW_FROM_FUNCTIONS) or is_new_from(module):
        return True
    takes_one = len(node.args) == 1 and not node.keywords and (module is None or isinstance(module, nn.Module))
    return takes_one and not (module and module._forward_hooks) and is_fresh(scope, node.args[0], unshared)


def is_new_from(module: Any) -> bool:
    """Return whether a module is a layer of torch without hooks, so that nothing else holds its result."""
    while type(module) is nn.Sequential and len(module) and not module._forward_hooks:
        module = module[-1]
    is_layer = type(module).__module__ in _NEW_FROM_MODULES and type(module) is not nn.Identity
    return is_layer and not module._forward_hooks


def target_of(statement: ast.AST) -> str:
    """Return the variable that an assignment or a statement such as `+=` assigns to; empty for anything else."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else targets
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def assigned(statement: ast.AST, name: str) -> ast.expr | None:
    """Return the value of an assignment to a variable."""
    return statement.value if isinstance(statement, ast.Assign) and target_of(statement) == name else None


def mentions(node: ast.AST, name: str) -> int:
    return sum(one.id == name for one in nodes_of(ast.Name, node))
