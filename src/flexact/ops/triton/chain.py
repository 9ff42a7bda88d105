"""Describes a site as a chain of passes, which the extension runs as one node of autograd, without Python.

A chain has its inputs, the passes of the forward, and one pass of the backward. Tensors are numbered: the inputs, then
the buffers of each pass of the forward. The backward takes δ, the gradient of x, and the saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from flexact.ops.triton.passes import Pass


class Chain:
    """A chain for inputs of one size, layout and dtype.

    inputs: the number of inputs. Those that have gradients come first.
    again: computes the gradients from δ and the saved tensors if the backward runs with create_graph=True.
    is_flat: whether it serves any first input with the same number of elements.
    kind: what else distinguishes its kernels from those of other calls of the same site.
    """

    def __init__(
        self,
        inputs: int,
        again: Callable[..., tuple[Tensor | None, ...]],
        is_flat: bool = False,
        kind: Hashable = None,
    ) -> None:
        self.inputs, self.again, self.is_flat, self.kind = inputs, again, is_flat, kind
        self._count = inputs
        self._forward: list[tuple[Pass, Sequence[int]]] = []
        self._restore: tuple[Pass, Sequence[int]] | None = None
        self._native: dict[int, Any] = {}

    def add(self, steps: Pass, takes: Sequence[int]) -> list[int]:
        """Add a pass to the forward. takes: the numbers of its inputs. Return the numbers of its outputs."""
        self._forward.append((steps, takes))
        outputs = [takes[i] if i < steps.inputs else self._count + i - steps.inputs for i in steps.outputs]
        self._count += len(steps.buffers)
        return outputs

    def restore(self, steps: Pass, takes: Sequence[int]) -> None:
        """Set a pass that the backward runs first. Its output replaces its first input, which must be the first tensor
        that the backward takes after δ, and has the graph of the first input of the chain.

        takes: the numbers of its inputs.
        """
        self._restore = steps, takes

    def finish(
        self,
        x: int,
        statistics: int,
        backward: Pass,
        takes: Sequence[int],
        gradients: Sequence[tuple[int, int, int]],
        also_saved: Sequence[int] = (),
    ) -> None:
        """Set the outputs and the backward.

        takes: the numbers of the tensors that the backward takes after δ; the first one has the layout of δ.
        gradients: of each of the first inputs the output of the backward that its gradient is part of, the offset of
        that part, and its length, or 0 for the whole output.
        also_saved: the numbers of more tensors that `again` needs.
        """
        self._x, self._statistics, self._backward = x, statistics, backward
        restored_from = self._restore[1] if self._restore else ()
        self._saved = tuple(dict.fromkeys([*takes, *also_saved, *restored_from]))
        self._backward_takes = (0, *[1 + self._saved.index(number) for number in takes])
        self._gradients = tuple([(backward.outputs[output], *part) for output, *part in gradients])

    def native(self, extension: Any, inputs: Sequence[Tensor]) -> Any:
        """Return the extension's form of this chain for inputs like these; None until all kernels are compiled."""
        device = inputs[0].get_device()
        if device not in self._native:
            made = self._made(extension, inputs)
            if made is None:
                return None
            self._native[device] = made
        return self._native[device]

    def _made(self, extension: Any, inputs: Sequence[Tensor]) -> Any:
        device, dtypes = inputs[0].get_device(), [tensor.dtype for tensor in inputs]
        passes = []
        for steps, takes in self._forward:
            given = [dtypes[number] for number in takes]
            passes.append((takes, steps.described(device, given)))
            dtypes += steps.dtypes(given)[steps.inputs :]
        saved = [dtypes[number] for number in self._saved]
        if self._restore is not None:
            restore, numbers = self._restore
            from_saved = [self._saved.index(number) for number in numbers]
            passes.append((from_saved, restore.described(device, [saved[i] for i in from_saved])))
        upstream = [saved[0], *saved]  # δ has the dtype of the first one
        given = [upstream[i] for i in self._backward_takes]
        passes.append((self._backward_takes, self._backward.described(device, given)))
        described = [(tuple(takes), *found) for takes, found in passes if found is not None]
        if len(described) < len(passes):
            return None
        forward, rest = described[: len(self._forward)], described[len(self._forward) : -1]
        return extension.make(
            tuple(inputs), tuple(forward), tuple(rest), described[-1], self._x, self._statistics, self._saved,
            self._gradients, self.again, self.is_flat, self.kind,
        )  # fmt: skip
