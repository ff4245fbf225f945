"""Decodes JPEG: what libjpeg only warns of is an error, and so is a scan that is not there.

libjpeg fills what it does not find with grey, and most readers drop its warnings. simplejpeg
(libjpeg-turbo) raises them. A progressive file whose last scans are missing, and blocks of zeros,
are not even warned of, so the scans are judged here (ITU-T T.81, B.2 and G.1.1).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from cdgp.errors import ImageError

MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""The next marker within or behind a scan: neither a stuffed byte nor a restart marker."""
FRAMES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB)
LOSSLESS = (0xC3, 0xCB)
HUFFMAN = (0xC0, 0xC1, 0xC2)
TABLES, SCAN, END = 0xC4, 0xDA, 0xD9
BARE = (0x01, 0xD8)
"""Markers without a length."""
UNSENT = 255
RUNS = tuple(range(0x10, 0xF0, 0x10))
"""Progressive symbols for several ends of block at once (EOB1 to EOB14)."""
FLAT = b"\0"
ZEROS = bytes(64)


def decode_jpeg(path: Path, data: bytes) -> NDArray[np.uint8]:
    """The stored image, not yet upright, (H, W, 1) grey or HWC RGB.

    CMYK follows Adobe's convention (0 is full ink), as in Pillow.

    Raises:
        ImageError: The decoder warns or fails, or a scan is missing.
    """
    values, cmyk = _decoded(path, data)
    return np.asarray(Image.fromarray(255 - values, "CMYK").convert("RGB")) if cmyk else values


def check_jpeg(path: Path, data: bytes) -> None:
    """Raises ImageError where `decode_jpeg` would, for JPEG data within a TIFF."""
    _decoded(path, data)


def _decoded(path: Path, data: bytes) -> tuple[NDArray[np.uint8], bool]:
    """The values as they are stored, and whether they are CMYK."""
    try:
        space = str(simplejpeg.decode_jpeg_header(data)[2]).upper()
        kind = {"GRAY": "GRAY", "CMYK": "CMYK", "YCCK": "CMYK"}.get(space, "RGB")
        values = simplejpeg.decode_jpeg(data, kind)
    except ValueError as error:
        raise ImageError(f"{path}: {_why(str(error))}") from error
    faults = scan_faults(data)
    if faults:
        raise ImageError(f"{path}: is damaged or incomplete: {faults}; copy it again")
    return np.asarray(values), kind == "CMYK"


def _why(message: str) -> str:
    """The decoder's message as a reason and an advice."""
    if "subsampling level" in message:
        return "has an unusual chroma subsampling, which is not supported; save it as 4:4:4 or PNG"
    if "Unsupported" in message or "not supported" in message:
        return f"is a kind of JPEG that is not supported ({message}); save it as PNG"
    if "Corrupt" not in message and "Premature" not in message:
        return f"cannot be decoded without a warning ({message}); save it again"
    return f"is damaged or truncated ({message}); copy it again from its source"


def scan_faults(data: bytes) -> str:
    """What is wrong with the scans of a JPEG that libjpeg does not tell, or "".

    Each scan sends the coefficients Ss to Se of its components down to bit Al; an image is whole
    when all 64 of each component have come down to bit 0. And a storage error leaves blocks of
    zeros, which are valid code: they are a fault where they would not even mean flat blocks.
    """
    frame, lowest, tables = 0, dict[int, NDArray[np.uint8]](), dict[int, bytes]()
    at = 2
    while found := MARKER.search(data, at):
        kind, at = found.group(1)[0], found.end()
        if kind == END:
            break
        if kind in BARE:
            continue
        body = data[at + 2 : at + int.from_bytes(data[at : at + 2], "big")]
        at += 2 + len(body)
        if kind in FRAMES:
            frame = kind
            lowest = {part: np.full(64, UNSENT, np.uint8) for part in body[6::3]}
        elif kind == TABLES:
            tables |= _symbols(body)
        elif kind == SCAN and body:
            scan = _Scan(body)
            following = MARKER.search(data, at)
            end = following.start() if following else len(data)
            zeros = ZEROS * (8 if scan.high else 1)
            if data.find(zeros, at, end) >= 0 and not scan.zeros_are_flat(frame, tables):
                return "its scan holds a block of zeros"
            at = end
            for part in scan.parts:
                whole = frame in LOSSLESS
                lowest[part][0 if whole else scan.first : 64 if whole else scan.last + 1] = (
                    0 if whole else scan.low
                )
    unsent = sum(bool((bits == UNSENT).any()) for bits in lowest.values())
    coarse = sum(bool((bits != 0).any()) for bits in lowest.values())
    if unsent:
        return f"{unsent} of {len(lowest)} colour components lack a scan"
    return f"{coarse} of {len(lowest)} colour components lack their last bits" if coarse else ""


class _Scan:
    """The header of a scan (ITU-T T.81, B.2.3)."""

    def __init__(self, body: bytes) -> None:
        count = body[0]
        self.parts = body[1 : 2 * count : 2]
        self.tables = body[2 : 2 * count + 1 : 2]
        self.first, self.last, bits = body[2 * count + 1 : 2 * count + 4]
        self.high, self.low = bits >> 4, bits & 15

    def zeros_are_flat(self, frame: int, tables: dict[int, bytes]) -> bool:
        """Whether zeros may be stored: as flat blocks, or as DC bits that have no code.

        A table's first symbol has the code of zeros alone. Flat is a DC difference of 0 with an end
        of block behind it; where there are codes for runs of these, no encoder repeats them.
        """
        if frame not in HUFFMAN or (self.high and not self.first):
            return True
        dc = [tables.get(table >> 4, FLAT) for table in self.tables] if not self.first else []
        ac = [tables.get(16 + (table & 15), FLAT) for table in self.tables] if self.last else []
        runs = any(symbol in RUNS for symbols in ac for symbol in symbols)
        return not runs and all(symbols[0] == 0 for symbols in (*dc, *ac))


def _symbols(body: bytes) -> dict[int, bytes]:
    """The symbols of Huffman tables, by the table's number, and 16 more for AC (B.2.4.2)."""
    found, at = dict[int, bytes](), 0
    while at + 17 < len(body):
        table, count = body[at], sum(body[at + 1 : at + 17])
        found[(table & 15) + 16 * (table >> 4)] = body[at + 17 : at + 17 + count]
        at += 17 + count
    return found
