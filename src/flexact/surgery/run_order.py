"""In which order a model runs its activations, and on what shapes: seen by running it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.surgery.finding import Findings, Found
from flexact.surgery.watching import Watch


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


def run_order(model: nn.Module, findings: Findings, example_inputs: Any, sigmoids: bool) -> dict[int, Seen]:
    """Run the model once in eval mode and see its activations called; by the id of what was found.

    The model, its mode and torch's random numbers are as before when it is done. Activations that run and are none of
    the findings are added to what is left alone.
    """
    seen: dict[int, Seen] = {}
    watch = Watch(model, findings.lines_left(findings.found), sigmoids)
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    model.eval()
    try:
        with _watched(model, findings, seen) as watched, torch.random.fork_rng(devices), torch.no_grad(), watch:
            _call(watched, example_inputs)
    except Exception as error:
        raise FlexActError(
            f"the model could not be run on example_inputs: {type(error).__name__}: {error}. Give what its forward "
            "takes: a tensor, a tuple of arguments, or a dictionary of keywords."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    findings.left_alone |= watch.found
    return seen


class _Noted(nn.Module):
    """Stands in an activation's place, and notes its calls."""

    def __init__(self, seen: dict[int, Seen], one: Found, call: Callable[..., Any]) -> None:
        super().__init__()
        self.seen, self.one, self.call = seen, id(one), call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = sum(len(seen.shapes) for seen in self.seen.values())
        seen = self.seen.setdefault(self.one, Seen(count, count, []))
        seen.last = count
        given = (*args, *kwargs.values())
        seen.shapes.append(next((tuple(value.shape) for value in given if isinstance(value, Tensor)), ()))
        return self.call(*args, **kwargs)


@contextmanager
def _watched(model: nn.Module, findings: Findings, seen: dict[int, Seen]) -> Iterator[nn.Module]:
    """The model with something that notes in the place of each activation."""
    if findings.found and findings.found[0].names == [""]:  # the model is an activation itself
        yield _Noted(seen, findings.found[0], model)
        return
    places: list[tuple[nn.Module, str, Found]] = []
    for one in findings.found:
        for name in one.names:
            parent, _, attribute = name.rpartition(".")
            places.append((model.get_submodule(parent), attribute, one))
    before = [(owner, dict(vars(owner)), dict(owner._modules), type(owner)) for owner, _, _ in places]
    classes = findings.rewritten(findings.found)
    for owner, attribute, one in places:
        held = vars(owner).pop(attribute, None) or owner._modules.get(attribute) or one.original
        owner._modules[attribute] = _Noted(seen, one, held)
    for owner, cls in classes.items():
        owner.__class__ = cls
    try:
        yield model
    finally:
        for owner, attributes, children, cls in reversed(before):
            owner.__class__ = cls
            owner._modules.clear()
            owner._modules.update(children)
            vars(owner).update(attributes)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)
