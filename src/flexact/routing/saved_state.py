"""What the saved state of a site, or of a schedule, must be like before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexact.candidates import known_names
from flexact.errors import FlexActError

if TYPE_CHECKING:
    from flexact.routing.layer import FlexAct


def signature(key: str) -> int:
    """A number that stands for a candidate in a `state_dict`, where only tensors can go."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def check_state(site: FlexAct, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Refuse a state whose entries under this prefix are not of such a site, or were edited."""
    state = f"the state of site {prefix[:-1] or 'FlexAct'!r}"
    own = {"signature": site.signature, "dropped_at": site.dropped_at, "evidence": site.evidence}
    own |= {"logits": site.logits, "temperature": site.temperature}
    found = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise FlexActError(f"{state} has a {type(value).__name__} for {name}, which is a tensor; it was edited.")
    saved, rows, temperature = (found.get(name) for name in ("signature", "dropped_at", "temperature"))
    if saved is None or rows is None:
        return  # torch itself names missing keys
    if saved.tolist() != [signature(key) for key in site.keys]:
        names = {signature(name): name for name in known_names()}
        told = ", ".join(names.get(number, "an unregistered function") for number in saved.flatten().tolist())
        raise FlexActError(
            f"{state} was saved with the candidates {told}; this model has "
            f"{', '.join(site.candidates)}. Build it with the same candidates, in the same order."
        )
    if rows.dim() and rows.shape[0] != site.rows:
        raise FlexActError(
            f"{state} has picks for {rows.shape[0]} rows; this model has "
            f"{site.rows}. Build it with the same granularity and channels."
        )
    wrong = [name for name, value in found.items() if value.shape != own[name].shape]
    if wrong:
        raise FlexActError(
            f"{state} has {wrong[0]} of shape {tuple(found[wrong[0]].shape)}; "
            f"this model has {tuple(own[wrong[0]].shape)}. Load the state of a model converted in the same way."
        )
    if bool((rows >= 0).all(-1).any()):
        raise FlexActError(f"{state} has every candidate dropped; it was edited.")
    if temperature is not None and not temperature.is_meta and not float(temperature) > 0:
        raise FlexActError(
            f"{state} has the temperature {float(temperature)}, which must be "
            "above 0; it was edited, or saved by a run that had gone wrong."
        )


def check_tensors(state: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Refuse a schedule's state that lacks one of these tensors, or has it in another shape."""
    for name, own in expected.items():
        saved = state.get(name)
        if not isinstance(saved, Tensor) or saved.shape != own.shape:
            raise FlexActError(f"not a state of these sites: {name!r} must be a tensor of shape {tuple(own.shape)}.")
