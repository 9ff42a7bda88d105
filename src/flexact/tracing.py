"""Activations that are function calls: finding them, and putting modules in their place.

A forward such as `F.relu(self.bn1(self.conv1(x)))` has no module to swap. The submodule that owns it is traced alone
with torch.fx, its children untouched, and gets a subclass of its own type whose forward calls a child module instead.
It stays the same object with the same methods, and giving its first class back undoes everything.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import linecache
import pickle
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from flexact.activations import is_activation, is_activation_function, module_of_call
from flexact.sources import reason_not_to_trace

Forward = tuple[str, dict[str, Any]]
"""A generated source, and what its global names stand for."""
Link = tuple[tuple[str, dict[str, tuple[str | None, Any]]], ...]
"""Forwards in a pickle: a name stands for a Python module, by that one's name, or for a value."""

_numbers = itertools.count()
_classes: dict[tuple[type, tuple[str, ...]], type] = {}


class CannotTrace(Exception):
    """Why a forward cannot be rewritten, in words for the user."""


@dataclass
class Call:
    """One activation call of a forward: the module that does the same, and where it stands in each graph."""

    module: nn.Module
    child: str | None
    """With per_call: the child module, or the function kept as an attribute, that is called several times."""
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
                _replace(graph, node, name)
        return self.subclass(type(self.owner))

    def subclass(self, first: type) -> type:
        """A subclass of the owner's type, or of one made from it, whose forward is what the graphs are now."""
        codes = [graph.python_code("self") for graph in self.graphs]
        return rewritten_class(first, tuple((code.src, code.globals) for code in codes))


class Rewritten:
    """Marks the classes made here; a base of each of them."""

    flexact_first: type
    flexact_forwards: tuple[Forward, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the first class and the sources of the forward, since the class has no importable name."""
        cls: type = type(self)
        chain: list[Link] = []
        while issubclass(cls, Rewritten):  # more than one link where an extracted model was converted again
            chain.insert(0, _link(cls.flexact_forwards))
            cls = cls.flexact_first
        return _restore, (cls, chain), self.__dict__


def trace_of_graph(owner: fx.GraphModule) -> TracedForward:
    """The forward of a GraphModule: a copy of its graph, since it copies and saves itself by its own."""
    graph = copy.deepcopy(owner.graph)
    if "forward" in vars(owner) or graph.python_code("self").src != owner.code:
        raise CannotTrace("its forward is not that of its graph; call its recompile()")
    return TracedForward(owner, (graph,), [])


def first_class(owner: nn.Module) -> type:
    """The type a rewritten submodule had before."""
    return owner.flexact_first if isinstance(owner, Rewritten) else type(owner)


def trace(owner: nn.Module, per_call: bool) -> TracedForward:
    """Trace a submodule's own forward and find its activation calls; with per_call also those of any attribute that
    is called several times."""
    reason = reason_not_to_trace(owner)
    if reason is not None:
        raise CannotTrace(reason)
    graphs = [_graph(owner, training) for training in (True, False)]
    found = [list(_activation_nodes(owner, graph, per_call)) for graph in graphs]
    if [key for key, *_ in found[0]] != [key for key, *_ in found[1]]:
        raise CannotTrace("its forward calls other activations in training than in eval mode")
    times = Counter(child for _, _, child, _ in found[0])
    calls = [
        Call(module, child, (train_node, eval_node))
        for (_, module, child, train_node), (_, _, _, eval_node) in zip(*found, strict=True)
        if child is None or times[child] > 1
    ]
    return TracedForward(owner, tuple(graphs), calls)


class _Tracer(fx.Tracer):
    """Goes into no child, and does not compute with buffers while it traces."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_attribute(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call of a function kept as an attribute; generated as `self.name(...)`, as that of a child is."""
        return self.create_proxy("call_module", name, args, kwargs)


def _graph(owner: nn.Module, training: bool) -> fx.Graph:
    """One trace; the owner's attributes are as before when it is done."""
    tracer = _Tracer()
    before = dict(vars(owner))
    owner.training = training
    for name, value in before.items():
        if is_activation_function(value):
            vars(owner)[name] = functools.partial(tracer.call_attribute, name)
    try:
        with _same_random_numbers():
            graph = tracer.trace(owner)
        added = vars(owner).keys() - before.keys()
    except CannotTrace:
        raise
    except Exception as error:
        raise CannotTrace(f"torch.fx cannot trace its forward: {' '.join(str(error).split())[:200]}") from None
    finally:
        vars(owner).clear()
        vars(owner).update(before)
    if added:
        raise CannotTrace("its forward makes a tensor of its own, which a trace would freeze")
    return graph


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Refuse a forward that draws numbers while it is traced, which would be the same ever after; undo the draws."""
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
        after = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
        if pickle.dumps(before[1:]) != pickle.dumps(after[1:]) or not torch.equal(before[0], after[0]):
            raise CannotTrace("its forward draws random numbers, which a trace would freeze")
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])


def _activation_nodes(
    owner: nn.Module, graph: fx.Graph, per_call: bool
) -> Iterator[tuple[str, nn.Module, str | None, fx.Node]]:
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            module = module_of_call(node.op, node.target, node.args[1:], dict(node.kwargs))
            if module is not None:
                if _is_in_place(node) and not node.users and not _later_users(node):
                    raise CannotTrace(f"its forward overwrites a part of a tensor in place ({node.target})")
                yield repr(module), module, None, node
        elif node.op == "call_module" and per_call:
            function = vars(owner).get(node.target)
            if is_activation_function(function):
                module = module_of_call("call_function", function, node.args[1:], dict(node.kwargs))
            else:
                child = owner.get_submodule(node.target)
                module = child if is_activation(child) else None
            if module is not None:
                yield node.target, module, node.target, node


def _replace(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Put the call of a child in the place of a call; what an in-place call overwrote is its result from there on."""
    tensor = _tensor_of(node)
    with graph.inserting_before(node):
        replacement = graph.create_node("call_module", name, (tensor,))
    later = _later_users(node) if _is_in_place(node) else set()
    tensor.replace_all_uses_with(replacement, delete_user_cb=lambda user: user in later)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def _tensor_of(node: fx.Node) -> fx.Node:
    tensor = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(tensor, fx.Node)
    return tensor


def _is_in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    flags = [arg for arg in node.args[1:] if isinstance(arg, bool)]
    return (node.op != "call_module" and name.endswith("_")) or node.kwargs.get("inplace") is True or True in flags


def _later_users(node: fx.Node) -> set[fx.Node]:
    """Who uses a call's input after it."""
    order = {one: place for place, one in enumerate(node.graph.nodes)}
    return {user for user in _tensor_of(node).users if order[user] > order[node]}


def rewritten_class(first: type, forwards: tuple[Forward, ...]) -> type:
    """A subclass with the forward of a source, or with those of two for training and eval mode."""
    key = (first, tuple(source for source, _ in forwards))
    if key not in _classes:
        compiled = [_compiled(source, names) for source, names in forwards]
        members: dict[str, Any] = {"__module__": first.__module__, "__qualname__": first.__qualname__}
        if len(set(key[1])) == 1:
            members["forward"] = compiled[0]
        else:
            members.update(_forward_train=compiled[0], _forward_eval=compiled[1], forward=_by_mode)
        members.update(flexact_first=first, flexact_forwards=forwards)
        bases: tuple[type, ...] = (first,) if issubclass(first, Rewritten) else (Rewritten, first)
        if issubclass(first, fx.GraphModule):  # which makes its copies of the first base that is not its own
            bases = (first, Rewritten)
            members.update(__deepcopy__=_deepcopy_of_graph, __reduce_ex__=_reduce_graph, recompile=_recompile_graph)
        _classes[key] = type(first.__name__, bases, members)
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


def _link(forwards: tuple[Forward, ...]) -> Link:
    """Forwards for a pickle, which takes no Python modules."""
    return tuple(
        (
            source,
            {
                name: (value.__name__, None) if isinstance(value, types.ModuleType) else (None, value)
                for name, value in names.items()
            },
        )
        for source, names in forwards
    )


def _restore(cls: type, chain: list[Link]) -> Any:
    for link in chain:
        cls = rewritten_class(cls, _decoded(link))
    return object.__new__(cls)


def _decoded(link: Link) -> tuple[Forward, ...]:
    return tuple(
        (
            source,
            {
                name: importlib.import_module(module) if module is not None else value
                for name, (module, value) in encoded.items()
            },
        )
        for source, encoded in link
    )


def _deepcopy_of_graph(self: Any, memo: dict[int, Any]) -> Any:
    """A GraphModule copies itself without the rewritten forward."""
    twin = self.flexact_first.__deepcopy__(self, memo)
    twin.__class__ = rewritten_class(type(twin), self.flexact_forwards)
    return twin


def _recompile_graph(self: Any) -> Any:
    """A graph may be another when it is compiled anew, so it runs as it is from there on."""
    self.__class__ = self.flexact_first
    return self.recompile()


def _reduce_graph(self: Any, protocol: Any) -> Any:
    """Pickle as the plain GraphModule, which has a way of its own, and the sources of the forward."""
    plain = object.__new__(self.flexact_first)
    plain.__dict__ = self.__dict__
    return _restore_graph, (plain, _link(self.flexact_forwards))


def _restore_graph(plain: Any, link: Link) -> Any:
    plain.__class__ = rewritten_class(type(plain), _decoded(link))
    return plain
