"""One pass: digests, statistics, and every unreadable file in one message."""

from pathlib import Path
from typing import Any

import imagehash
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.helpers import WHITE, digested, noise_image, raised, save_image

from cdgp.data import images, scan
from cdgp.data.decode import Header, decode
from cdgp.data.manifest import Manifest, Sample
from cdgp.files import digest
from cdgp_bench.synthetic import make_dataset


def test_digests_are_added_and_checked(tmp_path: Path) -> None:
    made = make_dataset(tmp_path, 3, 2, (16, 12))
    steps: list[int] = []
    done = scan.digested(made, WHITE, lambda: steps.append(1))
    assert len(steps) == 5
    for sample in done.samples:
        assert sample.sha256 == digest(sample.image)
        assert sample.pixel_sha256 == images.pixel_digest(images.read_image(sample.image, WHITE))
    assert digested(done) == done
    noise_image(done.samples[0].image, (16, 12), 99)
    raised(lambda: digested(done), "1 of 5", "SHA-256 differs")


def test_all_bad_files_are_listed(tmp_path: Path) -> None:
    made = make_dataset(tmp_path, 24, 2, (16, 12))
    for sample in made.samples[2:]:
        sample.image.write_bytes(b"")
    Image.new("1", (16, 12)).save(tmp_path / "masks/000.png")  # width and height swapped
    message = raised(lambda: digested(made), "25 of 26", "is empty", "and 5 more")
    assert message.count("\n") == 21 and "mask is 16 × 12" in message


def test_white_level_reaches_the_decoder(tmp_path: Path) -> None:
    Image.fromarray(np.full((9, 9), 3000, np.uint16)).save(tmp_path / "a.png")
    made = Manifest(tmp_path, (Sample(tmp_path / "a.png", False),))
    assert digested(made) != scan.digested(made, 4095)
    raised(lambda: scan.digested(made, 2000), "white_level to 4095")


def test_the_first_page_reaches_the_decoder(tmp_path: Path) -> None:
    pages = [Image.new("L", (9, 9), level) for level in (10, 200)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    made = Manifest(tmp_path, (Sample(tmp_path / "a.tif", False),))
    raised(lambda: scan.digested(made, WHITE), "holds 2 pages")
    assert scan.scan(made, WHITE).unreadable
    found = scan.scan(made, WHITE, first_page=True)
    assert found.manifest == scan.digested(made, WHITE, first_page=True)
    assert found.stats[0].brightness == pytest.approx(10 / 255)


def test_a_scan_lists_what_digested_raises(tmp_path: Path) -> None:
    made = make_dataset(tmp_path, 5, 3, (16, 12))
    broken = made.samples[1].image
    broken.write_bytes(b"")
    steps: list[int] = []
    found = scan.scan(made, WHITE, lambda: steps.append(1))
    assert len(steps) == 8
    assert [sample.image for sample, _ in found.unreadable] == [broken]
    assert [s.sample for s in found.stats] == list(found.manifest.samples)
    readable = Manifest(made.root, tuple(s for s in made.samples if s.image != broken))
    assert found.manifest == digested(readable)
    message = raised(lambda: scan.check_readable(found), "1 of 8", "is empty")
    assert raised(lambda: digested(made)) == message
    scan.check_readable(scan.scan(readable, WHITE))


def test_each_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_dataset(tmp_path, 2, 2, (16, 12))
    decoded: list[Path] = []

    def counted(path: Path, header: Header) -> tuple[NDArray[Any], float]:
        decoded.append(path)
        return decode(path, header)

    monkeypatch.setattr(images, "decode", counted)
    scan.scan(made, WHITE)
    assert sorted(decoded) == sorted(made.paths())


def test_statistics_are_those_of_numpy_and_imagehash(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (40, 60, 3), np.uint8)
    path = save_image(tmp_path / "a.png", colours)
    masks = tuple(
        save_image(tmp_path / f"m{i}.png", np.pad(np.full((10, 10), 255, np.uint8),
                                                  ((i * 5, 30 - i * 5), (0, 50))))
        for i in range(2)
    )  # fmt: skip
    (s,) = scan.scan(Manifest(tmp_path, (Sample(path, True, masks),)), WHITE).stats
    unit = colours / 255
    grey = unit.mean(axis=2)
    assert (s.height, s.width) == (40, 60)
    assert (s.file.format, s.file.bits, s.file.transparent) == ("PNG", 8, 0)
    assert (s.file_bytes, s.modified) == (path.stat().st_size, path.stat().st_mtime)
    assert s.brightness == pytest.approx(grey.mean(), abs=1e-6)
    assert s.contrast == pytest.approx(grey.std(), abs=1e-6)
    assert s.saturation == pytest.approx((unit.max(axis=2) - unit.min(axis=2)).mean(), abs=1e-6)
    eight_bits = Image.fromarray(np.rint(grey * 255).astype(np.uint8))
    assert f"{int(s.perceptual_hash):016x}" == str(imagehash.phash(eight_bits))
    assert s.marked_share == pytest.approx(150 / 2400) and len(s.masks) == 2
    # float16 holds a unit vector of 2304 values to about 1e-3.
    thumbnail = s.thumbnail.astype(np.float64)
    assert thumbnail.sum() == pytest.approx(0, abs=1e-2)
    assert np.linalg.norm(thumbnail) == pytest.approx(1, abs=1e-3)
    flat = save_image(tmp_path / "flat.png", np.full((20, 20), 77, np.uint8))
    (s,) = scan.scan(Manifest(tmp_path, (Sample(flat, False),)), WHITE).stats
    assert not s.thumbnail.any() and s.marked_share == 0 and s.masks == ()
