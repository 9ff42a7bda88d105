"""Finds the batch norm and the residual addition before a site, and rewrites the forward to fuse all three.

The submodule whose forward has such a sequence gets a subclass of its type, in which the batch norm is deferred until
the site runs. If the functional calls of the submodule were rewritten, it is a subclass of that rewritten class, so
that removing it leaves the unfused class.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx, nn

from flexact.surgery.calls import Call, Reading
from flexact.surgery.finding import Findings, Found
from flexact.surgery.fused_site import is_plain, is_sequential, is_untouched
from flexact.surgery.rewriting import SEQUENTIAL, Edit, edited_class, place_of
from flexact.surgery.scope import UNKNOWN, Scope, end_of, is_fresh, is_unshared_after, target_of


@dataclass
class Fused:
    """The fusions that are possible in a model."""

    classes: dict[nn.Module, type] = field(default_factory=dict)
    """The new type of each submodule whose forward has something to fuse."""
    sites: set[str] = field(default_factory=set)
    """The names of the sites that are fused in at least one call."""
    obstacle: str = ""
    """Why other sites are not fused."""


def find_fused(model: nn.Module, chosen: list[Found], findings: Findings, classes: dict[nn.Module, type]) -> Fused:
    """Find the fusions. chosen: the sites; classes: the rewritten types of submodules with functional calls."""
    found = Fused()
    sites = {name for one in chosen for name in one.names}
    names = {call: one.name.rpartition(".")[2] for one in chosen if one.kind == "call" for call in one.calls}
    for name, owner in model.named_modules():
        prefix = f"{name}." if name else ""
        own_sites = {site.removeprefix(prefix) for site in sites if site.startswith(prefix)}
        edits, fused = {SEQUENTIAL}, set[str]()
        if is_sequential(owner):
            fused = _after_norms(owner) & own_sites
        elif isinstance(owner, fx.GraphModule):
            reason = "a torch.fx.GraphModule has no source to rewrite; convert it before it is traced"
            found.obstacle = f"{name or type(owner).__name__}: {reason}"
        elif "forward" not in vars(owner) and own_sites:
            edits, fused = _edits(findings.readings[id(owner)], own_sites, names)
        if fused:
            found.classes[owner] = edited_class(classes.get(owner, type(owner)), edits)
            found.sites |= {prefix + site for site in fused}
    if not any(is_plain(module, nn.BatchNorm2d) for module in model.modules()):
        found.obstacle = (
            "the model has no nn.BatchNorm2d without hooks; SyncBatchNorm and other subclasses are left alone"
        )
    found.obstacle = found.obstacle or "no nn.BatchNorm2d has an output that only a site reads"
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
        called: dict[ast.AST, Call] = {call.node: call for call in own if call in names or call.child in sites}
        for way in _Method(scope, called.keys()).ways() if called and scope.self_name else ():
            call = called[way[-1].node]
            for kind, node in way:
                child = names.get(call, call.edit.child) if kind == "site" else ""
                edits.add(Edit(method, kind, place_of(node, scope.function), child))
            fused.add(names.get(call, call.child or ""))
    return edits, fused


_COMPOUND = (ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
_NOT_SIMPLE = (
    *(ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred, ast.IfExp, ast.BoolOp),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""Expressions whose parts may run never, later or several times."""


class _Link(NamedTuple):
    """An expression on the path from a value to a site, and the kind of its edit."""

    kind: str
    node: ast.AST


class _Method:
    """Follows the results of a method's batch norms to the sites that use them."""

    def __init__(self, scope: Scope, sites: Set[ast.AST]) -> None:
        self.scope = scope
        self.sites = sites

    def ways(self) -> list[list[_Link]]:
        """Return the path of each batch norm that can be deferred, from its call to the call of a site."""
        ways = []
        for call in self.scope.nodes_of(ast.Call):
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
        """Return the path from an expression's value to a site; empty if the value does not reach one, or if anything
        else may read it."""
        links: list[_Link] = []
        while True:
            parent = self.scope.parents[node]
            if isinstance(parent, ast.Call) and parent.args == [node]:
                if parent in self.sites:
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
                    if not _adds(parent):
                        return []
                    links.append(_Link("add in place" if parent.target is node else "added in place", parent))
                read, others = self._only_read(name, parent)
                if read is None:
                    return []
                links += others
                node = read
            else:
                return []

    def _only_read(self, name: str, assignment: ast.AST) -> tuple[ast.Name | None, list[_Link]]:
        """Return the only read of a variable's value; None unless it always follows the assignment. Also return edits
        of the reads that only other settings of the module reach, so that they accept a deferred value."""
        scope = self.scope
        used = [one for one in scope.reads(name, assignment) if one not in scope.idle]
        others = [one for one in scope.reads(name, assignment, by_settings=False) if one not in used]
        links = [_Link("result", one) for one in others if isinstance(one.ctx, ast.Load)]
        statements = [scope.statement(one) for one in others if not isinstance(one.ctx, ast.Load)]
        links += [_Link("add in place", one) for one in statements if _adds(one)]
        is_simple = not _any_of(_NOT_SIMPLE, [node for one in others for node in scope.around(one)])
        if len(used) != 1 or len(links) < len(others) or not is_simple or name in scope.function.__code__.co_cellvars:
            return None, []
        is_next = end_of(used[0]) > end_of(assignment) and scope.always_follows(scope.statement(used[0]), assignment)
        return (used[0] if is_next else None), links

    def _can_defer(self, call: ast.Call, norm: nn.Module, way: list[_Link]) -> bool:
        """Return whether the call of a batch norm can be deferred: nothing that runs before the site also calls it,
        reads its state, or can overwrite its input."""
        scope, site = self.scope, way[-1].node
        before = {*ast.walk(call), *scope.idle}
        between = [one for one in scope.nodes_between(call, site) if one not in before]
        if not self._is_straight(call, site, between):
            return False
        if any(isinstance(one, ast.Attribute) and scope.value(one.value) is norm for one in scope.nodes):
            return False
        deferred = {link.node for link in way}
        others = [one for one in between if one not in deferred]
        calls = [one for one in others if isinstance(one, ast.Call)]
        called = [scope.value(one.func) if scope.path(one.func) else UNKNOWN for one in calls]
        children = [one for one in called if isinstance(one, nn.Module)]
        if any(one is not None and not isinstance(one, nn.Module) for one in called):
            return False
        if any(norm in child.modules() for child in children):
            return False
        if not children and not _any_of(ast.AugAssign, others):
            return True
        y, first = call.args[0], scope.statement(call)
        block = scope.block(first)
        name = y.id if isinstance(y, ast.Name) else ""
        later = [one for one in others if isinstance(one, ast.Name) and one.id == name and one not in ast.walk(first)]
        is_unshared = is_unshared_after(scope, block[: block.index(first)], name, False)
        return is_fresh(scope, y, name if is_unshared and (not later or target_of(first) == name) else "")

    def _is_straight(self, first: ast.AST, last: ast.AST, between: list[ast.AST]) -> bool:
        """Return whether two expressions run equally often, and the code between them runs in order, only assigns to
        variables, and cannot leave the method."""
        around = [[one for one in self.scope.around(end) if isinstance(one, _COMPOUND)] for end in (first, last)]
        statements = [one for one in between if isinstance(one, ast.stmt) and one is not self.scope.statement(last)]
        stored = [one for one in between if isinstance(getattr(one, "ctx", None), ast.Store)]
        return (
            around[0] == around[1]
            and not _any_of(ast.Try, around[0])
            and all(isinstance(one, (ast.Assign, ast.AugAssign, ast.Expr, ast.If)) for one in statements)
            and all(isinstance(one, ast.Name) for one in stored)
            and not _any_of(_NOT_SIMPLE, [*between, *self.scope.around(last)])
        )


def _adds(statement: ast.stmt | ast.AugAssign) -> bool:
    return isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)


def _any_of(kinds: type[ast.AST] | tuple[type[ast.AST], ...], nodes: Iterable[ast.AST]) -> bool:
    return any(isinstance(node, kinds) for node in nodes)


def _last_norm(module: object) -> nn.BatchNorm2d | None:
    """Return the module if it is a batch norm, or the batch norm at the end of a Sequential; otherwise None."""
    while isinstance(module, nn.Sequential) and is_sequential(module) and is_untouched(module):
        children = [child for child in module if not is_plain(child, nn.Identity)]
        module = children[-1] if children else None
    return module if isinstance(module, nn.Module) and is_plain(module, nn.BatchNorm2d) else None
