"""Finding the batch norm, and the residual addition, before a site, and rewriting the forward to do all in one call.

The submodule that owns such a place gets a subclass of its type whose methods put the batch norm off until the site
runs. Where its functional calls were rewritten too, it is a subclass of that rewritten class: taking it off leaves the
plain one.
"""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from flexact.surgery.calls import Call, Reading
from flexact.surgery.finding import Findings, Found
from flexact.surgery.fused_site import FUSED, forward_in_turn, is_plain, is_untouched, runs_in_turn
from flexact.surgery.rewriting import FORWARDS, Edit, Place, Revision, Rewritten, place_of, rewritten_class
from flexact.surgery.scope import Scope, is_fresh


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


def find_fused(model: nn.Module, chosen: list[Found], findings: Findings, classes: dict[nn.Module, type]) -> Fused:
    """chosen: the sites; classes: the types that were made for their functional calls."""
    found = Fused()
    graphs: list[str] = []
    sites = {name for one in chosen for name in one.names}
    names = {call: one.name.rpartition(".")[2] for one in chosen if one.kind == "call" for call in one.calls}
    for name, owner in model.named_modules():
        prefix = f"{name}." if name else ""
        own_sites = {site.removeprefix(prefix) for site in sites if site.startswith(prefix)}
        first = classes.get(owner, type(owner))
        if runs_in_turn(owner):
            if fused := _behind_norms(owner) & own_sites:
                found.add(owner, rewritten_class(first, (_IN_TURN,)), prefix, fused)
        elif isinstance(owner, fx.GraphModule):
            graphs.append(name or type(owner).__name__)
        elif (reading := findings.readings.get(id(owner))) is not None and "forward" not in vars(owner) and own_sites:
            edits, fused = _edits(reading, own_sites, names)
            if fused:
                found.add(owner, reading.rewritten(first, edits), prefix, fused)
    if graphs:
        found.obstacles.append(
            f"{graphs[0]}: a torch.fx.GraphModule has no source to rewrite; fuse it before it is traced"
        )
    if any(is_plain(module, nn.BatchNorm2d) for module in model.modules()):
        found.obstacles.append(
            "no nn.BatchNorm2d has its output go to a site alone, directly or through an addition, in one method"
        )
    else:
        found.obstacles.append(
            "it has no nn.BatchNorm2d without hooks; SyncBatchNorm and other subclasses are left alone"
        )
    return found


def unfused_class(owner: Rewritten) -> type:
    """The type of a rewritten submodule without the fused calls in its forward."""
    kinds = {edit.kind for revision in owner.flexact_recipe for edit in revision.edits}
    digests = {revision.digest for revision in owner.flexact_recipe}
    return owner.flexact_first if kinds & FUSED.keys() or digests & FORWARDS.keys() else type(owner)


FORWARDS["in turn"] = forward_in_turn
_IN_TURN = Revision("forward", "in turn", ())


def _behind_norms(sequence: nn.Sequential) -> set[str]:
    """The children that come right behind a batch norm."""
    children = [(name, child) for name, child in sequence._modules.items() if not is_plain(child, nn.Identity)]
    return {following for (_, child), (following, _) in itertools.pairwise(children) if is_plain(child, nn.BatchNorm2d)}


def _edits(reading: Reading, sites: set[str], names: dict[Call, str]) -> tuple[dict[str, list[Edit]], set[str]]:
    """How to rewrite the methods behind a forward, and the sites that are fused then.

    sites: by their names in the module; names: those that the chosen calls get.
    """
    calls = {(call.method, call.edit.place): call for call in reading.calls if call.edit.kind == "call"}
    edits: dict[str, list[Edit]] = {}
    fused: set[str] = set()
    for method, scope in reading.scopes.items():
        own = {place: call for (home, place), call in calls.items() if home == method}
        called = {
            place: (names.get(call, call.edit.child), names.get(call, call.child or ""))
            for place, call in own.items()
            if call in names or call.child in sites
        }
        if called and not isinstance(scope.definition, ast.Lambda) and scope.me:
            pass_over = _Method(scope, called)
            pass_over.block(scope.definition.body, _State())
            edits |= {method: sorted(pass_over.edits)} if pass_over.edits else {}
            fused |= pass_over.fused
    return edits, fused


@dataclass(frozen=True)
class _Use:
    """The one use of a value on the way to a site: what is to be rewritten if the value is put off."""

    edits: frozenset[Edit]
    sites: frozenset[str]
    called: frozenset[str] = frozenset()
    """The children that run between the value and its use; "" stands for a tensor that is overwritten."""

    def after(self, called: set[str]) -> _Use:
        return replace(self, called=self.called | called)

    def through(self, edit: Edit) -> _Use:
        return replace(self, edits=self.edits | {edit})


@dataclass
class _State:
    """At one place of a method: the names that are read later, and those whose only reader leads to a site."""

    read: set[str] = field(default_factory=set)
    once: dict[str, _Use] = field(default_factory=dict)

    def reads(self, names: set[str]) -> None:
        self.read |= names
        for name in names:
            self.once.pop(name, None)

    def forget(self) -> None:
        """Something runs over which nothing can be put off."""
        self.reads(set(self.once))


class _Method:
    """Goes through a method from its end to its beginning, and finds the values that can be put off."""

    def __init__(self, scope: Scope, sites: dict[Place, tuple[str, str]]) -> None:
        self.scope = scope
        self.sites = sites
        self.edits: set[Edit] = set()
        self.fused: set[str] = set()
        self._names = {node.id for node in ast.walk(scope.definition) if isinstance(node, ast.Name)}

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
            branches = [
                self.block(branch, _State(set(state.read), dict(state.once))) for branch in (node.body, node.orelse)
            ]
            read = branches[0].read | branches[1].read
            both = branches[0].once.keys() & branches[1].once.keys() - read
            once = {name: branches[0].once[name].after(set(branches[1].once[name].called)) for name in both}
            state = _State(read, once)
            state.reads((branches[0].once.keys() | branches[1].once.keys()) - both)
            return self._reads(node.test, state)
        elif not isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
            for inner in ast.walk(node):  # a loop, a with or a try block: each of its blocks is on its own
                for _, block in ast.iter_fields(inner):
                    if isinstance(block, list) and block and isinstance(block[0], ast.stmt) and inner is node:
                        self.block(block, _State(set(self._names)))
            return _State(set(self._names))
        use = None
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None
            if name is None:
                state.forget()
            else:
                use = state.once.pop(name, None)
                state.read.discard(name)
            if isinstance(node, ast.AugAssign) and name is not None:
                return self._added_to(node, name, use, state)
        value = node.value
        if use is not None and value is not None and self._put_off(value, use, state, before):
            return state
        return self._reads(node, state) if value is not None else state

    def _read_by_others(self, statements: list[ast.stmt], state: _State) -> None:
        """A branch that does not run by the module's settings, and gets every value whole should it run later."""
        names = [one for statement in statements for one in ast.walk(statement) if isinstance(one, ast.Name)]
        for name in (one for one in names if isinstance(one.ctx, ast.Load)):
            if name.id in state.once:
                edit = Edit("result", place_of(name, self.scope.function))
                state.once[name.id] = state.once[name.id].through(edit)
            else:
                state.reads({name.id})

    def _added_to(self, node: ast.AugAssign, name: str, use: _Use | None, state: _State) -> _State:
        """`out += identity`."""
        calls = self._children([one for one in ast.walk(node.value) if isinstance(one, ast.Call)])
        if use is None or not isinstance(node.op, ast.Add) or calls is None or name in _loaded(node.value):
            for one in state.once:
                state.once[one] = state.once[one].after({""})
            state.read.add(name)
            return self._reads(node.value, state)
        use = use.through(Edit("add in place", place_of(node, self.scope.function)))
        if not self._put_off(node.value, use, state, None):
            self._reads(node.value, state)
        self._name(name, use.after(calls), state)
        return state

    def _name(self, name: str, use: _Use, state: _State) -> bool:
        """A name on the way to a site, which puts its value off where it is read nowhere else."""
        if name in state.read or name in state.once:
            state.reads({name})
            return False
        state.once[name] = use
        return True

    def _reads(self, node: ast.AST, state: _State) -> _State:
        """An expression or a simple statement, with the calls of sites in it."""
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
        if any(isinstance(one, _NOT_SIMPLE) for one in ast.walk(node)):
            state.forget()
            state.reads(_loaded(node))
            return state
        loaded = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
        children = self._children(calls)
        if children is None:
            state.forget()
        else:
            state.once = {name: use.after(children) for name, use in state.once.items()}
        taken: set[str] = set()
        for call in calls:
            site = self.sites.get(place_of(call, self.scope.function))
            if site is None or len(call.args) != 1:
                continue
            own = set(map(id, ast.walk(call)))
            beside = [one for one in calls if id(one) not in own and not any(part is call for part in ast.walk(one))]
            meanwhile = self._children(beside)
            use = _Use(frozenset({Edit("site", place_of(call, self.scope.function), site[0])}), frozenset({site[1]}))
            fits = _State(
                {name for name in loaded if loaded.count(name) > 1 or name in state.read or meanwhile is None}
            )
            self._put_off(call.args[0], use.after(meanwhile or set()), fits, None)
            for name, found in fits.once.items():
                state.once[name] = found
                taken.add(name)
        state.reads(_loaded(node) - taken)
        return state

    def _put_off(self, node: ast.expr, use: _Use, state: _State, before: ast.stmt | None) -> bool:
        """Whether an expression's value can be put off; notes the names and the batch norms that it is made of."""
        place = place_of(node, self.scope.function)
        if isinstance(node, ast.Name):
            return self._name(node.id, use, state)
        if (sides := self._addition(node)) is not None:
            use = use.through(Edit("add", place))
            between = self._children([one for one in ast.walk(sides[1]) if isinstance(one, ast.Call)]) or set()
            done = [self._put_off(sides[0], use.after(between), state, None), self._put_off(sides[1], use, state, None)]
            for side, put_off in zip(sides, done, strict=True):
                if not put_off:
                    self._reads(side, state)
            return True
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return False
        module = self.scope.value(node.func)
        if is_plain(module, nn.Identity) and self._put_off(
            node.args[0], use.through(Edit("identity", place)), state, None
        ):
            return True
        norm = _last_norm(module)
        if norm is None or not self._may_wait(node.args[0], norm, use, before):
            return False
        self.edits |= use.edits | {Edit("norm", place)}
        self.fused |= use.sites
        self._reads(node.args[0], state)
        return True

    def _may_wait(self, y: ast.expr, norm: nn.Module, use: _Use, before: ast.stmt | None) -> bool:
        """Whether nothing that runs before the site runs the batch norm too, looks at its state, or can overwrite its
        input."""
        nodes = ast.walk(self.scope.definition)
        if any(isinstance(node, ast.Attribute) and self.scope.value(node.value) is norm for node in nodes):
            return False
        if "" in use.called and isinstance(y, ast.Name):
            return False
        for path in use.called - {""}:
            child = self.scope.owner.get_submodule(path)
            if any(module is norm for module in child.modules()):
                return False
        if isinstance(y, ast.Name) and isinstance(before, ast.Assign) and ast.unparse(before.targets[0]) == y.id:
            y = before.value
        return not use.called or is_fresh(self.scope, y)

    def _children(self, calls: list[ast.Call]) -> set[str] | None:
        """The children that are called; None where something else is called too."""
        found = [(self.scope.path(call.func), self.scope.value(call.func)) for call in calls]
        if not all(path and (module is None or isinstance(module, nn.Module)) for path, module in found):
            return None
        return {str(path) for path, module in found if module is not None}

    def _addition(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        """The two sides of `x + y`, `torch.add(x, y)` or `x.add(y)`, where evaluating them does nothing else."""
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
        calls = [one for side in sides for one in ast.walk(side) if isinstance(one, ast.Call)]
        simple = not any(isinstance(one, _NOT_SIMPLE) for side in sides for one in ast.walk(side))
        return (sides[0], sides[1]) if simple and self._children(calls) is not None else None


_NOT_SIMPLE = (
    ast.Lambda,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.comprehension,
    ast.Starred,
    ast.IfExp,
    ast.BoolOp,
)


def _loaded(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _last_norm(module: object) -> nn.BatchNorm2d | None:
    """The batch norm that a module is, or that it ends in."""
    while isinstance(module, nn.Sequential) and runs_in_turn(module) and is_untouched(module):
        children = [child for child in module if not is_plain(child, nn.Identity)]
        module = children[-1] if children else None
    return module if isinstance(module, nn.Module) and is_plain(module, nn.BatchNorm2d) else None
