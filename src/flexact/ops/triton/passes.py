"""A pass: kernels that run one after the other on given tensors, and on buffers that are allocated for them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexact.ops.triton.launch import Launch, Launches


class Pass:
    """Kernels with their tensors. A tensor has a position: first those given to `run`, then the buffers.

    inputs: the number of tensors given to `run`.
    """

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.buffers: list[int | tuple[int, ...]] = []
        """Of each buffer the position of the tensor whose dtype, shape and strides it has, or the shape in float32."""
        self.outputs: tuple[int, ...] = ()
        """The positions of the tensors that `run` returns."""
        self.native: dict[Hashable, Any] = {}
        """Its forms in the extension, by device."""
        self._steps: list[tuple[Launch, Sequence[int]]] = []

    def like(self, position: int) -> int:
        """Add a buffer with the dtype, shape and strides of another tensor. Return its position."""
        return self._add(position)

    def floats(self, *shape: int) -> int:
        """Add a buffer in float32. Return its position."""
        return self._add(shape)

    def _add(self, buffer: int | tuple[int, ...]) -> int:
        self.buffers.append(buffer)
        return self.inputs + len(self.buffers) - 1

    def launch(self, launch: Launch, positions: Sequence[int]) -> None:
        """Add a kernel, and the positions of its tensors."""
        self._steps.append((launch, positions))

    @functools.cached_property
    def launches(self) -> Launches:
        """All kernels. None can be added afterwards."""
        return Launches(self.inputs + len(self.buffers), *self._steps)

    def dtypes(self, given: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
        """Return the dtypes of all tensors from those given to `run`."""
        found = list(given)
        for buffer in self.buffers:
            found.append(found[buffer] if isinstance(buffer, int) else torch.float32)
        return tuple(found)

    def described(self, device: int, given: Sequence[torch.dtype]) -> tuple[Any, ...] | None:
        """Return the buffers, the table of compiled kernels with its address and size, in the form that the extension
        takes; None until they were launched once."""
        prepared = self.launches.prepared(device, self.dtypes(given))
        return None if prepared is None else (tuple(self.buffers), prepared.address, prepared.count, prepared)

    def allocated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, followed by new buffers."""
        every, first = list(tensors), tensors[0]
        for buffer in self.buffers:
            if isinstance(buffer, int):
                every.append(torch.empty_like(every[buffer]))
            else:
                every.append(first.new_empty(buffer, dtype=torch.float32))
        return every

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Allocate the buffers, launch the kernels, and return the outputs."""
        every = self.allocated(tensors)
        self.launches(*every)
        return tuple([every[position] for position in self.outputs])
