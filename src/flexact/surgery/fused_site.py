"""A site together with the batch norm, and the residual addition, before it.

`convert(..., fuse=True)` rewrites the forwards in which BatchNorm2d → site or BatchNorm2d → add → site occurs: the
batch norm is put off (`waiting`), what is added to it is noted (`added`), and the site does all of it (`finished`).
Where no kernel can do it in one go, the parts run one after the other, as in the plain network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from flexact.ops import runs_fused
from flexact.routing.layer import FlexAct

if TYPE_CHECKING:
    from flexact.ops.triton.batch_norm import Norm


_Kind = TypeVar("_Kind", bound=nn.Module)


class _Held(NamedTuple):
    """The tensors of a batch norm."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches: Tensor | None


class Waiting(NamedTuple):
    """norm(y) + residual, put off until a site runs; the residual may go through a batch norm of its own."""

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


def waiting(module: nn.Module, y: Any) -> Any:
    """module(y), put off where the module is a batch norm or a Sequential that ends in one."""
    if runs_in_turn(module) and is_untouched(module):
        return in_turn(module, y)
    return Waiting(module, y) if is_plain(module, nn.BatchNorm2d) and isinstance(y, Tensor) else module(y)


def in_turn(modules: nn.Sequential, h: Any) -> Any:
    """What nn.Sequential does, with a batch norm and the site behind it in one call.

    It goes by what the container holds now, so that a slice of it, or one that was added to, does what it should.
    """
    for module in modules:
        if isinstance(module, FlexAct):
            h = finished(module, h)
        elif not is_plain(module, nn.Identity):
            h = waiting(module, result(h))
    return h


def forward_in_turn(self: nn.Sequential, input: Any) -> Any:
    """The forward of an nn.Sequential that has sites behind batch norms."""
    return result(in_turn(self, input))


def passed(module: nn.Module, h: Any) -> Any:
    """module(h), where the module is most likely an nn.Identity."""
    return h if isinstance(h, Waiting) and is_plain(module, nn.Identity) else module(result(h))


def added(left: Any, right: Any, in_place: bool = False) -> Any:
    """left + right, put off where one of them is."""
    if _takes_more(left) and isinstance(right, Tensor):
        return left._replace(residual=right, in_place=in_place)
    if _takes_more(left) and _takes_more(right) and left.norm is not right.norm:
        return left._replace(residual=right.y, residual_norm=right.norm, in_place=in_place)
    if _takes_more(right) and isinstance(left, Tensor) and not in_place:
        return right._replace(residual=left)
    left, right = result(left), result(right)
    if in_place:
        left += right
        return left
    return left + right


def finished(site: nn.Module, h: Any) -> Any:
    """site(h), in one go with what was put off."""
    return normalised_site(site, *h) if isinstance(h, Waiting) else site(h)  # type: ignore[arg-type]


def _takes_more(h: Any) -> TypeGuard[Waiting]:
    return isinstance(h, Waiting) and h.residual is None


def result(h: Any) -> Any:
    """A value whole, be it put off or not."""
    return h.result() if isinstance(h, Waiting) else h


def normalised_site(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None = None,
    residual_norm: nn.BatchNorm2d | None = None,
    in_place: bool = False,
) -> Tensor:
    """site(norm(y) + residual), where the residual may go through a batch norm of its own."""
    if isinstance(site, FlexAct):
        site.notice_writes()
    if _fits(site, norm, y, residual, residual_norm):
        return _in_one_go(site, norm, y, residual, residual_norm)
    x: Tensor = site(Waiting(norm, y, residual, residual_norm, in_place).result())
    return x


def is_plain(module: nn.Module | None, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether a module is exactly of a type, and nothing was added to what its call does."""
    return module is not None and type(module) is kind and is_untouched(module)


def runs_in_turn(module: nn.Module | None) -> TypeGuard[nn.Sequential]:
    """Whether a module calls its children one after the other, and nothing else."""
    forward = type(module).forward if isinstance(module, nn.Sequential) else None
    return forward in (nn.Sequential.forward, forward_in_turn) and "forward" not in vars(module)


def is_untouched(module: nn.Module) -> bool:
    """Whether a module's call is its type's own forward and nothing else."""
    own = vars(module)  # asked at every call of a site, and quicker than the module itself
    if _has_any_global_hook():
        return False
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooks and "forward" not in own


def _fits(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None,
    residual_norm: nn.BatchNorm2d | None,
) -> bool:
    """Whether the kernels take these tensors, and nobody put something else in a part's place since the conversion."""
    return (
        isinstance(site, FlexAct)
        and (site.training or not site.committed)  # what is evaluated is the plain network, to the bit
        and site.alone is None
        and is_untouched(site)
        and _takes(norm, y)
        and (residual_norm is None or (_takes(residual_norm, y) and _uses_batch(residual_norm) == _uses_batch(norm)))
        and (residual is None or _are_alike(residual, y))
        and y.numel() > y.shape[1]  # as batch norm has it: more than one value a channel
        and (y.is_contiguous(memory_format=torch.channels_last) or y.is_contiguous())
        and (site.rows == 1 or site.config.channel_dim in (1, -3))
        and site.config.policy.correction != "output_norm"
        and runs_fused(y, site.keys, site.alive)
    )


def _are_alike(residual: Tensor, y: Tensor) -> bool:
    return residual.shape == y.shape and residual.dtype == y.dtype and residual.device == y.device


def _takes(norm: nn.BatchNorm2d, y: Tensor) -> bool:
    """Whether this is torch's own batch norm, whole, and one that takes y (else torch says what is wrong)."""
    if type(norm) is not nn.BatchNorm2d or not is_untouched(norm) or y.dim() != 4 or norm.num_features != y.shape[1]:
        return False
    weight, bias, running_mean, _, batches = _held(norm)
    return (
        (weight is None) == (bias is None)
        and (weight is None or _is_beside(weight, y))
        and (running_mean is None or (batches is not None and _is_beside(running_mean, y)))
    )


def _is_beside(held: Tensor, y: Tensor) -> bool:
    """Whether torch, too, would compute with the two."""
    return held.device == y.device and (held.dtype == y.dtype or held.dtype == torch.float32)


def _held(norm: nn.BatchNorm2d) -> _Held:
    """Asked of the module's own tables, which is many times as quick as asking the module."""
    parameters, buffers = norm._parameters, norm._buffers
    if len(parameters) == 2 and len(buffers) == 3:
        running = (buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"])
        return _Held(parameters["weight"], parameters["bias"], *running)
    # Something keeps them as ordinary attributes, as FSDP does.
    return _Held(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)


def _in_one_go(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None,
    residual_norm: nn.BatchNorm2d | None,
) -> Tensor:
    from flexact.ops.triton import autograd as triton_autograd  # needs Triton

    site.check_input(y)
    routing = site.routing(y)
    if residual is not None and residual.stride() != y.stride():
        residual = torch.empty_like(y).copy_(residual)
    other = None if residual_norm is None or residual is None else _norm(residual_norm, residual)
    x, statistics = triton_autograd.normalised(
        y,
        site.logits.detach() if site.committed else site.logits,
        triton_autograd.Normalising(_norm(norm, y), residual, other, _uses_batch(norm)),
        triton_autograd.Blending(
            routing.weights, routing.probabilities, routing.temperature, site.keys, site.alive, routing.statistics
        ),
    )
    site.gather(routing, statistics)
    return x


def _uses_batch(norm: nn.BatchNorm2d) -> bool:
    """Whether a batch norm normalises with the moments of its input."""
    return norm.training or _held(norm).running_mean is None


def _norm(norm: nn.BatchNorm2d, y: Tensor) -> Norm:
    """What a batch norm does to y; in training its running statistics go on by one step, as in its own forward."""
    from flexact.ops.triton import autograd as triton_autograd  # needs Triton

    weight, bias, running_mean, running_var, batches = _held(norm)
    running = None
    if running_mean is not None and running_var is not None and batches is not None:
        if not norm.training:
            moments = torch.stack([running_mean.float(), (running_var.float() + norm.eps).rsqrt()])
            return triton_autograd.Norm(moments, weight, bias)
        if norm.track_running_stats:
            running = (running_mean, running_var, batches)
    return triton_autograd.Norm(triton_autograd.moments(y, running, norm.momentum, norm.eps), weight, bias)


FUSED = {
    "norm": "ME.flexact_waiting(CALLED, X)",
    "identity": "ME.flexact_passed(CALLED, X)",
    "site": "ME.flexact_site(CALLED, X)",
    "add": "ME.flexact_added(X, Y)",
    "add in place": "ME.flexact_added(X, Y, True)",
    "result": "(X := ME.flexact_result(X))",
}
"""The kinds of edits that fuse, and their expressions (see `flexact.surgery.rewriting`)."""


class FusedOperations:
    """The functions that the expressions of fused edits call."""

    flexact_waiting = staticmethod(waiting)
    flexact_passed = staticmethod(passed)
    flexact_added = staticmethod(added)
    flexact_site = staticmethod(finished)
    flexact_result = staticmethod(result)
