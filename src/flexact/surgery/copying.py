"""Deep copies of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def copied(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy of a model, which shares some tensors with it."""
    with _DetachedCopies():
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class _DetachedCopies(TorchFunctionMode):
    """Lets deepcopy copy tensors with a gradient history by value, such as a result that a module has cached."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return function(*args, **(kwargs or {}))
