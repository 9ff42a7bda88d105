"""Digests of the code and the constants that a comparison depends on, so that a change between its runs is noticed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

_VERSIONED = ("torch", "flexact", "builtins", "typing")
"""Packages whose classes have no digest: config.json has their versions."""


def sources(functions: Mapping[str, Any], model: nn.Module) -> dict[str, str]:
    """Digests by name: of the functions, of the classes of the model outside torch, and of what these use, which are
    functions and classes of their own modules, and constants. Objects without a source are left out."""
    found = _Digests(getattr(functions["train"], "__module__", ""))
    for name, function in functions.items():
        found.add(name, function)
    for kind in dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__):
        if kind.__module__.partition(".")[0] not in _VERSIONED:
            found.add(found.name_of(kind.__module__, kind.__qualname__), kind)
    return found.by_name


class _Digests:
    """Collects digests. home: the module whose names are shown without the module."""

    def __init__(self, home: str) -> None:
        self._home = home
        self.by_name: dict[str, str] = {}

    def name_of(self, module: str, name: str) -> str:
        return name if module == self._home else f"{module}.{name}"

    def add(self, name: str, value: Any) -> None:
        """Add a constant, or a function or class and what it uses. Other values are left out."""
        if name in self.by_name:
            return
        if isinstance(value, functools.partial):
            self.add(f"the arguments of {name}", [list(value.args), value.keywords])
            value = value.func
        value = inspect.unwrap(value) if callable(value) else value
        with suppress(OSError, TypeError):  # there is no source
            if _is_constant(value):
                self.by_name[name] = _digest(repr(value))
            elif isinstance(value, (types.FunctionType, types.MethodType, type)):
                self.by_name[name] = _digest(inspect.getsource(value))
                for function in vars(value).values() if isinstance(value, type) else [value]:
                    self._add_used(function)

    def _add_used(self, function: Any) -> None:
        """Add what a function uses by name: constants, and functions and classes of its own module."""
        function = getattr(function, "fget", getattr(function, "__func__", function))
        if not isinstance(function, types.FunctionType):
            return
        module = function.__module__
        for name, value in _used(function):
            if _is_constant(value) or getattr(value, "__module__", None) == module:
                self.add(self.name_of(module, name), value)


def _used(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The names that a function refers to outside of itself, and their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names in the code of a function and of the functions inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_constant(value: Any, depth: int = 4) -> bool:
    """Whether a value is a number or text, or a list, tuple, dictionary or dataclass of such values."""
    if isinstance(value, dict):
        return _is_constant([*value.keys(), *value.values()], depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _is_constant([getattr(value, field.name, None) for field in dataclasses.fields(value)], depth)
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_constant(one, depth - 1) for one in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
