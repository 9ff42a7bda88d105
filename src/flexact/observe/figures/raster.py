"""A heat map as a PNG image in a data URI: a few bytes per cell, which any browser and notebook shows."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from bisect import bisect_left

from flexact.observe.figures.description import SHADES, Grid

_EMPTY = 255
"""The index of the transparent colour."""
_MAX_PIXELS = 600


def data_uri(grid: Grid) -> str:
    """Return the image of a grid, one pixel high per row. Columns are as wide as their spacing requires."""
    columns = _pixel_columns(grid)
    top = 1 if grid.categories else _EMPTY - 1
    rows = [bytes(_EMPTY if math.isnan(row[i]) else round(row[i] * top) for i in columns) for row in grid.values]
    colours = [colour for _, colour in grid.categories] or [_shade(level / top) for level in range(_EMPTY)]
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours).ljust(3 * (_EMPTY + 1), b"\0")
    png = b"\x89PNG\r\n\x1a\n"
    png += _chunk(b"IHDR", struct.pack(">IIBBBBB", len(columns), len(rows), 8, 3, 0, 0, 0))
    png += _chunk(b"PLTE", palette) + _chunk(b"tRNS", b"\xff" * _EMPTY + b"\0")
    png += _chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _pixel_columns(grid: Grid) -> list[int]:
    """Return the column that each pixel of a row shows."""
    edges, columns = grid.edges, grid.columns
    width = (edges[-1] - edges[0]) / len(columns)
    if all(abs(edge - edges[0] - i * width) < width / 2 for i, edge in enumerate(edges)):  # almost evenly spaced
        return list(range(len(columns)))
    centres = [edges[0] + (pixel + 0.5) / _MAX_PIXELS * (edges[-1] - edges[0]) for pixel in range(_MAX_PIXELS)]
    return [bisect_left(edges, x, 1, len(columns)) - 1 for x in centres]


def _shade(probability: float) -> str:
    """Return the colour between two shades."""
    place = probability * (len(SHADES) - 1)
    lower = min(int(place), len(SHADES) - 2)
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in SHADES[lower : lower + 2]]
    return "#" + "".join(f"{round(a + (place - lower) * (b - a)):02x}" for a, b in zip(*ends, strict=True))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
