"""The layouts of public data sets: labels, masks, splits, and counts against print."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers import SHARED

from cdgp.data.images import read_masks
from cdgp.errors import DataError
from cdgp_bench.datasets import (
    LAYOUTS,
    VISA_PUBLISHED,
    against_published,
    ksdd2,
    mvtec_ad,
    mvtec_ad2,
    visa,
    visa_rows,
)
from cdgp_bench.fake_trees import generate, ksdd2_tree, mvtec_ad2_tree, mvtec_ad_tree, visa_tree

SPLITS = SHARED / "data" / "visa_splits" / "2cls_highshot.csv"


def write_mask(path: Path, size: tuple[int, int], marked: list[tuple[int, int]]) -> None:
    mask = np.zeros(size, np.uint8)
    for y, x in marked:
        mask[y, x] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mask).save(path)


def test_mvtec_ad2_pools_all_public_images(tmp_path: Path) -> None:
    mvtec_ad2_tree(tmp_path, ("can", "vial"), good=18, bad=12)
    (tmp_path / "can" / "test_private").mkdir()
    found = mvtec_ad2(tmp_path)
    assert list(found) == ["can", "vial"]
    samples = found["can"].samples
    assert found["can"].counts() == {"unsplit": (18, 12)}
    folders = {s.image.relative_to(tmp_path / "can").parts[0] for s in samples if not s.defective}
    assert folders == {"train", "validation", "test_public"}
    for s in samples:
        assert bool(s.masks) == s.defective
        if s.masks:
            assert s.masks[0].name == f"{s.image.stem}_mask.png"
            assert read_masks(s.masks, (80, 64)).any()
    lines = against_published(LAYOUTS["mvtec_ad2"], found)
    assert "can: unsplit 18 good + 12 defective" in lines
    assert "walnuts: missing" in lines


def test_ksdd2_takes_the_label_from_the_full_size_mask(tmp_path: Path) -> None:
    """Two marked pixels of a 635 × 230 mask make a defect, however small the input is later."""
    ksdd2_tree(tmp_path, good=6, bad=3)
    surface = np.full((635, 230, 3), 120, np.uint8)
    for name, marked in (("20001", [(300, 100), (300, 101)]), ("20002", [])):
        Image.fromarray(surface).save(tmp_path / "train" / f"{name}.png")
        write_mask(tmp_path / "train" / f"{name}_GT.png", (635, 230), marked)
    samples = {s.image.stem: s for s in ksdd2(tmp_path)["ksdd2"].samples}
    assert samples["20001"].defective and samples["20001"].masks
    assert not samples["20002"].defective
    assert not any(name.endswith("_GT") for name in samples)
    assert {s.split for s in samples.values()} == {"train", "test"}


def test_ksdd2_names_what_is_missing(tmp_path: Path) -> None:
    ksdd2_tree(tmp_path, good=4, bad=2)
    (tmp_path / "train" / "10000_GT.png").unlink()
    with pytest.raises(DataError, match=r"10000\.png: has no mask 10000_GT"):
        ksdd2(tmp_path)
    (tmp_path / "train" / "10000.png").rename(tmp_path / "train" / "10000_GT.png")
    with pytest.raises(DataError, match="is the mask of no image"):
        ksdd2(tmp_path)
    with pytest.raises(DataError, match="there is no folder 'train' in it"):
        ksdd2(tmp_path / "train")


def test_ksdd2_counts_are_compared_with_print(tmp_path: Path) -> None:
    ksdd2_tree(tmp_path, good=6, bad=3)
    (line,) = against_published(LAYOUTS["ksdd2"], ksdd2(tmp_path))
    assert line.endswith("(published: train 2085 + 246, test 894 + 110)")


def test_visa_follows_its_table(tmp_path: Path) -> None:
    visa_tree(tmp_path, ("candle",), good=6, bad=3)
    (manifest,) = visa(tmp_path).values()
    assert manifest.counts() == {"test": (2, 1), "train": (4, 2)}
    for s in manifest.samples:
        assert bool(s.masks) == s.defective
        if s.masks:  # class numbers 1, 2, 3: every non-zero one is defect
            values = np.asarray(Image.open(s.masks[0]))
            np.testing.assert_array_equal(read_masks(s.masks, values.shape), values > 0)
            assert 0 < values.max() <= 3
    next(iter(manifest.samples)).image.unlink()
    with pytest.raises(DataError, match="1 listed files are missing"):
        visa(tmp_path)


def test_visa_refuses_another_table(tmp_path: Path) -> None:
    visa_tree(tmp_path, ("candle",), good=3, bad=3)
    table = tmp_path / "split_csv" / "2cls_highshot.csv"
    table.write_text(table.read_text().replace(",anomaly,", ",bad,"))
    with pytest.raises(DataError, match=r"line \d+ has split 'train', 'bad'"):
        visa(tmp_path)
    table.write_text("a,b\n")
    with pytest.raises(DataError, match="the header is"):
        visa(tmp_path)
    table.unlink()
    with pytest.raises(DataError, match="holds neither"):
        visa(tmp_path)


@pytest.mark.shared
@pytest.mark.skipif(not SPLITS.exists(), reason="needs ../shared/data/visa_splits")
def test_visa_counts_of_the_official_table() -> None:
    found: dict[str, dict[str, list[int]]] = {}
    for row in visa_rows(SPLITS):
        parts = found.setdefault(row["object"], {"train": [0, 0], "test": [0, 0]})
        parts[row["split"]][row["label"] == "anomaly"] += 1
    totals = [sum(p[part][label] for p in found.values())
              for part in ("train", "test") for label in (0, 1)]  # fmt: skip
    assert totals == [5773, 720, 3848, 480]
    assert {k: {p: tuple(c) for p, c in v.items()} for k, v in found.items()} == VISA_PUBLISHED


def test_mvtec_ad_needs_defective_training_images(tmp_path: Path) -> None:
    mvtec_ad_tree(tmp_path, ("tile",), good=6, bad=6)
    (manifest,) = mvtec_ad(tmp_path).values()
    assert manifest.counts() == {"test": (2, 2), "train": (4, 4)}
    masked = {s.image for s in manifest.samples if s.masks}
    assert masked == {s.image for s in manifest.of("test") if s.defective}
    for image in (tmp_path / "tile" / "train" / "scratch").iterdir():
        image.unlink()
    with pytest.raises(DataError, match="holds good images alone; put some defective ones"):
        mvtec_ad(tmp_path)


@pytest.mark.parametrize("layout", ["mvtec_ad", "mvtec_ad2", "ksdd2", "visa"])
def test_generated_trees_read_back(layout: str, tmp_path: Path) -> None:
    generate(layout, tmp_path)
    for manifest in LAYOUTS[layout].load(tmp_path).values():
        good, defective = (sum(c) for c in zip(*manifest.counts().values(), strict=True))
        assert good >= 18 and defective >= 12


@pytest.mark.parametrize("layout", ["mvtec_ad", "mvtec_ad2", "ksdd2", "visa"])
def test_a_missing_or_foreign_folder_is_named(layout: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataError, match=str(folder)):
            LAYOUTS[layout].load(folder)


def test_ksdd2_leaves_the_stray_copies_of_the_archive_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ksdd2_tree(tmp_path, good=4, bad=2)
    before = ksdd2(tmp_path)["ksdd2"].samples
    for name in ("10000", "10000_GT"):
        source = tmp_path / "train" / f"{name}.png"
        (tmp_path / "train" / f"{name} (copy).png").write_bytes(source.read_bytes())
    assert ksdd2(tmp_path)["ksdd2"].samples == before
    assert "10000 (copy).png" in caplog.text and "not used" in caplog.text


def test_published_counts_of_mvtec_ad_add_up() -> None:
    """5354 images: 3629 for training, and 467 good and 1258 defective ones for test."""
    counts = [c for c in LAYOUTS["mvtec_ad"].published.values() if c is not None]
    assert len(counts) == 15
    assert sum(c["train"][0] for c in counts) == 3629
    assert [sum(c["test"][i] for c in counts) for i in (0, 1)] == [467, 1258]
