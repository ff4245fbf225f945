"""One example image a category: both predictive means and the final map."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.data.images import image_size, read_image, read_masks
from cdgp.data.manifest import Sample
from cdgp.files import atomic_write
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp_bench.methods import cdgp
from cdgp_bench.protocol import Prepared

RULE = (
    "the defective test image of the first seed whose marked share of the image is the median "
    "of its category (of two, the smaller; equal ones by name)"
)
"""How the image is chosen; printed below the figure."""


class Share(NamedTuple):
    """How much of an image is marked."""

    share: float
    name: str
    sample: Sample


def marked_shares(prepared: Prepared) -> list[Share]:
    """The defective test images with a marked mask, by their marked share, then by name."""
    name = prepared.manifest.name
    found = [
        Share(float(marked(sample).mean()), name(sample.image), sample)
        for sample in prepared.manifest.of("test")
        if sample.defective and sample.masks
    ]
    return sorted((f for f in found if f.share > 0), key=lambda f: f[:2])


def marked(sample: Sample) -> NDArray[np.bool_]:
    """(H, W) bool, the union of an image's masks."""
    return read_masks(sample.masks, image_size(sample.image))


def example_path(out: Path, dataset: str, category: str) -> Path:
    """Where a category's example is kept."""
    return out / "qualitative" / f"{dataset}-{category}.npz"


def is_current(path: Path, cache_key: str) -> bool:
    """Whether an example is there that was made with these settings and images."""
    if not path.is_file():
        return False
    with np.load(path) as found:
        return "cache_key" in found.files and str(found["cache_key"]) == cache_key


def save_example(
    path: Path,
    prepared: Prepared,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    cache_key: str,
) -> None:
    """Image, truth, mu_N, mu_A and final map of the image that ``RULE`` names, as one ``.npz``."""
    shares = marked_shares(prepared)
    if not shares:
        return
    _, name, sample = shares[(len(shares) - 1) // 2]
    data = settings.data
    image = read_image(sample.image, data.white_level, data.first_page)
    parts = cdgp.decompose(prepared.weak, settings, checkpoints, progress, image)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            cache_key=cache_key,
            name=name,
            image=np.rint(image * 255).astype(np.uint8),
            mask=marked(sample),
            **parts._asdict(),
        )
