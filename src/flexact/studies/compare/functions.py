"""The user's functions: checking them, finding them by name, and sending them to other processes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flexact.candidates import Candidate, registered_candidates, restore_candidates
from flexact.errors import FlexActError, suggestion
from flexact.studies.compare.sources import sources
from flexact.surgery.choosing import Where

Build = Callable[[], nn.Module]
Train = Callable[..., Any]
"""(model, seed, make_schedule) -> score, or a generator of scores."""


class Functions:
    """`build`, `train` and `where` of a comparison. Pickled by value where possible, so notebooks work too."""

    def __init__(self, build: Build, train: Train, where: Where = "all") -> None:
        for name, function, arguments in (("build", build, 0), ("train", train, 3)):
            _check(name, function, arguments)
        self.build, self.train, self.where = build, train, where
        self._packed: bytes | None = None

    def packed(self) -> bytes:
        """The functions and the registered candidates as bytes. Raises if they cannot be sent to another process."""
        if self._packed is None:
            parts = (self.build, self.train, self.where, registered_candidates())
            by_value = importlib.util.find_spec("cloudpickle") is not None
            if not by_value and any(_is_in_notebook(one) for one in parts[:2]):
                raise FlexActError(
                    "build and train are defined in a notebook or on the command line of Python, and other processes "
                    "cannot import them from there. Install cloudpickle, or give engine='inline'."
                )
            try:
                self._packed = importlib.import_module("cloudpickle" if by_value else "pickle").dumps(parts)
            except Exception as error:  # whatever the __reduce__ of the user's objects raises
                remedy = (
                    "Define what they use inside of them or in a module"
                    if by_value
                    else "Install cloudpickle, which sends lambdas and local functions too"
                )
                raise FlexActError(
                    f"build and train cannot be sent to another process ({type(error).__name__}: {error!s:.200}). "
                    f"{remedy}, or give engine='inline'."
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


def _is_in_notebook(function: Any) -> bool:
    return getattr(function, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
