"""Sites directly after a batch norm, which compute their input h again in the backward instead of saving it.

The batch norm saves its input y, the mean and 1/√(variance + ε) anyway. A site keeps y and a copy of four numbers per
channel. h is rounded to its dtype again, so it equals that of the forward except where the order of the arithmetic
changes the rounding. This serves half precision only: in float32 all last bits could change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flexact.ops.fallback import run
from flexact.ops.operators import is_traced
from flexact.ops.triton import restoring_kernels
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.passes import Pass
from flexact.ops.triton.tiles import FLAT, Tiles, by_channel

_NODES = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
_DTYPES = (torch.bfloat16, torch.float16)
_COPY_BLOCK = 1024
_WITHOUT_HOOKS = "flexact: without hooks"

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Returns the default hooks of saved tensors. torch has it since 2.8; without it, sites save h."""


class Source(NamedTuple):
    """What h = (y − mean)·rstd·weight + bias is computed from."""

    y: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor
    bias: Tensor


def source_of(h: Tensor, extension: Any = None) -> Source | None:
    """Return what the node of a batch norm saved to compute h; None if h must be saved.

    The batch norm must be torch's own, be in training, have parameters and running statistics, and neither h nor y may
    have been written to since.
    extension: the extension, which finds the same in less time, if it will run the site.
    """
    if h.dtype not in _DTYPES or torch.compiler.is_compiling():  # a compiler cannot trace what follows
        return None
    if _top_hooks is None or _top_hooks(False) is not None:  # hooks, as those of activation checkpointing, expect h
        return None
    if extension is not None:
        found = extension.source_of(h)
        return None if found is None else Source._make(found)
    if is_traced(h) or not torch.is_grad_enabled():
        return None
    node: Any = h.grad_fn
    if type(node).__name__ not in _NODES or h._version or not node._saved_training or _has_hooks(node):
        return None
    try:
        source = Source(node._saved_input, node._saved_result1, node._saved_result2, node._saved_weight, _bias(node))
    except RuntimeError:  # y was written to, or the graph was freed
        return None
    return source if _is_supported(h, *source) else None


def _has_hooks(node: Any) -> bool:
    """Return whether hooks, as those of activation checkpointing, replaced what a batch norm saved.

    Reading a tensor would call them. In torch 2.11, only `register_hooks` tells: it raises if there are hooks. The
    running mean gets a pair that does nothing, because a backward in training does not use it.
    """
    if node.metadata.get(_WITHOUT_HOOKS):  # an earlier call with the same input
        return False
    try:
        node._raw_saved_running_mean.register_hooks(_unchanged, _unchanged)
    except RuntimeError:  # also if it has no running mean, or the graph was freed
        return True
    node.metadata[_WITHOUT_HOOKS] = True
    return False


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _bias(node: Any) -> Any:
    """Return the bias of a batch norm if it is a parameter that is trained. A node does not save it."""
    accumulate, _ = node.next_functions[2]
    return accumulate.variable if type(accumulate).__name__ == "AccumulateGrad" else None


def _is_supported(h: Tensor, y: Tensor, mean: Any, rstd: Any, weight: Any, bias: Any) -> bool:
    """Return whether the kernels below support these tensors."""
    return (
        weight is not None
        and bias is not None
        and mean.dtype == rstd.dtype == torch.float32
        and y.dtype == h.dtype
        and y.shape == h.shape
        and y.stride() == h.stride()
        and (y.is_contiguous() or y.is_contiguous(memory_format=torch.channels_last))
        and weight.is_contiguous()
        and bias.is_contiguous()
        and _has_memory(weight)
        and _has_memory(bias)
        and y.numel() > 0
    )


def _has_memory(parameter: Tensor) -> bool:
    """Return whether the memory of a parameter is allocated. fully_shard frees it after the forward of a module."""
    return parameter.untyped_storage().nbytes() > 0


def passes(y: Tensor) -> tuple[Pass, Pass]:
    """Return the pass from the mean, 1/√(variance + ε), the weight and the bias to one tensor that holds a copy of
    them, (4, channels), and the pass from y and that tensor to h.

    A copy is kept because an optimizer may change the bias, which batch norm does not save, before the backward, and
    because the memory of sharded parameters is freed between the passes.
    """
    return by_channel(y, 1, FLAT).plan(_plan, y.dtype)


def _plan(tiles: Tiles, dtype: torch.dtype) -> tuple[Pass, Pass]:
    channels = tiles.channels
    copying = Launch(restoring_kernels.copy, (triton.cdiv(channels, _COPY_BLOCK),), (channels,), (_COPY_BLOCK,))
    restoring = Launch(restoring_kernels.restore, tiles.grid, tiles.sizes, tiles.constants)
    copying.prepares(restoring, lambda *dtypes: (dtype, dtypes[-1], dtype))
    copy, restore = Pass(4), Pass(2)
    copied, h = copy.floats(4, channels), restore.like(0)
    copy.launch(copying, range(5))
    restore.launch(restoring, range(3))
    copy.outputs, restore.outputs = (copied,), (h,)
    return copy, restore


class _Packed(NamedTuple):
    """Stands for h in the node of a site."""

    y: Tensor
    version: int
    copied: Tensor

    def restored(self) -> Tensor:
        """Return h."""
        if self.y._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of a batch norm, {self.y.dtype} {list(self.y.shape)}, is at version {self.y._version}; "
                f"expected version {self.version} instead."
            )
        return run(self._by_kernel, self._by_torch, self.y)

    def _by_kernel(self, y: Tensor) -> Tensor:
        _, restore = passes(y)
        (h,) = restore.run(y, self.copied)
        return h

    def _by_torch(self, y: Tensor) -> Tensor:
        per_channel = (1, -1, *[1] * (y.dim() - 2))
        mean, rstd, weight, bias = [one.view(per_channel) for one in self.copied]
        h: Tensor = weight * (y.float() - mean) * rstd + bias
        return h.to(y.dtype)


def replace_saved(x: Tensor, source: Source) -> None:
    """Let the autograd function that returned x keep the source of its first saved tensor, h, instead of h."""
    y, *per_channel = [tensor.detach() for tensor in source]
    copied = run(
        lambda y: passes(y)[0].run(*per_channel)[0], lambda _: torch.stack([s.float() for s in per_channel]), y
    )
    packed = _Packed(y, y._version, copied)
    x.grad_fn._raw_saved_tensors[0].register_hooks(lambda _: packed, _Packed.restored)  # type: ignore[union-attr]
