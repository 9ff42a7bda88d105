"""In which order a model runs its activations, and on what shapes: seen by running it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flexact.activations import is_activation, module_of_call
from flexact.errors import FlexActError
from flexact.finding import Findings, Found


@dataclass
class Seen:
    """The places of an activation's first and last call among all calls, and its inputs' shapes."""

    first: int
    last: int
    shapes: list[tuple[int, ...]]

    def channels(self, name: str, dim: int) -> int:
        for shape in self.shapes:
            if not -len(shape) <= dim < len(shape):
                raise FlexActError(f"{name} has inputs of shape {shape}, which have no dimension {dim} for channels.")
        found = sorted({shape[dim] for shape in self.shapes})
        if len(found) > 1:
            raise FlexActError(
                f"{name} is called with inputs of {', '.join(map(str, found))} channels, and granularity='channel' "
                "picks for one number of channels a site. Convert with per_call=True, so that each call is a site of "
                "its own, or leave it out with where=..."
            )
        return found[0]


def run_order(model: nn.Module, findings: Findings, example_inputs: Any) -> dict[int, Seen]:
    """Run the model once in eval mode and see its activations called; by the id of what was found.

    The model, its mode and torch's random numbers are as before when it is done. Activations that run and are none of
    the findings are added to what is left alone.
    """
    log = _Log(findings, {id(module): name or type(module).__name__ for name, module in model.named_modules()})
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    model.eval()
    try:
        with (
            _watched(model, findings, log) as watched,
            torch.random.fork_rng(devices),
            torch.no_grad(),
            _Calls(log),
        ):
            _call(watched, example_inputs)
    except Exception as error:
        raise FlexActError(
            f"the model could not be run on example_inputs: {type(error).__name__}: {error}. Give what its forward "
            "takes: a tensor, a tuple of arguments, or a dictionary of keywords."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    for name, functions in log.hidden.items():
        told = f"calls {', '.join(functions)} in a way that its source does not show; keep it as a module"
        findings.left_alone.setdefault(name, told)
    return log.seen


@dataclass
class _Log:
    findings: Findings
    names: dict[int, str]
    """What each module of the model is called, by its id."""
    seen: dict[int, Seen] = field(default_factory=dict)
    count: int = 0
    running: list[nn.Module] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    """Calls so far in a traced owner's running forward, which come in the order of the trace."""
    quiet: bool = False
    hidden: dict[str, list[str]] = field(default_factory=dict)
    """The functions that belong to no finding, by the name of the module that called them."""

    def note(self, one: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape = next((tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), ())
        seen = self.seen.setdefault(id(one), Seen(self.count, self.count, []))
        seen.last = self.count
        seen.shapes.append(shape)
        self.count += 1

    def note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The next call of the innermost forward, where that was traced."""
        owner = self.running[-1]
        number = self.done[id(owner)]
        self.done[id(owner)] += 1
        for one in self.findings.found:
            if one.owner is owner and number in one.calls:
                self.note(one, args, kwargs)

    def note_hidden(self, function: str) -> None:
        functions = self.hidden.setdefault(self.names[id(self.running[-1])], [])
        if function not in functions:
            functions.append(function)

    def noting(self, one: Found, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that notes each of its calls; those within it are its own affair."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(one, args, kwargs)
            self.quiet = True
            try:
                return function(*args, **kwargs)
            finally:
                self.quiet = False

        return noted


class _Noted(nn.Module):
    """Stands in an activation module's place."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Sees the functional activations: those of traced forwards, and those that no finding knows of."""

    def __init__(self, log: _Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        log = self.log
        if not log.quiet and log.running:
            name = getattr(function, "__name__", "")
            as_function = module_of_call("call_function", function, args[1:], kwargs)
            if as_function is not None or module_of_call("call_method", name, args[1:], kwargs) is not None:
                if id(log.running[-1]) in log.findings.traced:
                    log.note_call(args, kwargs)
                elif not is_activation(log.running[-1]):
                    log.note_hidden(name)
        return function(*args, **kwargs)


@contextmanager
def _watched(model: nn.Module, findings: Findings, log: _Log) -> Iterator[nn.Module]:
    """The model with something that notes in the place of each module and function, and hooks around its forwards."""
    if findings.found and findings.found[0].names == [""]:  # the model is an activation itself
        yield _Noted(log.noting(findings.found[0], model))
        return

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if log.running and _is_traced_child(findings, log.running[-1], module):
            log.note_call(args, kwargs)
        log.running.append(module)
        log.done[id(module)] = 0

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        log.running.pop()

    places = []
    for one in findings.found:
        for name in one.names if one.kind != "call" else ():
            parent, _, attribute = name.rpartition(".")
            owner = model.get_submodule(parent)
            place: dict[str, Any] = vars(owner) if one.kind == "function" else owner._modules
            places.append((place, attribute, place[attribute], one))
    modules = list(model.modules())
    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(leave) for module in modules]
    for place, attribute, value, one in places:
        noted = log.noting(one, value)
        place[attribute] = noted if one.kind == "function" else _Noted(noted)
    try:
        yield model
    finally:
        for place, attribute, value, _ in places:
            place[attribute] = value
        for handle in handles:
            handle.remove()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _is_traced_child(findings: Findings, owner: nn.Module, module: nn.Module) -> bool:
    forward = findings.traced.get(id(owner))
    return forward is not None and any(call.child is not None and call.module is module for call in forward.calls)
