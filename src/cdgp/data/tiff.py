"""Reads TIFF: which page is the image, whether all of its data is there, and its values.

Decoders fill strips and tiles that are missing, and libtiff stays silent on wrong checksums and on
the warnings of libjpeg. So the header and the stored segments are judged here first.
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageOps

from cdgp.data.formats import (
    Header,
    check_pages,
    check_size,
    orientation_of,
    pillow_values,
    upright,
)
from cdgp.data.jpeg import check_jpeg
from cdgp.errors import ImageError

ORIENTATION, OLD_SUBFILE, SUB_PAGES = 274, 255, 330
PHOTOMETRIC, STRIPS, TILES = 262, 273, 324
USED_TAGS = {
    254, 255, *range(256, 260), 262, 266, 273, 274, *range(277, 280), 284, 292, 293, 317, 320,
    *range(322, 326), *range(332, 335), 338, 339, 347, 530, 532,
}  # fmt: skip
"""The tags that decide on the pixels (TIFF 6.0), thumbnails and turning."""
REDUCED, OLD_REDUCED = 1, 2
NONE, FAX, LZW, OLD_JPEG, JPEG, PACKBITS = 1, (2, 3, 4), 5, 6, 7, 32773
DEFLATE = (8, 32946, 50013)
PILLOW = (NONE, LZW, JPEG, PACKBITS, *DEFLATE[:2], *FAX, 34925, 50000, 50001)
"""The compressions that Pillow reads: none, LZW, JPEG, PackBits, deflate, fax, LZMA, Zstd, WebP."""
OWN = {"MINISBLACK": (1, 2), "MINISWHITE": (1,), "RGB": (3, 4)}
"""How many channels tifffile's values may have, by photometric interpretation."""
MOST_CHANNELS = {"SEPARATED": 6}
SAVE = "save it as 8- or 16-bit grey or RGB"

# What tifffile logs of damage is a refusal with its reason here; of metadata, it is of no use.
logging.getLogger("tifffile").setLevel(logging.CRITICAL)


def read_tiff_header(path: Path, first_page: bool) -> Header:
    """Size, orientation and decoder of the first page of full resolution, without its pixels.

    Raises:
        ImageError: Several pages, too many channels, too large, or segments that are not there.
    """
    with tifffile.TiffFile(path) as tiff:
        pages: list[Any] = [page.aspage() for page in tiff.pages]
        if not pages:
            raise ImageError(f"{path}: is a TIFF without a directory: it is cut off; copy it again")
        full = [i for i, page in enumerate(pages) if not _is_reduced(page)]
        if not full and any(SUB_PAGES in page.tags for page in pages):
            raise ImageError(
                f"{path}: holds a thumbnail, and the image in a sub-directory, as raw files of "
                f"cameras do; {SAVE} TIFF"
            )
        number = full[0] if full else 0
        page = pages[number]
        stacked = int((tiff.imagej_metadata or {}).get("images", 1)) if tiff.is_imagej else 1
        check_pages(path, max(len(full), stacked), first_page)
        _check_tags(path, tiff, page)
        height, width = int(page.imagelength), int(page.imagewidth)
        tag = page.tags.get(ORIENTATION)
        orientation = orientation_of(tag.value) if tag else 1
        _check_page(path, page)
        _check_segments(path, page, path.stat().st_size)
        return Header(height, width, orientation, "tiff", "TIFF", number)


def _is_reduced(page: Any) -> bool:
    """Whether a page is a thumbnail or a level of a pyramid."""
    old = page.tags.get(OLD_SUBFILE)
    return bool(page.subfiletype & REDUCED) or (old is not None and old.value == OLD_REDUCED)


def _check_tags(path: Path, tiff: tifffile.TiffFile, page: Any) -> None:
    """Whether every stated tag that the pixels hang on was read: a lost one becomes its default."""
    form, file = tiff.tiff, tiff.filehandle
    file.seek(page.offset)
    count = int(struct.unpack(form.tagnoformat, file.read(form.tagnosize))[0])
    entries = file.read(count * form.tagsize)
    starts = range(0, len(entries), form.tagsize)
    stated = {int(struct.unpack_from(form.byteorder + "H", entries, at)[0]) for at in starts}
    lost = sorted(code for code in stated & USED_TAGS if code not in page.tags)
    if PHOTOMETRIC not in stated:
        lost.append(PHOTOMETRIC)
    if lost:
        raise ImageError(
            f"{path}: is damaged: the tag {lost[0]} of its directory cannot be read; copy it again"
        )


def _check_page(path: Path, page: Any) -> None:
    photometric = _name(page.photometric)
    channels, bits = int(page.samplesperpixel), int(page.bitspersample)
    if channels > MOST_CHANNELS.get(photometric, 4):
        raise ImageError(f"{path}: {channels} channels; save it as grey, RGB or RGBA")
    if int(page.imagedepth) > 1:
        raise ImageError(f"{path}: holds a stack ({page.axes}); save each layer as one image")
    check_size(path, int(page.imagelength), int(page.imagewidth), channels * math.ceil(bits / 8))
    if photometric == "PALETTE" and 0 < int(np.max(page.colormap)) < 256:
        raise ImageError(
            f"{path}: its palette holds 8-bit values where TIFF has 16 bits, so that readers "
            f"disagree (black, or colours); {SAVE}"
        )
    if page.compression == OLD_JPEG:
        raise ImageError(f"{path}: old-style JPEG in TIFF is not supported; {SAVE}")
    if not _by_tifffile(page) and (page.compression not in PILLOW or bits > 8):
        raise ImageError(
            f"{path}: {page.dtype} {photometric} TIFF with {_name(page.compression)} compression "
            f"is not supported; {SAVE}"
        )


def _by_tifffile(page: Any) -> bool:
    """Whether tifffile's values are the image; else Pillow converts (palettes, CMYK, YCbCr)."""
    return _name(page.photometric) in OWN and int(page.bitspersample) >= 8


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))


def _check_segments(path: Path, page: Any, size: int) -> None:
    """Whether every strip or tile is in the file, and long enough where it is not compressed."""
    expected = math.prod(page.chunked)
    found = list(zip(page.dataoffsets, page.databytecounts, strict=False))
    outside = sum(offset < 8 or count < 1 or offset + count > size for offset, count in found)
    if len(found) < expected or outside:
        missing = max(expected - len(found), 0) + outside
        raise ImageError(
            f"{path}: {missing} of {expected} strips or tiles are not in the file: it is truncated "
            "or was never finished; copy it again"
        )
    tag = page.tags.get(TILES if page.is_tiled else STRIPS)
    if tag is not None and int(tag.count) > expected:
        raise ImageError(
            f"{path}: holds {tag.count} strips or tiles, but an image of {page.imagewidth} × "
            f"{page.imagelength} has {expected}: its size is damaged; copy it again"
        )
    if page.compression == NONE:
        for number, count in enumerate(page.databytecounts[:expected]):
            _check_length(path, page, number, count)
        stored, needed = sum(page.databytecounts[:expected]), _bytes(page)
        if stored < needed:
            raise ImageError(
                f"{path}: holds {stored} bytes of pixels, but its header claims {needed}; "
                "save it again"
            )


def _bytes(page: Any) -> int:
    """Bytes of all pixels of an uncompressed page, without the padding of tiles."""
    packed = _name(page.photometric) == "YCBCR"  # chroma may be stored at a lower resolution
    samples = 1 if page.planarconfig == 2 or packed else int(page.samplesperpixel)
    planes = int(page.samplesperpixel) if page.planarconfig == 2 else 1
    row = math.ceil(int(page.imagewidth) * samples * int(page.bitspersample) / 8)
    return planes * int(page.imagelength) * row


def decode_tiff(path: Path, header: Header) -> tuple[NDArray[Any], float, int]:
    """The image, (H, W) or HWC, its white, and the orientation that is left to apply."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[header.page].aspage()
        _check_codes(path, page)
        if _by_tifffile(page):
            values, white = _values(path, page)
            return values, white, header.orientation
        fax = np.asarray(page.asarray()) > 0 if page.compression in FAX else None
    # Opened by handle: by name, Pillow 13 maps an uncompressed TIFF at its turned size.
    with path.open("rb") as file, Image.open(file, formats=("TIFF",)) as image:
        image.seek(header.page)
        image.load()
        if fax is not None:
            _check_fax(path, np.asarray(image.convert("L")) > 0, fax, header.orientation)
        turned = ImageOps.exif_transpose(image)  # does nothing where Pillow has turned it on load
        return pillow_values(turned), 255.0, 1


def _check_fax(
    path: Path, found: NDArray[np.bool_], other: NDArray[np.bool_], orientation: int
) -> None:
    """Fax codes have no checksum and libtiff guesses on: a second decoder must see the same."""
    other = upright(other[:, :, None], orientation)[:, :, 0]
    if found.shape == other.shape and len(np.unique(found ^ other)) > 1:
        raise ImageError(f"{path}: is damaged: its fax code breaks off; copy it again")


def _check_codes(path: Path, page: Any) -> None:
    """Judges compressed segments where decoders do not."""
    if page.compression not in (LZW, JPEG, PACKBITS, *DEFLATE):
        return
    for number, offset in enumerate(page.dataoffsets):
        page.parent.filehandle.seek(offset)
        data = page.parent.filehandle.read(page.databytecounts[number])
        if page.compression == JPEG:
            check_jpeg(path, page.jpegtables[:-2] + data[2:] if page.jpegtables else data)
            continue
        if page.compression == LZW:
            if page.fillorder == 1:  # else the codes' bits are reversed
                _check_length(path, page, number, len(imagecodecs.lzw_decode(data)))
            continue
        try:
            if page.compression == PACKBITS:
                length = len(imagecodecs.packbits_decode(data))
            else:
                length = len(zlib.decompress(data))
        except (imagecodecs.PackbitsError, zlib.error) as error:
            raise ImageError(
                f"{path}: is damaged in strip or tile {number} ({error}); copy it again"
            ) from error
        needed, most, _ = _segment_bytes(page, number)
        if length < needed or (page.compression == PACKBITS and length > most):
            raise ImageError(
                f"{path}: is damaged: strip or tile {number} holds {length} bytes instead of "
                f"{needed}; copy it again"
            )


def _check_length(path: Path, page: Any, number: int, length: int) -> None:
    """Refuses a strip or tile with a row too many: a narrower or lower image was claimed."""
    _, most, row = _segment_bytes(page, number)
    if length >= most + row:
        raise ImageError(
            f"{path}: strip or tile {number} holds {length} bytes, but an image of "
            f"{page.imagewidth} × {page.imagelength} has {most} there: its size is damaged; "
            "copy it again"
        )


def _segment_bytes(page: Any, number: int) -> tuple[int, int, int]:
    """Bytes of a strip or tile at least and at most, and of a row; the last strip may be padded."""
    if _name(page.photometric) == "YCBCR":
        return 0, 2**62, 1  # chroma may be stored at a lower resolution
    samples = 1 if page.planarconfig == 2 else int(page.samplesperpixel)
    width = page.tilewidth if page.is_tiled else page.imagewidth
    row = math.ceil(int(width) * samples * int(page.bitspersample) / 8)
    height = int(page.tilelength if page.is_tiled else min(page.rowsperstrip, page.imagelength))
    if page.is_tiled:
        return height * row, height * row, row
    strips = math.ceil(int(page.imagelength) / height)
    rows = min(height, int(page.imagelength) - number % strips * height)
    return rows * row, height * row, row


def _values(path: Path, page: Any) -> tuple[NDArray[Any], float]:
    """Grey or RGB of 8 or more bits, not yet upright: (H, W) or HWC, and its white."""
    values, bits, axes = np.asarray(page.asarray()), int(page.bitspersample), str(page.axes)
    photometric = _name(page.photometric)
    if axes == "SYX":
        values = values.transpose(1, 2, 0)
    elif axes not in ("YX", "YXS"):
        raise ImageError(f"{path}: holds a stack ({axes}); save each layer as one image")
    supported = values.dtype.kind == "f" or (values.dtype.kind == "u" and bits <= 16)
    if not supported:
        raise ImageError(f"{path}: {values.dtype} {photometric} TIFF is not supported; {SAVE}")
    if (values.shape[2] if values.ndim == 3 else 1) not in OWN[photometric]:
        raise ImageError(f"{path}: {values.shape[-1]} channels; save it as grey, RGB or RGBA")
    if page.extrasamples[:1] not in ((), (tifffile.EXTRASAMPLE.UNASSALPHA,)):
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
