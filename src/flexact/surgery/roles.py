"""The role of an activation: hidden activation, gate, or output of the network.

A sigmoid is always treated as a gate or an output. Tanh and the other functions in `_SQUASHING` may be either: a gate
if the result multiplies something, as in an LSTM cell, or divides it or is its exponent; an output if the network
returns the result. The result is followed through the source of the forwards, across expressions, methods and modules;
the activation is hidden only if a layer uses the result. All others, such as SiLU, GELU and ReLU, are hidden
activations even where they multiply, as in SwiGLU.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from flexact.candidates.recognition import ELEMENTWISE, SIGMOIDS, function_name
from flexact.surgery.finding import Findings, Found
from flexact.surgery.rewriting import children_of
from flexact.surgery.scope import Scope, calls_of_variable, names_of, targets_of
from flexact.surgery.sources import nodes_of

_SQUASHING = {"tanh", "softsign", "softplus", "relu6", "hardtanh", "logsigmoid", "laplace", "sqrt_softplus"}
_PASSING = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand"),
    *("expand_as", "repeat", "permute", "transpose", "swapaxes", "movedim", "contiguous", "chunk", "split"),
    *("unbind", "tensor_split", "clone", "to", "type", "type_as", "float", "half", "double", "bfloat16"),
    *("cat", "concat", "stack", "clamp", "dropout", "add", "sub", "detach", *ELEMENTWISE, *SIGMOIDS),
}
_MULTIPLYING = {"mul", "mul_", "multiply", "lerp", "addcmul", "div", "div_", "divide", "true_divide", "pow", "einsum"}
_MATRIX_PRODUCTS = {"matmul", "bmm"}
_LAYERS = {"linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "layer_norm", "batch_norm"}
_PASSING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)
_PASSING_NODES = (
    *(ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.UnaryOp, ast.IfExp, ast.Attribute),
    *(ast.ListComp, ast.GeneratorExp, ast.keyword),
)


class _Use(enum.Flag):
    """How a value is used: a union if it is used several times, empty if only a condition reads it."""

    RETURNED = enum.auto()
    """The method returns it, or the network."""
    FACTOR = enum.auto()
    """It multiplies or divides something, or is its exponent."""
    LAYER = enum.auto()
    """It is the input of a layer."""
    UNCLEAR = enum.auto()


_NONE = _Use(0)


def _union(uses: Iterable[_Use]) -> _Use:
    return functools.reduce(operator.or_, uses, _NONE)


def reason_to_skip(findings: Findings, found: Found) -> str | None:
    """Return why an activation is not a hidden one, as far as the source tells; None if it is hidden."""
    function = function_name(found.original)
    if all(".parametrizations." in f".{name}" for name in found.names):
        return "it computes a parameter"
    if function in SIGMOIDS and found.names != [""]:
        return "a sigmoid, which is a gate or an output"
    places = [name.rpartition(".") for name in found.names]
    if all(attribute in children_of(findings.model.get_submodule(parent)) for parent, _, attribute in places):
        return None  # an earlier conversion made it
    is_torchs = found.kind == "function" and type(found.owner).__module__.startswith("torch.nn.")
    if function not in _SQUASHING or found.names == [""] or is_torchs:
        return None
    if found.kind == "call":
        calls = [_Called(call.edit.method, call.scope, call.node) for call in found.calls]
        uses = _uses_of_calls(findings, found.name.rpartition(".")[0], calls)
    else:
        uses = _union(_uses_of_module(findings, name) for name in found.names)
    if _Use.FACTOR in uses or any("gate" in name.rpartition(".")[2] for name in found.names):
        return "a gate: its result multiplies something"
    if _Use.LAYER in uses or (function == "relu6" and uses == _Use.RETURNED):
        return None
    if uses == _Use.RETURNED:
        return "an output activation: the network returns its result"
    return "a possible gate or output: the use of its result is unclear"


def _uses_of_module(findings: Findings, name: str) -> _Use:
    """Return the uses of a module's result. RETURNED means that the model returns it."""
    if name == "":
        return _Use.RETURNED
    parts = name.split(".")
    owner = findings.model.get_submodule(".".join(parts[:-1]))
    if type(owner).forward is nn.Sequential.forward:
        behind = list(owner._modules.values())[list(owner._modules).index(parts[-1]) + 1 :]
        passes_on = all(isinstance(module, _PASSING_MODULES) for module in behind)
        return _uses_of_module(findings, ".".join(parts[:-1])) if passes_on else _Use.LAYER
    # A forward may call what its children hold: self.fc[2](x), self.block.act(x).
    paths = [".".join(parts[:i]) for i in range(len(parts))]
    uses = _union(
        _uses_of_calls(findings, path, _calls_of_path(findings, path, parts[i:])) for i, path in enumerate(paths)
    )
    if isinstance(owner, nn.ModuleList) and len(parts) > 1:
        path, list_name = ".".join(parts[:-2]), parts[-2]
        loops = [
            (_Called(name, scope, call), loop)
            for name, scope in findings.reading(path).methods
            for loop in _loops_over(list_name, scope)
            for call in calls_of_variable(loop, loop)
        ]
        if parts[-1] == next(reversed(owner._modules)):
            uses |= _uses_of_calls(findings, path, [one for one, _ in loops])
        else:  # what follows the loop sees only the result of the last module
            uses |= _union(_uses(one.call, _Method(one.scope, loop)) for one, loop in loops) & _Use.FACTOR or _Use.LAYER
    return uses


class _Called(NamedTuple):
    """A call in a method."""

    method: str
    scope: Scope
    call: ast.Call


def _uses_of_calls(findings: Findings, path: str, calls: list[_Called]) -> _Use:
    """Return the uses of the results of calls in the methods of a module."""
    uses, waiting, seen = _NONE, list(calls), {"forward"}
    for method, scope, call in waiting:
        own = _uses(call, _Method(scope, scope.definition))
        if _Use.RETURNED in own and method == "forward":
            uses |= _uses_of_module(findings, path)
        elif _Use.RETURNED in own and method not in seen:
            seen.add(method)
            waiting += _calls_of_path(findings, path, [method])
        uses |= own & ~_Use.RETURNED
    return uses


def _calls_of_path(findings: Findings, path: str, wanted: list[str]) -> list[_Called]:
    """Return the calls of an attribute, such as self.fc[2](x), in the methods of a module."""

    def fits(names: list[str], scope: Scope) -> bool:
        pairs = zip(names, [scope.self_name, *wanted], strict=False)
        return len(names) == len(wanted) + 1 and all(own in ("*", name) for own, name in pairs)

    methods = findings.reading(path).methods
    return [
        _Called(name, scope, call)
        for name, scope in methods
        for call in scope.nodes_of(ast.Call)
        if fits(names_of(call.func), scope)
    ]


def _loops_over(list_name: str, scope: Scope) -> list[ast.For]:
    loops = scope.nodes_of(ast.For)
    return [loop for loop in loops if [scope.self_name, list_name] in map(names_of, ast.walk(loop.iter))]


@dataclasses.dataclass(frozen=True)
class _Method:
    """A method, or a loop in it, in which the uses of a value are followed."""

    scope: Scope
    tree: ast.AST
    followed: set[ast.AST] = dataclasses.field(default_factory=set)
    """The assignments that are currently being followed."""


def _uses(node: ast.AST, method: _Method) -> _Use:
    """Return the uses of an expression's value within a function."""
    parents = method.scope.parents
    parent = parents[node]
    if isinstance(parent, ast.Attribute) and isinstance(parents[parent], ast.Call):
        parent = parents[parent]  # a method of the value is called
    match parent:
        case ast.Return():
            return _Use.RETURNED
        case ast.Call():
            return _uses_in_call(parent, method)
        case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
            other = right if left is node else left
            if isinstance(parent.op, ast.MatMult):
                return _use_in_product([other])
            if isinstance(parent.op, (ast.Mult, ast.Div, ast.Pow)) and not isinstance(other, ast.Constant):
                return _Use.FACTOR
            if isinstance(parent, ast.AugAssign):
                return _uses_of_variables([left], parent, method)
            return _uses(parent, method)
        case ast.Assign(targets=targets):
            return _uses_of_variables(targets, parent, method)
        case ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
            return _uses_of_variables([target], parent, method)
        case ast.Compare() | ast.If() | ast.While():
            return _NONE
    if isinstance(parent, _PASSING_NODES):
        return _uses(parent, method)
    return _Use.RETURNED if parent is method.tree else _Use.UNCLEAR  # the tree is a lambda


def _uses_of_variables(targets: list[Any], assignment: ast.AST, method: _Method) -> _Use:
    """Return the uses of the assigned variables after their assignment."""
    if assignment in method.followed:  # a loop leads back to it
        return _NONE
    method.followed.add(assignment)
    names = {one.id for one in nodes_of(ast.Name, *targets)}
    reads = [read for name in names for read in method.scope.reads(name, assignment)]
    uses = _union(_uses(read, method) for read in reads if method.tree in method.scope.around(read))
    method.followed.remove(assignment)
    return uses


def _uses_in_call(call: ast.Call, method: _Method) -> _Use:
    """Return the uses of a value that is passed to a call, or whose method is called."""
    name, path = _last_name(call.func), names_of(call.func)
    is_own = path[:1] == [method.scope.self_name] and len(path) > 1
    if "drop" in name or ((name in _PASSING or name[:1].isupper()) and not is_own):  # an upper-case name is a class
        return _uses(call, method)
    if name in _MATRIX_PRODUCTS:
        return _use_in_product(call.args)
    if name in _MULTIPLYING:
        return _Use.FACTOR
    if is_own:
        is_layer = not hasattr(type(method.scope.owner), path[1])  # otherwise it is a method
    else:
        loops = [node for node in method.scope.nodes if isinstance(node, (ast.For, ast.comprehension))]
        is_layer = name in _LAYERS or any(name in targets_of(loop) for loop in loops)
    return _Use.LAYER if is_layer else _Use.UNCLEAR


def _use_in_product(factors: list[ast.expr]) -> _Use:
    """Return LAYER for the product with a weight, which is an attribute, and FACTOR for attention weights."""
    return _Use.LAYER if any(isinstance(factor, ast.Attribute) for factor in factors) else _Use.FACTOR


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
