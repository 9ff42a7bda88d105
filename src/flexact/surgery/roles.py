"""The role of an activation: hidden activation, gate, or output of the network.

A sigmoid is always treated as a gate or an output. Any other function that saturates can be either: it is a gate if its
result multiplies something, as in an LSTM cell, and an output if the network returns its result. The result is followed
through the source of the forwards, across expressions, methods and modules; the activation is hidden only if a layer
uses the result. SiLU, GELU and ReLU are hidden activations even where they multiply, as in SwiGLU.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from flexact.activations import ELEMENTWISE, SIGMOIDS, function_name
from flexact.surgery.finding import Found
from flexact.surgery.rewriting import children_of
from flexact.surgery.sources import CannotRewrite, definition_of

_SQUASHING = {"tanh", "softsign", "softplus", "relu6"}
_PASSING = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
    *("expand_as", "repeat", "permute", "transpose", "swapaxes", "movedim", "contiguous", "chunk", "split"),
    *("unbind", "tensor_split", "clone", "to", "type", "type_as", "float", "half", "double", "bfloat16"),
    *("cat", "concat", "stack", "clamp", "dropout", "add", "sub", "detach", *ELEMENTWISE, *SIGMOIDS),
}
_MULTIPLYING = {"mul", "mul_", "multiply", "lerp", "addcmul"}
_MATRIX_PRODUCTS = {"matmul", "bmm", "einsum"}
_LAYERS = {"linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "layer_norm", "batch_norm"}
_PASSING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)


@dataclasses.dataclass(frozen=True)
class _Method:
    cls: type
    name: str
    me: str
    """The name of the method's first parameter."""
    tree: ast.AST
    parents: dict[ast.AST, ast.AST]
    followed: set[ast.AST] = dataclasses.field(default_factory=set)
    """The assignments that are currently being followed."""

    @functools.cached_property
    def loops(self) -> list[ast.For | ast.comprehension]:
        return [node for node in self.parents if isinstance(node, (ast.For, ast.comprehension))]


_Calls = Callable[[ast.AST, str], list[ast.Call]]
"""Selects calls in a method, given its tree and the name of its first parameter."""


def reason_to_skip(model: nn.Module, found: Found) -> str | None:
    """Return why an activation is not a hidden one, as far as the source tells; None if it is hidden."""
    function = function_name(found.original)
    if all(".parametrizations." in f".{name}" for name in found.names):
        return "it computes a parameter"
    if function in SIGMOIDS and found.names != [""]:
        return "a sigmoid, which is a gate or an output"
    places = [name.rpartition(".") for name in found.names]
    if all(attribute in children_of(model.get_submodule(parent)) for parent, _, attribute in places):
        return None  # an earlier conversion made it
    is_torchs = found.kind == "function" and type(found.owner).__module__.startswith("torch.nn.")
    if function not in _SQUASHING or found.names == [""] or is_torchs:
        return None
    if found.kind == "call" and found.child is None:
        path = found.name.rpartition(".")[0]
        fates = _fates_of_calls(model, path, functools.partial(_calls_of_function, function))
    else:
        names = found.names if found.child is None else [found.child]
        fates = {fate for name in names for fate in _fates_of_module(model, name)}
    if "multiplied" in fates or any("gate" in name.rpartition(".")[2] for name in found.names):
        return "a gate: its result multiplies something"
    if "used" in fates or (function == "relu6" and fates == {"returned"}):
        return None
    if fates == {"returned"}:
        return "an output activation: the network returns its result"
    return "a gate or an output, maybe: what becomes of its result is unclear"


def _fates_of_module(model: nn.Module, name: str) -> set[str]:
    """Return the uses of a module's result: "returned" by the model, "multiplied", "used" by a layer, or "unclear"."""
    if name == "":
        return {"returned"}
    parts = name.split(".")
    owner = model.get_submodule(".".join(parts[:-1]))
    if type(owner).forward is nn.Sequential.forward:
        behind = list(owner._modules.values())[list(owner._modules).index(parts[-1]) + 1 :]
        if all(isinstance(module, _PASSING_MODULES) for module in behind):
            return _fates_of_module(model, ".".join(parts[:-1]))
        return {"used"}
    fates: set[str] = set()
    for i in range(len(parts)):  # a forward may call what its children hold: self.fc[2](x), self.block.act(x)
        fates |= _fates_of_calls(model, ".".join(parts[:i]), functools.partial(_calls_of_path, parts[i:]))
    if isinstance(owner, nn.ModuleList) and len(parts) > 1:
        path, list_name = ".".join(parts[:-2]), parts[-2]
        if parts[-1] == next(reversed(owner._modules)):
            fates |= _fates_of_calls(model, path, functools.partial(_calls_in_loop, list_name))
        else:
            fates |= _fates_before_the_last(model, path, list_name)
    return fates


def _fates_before_the_last(model: nn.Module, path: str, list_name: str) -> set[str]:
    """Return the uses of the result of a list's module, other than the last, within the loops over the list."""
    cls: Any = type(model.get_submodule(path))
    for method in _methods(cls):
        for loop in (node for node in ast.walk(method.tree) if isinstance(node, ast.For)):
            within = dataclasses.replace(method, tree=loop)
            if any("multiplied" in _followed(call, within) for call in _calls_in_loop(list_name, loop, method.me)):
                return {"multiplied"}
    return {"used"}


def _fates_of_calls(model: nn.Module, path: str, calls: _Calls) -> set[str]:
    """Return the uses of the results of the selected calls in the methods of a module."""
    fates: set[str] = set()
    cls: Any = type(model.get_submodule(path))
    waiting, seen = [calls], set()
    while waiting:
        wanted = waiting.pop()
        for method in _methods(cls):
            own = {fate for call in wanted(method.tree, method.me) for fate in _followed(call, method)}
            if "returned" in own and method.name == "forward":
                own = own - {"returned"} | _fates_of_module(model, path)
            elif "returned" in own:
                own.remove("returned")
                if method.name not in seen:
                    seen.add(method.name)
                    waiting.append(functools.partial(_calls_of_path, [method.name]))
            fates |= own
    return fates


def _calls_of_function(name: str, tree: ast.AST, me: str) -> list[ast.Call]:
    """Return calls such as `torch.tanh(x)`, `F.tanh(x)` and `x.tanh_()`, but not `self.tanh(x)`."""
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func).rstrip("_") == name
    ]
    return [call for call in calls if _path(call.func)[:1] != [me]]


def _calls_of_path(path: list[str], tree: ast.AST, me: str) -> list[ast.Call]:
    calls = [(node, _path(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node, own in calls if len(own) == len(path) + 1 and all(map(_fits, own, [me, *path]))]


def _fits(part: str, name: str) -> bool:
    return part in ("*", name)


def _calls_in_loop(list_name: str, tree: ast.AST, me: str) -> list[ast.Call]:
    """Return the calls of the loop variable in loops over one of the module's lists."""
    found = []
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        if any(_path(node) == [me, list_name] for node in ast.walk(loop.iter)):
            calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
            found += [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in _targets(loop)]
    return found


def _followed(node: ast.AST, method: _Method) -> Iterator[str]:
    """Return the uses of an expression's value within a function."""
    parent = method.parents[node]
    if isinstance(parent, ast.Return) or parent is method.tree:  # that of a lambda
        yield "returned"
    elif isinstance(parent, ast.Attribute) and isinstance(method.parents[parent], ast.Call):
        yield from _followed_through(method.parents[parent], method)
    elif isinstance(parent, ast.Call):
        yield from _followed_through(parent, method)
    elif isinstance(parent, (ast.BinOp, ast.AugAssign)):
        other = parent.value if isinstance(parent, ast.AugAssign) else parent.right
        other = parent.left if isinstance(parent, ast.BinOp) and other is node else other
        if isinstance(parent.op, ast.MatMult):
            yield _fate_of_product([other])
        elif isinstance(parent.op, ast.Mult) and not isinstance(other, ast.Constant):
            yield "multiplied"
        elif isinstance(parent, ast.BinOp):
            yield from _followed(parent, method)
        else:
            yield from _followed_assignment([parent.target], parent, method)
    elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        yield from _followed_assignment(targets, parent, method)
    elif isinstance(parent, _PASSING_NODES):
        yield from _followed(parent, method)
    elif not isinstance(parent, (ast.Compare, ast.If, ast.While)):
        yield "unclear"


def _followed_assignment(targets: list[Any], assignment: ast.AST, method: _Method) -> list[str]:
    """Return the uses of the assigned variables after their assignment."""
    if assignment in method.followed:  # a loop leads back to it
        return []
    method.followed.add(assignment)
    names = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    reads = [read for name in names for read in _reads(name, assignment, method)]
    fates = [fate for read in reads for fate in _followed(read, method)]
    method.followed.remove(assignment)
    return fates


_PASSING_NODES = (
    *(ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.UnaryOp, ast.IfExp, ast.Attribute),
    *(ast.ListComp, ast.GeneratorExp, ast.keyword),
)


def _followed_through(call: ast.AST, method: _Method) -> Iterator[str]:
    """Return the uses of a value that is passed to a call, or whose method is called."""
    assert isinstance(call, ast.Call)
    name, path = _last_name(call.func), _path(call.func)
    is_own = path[:1] == [method.me] and len(path) > 1
    if "drop" in name or ((name in _PASSING or name[:1].isupper()) and not is_own):  # an upper-case name is a class
        yield from _followed(call, method)
    elif name in _MATRIX_PRODUCTS:
        yield _fate_of_product(call.args)
    elif name in _MULTIPLYING:
        yield "multiplied"
    elif is_own:  # a layer, or a method
        yield "unclear" if hasattr(method.cls, path[1]) else "used"
    else:
        yield "used" if name in _LAYERS or any(name in _targets(loop) for loop in method.loops) else "unclear"


def _fate_of_product(factors: list[ast.expr]) -> str:
    """Return "used" for the product with a weight, which is an attribute, and "multiplied" for attention weights."""
    return "used" if any(isinstance(factor, ast.Attribute) for factor in factors) else "multiplied"


def _reads(name: str, assignment: ast.AST, method: _Method) -> list[ast.AST]:
    """Return the reads of a variable between an assignment and the next one that always replaces its value."""
    start, end = _end(assignment), (10**9, 0)
    blocks = {id(one) for one in _ancestors(assignment, method)}
    uses = [node for node in ast.walk(method.tree) if isinstance(node, ast.Name) and node.id == name]
    for node in uses:
        statement = next(one for one in _ancestors(node, method) if isinstance(one, ast.stmt))
        replaces = isinstance(node.ctx, ast.Store) and not isinstance(statement, ast.AugAssign)
        if replaces and _end(node) > start and id(method.parents[statement]) in blocks and _end(statement) < end:
            end = _end(statement)
    augmented = [node for node in uses if isinstance(method.parents[node], ast.AugAssign)]
    reads = [node for node in uses if isinstance(node.ctx, ast.Load)]
    again = [
        loop for loop in _ancestors(assignment, method) if isinstance(loop, ast.For) and not _runs(loop, assignment)
    ]
    return [
        node
        for node in (*reads, *augmented)
        if start < _end(node) <= end or (_end(node) < start and any(loop in _ancestors(node, method) for loop in again))
    ]


def _runs(loop: ast.For, assignment: ast.AST) -> bool:
    """Return whether an assignment calls the loop variable, which is another layer in the next iteration."""
    calls = [node.func for node in ast.walk(assignment) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in _targets(loop) for called in calls)


def _targets(loop: ast.For | ast.comprehension) -> set[str]:
    return {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}


def _ancestors(node: ast.AST, method: _Method) -> Iterator[ast.AST]:
    while node in method.parents:
        yield node
        node = method.parents[node]
    yield node


def _end(node: ast.AST) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]


@functools.cache
def _methods(cls: Any) -> list[_Method]:
    """Return the methods of a type and its bases whose source is available."""
    found: list[_Method] = []
    own = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    for name, value in itertools.chain.from_iterable(vars(base).items() for base in own):
        function: Any = inspect.unwrap(value) if callable(value) else None
        if not inspect.isfunction(function) or not function.__code__.co_argcount:
            continue
        try:
            tree = definition_of(function)
        except CannotRewrite:
            continue
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        found.append(_Method(cls, name, function.__code__.co_varnames[0], tree, parents))
    return found


def _path(node: ast.AST) -> list[str]:
    """Return ["self", "fc", "2"] for self.fc[2], with "*" for a variable index; empty unless it starts at a name."""
    names: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        else:
            names.insert(0, str(node.slice.value) if isinstance(node.slice, ast.Constant) else "*")
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
