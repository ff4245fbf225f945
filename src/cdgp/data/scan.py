"""One pass over a manifest: each image is decoded once, each mask is read once.

`scan` gives digests and statistics, which the audit draws its findings from; `digested` gives the
digests alone, for evaluation and benchmarks. Broken files are found here, before any long work.
A mask that cannot be used costs its image nothing but the pixel metrics: training has no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cdgp.data import images
from cdgp.data.images import FileFacts, MaskFacts
from cdgp.data.manifest import Manifest, Sample, listed
from cdgp.errors import DataError, ImageError
from cdgp.files import digest

THUMBNAIL = 48
"""Side of the grey thumbnail that near duplicates are compared by."""
FLAT = 1e-6
"""A thumbnail of a smaller norm, its mean removed, has no structure to compare."""

Advance = Callable[[], object]
Unreadable = tuple[Sample, ImageError]


@dataclass(frozen=True)
class ImageStats:
    """What the audit needs of one image."""

    sample: Sample
    """With both digests."""
    height: int
    width: int
    file: FileFacts
    file_bytes: int
    modified: float
    """Time of the file's last change, in seconds since 1970."""
    brightness: float
    """Mean of grey, in [0, 1]; grey is the mean of the three channels."""
    contrast: float
    """Standard deviation of grey."""
    saturation: float
    """Mean over pixels of the largest less the smallest channel, in [0, 1]."""
    perceptual_hash: np.uint64
    thumbnail: NDArray[np.float16]
    """(THUMBNAIL²,) grey, of mean 0 and norm 1; all 0 where the image is flat."""
    nothing: str
    """Why the image holds nothing to see, as `images.no_content` says it; else empty."""
    marked_share: float
    """Share of the image that its masks mark together; 0 without a mask that can be used."""
    masks: tuple[MaskFacts, ...]
    """Of the masks of the sample; none where one of them cannot be used."""
    mask_problem: str
    """Why one of its masks cannot be used; else empty."""


@dataclass(frozen=True)
class Scan:
    """The result of one pass."""

    manifest: Manifest
    """The readable samples, with both digests."""
    stats: tuple[ImageStats, ...]
    """Of the readable samples, in the manifest's order."""
    unreadable: tuple[Unreadable, ...]
    """The other samples, with the reason."""


_Masks = list[tuple[NDArray[np.bool_], MaskFacts]]
_Reading = tuple[Sample, NDArray[np.float32], FileFacts, _Masks, str]
"""A sample with both digests, its pixels (HWC RGB in [0, 1]), its masks (H, W), and why these
cannot be used."""


def scan(
    manifest: Manifest, white_level: int, advance: Advance | None = None, first_page: bool = False
) -> Scan:
    """Digests and statistics of every readable image; unreadable ones are listed, not raised.

    Digests that the manifest already has are checked. `advance` is called once per image.
    `white_level` and `first_page` are those of `images.read_image`.
    """
    unreadable: list[Unreadable] = []
    readings = _readings(manifest, white_level, unreadable, advance, first_page)
    stats = tuple(_stats(*reading) for reading in readings)
    readable = replace(manifest, samples=tuple(s.sample for s in stats))
    return Scan(readable, stats, tuple(unreadable))


def digested(
    manifest: Manifest, white_level: int, advance: Advance | None = None, first_page: bool = False
) -> Manifest:
    """The manifest with both digests of every sample, for where no statistics are needed.

    As `scan`, but raises DataError, which lists all files that cannot be used with a reason each,
    masks among them: what is measured here needs them.
    """
    unreadable: list[Unreadable] = []
    samples: list[Sample] = []
    readings = _readings(manifest, white_level, unreadable, advance, first_page)
    for sample, _, _, _, problem in readings:
        samples.append(sample)
        if problem:
            unreadable.append((sample, ImageError(problem)))
    _raise_unreadable(manifest, len(manifest.samples), unreadable)
    return replace(manifest, samples=tuple(samples))


def check_readable(found: Scan) -> None:
    """Raises DataError where an image could not be read: all are listed with a reason."""
    total = len(found.manifest.samples) + len(found.unreadable)
    _raise_unreadable(found.manifest, total, found.unreadable)


def _raise_unreadable(manifest: Manifest, total: int, bad: Sequence[Unreadable]) -> None:
    if bad:
        raise DataError(
            f"{manifest.root}: {len(bad)} of {total} images cannot be used; "
            f"repair or remove them:{listed(str(error) for _, error in bad)}"
        )


def _readings(
    manifest: Manifest,
    white_level: int,
    unreadable: list[Unreadable],
    advance: Advance | None,
    first_page: bool,
) -> Iterator[_Reading]:
    """Reads one sample after another; those that cannot be read are added to `unreadable`."""
    for sample in manifest.samples:
        try:
            reading = _read(sample, white_level, first_page)
        except ImageError as error:
            unreadable.append((sample, error))
        else:
            yield reading
        if advance is not None:
            advance()


def _read(sample: Sample, white_level: int, first_page: bool) -> _Reading:
    pixels, file = images.read_with_facts(sample.image, white_level, first_page)
    sha256, pixel_sha256 = digest(sample.image), images.pixel_digest(pixels)
    if sample.sha256 not in (None, sha256):
        raise ImageError(
            f"{sample.image}: is not the file that the manifest was made with (its SHA-256 "
            "differs); restore it, or empty the columns sha256 and pixel_sha256"
        )
    size = (pixels.shape[0], pixels.shape[1])
    masks, problem = _Masks(), ""
    try:
        masks = [images.read_mask_with_facts(mask, size) for mask in sample.masks]
    except ImageError as error:
        problem = f"{sample.image}: its mask cannot be used: {error}"
    return replace(sample, sha256=sha256, pixel_sha256=pixel_sha256), pixels, file, masks, problem


def _stats(
    sample: Sample,
    pixels: NDArray[np.float32],
    file: FileFacts,
    masks: _Masks,
    mask_problem: str,
) -> ImageStats:
    stat = sample.image.stat()
    grey = pixels.mean(axis=2)
    marked = np.any([np.zeros(grey.shape, np.bool_), *(mask for mask, _ in masks)], axis=0)
    return ImageStats(
        sample=sample,
        height=pixels.shape[0],
        width=pixels.shape[1],
        file=file,
        file_bytes=stat.st_size,
        modified=stat.st_mtime,
        brightness=float(grey.mean()),
        contrast=float(grey.std()),
        saturation=float((pixels.max(axis=2) - pixels.min(axis=2)).mean()),
        perceptual_hash=_perceptual_hash(grey),
        thumbnail=_thumbnail(grey),
        nothing=images.no_content(pixels),
        marked_share=float(marked.mean()),
        masks=tuple(facts for _, facts in masks),
        mask_problem=mask_problem,
    )


def _perceptual_hash(grey: NDArray[np.float32]) -> np.uint64:
    """The 64 bits of imagehash's DCT hash of a grey image (H, W) in [0, 1]."""
    eight_bits = Image.fromarray(np.rint(grey * 255).astype(np.uint8))
    bits = np.packbits(imagehash.phash(eight_bits).hash.ravel())
    return np.uint64(int.from_bytes(bits.tobytes(), "big"))


def _thumbnail(grey: NDArray[np.float32]) -> NDArray[np.float16]:
    side = (THUMBNAIL, THUMBNAIL)
    reduced = Image.fromarray(grey).resize(side, Image.Resampling.BILINEAR)
    values = np.asarray(reduced, np.float64).ravel()
    values = values - values.mean()
    norm = float(np.linalg.norm(values))
    return np.asarray(values / norm if norm > FLAT else values * 0, np.float16)
