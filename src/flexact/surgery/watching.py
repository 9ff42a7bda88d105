"""Warnings about activations that run and are not sites.

`convert` reads sources, which do not show every activation: a function from a table, a lambda, a module in a plain
list. The first forward of a converted model in each mode is therefore watched, and every activation function that is
neither called by a site nor known to `convert` is named in a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flexact.activations import ELEMENTWISE, SIGMOIDS, is_kind_of_activation
from flexact.routing.layer import FlexAct

_TORCH, _FLEXACT = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"
_MODULES_OF_TORCH = tuple(f"{_TORCH}{name}/" for name in ("nn/modules", "distributions"))
"""Their own calls are not the user's, or are found as attributes."""


class Watch(TorchFunctionMode):
    """Records the activations that run and are not sites, by the name of the module that calls them.

    known: the files and lines of calls that need no warning; sigmoids: whether sigmoids are activations.
    """

    def __init__(self, model: nn.Module, known: Iterable[tuple[str, int]], sigmoids: bool) -> None:
        super().__init__()
        self.known = set(known)
        self.functions = ELEMENTWISE | SIGMOIDS if sigmoids else ELEMENTWISE
        self.names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self.found: dict[str, str] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").rstrip("_")
        if name in self.functions and not torch.compiler.is_compiling():
            frame = self._caller(sys._getframe(1))
            if frame is not None and (frame.f_code.co_filename, frame.f_lineno) not in self.known:
                self._record(name, frame)
        return function(*args, **(kwargs or {}))

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the user's code that calls an activation; None for the call of a site or of torch."""
        is_stray = False  # whether an activation module calls it that is not a submodule of the model
        while frame is not None:
            file, me = frame.f_code.co_filename, frame.f_locals.get("self")
            if file.startswith((_FLEXACT, "<eval_with_key>")):  # a site, or a torch.fx.GraphModule
                return None
            if isinstance(me, FlexAct) or (isinstance(me, nn.Module) and is_kind_of_activation(me)):
                if id(me) in self.names and not isinstance(me, FlexAct):
                    return None
                is_stray = True
            elif not file.startswith(_TORCH):
                return frame
            elif file.startswith(_MODULES_OF_TORCH) and not is_stray:
                return None
            frame = frame.f_back
        return None

    def _record(self, function: str, frame: FrameType | None) -> None:
        """Add a call to the module that runs it: the first one of the model on the stack."""
        assert frame is not None
        file, line = frame.f_code.co_filename, frame.f_lineno
        while frame is not None and id(frame.f_locals.get("self")) not in self.names:
            frame = frame.f_back
        if frame is not None:
            self.known.add((file, line))
            text = f"{function} in line {line} of {file} is not a site; make it a submodule of the model"
            name = self.names[id(frame.f_locals["self"])]
            self.found[name] = f"{self.found[name]}; {text}" if name in self.found else text


class FirstForwards:
    """A forward pre-hook that watches a model's first forward in training mode and in evaluation mode."""

    def __init__(self, known: Iterable[tuple[str, int]], sigmoids: bool) -> None:
        self.known = set(known)
        self.sigmoids = sigmoids
        self.seen: set[bool] = set()

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() or model.training in self.seen:
            return
        self.seen.add(model.training)
        if len(self.seen) == 2:
            unwatch(model)
        if not model.training and any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
            return  # torch's fused attention is off under a TorchFunctionMode, which would change the last digits
        watch = Watch(model, self.known, self.sigmoids)
        watch.__enter__()  # type: ignore[no-untyped-call]

        def end(*_: Any) -> None:
            if watch in torch.overrides._get_current_function_mode_stack():
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self.known |= watch.known
                if watch.found:
                    lines = [f"  {name}: {text}" for name, text in watch.found.items()]
                    warnings.warn("\n".join(["flexact.convert did not see these activations:", *lines]), stacklevel=2)
            if sys.exc_info()[0] is None:  # otherwise torch is iterating over the hooks
                handle.remove()

        handle = model.register_forward_hook(end, always_call=True)


def unwatch(model: nn.Module) -> None:
    """Remove the hook of `FirstForwards`."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, FirstForwards):
            del model._forward_pre_hooks[key]
