"""The one rule of masks, input by input, through the scan, the check and the evaluation."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from tests.helpers import WHITE, audited, raised, save_image, surface
from tests.refused import rows

from cdgp.data import images, scan
from cdgp.data.manifest import Manifest, Sample
from cdgp.evaluation import true_mask
from cdgp_bench.studies.refused import Row

SIZE = (32, 48)
MARKED = np.zeros(SIZE, bool)
MARKED[8:20, 10:30] = True
RIM = ndimage.binary_dilation(MARKED) & ~MARKED
LEFT = MARKED & (np.arange(48) < 18)


class Made(NamedTuple):
    """A mask file, and what it marks; None where it cannot be used."""

    path: Path
    marked: NDArray[np.bool_] | None
    defective: bool = True


def values(name: str) -> Callable[[Path], Made]:
    """A grey mask of the values in VALUES."""

    def make(folder: Path) -> Made:
        stored = VALUES[name]
        return Made(save_image(folder / "m.png", stored), np.asarray(stored > 0))

    return make


def numbered(count: int, dtype: type) -> NDArray[Any]:
    """Blobs of 3 × 4 pixels, numbered from 1 in a drawn order, on 0."""
    height, width = 60, 200
    found: NDArray[Any] = np.zeros((height, width), dtype)
    cells = [(y, x) for y in range(0, height - 3, 4) for x in range(0, width - 4, 5)]
    order = np.random.default_rng(0).permutation(len(cells))[:count]
    for number, cell in enumerate(order, start=1):
        y, x = cells[cell]
        found[y : y + 3, x : x + 4] = number
    return found


def with_rim(classes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """255 around every blob, as Pascal VOC has it."""
    rim = ndimage.binary_dilation(classes > 0) & (classes == 0)
    return np.where(rim, np.uint8(255), classes)


VALUES: dict[str, NDArray[Any]] = {
    "class-numbers": (1 * MARKED + LEFT + 4 * (MARKED & (np.arange(48) > 25))).astype(np.uint8),
    "ignore-rim": (MARKED + 255 * RIM).astype(np.uint8),
    "two-kinds": (64 * LEFT + 255 * (MARKED & ~LEFT)).astype(np.uint8),
    "sixteen-bit-kinds": (256 * LEFT + 65535 * (MARKED & ~LEFT)).astype(np.uint16),
    "many-classes": numbered(20, np.uint8),
    "many-classes-and-rim": with_rim(numbered(20, np.uint8)),
    "instances": numbered(300, np.uint16),
    "one-value": MARKED * np.uint8(255),
    "one-small-value": MARKED * np.uint8(1),
}


def oversampled(folder: Path) -> Made:
    """Edges at a quarter, a half and three quarters of a pixel."""
    fine = np.zeros((4, 32, 48), bool)
    for i in range(4):
        fine[i, 8:20, 10 : 30 + i] = True
    stored = np.rint(fine.mean(0) * 255).astype(np.uint8)
    return Made(save_image(folder / "m.png", stored), np.asarray(fine.any(0)))


def many_colours(folder: Path) -> Made:
    numbers = numbered(20, np.uint8)
    table = np.random.default_rng(0).integers(0, 256, (21, 3), np.uint8)
    table[0], table[1:, 0] = 0, np.arange(30, 230, 10)
    table[1:, 1:] = np.minimum(table[1:, 1:], table[1:, :1])
    return Made(save_image(folder / "m.png", table[numbers]), numbers > 0)


def one_bit(folder: Path) -> Made:
    """PhotometricInterpretation 0: a stored 0 is white."""
    image = Image.fromarray(MARKED)
    image.save(folder / "m.tif", tiffinfo={262: 0}, compression="raw")
    return Made(folder / "m.tif", np.asarray(Image.open(folder / "m.tif")))


def red(folder: Path) -> Made:
    stored = MARKED[..., None] * np.array([255, 0, 0], np.uint8)
    return Made(save_image(folder / "m.png", stored), MARKED)


def palette(folder: Path) -> Made:
    image = Image.fromarray(MARKED.astype(np.uint8))
    image.putpalette([0, 0, 0, 128, 0, 0])
    image.save(folder / "m.png")
    return Made(folder / "m.png", MARKED)


def two_blacks(folder: Path) -> Made:
    image = Image.fromarray((1 * MARKED + LEFT).astype(np.uint8))
    image.putpalette([0, 0, 0, 128, 0, 0, 0, 0, 0])
    image.save(folder / "m.png")
    return Made(folder / "m.png", None)


def palette_on_grey(folder: Path) -> Made:
    """Index 0, the background, is no black."""
    image = Image.fromarray(MARKED.astype(np.uint8))
    image.putpalette([40, 40, 40, 200, 0, 0])
    image.save(folder / "m.png")
    return Made(folder / "m.png", np.ones(SIZE, bool))


def alpha_marks(folder: Path) -> Made:
    white = np.full((*SIZE, 3), 255, np.uint8)
    return Made(save_image(folder / "m.png", np.dstack([white, VALUES["one-value"]])), MARKED)


def black_on_transparent(folder: Path) -> Made:
    black = np.zeros((*SIZE, 3), np.uint8)
    stored = np.dstack([black, VALUES["one-value"]])
    return Made(save_image(folder / "m.png", stored), np.zeros(SIZE, bool))


def blurred(sigma: float, top: int = 255) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        wide = np.kron(MARKED, np.ones((8, 8), bool)).astype(np.float64)
        soft = ndimage.gaussian_filter(wide, sigma)
        stored = np.rint(soft * top / soft.max()).astype(np.uint8)
        return Made(save_image(folder / "m.png", stored), stored >= (top + 1) // 2)

    return make


def jpeg(stored: NDArray[np.uint8], kept: NDArray[np.bool_]) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        wide = np.kron(stored, np.ones((5, 5), np.uint8))
        path = save_image(folder / "m.jpg", wide, quality=75)
        found = np.asarray(Image.open(path))
        inside = ndimage.binary_erosion(np.kron(kept, np.ones((5, 5), bool)), iterations=2)
        assert (found[inside] > found.max() / 2).all()
        return Made(path, found >= found.max() / 2)

    return make


def webp(quality: int, again_as_png: bool, few: bool) -> Callable[[Path], Made]:
    """Two blobs in lossy WebP; what it marks is what was stored before."""

    def make(folder: Path) -> Made:
        noise = np.random.default_rng(5).normal(size=(120, 160))
        marked = ndimage.gaussian_filter(noise, 8) > 0.05
        rgb = np.dstack([marked * np.uint8(255)] * 3)
        path = save_image(folder / "m.webp", rgb, quality=quality)
        with Image.open(path) as image:
            decoded = np.asarray(image.convert("RGB")).max(axis=2)
        assert (len(np.unique(decoded)) <= images.FEW_VALUES) == few
        if again_as_png:
            path = save_image(folder / "m.png", decoded)
        return Made(path, marked)

    return make


def inverted(folder: Path) -> Made:
    hole = np.ones(SIZE, bool)
    hole[10:14, 10:14] = False
    return Made(save_image(folder / "m.png", hole), hole)


def on_good(folder: Path) -> Made:
    return Made(save_image(folder / "m.png", VALUES["one-value"]), MARKED, defective=False)


def another_size(folder: Path) -> Made:
    return Made(save_image(folder / "m.png", MARKED[:24, :40]), None)


def turned(folder: Path) -> Made:
    return Made(save_image(folder / "m.png", MARKED.T.copy()), None)


def broken(content: bytes) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        (folder / "m.png").write_bytes(content)
        return Made(folder / "m.png", None)

    return make


MAKERS: dict[str, Callable[[Path], Made]] = {
    **{name: values(name) for name in VALUES},
    "four-times-oversampled": oversampled,
    "many-colours": many_colours,
    "one-bit": one_bit,
    "red": red,
    "palette": palette,
    "two-blacks": two_blacks,
    "palette-on-grey": palette_on_grey,
    "alpha-marks": alpha_marks,
    "blurred": blurred(6),
    "slowly-blurred": blurred(40),
    "faint-blurred": blurred(6, top=90),
    "jpeg": jpeg(VALUES["one-value"], MARKED),
    "jpeg-kinds": jpeg(VALUES["two-kinds"], MARKED & ~LEFT),
    "webp-few": webp(95, again_as_png=False, few=True),
    "webp-to-png": webp(80, again_as_png=True, few=False),
    "inverted": inverted,
    "black-on-transparent": black_on_transparent,
    "on-good": on_good,
    "another-size": another_size,
    "turned": turned,
    "not-an-image": broken(b"<!doctype html><title>Sign in</title>"),
    "empty-file": broken(b""),
}


def sample_with(folder: Path, made: Made) -> Sample:
    """An image of the mask's size, or of SIZE where the mask cannot be used."""
    size = SIZE if made.marked is None else made.marked.shape
    image = save_image(folder / "part.png", surface(0, (size[0], size[1])))
    return Sample(image, made.defective, (made.path,))


@rows("masks", MAKERS)
def test_every_mask_is_read_by_one_rule_or_told(tmp_path: Path, row: Row) -> None:
    made = MAKERS[row.id](tmp_path)
    sample = sample_with(tmp_path, made)
    manifest = Manifest(tmp_path, (sample,))
    found = audited(manifest)
    about = [f for f in found.findings if f.kind.startswith("mask") and f.kind != "mask_missing"]
    notes: dict[str, list[str]] = defaultdict(list)
    size = images.image_size(sample.image)
    if row.result == "refused":
        raised(lambda: true_mask(sample, size, size, "part.png", notes), str(made.path))
        # A warning to who trains, and a refusal to who evaluates.
        assert [(f.kind, f.severity) for f in about] == [("mask_unusable", "warning")]
        assert row.says in about[0].text and str(made.path) in about[0].text
        assert len(scan.scan(manifest, WHITE).stats) == 1
        raised(lambda: scan.digested(manifest, WHITE), row.says, str(made.path), "part.png")
        return
    mask = true_mask(sample, size, size, "part.png", notes)
    assert made.marked is not None
    np.testing.assert_array_equal(images.read_mask(made.path, size), made.marked)
    assert bool(about) == bool(notes) == (row.result == "warned")
    assert not row.says or any(row.says in f.text for f in about), about
    if made.defective and made.marked.any():
        assert mask is not None
        np.testing.assert_array_equal(mask, made.marked)


@pytest.mark.parametrize("sigma", [1, 2, 4, 8, 16, 30, 60, 120])
def test_no_blur_is_taken_for_classes(sigma: float) -> None:
    spots = np.random.default_rng(int(sigma)).random((600, 800)) < 0.0002
    spots = ndimage.binary_dilation(spots, iterations=15)
    soft = ndimage.gaussian_filter(spots.astype(float), sigma)
    stored = np.rint(255 * soft / soft.max()).astype(np.float32) / np.float32(255)
    assert images._is_soft(stored, np.unique(stored), "PNG")


def test_a_frequent_first_class_is_not_taken_for_blur() -> None:
    """Most borders are those of class 1 with the background: a step to the next value."""
    numbers = numbered(300, np.uint16)
    numbers = np.where(numbers > 30, 1, numbers).astype(np.float32) / np.float32(65535)
    assert not images._is_soft(numbers, np.unique(numbers), "PNG")


@pytest.mark.parametrize("count", [17, 60, 200])
@pytest.mark.parametrize("seed", [0, 1])
def test_class_maps_are_not_taken_for_blur(count: int, seed: int) -> None:
    """Cells around drawn points, each of its own number, with background between some."""
    rng = np.random.default_rng(seed)
    points = rng.integers(0, 300, (count + 10, 2))
    y, x = np.mgrid[:300, :300]
    nearest = ((y[..., None] - points[:, 0]) ** 2 + (x[..., None] - points[:, 1]) ** 2).argmin(-1)
    numbers = np.where(nearest < count, nearest + 1, 0).astype(np.float32) / np.float32(65535)
    assert not images._is_soft(numbers, np.unique(numbers), "PNG")


@pytest.mark.filterwarnings("error")
def test_a_mask_of_many_bright_values_is_marked_everywhere(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(200, 256, (40, 40), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "mask.png")
    assert images.read_mask(tmp_path / "mask.png", (40, 40)).all()
