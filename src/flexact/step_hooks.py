"""A hook that lets a policy act just before an optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Acting(Protocol):
    """What acts before steps."""

    def acts_before(self, stepping: Optimizer) -> bool:
        """Whether it acts before the step that this optimizer is about to make."""

    def before_optimizer_step(self, stepping: Optimizer) -> None:
        """Act."""


def hook_steps(acting: Acting) -> RemovableHandle:
    """Let something act before each step of any optimizer, while it lives."""
    reference = weakref.ref(acting)

    def hook(stepping: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        alive = reference()
        if alive is None or not alive.acts_before(stepping):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
        if closure is None:
            alive.before_optimizer_step(stepping)
            return None
        return args[:1], kwargs | {"closure": _then(closure, partial(alive.before_optimizer_step, stepping))}

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(acting, handle.remove).atexit = False
    return handle


def _then(closure: Callable[[], Any], act: Callable[[], None]) -> Callable[[], Any]:
    """A closure after which something acts: the step's gradients are made in it, as Lightning does. Only at its first
    call; what LBFGS asks for after that belongs to the same step."""
    pending = [act]

    def both() -> Any:
        loss = closure()
        if pending:
            pending.pop()()
        return loss

    return both
