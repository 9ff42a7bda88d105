"""The source of a method as a syntax tree, and a function like the method's from a changed tree."""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import hashlib
import inspect
import linecache
import types
from dataclasses import dataclass
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_FUTURES = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


class CannotRewrite(Exception):
    """Why a method cannot be rewritten, in words for the user."""


@functools.lru_cache(maxsize=4096)
def definition_of(function: types.FunctionType) -> Definition:
    """The node that defines a function. Raises an error unless compiling it gives the code that the function runs."""
    found = _found(function)
    if found is None:
        raise CannotRewrite("its source cannot be read; define the class in a file")
    if not _is_same(compiled(function, found.definition), function.__code__):
        raise CannotRewrite("its source is not what runs: the file changed, or something rewrote it on import")
    return found.definition


def digest(node: Definition) -> str:
    """A fingerprint of a definition, wherever in its file it stands."""
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16]


def compiled(function: types.FunctionType, definition: Definition) -> types.CodeType:
    """The code of another definition in the place of a function's own: in its class, between its enclosing names, with
    its file and its lines."""
    code, found = function.__code__, _found(function)
    assert found is not None
    statement = copy.deepcopy(found.statement, {id(found.definition): definition})
    module = ast.Module([*found.imports, statement], [])
    whole = compile(module, code.co_filename, "exec", code.co_flags & _FUTURES, dont_inherit=True)
    where = code.co_name, code.co_firstlineno
    (made,) = [one for one in codes_of(whole) if (one.co_name, one.co_firstlineno) == where]
    return made


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """A code and those of all functions inside it."""
    codes = [code]
    for one in codes:
        codes += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return codes


@dataclass(frozen=True)
class _Found:
    definition: Definition
    statement: ast.stmt
    """The statement of the file that has the definition in it."""
    imports: list[ast.stmt]
    """The file's imports, since code is compiled otherwise for names that are imported."""


def _found(function: types.FunctionType) -> _Found | None:
    code = function.__code__
    try:
        found = _definitions("".join(linecache.getlines(code.co_filename, function.__globals__)))
    except (SyntaxError, ValueError):
        return None
    return found.get((code.co_name, code.co_firstlineno))


@functools.lru_cache(maxsize=256)
def _definitions(text: str) -> dict[tuple[str, int], _Found | None]:
    """The functions of a file by name and first line; None where two have the same."""
    tree = ast.parse(text)
    imports: list[ast.stmt] = []
    found: dict[tuple[str, int], _Found | None] = {}
    for statement in tree.body:
        for node in ast.walk(statement):
            key = ("", 0)
            if isinstance(node, ast.Lambda):
                key = ("<lambda>", node.lineno)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                key = (node.name, min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and not isinstance(statement, _OWN_SCOPE):
                imports.append(node)
            if isinstance(node, Definition):
                found[key] = None if key in found else _Found(node, statement, imports)
    return found


_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_same(left: types.CodeType, right: types.CodeType) -> bool:
    """Whether two codes do the same, wherever in their files they stand."""
    same = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(left, name) != getattr(right, name) for name in (*same, "co_flags", "co_posonlyargcount")):
        return False
    constants = list(zip(left.co_consts, right.co_consts, strict=False))
    return len(left.co_consts) == len(right.co_consts) and all(
        _is_same(a, b) if isinstance(a, types.CodeType) and isinstance(b, types.CodeType) else repr(a) == repr(b)
        for a, b in constants
    )


def with_code(function: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    """A function with another code and everything else of the first."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    return _dressed(made, function)


def _dressed(made: types.FunctionType, function: types.FunctionType) -> types.FunctionType:
    made.__dict__.update(function.__dict__)
    for name in ("__kwdefaults__", "__annotations__", "__qualname__", "__doc__", "__module__", "__type_params__"):
        if hasattr(function, name):
            setattr(made, name, getattr(function, name))
    return made


def contents(cell: types.CellType) -> Any:
    """What a cell holds; None where it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def unwrapped(value: Any) -> Any:
    """The function inside a property and decorators, as far as they say what they wrap."""
    return inspect.unwrap(value.fget if isinstance(value, property) and value.fget else value)


def rewrapped(value: Any, inner: types.FunctionType, made: types.FunctionType) -> Any:
    """What a class holds (a function, a decorated one, a property) with another function inside."""
    if value is inner:
        return made
    if isinstance(value, property):
        return property(rewrapped(value.fget, inner, made), value.fset, value.fdel, value.__doc__)
    wrapped = getattr(value, "__wrapped__", None)
    cells = list(getattr(value, "__closure__", None) or ())
    held = [i for i, cell in enumerate(cells) if contents(cell) is wrapped]
    if not isinstance(value, types.FunctionType) or wrapped is None or not held:
        raise CannotRewrite("it is decorated with something that is not a plain function around it")
    if any(contents(cell) is value for cell in cells):
        raise CannotRewrite("its decorator keeps something on the function that it returns")
    within = rewrapped(wrapped, inner, made)
    for i in held:
        cells[i] = types.CellType(within)
    twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    _dressed(twin, value)
    twin.__dict__.update({name: within for name, held in value.__dict__.items() if held is wrapped})
    return twin
