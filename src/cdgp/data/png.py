"""Decodes PNG with libpng, which misses no row; text chunks, whatever their state, are left out.

Pillow skips the checksums of pixel data and stays silent where rows are missing. What libpng only
warns of, on standard error, is judged here: rows that the header does not count, transparency that
does not fit the pixels.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdgp.data.formats import Header, check_pages, orientation_of
from cdgp.errors import ImageError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
USED = (*CRITICAL, b"tRNS", b"eXIf", b"acTL")
"""The chunks that decide on the pixels; only these must have a right checksum."""
INDEXED, GREYS = 3, (0, 4)
"""Kinds of colour (PNG 11.2.1)."""
CHANNELS = {0: 1, 2: 3, INDEXED: 1, 4: 2, 6: 4}
TRANSPARENT = {0: 2, 2: 6}
"""Bytes of a tRNS chunk, by the kind of colour; for palettes one an entry at most."""
ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""The first column and row, and the steps of both, of each pass of interlacing (PNG 8.2)."""
ORIENTATION = 0x0112


def read_png_header(path: Path, data: bytes, first_page: bool) -> Header:
    """Size and orientation; the frames of an animation count as pages."""
    chunks = dict[bytes, bytes]()
    for name, body in _chunks(path, data, check=False):
        chunks.setdefault(name, body)
    header = chunks.get(b"IHDR", b"")
    if len(header) != 13:
        raise ImageError(f"{path}: is a PNG without its header chunk; copy it again")
    check_pages(path, int.from_bytes(chunks.get(b"acTL", b"")[:4], "big"), first_page)
    exif = Image.Exif()
    with suppress(Exception):  # a damaged EXIF block turns nothing
        exif.load(chunks.get(b"eXIf", b""))
    width, height = (int.from_bytes(header[at : at + 4], "big") for at in (0, 4))
    return Header(height, width, orientation_of(exif.get(ORIENTATION)), "png", "PNG")


def decode_png(path: Path, data: bytes) -> tuple[NDArray[Any], float]:
    """The stored image, not yet upright, (H, W) or HWC of 8 or 16 bits, and its white.

    Palettes are looked up; 1, 2 and 4 bits become 8.
    """
    kept = [SIGNATURE]
    header, palette, coded, ended = b"", b"", list[bytes](), False
    for name, body in _chunks(path, data, check=True):
        if name == b"tRNS":
            _check_transparency(path, header[9], palette, body, behind=bool(coded))
        if name == b"PLTE" and header[9] in GREYS:
            continue  # of no meaning there
        if name in (*CRITICAL, b"tRNS"):
            kept.append(_chunk(name, body))
        elif name[:1].isupper():
            raise ImageError(
                f"{path}: holds the unknown PNG chunk {name.decode('latin-1')!r}, without which it "
                "cannot be shown; save it again as a plain PNG"
            )
        if name == b"IHDR":
            header = body
        elif name == b"PLTE":
            palette = body
        elif name == b"IDAT":
            coded.append(body)
        ended |= name == b"IEND"
    if not ended:
        raise ImageError(f"{path}: is truncated: its end chunk is missing; copy it again")
    _check_length(path, header, b"".join(coded))
    whole = b"".join(kept)
    try:
        values = np.asarray(imagecodecs.png_decode(whole))
    except imagecodecs.PngError as error:
        raise ImageError(f"{path}: is damaged or truncated ({error}); copy it again") from error
    if header[9] == INDEXED and len(palette) < 3 * 2 ** header[8]:
        with Image.open(io.BytesIO(whole)) as image:
            if int(np.asarray(image).max()) >= len(palette) // 3:
                raise ImageError(
                    f"{path}: is damaged: some pixels are numbers that its palette does not hold; "
                    "save it again"
                )
    return values, 65535.0 if values.dtype == np.uint16 else 255.0


def _check_transparency(path: Path, kind: int, palette: bytes, body: bytes, behind: bool) -> None:
    most = len(palette) // 3 if kind == INDEXED else TRANSPARENT.get(kind, 0)
    exact = kind in TRANSPARENT
    if behind or len(body) > most or (exact and len(body) < most):
        raise ImageError(
            f"{path}: is damaged: its transparency (tRNS) does not fit its pixels; save it again"
        )


def _check_length(path: Path, header: bytes, coded: bytes) -> None:
    """Whether the compressed pixels are as many as the header says: libpng drops further ones."""
    width, height = (int.from_bytes(header[at : at + 4], "big") for at in (0, 4))
    depth, expected = header[8] * CHANNELS[header[9]], 0
    for left, top, right, down in ADAM7 if header[12] else ((0, 0, 1, 1),):
        columns, rows = (width - left + right - 1) // right, (height - top + down - 1) // down
        expected += rows * (1 + (columns * depth + 7) // 8) if columns else 0
    try:
        imagecodecs.deflate_decode(coded, out=expected)
    except imagecodecs.DeflateError as error:
        if "INSUFFICIENT_SPACE" not in str(error):
            return  # libpng tells damage better
        raise ImageError(
            f"{path}: holds more pixels than the {width} × {height} of its header; save it again"
        ) from error


def _chunks(path: Path, data: bytes, check: bool) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of every chunk up to IEND; what follows IEND is no part of a PNG.

    With `check`, ImageError where a chunk that decides on the pixels has a wrong checksum.
    """
    at = len(SIGNATURE)
    while at + 12 <= len(data):
        size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body, checksum = data[at + 8 : at + 8 + size], data[at + 8 + size : at + 12 + size]
        if len(body) + len(checksum) < size + 4:
            return  # the file ends within this chunk
        if check and name in USED and zlib.crc32(name + body) != int.from_bytes(checksum, "big"):
            raise ImageError(
                f"{path}: is damaged: the checksum of its chunk {name.decode()} at byte {at} is "
                "wrong; copy it again from its source"
            )
        yield name, body
        if name == b"IEND":
            return
        at += 12 + size


def _chunk(name: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(name + body).to_bytes(4, "big")
    return len(body).to_bytes(4, "big") + name + body + checksum
