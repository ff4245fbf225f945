"""Decodes image files: the header first, then the stored values, upright.

Every reason not to use a file is an `ImageError` that begins with the file's path.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from cdgp.errors import ImageError, SettingsError

MAX_PIXELS = 178_956_970
"""Larger images are an error, from the header, before decoding (Pillow's own hard limit)."""

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF")
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
ORIENTATION = 0x0112

EXTENSIONS = (
    ".png", ".apng", ".jpg", ".jpeg", ".jfif", ".jpe", ".mpo", ".bmp", ".dib", ".tif", ".tiff",
    ".webp", ".gif", ".avif", ".jp2", ".j2k", ".jpf", ".jpx", ".j2c", ".jpc",
    ".pbm", ".pgm", ".ppm", ".pnm",
)  # fmt: skip
"""Suffixes, in lower case, of the image files that can be read."""

UNREADABLE_EXTENSIONS = {
    ".heic": "HEIC", ".heif": "HEIF", ".hif": "HEIF", ".jxl": "JPEG XL", ".jxr": "JPEG XR",
    ".wdp": "JPEG XR", ".jls": "JPEG-LS", ".psd": "Photoshop", ".psb": "Photoshop", ".xcf": "GIMP",
    ".exr": "OpenEXR", ".hdr": "Radiance HDR", ".pfm": "PFM", ".pam": "PAM", ".tga": "TGA",
    ".dds": "DDS", ".pcx": "PCX", ".ras": "Sun raster", ".sgi": "SGI", ".ico": "icon",
    ".svg": "SVG", ".emf": "EMF", ".wmf": "WMF", ".dcm": "DICOM", ".fits": "FITS", ".fit": "FITS",
    ".dng": "DNG raw", ".cr2": "CR2 raw", ".cr3": "CR3 raw", ".nef": "NEF raw", ".nrw": "NRW raw",
    ".arw": "ARW raw", ".orf": "ORF raw", ".raf": "RAF raw", ".rw2": "RW2 raw", ".pef": "PEF raw",
    ".srw": "SRW raw", ".raw": "raw", ".czi": "CZI", ".nd2": "ND2", ".lif": "LIF",
}  # fmt: skip
"""Suffixes, in lower case, of image files that cannot be decoded here, with their format's name."""

BMP_HEADERS = tuple(bytes([size, 0, 0, 0]) for size in (12, 16, 40, 52, 56, 64, 108, 124))
MAGIC = (
    (b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"), (b"GIF89a", "GIF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"), (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"), (b"8BPS", "Photoshop"),
    (b"\x76\x2f\x31\x01", "OpenEXR"), (b"#?RADIANCE", "Radiance HDR"), (b"#?RGBE", "Radiance HDR"),
    (b"DDS ", "DDS"), (b"SIMPLE  =", "FITS"), (b"gimp xcf", "GIMP"),
    (b"IIRO", "ORF raw"), (b"IIRS", "ORF raw"), (b"IIU\0", "RW2 raw"), (b"FUJIFILMCCD", "RAF raw"),
)  # fmt: skip
"""What files begin with, and the name of their format; others are told in `format_of`."""

# Pillow's hard limit stays; its warning between half the limit and the limit goes.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Header:
    """What an image file says of itself; height and width are those of the upright image."""

    height: int
    width: int
    orientation: int
    decoder: str  # "png16", "tiff" or "pillow"
    format: str


@contextmanager
def image_errors(path: Path) -> Iterator[None]:
    """Turns everything that a decoder raises into an `ImageError` that begins with the path."""
    try:
        yield
    except (ImageError, SettingsError):
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{path}: there is no such file") from error
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{path}: is too large to decode: {error} Crop it or make it smaller."
        ) from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{path}: is not a JPEG, PNG, TIFF, BMP or WebP image, whatever its name says; "
            "export it again as one of these"
        ) from error
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"{path}: cannot be decoded: {why}") from error


def read_header(path: Path) -> Header:
    """Size, orientation and format, without decoding any pixel."""
    with path.open("rb") as file:
        head = file.read(26)
    if not head:
        raise ImageError(f"{path}: is empty (0 bytes); copy it again")
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
            f"{path}: is too large to decode: it has {height * width} pixels and the limit is "
            f"{MAX_PIXELS}. Crop it or make it smaller."
        )
    if orientation in (5, 6, 7, 8):
        height, width = width, height
    return Header(height, width, orientation, decoder, form)


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif would decode the whole PNG to look behind the pixels
    return int(image.getexif().get(ORIENTATION, 1))


def decode(path: Path, header: Header) -> tuple[NDArray[Any], float]:
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
        raise ImageError(f"{path}: the size in the header is not that of the pixels; save it again")
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


def _upright(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Applies EXIF tag 274 to an HWC array; unknown values mean upright."""
    if orientation in (5, 6, 7, 8):
        values = values.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    return values


def format_of(head: bytes) -> str:
    """The image format that the first 32 bytes of a file tell, readable here or not; "" if none."""
    if head[:4] in TIFF_MAGIC:
        return "TIFF"
    if head[4:8] == b"ftyp":
        brands = {head[at : at + 4] for at in (8, 16, 20, 24, 28)}
        if brands & {b"avif", b"avis"}:
            return "AVIF"
        return "HEIC" if brands & {b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1"} else ""
    if head[:4] == b"RIFF":
        return "WEBP" if head[8:12] == b"WEBP" else ""
    if head[:2] == b"BM":
        return "BMP" if head[14:18] in BMP_HEADERS else ""
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return "PNM" if head[3:4].isdigit() or head[3:4] in (b"#", b" ", b"\n", b"\r") else ""
    return next((name for magic, name in MAGIC if head.startswith(magic)), "")


def is_image(path: Path) -> bool:
    """Whether a file begins like an image of any known format, whatever its name.

    A file that cannot be opened is none.
    """
    try:
        with path.open("rb") as file:
            return bool(format_of(file.read(32)))
    except OSError:
        return False
