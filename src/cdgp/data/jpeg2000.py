"""Decodes JPEG 2000 (.jp2, .j2k) with OpenJPEG, grey or RGB of 1 to 16 bits."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from cdgp.data.formats import Header, check_runs
from cdgp.errors import ImageError

START = b"\xff\x4f\xff\x51"
PALETTE = b"pclr"
COLOUR = b"colr\x01"
SPACES = (16, 17, 18)
"""Enumerated colour spaces of a .jp2 that OpenJPEG gives as RGB or grey: sRGB, grey, sYCC."""


class Layout(NamedTuple):
    """The SIZ segment of the codestream (ITU-T T.800, A.5.1)."""

    height: int
    width: int
    channels: int
    bits: int


def read_jpeg2000_header(path: Path, data: bytes) -> Header:
    """The size, from the codestream."""
    layout = _layout(path, data)
    return Header(layout.height, layout.width, 1, "jpeg2000", "JPEG2000")


def decode_jpeg2000(path: Path, data: bytes) -> tuple[NDArray[Any], float]:
    """The image, (H, W) or HWC, and its white, 2^bits - 1."""
    layout = _layout(path, data)
    check_runs(path, data[data.find(START) :])
    try:
        values = np.asarray(imagecodecs.jpeg2k_decode(data))
    except imagecodecs.Jpeg2kError as error:
        raise ImageError(
            f"{path}: is damaged, truncated or of an unsupported kind ({error}); "
            "copy it again or save it as PNG"
        ) from error
    return values, float(2**layout.bits - 1)


def _layout(path: Path, data: bytes) -> Layout:
    at = data.find(START)
    if at < 0 or len(data) < at + 42:
        raise ImageError(f"{path}: is a JPEG 2000 file without its image; copy it again")
    width, height, left, top = struct.unpack(">4I", data[at + 8 : at + 24])
    channels = int.from_bytes(data[at + 40 : at + 42], "big")
    parts = [data[at + 42 + 3 * i : at + 45 + 3 * i] for i in range(min(channels, 5))]
    head = data[:at]
    space = head[head.find(COLOUR) + 7 :][:4] if COLOUR in head else b"\0\0\0\x10"
    trouble = ""
    if channels > 4 or PALETTE in head:
        trouble = "a palette or more than 4 channels"
    elif int.from_bytes(space, "big") not in SPACES:
        trouble = f"the colour space {int.from_bytes(space, 'big')}"
    elif any(len(part) < 3 or part[1:] != b"\1\1" for part in parts):
        trouble = "channels of several resolutions"
    elif len({part[0] for part in parts}) > 1 or parts[0][0] & 127 > 15:
        trouble = "signed values, more than 16 bits, or channels of several depths"
    if trouble:
        raise ImageError(f"{path}: JPEG 2000 with {trouble} is not supported; save it as PNG")
    return Layout(height - top, width - left, channels, parts[0][0] + 1)
