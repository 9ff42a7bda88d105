"""The source of a method as a syntax tree, and functions compiled from an edited tree."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import linecache
import types
from collections.abc import Sequence
from typing import Any, TypeVar

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Node = TypeVar("Node", bound=ast.AST)
_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CannotRewrite(Exception):
    """Raised if a method cannot be rewritten; the message is the reason."""


@functools.lru_cache(maxsize=4096)
def definition_of(function: types.FunctionType) -> Definition:
    """Return the node that defines a function. Raises CannotRewrite unless it compiles to the code that runs."""
    definition = _found(function)[0]
    if compiled(function, definition) != function.__code__:
        raise CannotRewrite("its source is not what runs: the file changed, or something rewrote it on import")
    return definition


@functools.lru_cache(maxsize=4096)
def nodes_in(function: types.FunctionType) -> list[ast.AST]:
    """Return the nodes of a function's definition."""
    return list(ast.walk(definition_of(function)))


def nodes_of(kind: type[Node], *trees: ast.AST) -> list[Node]:
    """Return the nodes of one type in syntax trees."""
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, kind)]


def compiled(function: types.FunctionType, definition: Definition) -> types.CodeType:
    """Compile a definition as a replacement of a function's own, in the same class, closure, file and lines."""
    code, (own, statement, imports) = function.__code__, _found(function)
    edited = statement if definition is own else copy.deepcopy(statement, {id(own): definition})
    whole = compile(ast.Module([*imports, edited], []), code.co_filename, "exec", dont_inherit=True)
    where = code.co_name, code.co_firstlineno
    return next(one for one in codes_of(whole) if (one.co_name, one.co_firstlineno) == where)


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """Return a code object and those of all functions inside it."""
    codes = [code]
    for one in codes:
        codes += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return codes


_Found = tuple[Definition, ast.stmt, list[ast.stmt]]
"""A definition, the top-level statement of the file that contains it, and the imports of the file: Python compiles
calls through imported names, and `__future__`, differently."""


def _found(function: types.FunctionType) -> _Found:
    code = function.__code__
    with contextlib.suppress(SyntaxError, ValueError):
        definitions = _definitions("".join(linecache.getlines(code.co_filename, function.__globals__)))
        if (found := definitions.get((code.co_name, code.co_firstlineno))) is not None:
            return found
    raise CannotRewrite("its source cannot be read; define the class in a file")


@functools.lru_cache(maxsize=256)
def _definitions(text: str) -> dict[tuple[str, int], _Found | None]:
    """Return the functions of a file by name and first line; None if two functions share both."""
    imports: list[ast.stmt] = []
    found: dict[tuple[str, int], _Found | None] = {}
    for statement in ast.parse(text).body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not isinstance(statement, _OWN_SCOPE):
                imports.append(node)
            elif isinstance(node, Definition):
                name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
                key = name, min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
                found[key] = None if key in found else (node, statement, imports)
    return found


def with_code(
    function: types.FunctionType, code: types.CodeType, cells: Sequence[types.CellType] | None = None
) -> types.FunctionType:
    """Return a copy of a function with another code object and, if given, other closure cells."""
    own = function.__closure__ or () if cells is None else cells
    by_name = dict(zip(function.__code__.co_freevars, own, strict=True))
    closure = tuple(by_name[name] for name in code.co_freevars)
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    functools.update_wrapper(made, function, (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"))
    made.__dict__ = dict(function.__dict__)  # without the `__wrapped__` of update_wrapper
    return made


def contents(cell: types.CellType) -> Any:
    """Return the value of a closure cell, or None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def rewrapped(value: Any, inner: types.FunctionType, made: types.FunctionType) -> Any:
    """Return a decorated function with `inner` replaced by `made`. Decorators must use functools.wraps."""
    if value is inner:
        return made
    wrapped = getattr(value, "__wrapped__", None)
    cells = getattr(value, "__closure__", None) or ()
    held = {id(contents(cell)) for cell in cells}
    if not isinstance(value, types.FunctionType) or id(wrapped) not in held or id(value) in held:
        raise CannotRewrite("its decorator does not return a plain wrapper function made with functools.wraps")
    within = rewrapped(wrapped, inner, made)
    new = [types.CellType(within) if contents(cell) is wrapped else cell for cell in cells]
    twin = with_code(value, value.__code__, new)
    twin.__dict__["__wrapped__"] = within
    return twin
