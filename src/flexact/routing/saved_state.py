"""Checks of the saved state of a site or a schedule before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flexact.candidates import known_names
from flexact.errors import FlexActError


def signature(key: str) -> int:
    """Return a number that identifies a candidate in a `state_dict`, which can only hold tensors."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def check_state(
    own: Mapping[str, Tensor],
    candidates: Sequence[str],
    keys: Sequence[str],
    state_dict: Mapping[str, Any],
    prefix: str,
) -> None:
    """Raise if the entries of a state under this prefix do not fit a site, or were edited.

    own: the tensors of the site. candidates, keys: the names and registry keys of its candidates.
    """
    state = f"the state of site {prefix[:-1] or 'FlexAct'!r}"
    found = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise FlexActError(f"{state} has a {type(value).__name__} for {name} instead of a tensor; it was edited.")
    saved, dropped_at, temperature = (found.get(name) for name in ("signature", "dropped_at", "temperature"))
    if saved is None or dropped_at is None:
        return  # torch reports missing keys itself
    if saved.tolist() != [signature(key) for key in keys]:
        names = {signature(name): name for name in known_names()}
        had = ", ".join(names.get(number, "an unregistered function") for number in saved.flatten().tolist())
        raise FlexActError(
            f"{state} was saved with the candidates {had}; this model has {', '.join(candidates)}. Build it with the "
            "same candidates, in the same order."
        )
    rows = own["dropped_at"].shape[0]
    if dropped_at.dim() and dropped_at.shape[0] != rows:
        raise FlexActError(
            f"{state} has picks for {dropped_at.shape[0]} rows; this model has {rows}. Build it with the same "
            "granularity and channels."
        )
    for name, value in found.items():
        if value.shape != own[name].shape:
            raise FlexActError(
                f"{state} has {name} of shape {tuple(value.shape)}; this model has {tuple(own[name].shape)}. Load the "
                "state of a model converted in the same way."
            )
    if bool((dropped_at >= 0).all(-1).any()):
        raise FlexActError(f"{state} has every candidate dropped; it was edited.")
    if temperature is not None and not temperature.is_meta and not float(temperature) > 0:
        raise FlexActError(
            f"{state} has the temperature {float(temperature)}, but it must be above 0; it was edited, or saved by a "
            "run that diverged."
        )


def check_tensors(state: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Raise if a schedule's state lacks one of these tensors, or has it in another shape."""
    for name, own in expected.items():
        saved = state.get(name)
        if not isinstance(saved, Tensor) or saved.shape != own.shape:
            raise FlexActError(f"not a state of these sites: {name!r} must be a tensor of shape {tuple(own.shape)}.")
