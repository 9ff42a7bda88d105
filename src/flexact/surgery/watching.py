"""Warnings about activations that run and are not sites.

`convert` reads sources, which do not show every activation: a function from a table, a lambda, a module in a plain
list. The first forward of a converted model in each mode is therefore watched, and every activation function that is
neither called by a site nor known to `convert` is named in a warning.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flexact.candidates.recognition import ELEMENTWISE, SIGMOIDS, is_kind_of_activation, spelling
from flexact.routing.layer import FlexAct

_TORCH, _FLEXACT = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"
_MODULES_OF_TORCH = tuple(f"{_TORCH}{name}/" for name in ("nn/modules", "distributions"))
"""Folders of torch in which activation calls are not the user's, or are found by `convert` as attributes."""
_ACTIVATIONS = f"{_TORCH}nn/modules/activation.py"
"""The exception among these files: a user's subclass of an activation may inherit its forward, or call it."""

_REMEDY = "make it a submodule of the model"

Lines = set[tuple[str, int, str]]
"""The files, lines and functions (see `flexact.candidates.recognition.spelling`) of activation calls."""


class Watch(TorchFunctionMode):
    """Records the activations that run in a model and are not sites, by the name of the module that calls them.

    known: the calls that need no record. sigmoids: whether sigmoids are activations. path: the name of this model in
    the converted one. reported: the texts that were recorded before, which are not recorded again.
    """

    def __init__(
        self, model: nn.Module, known: Lines, sigmoids: bool, path: str = "", reported: set[str] | None = None
    ) -> None:
        super().__init__()
        self.known = known
        self.functions = ELEMENTWISE | SIGMOIDS if sigmoids else ELEMENTWISE
        self.reported = set() if reported is None else reported
        self.names = {id(module): name or type(module).__name__ for name, module in model.named_modules(prefix=path)}
        self.found: dict[str, str] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():  # Dynamo traces this function too, and cannot trace `strip`
            name = getattr(function, "__name__", "").strip("_")  # F.threshold is called _threshold
            if name in self.functions:
                self._record(name, self._caller(sys._getframe(1)))
        return function(*args, **(kwargs or {}))

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the user's code that calls an activation; None for the call of a site or of torch."""
        is_stray = False  # whether it is called by an activation module outside the model
        while frame is not None:
            file, me = frame.f_code.co_filename, frame.f_locals.get("self")
            if file.startswith((_FLEXACT, "<eval_with_key>")):  # a site, or a torch.fx.GraphModule
                return None
            if isinstance(me, FlexAct) or (isinstance(me, nn.Module) and is_kind_of_activation(me)):
                if id(me) in self.names and not isinstance(me, FlexAct):
                    return None
                is_stray = True
            elif not file.startswith(_TORCH) or file == _ACTIVATIONS:
                return frame
            elif file.startswith(_MODULES_OF_TORCH) and not is_stray:
                return None
            frame = frame.f_back
        return None

    def _record(self, function: str, frame: FrameType | None) -> None:
        """Add an unknown call, under the name of the innermost module of the model on the stack."""
        if frame is None or (frame.f_code.co_filename, frame.f_lineno, spelling(function)) in self.known:
            return
        text = f"{function} in line {frame.f_lineno} of {frame.f_code.co_filename} is not a site; {_REMEDY}"
        if frame.f_code.co_filename == _ACTIVATIONS:
            text = f"{function} of {type(frame.f_locals['self']).__name__}, a subclass of torch's type, is not a site"
        caller: FrameType | None = frame
        while caller is not None and id(caller.f_locals.get("self")) not in self.names:
            caller = caller.f_back
        if caller is not None and text not in self.reported:
            self.reported.add(text)
            name = self.names[id(caller.f_locals["self"])]
            self.found[name] = f"{self.found[name]}; {text}" if name in self.found else text


class _Hook:
    """A forward pre-hook that watches the first forward of a model in training mode, and in evaluation mode.

    It is a plain object, which torch.compile can trace.
    """

    def __init__(self, known: Lines, sigmoids: bool, path: str, reported: set[str]) -> None:
        self.arguments = known, sigmoids, path, reported
        self.modes: set[bool] = set()

    def __call__(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() or model.training in self.modes:
            return
        modes: list[Any] = torch.overrides._get_current_function_mode_stack()
        is_inside = any(isinstance(mode, Watch) and id(model) in mode.names for mode in modes)
        self.modes.add(model.training)
        if is_inside or len(self.modes) == 2:
            unwatch(model)
        has_attention = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
        if is_inside or (has_attention and not model.training):
            return  # torch's fused attention is off under a TorchFunctionMode, which would change the last digits
        mode = Watch(model, *self.arguments)
        mode.__enter__()  # type: ignore[no-untyped-call]

        def end(*_: Any) -> None:
            if mode in torch.overrides._get_current_function_mode_stack():
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                lines = [f"  {name}: {text}" for name, text in mode.found.items()]
                if lines:
                    warnings.warn("\n".join(["flexact.convert did not see these activations:", *lines]), stacklevel=2)
            if sys.exc_info()[0] is None:  # otherwise torch is iterating over the hooks
                handle.remove()

        handle = model.register_forward_hook(end, always_call=True)


def watch(model: nn.Module, known: Lines, sigmoids: bool) -> None:
    """Watch a converted model, and its children of the user's types, which may be called without the model."""
    reported: set[str] = set()
    for name, module in [("", model), *model.named_children()]:
        of_torch = isinstance(module, nn.Sequential) or type(module).__module__.startswith(("torch.", "flexact."))
        if module is model or not of_torch:
            module.register_forward_pre_hook(_Hook(known, sigmoids, name, reported))


def unwatch(model: nn.Module) -> None:
    """Remove the watch from a model."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _Hook):
            del model._forward_pre_hooks[key]
