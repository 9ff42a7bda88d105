"""A look at what a model runs: the activations that are no sites, although nobody was told so.

`convert` reads sources, and no reader of sources sees everything: a function from a table, a lambda, a module that is
kept in a list. So the first forward of a converted model in each mode is watched: every activation function that torch
is asked for is one of a site, or one that `convert` has left alone and knows, or else it is named in a warning.
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

_TORCH, _FLEXACT = (f"{Path(str(package)).parent}/" for package in (torch.__file__, __file__))
_OF_TORCH = tuple(f"{_TORCH}{name}/" for name in ("nn/modules", "distributions"))
"""Whose own calls are no activations of the user's, or are found as attributes."""


class Watch(TorchFunctionMode):
    """Notes the activations that run in a model and are no sites, by the name of the module that runs them.

    known: the files and lines of activations that are left alone, and said to be; sigmoids: whether these count.
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
            self._look(name, sys._getframe(1))
        return function(*args, **(kwargs or {}))

    def _look(self, function: str, frame: FrameType | None) -> None:
        stray = False  # whether it is the call of an activation module that is none of the model's
        while frame is not None:
            file, me = frame.f_code.co_filename, frame.f_locals.get("self")
            if file.startswith((_FLEXACT, "<eval_with_key>")):  # a site, or a torch.fx.GraphModule
                return
            if isinstance(me, FlexAct) or (isinstance(me, nn.Module) and is_kind_of_activation(me)):
                if id(me) in self.names and not isinstance(me, FlexAct):
                    return
                stray = True
            elif not file.startswith(_TORCH):
                break
            elif file.startswith(_OF_TORCH) and not stray:
                return
            frame = frame.f_back
        if frame is None or (place := (frame.f_code.co_filename, frame.f_lineno)) in self.known:
            return
        while frame is not None and id(frame.f_locals.get("self")) not in self.names:
            frame = frame.f_back
        if frame is not None:
            self.known.add(place)
            told = f"{function} in line {place[1]} of {place[0]} is not a site; make it a module of the model's"
            name = self.names[id(frame.f_locals["self"])]
            self.found[name] = f"{self.found[name]}; {told}" if name in self.found else told


class FirstForwards:
    """Watches a model's first forward in training and in evaluation mode, as a forward pre-hook of it."""

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
        watch = Watch(model, self.known, self.sigmoids)
        watch.__enter__()  # type: ignore[no-untyped-call]

        def end(*_: Any) -> None:
            if watch in torch.overrides._get_current_function_mode_stack():
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self.known |= watch.known
                if watch.found:
                    lines = [f"  {name}: {text}" for name, text in watch.found.items()]
                    warnings.warn("\n".join(["flexact.convert did not see these activations:", *lines]), stacklevel=2)
            if sys.exc_info()[0] is None:  # else torch goes through the hooks, and none may be taken away
                handle.remove()

        handle = model.register_forward_hook(end, always_call=True)


def unwatch(model: nn.Module) -> None:
    """Take the hook of `FirstForwards` away."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, FirstForwards):
            del model._forward_pre_hooks[key]
