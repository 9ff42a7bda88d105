"""A site together with the batch norm, and the residual addition, before it.

`convert(..., fuse=True)` rewrites the forwards in which BatchNorm2d → site or BatchNorm2d → add → site occurs so that
they call `normalised_site`. Where no kernel can do it in one go, the parts run one after the other, as in the plain
network.
"""

from __future__ import annotations

from torch import Tensor, nn

from flexact.layer import FlexAct


def normalised_site(
    site: FlexAct,
    norm: nn.BatchNorm2d,
    y: Tensor,
    residual: Tensor | None = None,
    residual_norm: nn.BatchNorm2d | None = None,
) -> Tensor:
    """site(norm(y) + residual), where the residual may go through a batch norm of its own."""
    h = norm(y)
    if residual is not None:
        h = h + (residual if residual_norm is None else residual_norm(residual))
    x: Tensor = site(h)
    return x
