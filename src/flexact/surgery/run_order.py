"""The order in which a model runs its activations, and the shapes of their inputs, from one forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.surgery.finding import Findings, Found
from flexact.surgery.layer_before import LAYERS, layer_in_graph
from flexact.surgery.restoring import restored
from flexact.surgery.swapping import swap_in
from flexact.surgery.watching import Watch


@dataclass
class Seen:
    """The positions of an activation's first and last call among all calls, and what is known of its inputs."""

    first: int
    last: int
    shapes: list[tuple[int, ...]]
    before: set[nn.Module | None]
    """The layers whose output the calls take; None for a call where that is not known. Empty without a graph."""

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


def run_order(
    model: nn.Module, findings: Findings, example_inputs: Any, sigmoids: bool, graph: bool
) -> dict[int, Seen]:
    """Run the model once in eval mode, and return the calls of its activations by the id of the finding, and those of
    all submodules by the id of the module.

    graph: whether to find the layers that their inputs come from, which takes the memory of a training forward.
    The model and the random state are unchanged afterwards. Activations that run and were not found are added to
    `findings.left_alone`.
    """
    seen: dict[int, Seen] = {}
    layers: dict[int, nn.Module]
    layers = {id(module.weight): module for module in model.modules() if graph and isinstance(module, LAYERS)}
    watch = Watch(findings.lines_left(findings.found), sigmoids).over(model)
    given: Any = example_inputs if isinstance(example_inputs, (tuple, list, dict)) else [example_inputs]
    with restored(model):
        model.eval()
        try:
            with _recorded(model, findings, seen, layers) as recorded, torch.set_grad_enabled(graph), watch:
                recorded(**given) if isinstance(given, dict) else recorded(*given)
        except Exception as error:
            raise FlexActError(
                f"the model could not be run on example_inputs: {type(error).__name__}: {error}. Give what its forward "
                "takes: a tensor, a tuple of arguments, or a dictionary of keywords."
            ) from error
    findings.left_alone |= watch.found
    return seen


@contextmanager
def _recorded(
    model: nn.Module, findings: Findings, seen: dict[int, Seen], layers: dict[int, nn.Module]
) -> Iterator[nn.Module]:
    """Put a recorder in the place of each activation, which `restored` undoes, and a hook on every module."""

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        _record(seen, id(module), (*args, *kwargs.values()), {})

    hooked = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    hooks = [module.register_forward_pre_hook(entered, prepend=True, with_kwargs=True) for module in hooked]
    for owner, cls in findings.rewritten(findings.found).items():
        object.__setattr__(owner, "__class__", cls)
    try:
        yield swap_in(model, findings.found, [_Recorder(seen, one, layers) for one in findings.found])
    finally:
        for hook in hooks:
            hook.remove()


def _record(seen: dict[int, Seen], key: int, given: tuple[Any, ...], layers: dict[int, nn.Module]) -> None:
    """Add a call with these arguments."""
    count = sum(len(one.shapes) for one in seen.values())
    own = seen.setdefault(key, Seen(count, count, [], set()))
    own.last = count
    h = next((value for value in given if isinstance(value, Tensor)), None)
    own.shapes.append(() if h is None else tuple(h.shape))
    if layers:
        own.before.add(None if h is None else layer_in_graph(h, layers))


class _Recorder(nn.Module):
    """Replaces an activation, and records its calls."""

    def __init__(self, seen: dict[int, Seen], one: Found, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        self.seen, self.one, self.call, self.layers = seen, id(one), one.function or one.original, layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _record(self.seen, self.one, (*args, *kwargs.values()), self.layers)
        return self.call(*args, **kwargs)
