"""A hook before the steps of all optimizers, and its listeners.

There is one hook, and it stays: torch iterates over its hooks at each step, and adding or removing one meanwhile (from
another thread, or because the garbage collector found its schedule) would raise an error there.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class Acting(Protocol):
    """What acts before steps."""

    def acts_before(self, stepping: Optimizer) -> bool:
        """Whether it acts before the step that this optimizer is about to make."""

    def before_optimizer_step(self, stepping: Optimizer) -> None:
        """Act."""


_numbers = itertools.count()
_listening: dict[int, weakref.ref[Acting]] = {}


class Listener:
    """Lets something act before each step of any optimizer, while it lives and until `remove`."""

    def __init__(self, acting: Acting) -> None:
        _register()
        self._number = next(_numbers)
        _listening[self._number] = weakref.ref(acting, lambda _: self.remove())

    def remove(self) -> None:
        _listening.pop(self._number, None)


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(stepping: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    changed = None
    for reference in list(_listening.values()):
        acting = reference()
        if acting is None or not acting.acts_before(stepping):
            continue
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
        if closure is None:
            acting.before_optimizer_step(stepping)
        else:
            act = functools.partial(acting.before_optimizer_step, stepping)
            args, kwargs = changed = args[:1], kwargs | {"closure": _then(closure, act)}
    return changed


def _then(closure: Callable[[], Any], act: Callable[[], None]) -> Callable[[], Any]:
    """A closure after whose first call something acts, because the step's gradients are computed in it, as Lightning
    does. Further calls, such as those of LBFGS, belong to the same step."""
    pending = [act]

    def both() -> Any:
        loss = closure()
        if pending:
            pending.pop()()
        return loss

    return both
