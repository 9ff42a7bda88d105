"""Subclasses in which calls within a method are replaced, by rewriting the method's source.

A forward such as `F.relu(self.conv(x))` has no module to swap. Its owner gets a subclass of its own type with the same
method, in which that one expression is `self.relu(self.conv(x))`. The owner stays the same object with the same
methods, and giving its first class back undoes everything.
"""

from __future__ import annotations

import abc
import ast
import copy
import linecache
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.surgery.fused_site import added, finished, passed, result, waiting
from flexact.surgery.sources import (
    CannotRewrite,
    Definition,
    compiled,
    definition_of,
    digest,
    rewrapped,
    unwrapped,
    with_code,
)

Place = tuple[int, int, int, int]
"""Where an expression begins and ends: lines, counted from the function's first, and columns."""

# What each kind of edit puts in the place of an expression. ME is the module, CHILD its attribute, X and Y are the
# operands, and CALLED is what was called.
_TEMPLATES = {
    "call": "ME.CHILD(X)",
    "overwrite": "ME.flexact_overwritten(ME.CHILD, X)",
    "overwrite if": "ME.flexact_overwritten(ME.CHILD, X, Y)",
    "super": "ME.CHILD",
    "norm": "ME.flexact_waiting(CALLED, X)",
    "identity": "ME.flexact_passed(CALLED, X)",
    "site": "ME.flexact_site(CALLED, X)",
    "add": "ME.flexact_added(X, Y)",
    "add in place": "ME.flexact_added(X, Y, True)",
    "result": "(X := ME.flexact_result(X))",
}
FUSED = {"norm", "identity", "site", "add", "add in place", "result"}


class Edit(NamedTuple):
    """One expression of a method, and what takes its place."""

    kind: str
    place: Place
    child: str = ""


class Revision(NamedTuple):
    """A method with other expressions."""

    name: str
    """The attribute of the subclass that it becomes."""
    home: int
    """Which of the classes behind the subclass has the method."""
    attribute: str
    digest: str
    """Of the source that the edits are for."""
    edits: tuple[Edit, ...]


Recipe = tuple[Revision, ...]
FORWARDS: dict[str, Callable[..., Any]] = {}
"""Forwards that come whole instead of from a source, by the digest of their revision."""
_classes: dict[tuple[type, Recipe], type] = {}


def overwritten(site: Callable[[Tensor], Tensor], h: Tensor, inplace: bool = True) -> Tensor:
    """site(h), written over h."""
    return h.copy_(site(h.clone())) if inplace else site(h)


class Rewritten:
    """Marks the classes made here; a base of each of them."""

    flexact_first: type
    flexact_recipe: Recipe
    flexact_overwritten = staticmethod(overwritten)
    flexact_waiting = staticmethod(waiting)
    flexact_passed = staticmethod(passed)
    flexact_added = staticmethod(added)
    flexact_site = staticmethod(finished)
    flexact_result = staticmethod(result)

    def __init_subclass__(cls, **_: Any) -> None:
        """Keep the classes made here out of what a user's own classes do with their subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the first class does, and the recipes, since the class has no importable name."""
        made = first = type(self)
        recipes: list[Recipe] = []
        while "flexact_recipe" in vars(first):  # more than one where an extracted model was converted again
            recipes.insert(0, first.flexact_recipe)
            first = first.flexact_first
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or not recipes:
            return reduced
        build, arguments, *state = reduced
        build, *arguments = (first if one is made else one for one in (build, *arguments))
        return _restored, (recipes, build, tuple(arguments)), *state

    def __prepare_scriptable__(self) -> Any:
        """The module for torch.jit.script, which compiles the text of a method instead of its code."""
        twin: Any = object.__new__(_with_text(type(self)))
        twin.__dict__ = self.__dict__
        return twin


def homes(cls: type) -> list[type]:
    """The classes behind a type, without those made here."""
    return [base for base in cls.__mro__ if base is not Rewritten and "flexact_recipe" not in vars(base)]


def first_class(owner: nn.Module) -> type:
    """The type that a rewritten submodule had before it was rewritten the last time."""
    cls: Any = type(owner)
    if "flexact_recipe" in vars(cls) or not isinstance(owner, Rewritten):
        first: type = getattr(cls, "flexact_first", cls)
        return first
    # Something put a class of its own on top since, as torch.nn.utils.parametrize does.
    made: Any = next(base for base in cls.__mro__ if "flexact_recipe" in vars(base))
    bases = tuple(made.flexact_first if base is made else base for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return _new_class(cls, bases, namespace)


def children_of(owner: nn.Module) -> set[str]:
    """The children that a rewritten submodule calls in the place of something else."""
    return {edit.child for revision in getattr(owner, "flexact_recipe", ()) for edit in revision.edits}


def rewritten_class(first: type, recipe: Recipe) -> type:
    """A subclass with rewritten methods; always the same one for the same type and recipe."""
    if (first, recipe) not in _classes:
        names = {"__module__": first.__module__, "__qualname__": first.__qualname__, "__doc__": first.__doc__}
        methods = {revision.name: _revised(first, revision) for revision in recipe}
        bases = (first,) if issubclass(first, Rewritten) else (Rewritten, first)
        namespace = {**names, **methods, "flexact_first": first, "flexact_recipe": recipe}
        _classes[first, recipe] = _new_class(first, bases, namespace)
    return _classes[first, recipe]


def _new_class(like: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """A class of a type's metaclass, without what a user's metaclass does when a class is made."""
    meta = type(like)
    new: Callable[..., type] = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    return new(meta, like.__name__, bases, namespace)


def merged(first: type, revisions: Iterable[Revision]) -> Recipe:
    """Revisions together with those that a type has already."""
    found: dict[tuple[Any, ...], Revision] = {}
    for revision in (*getattr(first, "flexact_recipe", ()), *revisions):
        known = found[revision[:4]].edits if revision[:4] in found else ()
        edits = {edit.place: edit for edit in (*known, *revision.edits)}
        found[revision[:4]] = revision._replace(edits=tuple(sorted(edits.values())))
    return tuple(sorted(found.values()))


def function_of(cls: type, home: int, attribute: str) -> tuple[Any, types.FunctionType]:
    """What the class behind a type holds by a name, and the function inside."""
    value = vars(homes(cls)[home])[attribute]
    function = unwrapped(value)
    if not isinstance(function, types.FunctionType):
        raise CannotRewrite(f"{attribute} is a {type(value).__name__} without a Python function inside")
    return value, function


def _revised(first: type, revision: Revision) -> Any:
    if revision.digest in FORWARDS:
        return FORWARDS[revision.digest]
    value, function = function_of(first, revision.home, revision.attribute)
    node = definition_of(function)
    if digest(node) != revision.digest:
        raise CannotRewrite(f"the source of {function.__qualname__} is another one now")
    return rewrapped(value, function, with_code(function, compiled(function, edited(node, function, revision.edits))))


def _restored(recipes: list[Recipe], build: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    module = build(*arguments)
    cls = type(module)
    try:
        for recipe in recipes:
            cls = rewritten_class(cls, recipe)
    except (CannotRewrite, IndexError, KeyError) as error:
        raise FlexActError(
            f"this {cls.__name__} was saved after flexact rewrote its methods, and they cannot be rewritten here: "
            f"{error}. Load it with the source of {cls.__module__}.{cls.__qualname__} that it was saved with."
        ) from None
    module.__class__ = cls
    return module


def _with_text(made: type) -> type:
    """A rewritten class whose methods have a source to be read."""
    methods: dict[str, Any] = {}
    for name, home, attribute, *_, edits in made.flexact_recipe:  # type: ignore[attr-defined]
        _, function = function_of(made, home, attribute)
        node = edited(definition_of(function), function, edits)
        if not isinstance(node, ast.Lambda):
            node.decorator_list = []
        text = ast.unparse(node) + "\n"
        file = f"<flexact {function.__qualname__} {abs(hash(text))}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        code = compiled(function, node).replace(co_filename=file, co_firstlineno=1)
        methods[name] = with_code(function, code)
    first, recipe = made.flexact_first, made.flexact_recipe  # type: ignore[attr-defined]
    return _new_class(made, (made,), {**methods, "flexact_first": first, "flexact_recipe": recipe})


def place_of(node: Any, function: types.FunctionType) -> Place:
    """Where a node stands in a function."""
    first = function.__code__.co_firstlineno
    return node.lineno - first, node.col_offset, node.end_lineno - first, node.end_col_offset


def tensor_of(call: ast.Call) -> ast.expr | None:
    """The tensor of an activation's call: its first argument, or what it is a method of where it has none."""
    if not call.args and not call.keywords:
        return call.func.value if isinstance(call.func, ast.Attribute) else None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "input"]
    return next(iter([*call.args, *named]), None)


def edited(node: Definition, function: types.FunctionType, edits: Iterable[Edit]) -> Definition:
    """A copy of a definition in which expressions are replaced."""
    editor = _Editor(function, {edit.place: edit for edit in edits})
    changed: Definition = editor.generic_visit(copy.deepcopy(node))  # type: ignore[assignment]
    return changed


class _Editor(ast.NodeTransformer):
    def __init__(self, function: types.FunctionType, edits: dict[Place, Edit]) -> None:
        self.function = function
        self.edits = edits

    def generic_visit(self, node: ast.AST) -> ast.AST:
        edit = self.edits.get(place_of(node, self.function)) if isinstance(node, _REPLACED) else None
        super().generic_visit(node)
        if edit is None:
            return node
        if isinstance(node, ast.Call) and edit.kind == "super":
            node.func = self._made(edit, node)
            return node
        if isinstance(node, ast.AugAssign):
            return ast.copy_location(ast.Assign([node.target], self._made(edit, node)), node)
        return self._made(edit, node)

    def _made(self, edit: Edit, node: Any) -> ast.expr:
        """The expression for an edit, all on the line of what it replaces."""
        parts = {"ME": self.function.__code__.co_varnames[0], "CHILD": edit.child}
        operands = _operands(edit, node)
        parts |= {name: f"({ast.unparse(one)})" for name, one in zip("XY", operands, strict=False)}
        if edit.kind == "result":
            parts["X"] = ast.unparse(operands[0])
        if isinstance(node, ast.Call):
            parts["CALLED"] = f"{parts['ME']}.{edit.child}" if edit.child else ast.unparse(node.func)
        text = re.sub(r"\b[A-Z]+\b", lambda found: parts[found[0]], _TEMPLATES[edit.kind])
        made = ast.parse(text, mode="eval").body
        for inner in ast.walk(made):
            if "lineno" in inner._attributes:
                ast.copy_location(inner, node)
        return made


_REPLACED = (ast.Call, ast.BinOp, ast.AugAssign, ast.Name)


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
    return [one for one in [tensor_of(node), *flags] if one is not None]
