"""Textured surfaces with small defects and exact masks, for tests and for ranking settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from cdgp.data.manifest import Manifest, Sample
from cdgp.errors import ImageError
from cdgp.files import absolute

VISIBLE = 0.04
"""A pixel is marked where any channel changed by more than this part of the full range."""

LEAST_AREA, MOST_AREA = 0.0005, 0.03
ATTEMPTS = 50

Floats = NDArray[np.float32]


def make_dataset(
    folder: Path,
    good: int = 24,
    defective: int = 12,
    size: tuple[int, int] = (96, 80),
    seed: int = 0,
) -> Manifest:
    """Write images of one brushed surface to `good/` and `defective/`, `masks/`, `manifest.csv`.

    A defective image has one defect. Equal seeds write equal pixels; every image of a seed differs.
    Files of equal names are overwritten. The returned manifest has no groups and splits.
    """
    root = absolute(folder)
    samples: list[Sample] = []
    masks: tuple[Path, ...]
    for i in range(good + defective):
        rng = np.random.default_rng([seed, i])
        pixels = make_surface(size, rng)
        if i < good:
            image, masks = root / "good" / f"{i:03d}.png", ()
        else:
            image = root / "defective" / f"{i - good:03d}.png"
            masks = (root / "masks" / image.name,)
            pixels, mask = plant_defect(pixels, rng)
            save(masks[0], mask)
        save(image, pixels)
        samples.append(Sample(image, bool(masks), masks))
    manifest = Manifest(root, tuple(samples))
    manifest.write_csv(root / "manifest.csv")
    return manifest


def save(path: Path, values: NDArray[np.generic]) -> None:
    """Write a float32 image in [0, 1] as 8 bits, or a mask or bytes as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if values.dtype == np.float32:
        values = np.rint(values * 255).astype(np.uint8)
    Image.fromarray(values).save(path, quality=95)  # of JPEG; PNG has none


def plant_defect(image: Floats, rng: np.random.Generator) -> tuple[Floats, NDArray[np.bool_]]:
    """Plant one small defect: a scratch, a spot, a shuffled patch or a stain, of random contrast.

    Edges are feathered. The mask marks the pixels that changed visibly, 0.05-3 % of the image
    (at least 1 pixel, and up to 4 pixels in a tiny image). The input is not changed.

    Args:
        image: HWC float32 RGB in [0, 1].
        rng: the only source of randomness.

    Returns:
        The image with the defect and its mask, (H, W) bool.
    """
    pixels = image.shape[0] * image.shape[1]
    least, most = max(1, LEAST_AREA * pixels), max(4, MOST_AREA * pixels)
    for _ in range(ATTEMPTS):
        draw = (_scratch, _spot, _patch, _stain)[rng.integers(4)]
        alpha, paint = draw(image, rng)
        planted = np.clip(image + alpha[:, :, None] * (paint - image), 0, 1)
        mask = np.abs(planted - image).max(axis=2) > VISIBLE
        if least <= mask.sum() <= most:
            return planted.astype(np.float32), mask
    raise ImageError(f"no visible defect fits into an image of {pixels} pixels; use a larger one")


def make_surface(size: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Brushed grain, cloudy base and a slight gradient of light, rounded as 8 bits store it.

    HWC float32 RGB in [0, 1].
    """
    height, width = size
    grain = gaussian_filter(rng.standard_normal(size), (0.6, 4))
    cloud = gaussian_filter(rng.standard_normal(size), 6)
    y, x = np.mgrid[0:height, 0:width]
    angle = rng.uniform(0, 2 * np.pi)
    light = np.cos(angle) * (x / width - 0.5) + np.sin(angle) * (y / height - 0.5)
    grey = rng.uniform(0.45, 0.52) + 0.03 * grain / grain.std() + 0.015 * cloud / cloud.std()
    tint = np.array([1.0, 0.97, 0.93]) + rng.normal(0, 0.005, 3)
    surface = (grey + 0.06 * light)[:, :, None] * tint
    rounded = np.rint(np.asarray(np.clip(surface, 0, 1), np.float32) * 255) / 255
    return np.asarray(rounded, np.float32)


def _grid(image: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y, x = np.mgrid[0 : image.shape[0], 0 : image.shape[1]]
    return y.astype(np.float64), x.astype(np.float64)


def _place(image: Floats, rng: np.random.Generator) -> NDArray[np.float64]:
    """A random (y, x) inside the image."""
    return np.asarray(rng.uniform(0, 1, 2) * np.array(image.shape[:2]))


def _shifted(image: Floats, rng: np.random.Generator, least: float, most: float) -> Floats:
    """The image made darker or brighter, with a trace of colour in colour images."""
    shift = rng.choice([-1, 1]) * rng.uniform(least, most) * np.ones(3)
    if np.ptp(image, axis=2).max() > 0:
        shift += rng.normal(0, 0.03, 3)
    return np.asarray(image + shift, np.float32)


def _scratch(image: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A thin, slightly bent line."""
    y, x = _grid(image)
    diagonal = float(np.hypot(*image.shape[:2]))
    start, angle = _place(image, rng), rng.uniform(0, 2 * np.pi)
    length, bend = diagonal * rng.uniform(0.08, 0.35), rng.normal(0, 0.12)
    along = np.cos(angle) * (x - start[1]) + np.sin(angle) * (y - start[0])
    across = -np.sin(angle) * (x - start[1]) + np.cos(angle) * (y - start[0])
    t = np.clip(along / length, 0, 1)
    distance = np.hypot(along - t * length, across - bend * length * t * (1 - t))
    half_width = max(0.7, diagonal * rng.uniform(0.001, 0.005))
    alpha = np.clip(half_width + 0.5 - distance, 0, 1)
    return alpha.astype(np.float32), _shifted(image, rng, 0.12, 0.5)


def _spot(image: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A dark or bright blob with an uneven rim."""
    alpha = np.clip((1.0 - _blob_radius(image, rng, 0.001, 0.012)) / 0.35, 0, 1)
    return alpha.astype(np.float32), _shifted(image, rng, 0.12, 0.5)


def _stain(image: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A wide, faint blob that fades out."""
    alpha = np.exp(-(_blob_radius(image, rng, 0.005, 0.025) ** 2))
    return alpha.astype(np.float32), _shifted(image, rng, 0.08, 0.2)


def _blob_radius(
    image: Floats, rng: np.random.Generator, least: float, most: float
) -> NDArray[np.float64]:
    """Distance from a random place, 1 on the rim of a blob of `least`..`most` of the area."""
    y, x = _grid(image)
    centre, stretch = _place(image, rng), np.exp(rng.normal(0, 0.3))
    area = np.exp(rng.uniform(np.log(least), np.log(most))) * x.size
    dy, dx = (y - centre[0]) * stretch, (x - centre[1]) / stretch
    angle, phase = np.arctan2(dy, dx), rng.uniform(0, 2 * np.pi, 2)
    rim = 1 + 0.12 * np.sin(2 * angle + phase[0]) + 0.08 * np.sin(3 * angle + phase[1])
    return np.asarray(np.hypot(dy, dx) / (np.sqrt(area / np.pi) * rim))


def _patch(image: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """A piece of the same image with its rows and columns shuffled, of another brightness."""
    height, width = image.shape[:2]
    area, aspect = rng.uniform(0.002, 0.02) * height * width, np.exp(rng.normal(0, 0.4))
    h = int(np.clip(np.sqrt(area * aspect), 2, height - 1))
    w = int(np.clip(np.sqrt(area / aspect), 2, width - 1))
    from_y, to_y = rng.integers(0, height - h + 1, 2)
    from_x, to_x = rng.integers(0, width - w + 1, 2)
    piece = image[from_y : from_y + h, from_x : from_x + w]
    piece = piece[rng.permutation(h)][:, rng.permutation(w)]
    paint = image.copy()
    paint[to_y : to_y + h, to_x : to_x + w] = _shifted(piece, rng, 0.05, 0.15)
    ramp_y = np.minimum(np.arange(h) + 1, h - np.arange(h)) / 2
    ramp_x = np.minimum(np.arange(w) + 1, w - np.arange(w)) / 2
    alpha = np.zeros((height, width), np.float32)
    feathered = np.clip(np.minimum.outer(ramp_y, ramp_x), 0, 1)
    alpha[to_y : to_y + h, to_x : to_x + w] = feathered
    return alpha, paint
