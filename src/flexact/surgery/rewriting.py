"""Subclasses in which activation calls of a method are replaced by calls of child modules.

A forward such as `F.relu(self.conv(x))` has no module to swap. Its owner gets a subclass of its own type with the same
method compiled from an edited source, in which that expression is `self.relu(self.conv(x))`. The owner stays the same
object, and assigning its first class again undoes the change.
"""

from __future__ import annotations

import abc
import ast
import copy
import inspect
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.surgery.fused_site import FUSED, FusedOperations
from flexact.surgery.sources import CannotRewrite, compiled, definition_of, digest, rewrapped, with_code

Place = tuple[int, int, int, int]
"""First and last line of an expression, counted from the function's first line, and the columns of both ends."""

# The expression of each kind of edit. ME is the module, CHILD its attribute, X and Y are the operands, and CALLED is
# the original callee.
_TEMPLATES = {
    "call": "ME.CHILD(X)",
    "overwrite": "ME.flexact_overwritten(ME.CHILD, X)",
    "overwrite if": "ME.flexact_overwritten(ME.CHILD, X, Y)",
    **FUSED,
}


class Edit(NamedTuple):
    """An expression of a method, and the kind of expression that replaces it."""

    kind: str
    place: Place
    child: str = ""


class Revision(NamedTuple):
    """The edits of one method."""

    name: str
    digest: str
    """The fingerprint of the source that the edits apply to."""
    edits: tuple[Edit, ...]


Recipe = tuple[Revision, ...]
FORWARDS: dict[str, Callable[..., Any]] = {}
"""Complete replacements of a forward, by the digest of their revision."""
_classes: dict[tuple[type, Recipe], type] = {}


def overwritten(site: Callable[[Tensor], Tensor], h: Tensor, inplace: bool = True) -> Tensor:
    """Return site(h), written over h if in place."""
    return h.copy_(site(h.clone())) if inplace else site(h)


class Rewritten(FusedOperations):
    """Base class of all rewritten classes."""

    flexact_first: type
    flexact_recipe: Recipe
    flexact_overwritten = staticmethod(overwritten)

    def __init_subclass__(cls, **_: Any) -> None:
        """Skip the `__init_subclass__` of the user's classes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the first class does, together with the recipes, since this class has no importable name."""
        made = first = type(self)
        recipes: list[Recipe] = []
        while "flexact_recipe" in vars(first):  # more than one if an extracted model was converted again
            recipes.insert(0, first.flexact_recipe)
            first = first.flexact_first
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or not recipes:
            return reduced
        build, arguments, *state = reduced
        build, *arguments = (first if one is made else one for one in (build, *arguments))
        return _restored, (recipes, build, tuple(arguments)), *state

    def __prepare_scriptable__(self) -> Any:
        """Raise, because torch.jit.script would compile the source file, which has the original activations."""
        raise FlexActError(
            f"torch.jit.script reads the source of {type(self).__qualname__}, which does not contain the activations "
            "that were picked. Use torch.export, torch.compile or torch.jit.trace instead."
        )


def homes(cls: type) -> list[type]:
    """Return the classes in a type's method resolution order, without those made here."""
    own = (Rewritten, FusedOperations)
    return [base for base in cls.__mro__ if base not in own and "flexact_recipe" not in vars(base)]


def first_class(owner: nn.Module) -> type:
    """Return the type that a module had before it was last rewritten."""
    cls: Any = type(owner)
    if "flexact_recipe" in vars(cls) or not isinstance(owner, Rewritten):
        first: type = getattr(cls, "flexact_first", cls)
        return first
    # Another class was put on top since, for example by torch.nn.utils.parametrize.
    made: Any = next(base for base in cls.__mro__ if "flexact_recipe" in vars(base))
    bases = tuple(made.flexact_first if base is made else base for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return _new_class(cls, bases, namespace)


def children_of(owner: nn.Module) -> set[str]:
    """Return the names of the children that the rewritten methods of a module call."""
    return {edit.child for revision in getattr(owner, "flexact_recipe", ()) for edit in revision.edits}


def rewritten_class(first: type, recipe: Recipe) -> type:
    """Return the subclass with rewritten methods; it is the same one for the same type and recipe."""
    if (first, recipe) not in _classes:
        names = {"__module__": first.__module__, "__qualname__": first.__qualname__, "__doc__": first.__doc__}
        methods = {revision.name: _revised(first, revision) for revision in recipe}
        bases = (first,) if issubclass(first, Rewritten) else (Rewritten, first)
        namespace = {**names, **methods, "flexact_first": first, "flexact_recipe": recipe}
        _classes[first, recipe] = _new_class(first, bases, namespace)
    return _classes[first, recipe]


def _new_class(like: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Create a class without running the user's metaclass."""
    meta = type(like)
    new: Callable[..., type] = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    return new(meta, like.__name__, bases, namespace)


def merged(first: type, revisions: Iterable[Revision]) -> Recipe:
    """Add revisions to those of a type that is rewritten already."""
    found: dict[tuple[str, str], dict[Place, Edit]] = {}
    for name, source, edits in (*getattr(first, "flexact_recipe", ()), *revisions):
        found.setdefault((name, source), {}).update((edit.place, edit) for edit in edits)
    return tuple(Revision(*key, tuple(sorted(edits.values()))) for key, edits in sorted(found.items()))


def function_of(cls: type, name: str) -> tuple[Any, types.FunctionType]:
    """Return a method as its class holds it, and the function inside its decorators."""
    value = next((vars(home)[name] for home in homes(cls) if name in vars(home)), None)
    function = inspect.unwrap(value) if callable(value) else None
    if not isinstance(function, types.FunctionType):
        raise CannotRewrite(f"{name} is a {type(value).__name__} without a Python function inside")
    return value, function


def _revised(first: type, revision: Revision) -> Any:
    if revision.digest in FORWARDS:
        return FORWARDS[revision.digest]
    value, function = function_of(first, revision.name)
    node = definition_of(function)
    if digest(node) != revision.digest:
        raise CannotRewrite(f"the source of {function.__qualname__} has changed")
    editor = _Editor(function, {edit.place: edit for edit in revision.edits})
    edited: Any = editor.generic_visit(copy.deepcopy(node))
    return rewrapped(value, function, with_code(function, compiled(function, edited)))


def _restored(recipes: list[Recipe], build: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = build(*arguments)
    cls = type(module)
    try:
        for recipe in recipes:
            cls = rewritten_class(cls, recipe)
    except CannotRewrite as error:
        raise FlexActError(
            f"this {cls.__name__} was saved after flexact rewrote its methods, and they cannot be rewritten here: "
            f"{error}. Load it with the source of {cls.__module__}.{cls.__qualname__} that it was saved with."
        ) from None
    module.__class__ = cls
    return module


def place_of(node: Any, function: types.FunctionType) -> Place:
    """Return the position of a node in a function."""
    first = function.__code__.co_firstlineno
    return node.lineno - first, node.col_offset, node.end_lineno - first, node.end_col_offset


def tensor_of(call: ast.Call) -> ast.expr | None:
    """Return the input of an activation call: its first argument, or the tensor whose method it is."""
    if not call.args and not call.keywords:
        return call.func.value if isinstance(call.func, ast.Attribute) else None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "input"]
    return next(iter([*call.args, *named]), None)


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
        parts = {"ME": self.function.__code__.co_varnames[0], "CHILD": edit.child}
        names = [ast.unparse(one) for one in _operands(edit, node)]
        parts |= {key: name if edit.kind == "result" else f"({name})" for key, name in zip("XY", names, strict=False)}
        if isinstance(node, ast.Call):
            parts["CALLED"] = f"{parts['ME']}.{edit.child}" if edit.child else ast.unparse(node.func)
        text = re.sub(r"\b[A-Z]+\b", lambda found: parts[found[0]], _TEMPLATES[edit.kind])
        made = ast.parse(text, mode="eval").body
        for inner in ast.walk(made):
            if "lineno" in inner._attributes:
                ast.copy_location(inner, node)
        return made


def _operands(edit: Edit, node: Any) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    if isinstance(node, ast.Name):
        return [node]
    if edit.kind == "add":
        return node.args if len(node.args) == 2 else [node.func.value, *node.args]
    flags = [keyword.value for keyword in node.keywords if keyword.arg == "inplace"]
    return [one for one in (tensor_of(node), *flags) if one is not None]
