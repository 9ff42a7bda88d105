"""The user's held-out loss, by which a trial compares candidates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError


class HeldOut:
    """Calls the user's function, with the model in eval mode and without gradients."""

    def __init__(self, function: Callable[[], Any], model: nn.Module) -> None:
        if not callable(function):
            raise FlexActError(f"held_out must be a function that returns a held-out loss; got {function!r:.80}.")
        self._function, self._model = function, model

    def loss(self, candidate: str, training_loss: Tensor | float | None) -> float:
        """Return the current held-out loss, or infinity if the network with this candidate has diverged.

        training_loss: the loss of the current step. If it is finite and the held-out loss is NaN, the data are at
        fault, and an error is raised.
        """
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad():
                value = self._function()
        finally:
            for module, training in modes.items():
                module.training = training
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise FlexActError(f"held_out must return one number, a mean loss; got {value!r:.80}.") from None
        if not math.isnan(number):
            return number
        if training_loss is not None and not math.isfinite(float(training_loss)):
            return math.inf
        raise FlexActError(f"held_out returned NaN for {candidate!r}. Check its data, or leave out the candidate.")
