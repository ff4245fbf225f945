"""Holes: damaged image files against a strict oracle, format by format.

    nice python -m cdgp_bench.studies.holes [--inputs 2000] [--out docs/results/fuzzing.json]

A whole file is damaged behind its header, in ways that keep it looking whole. What the reader
accepts must show the pixels of the whole file, within 2/255, and a second decoder must see what
ours sees. All else is a finding: it is counted, and `--keep` keeps the first file of each kind.
"""

import argparse
import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from cdgp.data.decode import read_header
from cdgp.data.formats import format_of, pillow_values, upright
from cdgp.data.images import read_image
from cdgp.errors import ImageError
from cdgp.presets import DataSettings

SIDE = 224
TOLERANCE = 2 / 255
WHITE = DataSettings().white_level
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
SCAN, RESTART = re.compile(rb"\xff\xda"), re.compile(rb"\xff[\xd0-\xd7]")

Damage = Callable[[bytes, np.random.Generator], bytes | None]


def pattern() -> NDArray[np.uint8]:
    """A ramp with noise, in which every hole shows."""
    noise = np.random.default_rng(0).integers(0, 40, (SIDE, SIDE, 3))
    ramp = np.add.outer(np.arange(SIDE), np.arange(SIDE))[:, :, None] // 2
    return np.asarray(ramp + noise, np.uint8)


def pillow(values: NDArray[Any], kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, kind, **options)
    return stream.getvalue()


def tiff(values: NDArray[Any], compression: str | None) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, compression=compression, rowsperstrip=40)
    return stream.getvalue()


@cache
def seeds() -> dict[str, bytes]:
    """A whole file of every format, and of its kinds that are stored differently."""
    colour = pattern()
    grey = colour[:, :, 0]
    deep = grey.astype(np.uint16) * 257
    return {
        "JPEG, sequential": pillow(colour, "JPEG", quality=90),
        "JPEG, restart markers": pillow(colour, "JPEG", quality=90, restart_marker_blocks=8),
        "JPEG, progressive": pillow(colour, "JPEG", quality=90, progressive=True),
        "PNG, 8 bits": pillow(colour, "PNG"),
        "PNG, 16 bits": pillow(deep, "PNG"),
        "TIFF, uncompressed": tiff(colour, None),
        "TIFF, LZW": tiff(colour, "lzw"),
        "TIFF, deflate": tiff(colour, "deflate"),
        "TIFF, PackBits": tiff(colour, "packbits"),
        "TIFF, JPEG": tiff(colour, "jpeg"),
        "TIFF, 16 bits, deflate": tiff(deep, "deflate"),
        "TIFF, fax": pillow(grey > 100, "TIFF", compression="group4"),
        "BMP": pillow(colour, "BMP"),
        "GIF": pillow(grey, "GIF"),
        "WebP": pillow(colour, "WEBP"),
        "WebP, lossless": pillow(colour, "WEBP", lossless=True),
        "AVIF": pillow(colour, "AVIF"),
        "JPEG 2000": pillow(colour, "JPEG2000"),
        "PPM": pillow(colour, "PPM"),
    }


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: _place(data, rng)]


def cut_with_end(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut, with the end marker put back; where a format has none, zeros up to the old size."""
    head = cut(data, rng)
    form = format_of(data[:32])
    if form in ("JPEG", "JPEG2000"):
        return head + b"\xff\xd9"
    ends = {"PNG": PNG_END, "GIF": b"\0;"}
    if form == "WEBP":
        head = head[: len(head) // 2 * 2]
        parts = [(4, len(head) - 8), (16, len(head) - 20)]
        for at, size in parts:
            head = head[:at] + size.to_bytes(4, "little") + head[at + 4 :]
    return head + ends[form] if form in ends else head + bytes(len(data) - len(head))


def zeroed(data: bytes, rng: np.random.Generator) -> bytes:
    return _filled(data, rng, b"\0")


def ones(data: bytes, rng: np.random.Generator) -> bytes:
    return _filled(data, rng, b"\xff")


def dropped(data: bytes, rng: np.random.Generator) -> bytes:
    """Without some bytes; what follows moves up."""
    at = _place(data, rng)
    return data[:at] + data[at + int(rng.integers(1, len(data) // 8)) :]


def bit(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit flipped."""
    at = _place(data, rng)
    return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]


def part(data: bytes, rng: np.random.Generator) -> bytes | None:
    """Without a scan or restart interval of a JPEG, or a strip of a TIFF; None for the others."""
    form = format_of(data[:32])
    if form == "JPEG":
        starts = [m.start() for m in SCAN.finditer(data)][1:]
        starts = starts or [m.start() for m in RESTART.finditer(data)]
        if len(starts) < 2:
            return None
        first = int(rng.integers(len(starts)))
        ends = [*starts[1:], len(data) - 2]
        return data[: starts[first]] + data[ends[first] :]
    if form != "TIFF":
        return None
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        tag = file.pages.first.tags["StripByteCounts"]
        at = tag.valueoffset + int(rng.integers(tag.count)) * (2 if tag.dtype == 3 else 4)
    return data[:at] + bytes(2 if tag.dtype == 3 else 4) + data[at + (2 if tag.dtype == 3 else 4) :]


DAMAGES: dict[str, Damage] = {
    "cut": cut, "cut, end put back": cut_with_end, "zeroed block": zeroed, "0xFF block": ones,
    "bytes dropped": dropped, "part dropped": part, "one bit flipped": bit,
}  # fmt: skip


def _place(data: bytes, rng: np.random.Generator) -> int:
    """Somewhere among the pixels, behind the first third, which holds every header here."""
    return int(rng.integers(len(data) // 3, len(data) - 16))


def _filled(data: bytes, rng: np.random.Generator, filler: bytes) -> bytes:
    at = _place(data, rng)
    length = min(int(rng.choice([512, 4096])), len(data) - at - 16)
    return data[:at] + filler * length + data[at + length :]


def second(path: Path) -> NDArray[np.float64]:
    """The image as another decoder sees it, HWC RGB in 0..1; any exception where that refuses.

    Pillow for what ours reads with simplejpeg, libpng and OpenJPEG; imagecodecs for what ours reads
    with Pillow; libtiff for tifffile, and the other way round.
    """
    data = path.read_bytes()
    form = format_of(data[:32])
    decoders: dict[str, Callable[[bytes], Any]] = {
        "BMP": imagecodecs.bmp_decode, "GIF": imagecodecs.gif_decode,
        "WEBP": imagecodecs.webp_decode, "AVIF": imagecodecs.avif_decode,
    }  # fmt: skip
    if form == "TIFF":
        values = _second_tiff(data)
    elif form in decoders:
        values = np.asarray(decoders[form](data))
    else:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            deep = image.mode in ("I", "I;16")
            values = np.asarray(image).astype(np.uint16) if deep else pillow_values(image)
    return _unit(values, read_header(path).orientation)


def _second_tiff(data: bytes) -> NDArray[Any]:
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages.first
        values = np.asarray(
            page.asarray() if page.compression in (4, 7) else imagecodecs.tiff_decode(data)
        )
        white = getattr(page.photometric, "name", "") == "MINISWHITE"
        if page.extrasamples and page.extrasamples[0] != tifffile.EXTRASAMPLE.UNASSALPHA:
            values = values[..., :-1]
    full = 1 if values.dtype.kind in "bf" else np.iinfo(values.dtype).max
    return np.asarray(full - values if white else values)


def _unit(values: NDArray[Any], orientation: int) -> NDArray[np.float64]:
    full = 1 if values.dtype.kind in "bf" else np.iinfo(values.dtype).max
    values = values.reshape(*values.shape[:2], -1) / full
    if values.shape[2] in (2, 4):
        values = values[:, :, :-1] * values[:, :, -1:]
    values = upright(values, orientation)
    return np.repeat(values, 3, axis=2) if values.shape[2] == 1 else values


def opinion(path: Path, found: NDArray[np.floating[Any]]) -> str:
    """Whether the second decoder sees the image that ours has read."""
    try:
        other = second(path)
    except Exception:
        return "the second decoder refuses"
    same = other.shape == found.shape and np.abs(found - other).max() <= TOLERANCE
    return "both see the same" if same else "the two decoders differ"


def judged(data: bytes, path: Path, whole: NDArray[np.floating[Any]]) -> str:
    """What becomes of a damaged file."""
    path.write_bytes(data)
    try:
        found = read_image(path, WHITE)
    except ImageError:
        return "refused"
    if found.shape == whole.shape and np.abs(found - whole).max() <= TOLERANCE:
        return "whole"
    seen = opinion(path, found)
    return "damage that both see" if seen == "both see the same" else seen


OUTCOMES = (
    "refused", "whole", "damage that both see", "the two decoders differ",
    "the second decoder refuses",
)  # fmt: skip


def study(inputs: int, keep: Path | None = None) -> list[dict[str, Any]]:
    """One row a format and damage; ``inputs`` files a format."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image"
        for form, data in seeds().items():
            path.write_bytes(data)
            whole = read_image(path, WHITE)
            if np.abs(whole - second(path)).max() > TOLERANCE:
                raise ValueError(f"{form}: the whole file differs in the second decoder")
            rng = np.random.default_rng(0)
            for name, damage in DAMAGES.items():
                counts: Counter[str] = Counter()
                for _ in range(-(-inputs // len(DAMAGES))):
                    damaged = damage(data, rng)
                    if damaged is None or damaged == data:
                        continue
                    outcome = judged(damaged, path, whole)
                    if keep is not None and not counts[outcome] and outcome in OUTCOMES[2:]:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{form}, {name}, {outcome}").write_bytes(damaged)
                    counts[outcome] += 1
                if counts:
                    row = {outcome: counts[outcome] for outcome in OUTCOMES}
                    rows.append({"format": form, "damage": name, "inputs": counts.total(), **row})
            print(
                form, [list(row.values())[1:] for row in rows if row["format"] == form], flush=True
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    rows = study(given.inputs, given.keep)
    if given.out is not None:
        lines = ",\n ".join(json.dumps(row) for row in rows)
        given.out.write_text(f"[{lines}]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
