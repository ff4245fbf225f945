"""The only door for pixels: decode, orient, depth, colour, resize; masks.

Everything downstream sees one kind of image: HWC float32 RGB in [0, 1], upright, at its own
resolution. Every reason not to use a file is a `ImageError` that begins with the file's path.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from cdgp.errors import ImageError, SettingsError

if TYPE_CHECKING:
    import torch

MAX_PIXELS = 178_956_970
"""More pixels than this are refused from the header, before decoding (Pillow's own hard limit)."""

MIN_SIDE = 8
"""The least width and height, in pixels, of an image that can be scored."""

WHITE_LEVEL = 65535
"""The value that means white in 16-bit files, unless the caller says otherwise."""

CLASS_NUMBERS = 16
"""A mask with at most this many values and none bright is read as class numbers."""

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
ORIENTATION = 0x0112

# The hard limit stays with Pillow; only its warning between half the limit and the limit goes.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class FileFacts(NamedTuple):
    """What a file tells beside its pixels, for the audit of a data set."""

    format: str
    """"JPEG", "PNG", "BMP", "WEBP" or "TIFF", whatever the name says."""
    bits: int
    """Of a channel, as the file states them; 32 stands for floating point."""
    largest: int
    """The largest stored value of a colour channel; 0 in floating point."""
    transparent: int
    """How many pixels are not wholly opaque, and so were composed over black."""


class MaskFacts(NamedTuple):
    """What is odd about how a mask is stored."""

    levels: int
    """How many distinct values it holds."""
    cut: bool
    """Whether it was cut at half of its largest value, and not at zero."""


def read_image(path: Path, white_level: int = WHITE_LEVEL) -> NDArray[np.float32]:
    """Reads one image, upright, at its own size.

    8-bit values are divided by 255, 16-bit values by `white_level`, 9- to 15-bit TIFF by their
    own full range; float TIFF must lie in [0, 1] already. There is no per-image stretch, so
    equal values mean equal brightness in every file. Grey is repeated to RGB, palettes are looked
    up, CMYK is converted, and transparent pixels are composed over black.

    Arguments:
        path: A JPEG, PNG, TIFF, BMP or WebP file of any name.
        white_level: The value that means white in 16-bit files; 4095 for a 12-bit camera.

    Returns:
        The image, HWC float32 RGB in [0, 1], in the frame of the upright image.

    Raises:
        ImageError: The file cannot be used; the message begins with the path.
        SettingsError: `white_level` is not within 1..65535.
    """
    return read_with_facts(path, white_level)[0]


def read_with_facts(
    path: Path, white_level: int = WHITE_LEVEL
) -> tuple[NDArray[np.float32], FileFacts]:
    """`read_image`, with what the file tells beside its pixels."""
    if not 1 <= white_level <= 65535:
        raise SettingsError(f"white_level is {white_level}; give a value within 1..65535")
    with _blame(path):
        header = _header(path)
        if min(header.height, header.width) < MIN_SIDE:
            raise ImageError(
                f"{path}: image is {header.width} × {header.height}, smaller than the least "
                f"that can be scored, {MIN_SIDE} × {MIN_SIDE}"
            )
        values, full = _decode(path, header)
        opaque = full
        alpha = values.shape[2] in (2, 4)
        colours = values[:, :, :-1] if alpha else values
        if full == 65535:
            full = white_level
            _check_white_level(path, int(colours.max()), white_level)
        facts = FileFacts(
            header.format,
            int(opaque).bit_length() if values.dtype.kind == "u" else 32,
            int(colours.max()) if values.dtype.kind == "u" else 0,
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

    Defect is every value from half of the largest value upwards; but where at most 16 distinct
    values occur and they are colours or all below half of the file's range, they are class
    numbers, and every value above zero is defect. The value of a pixel is its largest channel.

    So anti-aliased and lossy grey masks are cut at half, and {0, 1, 5} of VisA, {0, 236} of
    MVTec LOCO, {0, 256} in 16 bits, palettes and red on black count every marked pixel.

    Arguments:
        path: A mask file in any format and depth that `read_image` knows.
        size: (height, width) of the upright image that the mask belongs to.

    Returns:
        The mask, (H, W) bool in the frame of the upright image, True on defects.

    Raises:
        ImageError: The file cannot be used, or its size is another.
    """
    return read_mask_with_facts(path, size)[0]


def read_mask_with_facts(path: Path, size: tuple[int, int]) -> tuple[NDArray[np.bool_], MaskFacts]:
    """`read_mask`, with how the mask is stored."""
    with _blame(path):
        header = _header(path)
        if (header.height, header.width) != tuple(size):
            turned = (header.width, header.height) == tuple(size)
            advice = (
                "it seems to be turned by 90°, as where the image is stored turned and its mask "
                "is not: turn it as the image is shown"
                if turned
                else "save the mask at the size of the image"
            )
            raise ImageError(
                f"{path}: mask is {header.width} × {header.height}, but its image is "
                f"{size[1]} × {size[0]}; {advice}"
            )
        values, full = _decode(path, header)
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


def image_size(path: Path) -> tuple[int, int]:
    """Size (height, width) of the upright image, from the header alone."""
    with _blame(path):
        header = _header(path)
        return header.height, header.width


def reason(error: ImageError, path: Path) -> str:
    """The message of `error` without the path that it begins with."""
    return str(error).removeprefix(f"{path}: ")


def pixel_digest(image: NDArray[np.float32]) -> str:
    """SHA-256, in hex, of the shape and the pixels rounded to 16 bits.

    A copy with another name, other metadata or another lossless format has the same digest.

    Arguments:
        image: HWC float32 RGB in [0, 1], as `read_image` returns it.
    """
    pixels = np.rint(image * np.float32(65535)).astype("<u2")
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def to_input(image: NDArray[np.float32], size: tuple[int, int]) -> torch.Tensor:
    """The one resize of the product: bilinear with antialias, in training and prediction alike.

    Arguments:
        image: HWC float32 RGB in [0, 1], in the frame of the upright image.
        size: (height, width) that the network sees; the aspect is not kept.

    Returns:
        CHW float32 RGB in [0, 1], of `size`.
    """
    import torch
    from torch.nn.functional import interpolate

    batch = torch.from_numpy(np.ascontiguousarray(image, np.float32)).permute(2, 0, 1)[None]
    resized = interpolate(batch, size=size, mode="bilinear", antialias=True)
    return resized[0].clamp(0, 1).contiguous()


@dataclass(frozen=True)
class _Header:
    """What is known of an image before decoding; height and width are those of the upright one."""

    height: int
    width: int
    orientation: int
    decoder: str  # "png16", "tiff" or "pillow"
    format: str


@contextmanager
def _blame(path: Path) -> Iterator[None]:
    """Turns whatever a decoder raises into a ImageError that begins with the path."""
    try:
        yield
    except (ImageError, SettingsError):
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{path}: there is no such file") from error
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{path}: is refused before decoding: {error} Crop it or make it smaller."
        ) from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{path}: is not a JPEG, PNG, TIFF, BMP or WebP image, whatever its name says"
        ) from error
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"{path}: cannot be decoded: {why}") from error


def _header(path: Path) -> _Header:
    with path.open("rb") as file:
        head = file.read(26)
    if not head:
        raise ImageError(f"{path}: is empty (0 bytes)")
    if head[:4] in TIFF_MAGIC:
        with tifffile.TiffFile(path) as tiff:
            page, pages = tiff.pages.first, len(tiff.pages)
            height, width = int(page.imagelength), int(page.imagewidth)
            tag = page.tags.get(ORIENTATION)
            orientation = int(tag.value) if tag else 1
            eight_bits = page.dtype in (np.dtype(bool), np.dtype(np.uint8))
            decoder, form = ("pillow" if eight_bits else "tiff"), "TIFF"
    else:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            orientation = _orientation(image)
            # Further frames of a phone's MPO are previews and depth maps of the first.
            pages = 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
            decoder = "png16" if image.format == "PNG" and head[24] == 16 else "pillow"
            form = "JPEG" if image.format == "MPO" else str(image.format)
    if pages > 1:
        raise ImageError(f"{path}: holds {pages} pages; save each page as an image of its own")
    if height * width > MAX_PIXELS:
        raise ImageError(
            f"{path}: is refused before decoding: it has {height * width} pixels and the limit "
            f"is {MAX_PIXELS}. Crop it or make it smaller."
        )
    if orientation in (5, 6, 7, 8):
        height, width = width, height
    return _Header(height, width, orientation, decoder, form)


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif would decode the whole PNG to look behind the pixels
    return int(image.getexif().get(ORIENTATION, 1))


def _decode(path: Path, header: _Header) -> tuple[NDArray[Any], float]:
    """The stored values, upright, HWC of 1 to 4 channels, and the value that means white.

    Two and four channels end with alpha. White is 255, 65535, 2^bits - 1 or 1.0.
    """
    full, orientation = 255.0, header.orientation
    if header.decoder == "png16":
        values, full = np.asarray(imagecodecs.png_decode(path.read_bytes())), 65535.0
    elif header.decoder == "tiff":
        values, full = _decode_tiff(path)
    else:
        # Opened by handle: by name, Pillow 13 maps an uncompressed TIFF at its turned size.
        with path.open("rb") as file, Image.open(file, formats=FORMATS) as image:
            values = _decode_pillow(image)
            orientation = 1 if image.format == "TIFF" else orientation
    values = values[:, :, None] if values.ndim == 2 else values
    values = _upright(values, orientation)
    if values.shape[:2] != (header.height, header.width):
        raise ImageError(f"{path}: the size in the header is not the size of the pixels")
    return values, full


def _decode_pillow(image: Image.Image) -> NDArray[np.uint8]:
    """8-bit files: (H, W) or HWC uint8 grey, RGB or RGBA; only TIFF is upright already."""
    image.load()
    if image.format == "TIFF":
        image = ImageOps.exif_transpose(image)  # does nothing where Pillow has turned it on load
    if image.mode == "1":
        image = image.convert("L")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    return np.asarray(image)


def _decode_tiff(path: Path) -> tuple[NDArray[Any], float]:
    """TIFF of more than 8 bits, not yet upright: (H, W) or HWC of its own depth, and its white."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        values, bits, axes = np.asarray(page.asarray()), int(page.bitspersample), str(page.axes)
        photometric = getattr(page.photometric, "name", "")
        straight = page.extrasamples[:1] in ((), (tifffile.EXTRASAMPLE.UNASSALPHA,))
    if axes == "SYX":
        values = values.transpose(1, 2, 0)
    elif axes not in ("YX", "YXS"):
        raise ImageError(f"{path}: holds a stack ({axes}); save each layer as one image")
    channels = {"MINISBLACK": (1, 2), "MINISWHITE": (1,), "RGB": (3, 4)}.get(photometric, ())
    supported = values.dtype.kind == "f" or (values.dtype.kind == "u" and bits <= 16)
    if not supported or not channels:
        raise ImageError(
            f"{path}: {values.dtype} {photometric} TIFF is not supported; "
            "save it as 8- or 16-bit grey or RGB"
        )
    if (values.shape[2] if values.ndim == 3 else 1) not in channels:
        raise ImageError(f"{path}: {values.shape[-1]} channels; save it as grey, RGB or RGBA")
    if not straight:
        # Not straight alpha: a channel of unknown meaning, or colours that are multiplied already.
        values = values[:, :, :-1]
    if values.dtype.kind == "f":
        _check_unit_range(path, values)
        return (1 - values if photometric == "MINISWHITE" else values), 1.0
    full = 2**bits - 1
    return (full - values if photometric == "MINISWHITE" else values), float(full)


def _check_unit_range(path: Path, values: NDArray[Any]) -> None:
    broken = ~np.isfinite(values)
    if broken.any():
        count = int(broken.reshape(*values.shape[:2], -1).any(axis=2).sum())
        raise ImageError(f"{path}: {count} non-finite pixels; write finite values in 0..1")
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        outside = (values < 0) | (values > 1)
        count = int(outside.reshape(*values.shape[:2], -1).any(axis=2).sum())
        raise ImageError(
            f"{path}: {count} pixels outside 0..1 (from {low:g} to {high:g}); "
            "scale float images to 0..1, with one factor for all of them"
        )


def _check_white_level(path: Path, largest: int, white_level: int) -> None:
    if largest > white_level:
        raise ImageError(
            f"{path}: holds the value {largest}, above the white level {white_level}; "
            f"set white_level to {fitting_white_level(largest)}"
        )


def _upright(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Applies EXIF tag 274 to an HWC array; unknown values mean upright."""
    if orientation in (5, 6, 7, 8):
        values = values.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    return values


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
