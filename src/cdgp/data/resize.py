"""The one resizer of images and maps outside the networks, without torch: bilinear.

Two products with sparse weights, one an axis. The weights are those of ``torch.nn.functional.
interpolate`` without aligned corners; with antialiasing they are Pillow's too.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]


def resize_image(image: NDArray[np.float32], size: Size) -> NDArray[np.float32]:
    """An image (H, W, C) at another (height, width), with antialiasing, as (C, height, width)."""
    height, width, channels = image.shape
    rows = _weights(height, size[0], True) @ image.reshape(height, width * channels)
    across = rows.reshape(size[0], width, channels).transpose(1, 2, 0)
    both = _weights(width, size[1], True) @ across.reshape(width, channels * size[0])
    return np.ascontiguousarray(both.reshape(size[1], channels, size[0]).transpose(1, 2, 0))


def resize_map(values: NDArray[np.float32], size: Size) -> NDArray[np.float32]:
    """A map (h, w) at another (height, width), without antialiasing; unchanged where it has it."""
    if values.shape == size:
        return values
    across = _weights(values.shape[1], size[1], False) @ np.ascontiguousarray(values.T)
    found: NDArray[np.float32] = _weights(values.shape[0], size[0], False) @ across.T.copy()
    return found


@lru_cache(maxsize=64)
def _weights(inputs: int, outputs: int, antialias: bool) -> Any:
    """(outputs, inputs) scipy.sparse.csr_array: the share of each input in each output.

    A triangle around each output's place, as wide as an input, or as an output where it is wider
    and antialiased. Beyond the ends: with antialiasing what is inside counts, without it the
    outermost inputs go on.
    """
    from scipy import sparse

    scale = inputs / outputs
    centre = (np.arange(outputs) + 0.5) * scale
    if antialias:
        reach = max(scale, 1.0)
    else:
        reach, centre = 1.0, centre.clip(0.5, inputs - 0.5)
    first = np.floor(centre - reach + 0.5).clip(0).astype(np.int64)
    taken = first[:, None] + np.arange(int(np.ceil(2 * reach)) + 1)
    shares = (1 - np.abs((taken + 0.5 - centre[:, None]) / reach)).clip(0) * (taken < inputs)
    shares /= shares.sum(1, keepdims=True)
    outs, places = np.nonzero(shares)
    entries = shares[outs, places].astype(np.float32), (outs, taken[outs, places])
    return sparse.csr_array(entries, shape=(outputs, inputs))
