"""Reads images and masks: one colour space, one range, one orientation, one resize.

Every reader gives HWC float32 sRGB in [0, 1], upright, at the image's own resolution. Every reason
not to use a file is an `ImageError` that begins with the file's path.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdgp.data import colours
from cdgp.data.decode import decode, image_errors, read_header
from cdgp.data.resize import resize_image
from cdgp.errors import ImageError, SettingsError
from cdgp.presets import Settings

MIN_SIDE = 8
"""The least width and height, in pixels, of an image that can be scored."""

FEW_VALUES = 16
"""In a mask with at most this many distinct values, every value above zero is defect."""

INVERTED = 0.9
"""A mask that marks at least this share of its image may be inverted."""
PALETTES = ("PNG", "BMP", "GIF")
LOSSY = ("WEBP", "AVIF", "JPEG2000")
"""Formats that may be compressed as JPEG is, with faint values around every mark."""
END = 0.1
"""So near to 0, or to the largest value, the values of a compressed mask lie."""

EMPTY_SPREAD = 0.01
"""Where no channel has a larger standard deviation, an image holds nothing to see. The least on
the data sets of the tests is 0.014, on real parts 0.026."""
HOT = 0.01
"""Share of the pixels that this leaves out, those farthest from the median: hot pixels."""
NEAR_BLACK = 24 / 255
"""Noise up to this is black, and from 1 less this it is white, where its `BLOCK` means agree."""
BLOCK, BLOCK_SPREAD = 8, 1 / 255
LEVELS = 1024
"""Pixels are counted by so many levels for this."""
LOOK = 16_384
"""At about so many pixels an image is looked at first; most have content there already."""


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
    profile: str = ""
    """Name of the colour profile that the colours were converted from to sRGB; empty where they
    were not."""
    warnings: tuple[str, ...] = ()
    """What is in doubt about the colours, in sentences without the path."""
    swapped: float | None = None
    """Of CMYK without an Adobe marker, the mean brightness if inks are stored the other way."""


class MaskFacts(NamedTuple):
    """How a mask file is stored."""

    levels: int
    """How many distinct values it holds."""
    cut: bool
    """Whether defect starts at half of the largest value; else it starts above zero."""
    values: str = ""
    """The distinct values for a message, the first of them: "0, 1, 255"."""

    @property
    def told(self) -> str:
        """How the values were read, where that can be read in two ways; else empty."""
        if self.cut:
            return f"{self.levels} levels, cut at half of the largest ({self.values})"
        return f"every value above 0 counts ({self.values})" if self.levels > 2 else ""


def read_image(path: Path, white_level: int, first_page: bool = False) -> NDArray[np.float32]:
    """Reads one image, upright, at its own size.

    8-bit values are divided by 255, 16-bit values by `white_level`, 9- to 15-bit TIFF and JPEG 2000
    by their own full range, PGM and PPM by the largest value that they state (where that is 65535,
    by `white_level`); float TIFF must lie in [0, 1] already. There is no per-image stretch, so
    equal values mean equal brightness in every file. Colours with a profile are converted to sRGB.
    Grey is repeated to RGB, palettes are looked up, CMYK is converted, and transparent pixels are
    composed over black.

    Arguments:
        path: An image file of any name, in one of the formats of `decode.EXTENSIONS`.
        white_level: The value that means white in 16-bit files; 4095 for a 12-bit camera.
        first_page: Whether a file of several pages or frames is its first one, or is refused.

    Returns:
        The image, HWC float32 sRGB in [0, 1], in the frame of the upright image.

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
        stated = colours.stated(path, header.format, header.page)
        unit, used, swapped = _colours(path, values, full, stated)
        if alpha:
            unit *= values[:, :, -1:].astype(np.float32) / np.float32(opaque)
        facts = FileFacts(
            header.format,
            int(opaque).bit_length() if whole else 32,
            largest,
            int((values[:, :, -1] < opaque).sum()) if alpha else 0,
            profile=used.name if used.space else "",
            warnings=(*stated.warnings, *([used.warning] if used.warning else [])),
            swapped=swapped,
        )
        image = np.repeat(unit, 3, axis=2) if unit.shape[2] == 1 else unit
        return np.ascontiguousarray(image), facts


def _colours(
    path: Path, values: NDArray[Any], full: float, stated: colours.Stated
) -> tuple[NDArray[np.float32], colours.Profile, float | None]:
    """HWC float32 sRGB or grey in [0, 1] without alpha, the profile, and `FileFacts.swapped`."""
    if not stated.cmyk or (stated.profile is None and stated.marked):
        return *colours.to_srgb(_unit(values, full), stated.profile), None
    inks = colours.cmyk_values(path)
    converted, used = colours.to_srgb(inks, stated.profile)
    unit = converted if used.space else _unit(values, full)
    return unit, used, None if stated.marked else colours.swapped_brightness(inks)


def no_content(pixels: NDArray[np.float32]) -> str:
    """Why an image, HWC float32 RGB in [0, 1], holds nothing to see; empty where it holds any.

    All pixels are alike but for hot ones, or it is black or white with noise, and no region
    differs from another.
    """
    step = max(1, math.isqrt(pixels.shape[0] * pixels.shape[1] // LOOK))
    if step > 1 and not _nothing(pixels[::step, ::step]):
        return ""
    return _nothing(pixels)


def _nothing(pixels: NDArray[np.float32]) -> str:
    levels = (pixels * np.float32(LEVELS - 1) + np.float32(0.5)).astype(np.uint16)
    counts = [np.bincount(levels[..., c].ravel(), minlength=LEVELS) for c in range(3)]
    spread = max(map(_spread, counts))
    if spread < EMPTY_SPREAD:
        return f"holds nothing to see: all pixels are alike (standard deviation {spread:.2g})"
    dark = sum(of_channel[: round(NEAR_BLACK * LEVELS)].sum() for of_channel in counts)
    light = sum(of_channel[-round(NEAR_BLACK * LEVELS) :].sum() for of_channel in counts)
    if max(dark, light) >= (1 - HOT) * pixels.size:
        rows, columns = (side // BLOCK * BLOCK for side in pixels.shape[:2])
        ends = (0, NEAR_BLACK) if dark > light else (1 - NEAR_BLACK, 1)  # hot pixels count as noise
        blocks = np.clip(pixels[:rows, :columns], *ends).reshape(
            rows // BLOCK, BLOCK, columns // BLOCK, BLOCK, 3
        )
        if blocks.mean(axis=(1, 3)).std(axis=(0, 1)).max() < BLOCK_SPREAD:
            return f"holds nothing to see: noise on {'black' if dark > light else 'white'}"
    return ""


def _spread(counts: NDArray[np.int64]) -> float:
    """The standard deviation, of 1, of a channel with so many pixels a level, `HOT` left out."""
    levels = np.arange(len(counts)) / (LEVELS - 1)
    median = levels[np.searchsorted(counts.cumsum(), counts.sum() / 2)]
    distance = np.abs(levels - median)
    nearest = np.argsort(distance, kind="stable")
    last = np.searchsorted(counts[nearest].cumsum(), (1 - HOT) * counts.sum())
    kept = np.where(distance <= distance[nearest[last]], counts, 0)
    mean = np.average(levels, weights=kept)
    return float(np.sqrt(np.average((levels - mean) ** 2, weights=kept)))


def read_masks(paths: Sequence[Path], size: tuple[int, int]) -> NDArray[np.bool_]:
    """The union of the masks of one image, each as `read_mask` reads it."""
    union = np.zeros(size, np.bool_)
    for path in paths:
        union |= read_mask(path, size)
    return union


def read_mask(path: Path, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Reads one mask of an image.

    The value of a pixel is its largest channel, over black where it is transparent. Every value
    above zero is defect where a mask holds at most 16 distinct values, or where its values fill
    areas of their own, as class and instance numbers do. Any other mask was blurred or compressed,
    as every JPEG is and WebP, AVIF and JPEG 2000 may be, also where they were saved again as PNG:
    defect is every value from half of the largest upwards.

    So {0, 1, 5} of VisA, {0, 236} of MVTec LOCO, {0, 1, 255} with a rim, {0, 256} in 16 bits,
    palettes and red on black count every marked pixel, and soft edges do not widen a defect.

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
        stored, full = decode(path, header)
        black = colours.black_entries(path) if header.format in PALETTES else 0
        if black > 1:
            raise ImageError(
                f"{path}: {black} values of its palette are black, so that marks cannot be told "
                "from the background; save the values themselves, as a grey mask"
            )
        unit = _unit(stored, full)
        if stored.shape[2] in (2, 4):
            unit *= stored[:, :, -1:].astype(np.float32) / np.float32(full)
        values = unit.max(axis=2)
        levels = np.unique(values)
        cut = _is_soft(values, levels, header.format)
        facts = MaskFacts(len(levels), cut, colours.shown_values(levels * full))
        return np.asarray((values > 0) & (values >= (levels[-1] / 2 if cut else 0))), facts


def _is_soft(values: NDArray[np.float32], levels: NDArray[np.float32], form: str) -> bool:
    """Whether the values of a mask (H, W) were blurred or compressed, and are no class numbers.

    Class numbers fill areas: most of what a cut would drop has an equal neighbour in its row and in
    its column, and where neighbours differ, they do not follow each other in value as those of a
    slow blur do. Nor do they crowd at both ends of the range, as compressed masks of two values do.
    """
    if form == "JPEG":
        return len(levels) > 2
    few = len(levels) <= FEW_VALUES
    dropped = (values > 0) & (values < levels[-1] / 2)
    if (few and form not in LOSSY) or not dropped.any():
        return False
    ranks = np.searchsorted(levels, values)
    flat = _equal_along(ranks, 0) & _equal_along(ranks, 1)
    if flat[dropped].mean() < 0.5 or _at_both_ends(values, levels):
        return True
    if few:
        return False
    marked = np.where(values > 0, ranks, np.nan)  # a frequent class has most borders with 0
    steps = np.concatenate([np.abs(np.diff(marked, axis=axis)).ravel() for axis in (0, 1)])
    steps = steps[steps > 0]
    return bool(len(steps)) and bool(np.median(steps) <= 1)


def _at_both_ends(values: NDArray[np.float32], levels: NDArray[np.float32]) -> bool:
    """Whether most values lie near 0 or near the largest: two values, compressed, with faint ones
    around every mark.

    Class numbers lie between, too, or, beside a rim to be ignored, there is one value at the top.
    """
    if levels[-2] < (1 - END) * levels[-1]:
        return False
    shares = values / levels[-1]
    faint = np.count_nonzero((shares > 0) & (shares <= END))
    full = np.count_nonzero(shares >= 1 - END)
    return bool(min(faint, full) > np.count_nonzero(shares) - faint - full)


def _equal_along(values: NDArray[Any], axis: int) -> NDArray[np.bool_]:
    """Where a value has an equal neighbour along an axis."""
    equal = np.diff(values, axis=axis) == 0
    ends = [(int(axis == 0), 0), (int(axis == 1), 0)]
    before, after = np.pad(equal, ends), np.pad(equal, [end[::-1] for end in ends])
    return np.asarray(before | after)


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


def to_input(image: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """The resize that training and prediction share: bilinear with antialias, the aspect not kept.

    Arguments:
        image: HWC float32 RGB in [0, 1], in the frame of the upright image.
        size: (height, width) of the network's input.

    Returns:
        CHW float32 RGB in [0, 1], of `size`.
    """
    return resize_image(image, size).clip(0, 1)


def network_input(path: Path, settings: Settings) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """An image file as the network takes it, and its own (height, width).

    Returns:
        (3, H, W) float32 RGB in [0, 1]: at the input size, or the image's own where it is cut into
        windows.

    Raises:
        ImageError: it cannot be read.
    """
    pixels = read_image(path, settings.data.white_level, settings.data.first_page)
    return as_input(pixels, settings), (pixels.shape[0], pixels.shape[1])


def as_input(pixels: NDArray[np.float32], settings: Settings) -> NDArray[np.float32]:
    """The image of ``network_input``, of pixels (H, W, 3) that are read already."""
    if settings.tile:
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return to_input(pixels, settings.input_size)


def _unit(values: NDArray[Any], full: float) -> NDArray[np.float32]:
    """HWC of 1 to 4 channels to HWC float32 of 1 or 3 without alpha, white at `full` as 1."""
    unit = (values[:, :, :-1] if values.shape[2] in (2, 4) else values).astype(np.float32)
    unit /= np.float32(full)
    return unit
