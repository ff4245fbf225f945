"""Both resizers against torch in float64, and that of images against Pillow."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from cdgp.data.resize import Size, resize_image, resize_map

TOLERANCE = 1e-6
"""Of values in [0, 1]: what is weighed and summed in float32 is seldom off by more than 4e-7."""


def sizes(seed: int) -> Iterator[tuple[Size, Size]]:
    """200 pairs of (height, width), of 1 to 400 pixels; in every other one short sides are as
    frequent as long ones, so that a side grows or shrinks by up to 400."""
    rng = np.random.default_rng(seed)
    for turn in range(200):
        drawn = rng.integers(1, 401, 4) if turn % 2 else np.exp(rng.uniform(0, np.log(401), 4))
        height, width, new_height, new_width = (int(side) for side in drawn)
        yield (height, width), (new_height, new_width)


def by_torch(images: torch.Tensor, size: Size, antialias: bool) -> NDArray[np.float64]:
    """(C, h, w) at another size, in float64."""
    batch = images[None].double()
    # Where antialiased results are one pixel wide, torch 2.14 gives numbers of other pixels.
    turned = size[1] == 1
    if turned:
        batch, size = batch.mT, (size[1], size[0])
    found = interpolate(
        batch, size=size, mode="bilinear", antialias=antialias, align_corners=False
    )[0]
    resized: NDArray[np.float64] = (found.mT if turned else found).numpy()
    return resized


def by_pillow(channel: NDArray[np.float32], size: Size) -> NDArray[np.float32]:
    """(h, w) at another size."""
    resized = Image.fromarray(np.ascontiguousarray(channel)).resize(
        (size[1], size[0]), Image.Resampling.BILINEAR
    )
    assert resized.mode == "F"
    return np.asarray(resized)


def test_images_against_torch_and_pillow() -> None:
    rng = np.random.default_rng(0)
    for given, wanted in sizes(1):
        image = rng.random((*given, 3), np.float32)
        found = resize_image(image, wanted)
        assert found.dtype == np.float32 and found.shape == (3, *wanted)
        assert found.flags.c_contiguous
        of_torch = by_torch(torch.from_numpy(image).permute(2, 0, 1), wanted, antialias=True)
        of_pillow = np.stack([by_pillow(image[..., c], wanted) for c in range(3)])
        for expected in (of_torch, of_pillow):
            np.testing.assert_allclose(
                found, expected, atol=TOLERANCE, rtol=0, err_msg=f"{given} to {wanted}"
            )


def test_maps_against_torch() -> None:
    rng = np.random.default_rng(0)
    for given, wanted in sizes(2):
        values = rng.random(given, np.float32)
        found = resize_map(values, wanted)
        assert found.dtype == np.float32 and found.shape == wanted
        expected = by_torch(torch.from_numpy(values)[None], wanted, antialias=False)[0]
        np.testing.assert_allclose(
            found, expected, atol=TOLERANCE, rtol=0, err_msg=f"{given} to {wanted}"
        )


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 300)])
def test_what_has_the_size_is_unchanged(size: Size) -> None:
    image = np.random.default_rng(0).random((*size, 3), np.float32)
    assert np.array_equal(resize_image(image, size), image.transpose(2, 0, 1))
    assert np.array_equal(resize_map(image[..., 0], size), image[..., 0])


def test_images_and_maps_differ_where_they_shrink() -> None:
    """The one has antialiasing, the other has not: the tests above would see them exchanged."""
    image = np.random.default_rng(0).random((40, 30, 1), np.float32)
    other = resize_map(image[..., 0], (10, 10))
    assert np.abs(resize_image(image, (10, 10))[0] - other).max() > 0.1
