"""The order in which a model runs its activations, and the shapes of their inputs, from one forward."""

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
    """The positions of an activation's first and last call among all calls, and the shapes of its inputs."""

    first: int
    last: int
    shapes: list[tuple[int, ...]]

    def channels(self, name: str, dim: int) -> int:
        """Return the size of a dimension, which must be the same in all calls."""
        for shape in self.shapes:
            if not -len(shape) <= dim < len(shape):
                raise FlexActError(f"{name} has inputs of shape {shape}, which have no dimension {dim} for channels.")
        found = sorted({shape[dim] for shape in self.shapes})
        if len(found) > 1:
            raise FlexActError(
                f"{name} is called with inputs of {', '.join(map(str, found))} channels, and granularity='channel' "
                "needs one number of channels per site. Convert with per_call=True, so that each call is a site, or "
                "exclude it with where=..."
            )
        return found[0]


def run_order(model: nn.Module, findings: Findings, example_inputs: Any, sigmoids: bool) -> dict[int, Seen]:
    """Run the model once in eval mode, and return the calls of its activations by the id of the finding.

    The model, its mode and torch's random state are unchanged afterwards. Activations that run and were not found are
    added to `findings.left_alone`.
    """
    seen: dict[int, Seen] = {}
    watch = Watch(model, findings.lines_left(findings.found), sigmoids)
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    model.eval()
    try:
        with _recorded(model, findings, seen) as recorded, torch.random.fork_rng(devices), torch.no_grad(), watch:
            if isinstance(example_inputs, dict):
                recorded(**example_inputs)
            else:
                recorded(*(example_inputs if isinstance(example_inputs, (tuple, list)) else [example_inputs]))
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


class _Recorder(nn.Module):
    """Takes the place of an activation, and records its calls."""

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
def _recorded(model: nn.Module, findings: Findings, seen: dict[int, Seen]) -> Iterator[nn.Module]:
    """Put a recorder in the place of each activation, and undo it at the end."""
    if findings.found and findings.found[0].names == [""]:  # the model is an activation itself
        yield _Recorder(seen, findings.found[0], model)
        return
    paths = [(name.rpartition("."), one) for one in findings.found for name in one.names]
    places = [(model.get_submodule(parent), attribute, one) for (parent, _, attribute), one in paths]
    before = [(owner, dict(vars(owner)), dict(owner._modules), type(owner)) for owner, _, _ in places]
    classes = findings.rewritten(findings.found)
    for owner, attribute, one in places:
        held = vars(owner).pop(attribute, None) or owner._modules.get(attribute) or one.original
        owner._modules[attribute] = _Recorder(seen, one, held)
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
