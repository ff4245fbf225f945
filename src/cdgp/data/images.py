"""Reads images and masks: one colour space, one range, one orientation, one resize.

Every reader gives HWC float32 RGB in [0, 1], upright, at the image's own resolution. Every reason
not to use a file is an `ImageError` that begins with the file's path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdgp.data.decode import decode, image_errors, read_header
from cdgp.errors import ImageError, SettingsError

if TYPE_CHECKING:
    import torch

MIN_SIDE = 8
"""The least width and height, in pixels, of an image that can be scored."""

CLASS_NUMBERS = 16
"""A mask with at most this many distinct values, all of them dark, is read as class numbers."""


class FileFacts(NamedTuple):
    """How an image file is stored."""

    format: str
    """"JPEG", "PNG", "TIFF", "BMP", "WEBP", "GIF", "AVIF", "JPEG2000" or "PNM", by the content."""
    bits: int
    """Bits of a channel, as the file gives them; 32 for floating point."""
    largest: int
    """The largest stored value of a colour channel; 0 in floating point."""
    transparent: int
    """How many pixels are not fully opaque, and so were composed over black."""


class MaskFacts(NamedTuple):
    """How a mask file is stored."""

    levels: int
    """How many distinct values it holds."""
    cut: bool
    """Whether defect starts at half of the largest value; else it starts above zero."""


def read_image(path: Path, white_level: int, first_page: bool = False) -> NDArray[np.float32]:
    """Reads one image, upright, at its own size.

    8-bit values are divided by 255, 16-bit values by `white_level`, 9- to 15-bit TIFF and JPEG 2000
    by their own full range, PGM and PPM by the largest value that they state (where that is 65535,
    by `white_level`); float TIFF must lie in [0, 1] already. There is no per-image stretch, so
    equal values mean equal brightness in every file. Grey is repeated to RGB, palettes are looked
    up, CMYK is converted, and transparent pixels are composed over black.

    Arguments:
        path: An image file of any name, in one of the formats of `decode.EXTENSIONS`.
        white_level: The value that means white in 16-bit files; 4095 for a 12-bit camera.
        first_page: Whether a file of several pages or frames is its first one, or is refused.

    Returns:
        The image, HWC float32 RGB in [0, 1], in the frame of the upright image.

    Raises:
        ImageError: The file cannot be used; the message begins with the path.
        SettingsError: `white_level` is not within 1..65535.
    """
    return read_with_facts(path, white_level, first_page)[0]


def read_with_facts(
    path: Path, white_level: int, first_page: bool = False
) -> tuple[NDArray[np.float32], FileFacts]:
    """`read_image`, with how the file is stored."""
    if not 1 <= white_level <= 65535:
        raise SettingsError(f"white_level is {white_level}; give a value within 1..65535")
    with image_errors(path):
        header = read_header(path, first_page)
        if min(header.height, header.width) < MIN_SIDE:
            raise ImageError(
                f"{path}: image is {header.width} × {header.height}, smaller than the least "
                f"that can be scored, {MIN_SIDE} × {MIN_SIDE}"
            )
        values, full = decode(path, header)
        opaque = full
        alpha = values.shape[2] in (2, 4)
        whole = values.dtype.kind == "u"
        largest = int((values[:, :, :-1] if alpha else values).max()) if whole else 0
        if full == 65535:
            full = white_level
            if largest > white_level:
                raise ImageError(
                    f"{path}: holds the value {largest}, above the white level {white_level}; "
                    f"set white_level to {fitting_white_level(largest)}"
                )
        facts = FileFacts(
            header.format,
            int(opaque).bit_length() if whole else 32,
            largest,
            int((values[:, :, -1] < opaque).sum()) if alpha else 0,
        )
        image = _compose(values, full, opaque)
        if image.shape[2] == 1:
            image = np.repeat(image, 3, axis=2)
        return np.ascontiguousarray(image), facts


def read_masks(paths: Sequence[Path], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The union of the masks of one image, each as `read_mask` reads it."""
    union = np.zeros(size, np.bool_)
    for path in paths:
        union |= read_mask(path, size)
    return union


def read_mask(path: Path, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Reads one mask of an image.

    The value of a pixel is its largest channel. A mask holds class numbers where it has at most 16
    distinct values and these are colours or all below half of the file's range: then every value
    above zero is defect. In any other mask, defect is every value from half of the largest upwards.

    So anti-aliased and lossy grey masks are cut at half, while {0, 1, 5} of VisA, {0, 236} of
    MVTec LOCO, {0, 256} in 16 bits, palettes and red on black count every marked pixel.

    Arguments:
        path: A mask file in any format and depth that `read_image` reads.
        size: (height, width) of the upright image that the mask belongs to.

    Returns:
        The mask, (H, W) bool in the frame of the upright image, True on defects.

    Raises:
        ImageError: The file cannot be used, or its size is not the image's.
    """
    return read_mask_with_facts(path, size)[0]


def read_mask_with_facts(path: Path, size: tuple[int, int]) -> tuple[NDArray[np.bool_], MaskFacts]:
    """`read_mask`, with how the mask is stored."""
    with image_errors(path):
        header = read_header(path)
        if (header.height, header.width) != tuple(size):
            turned = (header.width, header.height) == tuple(size)
            advice = (
                "the mask seems to be turned by 90° (the image's EXIF orientation does not reach "
                "its mask): turn it the way the image is shown"
                if turned
                else "save the mask at the size of the image"
            )
            raise ImageError(
                f"{path}: mask is {header.width} × {header.height}, but its image is "
                f"{size[1]} × {size[0]}; {advice}"
            )
        values, full = decode(path, header)
        colours = _compose(values, full, full)
        values = colours.max(axis=2)
        levels = np.unique(values)
        largest = float(levels[-1])
        coloured = bool((colours.min(axis=2) != values).any())
        if len(levels) <= CLASS_NUMBERS and (coloured or largest < 0.5):
            return np.asarray(values > 0), MaskFacts(len(levels), False)
        return np.asarray((values > 0) & (values >= largest / 2)), MaskFacts(len(levels), True)


def fitting_white_level(largest: int) -> int:
    """The white of the camera with the fewest bits (8, 10, 12, 14, 16) that stores the value."""
    return next(level for level in (255, 1023, 4095, 16383, 65535) if level >= largest)


def resize_mask(mask: NDArray[np.bool_], size: tuple[int, int]) -> NDArray[np.bool_]:
    """A mask (H, W) bool at another (height, width), by nearest neighbour."""
    if mask.shape == tuple(size):
        return mask
    resized = Image.fromarray(mask).resize((size[1], size[0]), Image.Resampling.NEAREST)
    return np.asarray(resized, np.bool_)


def image_size(path: Path, first_page: bool = False) -> tuple[int, int]:
    """Size (height, width) of the upright image, from the header alone."""
    with image_errors(path):
        header = read_header(path, first_page)
        return header.height, header.width


def reason(error: ImageError, path: Path) -> str:
    """The message of `error` without the path that it begins with."""
    return str(error).removeprefix(f"{path}: ")


def pixel_digest(image: NDArray[np.float32]) -> str:
    """SHA-256, in hex, of the shape and the pixels (HWC float32 in [0, 1]) rounded to 16 bits.

    Files that differ only in name, metadata or lossless format have the same digest.
    """
    pixels = np.rint(image * np.float32(65535)).astype("<u2")
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def to_input(image: NDArray[np.float32], size: tuple[int, int]) -> torch.Tensor:
    """The resize that training and prediction share: bilinear with antialias, the aspect not kept.

    Arguments:
        image: HWC float32 RGB in [0, 1], in the frame of the upright image.
        size: (height, width) of the network's input.

    Returns:
        CHW float32 RGB in [0, 1], of `size`.
    """
    import torch
    from torch.nn.functional import interpolate

    batch = torch.from_numpy(np.ascontiguousarray(image, np.float32)).permute(2, 0, 1)[None]
    resized = interpolate(batch, size=size, mode="bilinear", antialias=True)
    return resized[0].clamp(0, 1).contiguous()


def _compose(values: NDArray[Any], full: float, opaque: float) -> NDArray[np.float32]:
    """HWC of 1 to 4 channels to HWC float32 in [0, 1] of 1 or 3, alpha composed over black.

    Colours are white at `full`, alpha is solid at `opaque`.
    """
    alpha = values.shape[2] in (2, 4)
    unit = (values[:, :, :-1] if alpha else values).astype(np.float32)
    unit /= np.float32(full)
    if alpha:
        unit *= values[:, :, -1:].astype(np.float32) / np.float32(opaque)
    return np.asarray(unit, np.float32)
