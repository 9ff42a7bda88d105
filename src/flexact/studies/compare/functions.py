"""The user's functions: found by name, checked, sent to other processes, and digests of their code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from flexact.candidates import Candidate, registered_candidates, restore_candidates
from flexact.errors import FlexActError, missing_extra, suggestion
from flexact.surgery.choosing import Where

Build = Callable[[], nn.Module]
Train = Callable[..., Any]
"""(model, seed, make_schedule) -> score, or a generator of scores."""


class Functions:
    """`build`, `train` and `where` of a comparison. Pickled by value, so that notebooks work too."""

    def __init__(self, build: Build, train: Train, where: Where = "all") -> None:
        for name, function, arguments in (("build", build, 0), ("train", train, 3)):
            _check(name, function, arguments)
        self.build, self.train, self.where = build, train, where
        self._packed: bytes | None = None

    def packed(self) -> bytes:
        """The functions and the registered candidates as bytes. Raises if they cannot be sent to another process."""
        if self._packed is None:
            try:
                cloudpickle = importlib.import_module("cloudpickle")
            except ImportError:
                raise missing_extra("cloudpickle", "studies") from None
            try:
                self._packed = cloudpickle.dumps((self.build, self.train, self.where, registered_candidates()))
            except Exception as error:  # whatever the __reduce__ of the user's objects raises
                raise FlexActError(
                    f"build and train cannot be sent to another process ({type(error).__name__}: {error!s:.200}). "
                    "Define what they use inside of them or in a module, or give engine='inline'."
                ) from None
        return self._packed

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.packed(),)

    def sources(self, model: nn.Module) -> dict[str, str]:
        """Digests of the functions and of what they and the network use. model: what `build` makes."""
        chosen = {"where": self.where} if callable(self.where) else {}
        return sources({"build": self.build, "train": self.train, **chosen}, model)


def named(specification: str) -> Callable[..., Any]:
    """The function that "module:name" stands for. Modules of the current folder are found too."""
    module, _, name = specification.partition(":")
    if not module or not name:
        raise FlexActError(f"got {specification!r} as a function. Give module:name, such as my_training:train.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise FlexActError(
                f"the module {module!r} of {specification!r} imports {error.name!r}, which is not installed."
            ) from None
        raise FlexActError(
            f"there is no module {module!r} for {specification!r}. Start the command in the folder of {module}.py, or "
            "set PYTHONPATH; give the name without .py."
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise FlexActError(f"the module {module} has no {name!r}{suggestion(part, vars(found))}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]  # checked by `Functions`


def name_of(function: Any) -> str:
    """A function as "module:name".

    >>> name_of(named)
    'flexact.studies.compare.functions:named'
    """
    own = function if hasattr(function, "__qualname__") else type(function)
    return f"{own.__module__}:{own.__qualname__}"


def _unpacked(packed: bytes) -> Functions:
    build, train, where, candidates = pickle.loads(packed)
    restored: Mapping[str, Candidate] = candidates
    restore_candidates(restored)
    return Functions(build, train, where)


def _check(name: str, function: Any, arguments: int) -> None:
    called = "build()" if name == "build" else "train(model, seed, make_schedule)"
    if isinstance(function, nn.Module) or not callable(function):
        raise FlexActError(f"{name} must be a function, called as {called}; got {function!r:.80}.")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        raise FlexActError(f"{name} is called as {called}, and {name_of(function)} cannot be ({error}).") from None
    except ValueError:
        pass  # it has no signature that Python can read


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
