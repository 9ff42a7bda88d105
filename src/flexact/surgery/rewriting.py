"""Subclasses in which activation calls in methods are replaced by calls of child modules.

A forward such as `F.relu(self.conv(x))` has no module to swap. Its owner gets a subclass of its own type with the same
method compiled from an edited source, in which that expression is `self.relu(self.conv(x))`. The owner stays the same
object, and assigning its original class undoes the change.
"""

from __future__ import annotations

import abc
import ast
import copy
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from flexact.errors import FlexActError
from flexact.surgery import fused_site
from flexact.surgery.scope import tensor_of
from flexact.surgery.sources import CannotRewrite, compiled, definition_of, rewrapped, with_code

Place = tuple[int, int, int, int]
"""The line and the column of the start and of the end of an expression; line 0 is the first line of the function."""

# The expression of each kind of edit without fusion: `me` is the module, `called` the child or the original callee, and
# `x` and `y` are the operands.
_UNFUSED = {
    "call": "{called}({x})",
    "overwrite": "{me}.flexact_overwritten({called}, {x}, {y})",
    "call method": "{me}.flexact_overwritten({called}, {x}, False, {name!r})",
    "overwrite method": "{me}.flexact_overwritten({called}, {x}, True, {name!r})",
}

_INNER = ("fget", "func", "__func__")
"""The attributes that hold the function of a property, a cached property or a class method."""


class Edit(NamedTuple):
    """An expression of a method, and the kind of expression that replaces it."""

    method: str
    kind: str
    place: Place
    child: str = ""


Recipe = tuple[Edit, ...]
SEQUENTIAL = Edit("forward", "sequential", (0, 0, 0, 0))
"""Replaces the whole forward of an nn.Sequential in which sites follow batch norms."""


def overwritten(site: Callable[[Any], Any], h: Any, inplace: bool, method: str = "") -> Any:
    """Return site(h), and overwrite h with it if in place. If h has its own method of a given name, call that."""
    if method and not isinstance(h, fx.Proxy) and getattr(type(h), method, None) is not getattr(Tensor, method):
        return getattr(h, method)()
    return h.copy_(site(h.clone())) if inplace else site(h)


class Rewritten:
    """Base class of all rewritten classes, with the functions that the expressions of edits call."""

    flexact_first: type
    flexact_recipe: Recipe
    flexact_overwritten = staticmethod(overwritten)
    flexact_fused = fused_site

    def __init_subclass__(cls, **_: Any) -> None:
        """Skip the `__init_subclass__` of the user's classes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the original class does, with the recipe, because this class cannot be imported by name."""
        first, recipe = self.flexact_first, self.flexact_recipe
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or "flexact_recipe" not in vars(type(self)):
            return reduced
        build, arguments, *state = reduced
        build, *arguments = (first if one is type(self) else one for one in (build, *arguments))
        digests = {edit.method: _digest(first, edit.method) for edit in recipe if edit != SEQUENTIAL}
        return _restored, (recipe, digests, build, tuple(arguments)), *state

    def __prepare_scriptable__(self) -> Any:
        """Raise, because torch.jit.script would compile the source file, which has the original activations."""
        raise FlexActError(
            f"torch.jit.script reads the source of {type(self).__qualname__}, which does not contain the activations "
            "that were picked. Use torch.export, torch.compile or torch.jit.trace instead."
        )


def homes(cls: type) -> list[type]:
    """Return the classes in a type's method resolution order, without those made here and nn.Module."""
    return [base for base in cls.__mro__ if base not in (Rewritten, nn.Module) and "flexact_recipe" not in vars(base)]


def edits_of(owner: nn.Module) -> dict[tuple[str, Place], Edit]:
    """Return the edits of a module's rewritten methods, by method and place."""
    return {(edit.method, edit.place): edit for edit in getattr(owner, "flexact_recipe", ())}


def children_of(owner: nn.Module) -> set[str]:
    """Return the names of the children that the rewritten methods of a module call."""
    return {edit.child for edit in edits_of(owner).values()}


def class_without(owner: Rewritten, children: set[str]) -> type:
    """Return the type of a rewritten module without the fused calls, and without the calls of some children."""
    unfused = [edit._replace(kind="call") if edit.kind == "site" else edit for edit in owner.flexact_recipe]
    kept = [edit for edit in unfused if edit.kind in _UNFUSED and edit.child and edit.child not in children]
    made = next(cls for cls in type(owner).__mro__ if "flexact_recipe" in vars(cls))
    return _rebased(type(owner), made, rewritten_class(owner.flexact_first, tuple(sorted(kept))))


def edited_class(cls: type, edits: Iterable[Edit]) -> type:
    """Return the subclass of a type with these edits, or, for a rewritten type, one that has its old edits as well.

    The subclass is inserted below the parametrization of a parametrized type, because removing the parametrization
    would also remove a subclass above it.
    """
    old = next(base for base in cls.__mro__ if base.__module__ != parametrize.__name__)
    all_edits = {(edit.method, edit.place): edit for edit in (*getattr(old, "flexact_recipe", ()), *edits)}
    recipe = tuple(sorted(all_edits.values()))
    return _rebased(cls, old, rewritten_class(vars(old).get("flexact_first", old), recipe))


def _rebased(cls: type, old: type, new: type) -> type:
    """Return a type with one of its bases replaced, in copies of the types between them."""
    if cls is old:
        return new
    bases = tuple(_rebased(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return _new_class(cls, bases, namespace)


@functools.cache
def rewritten_class(first: type, recipe: Recipe) -> type:
    """Return the subclass with rewritten methods; it is the same one for the same type and recipe."""
    if not recipe:
        return first
    namespace: dict[str, Any] = {name: getattr(first, name) for name in ("__module__", "__qualname__", "__doc__")}
    held = {name: value for home in reversed(homes(first)) for name, value in vars(home).items()}
    for name, value in held.items():
        if type(value) is classmethod and callable(value.__func__) and not name.startswith("__"):
            namespace[name] = staticmethod(getattr(first, name))  # so that it writes to the user's class
    namespace |= {name: _edited(first, name, recipe) for name in {edit.method for edit in recipe}}
    bases = (first,) if issubclass(first, Rewritten) else (Rewritten, first)
    return _new_class(first, bases, {**namespace, "flexact_first": first, "flexact_recipe": recipe})


def _new_class(like: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Create a class without running the user's metaclass."""
    meta = type(like)
    new: Callable[..., type] = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    return new(meta, like.__name__, bases, namespace)


def function_of(cls: type, name: str) -> tuple[Any, types.FunctionType]:
    """Return a method as its class holds it, and the function inside its decorators, which can be replaced."""
    value = next((vars(home)[name] for home in homes(cls) if name in vars(home)), None)
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, types.FunctionType):
        raise CannotRewrite(f"{name} is a {type(value).__name__} without a Python function inside")
    rewrapped(value, function, function)
    return value, function


def _edited(first: type, name: str, recipe: Recipe) -> Any:
    """Return the edited method, with its decorators applied."""
    if SEQUENTIAL in recipe:
        return fused_site.sequential_forward
    value, function = function_of(first, name)
    editor = _Editor(function, {edit.place: edit for edit in recipe if edit.method == name})
    edited: Any = editor.generic_visit(copy.deepcopy(definition_of(function)))
    return rewrapped(value, function, with_code(function, compiled(function, edited)))


@functools.cache
def _digest(cls: type, name: str) -> str:
    """Return a fingerprint of a method's source that does not depend on its position in the file."""
    tree = ast.dump(definition_of(function_of(cls, name)[1]))
    return hashlib.sha256(tree.encode()).hexdigest()[:16]


def functions_of(cls: type) -> list[tuple[str, types.FunctionType]]:
    """Return the functions in a type and its bases by name; also those inside properties and decorators."""
    held = [item for home in homes(cls) for item in vars(home).items()]
    inner = [(name, next(filter(None, (getattr(value, one, None) for one in _INNER)), value)) for name, value in held]
    unwrapped = [(name, inspect.unwrap(value)) for name, value in inner if callable(value)]
    return [(name, value) for name, value in unwrapped if isinstance(value, types.FunctionType)]


def _restored(recipe: Recipe, digests: dict[str, str], build: Callable[..., Any], arguments: Any) -> Any:
    module = build(*arguments)
    cls: Any = type(module)
    try:
        changed = [name for name in digests if _digest(cls, name) != digests[name]]
        if changed:
            raise CannotRewrite(f"the source of {cls.__name__}.{changed[0]} has changed")
        module.__class__ = rewritten_class(cls, recipe)
    except CannotRewrite as error:
        raise FlexActError(
            f"this {cls.__name__} was saved after flexact rewrote its methods, and they cannot be rewritten here: "
            f"{error}. Load it with the source of {cls.__module__}.{cls.__qualname__} that it was saved with."
        ) from None
    return module


def place_of(node: Any, function: types.FunctionType) -> Place:
    """Return the position of a node in a function."""
    first = function.__code__.co_firstlineno
    return node.lineno - first, node.col_offset, node.end_lineno - first, node.end_col_offset


class _Editor(ast.NodeTransformer):
    def __init__(self, function: types.FunctionType, edits: dict[Place, Edit]) -> None:
        self.function = function
        self.edits = edits

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_replaced = isinstance(node, (ast.Call, ast.BinOp, ast.AugAssign, ast.Name))
        edit = self.edits.get(place_of(node, self.function)) if is_replaced else None
        super().generic_visit(node)
        if edit is None:
            return node
        made = self._made(edit, node)
        return ast.copy_location(ast.Assign([node.target], made), node) if isinstance(node, ast.AugAssign) else made

    def _made(self, edit: Edit, node: Any) -> ast.expr:
        """Return the expression of an edit, with the line of the expression that it replaces."""
        me = self.function.__code__.co_varnames[0]
        called = f"{me}.{edit.child}" if edit.child else ast.unparse(getattr(node, "func", node))
        x, *others = map(ast.unparse, _operands(node))
        template = fused_site.FUSED.get(edit.kind) or _UNFUSED[edit.kind]
        name = getattr(getattr(node, "func", node), "attr", "")
        text = template.format(me=me, called=called, x=x, y=others[0] if others else "True", name=name)
        return ast.increment_lineno(ast.parse(text, mode="eval"), node.lineno - 1).body


def _operands(node: Any) -> list[Any]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
    if isinstance(node, ast.Name):
        return [node]
    return [tensor_of(node), *(keyword.value for keyword in node.keywords if keyword.arg == "inplace")]
