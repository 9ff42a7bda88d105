"""The order in which a model runs its activations, and the shapes of their inputs, from one forward."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flexact.errors import FlexActError
from flexact.routing.random_state import same_random_state
from flexact.surgery.copying import copied
from flexact.surgery.finding import Findings
from flexact.surgery.layer_before import LAYERS, layer_in_graph
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
                raise FlexActError(
                    f"site {name!r} has inputs of shape {shape}, which have no dimension {dim} for channels."
                )
        found = sorted({shape[dim] for shape in self.shapes})
        if len(found) > 1:
            raise FlexActError(
                f"site {name!r} is called with inputs of {', '.join(map(str, found))} channels, and "
                "granularity='channel' needs one number of channels per site. Convert with per_call=True, so that each "
                "call is a site, or exclude it with where=..."
            )
        return found[0]


def run_order(
    model: nn.Module, findings: Findings, example_inputs: Any, sigmoids: bool, graph: bool
) -> dict[int, Seen]:
    """Run a copy of the model once in eval mode, and return the calls of its activations by the id of the finding, and
    those of all submodules by the id of the module.

    graph: whether to find the layers that their inputs come from, which takes the memory of a training forward.
    The copy shares the parameters, which a forward rarely writes to. The random state is unchanged afterwards.
    Activations that run and were not found are added to `findings.left_alone`.
    """
    seen: dict[int, Seen] = {}
    given: Any = example_inputs if isinstance(example_inputs, (tuple, list, dict)) else [example_inputs]
    try:
        with same_random_state(), torch.set_grad_enabled(graph), _eager():
            twin = copied(model, (parameter for parameter in model.parameters() if not is_lazy(parameter))).eval()
            with Watch(twin, findings.lines_left(findings.found), sigmoids) as watch:
                recorded = _recorded(model, twin, findings, seen, graph)
                recorded(**given) if isinstance(given, dict) else recorded(*given)
    except Exception as error:
        raise FlexActError(
            f"a copy of the model could not be run on example_inputs: {type(error).__name__}: {error}. Give what its "
            "forward takes: a tensor, a tuple of arguments, or a dictionary of keywords. If the model cannot be "
            "copied, leave example_inputs out."
        ) from error
    findings.left_alone |= watch.found
    return seen


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Run compiled submodules uncompiled. There are none if Dynamo, which takes seconds to import, is not imported."""
    is_imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_imported else contextlib.nullcontext()


def _recorded(model: nn.Module, twin: nn.Module, findings: Findings, seen: dict[int, Seen], graph: bool) -> nn.Module:
    """Make the copy of a model record the calls of its activations and submodules, and return it."""
    twins = dict(zip(model.modules(), twin.modules(), strict=True))
    layers = {id(one.weight): module for module, one in twins.items() if graph and isinstance(one, LAYERS)}
    for owner, cls in findings.rewritten(findings.found).items():
        object.__setattr__(twins[owner], "__class__", cls)
    stubs = [
        _Stub(one.function or (twin.get_submodule(one.name) if one.kind == "module" else one.original))
        for one in findings.found
    ]
    keys = {one: id(module) for module, one in twins.items() if not isinstance(one, torch.jit.ScriptModule)}
    keys |= {stub: id(one) for stub, one in zip(stubs, findings.found, strict=True)}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module not in keys:  # a copy that the forward has made
            return
        count = sum(len(one.shapes) for one in seen.values())
        own = seen.setdefault(keys[module], Seen(count, count, [], set()))
        own.last = count
        h = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        own.shapes.append(() if h is None else tuple(h.shape))
        if layers and isinstance(module, _Stub):
            own.before.add(None if h is None else layer_in_graph(h, layers))

    for module in keys:
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    return swap_in(twin, findings.found, stubs)


class _Stub(nn.Module):
    """Replaces an activation, and calls it."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)
