"""Reads PBM, PGM and PPM (netpbm), binary and plain: the stated largest value means white."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.data.formats import Header, check_pages
from cdgp.errors import ImageError

GAP = rb"(?:\s|#[^\n\r]*[\n\r])+"
SIZE = re.compile(rb"P([1-6])" + GAP + rb"(\d{1,9})" + GAP + rb"(\d{1,9})")
LARGEST = re.compile(GAP + rb"(\d{1,9})")


class Layout(NamedTuple):
    """What the header states."""

    plain: bool
    channels: int
    height: int
    width: int
    largest: int
    """The value of white; 1 in bitmaps, where 1 is black."""
    bitmap: bool
    start: int
    """Where the pixels begin."""

    @property
    def size(self) -> int:
        """Bytes of the pixels in a binary file."""
        if self.bitmap:
            return self.height * ((self.width + 7) // 8)
        return self.height * self.width * self.channels * (2 if self.largest > 255 else 1)


def read_pnm_header(path: Path, data: bytes, first_page: bool) -> Header:
    """The size; binary files may hold several images, one behind the other."""
    layout = _layout(path, data)
    following = data[layout.start + layout.size :].lstrip()
    several = not layout.plain and SIZE.match(following) is not None
    check_pages(path, 2 if several else 1, first_page)
    return Header(layout.height, layout.width, 1, "pnm", "PNM")


def decode_pnm(path: Path, data: bytes) -> tuple[NDArray[Any], float]:
    """The image, (H, W) or HWC RGB, and the value that means white."""
    layout = _layout(path, data)
    shape = (layout.height, layout.width, layout.channels)
    if layout.plain:
        values = _plain_values(path, data[layout.start :], layout)
    else:
        stored = data[layout.start : layout.start + layout.size]
        behind = data[layout.start + layout.size :].lstrip()
        more = len(behind) if SIZE.match(behind) is None else 0
        _check_count(path, len(stored) + more, layout.size, "bytes")
        if layout.bitmap:
            rows = np.frombuffer(stored, np.uint8).reshape(layout.height, -1)
            values = np.unpackbits(rows, axis=1)[:, : layout.width]
        else:
            values = np.frombuffer(stored, ">u2" if layout.largest > 255 else np.uint8)
            values = values.astype(values.dtype.newbyteorder("="))
    if values.size and int(values.max()) > layout.largest:
        raise ImageError(
            f"{path}: holds the value {values.max()}, above the {layout.largest} that its header "
            "states; save it again"
        )
    values = values.reshape(shape)
    if layout.bitmap:
        return (1 - values) * np.uint8(255), 255.0
    return values, float(layout.largest)


def _layout(path: Path, data: bytes) -> Layout:
    found = SIZE.match(data)
    if found is None:
        raise ImageError(f"{path}: has a broken PNM header; save it again")
    kind, width, height = (int(group) for group in found.groups())
    bitmap, end, largest = kind in (1, 4), found.end(), 1
    if not bitmap:
        stated = LARGEST.match(data, end)
        largest, end = (int(stated.group(1)), stated.end()) if stated else (0, end)
        if not 1 <= largest <= 65535:
            raise ImageError(
                f"{path}: its PNM header states no largest value within 1..65535; save it again"
            )
    if not data[end : end + 1].isspace():
        raise ImageError(f"{path}: has a broken PNM header; save it again")
    # One white space ends the header of a binary file; all that follows are pixels.
    start = end + 1
    layout = Layout(kind < 4, 3 if kind in (3, 6) else 1, height, width, largest, bitmap, start)
    if data[end : end + 2] == b"\r\n" and len(data) == start + 1 + layout.size:
        return layout._replace(start=start + 1)  # written with the line ends of Windows
    return layout


def _plain_values(path: Path, text: bytes, layout: Layout) -> NDArray[Any]:
    expected = layout.height * layout.width * layout.channels
    text = re.sub(rb"#[^\n\r]*", b"", text)
    digits = re.findall(rb"[01]" if layout.bitmap else rb"\d+", text)
    _check_count(path, len(digits), expected, "values")
    if re.search(rb"[^01\s]" if layout.bitmap else rb"[^\d\s]", text):
        raise ImageError(
            f"{path}: is damaged: it holds something else than its values; save it again"
        )
    return np.array(digits, dtype=np.int64).astype(np.uint8 if layout.largest < 256 else np.uint16)


def _check_count(path: Path, found: int, expected: int, what: str) -> None:
    if found < expected:
        raise ImageError(
            f"{path}: is truncated: it holds {found} of {expected} {what}; copy it again"
        )
    if found > expected:  # a wrong size, or a header that ends later: every row would be displaced
        raise ImageError(
            f"{path}: holds {found} {what}, but its header states {expected}; save it again"
        )
