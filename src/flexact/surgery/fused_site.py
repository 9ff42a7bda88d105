"""A site that is fused with the batch norm and the residual addition before it.

`convert(..., fuse=True)` rewrites the forwards in which BatchNorm2d → site or BatchNorm2d → add → site occurs: the
batch norm is deferred (`deferred`), the residual is recorded (`added`), and the site runs all of it (`finished`). If no
kernel supports the inputs, the parts run one after the other, as in the unfused network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from flexact.ops import fallback, runs_fused
from flexact.ops.batch_norm import BatchNorm, inputs_of
from flexact.ops.blending import Blending
from flexact.routing.layer import FlexAct

if TYPE_CHECKING:
    from flexact.ops.triton.routed import Norm

_Kind = TypeVar("_Kind", bound=nn.Module)
_TENSORS = dict.fromkeys(("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))


class Deferred(NamedTuple):
    """norm(y) + residual, deferred until a site runs. The residual may have its own batch norm."""

    norm: nn.BatchNorm2d
    y: Tensor
    residual: Tensor | None = None
    residual_norm: nn.BatchNorm2d | None = None
    in_place: bool = False

    def result(self) -> Tensor:
        h: Tensor = self.norm(self.y)
        if self.residual is None:
            return h
        residual = self.residual if self.residual_norm is None else self.residual_norm(self.residual)
        return h.add_(residual) if self.in_place else h + residual


def deferred(module: nn.Module, y: Any) -> Any:
    """Return module(y), deferred if the module is a batch norm or a Sequential that ends in one."""
    if is_sequential(module) and is_untouched(module):
        return run_sequential(module, y)
    return Deferred(module, y) if is_plain(module, nn.BatchNorm2d) and isinstance(y, Tensor) else module(y)


def run_sequential(modules: nn.Sequential, h: Any) -> Any:
    """Run an nn.Sequential, with each batch norm fused with the site that follows it.

    The current children decide what is fused, so that a slice of the container, or one with added children, is correct.
    """
    for module in modules:
        if isinstance(module, FlexAct):
            h = finished(module, h)
        elif not is_plain(module, nn.Identity):
            h = deferred(module, result(h))
    return h


def sequential_forward(self: nn.Sequential, input: Any) -> Any:
    """The forward of an nn.Sequential in which sites follow batch norms."""
    return result(run_sequential(self, input))


def passed(module: nn.Module, h: Any) -> Any:
    """Return module(h). An nn.Identity leaves a deferred value deferred."""
    return h if isinstance(h, Deferred) and is_plain(module, nn.Identity) else module(result(h))


def added(left: Any, right: Any, in_place: bool = False) -> Any:
    """Return left + right, deferred if one of them is."""
    if _can_add_residual(left) and isinstance(right, Tensor):
        return left._replace(residual=right, in_place=in_place)
    if _can_add_residual(left) and _can_add_residual(right) and left.norm is not right.norm:
        return left._replace(residual=right.y, residual_norm=right.norm, in_place=in_place)
    if _can_add_residual(right) and isinstance(left, Tensor) and not in_place:
        return right._replace(residual=left)
    left, right = result(left), result(right)
    if in_place:
        left += right
        return left
    return left + right


def finished(site: nn.Module, h: Any) -> Any:
    """Return site(h), fused with h if h is deferred."""
    return normalised_site(site, *h) if isinstance(h, Deferred) else site(h)


def normalised_site(site: nn.Module, *parts: Any) -> Tensor:
    """Return site(norm(y) + residual). parts: the fields of `Deferred`."""
    h = Deferred(*parts)
    if isinstance(site, FlexAct):
        if not torch.compiler.is_compiling() and (repeated := _repeated(site, h)) is not None:
            return repeated
        site.notice_writes()
        if _fits(site, h):
            if torch.compiler.is_compiling():
                return _run_fused(site, h)
            # If a kernel cannot be compiled, the parts run. The running statistics may then count this batch twice.
            fused: Tensor = fallback.run(lambda _: _run_fused(site, h), lambda _: site(h.result()), h.y)
            return fused
    x: Tensor = site(h.result())
    return x


def _can_add_residual(h: Any) -> TypeGuard[Deferred]:
    return isinstance(h, Deferred) and h.residual is None


def result(h: Any) -> Any:
    """Return a value, computed if it was deferred."""
    return h.result() if isinstance(h, Deferred) else h


def is_plain(module: nn.Module | None, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Return whether a module is exactly of a type, without hooks or a replaced forward."""
    return module is not None and type(module) is kind and is_untouched(module)


def is_sequential(module: nn.Module | None) -> TypeGuard[nn.Sequential]:
    """Return whether a module is a Sequential that only calls its children one after the other."""
    forward = type(module).forward if isinstance(module, nn.Sequential) else None
    return forward in (nn.Sequential.forward, sequential_forward) and "forward" not in vars(module)


def is_untouched(module: nn.Module) -> bool:
    """Return whether a module has no hooks and the forward of its type."""
    own = vars(module)  # faster than attributes; this runs in every call of a site
    if _has_any_global_hook():
        return False
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooks and "forward" not in own


def _fits(site: FlexAct, h: Deferred) -> bool:
    """Return whether the kernels support these tensors, and no module was replaced since the conversion."""
    norm, y, residual, residual_norm, _ = h
    return (
        (site.training or not site.committed)  # in eval mode, a committed site is bit-identical to the plain network
        and site.only_candidate is None
        and is_untouched(site)
        and _supports(norm, y)
        and (residual_norm is None or (_supports(residual_norm, y) and _uses_batch(residual_norm) == _uses_batch(norm)))
        and (residual is None or (residual.shape, residual.dtype, residual.device) == (y.shape, y.dtype, y.device))
        and y.numel() > y.shape[1]  # batch norm needs more than one value per channel
        and (y.is_contiguous(memory_format=torch.channels_last) or y.is_contiguous())
        and (site.rows == 1 or site.config.channel_dim in (1, -3))
        and site.config.policy.correction != "output_norm"
        and runs_fused(y, site.keys, site.alive)
    )


def _supports(norm: nn.BatchNorm2d, y: Tensor) -> bool:
    """Return whether a norm is torch's own, is complete and supports y. If not, its own forward raises the error."""
    if type(norm) is not nn.BatchNorm2d or not is_untouched(norm) or y.dim() != 4 or norm.num_features != y.shape[1]:
        return False
    weight, bias, running_mean, _, batches = _held(norm)
    if (weight is None) != (bias is None) or (running_mean is not None and batches is None):
        return False
    held = [one for one in (weight, running_mean) if one is not None]
    return all(one.device == y.device and one.dtype in (y.dtype, torch.float32) for one in held)


def _held(norm: nn.BatchNorm2d) -> list[Tensor | None]:
    """Return the weight, the bias, the running mean and variance, and the number of batches of a batch norm.

    Reading `_parameters` and `_buffers` is many times faster than attributes of the module.
    """
    tensors = {**norm._parameters, **norm._buffers}
    if tensors.keys() == _TENSORS.keys():
        return [tensors[name] for name in _TENSORS]
    return [getattr(norm, name) for name in _TENSORS]  # FSDP keeps them as ordinary attributes


def _repeated(site: FlexAct, h: Deferred) -> Tensor | None:
    """Return the result of a call like an earlier one of the site; None if it is not like one."""
    norm, y, residual, residual_norm, _ = h
    if not (is_untouched(site) and is_plain(norm, nn.BatchNorm2d) and norm.training):
        return None
    if residual_norm is not None and not (is_plain(residual_norm, nn.BatchNorm2d) and residual_norm.training):
        return None
    other = None if residual_norm is None else _batch_norm(residual_norm)
    return site.repeated(y, *inputs_of(_batch_norm(norm), residual, other))


def _run_fused(site: FlexAct, h: Deferred) -> Tensor:
    from flexact.ops.triton import nodes  # needs Triton

    norm, y, residual, residual_norm, _ = h
    site.check_input(y)
    routing = site.routing(y)
    if residual is not None and residual.stride() != y.stride():
        residual = torch.empty_like(y).copy_(residual)
    logits = site.logits.detach() if site.committed else site.logits
    found = None
    if _uses_batch(norm) and not torch.compiler.is_compiling():
        other = None if residual_norm is None else _batch_norm(residual_norm)
        found = nodes.normalised(
            y, logits, _batch_norm(norm), residual, other, routing, site.router.known_calls[site.index]
        )
    if found is None:
        found = _run_without_extension(logits, h._replace(residual=residual), routing)
    x, statistics = found
    site.gather(routing, statistics)
    return x


def _run_without_extension(logits: Tensor, h: Deferred, routing: Blending) -> tuple[Tensor, Tensor]:
    from flexact.ops.triton import autograd  # needs Triton

    norm, y, residual, residual_norm, _ = h
    other = None if residual_norm is None or residual is None else _norm(residual_norm, residual)
    preactivation = autograd.Preactivation(_norm(norm, y), residual, other, _uses_batch(norm))
    return autograd.normalised(y, logits, preactivation, routing)


def _uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Return whether a batch norm uses the moments of its input."""
    return norm.training or _held(norm)[2] is None


def _norm(norm: nn.BatchNorm2d, y: Tensor) -> Norm:
    """Return the moments and affine parameters of a batch norm for y. In training, update its running statistics."""
    from flexact.ops.triton import moments as moment_kernels  # these need Triton
    from flexact.ops.triton.routed import Norm

    weight, bias, running_mean, running_var, _ = _held(norm)
    if running_mean is not None and running_var is not None and not norm.training:
        moments = torch.stack([running_mean.float(), (running_var.float() + norm.eps).rsqrt()])
        return Norm(moments, weight, bias)
    running = _batch_norm(norm).running
    return Norm(moment_kernels.moments(y, running, norm.momentum, norm.eps), weight, bias)


def _batch_norm(norm: nn.BatchNorm2d) -> BatchNorm:
    """Return the tensors and settings of a batch norm that uses the statistics of the batch."""
    weight, bias, running_mean, running_var, batches = _held(norm)
    running = None
    if running_mean is not None and running_var is not None and batches is not None and norm.track_running_stats:
        running = (running_mean, running_var, batches)
    return BatchNorm(weight, bias, running, norm.momentum, norm.eps)


FUSED = {
    "norm": "{me}.flexact_fused.deferred({called}, {x})",
    "identity": "{me}.flexact_fused.passed({called}, {x})",
    "site": "{me}.flexact_fused.finished({called}, {x})",
    "add": "{me}.flexact_fused.added({x}, {y})",
    "add in place": "{me}.flexact_fused.added({x}, {y}, True)",
    "result": "({x} := {me}.flexact_fused.result({x}))",
}
"""The kinds of edits that fuse, and their expressions (see `flexact.surgery.rewriting`)."""
