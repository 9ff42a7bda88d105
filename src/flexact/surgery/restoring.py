"""Running a model without leaving a trace: what a forward changes is restored afterwards."""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore a model and the random state at the end: modes, types, children, hooks, buffers and other attributes.

    The attributes are restored, and in place what they hold: tensors, arrays, random generators, containers at any
    depth, and the attributes of other objects, but not those of the objects that these hold. Three things
    are not restored: parameters, which are not copied because a forward rarely writes to them; iterators such as
    itertools.count; and anything outside the model. A lazy module keeps the parameters that it makes.
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    numpy = sys.modules.get("numpy")
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack, torch.random.fork_rng(devices):
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        for module in modes:
            for undo in reversed(list(_undo(module))):  # the last callback runs first
                stack.callback(undo)
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training


def _undo(module: nn.Module) -> Iterator[Callable[[], object]]:
    """Return what restores a module's type and attributes, and what they hold."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    attributes, cls = vars(module), type(module)
    if isinstance(module, LazyModuleMixin):
        attributes = {"_modules": module._modules}
    else:

        def set_type() -> None:
            object.__setattr__(module, "__class__", cls)
            vars(module).clear()  # for the order of the attributes

        yield set_type
    yield functools.partial(vars(module).update, dict(attributes))
    for value in attributes.values():
        yield from _undo_in_place(value, {})


def _undo_in_place(value: Any, seen: dict[int, Any], in_object: bool = False) -> Iterator[Callable[[], object]]:
    """Return what restores a value and the values that it holds in place, so that all stay the same objects."""
    if id(value) in seen or isinstance(value, (nn.Module, nn.Parameter)):
        return
    seen[id(value)] = value
    numpy: Any = sys.modules.get("numpy")
    held: Iterable[Any] = ()
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield functools.partial(_write, value, value.detach().clone())
    elif isinstance(value, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif numpy is not None and isinstance(value, numpy.ndarray):
        yield functools.partial(numpy.copyto, value, value.copy())
    elif numpy is not None and isinstance(value, numpy.random.Generator):
        yield functools.partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    elif type(value) in _CONTAINERS:
        yield functools.partial(_refill, value, copy.copy(value))
        held = value.values() if isinstance(value, dict) else value
    elif isinstance(value, tuple):
        held = value
    elif not in_object and hasattr(value, "__dict__") and not isinstance(value, _CODE):
        yield functools.partial(_refill, vars(value), dict(vars(value)))
        held, in_object = vars(value).values(), True
    for one in held:
        yield from _undo_in_place(one, seen, in_object)


def _write(tensor: Tensor, before: Tensor) -> None:
    if not torch.equal(tensor, before):
        with torch.no_grad():
            tensor.copy_(before)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(before)
    else:
        container.update(before)
