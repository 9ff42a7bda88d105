"""What the source of a forward says: whether it names activations, and why it must not be traced.

Read are the forward itself and the methods and plain functions that it calls, as far as their source is there.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import nn
from torch.overrides import get_testing_overrides

from flexact.activations import is_activation_function, is_activation_type, is_method, makes_activations

# Questions that torch.fx answers wrongly while it traces, since its stand-ins are no tensors.
_ABOUT_A_VALUE = {"isinstance", "issubclass", "hasattr", "getattr", "callable", "type", "is_tensor"}
_ABOUT_THE_MODE = {"is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"}
_CHANGES_A_CONTAINER = {"append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "add"}
# How torch's own functions call the parameters that take a function or a module.
_TAKES_A_FUNCTION = {"function", "functions", "func", "true_fn", "body_fn", "combine_fn", "model", "module"}


@dataclass(frozen=True)
class _Source:
    """A function that a forward reaches, and what it calls the module that it is a method of ("" for none)."""

    function: types.FunctionType
    tree: ast.AST
    me: str


def names_activations(owner: nn.Module) -> bool:
    """Whether the source behind a module's forward names a functional activation."""
    for source in _reached(type(owner)):
        names = _names(source.function)
        for node in ast.walk(source.tree):
            path = _path(node)
            if path[:1] == [source.me]:
                if len(path) == 2 and path[1] not in vars(owner) and is_activation_function(_static(owner, path[1])):
                    return True
            elif is_activation_function(_resolved(path, names)):
                return True
            if isinstance(node, ast.Call) and _is_method_call(node.func, owner, names, source.me):
                return True
    return False


def may_call_again(owner: nn.Module, attributes: set[str]) -> bool:
    """Whether a forward may call one of these attributes more than once, as far as its source tells."""
    mentions: Counter[str] = Counter()
    for source in _reached(type(owner)):
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.For, ast.While, ast.comprehension)):
                return True
            path = _path(node)
            if len(path) == 2 and path[0] == source.me and path[1] in attributes:
                mentions[path[1]] += 1 if source.function.__name__ == "forward" else 2
    return any(count > 1 for count in mentions.values())


def settings_read(owner: nn.Module) -> list[str]:
    """The plain settings of a module (numbers, switches, strings) that its forward reads, which a trace fixes."""
    found = {
        path[1]
        for source in _reached(type(owner))
        for path in map(_path, ast.walk(source.tree))
        if len(path) >= 2 and path[0] == source.me
    }
    return sorted(
        name
        for name in found - {"training", "inplace"}  # the one is followed, the other changes no value
        if isinstance(vars(owner).get(name), (bool, int, float, str))
    )


def made_inline(owner: nn.Module) -> str | None:
    """The activation module that a forward makes anew each time, as in `nn.ReLU()(x)` or `ACT2FN["relu"](x)`: its type,
    or how the forward gets it; None where none."""
    for source in _reached(type(owner)):
        names = _names(source.function)
        for node in ast.walk(source.tree):
            made = _resolved(_path(node.func), names) if isinstance(node, ast.Call) else None
            if isinstance(made, type) and is_activation_type(made):
                return made.__name__
            if isinstance(node, ast.Subscript) and makes_activations(_resolved(_path(node.value), names)):
                return ast.unparse(node)
    return None


def reason_not_to_trace(owner: nn.Module) -> str | None:
    """What a trace of a forward would silently lose or get wrong, in words for the user; None where nothing."""
    if "forward" in vars(owner):
        return "its forward was replaced on this object alone"
    for source in _reached(type(owner)):
        name = source.function.__name__
        subject = "its forward" if name == "forward" else f"its forward calls {name}, which"
        names = _names(source.function)
        arguments = set(inspect.signature(source.function).parameters) - {source.me}
        for node in ast.walk(source.tree):
            problem = _problem(node, arguments, source.me)
            path = _path(node)
            value = vars(owner).get(path[1]) if len(path) == 2 and path[0] == source.me else _resolved(path, names)
            if problem is None and _is_lost(value):
                problem = f"uses {ast.unparse(node)}, which a trace loses"
            if problem:
                return f"{subject} {problem}"
    return None


def _is_lost(value: Any) -> bool:
    """Whether a trace goes through a function of torch's and leaves only what runs inside it: one that runs a given
    function in a way of its own, as torch.utils.checkpoint does, or a torch.autograd.Function with its own backward."""
    while isinstance(value, functools.partial):
        value = value.func
    home = getattr(value, "__self__", None)
    if isinstance(home, type) and issubclass(home, torch.autograd.Function):
        return getattr(value, "__name__", "") == "apply"
    if not isinstance(value, types.FunctionType) or not _is_torchs(value) or value in get_testing_overrides():
        return False
    return not _TAKES_A_FUNCTION.isdisjoint(inspect.signature(value).parameters)


def _problem(node: ast.AST, arguments: set[str], me: str) -> str | None:
    tested: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef) and any(_path(one) != ["staticmethod"] for one in node.decorator_list):
        return f"is decorated with @{ast.unparse(node.decorator_list[0])}, which a trace may lose"
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return f"has a block `with {ast.unparse(node.items[0])}`, which a trace loses"
    if isinstance(node, ast.Try):
        return "has a try block, which a trace loses"
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load) and _root(node) == me:
        return f"changes {ast.unparse(node)}, which a trace does only once"
    if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
        tested = [node.left, *node.comparators]
    elif isinstance(node, ast.Call):
        called = _path(node.func)
        last = called[-1] if called else ""
        changes = last in _CHANGES_A_CONTAINER or (last.endswith("_") and not is_method(last))
        if called[:1] == [me] and len(called) > 2 and changes:
            return f"changes {'.'.join(called[:-1])}, which a trace does only once"
        if last in _ABOUT_THE_MODE:
            return f"decides by {ast.unparse(node)}"
        tested = node.args[:1] if last in _ABOUT_A_VALUE else []
    for part in tested:
        decides_by = [name.id for name in ast.walk(part) if isinstance(name, ast.Name) and name.id in arguments]
        if decides_by:
            return f"decides by the argument {decides_by[0]!r} ({ast.unparse(node)})"
    return None


def _reached(cls: type) -> list[_Source]:
    """The forward of a type, and the methods and plain functions that it calls, as far as their source is there."""
    found: dict[types.FunctionType, _Source] = {}
    waiting: list[tuple[Any, bool]] = [(getattr(cls, "forward", None), True)]
    while waiting:
        value, is_method_of_cls = waiting.pop(0)
        function = inspect.unwrap(value)
        if not isinstance(function, types.FunctionType) or function in found:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            continue
        code = function.__code__
        found[function] = _Source(function, tree, code.co_varnames[0] if is_method_of_cls and code.co_argcount else "")
        waiting.extend(_called(found[function], cls))
    return list(found.values())


def _called(source: _Source, cls: type) -> Iterator[tuple[Any, bool]]:
    """What a function calls, and whether that is a method."""
    names = _names(source.function)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        path = _path(node.func)
        if path[:1] == [source.me]:
            if len(path) == 2:
                is_static = isinstance(inspect.getattr_static(cls, path[1], None), staticmethod)
                yield getattr(cls, path[1], None), not is_static
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            if _path(node.func.value.func) == ["super"]:
                yield _above(cls, source.function, node.func.attr), True
        else:
            value = _resolved(path, names)
            if isinstance(value, types.FunctionType) and not _stays_whole(value):
                yield value, False


def _stays_whole(function: types.FunctionType) -> bool:
    """Whether there is nothing to read in a function: torch's own, and those given to torch.fx.wrap."""
    wrapped = getattr(torch.fx._symbolic_trace, "_wrapped_fns_to_patch", {})
    return _is_torchs(function) or (id(function.__globals__), function.__name__) in wrapped


def _is_torchs(function: types.FunctionType) -> bool:
    return f"{function.__module__}.".startswith("torch.")


def _above(cls: type, function: types.FunctionType, method: str) -> Any:
    """What `super().method` is in a method of a type."""
    homes = [i for i, base in enumerate(cls.__mro__) if function in map(inspect.unwrap, _functions(base))]
    bases = cls.__mro__[homes[0] + 1 :] if homes else ()
    return next((vars(base)[method] for base in bases if method in vars(base)), None)


def _functions(cls: type) -> list[types.FunctionType]:
    return [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]


def _names(function: types.FunctionType) -> dict[str, Any]:
    """What a function's global and enclosing names stand for."""
    enclosing = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            enclosing[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return {**function.__globals__, **enclosing}


def _path(node: ast.AST) -> list[str]:
    """["F", "relu"] for F.relu; empty where the chain does not start at a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _resolved(path: list[str], names: dict[str, Any]) -> Any:
    if not path or path[0] not in names:
        return None
    value = names[path[0]]
    try:
        for name in path[1:]:
            value = getattr(value, name)
    except Exception:  # an attribute may be computed, and fail in its own way
        return None
    return value


def _static(owner: nn.Module, attribute: str) -> Any:
    """An attribute of the type, with no property run."""
    value = inspect.getattr_static(type(owner), attribute, None)
    return value.__func__ if isinstance(value, staticmethod) else value


def _is_method_call(called: ast.expr, owner: nn.Module, names: dict[str, Any], me: str) -> bool:
    """Whether `x.relu` is that of a tensor: not `self.relu`, a grandchild's or an imported module's."""
    if not isinstance(called, ast.Attribute) or not is_method(called.attr):
        return False
    path = _path(called)
    if path[:1] == [me]:
        return len(path) > 2 and path[1] not in owner._modules
    return not isinstance(_resolved(path[:-1], names), types.ModuleType)


def _root(node: ast.expr) -> str | None:
    """The name at which `self.a.b[0]` starts."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
