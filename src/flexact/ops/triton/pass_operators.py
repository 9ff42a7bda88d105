"""Operators that run a whole pass, for graphs that torch.compile makes.

Inductor launches each kernel of a library through Triton, from Python, which takes the host longer than launching its
own. Where all sizes are known, a graph therefore contains one operator per pass. The extension runs it (`chain.cpp`);
without the extension, Python does. With symbolic sizes and for torch.export, a graph contains the kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexact.ops.operators import is_recorded
from flexact.ops.triton.passes import Pass

MOST_TENSORS = 12
"""The most inputs of a pass."""

makers: dict[str, Callable[..., Pass]] = {}
"""Functions that make a pass, by name, from its inputs and from literals."""


def records(*tensors: Tensor) -> bool:
    """Return whether a pass over these tensors goes into a graph as one operator."""
    if not is_recorded(tensors[0]) or torch.compiler.is_exporting():
        return False
    # All tensors, since a number has no size that could be symbolic while the table of weights has.
    return all(isinstance(size, int) for tensor in tensors for size in (*tensor.shape, *tensor.stride()))


def plan_of(maker: str, strides: Sequence[int], tensors: Sequence[Tensor], *choices: Any) -> str:
    """Return a text that identifies a pass over tensors like these. It is part of a graph, which another process may
    read from a cache.

    strides: those of the tensors that have the layout of a site's input; the others are contiguous.
    """
    types = [(str(tensor.dtype).removeprefix("torch."), *tensor.shape) for tensor in tensors]
    return repr((maker, tuple(strides), types, choices))


def run(maker: str, strides: Sequence[int], tensors: Sequence[Tensor], *choices: Any) -> tuple[Tensor, ...]:
    """Add a pass to the graph. Return its outputs. See `plan_of`."""
    return tuple(torch.ops.flexact.triton_pass(plan_of(maker, strides, tensors, *choices), *tensors))


def run_moments(y: Tensor, running: Sequence[Tensor], *choices: Any) -> Tensor:
    """Add the pass that computes the moments of y, and updates the running statistics, to the graph."""
    plan = plan_of("moments", y.stride(), (y, *running), *choices)
    found: Tensor = torch.ops.flexact.triton_moments(plan, y, *running)
    return found


def first_run(plan: str, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Any, ...] | None, tuple[int, ...]]:
    """Run a pass for the extension. Return its outputs, the description with which the extension can run it from now on
    (None if it cannot), and the positions of the outputs."""
    steps = _made(plan, tensors)
    outputs = steps.run(*tensors)
    described = steps.described(tensors[0].get_device(), [tensor.dtype for tensor in tensors])
    return outputs, None if described is None else ((), *described), steps.outputs


def _made(plan: str, tensors: Sequence[Tensor]) -> Pass:
    maker, *_, choices = ast.literal_eval(plan)
    return makers[maker](tensors, *choices)


def _run(plan: str, *given: Tensor | None) -> list[Tensor]:
    tensors = [tensor for tensor in given if tensor is not None]
    return list(_made(plan, tensors).run(*tensors))


def _allocated(plan: str, *given: Tensor | None) -> list[Tensor]:
    tensors = [tensor for tensor in given if tensor is not None]
    steps = _made(plan, tensors)
    every = steps.allocated(tensors)
    return [every[position] for position in steps.outputs]


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = f"flexact::{schema.partition('(')[0]}"
    # Older versions of PyTorch keep the order of the strides, which is enough for dense tensors.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    torch.library.define(
        name, schema.removeprefix(name.partition("::")[2]), tags=(strides, torch.Tag.pt2_compliant_tag)
    )
    torch.library.impl(name, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(name, fake)


_optional = ", ".join(f"Tensor? t{number}=None" for number in range(1, MOST_TENSORS))
_define(f"triton_pass(str plan, Tensor t0, {_optional}) -> Tensor[]", _run, _allocated)
_define(
    "triton_moments(str plan, Tensor y, Tensor(a!)? mean=None, Tensor(b!)? var=None, Tensor(c!)? count=None) -> Tensor",
    lambda *given: _run(*given)[0],
    lambda *given: _allocated(*given)[0],
)
