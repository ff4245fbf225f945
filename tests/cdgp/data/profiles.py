"""Colour profiles and what files state of their colours, made from the specifications."""

import struct
import zlib
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms


def light_of(srgb: NDArray[Any]) -> NDArray[np.float64]:
    """IEC 61966-2-1: sRGB in [0, 1] to linear light in [0, 1]."""
    values = np.asarray(srgb, np.float64)
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


PRIMARIES = {
    "whitepoint": (0.3127, 0.329, 1.0),
    "primaries": (0.64, 0.33, 1, 0.3, 0.6, 1, 0.15, 0.06, 1),
}
LINEAR: bytes = imagecodecs.cms_profile("rgb", gamma=1.0, **PRIMARIES)
GAMMA_22: bytes = imagecodecs.cms_profile("rgb", gamma=2.2, **PRIMARIES)
ADOBE: bytes = imagecodecs.cms_profile("adobergb")
SRGB: bytes = imagecodecs.cms_profile("srgb")
GREY_LINEAR: bytes = imagecodecs.cms_profile("gray", gamma=1.0)
GREY_22: bytes = imagecodecs.cms_profile("gray", gamma=2.2)
P3_PRIMARIES = (0.68, 0.32, 1, 0.265, 0.69, 1, 0.15, 0.06, 1)
DISPLAY_P3: bytes = imagecodecs.cms_profile(
    "rgb",
    whitepoint=PRIMARIES["whitepoint"],
    primaries=P3_PRIMARIES,
    transferfunction=light_of(np.linspace(0, 1, 1024)).astype(np.float32),
)
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def srgb_of(linear: NDArray[Any]) -> NDArray[np.float64]:
    """IEC 61966-2-1: linear light in [0, 1] to sRGB in [0, 1]."""
    light = np.asarray(linear, np.float64)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def cmyk_profile() -> bytes:
    """A printer's profile of version 2: a table of two points an ink, to CIE Lab in 8 bits."""
    inks = np.array(np.meshgrid(*[[0, 1]] * 4, indexing="ij")).reshape(4, 16).T
    lightness = 100 * (1 - 0.3 * inks[:, :3].mean(1)) * (1 - 0.9 * inks[:, 3])
    a = 40 * (inks[:, 1] - inks[:, 0]) * (1 - inks[:, 3])
    b = 40 * (inks[:, 2] - inks[:, 0]) * (1 - inks[:, 3])
    table = np.stack([lightness * 255 / 100, a + 128, b + 128], 1).round().astype(np.uint8)
    ramp = bytes(range(256))
    one = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + one + ramp * 4 + table.tobytes() + ramp * 3
    name = b"Test inks\0"
    text = b"desc\0\0\0\0" + struct.pack(">I", len(name)) + name + bytes(12 + 67)
    white = b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)
    return assembled(b"prtr", b"CMYK", b"Lab ", {b"desc": text, b"wtpt": white, b"A2B0": lut})


def assembled(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A profile from its tags: the header of 128 bytes, the table of tags, their contents."""
    start, directory, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, content in tags.items():
        directory += name + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    illuminant = struct.pack(">3i", 63190, 65536, 54061)
    head = struct.pack(">I4sI", start + len(body), b"none", 0x02400000) + kind + space + connection
    head += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + illuminant
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + directory + body


def png_with(path: Path, **chunks: bytes) -> Path:
    """Insert chunks into a PNG, after its header."""
    data = path.read_bytes()
    made = b""
    for name, content in chunks.items():
        code = name.encode()
        made += struct.pack(">I", len(content)) + code + content
        made += struct.pack(">I", zlib.crc32(code + content))
    path.write_bytes(data[:33] + made + data[33:])
    return path


def jpeg_without(path: Path, marker: int) -> Path:
    """Remove the segments of a marker, such as 0xEE for Adobe's, from a JPEG."""
    data, at, kept = path.read_bytes(), 2, b"\xff\xd8"
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept += b"" if data[at + 1] == marker else data[at:end]
        at = end
    path.write_bytes(kept + data[at:])
    return path


def jpeg_with(path: Path, marker: int, content: bytes) -> Path:
    """Insert a segment into a JPEG, after its first two bytes."""
    data = path.read_bytes()
    segment = bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content
    path.write_bytes(data[:2] + segment + data[2:])
    return path


def bmp_with_profile(path: Path, colours: NDArray[np.uint8], profile: bytes) -> Path:
    """A BMP of version 5 with an embedded profile behind its pixels."""
    height, width = colours.shape[:2]
    rows = [row.tobytes() + bytes(-3 * width % 4) for row in colours[::-1, :, ::-1]]
    pixels = b"".join(rows)
    head = struct.pack("<IiiHHIIiiII", 124, width, height, 1, 24, 0, len(pixels), 0, 0, 0, 0)
    head += bytes(16) + b"DEBM" + bytes(36 + 12) + struct.pack("<I", 4)
    head += struct.pack("<III", 124 + len(pixels), len(profile), 0)
    offset = 14 + len(head)
    file = b"BM" + struct.pack("<IHHI", offset + len(pixels) + len(profile), 0, 0, offset)
    path.write_bytes(file + head + pixels + profile)
    return path


def jp2_with_profile(path: Path, values: NDArray[Any], profile: bytes) -> Path:
    """A lossless JP2 whose colour box holds a profile in place of the number of a colour space."""
    data = imagecodecs.jpeg2k_encode(values, codecformat="jp2", level=0)
    outer, inner = data.find(b"jp2h") - 4, data.find(b"colr") - 4
    length = struct.unpack(">I", data[inner : inner + 4])[0]
    box = struct.pack(">I", 11 + len(profile)) + b"colr" + bytes([2, 0, 0]) + profile
    grown = struct.unpack(">I", data[outer : outer + 4])[0] + len(box) - length
    path.write_bytes(
        data[:outer] + struct.pack(">I", grown) + data[outer + 4 : inner] + box
        + data[inner + length :]
    )  # fmt: skip
    return path


def cmyk(values: NDArray[np.uint8]) -> Image.Image:
    """A CMYK image of (H, W, 4) uint8, 255 is full ink."""
    return Image.fromarray(values, "CMYK")
