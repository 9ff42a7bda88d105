"""Random crop and flip of a batch of images as tensor operations, and the scaling of pixels.

The crop is torchvision's ``RandomCrop(32, padding=4)`` followed by ``RandomHorizontalFlip()``, ``ToTensor()`` and
``Normalize(mean, std)``. Crop and flip of an image are one number from 0 to 161, which can be drawn ahead and copied
into the input of a CUDA graph. No operation waits for the host or depends on values, so a CUDA graph can capture all.

A batch is uint8 (N, 3, H, W) on any device. mean and std are tensors of three values on the scale from 0 to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexact.studies.named_seeds import generator_of

PADDING = 4
PLACES = 2 * PADDING + 1
"""The number of offsets of a crop, vertically and horizontally."""
DRAWS = PLACES * PLACES * 2


def epoch_draws(count: int, seed: int, epoch: int) -> Tensor:
    """The crops and flips of one epoch's images, int64 (count,): the same on every device and in a resumed run.

    >>> epoch_draws(4, seed=0, epoch=1)
    tensor([142,  58,  35,   4])
    """
    return torch.randint(DRAWS, (count,), generator=generator_of(f"crop and flip, seed {seed}, epoch {epoch}"))


def augmented(batch: Tensor, mean: Tensor, std: Tensor, drawn: Tensor) -> Tensor:
    """A training batch: cropped and flipped as drawn, scaled, and channels-last."""
    return normalised(cropped(batch, drawn), mean, std)


def cropped(batch: Tensor, drawn: Tensor) -> Tensor:
    """The drawn crops, flipped where drawn: uint8 of the batch's shape, channels-last in memory."""
    number, _, height, width = batch.shape
    mirrored = (drawn % 2).view(-1, 1)
    down, across = drawn // (2 * PLACES), drawn // 2 % PLACES
    row, column = (torch.arange(size, device=batch.device) for size in (height, width))
    rows = down.view(-1, 1) + row
    columns = across.view(-1, 1) + column + mirrored * (width - 1 - 2 * column)
    image = torch.arange(number, device=batch.device)
    padded = nn.functional.pad(batch, (PADDING,) * 4)
    # Indexing on both sides of the channels moves them to the end, so the batch is channels-last without another copy.
    return padded[image.view(-1, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def normalised(batch: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """A batch in float32 whose channels have their mean subtracted and are divided by their standard deviation."""
    means, deviations = (one.mul(255).view(3, 1, 1) for one in (mean, std))
    return batch.to(torch.float32).sub_(means).div_(deviations)
