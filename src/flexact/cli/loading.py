"""The model that a command names as "module:build"."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexact.errors import FlexActError
from flexact.studies.compare.functions import named


def load_model(given: str) -> tuple[nn.Module, Any]:
    """Import a module, from the current folder too, and return the model there and its example inputs, or None.

    given: "module:build", where `build` is a model, or a function without arguments that returns a model, or a model
    and its example inputs.
    """
    found: Any = named(given)
    try:
        made = found if isinstance(found, nn.Module) or not callable(found) else found()
    except Exception as error:
        raise FlexActError(
            f"{given.rpartition(':')[2]}() raised {type(error).__name__}: {error!s:.300}. It is called without "
            "arguments, and must return a model, alone or with example inputs."
        ) from error
    model, example_inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise FlexActError(
            f"{given} must be a torch.nn.Module, or a function that returns one, alone or with example inputs; got "
            f"{type(made).__name__}."
        )
    return model, example_inputs
