"""Finds the batch norm and the residual addition before a site, and rewrites the forward to fuse all three.

The submodule whose forward has such a sequence gets a subclass of its type, in which the batch norm is deferred until
the site runs. If the functional calls of the submodule were rewritten, it is a subclass of that rewritten class, so
that removing it leaves the unfused class.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx, nn

from flexact.surgery.calls import Call, Reading
from flexact.surgery.finding import Findings, Found
from flexact.surgery.fused_site import is_plain, is_sequential, is_untouched
from flexact.surgery.rewriting import SEQUENTIAL, Edit, Place, edited_class, place_of
from flexact.surgery.scope import UNKNOWN, Scope, end_of, is_fresh, is_unshared_after, target_of
from flexact.surgery.sources import nodes_of


@dataclass
class Fused:
    """The fusions that are possible in a model."""

    classes: dict[nn.Module, type] = field(default_factory=dict)
    """The new type of each submodule whose forward has something to fuse."""
    sites: set[str] = field(default_factory=set)
    """The names of the sites that are fused in at least one call."""
    obstacles: list[str] = field(default_factory=list)
    """The reasons why other sites are not fused; at least one."""

    def add(self, owner: nn.Module, cls: type, prefix: str, sites: set[str]) -> None:
        self.classes[owner] = cls
        self.sites |= {prefix + site for site in sites}


def find_fused(model: nn.Module, chosen: list[Found], findings: Findings, classes: dict[nn.Module, type]) -> Fused:
    """Find the fusions. chosen: the sites; classes: the rewritten types of submodules with functional calls."""
    found = Fused()
    sites = {name for one in chosen for name in one.names}
    names = {call: one.name.rpartition(".")[2] for one in chosen if one.kind == "call" for call in one.calls}
    for name, owner in model.named_modules():
        prefix = f"{name}." if name else ""
        own_sites = {site.removeprefix(prefix) for site in sites if site.startswith(prefix)}
        first = classes.get(owner, type(owner))
        if is_sequential(owner):
            if fused := _after_norms(owner) & own_sites:
                found.add(owner, edited_class(first, [SEQUENTIAL]), prefix, fused)
        elif isinstance(owner, fx.GraphModule) and not found.obstacles:
            reason = "a torch.fx.GraphModule has no source to rewrite; convert it before it is traced"
            found.obstacles.append(f"{name or type(owner).__name__}: {reason}")
        elif "forward" not in vars(owner) and own_sites:
            edits, fused = _edits(findings.readings[id(owner)], own_sites, names)
            if fused:
                found.add(owner, edited_class(first, edits), prefix, fused)
    has_norm = any(is_plain(module, nn.BatchNorm2d) for module in model.modules())
    found.obstacles.append(
        "no nn.BatchNorm2d feeds a site alone"
        if has_norm
        else "the model has no nn.BatchNorm2d without hooks; SyncBatchNorm and other subclasses are left alone"
    )
    return found


def _after_norms(sequence: nn.Sequential) -> set[str]:
    """Return the children that directly follow a batch norm."""
    children = [(name, child) for name, child in sequence._modules.items() if not is_plain(child, nn.Identity)]
    return {following for (_, child), (following, _) in itertools.pairwise(children) if is_plain(child, nn.BatchNorm2d)}


def _edits(reading: Reading, sites: set[str], names: dict[Call, str]) -> tuple[set[Edit], set[str]]:
    """Return the edits of the methods that a forward runs, and the sites that they fuse.

    sites: the names of the sites in the module; names: the names of the sites of functional calls.
    """
    edits: set[Edit] = set()
    fused: set[str] = set()
    for method, scope in reading.scopes.items():
        own = [call for call in reading.calls if call.edit.method == method and call.edit.kind == "call"]
        called = {
            call.edit.place: (names.get(call, call.edit.child), names.get(call, call.child or ""))
            for call in own
            if call in names or call.child in sites
        }
        for way in _Method(scope, called.keys()).ways() if called and scope.self_name else ():
            child, site = called[place_of(way[-1].node, scope.function)]
            for kind, node in way:
                edits.add(Edit(method, kind, place_of(node, scope.function), child if kind == "site" else ""))
            fused.add(site)
    return edits, fused


_COMPOUND = (ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
_NOT_SIMPLE = (
    *(ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred, ast.IfExp, ast.BoolOp),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""Expressions whose parts may run never, later or several times."""


class _Link(NamedTuple):
    """An expression on the way of a value to a site, and the kind of its edit."""

    kind: str
    node: ast.AST


class _Method:
    """Follows the results of a method's batch norms to the sites that use them."""

    def __init__(self, scope: Scope, sites: Set[Place]) -> None:
        self.scope = scope
        self.sites = sites

    def ways(self) -> list[list[_Link]]:
        """Return the ways of the batch norms that can be deferred, each from its call to the call of a site."""
        ways = []
        for call in nodes_of(ast.Call, self.scope.definition):
            norm = _last_norm(self.scope.value(call.func)) if len(call.args) == 1 and not call.keywords else None
            if norm is not None and call not in self.scope.idle:
                way = self._way(call)
                if way and self._can_defer(call, norm, way):
                    ways.append([_Link("norm", call), *way])
        # In `out += identity`, identity is deferred only if out is.
        targets = {link.node for way in ways for link in way if link.kind == "add in place"}
        deferred = [way for way in ways if all(kind != "added in place" or node in targets for kind, node in way)]
        return [[link for link in way if link.kind != "added in place"] for way in deferred]

    def _way(self, node: ast.AST) -> list[_Link]:
        """Return the way of an expression's value to a site; empty if it does not reach one, or if anything else may
        read it."""
        links: list[_Link] = []
        while True:
            parent = self.scope.parents[node]
            if isinstance(parent, ast.Call) and parent.args == [node]:
                if place_of(parent, self.scope.function) in self.sites:
                    return [*links, _Link("site", parent)]
                if parent.keywords or not is_plain(self.scope.value(parent.func), nn.Identity):
                    return []
                links.append(_Link("identity", parent))
                node = parent
            elif isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
                if isinstance(parent.left, ast.Constant) or isinstance(parent.right, ast.Constant):
                    return []
                links.append(_Link("add", parent))
                node = parent
            elif name := target_of(parent):
                if isinstance(parent, ast.AugAssign):
                    if not isinstance(parent.op, ast.Add):
                        return []
                    links.append(_Link("add in place" if parent.target is node else "added in place", parent))
                read, idle = self._only_read(name, parent)
                if read is None:
                    return []
                links += [_Link("result", one) for one in idle]
                node = read
            else:
                return []

    def _only_read(self, name: str, assignment: ast.AST) -> tuple[ast.Name | None, list[ast.Name]]:
        """Return the only read of a variable's value, if it always follows the assignment, and the reads in branches
        that the module's settings rule out. If such a branch runs later, it computes the deferred value."""
        scope, reads = self.scope, self.scope.reads(name, assignment)
        idle = [one for one in reads if one in scope.idle]
        used = [one for one in reads if one not in scope.idle]
        can_compute = all(
            isinstance(one.ctx, ast.Load) and not any(isinstance(node, _NOT_SIMPLE) for node in scope.around(one))
            for one in idle
        )
        if len(used) != 1 or not can_compute or name in scope.function.__code__.co_cellvars:
            return None, []
        is_next = end_of(used[0]) > end_of(assignment) and scope.always_follows(scope.statement(used[0]), assignment)
        return (used[0] if is_next else None), idle

    def _can_defer(self, call: ast.Call, norm: nn.Module, way: list[_Link]) -> bool:
        """Return whether the call of a batch norm can be deferred: nothing that runs before the site also calls it,
        reads its state, or can overwrite its input."""
        scope, site, inside = self.scope, way[-1].node, {*ast.walk(call), *(link.node for link in way)}
        first, last = scope.statement(call), scope.statement(site)
        around = [[one for one in scope.around(node) if isinstance(one, _COMPOUND)] for node in (first, last)]
        if around[0] != around[1] or any(isinstance(one, ast.Try) for one in around[0]):
            return False
        if any(isinstance(one, ast.Attribute) and scope.value(one.value) is norm for one in scope.nodes):
            return False
        between = [one for one in scope.nodes_between(first, last) if one not in scope.idle]
        for one in between:
            is_simple = isinstance(one, (*_SIMPLE, ast.If)) or (one is last and isinstance(one, ast.Return))
            is_stored = isinstance(getattr(one, "ctx", None), ast.Store) and not isinstance(one, ast.Name)
            if (isinstance(one, ast.stmt) and not is_simple) or is_stored or isinstance(one, _NOT_SIMPLE):
                return False
        others = [one for one in between if one not in inside and site not in ast.walk(one)]
        calls = [one for one in others if isinstance(one, ast.Call)]
        called = [scope.value(one.func) if scope.path(one.func) else UNKNOWN for one in calls]
        if not all(one is None or isinstance(one, nn.Module) for one in called):
            return False
        children = [one for one in called if one is not None]
        if any(norm in one.modules() for one in children):
            return False
        if not children and not any(isinstance(one, ast.AugAssign) for one in others):
            return True
        y, block = call.args[0], scope.block(first)
        name = y.id if isinstance(y, ast.Name) else ""
        later = [one for one in between if isinstance(one, ast.Name) and one.id == name and one not in ast.walk(first)]
        is_unshared = is_unshared_after(scope, block[: block.index(first)], name, False)
        return is_fresh(scope, y, name if is_unshared and (not later or target_of(first) == name) else "")


def _last_norm(module: object) -> nn.BatchNorm2d | None:
    """Return the module if it is a batch norm, or the batch norm at the end of a Sequential; otherwise None."""
    while isinstance(module, nn.Sequential) and is_sequential(module) and is_untouched(module):
        children = [child for child in module if not is_plain(child, nn.Identity)]
        module = children[-1] if children else None
    return module if isinstance(module, nn.Module) and is_plain(module, nn.BatchNorm2d) else None
