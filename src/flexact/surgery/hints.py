"""What can be told of functions and classes without reading them line by line."""

from __future__ import annotations

import ast
import functools
import inspect
import types
from typing import Any

import torch.nn.functional as F

from flexact.activations import is_activation_function
from flexact.surgery.rewriting import homes
from flexact.surgery.sources import CannotRewrite, definition_of, unwrapped


def obstacle_to_subclass(cls: type) -> str | None:
    """A `super` that starts from the type of the object, which never ends in a subclass."""
    for home in homes(cls):
        for name, value in vars(home).items() if not home.__module__.startswith("torch.") else ():
            function = unwrapped(value)
            if isinstance(function, types.FunctionType) and "super" in function.__code__.co_names:
                try:
                    definition = definition_of(function)
                except CannotRewrite:
                    continue
                if any(ast.unparse(node).startswith(_SUPER_OF_TYPE) for node in ast.walk(definition)):
                    return f"its {name} calls super with the type of the object, which never ends in a subclass"
    return None


_SUPER_OF_TYPE = ("super(type(self)", "super(self.__class__")


@functools.lru_cache(maxsize=1)
def activation_names() -> frozenset[str]:
    """The names of all activation functions."""
    return frozenset(name for name in dir(F) if is_activation_function(getattr(F, name)))


def names_activation(function: Any) -> bool:
    """Whether the code of a function without a source has the name of an activation."""
    held = [function, *getattr(function, "__dict__", {}).values(), getattr(function, "func", None)]
    codes = [getattr(one, "__code__", None) for one in held]
    for code in codes:
        if isinstance(code, types.CodeType):
            codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
            if not activation_names().isdisjoint(code.co_names):
                return True
    return False


def parameter_names(target: Any) -> list[str]:
    """How the arguments of a function of torch's are called; its builtin ones do not say."""
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ["input", *_BUILTINS.get(getattr(target, "__name__", ""), ())]


_BUILTINS = {"softplus": ("beta", "threshold"), "leaky_relu_": ("negative_slope",), "elu_": ("alpha",)}
