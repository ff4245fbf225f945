"""An image beside the same image under its map, in the one colour scale of a model."""

import hashlib
import re
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from cdgp.files import atomic_write
from cdgp.inference import Prediction, Region

ANCHORS = np.array(
    [
        (19, 11, 26), (45, 23, 59), (79, 29, 88), (120, 30, 107), (172, 14, 100), (209, 36, 82),
        (232, 76, 61), (240, 119, 41), (244, 156, 48), (246, 190, 71), (249, 221, 121),
        (255, 248, 200),
    ]
)  # fmt: skip
"""Evenly spaced sRGB colours whose CIE lightness rises by equal steps, from 4 to 97: black over
purple and orange to pale yellow. Lightness alone shows the order, for every colour vision."""

OPACITY = 0.85
"""Of the heat where the map reaches the end of the scale."""
STEPS = 4096
"""The scale is drawn in so many steps."""
_SHARES = np.linspace(0, 1, STEPS)
_PLACES = np.linspace(0, 1, len(ANCHORS))
_COLOURS: NDArray[np.uint8] = np.rint(
    np.stack([np.interp(_SHARES, _PLACES, channel) for channel in ANCHORS.T], axis=-1)
).astype(np.uint8)
"""(STEPS, 3) of the heat."""
# Flat at both ends: quiet areas stay visible.
_OPACITIES = OPACITY * (_SHARES**2 * (3 - 2 * _SHARES))[:, None]
_KEPT = (1 - _OPACITIES).astype(np.float32)
_LAYERS = (_OPACITIES * _COLOURS + 0.5).astype(np.float32)
"""What is added to the share of the image that is kept, with half a step to round by."""
MAX_BOXES = 20
LEAST_SIDE, MOST_SIDE = 256, 1024
"""Range, in pixels, that the longer side of a drawn image is brought into."""
STACKED_FROM = 1.5
"""Image and map go above each other where the image is this many times as wide as high."""
GAP = 4
PAPER, INK = (24, 26, 29), (240, 241, 243)

SCORE_NAMES = {"probability": "P(defective)", "p-value": "1 - p"}
"""What a score is called beside its number, by its kind."""

LONGEST_PART = 180
"""A file or folder name of more bytes is cut; most systems allow 255, suffixes included."""
RESERVED = re.compile(r"(con|prn|aux|nul|(com|lpt).) *(\.|$)", re.IGNORECASE)
"""Names that Windows keeps for devices, whatever their suffix."""


def heat(values: NDArray[np.float32], scale: tuple[float, float]) -> NDArray[np.uint8]:
    """Colours of a map (H, W), as (H, W, 3) uint8 RGB.

    ``scale`` are the values of the darkest and of the lightest colour; what lies beyond is clipped.

    Example:
        >>> heat(np.array([[-1.0, 0.0, 9.0]], np.float32), (0.0, 9.0))[0].tolist()
        [[19, 11, 26], [19, 11, 26], [255, 248, 200]]
    """
    colours: NDArray[np.uint8] = _COLOURS[_steps(values, scale)]
    return colours


def panels(
    image: NDArray[np.float32],
    prediction: Prediction,
    scale: tuple[float, float],
    sides: tuple[int, int] = (LEAST_SIDE, MOST_SIDE),
) -> tuple[Image.Image, Image.Image]:
    """The image, and the image under its heat with boxes around the first 20 regions, of one size.

    Args:
        image: HWC float32 RGB in [0, 1].
        prediction: of this image.
        scale: as `heat` takes it.
        sides: least and largest longer side of what is drawn, in pixels.
    """
    return shrunk(image, prediction, sides).panels(scale)


class Shrunk(NamedTuple):
    """An image and its map at the size that they are drawn at."""

    plain: Image.Image
    values: NDArray[np.float32]
    regions: tuple[Region, ...]
    factor: float
    """Of its sides against the image's own."""

    def panels(self, scale: tuple[float, float]) -> tuple[Image.Image, Image.Image]:
        """As ``panels`` gives them."""
        steps = _steps(self.values, scale)
        laid = Image.fromarray(
            (np.asarray(self.plain) * _KEPT[steps] + _LAYERS[steps]).astype(np.uint8)
        )
        for region in self.regions[:MAX_BOXES]:
            _draw_box(laid, region, self.factor)
        return self.plain, laid


def shrunk(image: NDArray[np.float32], prediction: Prediction, sides: tuple[int, int]) -> Shrunk:
    """An image and its map at the size that they are drawn at; arguments as ``panels``."""
    height, width = image.shape[:2]
    factor = float(np.clip(max(height, width), *sides)) / max(height, width)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    pixels = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    plain = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    map_image = Image.fromarray(np.asarray(prediction.anomaly_map, np.float32))
    values = np.asarray(map_image.resize(size, Image.Resampling.BILINEAR))
    return Shrunk(plain, values, prediction.regions[:MAX_BOXES], factor)


def overlay(
    image: NDArray[np.float32],
    prediction: Prediction,
    scale: tuple[float, float],
    coarse: bool = False,
) -> Image.Image:
    """Both panels, wide ones above each other, with the decision in a strip below.

    Arguments as `panels`; ``coarse`` as `score_text`.
    """
    first, second = panels(image, prediction, scale)
    width, height = first.size
    stacked = width >= STACKED_FROM * height
    across, down = (width, 2 * height + GAP) if stacked else (2 * width + GAP, height)
    font_size = int(np.clip(across // 36, 13, 22))
    font = ImageFont.load_default(font_size)
    caption, margin, strip = _caption(prediction, coarse), font_size // 2, 2 * font_size
    canvas_width = max(across, int(font.getlength(caption)) + 2 * margin + 1)
    canvas = Image.new("RGB", (canvas_width, down + strip), PAPER)
    canvas.paste(first, (0, 0))
    canvas.paste(second, (0, height + GAP) if stacked else (width + GAP, 0))
    draw = ImageDraw.Draw(canvas)
    draw.text((margin, down + strip / 2), caption, INK, font, anchor="lm")
    return canvas


def write_overlay(
    path: Path,
    pixels: NDArray[np.float32],
    prediction: Prediction,
    scale: tuple[float, float],
    coarse: bool = False,
) -> None:
    """Write the overlay as JPEG, whole."""
    image = overlay(pixels, prediction, scale, coarse)
    with atomic_write(path) as temporary:
        image.save(temporary, "JPEG", quality=90, subsampling=0)


def output_name(name: str) -> str:
    """A relative output path without suffix for an image's name in the manifest.

    Sub-folders, the image's own suffix and letters of every script are kept. Every other unsafe
    character becomes the %XX of its UTF-8 bytes, as do dots and spaces at either end and what
    Windows reserves, so that distinct names stay distinct and none leaves the folder. Parts that
    are too long end in a digest. Names that differ in case alone collide on file systems that
    ignore case.

    Example:
        >>> output_name("line 2/part#7.jpg"), output_name("../part.png")
        ('line 2/part%237.jpg', '%2E%2E/part.png')
    """
    return "/".join(_safe(part) for part in name.split("/"))


def _steps(values: NDArray[Any], scale: tuple[float, float]) -> NDArray[np.intp]:
    """The step of the scale for each value; what lies beyond is clipped."""
    low, high = scale
    shares = (values - np.float32(low)) * np.float32(1 / max(high - low, 1e-12))
    steps: NDArray[np.intp] = np.rint(np.clip(shares, 0, 1) * (STEPS - 1)).astype(np.intp)
    return steps


def _draw_box(image: Image.Image, region: Region, factor: float) -> None:
    """A white line within a black one, outside the region as far as the image allows."""
    left, top = region.x * factor, region.y * factor
    right, bottom = left + region.width * factor, top + region.height * factor
    draw = ImageDraw.Draw(image)
    for distance, colour in ((3, "black"), (2, "white")):
        rim = 3 - distance  # at an edge of the image both lines still show
        x0, y0 = max(rim, int(left) - distance), max(rim, int(top) - distance)
        x1 = min(image.width - 1 - rim, int(np.ceil(right)) + distance - 1)
        y1 = min(image.height - 1 - rim, int(np.ceil(bottom)) + distance - 1)
        if x1 >= x0 and y1 >= y0:
            draw.rectangle((x0, y0, x1, y1), outline=colour)


def _caption(prediction: Prediction, coarse: bool) -> str:
    count = len(prediction.regions)
    boxed = f" ({MAX_BOXES} boxed)" if count > MAX_BOXES else ""
    return (
        f"{SCORE_NAMES[prediction.score_kind]} {score_text(prediction.pred_score, coarse)}  ·  "
        f"{'defective' if prediction.pred_label else 'good'}  ·  "
        f"{count} region{'' if count == 1 else 's'}{boxed}"
    )


def score_text(value: float, coarse: bool = False) -> str:
    """Three decimals, and never 0 or 1 for what is neither.

    Where ``coarse``, since the score rests on a single part, one decimal is all it has.

    Example:
        >>> score_text(0.25), score_text(1e-9), score_text(0.9999)
        ('0.250', '<0.001', '>0.999')
        >>> score_text(0.32, coarse=True), score_text(0.9999, coarse=True)
        ('0.3', '>0.9')
    """
    if coarse:
        return "<0.1" if value < 0.1 else ">0.9" if value > 0.9 else f"{value:.1f}"
    if 0 < value < 0.0005:
        return "<0.001"
    return ">0.999" if 0.9995 <= value < 1 else f"{value:.3f}"


def threshold_text(value: float, coarse: bool) -> str:
    """Four digits, or two where ``coarse``."""
    return f"{value:.{2 if coarse else 4}g}"


def _safe(part: str) -> str:
    """One file or folder name of `output_name`; only there is % not followed by two digits."""
    if not part:
        return "%"
    # Names that macOS takes for one, composed and decomposed accents, stay apart: only one is kept.
    composed = unicodedata.is_normalized("NFC", part)
    coded = "".join(
        c if c in " ._-+=,()" or (c.isalnum() and (c.isascii() or composed)) else _code(c)
        for c in part
    )
    if coded[0] in " ." or RESERVED.match(coded):
        coded = _code(coded[0]) + coded[1:]
    if coded[-1] in " .":
        coded = coded[:-1] + _code(coded[-1])
    if len(coded.encode()) <= LONGEST_PART:
        return coded
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    suffix = Path(coded).suffix if len(Path(coded).suffix.encode()) <= 8 else ""
    room = LONGEST_PART - len(digest) - 2 - len(suffix.encode())
    return f"{coded.encode()[:room].decode(errors='ignore')}%-{digest}{suffix}"


def _code(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
