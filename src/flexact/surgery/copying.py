"""Deep copies of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexact.errors import FlexActError


def copied(model: nn.Module, shared: Iterable[Tensor] = (), kind: type[nn.Module] = nn.Module) -> nn.Module:
    """Return a deep copy of a model, which shares some tensors with it. Raise if it shares modules of a given type."""
    with _DetachedCopies():
        twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    own = {id(module): name for name, module in model.named_modules() if isinstance(module, kind)}
    same = [own[id(module)] or type(model).__name__ for module in twin.modules() if id(module) in own]
    if same:
        raise FlexActError(
            f"a deep copy of this model contains {same[0]} itself instead of a copy, so a change of the copy would "
            "change the model. Remove the __deepcopy__ that returns the module itself, or avoid the copy: omit "
            "example_inputs, and call extract(model, inplace=True)."
        )
    return twin


class _DetachedCopies(TorchFunctionMode):
    """Lets deepcopy copy tensors with a gradient history by value, such as a result that a module has cached."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return function(*args, **(kwargs or {}))
