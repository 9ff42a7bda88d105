"""Finds the batch norm and the residual addition before a site, and rewrites the forward to fuse all three.

The submodule whose forward has such a sequence gets a subclass of its type, in which the batch norm is deferred until
the site runs. If the functional calls of the submodule were rewritten, it is a subclass of that rewritten class, so
that removing it leaves the unfused class.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from flexact.surgery.calls import Call, Reading
from flexact.surgery.finding import Findings, Found
from flexact.surgery.fused_site import is_plain, is_sequential, is_untouched
from flexact.surgery.rewriting import SEQUENTIAL, Edit, Place, edited_class, place_of
from flexact.surgery.scope import Scope, assigned, is_fresh, target_of
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
        if called and not isinstance(scope.definition, ast.Lambda) and scope.self_name:
            analysis = _Method(method, scope, called)
            analysis.block(scope.definition.body, _State())
            edits |= analysis.edits
            fused |= analysis.fused
    return edits, fused


@dataclass(frozen=True)
class _Use:
    """The only use of a value, which leads to a site, and the edits that defer the value until the site runs."""

    edits: frozenset[Edit]
    sites: frozenset[str]
    called: frozenset[str] = frozenset()
    """The children that run between the value and its use; "" means that a tensor is overwritten in between."""

    def after(self, called: Set[str]) -> _Use:
        return replace(self, called=self.called | called)

    def or_else(self, other: _Use) -> _Use:
        return _Use(self.edits | other.edits, self.sites | other.sites, self.called | other.called)

    def through(self, edit: Edit) -> _Use:
        return replace(self, edits=self.edits | {edit})


@dataclass
class _State:
    """At one point of a method: the names that are read later, and those whose only later use leads to a site."""

    read: set[str] = field(default_factory=set)
    once: dict[str, _Use] = field(default_factory=dict)

    def reads(self, names: set[str]) -> None:
        self.read |= names
        for name in names:
            self.once.pop(name, None)

    def forget(self) -> None:
        """Treat all names as read, because nothing can be deferred past the statement that runs here."""
        self.reads(set(self.once))


class _Method:
    """Analyses a method backwards, from its last statement to its first, and finds the values that can be deferred."""

    def __init__(self, name: str, scope: Scope, sites: dict[Place, tuple[str, str]]) -> None:
        self.name = name
        self.scope = scope
        self.sites = sites
        self.edits: set[Edit] = set()
        self.fused: set[str] = set()
        self._names = {node.id for node in scope.nodes if isinstance(node, ast.Name)}

    def _edit(self, kind: str, node: ast.AST, child: str = "") -> Edit:
        return Edit(self.name, kind, place_of(node, self.scope.function), child)

    def block(self, statements: list[ast.stmt], state: _State) -> _State:
        for i in reversed(range(len(statements))):
            state = self._statement(statements[i], statements[i - 1] if i else None, state)
        return state

    def _statement(self, node: ast.stmt, before: ast.stmt | None, state: _State) -> _State:
        if isinstance(node, ast.Return):
            state = _State()
        elif isinstance(node, ast.If) and (truth := self.scope.truth(node.test)) is not None:
            runs, rests = (node.body, node.orelse) if truth else (node.orelse, node.body)
            state = self.block(runs, state)
            self._read_by_others(rests, state)
            return self._reads(node.test, state)
        elif isinstance(node, ast.If):
            left = self.block(node.body, _State(set(state.read), dict(state.once)))
            right = self.block(node.orelse, state)
            read = left.read | right.read
            both = left.once.keys() & right.once.keys() - read
            state = _State(read, {name: left.once[name].or_else(right.once[name]) for name in both})
            state.reads((left.once.keys() | right.once.keys()) - both)
            return self._reads(node.test, state)
        elif not isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
            for _, block in ast.iter_fields(node):  # each block of a loop, with or try is analysed separately
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    self.block(block, _State(set(self._names)))
            return _State(set(self._names))
        use = None
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            name = target_of(node)
            if not name:
                state.forget()
            use = state.once.pop(name, None)
            state.read.discard(name)
            if isinstance(node, ast.AugAssign) and name:
                return self._added_to(node, name, use, state)
        if node.value is None or (use is not None and self._can_defer(node.value, use, state, before)):
            return state
        return self._reads(node, state)

    def _read_by_others(self, statements: list[ast.stmt], state: _State) -> None:
        """Analyse a branch that the module's settings disable; if it runs later, it computes the deferred values."""
        for name in (one for statement in statements for one in _loaded(statement)):
            if name.id in state.once:
                state.once[name.id] = state.once[name.id].through(self._edit("result", name))
            else:
                state.reads({name.id})

    def _added_to(self, node: ast.AugAssign, name: str, use: _Use | None, state: _State) -> _State:
        """Analyse `out += identity`."""
        calls, loaded = self._children(nodes_of(ast.Call, node.value)), {one.id for one in _loaded(node.value)}
        if use is None or not isinstance(node.op, ast.Add) or calls is None or name in loaded:
            for one in state.once:
                state.once[one] = state.once[one].after({""})
            state.read.add(name)
            return self._reads(node.value, state)
        use = use.through(self._edit("add in place", node))
        if not self._can_defer(node.value, use, state, None):
            self._reads(node.value, state)
        self._name(name, use.after(calls), state)
        return state

    def _name(self, name: str, use: _Use, state: _State) -> bool:
        """Record the use of a name. Return whether its value can be deferred: only if nothing else reads it."""
        if name in state.read or name in state.once:
            state.reads({name})
            return False
        state.once[name] = use
        return True

    def _reads(self, node: ast.AST, state: _State) -> _State:
        """Analyse an expression or a simple statement, including the calls of sites in it."""
        is_simple = not any(isinstance(one, _NOT_SIMPLE) for one in ast.walk(node))
        calls = nodes_of(ast.Call, node)
        loaded = [one.id for one in _loaded(node)]
        children = self._children(calls) if is_simple else None
        if children is None:
            state.forget()
        else:
            state.once = {name: use.after(children) for name, use in state.once.items()}
        taken: dict[str, _Use] = {}
        for call in calls if is_simple else ():
            site = self.sites.get(place_of(call, self.scope.function))
            if site is None or len(call.args) != 1:
                continue
            inner = nodes_of(ast.Call, call)
            beside = self._children([one for one in calls if one not in inner and call not in ast.walk(one)])
            use = _Use(frozenset({self._edit("site", call, site[0])}), frozenset({site[1]}))
            read = state.read | state.once.keys()
            fits = _State({name for name in loaded if loaded.count(name) > 1 or name in read or beside is None})
            self._can_defer(call.args[0], use.after(beside or set()), fits, None)
            taken |= fits.once
        state.reads(set(loaded) - taken.keys())
        state.once |= taken
        return state

    def _can_defer(self, node: ast.expr, use: _Use, state: _State, before: ast.stmt | None) -> bool:
        """Return whether an expression's value can be deferred, and record its names and batch norms."""
        if isinstance(node, ast.Name):
            return self._name(node.id, use, state)
        if (sides := self._addition(node)) is not None:
            use = use.through(self._edit("add", node))
            between = self._children(nodes_of(ast.Call, sides[1])) or set()
            left = self._can_defer(sides[0], use.after(between), state, None)
            right = self._can_defer(sides[1], use, state, None)
            for side, is_deferred in zip(sides, (left, right), strict=True):
                if not is_deferred:
                    self._reads(side, state)
            return True
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return False
        module = self.scope.value(node.func)
        if is_plain(module, nn.Identity):
            through = use.through(self._edit("identity", node))
            return self._can_defer(node.args[0], through, state, None)
        norm = _last_norm(module)
        if norm is None or not self._can_defer_norm(node.args[0], norm, use, before):
            return False
        self.edits |= use.edits | {self._edit("norm", node)}
        self.fused |= use.sites
        self._reads(node.args[0], state)
        return True

    def _can_defer_norm(self, y: ast.expr, norm: nn.Module, use: _Use, before: ast.stmt | None) -> bool:
        """Return whether a batch norm can be deferred: nothing that runs before the site also calls it, reads its
        state, or can overwrite its input."""
        looks = (isinstance(one, ast.Attribute) and self.scope.value(one.value) is norm for one in self.scope.nodes)
        runs = (norm in self.scope.owner.get_submodule(path).modules() for path in use.called if path)
        if any(looks) or any(runs) or ("" in use.called and isinstance(y, ast.Name)):
            return False
        made = assigned(before, y.id) if isinstance(y, ast.Name) else None
        return not use.called or is_fresh(self.scope, y if made is None else made)

    def _children(self, calls: list[ast.Call]) -> set[str] | None:
        """Return the children that are called; None if anything else is called."""
        found = [(self.scope.path(call.func), self.scope.value(call.func)) for call in calls]
        if not all(path and (module is None or isinstance(module, nn.Module)) for path, module in found):
            return None
        return {str(path) for path, module in found if module is not None}

    def _addition(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        """Return the operands of `x + y`, `torch.add(x, y)` or `x.add(y)` if they only call children, or None."""
        sides: tuple[ast.expr, ...] = ()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = node.left, node.right
        elif isinstance(node, ast.Call) and not node.keywords:
            if self.scope.value(node.func) is torch.add:
                sides = tuple(node.args)
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "add" and len(node.args) == 1:
                sides = node.func.value, node.args[0]
        if len(sides) != 2 or any(isinstance(side, ast.Constant) for side in sides):
            return None
        simple = not any(isinstance(one, _NOT_SIMPLE) for side in sides for one in ast.walk(side))
        return (sides[0], sides[1]) if simple and self._children(nodes_of(ast.Call, *sides)) is not None else None


_NOT_SIMPLE = (
    *(ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.comprehension, ast.Starred, ast.IfExp, ast.BoolOp),
)


def _loaded(node: ast.AST) -> list[ast.Name]:
    return [one for one in nodes_of(ast.Name, node) if isinstance(one.ctx, ast.Load)]


def _last_norm(module: object) -> nn.BatchNorm2d | None:
    """Return the module if it is a batch norm, or the batch norm at the end of a Sequential; otherwise None."""
    while isinstance(module, nn.Sequential) and is_sequential(module) and is_untouched(module):
        children = [child for child in module if not is_plain(child, nn.Identity)]
        module = children[-1] if children else None
    return module if isinstance(module, nn.Module) and is_plain(module, nn.BatchNorm2d) else None
