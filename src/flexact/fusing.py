"""Finding the batch norm, and the residual addition, before a site, and rewriting the forward to do all in one call.

The submodule that owns such a place gets a subclass of its type whose forward calls `normalised_site`. Where its
functional calls were rewritten too, it is a subclass of that rewritten class: taking it off leaves the plain one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, fx, nn

from flexact.activations import is_activation
from flexact.finding import Findings
from flexact.fused import is_untouched, normalised_site
from flexact.layer import FlexAct
from flexact.tracing import CannotTrace, Rewritten, TracedForward, rewritten_class, trace, trace_of_graph

_Kind = TypeVar("_Kind", bound=nn.Module)
_IN_PLACE: tuple[Any, ...] = (operator.iadd, "add_")
_ADDITIONS: tuple[Any, ...] = (operator.add, torch.add, "add", *_IN_PLACE)


@dataclass
class Fused:
    """What can be fused in a model."""

    classes: dict[nn.Module, type] = field(default_factory=dict)
    """The new type of each submodule whose forward has something to fuse."""
    sites: set[str] = field(default_factory=set)
    """The names of the sites that are called together with a batch norm, at least once."""
    obstacles: list[str] = field(default_factory=list)
    """Why not all of them are; at least one."""

    def add(self, owner: nn.Module, cls: type, prefix: str, sites: set[str]) -> None:
        self.classes[owner] = cls
        self.sites |= {prefix + site for site in sites}


def find_fused(
    model: nn.Module, sites: set[str], findings: Findings, classes: dict[nn.Module, type], per_call: bool
) -> Fused:
    """sites: what the chosen sites will be called; classes: the types that were made for their functional calls."""
    found = Fused()
    obstacles: dict[str, list[str]] = {}
    for name, owner in model.named_modules():
        prefix = f"{name}." if name else ""
        own_sites = {site.removeprefix(prefix) for site in sites if site.startswith(prefix)}
        has_norm = any(_is_plain(module, nn.BatchNorm2d) for module in _own_modules(owner))
        if not own_sites or not has_norm or type(owner).forward is nn.Module.forward:
            continue
        if isinstance(owner, nn.Sequential) and _runs_in_turn(owner):
            if fused := _behind_norms(owner) & own_sites:
                found.add(owner, rewritten_class(type(owner), (_IN_TURN,)), prefix, fused)
            continue
        try:
            forward = _traced(owner, findings, per_call)
            if fused := {site for graph in forward.graphs for site in _Graph(owner, graph, own_sites).fuse()}:
                found.add(owner, forward.subclass(classes.get(owner, type(owner))), prefix, fused)
        except (CannotTrace, SyntaxError) as error:  # torch.fx writes a child that is called "in" as `self.in`
            obstacles.setdefault(str(error), []).append(name or type(owner).__name__)
    for reason, owners in obstacles.items():
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        found.obstacles.append(f"{owners[0]}{more}: {reason}")
    if not obstacles and any(_is_plain(module, nn.BatchNorm2d) for module in model.modules()):
        found.obstacles.append("no nn.BatchNorm2d has its output go to a site alone, directly or through an addition")
    elif not obstacles:
        found.obstacles.append(
            "it has no nn.BatchNorm2d without hooks; SyncBatchNorm and other subclasses are left alone"
        )
    return found


def unfused_class(owner: Rewritten) -> type:
    """The type of a rewritten submodule without the fused calls in its forward."""
    called = [value for _, names in owner.flexact_forwards for value in names.values()]
    is_fused = any(value is normalised_site or value is in_turn for value in called)
    return owner.flexact_first if is_fused else type(owner)


def in_turn(sequence: nn.Sequential, x: Tensor) -> Tensor:
    """What nn.Sequential does, with a batch norm and the site behind it in one call.

    It goes by what the container holds now, so that a slice of it, or one that was added to, does what it should.
    """
    waiting: nn.BatchNorm2d | None = None
    for module in sequence:
        if waiting is not None and isinstance(module, FlexAct):
            x, waiting = normalised_site(module, waiting, x), None
        elif not _is_plain(module, nn.Identity):
            x, waiting = x if waiting is None else waiting(x), None
            if _is_plain(module, nn.BatchNorm2d):
                waiting = module
            else:
                x = module(x)
    return x if waiting is None else waiting(x)


_IN_TURN = ("def forward(self, input):\n    return in_turn(self, input)\n", {"in_turn": in_turn})


@dataclass(frozen=True)
class _Child:
    """A child module as an argument of a generated call."""

    path: str

    def __repr__(self) -> str:
        written = "self"
        for name in self.path.split("."):
            written = f"{written}.{name}" if name.isidentifier() else f'getattr({written}, "{name}")'
        return written


@dataclass
class _Normalised:
    """A value that comes out of a batch norm."""

    call: fx.Node
    """The call of the batch norm, or of a Sequential that ends in it."""
    earlier: list[str]
    """The children of the Sequential that run before it."""
    norm: str


class _Graph:
    """A traced forward, in which the chosen sites are calls of children of these names."""

    def __init__(self, owner: nn.Module, graph: fx.Graph, sites: set[str]) -> None:
        self.graph = graph
        self.sites = sites
        self.children = dict(owner.named_modules(remove_duplicate=False))

    def fuse(self) -> set[str]:
        """Rewrite every place that fits, and return the sites that are called there."""
        fused: set[str] = set()
        while place := next((node for node in self.graph.nodes if self._fused(node)), None):
            fused.add(str(place.target))
        return fused

    def _fused(self, site: fx.Node) -> bool:
        """Put one call in the place of a site's and of what leads to it; False where that cannot be."""
        if not _is_call_of_child(site) or site.target not in self.sites:
            return False
        norm, residual, residual_norm = self._before(site)
        if norm is None:
            return False
        arguments = [_Child(str(site.target)), _Child(norm.norm), self._input(norm)]
        if residual_norm is not None:
            arguments += [self._input(residual_norm), _Child(residual_norm.norm)]
        elif residual is not None:
            arguments.append(residual)
        with self.graph.inserting_before(site):
            site.replace_all_uses_with(self.graph.call_function(normalised_site, tuple(arguments)))
        _erase(site)
        return True

    def _before(self, site: fx.Node) -> tuple[_Normalised | None, Any, _Normalised | None]:
        """What a site's input is made of: a batch norm's output, and what is added to it."""
        source = self._source(site.args[0], site)
        if source is None or not _is_addition(source):
            return self._normalised(site.args[0], site, site), None, None
        left, right = source.args
        norm, residual, residual_norm = self._normalised(left, source, site), right, None
        if norm is not None:
            residual_norm = self._normalised(right, source, site)
        elif source.target not in _IN_PLACE:  # else something that is not the batch norm's is overwritten
            norm, residual = self._normalised(right, source, site), left
        if residual_norm is None and any(residual in node.all_input_nodes for node in _between(source, site)):
            return None, None, None
        return norm, residual, residual_norm

    def _source(self, value: Any, user: fx.Node) -> fx.Node | None:
        """Where a value comes from, behind identities; None where something else uses it too."""
        while isinstance(value, fx.Node) and list(value.users) == [user]:
            if not self._is_call_of(value, nn.Identity):
                return value
            user, value = value, value.args[0]
        return None

    def _normalised(self, value: Any, user: fx.Node, site: fx.Node) -> _Normalised | None:
        """A value as the output of a batch norm that can as well run where the site does; None where it is not."""
        call = self._source(value, user)
        if call is None or not _is_call_of_child(call):
            return None
        path, earlier = str(call.target), []
        module = self.children.get(path)
        while isinstance(module, nn.Sequential) and _runs_in_turn(module) and is_untouched(module):
            names = [name for name, child in module._modules.items() if not _is_plain(child, nn.Identity)]
            if not names:
                return None
            earlier += [f"{path}.{name}" for name in names[:-1]]
            path = f"{path}.{names[-1]}"
            module = self.children[path]
        if not _is_plain(module, nn.BatchNorm2d):
            return None
        fresh = bool(earlier)  # nothing else can read or overwrite the batch norm's input then
        for node in _between(call, site):
            if (node is not user and not fresh and call.args[0] in node.all_input_nodes) or self._runs(node, module):
                return None
        return _Normalised(call, earlier, path)

    def _input(self, normalised: _Normalised) -> Any:
        """What goes into the batch norm, with the rest of its Sequential called child by child."""
        value = normalised.call.args[0]
        with self.graph.inserting_before(normalised.call):
            for path in normalised.earlier:
                value = self.graph.create_node("call_module", path, (value,))
        return value

    def _is_call_of(self, node: fx.Node, kind: type[nn.Module]) -> bool:
        return _is_call_of_child(node) and _is_plain(self.children.get(str(node.target)), kind)

    def _runs(self, node: fx.Node, module: nn.Module) -> bool:
        """Whether a node calls a module, alone, fused, or inside a child."""
        arguments: tuple[Any, ...] = node.args
        fused = [argument.path for argument in arguments if isinstance(argument, _Child)]
        paths = [str(node.target)] if node.op == "call_module" else fused
        called = [self.children[path] for path in paths if path in self.children]
        return any(part is module for child in called for part in child.modules())


def _traced(owner: nn.Module, findings: Findings, per_call: bool) -> TracedForward:
    """The trace of a forward: the one in which its functional calls were found, or else one in which there are none."""
    activations = [id(module) for _, module in owner.named_modules(remove_duplicate=False) if is_activation(module)]
    if per_call and len(set(activations)) < len(activations):
        raise CannotTrace("it has one activation by several names, which a trace does not tell apart")
    if isinstance(owner, fx.GraphModule):
        return trace_of_graph(owner)
    if id(owner) in findings.traced:
        return findings.traced[id(owner)]
    forward = trace(owner, per_call)
    if forward.calls:
        raise CannotTrace("its forward calls activations in a way that its source does not show")
    return forward


def _own_modules(owner: nn.Module) -> Iterator[nn.Module]:
    """The modules that a forward calls itself, as a rule: the children, and those of containers among them.

    A GraphModule calls modules at any depth, and keeps those above them as empty ones.
    """
    for child in owner.children():
        yield child
        if isinstance(child, nn.Sequential) or type(child).forward is nn.Module.forward:
            yield from _own_modules(child)


def _behind_norms(sequence: nn.Sequential) -> set[str]:
    """The children that come right behind a batch norm."""
    children = [(name, child) for name, child in sequence._modules.items() if not _is_plain(child, nn.Identity)]
    return {
        following for (_, child), (following, _) in itertools.pairwise(children) if _is_plain(child, nn.BatchNorm2d)
    }


def _is_plain(module: nn.Module | None, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether a module is exactly of a type, and nothing was added to what its call does."""
    return module is not None and type(module) is kind and is_untouched(module)


def _runs_in_turn(module: nn.Sequential) -> bool:
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def _is_call_of_child(node: fx.Node) -> bool:
    return node.op == "call_module" and len(node.args) == 1 and not node.kwargs


def _is_addition(node: fx.Node) -> bool:
    """Whether a node adds two different tensors, without a factor."""
    if node.op not in ("call_function", "call_method") or node.target not in _ADDITIONS or node.kwargs:
        return False
    return (
        len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args) and node.args[0] is not node.args[1]
    )


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _erase(node: fx.Node) -> None:
    """Take a node out, and what was there for it alone."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for one in inputs:
        if not one.users:
            _erase(one)
