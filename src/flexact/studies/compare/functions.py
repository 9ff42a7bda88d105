"""The user's functions: found by name, checked, and sent to other processes."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from flexact.candidates.registry import registered_candidates, restore_candidates
from flexact.errors import FlexActError, missing_extra
from flexact.surgery.choosing import Where

Build = Callable[[], nn.Module]
Train = Callable[..., Any]
"""(model, seed, make_schedule) -> score, or a generator of scores."""


class Functions:
    """`build`, `train` and `where` of a comparison. Pickled by value, so that notebooks work too."""

    def __init__(self, build: Build, train: Train, where: Where = "all") -> None:
        _check(build, "build()", arguments=0)
        _check(train, "train(model, seed, make_schedule)", arguments=3)
        self.build, self.train, self.where = build, train, where

    @cached_property
    def packed(self) -> bytes:
        """The functions and the registered candidates as bytes. Raises if they cannot be sent to another process."""
        try:
            cloudpickle = importlib.import_module("cloudpickle")
        except ImportError:
            raise missing_extra("cloudpickle", "studies") from None
        try:
            return bytes(cloudpickle.dumps((self.build, self.train, self.where, registered_candidates())))
        except Exception as error:  # whatever the __reduce__ of the user's objects raises
            raise FlexActError(
                f"build and train cannot be sent to another process ({type(error).__name__}: {error!s:.200}). "
                "Define what they use inside them or in a module, or give engine='inline'."
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.packed,)


def named(specification: str) -> Callable[..., Any]:
    """The function that "module:name" stands for. Modules of the current folder are found too."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = pkgutil.resolve_name(specification)
        if isinstance(found, ModuleType):
            raise ValueError("it is a module")
        return found  # type: ignore[no-any-return]  # checked by `Functions`
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise FlexActError(
            f"cannot load {specification!r} ({error}). Give module:name, such as my_training:train, and start the "
            "command in the folder of the module, or set PYTHONPATH."
        ) from None


def name_of(function: Any) -> str:
    """A function as "module:name".

    >>> name_of(named)
    'flexact.studies.compare.functions:named'
    """
    own = function if hasattr(function, "__qualname__") else type(function)
    return f"{own.__module__}:{own.__qualname__}"


def _unpacked(packed: bytes) -> Functions:
    build, train, where, candidates = pickle.loads(packed)
    restore_candidates(candidates)
    return Functions(build, train, where)


def _check(function: Any, called: str, arguments: int) -> None:
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except (TypeError, ValueError) as error:  # ValueError: Python cannot read the signature
        raise FlexActError(f"got {function!r:.80}, which cannot be called as {called} ({error}).") from None
