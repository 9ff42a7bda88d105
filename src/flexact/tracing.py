"""Activations that are function calls: finding them, and putting modules in their place.

A forward such as `F.relu(self.bn1(self.conv1(x)))` has no module to swap. The submodule that owns it is traced alone
with torch.fx, its children untouched, and gets a subclass of its own type whose forward calls a child module instead.
It stays the same object with the same methods, and giving its first class back undoes everything.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import linecache
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from flexact.activations import is_activation, is_method, module_of_call
from flexact.activations import is_activation_function as is_function

_numbers = itertools.count()
_classes: dict[tuple[type, tuple[str, ...]], type] = {}


class CannotTrace(Exception):
    """Why a forward cannot be rewritten, in words for the user."""


@dataclass
class Call:
    """One activation call of a forward: the module that does the same, and where it stands in each graph."""

    module: nn.Module
    child: str | None
    """The child's name, where the call is one of a child module that is called several times."""
    nodes: tuple[fx.Node, ...]


@dataclass
class TracedForward:
    """The forward of one submodule, traced in training and in eval mode."""

    owner: nn.Module
    graphs: tuple[fx.Graph, ...]
    calls: list[Call]

    def rewritten(self, names: dict[int, str]) -> type:
        """The owner's type with a forward in which the numbered calls are calls of the children of these names."""
        for i, name in names.items():
            for graph, node in zip(self.graphs, self.calls[i].nodes, strict=True):
                with graph.inserting_before(node):
                    tensor = node.args[0] if node.args else node.kwargs["input"]
                    replacement = graph.create_node("call_module", name, (tensor,))
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
        codes = [graph.python_code("self") for graph in self.graphs]
        return _rewritten_class(type(self.owner), tuple(code.src for code in codes), codes[0].globals)


class Rewritten:
    """Marks the classes made here; a base of each of them."""

    flexact_sources: tuple[str, ...]
    flexact_globals: dict[str, Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the first class and the source of the forward, since the class has no importable name."""
        encoded = {
            name: (value.__name__, None) if isinstance(value, types.ModuleType) else (None, value)
            for name, value in self.flexact_globals.items()
        }
        return _restore, (first_class(self), self.flexact_sources, encoded), self.__dict__


def first_class(owner: object) -> type:
    """The type a rewritten submodule had before."""
    found = type(owner).__mro__[2] if isinstance(owner, Rewritten) else type(owner)
    return found


def trace(owner: nn.Module, per_call: bool) -> TracedForward:
    """Trace a submodule's own forward and find its activation calls; with per_call those of child modules too."""
    _refuse_unsafe_branches(type(owner).forward)
    was_training = owner.training
    graphs = []
    try:
        for training in (True, False):
            owner.training = training
            graphs.append(_Tracer().trace(owner))
    except Exception as error:
        raise CannotTrace(f"torch.fx cannot trace its forward: {' '.join(str(error).split())[:200]}") from None
    finally:
        owner.training = was_training
    found = [list(_activation_nodes(owner, graph, per_call)) for graph in graphs]
    if [key for key, *_ in found[0]] != [key for key, *_ in found[1]]:
        raise CannotTrace("its forward calls other activations in training than in eval mode")
    calls = [
        Call(module, child, (train_node, eval_node))
        for (_, module, child, train_node), (_, _, _, eval_node) in zip(*found, strict=True)
    ]
    return TracedForward(owner, tuple(graphs), calls)


def calls_functions(module: nn.Module) -> bool:
    """Whether the source of a module's forward, or of a method it calls, has functional activation calls."""
    return any(True for _ in _functional_calls(type(module), "forward", set()))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _activation_nodes(
    owner: nn.Module, graph: fx.Graph, per_call: bool
) -> Iterator[tuple[str, nn.Module, str | None, fx.Node]]:
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            module = module_of_call(node.op, node.target, node.args[1:], dict(node.kwargs))
            if module is not None:
                yield repr(module), module, None, node
        elif node.op == "call_module" and per_call:
            child = owner.get_submodule(node.target)
            if is_activation(child):
                yield node.target, child, node.target, node


def _functional_calls(cls: type, method: str, seen: set[str]) -> Iterator[str]:
    if method in seen:
        return
    seen.add(method)
    function = getattr(cls, method, None)
    tree = _source_tree(function)
    if tree is None or not isinstance(function, types.FunctionType):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        path = _attribute_path(node.func)
        if path and path[0] == "self":
            if len(path) == 2:
                yield from _functional_calls(cls, path[1], seen)
        elif is_function(_resolved(path, function.__globals__)) or (
            isinstance(node.func, ast.Attribute) and is_method(node.func.attr) and not _is_module(path, function)
        ):
            yield ast.unparse(node.func)


def _source_tree(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _attribute_path(node: ast.AST) -> list[str]:
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
    for name in path[1:]:
        value = getattr(value, name, None)
    return value


def _is_module(path: list[str], function: types.FunctionType) -> bool:
    """Whether a call such as `math.tanh` is on an imported Python module, not on a tensor."""
    return isinstance(_resolved(path[:-1], function.__globals__), types.ModuleType)


def _refuse_unsafe_branches(forward: Callable[..., Any]) -> None:
    """torch.fx silently takes `x is None` and `isinstance(x, Tensor)` as false for every argument: refuse those."""
    tree = _source_tree(forward)
    if tree is None:
        return
    arguments = set(inspect.signature(forward).parameters) - {"self"}
    for node in ast.walk(tree):
        tested: list[ast.AST] = []
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            tested = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and _attribute_path(node.func) in (["isinstance"], ["hasattr"]):
            tested = list(node.args[:1])
        for part in tested:
            if isinstance(part, ast.Name) and part.id in arguments:
                raise CannotTrace(f"its forward decides by the argument {part.id!r} ({ast.unparse(node)})")


def _rewritten_class(first: type, sources: tuple[str, ...], names: dict[str, Any]) -> type:
    key = (first, sources)
    if key not in _classes:
        forwards = [_compiled(source, names) for source in dict.fromkeys(sources)]
        members: dict[str, Any] = {"__module__": first.__module__, "__qualname__": first.__qualname__}
        if len(forwards) == 1:
            members["forward"] = forwards[0]
        else:
            members.update(_forward_train=forwards[0], _forward_eval=forwards[1], forward=_by_mode)
        members.update(flexact_sources=sources, flexact_globals=names)
        _classes[key] = type(first.__name__, (Rewritten, first), members)
    return _classes[key]


def _by_mode(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._forward_train(*args, **kwargs) if self.training else self._forward_eval(*args, **kwargs)


def _compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function of a generated source, which a debugger and `inspect.getsource` can show."""
    filename = f"<flexact forward {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(names)
    exec(compile(source, filename, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def _restore(first: type, sources: tuple[str, ...], encoded: dict[str, tuple[str | None, Any]]) -> Any:
    names = {
        name: importlib.import_module(module) if module is not None else value
        for name, (module, value) in encoded.items()
    }
    cls = _rewritten_class(first, sources, names)
    return object.__new__(cls)
