"""Decodes JPEG: what libjpeg only warns of is an error, and so is a scan that is not there.

libjpeg fills what it does not find with grey, and most readers drop its warnings. simplejpeg
(libjpeg-turbo) raises them. A progressive file whose last scans are missing is not even warned of,
so the scans are counted here (ITU-T T.81, G.1.1).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from cdgp.errors import ImageError

MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
"""The next marker within or behind a scan: neither a stuffed byte nor a restart marker."""
FRAMES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB)
LOSSLESS = (0xC3, 0xCB)
SCAN, END = 0xDA, 0xD9
BARE = (0x01, 0xD8)
"""Markers without a length."""
UNSENT = 255


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
    missing = missing_scans(data)
    if missing:
        raise ImageError(f"{path}: is incomplete: {missing}; copy it again from its source")
    return np.asarray(values), kind == "CMYK"


def _why(message: str) -> str:
    """The decoder's message as a reason and an advice."""
    if "subsampling level" in message:
        return "has an unusual chroma subsampling, which is not supported; save it as 4:4:4 or PNG"
    if "Unsupported" in message or "not supported" in message:
        return f"is a kind of JPEG that is not supported ({message}); save it as PNG"
    return f"is damaged or truncated ({message}); copy it again from its source"


def missing_scans(data: bytes) -> str:
    """What the scans of a JPEG leave out, or "" where they hold every coefficient.

    Each scan sends the coefficients Ss to Se of its components down to bit Al; an image is whole
    when all 64 of each component have come down to bit 0.
    """
    frame, lowest = 0, dict[int, NDArray[np.uint8]]()
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
        elif kind == SCAN and body:
            count = body[0]
            first, last, bit = body[2 * count + 1], body[2 * count + 2], body[2 * count + 3] & 15
            if frame in LOSSLESS:
                first, last, bit = 0, 63, 0
            for part in body[1 : 2 * count : 2]:
                lowest[part][first : last + 1] = bit
    unsent = sum(bool((bits == UNSENT).any()) for bits in lowest.values())
    coarse = sum(bool((bits != 0).any()) for bits in lowest.values())
    if unsent:
        return f"{unsent} of {len(lowest)} colour components lack a scan"
    return f"{coarse} of {len(lowest)} colour components lack their last bits" if coarse else ""
