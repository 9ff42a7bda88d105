"""Writes small data sets in the official binary layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flexact.studies.cifar_data.data import LAYOUTS, PIXELS, SIDE


def write_cifar(
    folder: Path, name: str, train: int = 500, test: int = 200, seed: int = 0, learnable: bool = True
) -> Path:
    """Writes every file of a data set below a folder, with about equally many images per class. Returns the folder.

    A learnable set has an upper and a lower colour per class, under noise. Neither crop nor flip hides them, and a
    small network separates ten classes after a few epochs. The other kind of set is noise only.
    """
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(seed)
    colours = torch.randint(40, 216, (layout.classes, 3, 2), generator=generator)
    place = folder / layout.folder
    place.mkdir(parents=True, exist_ok=True)
    for files, count in ((layout.train, train), (layout.test, test)):
        labels = torch.randperm(count, generator=generator) % layout.classes
        images = _pictures(colours[labels], generator) if learnable else _noise(count, generator)
        columns = [labels * limit // layout.classes for limit in layout.labels]
        records = torch.cat([torch.stack(columns, 1).to(torch.uint8), images.reshape(count, PIXELS)], 1)
        for file, part in zip(files, records.tensor_split(len(files)), strict=True):
            (place / file).write_bytes(part.numpy().tobytes())
    return place


def _pictures(colours: Tensor, generator: torch.Generator) -> Tensor:
    """Returns images (N, 3, 32, 32) from the colours of their halves (N, 3, 2)."""
    halves = colours.repeat_interleave(SIDE // 2, 2).unsqueeze(3)
    noise = 30 * torch.randn(len(colours), 3, SIDE, SIDE, generator=generator)
    return (halves + noise).round().clamp(0, 255).to(torch.uint8)


def _noise(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(256, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
