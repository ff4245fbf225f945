"""Decodes image files: the header first, then the stored values, upright.

A file is used whole or not at all: what a decoder warns of, fills or guesses is a reason to refuse.
Every such reason is an `ImageError` that begins with the file's path and says what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from cdgp.data.formats import (
    EXTENSIONS,
    UNREADABLE_EXTENSIONS,
    Decoder,
    Header,
    check_pages,
    check_runs,
    check_size,
    format_of,
    is_image,
    orientation_of,
    pillow_values,
    upright,
)  # fmt: skip
from cdgp.data.jpeg import decode_jpeg
from cdgp.data.jpeg2000 import decode_jpeg2000, read_jpeg2000_header
from cdgp.data.png import decode_png, read_png_header
from cdgp.data.pnm import decode_pnm, read_pnm_header
from cdgp.data.tiff import decode_tiff, read_tiff_header
from cdgp.errors import ImageError, SettingsError

__all__ = [
    "EXTENSIONS", "UNREADABLE_EXTENSIONS", "Header", "decode", "image_errors", "is_image",
    "read_header",
]  # fmt: skip

FORMATS = {
    "JPEG": ("JPEG",), "BMP": ("BMP",), "WEBP": ("WEBP",), "GIF": ("GIF",), "AVIF": ("AVIF",)
}  # fmt: skip
"""The formats whose header Pillow reads, by the name of `format_of`."""
READABLE = "JPEG, PNG, TIFF, BMP, WebP, GIF, AVIF, JPEG 2000 or PGM/PPM"
ORIENTATION = 0x0112

# Pillow's hard limit stays; its warning between half the limit and the limit goes.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# So do its riddles about damaged EXIF blocks, which say nothing of the pixels and name no file.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


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
            f"{path}: begins like an image, but its header is damaged or of a kind that is not "
            "supported; copy it again or save it as PNG"
        ) from error
    except MemoryError as error:
        raise ImageError(
            f"{path}: needs more memory than there is; free some, crop it or make it smaller"
        ) from error
    except Exception as error:
        reason = getattr(error, "strerror", None)
        if reason:
            raise ImageError(f"{path}: cannot be read: {reason}; check the place") from error
        why = str(error) or type(error).__name__
        raise ImageError(
            f"{path}: cannot be decoded ({why}): it is damaged, truncated or of a kind that is not "
            "supported; copy it again or save it as PNG"
        ) from error


def read_header(path: Path, first_page: bool = False) -> Header:
    """Size, orientation and format, without decoding any pixel.

    Arguments:
        path: A file of any name.
        first_page: Whether a file of several pages or frames is its first one; else it is refused.
            Thumbnails and the levels of a pyramid are no pages.

    Raises:
        ImageError: The file is no image that can be read, holds several, or is too large.
    """
    with path.open("rb") as file:
        head = file.read(32)
    if not head:
        raise ImageError(f"{path}: is empty (0 bytes); copy it again")
    form = format_of(head)
    by_name = UNREADABLE_EXTENSIONS.get(path.suffix.lower(), "")
    if form == "TIFF" and not by_name:
        header = read_tiff_header(path, first_page)
    elif form == "PNG":
        header = read_png_header(path, path.read_bytes(), first_page)
    elif form == "PNM":
        header = read_pnm_header(path, path.read_bytes(), first_page)
    elif form == "JPEG2000":
        header = read_jpeg2000_header(path, path.read_bytes())
    elif form in FORMATS:
        header = _pillow_header(path, form, first_page)
    elif by_name or form:
        name = by_name or form
        article = "an" if name[0] in "AEIO" else "a"
        raise ImageError(
            f"{path}: is {article} {name} image, which cannot be decoded here; save it as PNG"
        )
    else:
        raise ImageError(
            f"{path}: is not a {READABLE} image, whatever its name says; export it again as one "
            "of these"
        )
    check_size(path, header.height, header.width)
    if header.orientation in (5, 6, 7, 8):
        return replace(header, height=header.width, width=header.height)
    return header


def _pillow_header(path: Path, form: str, first_page: bool) -> Header:
    with Image.open(path, formats=FORMATS[form]) as image:
        # Further frames of a phone's MPO are previews and depth maps of the first.
        pages = 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
        check_pages(path, pages, first_page)
        orientation = orientation_of(image.getexif().get(ORIENTATION))
        decoder: Decoder = "jpeg" if form == "JPEG" else "pillow"
        if form == "BMP":
            _check_bmp(path, image)
        return Header(image.height, image.width, orientation, decoder, form)


def _check_bmp(path: Path, image: Image.Image) -> None:
    """Checks that an uncompressed BMP does not hold more pixels than its size takes.

    Its header gives the size and, in most files, the bytes of the pixels (`biSizeImage`).
    """
    with path.open("rb") as file:
        head = file.read(54)
    start, header_size = (int.from_bytes(head[at : at + 4], "little") for at in (10, 14))
    compression, stored = (int.from_bytes(head[at : at + 4], "little") for at in (30, 34))
    if header_size < 40 or compression not in (0, 3):
        return
    row = -(-image.width * int.from_bytes(head[28:30], "little") // 32) * 4
    taken = row * image.height
    # Some programs count a few bytes of padding in.
    if taken + row <= stored <= path.stat().st_size - start:
        raise ImageError(
            f"{path}: holds {stored} bytes of pixels, but the size in its header, {image.width} × "
            f"{image.height}, takes {taken}; save it again"
        )


def decode(path: Path, header: Header) -> tuple[NDArray[Any], float]:
    """The stored values, upright, HWC of 1 to 4 channels, and the value that means white.

    Two and four channels end with alpha. White is 255, 65535, 2^bits - 1, the largest value that a
    PGM or PPM file states, or 1.0.

    Raises:
        ImageError: The file is damaged, incomplete, or of a kind that is not supported.
    """
    full, orientation = 255.0, header.orientation
    values: NDArray[Any]
    if header.decoder == "tiff":
        values, full, orientation = decode_tiff(path, header)
    elif header.decoder == "pillow":
        if header.format == "AVIF":
            content = path.read_bytes()
            check_runs(path, content[content.find(b"mdat") :])
        with Image.open(path, formats=FORMATS[header.format]) as image:
            values = pillow_values(image)
    elif header.decoder == "jpeg":
        values = decode_jpeg(path, path.read_bytes())
    elif header.decoder == "png":
        values, full = decode_png(path, path.read_bytes())
    elif header.decoder == "pnm":
        values, full = decode_pnm(path, path.read_bytes())
    else:
        values, full = decode_jpeg2000(path, path.read_bytes())
    values = values[:, :, None] if values.ndim == 2 else values
    values = upright(values, orientation)
    if values.shape[:2] != (header.height, header.width):
        raise ImageError(f"{path}: the size in the header is not that of the pixels; save it again")
    return values, full
