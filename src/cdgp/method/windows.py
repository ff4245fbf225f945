"""Windows of a large image, at its own resolution, and their maps as one; without torch.

Windows begin at multiples of the student's coarsest stride, twice the encoder's (32 pixels with a
convolutional network), so that the grids of neighbouring windows coincide. They are laid evenly and
overlap by a quarter at least. A position's weight in a window is its distance from the window's
nearest edge, over the sum of all windows that hold it: where two overlap, one fades linearly into
the other.

An image that does not fit is continued by its mirror image: repeating its last row would make
streaks that no image has, and the residual finds them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    Image = TypeVar("Image", Tensor, NDArray[np.float32])
    """(3, H, W)."""

BATCH = 2
"""Windows that run together; more take longer on a processor, since the system clears their memory
anew each time."""
BAND = 64
"""Rows of evidence that are calibrated together."""

Array = NDArray[np.float32]
Size = tuple[int, int]
Place = tuple[int, int]
"""(top, left), in pixels."""
Strides = Sequence[int]
"""``Encoder.strides``. The first is the side of a position of the evidence, in pixels."""


def starts(length: int, side: int, strides: Strides) -> list[int]:
    """Where windows of a side begin along a length, both in pixels; the last may reach beyond."""
    grid = 2 * strides[-1]
    step = max(grid, side * 3 // 4 // grid * grid)
    last = -(-max(0, length - side) // grid)
    gaps = -(-last * grid // step)
    return [i * last // max(1, gaps) * grid for i in range(gaps + 1)]


def weights(length: int, side: int, strides: Strides) -> Array:
    """(windows, cells) weight of each window along a length; each cell's sum to one."""
    first, cell = starts(length, side, strides), strides[0]
    near = np.arange(side // cell, dtype=np.float32) + np.float32(0.5)
    near = np.minimum(near, near[::-1])
    found = np.zeros((len(first), (first[-1] + side) // cell), np.float32)
    for row, start in zip(found, first, strict=True):
        row[start // cell :][: len(near)] = near
    found /= found.sum(0)
    return found


def places(size: Sequence[int], window: Size, strides: Strides) -> list[Place]:
    """Where all windows of an image of (height, width) begin, row by row."""
    height, width = (starts(n, side, strides) for n, side in zip(size, window, strict=True))
    return list(product(height, width))


def cut(image: "Image", place: Place, window: Size) -> "Image":
    """One window (3, h, w) of an image (3, H, W), a tensor or an array."""
    rows, columns = (
        _inside(start, side, length)
        for start, side, length in zip(place, window, image.shape[1:], strict=True)
    )
    return image[:, rows][:, :, columns]


def _inside(start: int, side: int, length: int) -> Any:
    """Positions of a window's rows or columns, those beyond the image mirrored at its edges."""
    if start + side <= length:
        return slice(start, start + side)
    at = np.arange(start, start + side) % (2 * length - 2)
    return np.minimum(at, 2 * length - 2 - at)


def windows(image: "Image", window: Size, strides: Strides) -> "Iterator[Image]":
    """All windows (3, h, w) of an image (3, H, W), in the order of ``places``."""
    for place in places(image.shape[1:], window, strides):
        yield cut(image, place, window)


def batches(parts: "Iterable[Image]") -> "Iterator[list[Image]]":
    """Windows, few at a time."""
    held: list[Any] = []
    for part in parts:
        held.append(part)
        if len(held) == BATCH:
            yield held
            held = []
    if held:
        yield held


def blended(parts: Iterable[Array], size: Sequence[int], window: Size, strides: Strides) -> Array:
    """Maps (M, h/s, w/s) of all windows, in the order of ``places``, to one (M, H/s, W/s).

    s is the finest of the strides.
    """
    rows, columns = (weights(n, side, strides) for n, side in zip(size, window, strict=True))
    corners, cell = places(size, window, strides), strides[0]
    total: Array | None = None
    for part, (y, x), (row, column) in zip(parts, corners, product(rows, columns), strict=True):
        if total is None:
            total = np.zeros((len(part), rows.shape[1], columns.shape[1]), np.float32)
        inside = (
            slice(y // cell, (y + window[0]) // cell),
            slice(x // cell, (x + window[1]) // cell),
        )
        total[:, *inside] += part * np.outer(row[inside[0]], column[inside[1]])
    assert total is not None
    height, width = (-(-n // cell) for n in size)
    return total[:, :height, :width]


class Band(NamedTuple):
    """The calibrated result of some rows, as arrays, or in a graph as tensors."""

    anomaly_map: Any
    """(1, H, W), in nats."""
    surprisal: Any
    """(1, H, W), in nats."""
    fused: Any
    """(1, H, W), in standard deviations of the normal branches."""
    pred_score: Any
    """(1,) of the whole image."""


def by_bands(run: Callable[[Array], Band], maps: Array, size: Size, cell: int) -> Band:
    """Maps (M, H/s, W/s) of the evidence to the calibrated ones of (H, W), in bands of rows.

    So what the calibration takes beside its results stays small. A row of evidence on either side
    makes a band's upsampling that of the whole.

    Args:
        run: calibrates a band (M, h, w), to maps of s times its size.
        maps: of the whole image.
        size: (height, width) of the image.
        cell: s, the side of a position of the evidence in pixels.
    """
    count, (height, width) = maps.shape[1], size
    anomaly_map, surprisal, fused = (np.empty((1, height, width), np.float32) for _ in range(3))
    score = None
    for row in range(0, count, BAND):
        first, last = max(0, row - 1), min(count, row + BAND + 1)
        *found, score = run(maps[:, first:last])
        y, skip = cell * row, cell * (row - first)
        rows = min(cell * BAND, height - y)
        for whole, band in zip((anomaly_map, surprisal, fused), found, strict=True):
            whole[:, y : y + rows] = band[:, skip : skip + rows, :width]
    return Band(anomaly_map, surprisal, fused, score)
