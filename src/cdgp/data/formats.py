"""What the decoders share: formats by suffix and by content, headers, limits, turning upright."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdgp.errors import ImageError

MAX_PIXELS = 178_956_970
"""Larger images are an error, from the header, before decoding (Pillow's own hard limit)."""
MAX_BYTES = 8 * MAX_PIXELS
"""Larger decoded images (channels × bytes × pixels) are an error, from the header."""

RUN = 400
"""So many zeros in a row are no code (254 at most were seen); a disk's block has 512 or more."""

TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
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


Decoder = Literal["jpeg", "png", "tiff", "pnm", "jpeg2000", "pillow"]


@dataclass(frozen=True)
class Header:
    """What an image file says of itself; height and width are those of the upright image."""

    height: int
    width: int
    orientation: int
    """EXIF tag 274; what `decode` applies."""
    decoder: Decoder
    format: str
    page: int = 0
    """Which page of a TIFF the image is; thumbnails may come before it."""


def check_pages(path: Path, pages: int, first_page: bool) -> None:
    """Raises ImageError where a file holds several images and not the first one alone is wanted."""
    if pages > 1 and not first_page:
        raise ImageError(
            f"{path}: holds {pages} pages; save each page as an image of its own, or set "
            "data.pages=first to read the first one alone (of images; a mask holds one page)"
        )


def check_size(path: Path, height: int, width: int, bytes_a_pixel: int = 1) -> None:
    """Raises ImageError where an image is empty or too large to decode."""
    pixels, size = height * width, height * width * bytes_a_pixel
    if height < 1 or width < 1:
        raise ImageError(f"{path}: has no pixels ({width} × {height}); save it again")
    if pixels > MAX_PIXELS:
        raise ImageError(
            f"{path}: is too large to decode: it has {pixels} pixels and the limit is "
            f"{MAX_PIXELS}. Crop it or make it smaller."
        )
    if size > MAX_BYTES:
        raise ImageError(
            f"{path}: is too large to decode: its {pixels} pixels take {size} bytes and the limit "
            f"is {MAX_BYTES}. Save it with 8 bits, crop it or make it smaller."
        )


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


def check_runs(path: Path, coded: bytes) -> None:
    """Raises ImageError where arithmetic code holds a block of one value, as storage errors do.

    Encoders of AVIF and JPEG 2000 write a few zeros in a row, even for flat images.
    """
    if bytes(RUN) in coded or b"\xff" * RUN in coded:
        raise ImageError(f"{path}: is damaged: it holds a block of one value; copy it again")


def pillow_values(image: Image.Image) -> NDArray[np.uint8]:
    """(H, W) or HWC uint8 grey, RGB or RGBA of an image of 8 bits that Pillow has opened."""
    image.load()
    if image.mode == "1":
        image = image.convert("L")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    return np.asarray(image)


def orientation_of(value: object) -> int:
    """EXIF tag 274; 1, which is upright, where a file holds anything but a number there."""
    return value if isinstance(value, int) else 1


def upright(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Applies EXIF tag 274 to an HWC array; unknown values mean upright."""
    if orientation in (5, 6, 7, 8):
        values = values.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    return values
