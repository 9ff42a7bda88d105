"""A global hook that runs before every optimizer step, and the methods that it calls.

There is one hook, which is never removed: torch iterates over its hooks at each step, and raises an error if one is
added or removed meanwhile, by another thread or by the garbage collection of a schedule.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

Action: TypeAlias = Callable[[bool], None]
Method: TypeAlias = Callable[[Optimizer], Action | None]

_listening: dict[weakref.WeakMethod[Method], None] = {}


def listen(method: Method) -> None:
    """Call a method before each step of any optimizer, until its object is deleted.

    method: receives the optimizer, and returns an action to run once the step's gradients are computed, or None. The
    action is told whether they were already computed once in the same step; LBFGS computes them several times.
    """
    _register()
    _listening[weakref.WeakMethod(method, lambda reference: _listening.pop(reference, None))] = None


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    atexit.register(_listening.clear)  # a weak method that dies while Python exits prints an ignored exception


def _before_step(stepping: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    changed = None
    for reference in list(_listening):
        method = reference()
        act = None if method is None else method(stepping)
        if act is None:
            continue
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            act(False)
        else:
            args, kwargs = changed = args[:1], kwargs | {"closure": _then(closure, act)}
    return changed


def _then(closure: Callable[[], Any], act: Action) -> Callable[[], Any]:
    """Return a closure that acts after each call, for loops that compute the gradients in it, such as Lightning's."""
    calls = itertools.count()

    def both() -> Any:
        loss = closure()
        act(next(calls) > 0)
        return loss

    return both
