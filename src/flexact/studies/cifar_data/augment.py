"""Random crop and flip of a batch of images as tensor operations, and the scaling of pixels.

The crop is torchvision's ``RandomCrop(32, padding=4)`` followed by ``RandomHorizontalFlip()``, ``ToTensor()`` and
``Normalize(mean, std)``: black borders of four pixels, one of 9 × 9 places, mirrored or not. What is drawn for an
image is one number from 0 to 161, so that it can be drawn ahead, cut into the shares of several ranks, and copied
into the input of a CUDA graph. No operation waits for the host or depends on the data's shape: a CUDA graph can hold
them all.

A batch is uint8 (N, 3, H, W) on any device; mean and std are of the scale from 0 to 1, numbers or a tensor of three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted

PADDING = 4
PLACES = 2 * PADDING + 1
"""Where a crop may begin, down and across."""
DRAWS = PLACES * PLACES * 2

Channels = Sequence[float] | Tensor


def draw(count: int, generator: torch.Generator) -> Tensor:
    """One crop and flip an image, int64 (count,), on the generator's device.

    Inside of a CUDA graph the generator must be the default one or known to the graph by `register_generator_state`.
    """
    return torch.randint(DRAWS, (count,), generator=generator, device=generator.device)


def epoch_draws(count: int, seed: int, epoch: int, device: torch.device | str = "cpu") -> Tensor:
    """The crops and flips of one epoch, int64 (count,): the same on every device, rank and resumed run.

    The n-th image that an epoch shows takes the n-th of them: the images of a step, or of a rank's share, a slice.

    >>> epoch_draws(4, seed=0, epoch=1)
    tensor([142,  58,  35,   4])
    """
    digest = hashlib.sha256(f"crop and flip, seed {seed}, epoch {epoch}".encode()).digest()
    # Drawn on the CPU, whose numbers do not depend on the kind of GPU.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return draw(count, generator).to(device)


def cropped(batch: Tensor, drawn: Tensor) -> Tensor:
    """The crops that were drawn, mirrored where that was drawn: uint8 of the batch's shape, channels last in memory."""
    _check(batch)
    if drawn.shape != batch.shape[:1]:
        raise FlexActError(
            f"every image needs one draw: {counted(len(batch), 'image')} came with draws of shape {tuple(drawn.shape)}."
        )
    number, _, height, width = batch.shape
    mirrored = (drawn % 2).view(-1, 1)
    down, across = drawn // (2 * PLACES), drawn // 2 % PLACES
    row, column = (torch.arange(size, device=batch.device) for size in (height, width))
    rows = down.view(-1, 1) + row
    columns = across.view(-1, 1) + column + mirrored * (width - 1 - 2 * column)
    image = torch.arange(number, device=batch.device)
    padded = nn.functional.pad(batch, (PADDING,) * 4)
    # Indices on both sides of the channels bring these to the end: no further copy makes the batch channels-last.
    return padded[image.view(-1, 1, 1), :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def augmented(
    batch: Tensor, mean: Channels, std: Channels, drawn: Tensor | torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A batch for training: cropped and mirrored as drawn, or as a generator draws now, and scaled; channels last."""
    if isinstance(drawn, torch.Generator):
        drawn = draw(len(batch), drawn)
    return normalised(cropped(batch, drawn), mean, std, dtype)


def normalised(batch: Tensor, mean: Channels, std: Channels, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch for evaluation: each channel less its mean and divided by its deviation, in the batch's memory order."""
    _check(batch)
    means, deviations = _channels(mean, batch.device), _channels(std, batch.device)
    return batch.to(torch.float32).sub_(means.mul(255)).div_(deviations.mul(255)).to(dtype)


def _channels(values: Channels, device: torch.device) -> Tensor:
    """A value a channel, (1, 3, 1, 1). Numbers become fills on the device: a CUDA graph can hold no copy from here."""
    if not isinstance(values, Tensor):
        values = torch.stack([torch.full((), value, device=device) for value in values])
    if values.shape != (3,):
        raise FlexActError(f"mean and std have a value for each of three channels, not {tuple(values.shape)}.")
    return values.view(1, 3, 1, 1)


def _check(batch: Tensor) -> None:
    if batch.dtype is not torch.uint8 or batch.dim() != 4 or batch.shape[1] != 3:
        raise FlexActError(f"expected images as uint8 (N, 3, H, W); these are {batch.dtype} {tuple(batch.shape)}.")
