"""Large images: overlapping windows at the image's own resolution, blended into one map.

Windows begin at multiples of the student's coarsest stride, twice the encoder's (32 pixels with a
convolutional network), so that the grids of neighbouring windows coincide. They are laid evenly and
overlap by a quarter at least. A position's weight in a window is its distance from the window's
nearest edge, over the sum of all windows that hold it: where two overlap, one fades linearly into
the other.

An image that does not fit is continued by its mirror image: repeating its last row would make
streaks that no image has, and the residual finds them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.method.network import Evidence, Network, Outputs, pool
from cdgp.method.resize import Size

BATCH = 2
"""Windows that run together; more take longer on a processor, since the system clears their memory
anew each time."""
BAND = 64
"""Rows of evidence that are calibrated together."""

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


def weights(length: int, side: int, strides: Strides) -> Tensor:
    """(windows, cells) weight of each window along a length; each cell's sum to one."""
    first, cell = starts(length, side, strides), strides[0]
    near = torch.arange(side // cell) + 0.5
    near = torch.minimum(near, near.flip(0))
    found = torch.zeros(len(first), (first[-1] + side) // cell)
    for row, start in zip(found, first, strict=True):
        row[start // cell :][: len(near)] = near
    return found / found.sum(0)


def places(size: Sequence[int], window: Size, strides: Strides) -> list[Place]:
    """Where all windows of an image of (height, width) begin, row by row."""
    height, width = (starts(n, side, strides) for n, side in zip(size, window, strict=True))
    return list(product(height, width))


def cut(image: Tensor, place: Place, window: Size) -> Tensor:
    """One window (3, h, w) of an image (3, H, W)."""
    for dim, start, side in zip((1, 2), place, window, strict=True):
        length = image.shape[dim]
        if start + side <= length:
            image = image.narrow(dim, start, side)
        else:
            at = torch.arange(start, start + side, device=image.device) % (2 * length - 2)
            image = image.index_select(dim, torch.minimum(at, 2 * length - 2 - at))
    return image.contiguous()


def windows(image: Tensor, window: Size, strides: Strides) -> Iterator[Tensor]:
    """All windows (3, h, w) of an image (3, H, W), in the order of ``places``."""
    for place in places(image.shape[1:], window, strides):
        yield cut(image, place, window)


def batches(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors of one shape, few at a time, stacked."""
    held: list[Tensor] = []
    for part in parts:
        held.append(part)
        if len(held) == BATCH:
            yield torch.stack(held)
            held = []
    if held:
        yield torch.stack(held)


def blended(parts: Iterable[Tensor], size: Size, window: Size, strides: Strides) -> Tensor:
    """Maps (C, h/s, w/s) of all windows, in the order of ``places``, to one (C, H/s, W/s).

    s is the finest of the strides.
    """
    rows, columns = (weights(n, side, strides) for n, side in zip(size, window, strict=True))
    total: Tensor | None = None
    corners, cell = places(size, window, strides), strides[0]
    for part, (y, x), (row, column) in zip(parts, corners, product(rows, columns), strict=True):
        if total is None:
            total = part.new_zeros(part.shape[0], rows.shape[1], columns.shape[1])
        inside = (
            slice(y // cell, (y + window[0]) // cell),
            slice(x // cell, (x + window[1]) // cell),
        )
        total[:, *inside] += part * torch.outer(row[inside[0]], column[inside[1]]).to(part.device)
    assert total is not None
    height, width = (-(-n // cell) for n in size)
    return total[:, :height, :width]


@torch.inference_mode()
def tiled_evidence(network: Network | EvidenceGraph, image: Tensor, window: Size) -> Evidence:
    """An image (3, H, W), RGB in [0, 1], to the evidence of all of it, (1, H/s, W/s).

    s is the finest stride of the encoder. Maps are blended, and then pooled over the image. There
    is no distance: it has a Gaussian a place of an image, and a window may lie anywhere.
    """
    device, strides = next(network.parameters()).device, network.teacher.strides

    def maps() -> Iterator[Tensor]:
        for images in batches(windows(image, window, strides)):
            images = images.to(device).contiguous(memory_format=torch.channels_last)
            found: Evidence = network(images)
            yield from torch.stack([m for m in found.maps if m is not None], dim=1).float()

    size = (image.shape[1], image.shape[2])
    *tuned, residual = blended(maps(), size, window, strides)[:, None]
    dominance = tuned[0] if tuned else None
    pooled = pool(dominance, residual, None, network.sharpness, network.image_evidence)
    return Evidence(dominance, residual, None, pooled)


def outputs_of(graph: InferenceGraph, evidence: Evidence, size: Size) -> Outputs:
    """Evidence (1, H/s, W/s) to maps (1, H, W) and scores, on the processor.

    In bands of rows, so that what the calibration takes beside its results stays small; a row of
    evidence on either side makes a band's upsampling that of the whole.
    """
    count, columns = evidence.residual.shape[1:]
    cell = graph.evidence.teacher.strides[0]
    height, width = size
    maps = torch.empty(3, 1, height, width)
    for row in range(0, count, BAND):
        first, last = max(0, row - 1), min(count, row + BAND + 1)
        dominance, residual = evidence.dominance, evidence.residual[:, first:last]
        if dominance is not None:
            dominance = dominance[:, first:last]
        found = graph.outputs(
            Evidence(dominance, residual, None, evidence.pooled),
            (cell * (last - first), cell * columns),
        )
        y, skip = cell * row, cell * (row - first)
        rows = min(cell * BAND, height - y)
        for whole, band in zip(maps, found[:3], strict=True):
            whole[:, y : y + rows] = band[:, skip : skip + rows, :width]
    anomaly_map, surprisal, fused = maps
    return Outputs(anomaly_map, surprisal, fused, found.pooled.cpu(), found.pred_score.cpu())
