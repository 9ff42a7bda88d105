"""Networks of a comparison: built from a seed, with a checked architecture."""

from __future__ import annotations

import hashlib
import random
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flexact.errors import FlexActError
from flexact.studies.compare.functions import Build


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch, and restore their states at the end."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


def network(build: Build, seed: int) -> nn.Module:
    """The network of a seed, which is the same for every method."""
    with seeded(seed):
        model = build()
    if not isinstance(model, nn.Module):
        raise FlexActError(f"build() must return a torch.nn.Module; it returned {model!r:.80}.")
    return model


def described(model: nn.Module) -> list[str]:
    """A network's modules, and the shapes of its parameters and buffers, without memory addresses."""
    lines = re.sub(r" at 0x[0-9a-f]+", "", repr(model)).splitlines()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lines + [
        f"{name}: {one.dtype} {'uninitialized' if is_lazy(one) else tuple(one.shape)}" for name, one in tensors.items()
    ]


def digest(model: nn.Module) -> str:
    """A digest of a network's architecture."""
    return hashlib.sha256("\n".join(described(model)).encode()).hexdigest()[:16]


def checked_network(build: Build, seeds: tuple[int, int]) -> nn.Module:
    """A network of the first seed. Raises if `build` makes different architectures, and warns if it makes different
    weights from one seed."""
    first, again, other = (network(build, seed) for seed in (seeds[0], *seeds))
    if first is again:
        raise FlexActError("build() returned the same network twice; make a new one in each call.")
    for one in (again, other):
        if digest(one) != digest(first):
            old, new = described(first), described(one)
            differing = next((pair for pair in zip(old, new, strict=False) if pair[0] != pair[1]), ("", ""))
            shown = f"{differing[0].strip()!r}, then {differing[1].strip()!r}" if any(differing) else "more modules"
            raise FlexActError(
                f"build() made two different architectures ({shown}). A comparison needs the same network in every "
                "run: make its random choices once, outside build()."
            )
    if not _same_weights(first, again):
        warnings.warn(
            "build() made different weights after the same seed of torch, numpy and random, so runs of one seed do not "
            "start from the same network, and the paired differences contain that noise. Seed its generator.",
            stacklevel=3,
        )
    return first


def _same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(is_lazy(a) or a.is_meta or torch.equal(a, b) for a, b in pairs)
