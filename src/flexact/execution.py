"""In which order a model runs its activations, and on what shapes: seen by running it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexact.activations import is_activation_function, is_method
from flexact.errors import FlexActError
from flexact.finding import Findings, Found


@dataclass
class Seen:
    """The places of an activation's first and last call among all calls, and its input's shape."""

    first: int
    last: int
    shape: tuple[int, ...]

    def channels(self, name: str, dim: int) -> int:
        if not -len(self.shape) <= dim < len(self.shape):
            raise FlexActError(f"{name} has inputs of shape {self.shape}, which have no dimension {dim} for channels.")
        return self.shape[dim]


def run_order(model: nn.Module, findings: Findings, example_inputs: Any) -> dict[int, Seen]:
    """Run the model once in eval mode and see its activations called; by the id of what was found."""
    seen: dict[int, Seen] = {}
    count = 0

    def note(one: Found | None, inputs: tuple[Any, ...]) -> None:
        nonlocal count
        if one is not None:
            shape = next((tuple(value.shape) for value in inputs if isinstance(value, Tensor)), ())
            seen[id(one)] = Seen(seen[id(one)].first if id(one) in seen else count, count, shape)
            count += 1

    modules = {id(one.original): one for one in findings.found if one.kind == "module" and not one.calls}
    functions = {(id(one.owner), one.function): one for one in findings.found if one.kind == "function"}
    calls = {(id(one.owner), call): one for one in findings.found for call in one.calls}
    running: list[nn.Module] = []
    done: dict[int, int] = {}  # calls so far in a traced owner's running forward, which come in the order of the trace

    def note_call(owner: nn.Module, inputs: tuple[Any, ...]) -> None:
        note(calls.get((id(owner), done[id(owner)])), inputs)
        done[id(owner)] += 1

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if running and (is_activation_function(function) or is_method(getattr(function, "__name__", ""))):
                owner = running[-1]
                if (id(owner), function) in functions:
                    note(functions[id(owner), function], args)
                elif id(owner) in findings.traced:
                    note_call(owner, args)
            return function(*args, **(kwargs or {}))

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if id(module) in modules:
            note(modules[id(module)], inputs)
        elif running and _is_traced_child(findings, running[-1], module):
            note_call(running[-1], inputs)
        running.append(module)
        done[id(module)] = 0

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    unique = list(dict.fromkeys(model.modules()))
    handles = [module.register_forward_pre_hook(enter) for module in unique]
    handles += [module.register_forward_hook(leave) for module in unique]
    modes = {module: module.training for module in unique}
    model.eval()
    try:
        with torch.no_grad(), Watch():
            _call(model, example_inputs)
    except Exception as error:
        raise FlexActError(
            f"the model could not be run on example_inputs: {type(error).__name__}: {error}. Give what its forward "
            "takes: a tensor, a tuple of arguments, or a dictionary of keywords."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return seen


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _is_traced_child(findings: Findings, owner: nn.Module, module: nn.Module) -> bool:
    forward = findings.traced.get(id(owner))
    return forward is not None and any(call.child is not None and call.module is module for call in forward.calls)
