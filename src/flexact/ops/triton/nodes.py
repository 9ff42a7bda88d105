"""Runs sites in the extension (`extension`), as chains of passes (`chain`).

As long as the extension or a kernel is not compiled, without gradients, in a trace, and for rare inputs, the functions
of `autograd` run instead, which launch the same kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from flexact.ops import operators
from flexact.ops.batch_norm import BatchNorm, inputs_of
from flexact.ops.blending import Blending
from flexact.ops.known_calls import KnownCalls
from flexact.ops.triton import autograd, extension, kernels, restoring
from flexact.ops.triton.chain import Chain
from flexact.ops.triton.moments import moments_pass
from flexact.ops.triton.restoring import Source
from flexact.ops.triton.routed import NOT_FUSED, Fusing, backward_pass, forward_pass, kind_of

MOST_CHAINS = 1024
"""Number of cached chains at which the cache is emptied. A momentum that changes every step adds one each time."""

_chains: dict[Hashable, Chain] = {}
_needs_python: set[Hashable] = set()
"""The keys of chains whose backward ran with create_graph=True. The functions in Python are faster at that."""


def routed(h: Tensor, logits: Tensor, blending: Blending, known: KnownCalls | None = None) -> tuple[Tensor, Tensor]:
    """Return the routed activation of h and its statistics.

    known: receives the chain if the extension runs this call.
    """
    module = _extension(h, blending)
    source = restoring.source_of(h, module)
    found = None if module is None else _routed(module, h, logits, blending, source, known)
    if found is None:
        found = autograd.routed(h, logits, blending)
        if source is not None:
            restoring.replace_saved(found[0], source)
    return found


def _routed(
    module: Any, h: Tensor, logits: Tensor, blending: Blending, source: Source | None, known: KnownCalls | None
) -> tuple[Tensor, Tensor] | None:
    """Return the result of `routed` from the extension; None if it does not run."""
    if not (h.requires_grad or logits.requires_grad):
        return None
    _, p, temperature, keys, alive, channel_dim, statistics = blending
    layout = h.numel() if p.shape[0] == 1 else (h.shape, h.stride(), channel_dim)
    restored = None if source is None else (h.shape, h.stride(), source.weight.dtype, source.bias.dtype)
    key = (layout, h.dtype, keys, alive, statistics, logits.requires_grad, restored)
    if key in _needs_python:
        return None
    chain = _chains.get(key)
    if chain is None:
        chain = _added(key, _routed_chain(key, h, blending, logits.requires_grad, source))
    return _applied(module, chain, (h, logits, p, temperature, *(source or ())), known)


def normalised(
    y: Tensor,
    logits: Tensor,
    norm: BatchNorm,
    residual: Tensor | None,
    other: BatchNorm | None,
    blending: Blending,
    known: KnownCalls | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Return the routed activation of norm(y) + residual and its statistics, and update the running statistics. Return
    None if the extension does not run.

    other: the batch norm of the residual, if it has one. known: as for `routed`.
    """
    module = _extension(y, blending)
    if module is None:
        return None
    _, p, temperature, keys, alive, _, statistics = blending
    kind, with_gradients, running = inputs_of(norm, residual, other)
    key = (y.shape, y.stride(), y.dtype, kind, p.shape, keys, alive, statistics, logits.requires_grad)
    chain = _chains.get(key)
    if chain is None:
        chain = _added(key, _normalised_chain(y, norm, residual, other, blending, logits.requires_grad, kind))
    return _applied(module, chain, (y, logits, *with_gradients, p, temperature, *running), known)


def _extension(h: Tensor, blending: Blending) -> Any:
    """Return the extension if it is compiled and supports an input."""
    if operators.is_traced(h) or blending.weights is not blending.probabilities or h.numel() == 0:
        return None
    return extension.ready() if torch.is_grad_enabled() else None


def _applied(module: Any, chain: Chain, inputs: Any, known: KnownCalls | None = None) -> tuple[Tensor, Tensor] | None:
    native = chain.native(module, inputs)
    if native is None:
        return None
    found: tuple[Tensor, Tensor] | None = module.apply(native, *inputs)
    if found is not None and known is not None:
        known.add(module.repeat, native)
    return found


def _added(key: Hashable, chain: Chain) -> Chain:
    if len(_chains) >= MOST_CHAINS:
        _chains.clear()
    _chains[key] = chain
    return chain


def _routed_chain(key: Hashable, h: Tensor, blending: Blending, need_logits: bool, source: Source | None) -> Chain:
    h_at, logits_at, p, temperature, y_at, *others = range(4 + len(Source._fields))
    again = functools.partial(_routed_again, key, blending.keys, blending.alive, blending.channel_dim)
    is_flat = source is None and blending.probabilities.shape[0] == 1
    chain = Chain(4 if source is None else 4 + len(source), again, is_flat)
    if source is not None:
        copy, restore = restoring.passes(source.y)
        chain.restore(restore, (y_at, *chain.add(copy, others)))
    x, statistics = chain.add(forward_pass(h, blending, NOT_FUSED), (h_at, p))
    backward = backward_pass(h, blending, need_logits, NOT_FUSED)
    count = blending.weights.numel() if need_logits else 0
    takes = (h_at if source is None else y_at, p, p, temperature)
    chain.finish(x, statistics, backward, takes, ((0, 0, 0), (1, 0, count)), (logits_at,))
    return chain


def _normalised_chain(
    y: Tensor,
    norm: BatchNorm,
    residual: Tensor | None,
    other: BatchNorm | None,
    blending: Blending,
    need_logits: bool,
    norms: Hashable,
) -> Chain:
    names = ["y", "logits"]
    names += ["weight", "bias"] if norm.weight is not None else []
    names += ["residual"] if residual is not None else []
    names += ["other weight", "other bias"] if other is not None and other.weight is not None else []
    with_gradient = list(names)
    names += ["p", "temperature"]
    names += _running("") if norm.running is not None else []
    names += _running("other ") if other is not None and other.running is not None else []
    at = {name: number for number, name in enumerate(names)}
    chain = Chain(len(names), _normalised_again, kind=norms)

    def moments(tensor: Tensor, name: str, own: BatchNorm, prefix: str) -> int:
        steps = moments_pass(tensor, own.running is not None, own.momentum, own.eps)
        takes = [at[name], *([at[one] for one in _running(prefix)] if own.running is not None else [])]
        return chain.add(steps, takes)[0]

    found = moments(y, "y", norm, "")
    tensors = [found, at.get("weight", found), at.get("bias", found)]
    kind = kernels.ABSENT.value if residual is None else kernels.PLAIN.value
    if other is not None and residual is not None:
        found, kind = moments(residual, "residual", other, "other "), kind_of(other.weight)
        tensors += [found, at.get("other weight", tensors[0]), at.get("other bias", tensors[0])]
    else:
        tensors += tensors
    tensors = [at.get("residual", tensors[0]), *tensors]
    fusing = Fusing(True, (kind_of(norm.weight), kind))
    x, statistics = chain.add(forward_pass(y, blending, fusing), (at["y"], at["p"], *tensors))
    backward = backward_pass(y, blending, need_logits, fusing)
    channels = y.shape[1]
    sums = 3 if other is not None else 2
    parts = {
        "y": (0, 0, 0),
        "logits": (1, sums * channels, blending.weights.numel()),
        "bias": (1, 0, channels),
        "weight": (1, channels, channels),
        "residual": (2, 0, 0),
        "other weight": (1, 2 * channels, channels),
        "other bias": (1, 0, channels),
    }
    takes = (at["y"], at["p"], at["p"], at["temperature"], *tensors)
    chain.finish(x, statistics, backward, takes, [parts[name] for name in with_gradient])
    return chain


def _running(prefix: str) -> list[str]:
    return [f"{prefix}running {name}" for name in ("mean", "variance", "batches")]


def _routed_again(
    key: Hashable, keys: tuple[str, ...], alive: tuple[int, ...], channel_dim: int, delta: Tensor, *saved: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to h and the logits for a backward with create_graph=True."""
    _needs_python.add(key)
    p, temperature = saved[1:3]
    # Views, since h may depend on the same logits, through an earlier call of the site.
    h, logits = (tensor.view_as(tensor) for tensor in (saved[0], saved[3]))
    blending = Blending(p, p, temperature, keys, alive, channel_dim, False)
    x, _ = autograd.routed(h, logits, blending)
    needed = [tensor for tensor in (h, logits) if tensor.requires_grad]
    found = iter(torch.autograd.grad(x, needed, delta, create_graph=True))
    return tuple([next(found) if tensor.requires_grad else None for tensor in (h, logits)])


def _normalised_again(*_: Tensor) -> tuple[Tensor | None, ...]:
    raise autograd.no_second_derivative()
