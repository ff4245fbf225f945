"""Colour spaces: what a file states of its colours, and the way from there to sRGB.

One rule for every format and depth: values are sRGB, unless an embedded ICC profile says otherwise;
then they are converted. What else a file may state (gamma, primaries, EXIF) is not applied: it is
told in a warning.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from cdgp.errors import ImageError

SAME = 1.5 / 255
"""A profile whose transform moves no colour by more than this is sRGB under another name."""
RELATIVE_COLORIMETRIC = 1
FLAGS = 0x2000 | 0x0100
"""Black point compensation, and no optimisation: little CMS's own tables are wrong by 10 of 255
levels at the dark end of a linear grey profile."""
SPACES = {b"GRAY": "gray", b"RGB ": "rgb", b"CMYK": "cmyk"}
CHANNELS = {1: "gray", 3: "rgb", 4: "cmyk"}
WORDS = {"gray": "grey", "rgb": "RGB", "cmyk": "CMYK"}
UNMARKED_CMYK = (
    "CMYK without an Adobe marker: amounts of ink may be stored either way round; read the way "
    "that Adobe stores them"
)

ICC_TAG, EXIF_IFD, INTEROP_IFD = 34675, 0x8769, 0xA005
SRGB_GAMMA, SRGB_PRIMARIES = 0.45455, (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
SRGB_CICP = bytes([1, 13, 0, 1])
"""BT.709 primaries, the transfer function of sRGB, RGB, the full range."""


class Stated(NamedTuple):
    """What a file states of its colours."""

    profile: bytes | None
    """The embedded ICC profile; empty where it is cut off, None where there is none."""
    cmyk: bool
    marked: bool
    """Whether an Adobe marker says which way round inks are stored; True where none is needed."""
    warnings: tuple[str, ...]


class Profile(NamedTuple):
    """What is done with a profile."""

    space: str
    """Values are converted from this colour space; empty where they stay as they are."""
    name: str
    warning: str = ""


def stated(path: Path, form: str, page: int) -> Stated:
    """What a file states of its colours; ``form`` and ``page`` as `decode.Header` has them."""
    if form == "PNG":
        return _stated_by_png(path)
    if form == "TIFF":
        with tifffile.TiffFile(path) as tiff:
            shown = tiff.pages[page].aspage()
            tag = shown.tags.get(ICC_TAG)
            cmyk = getattr(shown.photometric, "name", "") == "SEPARATED"
            return Stated(None if tag is None else bytes(tag.value), cmyk, True, ())
    if form == "PNM":
        return Stated(None, False, True, ())
    if form == "JPEG2000":  # its decoder converts: RGB well, grey of 16 bits to other numbers
        if _jp2_profile(path)[16:20] == b"GRAY":
            raise ImageError(
                f"{path}: is JPEG 2000 with a grey colour profile, which its decoder gets wrong; "
                "save it as PNG or TIFF"
            )
        return Stated(None, False, True, ())
    with Image.open(path) as image:
        info, cmyk = image.info, image.mode == "CMYK"
        profile = (info["icc_profile"] or b"") if "icc_profile" in info else None
        profile = _bmp_profile(path) if form == "BMP" else profile
        doubts = [] if profile is not None else [*_exif_doubts(image)]
    marked = not cmyk or "adobe" in info
    return Stated(profile, cmyk, marked, tuple(doubts) if marked else (UNMARKED_CMYK, *doubts))


def to_srgb(
    values: NDArray[np.float32], profile: bytes | None
) -> tuple[NDArray[np.float32], Profile]:
    """Colours through their profile, and what was done.

    Args:
        values: HWC float32 in [0, 1]: grey, RGB, or CMYK (1 is full ink).
        profile: as `Stated` has it.

    Returns:
        Grey stays grey (one channel), all else becomes RGB, in sRGB; but as they were where there
        is no profile, where it is sRGB, or where the profile cannot be used, with a warning.
    """
    if profile is None:
        return values, Profile("", "")
    used = _read_profile(profile, values.shape[2])
    return (_transformed(values, profile, used.space) if used.space else values), used


def cmyk_values(path: Path) -> NDArray[np.float32]:
    """The inks of an 8-bit CMYK file, upright, (H, W, 4) float32 in [0, 1], 1 is full ink."""
    # Opened by handle: by name, Pillow 13 maps an uncompressed TIFF at its turned size.
    with path.open("rb") as file, Image.open(file) as image:
        inks = np.asarray(ImageOps.exif_transpose(image), np.float32)
    return inks / np.float32(255)


def black_entries(path: Path) -> int:
    """How many of the values that a palette image uses are black; 0 where it has no palette."""
    with Image.open(path) as image:
        if image.mode != "P":
            return 0
        entries = np.asarray(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
        used = np.unique(np.asarray(image))
    return sum(not entries[value].any() for value in used if value < len(entries))


def swapped_brightness(inks: NDArray[np.float32]) -> float:
    """Mean brightness, in [0, 1], of (H, W, 4) inks where they are stored the other way round."""
    return float((inks[..., :3] * inks[..., 3:]).mean())


@lru_cache(maxsize=64)
def _read_profile(profile: bytes, channels: int) -> Profile:
    """What to do with a profile in a file of 1, 3 or 4 colour channels."""
    damaged = "its colour profile is damaged: read as sRGB"
    wanted, space = CHANNELS[channels], SPACES.get(profile[16:20], "")
    try:
        name = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
        name = " ".join(name.split())[:60] or "without a name"
        moved = _largest_move(profile, space, channels) if space else np.inf
    except (ImageCms.PyCMSError, OSError, imagecodecs.CmsError):
        return Profile("", "", damaged)
    if moved <= SAME:  # also where grey holds an RGB profile, such as that of a phone
        return Profile("", name)
    if not np.isfinite(moved) and space:
        return Profile("", name, damaged)
    if space != wanted:
        return Profile(
            "", name,
            f"its colour profile ({name}) is not for {WORDS[wanted]} images: read without it",
        )  # fmt: skip
    return Profile(space, name)


def _largest_move(profile: bytes, space: str, channels: int) -> float:
    """How far the transform moves a colour of a coarse grid at most; NaN where it gives none.

    Of an RGB profile only the greys matter where the image is grey.
    """
    greys = channels == 1 and space == "rgb"
    steps = np.linspace(0, 1, 256 if greys or space == "gray" else 17 if space == "rgb" else 5)
    axes = {"gray": 1, "rgb": 3, "cmyk": 4}[space]
    points = np.stack([steps] * axes if greys else np.meshgrid(*[steps] * axes, indexing="ij"), -1)
    grid = np.asarray(points.reshape(1, -1, axes), np.float32)
    plain = (1 - grid[..., :3]) * (1 - grid[..., 3:]) if space == "cmyk" else grid
    return float(np.abs(_transformed(grid, profile, space) - plain).max())


def _transformed(values: NDArray[np.float32], profile: bytes, space: str) -> NDArray[np.float32]:
    scaled = values * np.float32(100) if space == "cmyk" else values
    scaled = scaled[..., 0] if space == "gray" else scaled
    found = imagecodecs.cms_transform(
        np.ascontiguousarray(scaled), profile, imagecodecs.cms_profile("srgb"),
        colorspace=space, outcolorspace="rgb", intent=RELATIVE_COLORIMETRIC, flags=FLAGS,
    )  # fmt: skip
    colours = np.clip(np.asarray(found, np.float32), 0, 1)
    return colours[..., 1:2] if space == "gray" else colours


def _exif_doubts(image: Image.Image) -> Iterator[str]:
    """Adobe RGB that EXIF alone states, as cameras do."""
    if "exif" not in image.info:
        return
    with suppress(Exception):  # a damaged EXIF block says nothing of the colours
        exif = image.getexif()
        tags = exif.get_ifd(EXIF_IFD)
        interop = str(exif.get_ifd(INTEROP_IFD).get(1, ""))
        if tags.get(0xA001) == 2 or interop.startswith("R03"):
            yield "EXIF states Adobe RGB, but no colour profile is embedded: read as sRGB"


def _stated_by_png(path: Path) -> Stated:
    """Of a PNG, by its chunks: cICP wins over iCCP, iCCP over sRGB, sRGB over gAMA and cHRM."""
    chunks = dict(_png_chunks(path))
    if len(cicp := chunks.get(b"cICP", b"")) == len(SRGB_CICP):
        if cicp == SRGB_CICP:
            return Stated(None, False, True, ())
        stated_space = "/".join(str(number) for number in cicp)
        text = f"cICP states colour space {stated_space}, not sRGB (1/13/0/1): read as sRGB"
        return Stated(None, False, True, (text,))
    if b"iCCP" in chunks:
        try:
            # A name, a zero, the method of compression, the profile.
            profile = zlib.decompress(chunks[b"iCCP"].partition(b"\0")[2][1:])
        except zlib.error:
            profile = b""
        return Stated(profile, False, True, ())
    return Stated(None, False, True, () if b"sRGB" in chunks else tuple(_png_doubts(chunks)))


def _png_doubts(chunks: Mapping[bytes, bytes]) -> Iterator[str]:
    """What gAMA and cHRM state against sRGB."""
    gamma, primaries = chunks.get(b"gAMA", b""), chunks.get(b"cHRM", b"")
    if len(gamma) == 4:
        stored = struct.unpack(">I", gamma)[0] / 100_000
        if abs(stored - SRGB_GAMMA) > 0.01:
            yield f"gAMA states a gamma of {stored:g}, not 1/2.2, without a profile: read as sRGB"
    if len(primaries) == 32:
        points = np.array(struct.unpack(">8I", primaries)) / 100_000
        if np.abs(points - SRGB_PRIMARIES).max() > 0.005:
            yield "cHRM states other primaries than sRGB, without a profile: read as sRGB"


def _png_chunks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """(name, content) of the chunks about colour before the pixels."""
    with path.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            if name in (b"IDAT", b"IEND"):
                return
            after = file.tell() + length + 4
            if name in (b"cICP", b"iCCP", b"sRGB", b"gAMA", b"cHRM"):
                yield name, file.read(length)
            file.seek(after)


def _jp2_profile(path: Path) -> bytes:
    """The profile in the colour box of a JP2; empty where it has none."""
    with path.open("rb") as file:
        head = file.read(2**22)
    at = head.find(b"colr", 0, max(0, head.find(b"jp2c")))
    if at < 4 or head[at + 4] != 2:  # 1 is a colour space by its number
        return b""
    return head[at + 7 : at - 4 + int.from_bytes(head[at - 4 : at], "big")]


def _bmp_profile(path: Path) -> bytes | None:
    """The profile that a BMP of version 5 embeds; no decoder hands it out."""
    with path.open("rb") as file:
        head = file.read(138)
        if len(head) < 138 or head[14] != 124 or head[70:74] != b"DEBM":  # MBED, little-endian
            return None
        start, size = struct.unpack("<II", head[126:134])
        file.seek(14 + start)
        return file.read(size)


def shown_values(levels: NDArray[Any]) -> str:
    """The values of a mask for a message: "0, 1, 255"."""
    shown = [f"{value:g}" for value in levels[:12]]
    return ", ".join(shown + ["…"] * (len(levels) > 12))
