"""Label budgets, the overlap audit, masks at the scored size, cached digests."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests import helpers

from cdgp.data import scan
from cdgp.data.images import resize_mask
from cdgp.data.manifest import Manifest, Sample, WeakSample, WeakSplit
from cdgp.errors import DataError, LeakError
from cdgp.evaluation import true_mask
from cdgp.presets import DataSettings
from cdgp.progress import Quiet
from cdgp_bench import protocol
from cdgp_bench.plan import read_plan, ready_plans
from cdgp_bench.protocol import (
    REPORTED_SEEDS,
    cached_digests,
    overlaps,
    prepare,
    ranking_split,
)
from cdgp_bench.synthetic import make_dataset

DATA = DataSettings()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return helpers.digested(make_dataset(tmp_path_factory.mktemp("data"), good=30, defective=30))


def defects(manifest: Manifest, split: str) -> set[str]:
    return {manifest.name(s.image) for s in manifest.of(split) if s.defective}


def test_budgets_are_nested_and_keep_everything_else(images: Manifest) -> None:
    full = prepare("d", "c", images, DATA, 0)
    before: tuple[str, ...] = ()
    for k in protocol.BUDGETS:
        found = prepare("d", "c", images, DATA, 0, k)
        assert len(found.selected) == k
        assert found.selected[: len(before)] == before
        before = found.selected
        assert defects(found.manifest, "train") == set(found.selected)
        assert found.manifest.of("test") == full.manifest.of("test")
        for part in ("fit", "calibration"):
            good = [s for s in full.manifest.of(part) if not s.defective]
            assert [s for s in found.manifest.of(part) if not s.defective] == good
        assert defects(found.manifest, "calibration") <= set(found.selected)
        assert defects(found.manifest, "calibration")
        assert found.weak.good_fit_sha256 == full.weak.good_fit_sha256, "the student is shared"


def test_one_image_trains_and_calibrates(images: Manifest) -> None:
    """k = 1 as the paper has it: the Dual GP trains on it, and it is the calibration's positive."""
    weak = prepare("d", "c", images, DATA, 0, 1).weak
    assert sum(s.defective for s in weak.train) == 1
    assert sum(s.defective for s in weak.calibration) == 1


def test_a_budget_beyond_all_is_all(images: Manifest) -> None:
    full = prepare("d", "c", images, DATA, 0)
    more = prepare("d", "c", images, DATA, 0, 500)
    assert more.manifest.sha256 == full.manifest.sha256
    assert set(more.selected) == set(full.selected) == defects(full.manifest, "train")


def test_the_permutation_depends_on_seed_and_category_alone(images: Manifest) -> None:
    base = prepare("d", "c", images, DATA, 0, 4).selected
    backwards = replace(images, samples=images.samples[::-1])
    assert prepare("d", "c", backwards, DATA, 0, 4).selected == base
    assert prepare("d", "other", images, DATA, 0, 4).selected != base


def test_moving_the_positive_moves_its_group(tmp_path: Path) -> None:
    made = make_dataset(tmp_path, good=30, defective=30)
    grouped = tuple(replace(s, group=s.image.stem) for s in made.samples)
    for k in (1, 2, 4):
        found = prepare("d", "c", helpers.digested(replace(made, samples=grouped)), DATA, 3, k)
        parts: dict[str | None, set[str | None]] = {}
        for s in found.manifest.samples:
            parts.setdefault(s.group, set()).add(s.split)
        assert all(len(p) == 1 for p in parts.values())


def planted(tmp_path: Path, how: str) -> Manifest:
    """A given split in which a training image is in test, too."""
    made = make_dataset(tmp_path, good=12, defective=8)
    split = [
        replace(s, split="test" if i % 3 == 0 else "train") for i, s in enumerate(made.samples)
    ]
    source = next(s for s in split if s.split == "train")
    copy = tmp_path / "good" / f"copy.{'png' if how == 'copy' else 'bmp'}"
    if how == "copy":
        copy.write_bytes(source.image.read_bytes())
    else:
        Image.open(source.image).save(copy)
    leak = Sample(copy, source.defective, split="test")
    return replace(made, samples=(*split, leak))


@pytest.mark.parametrize("how", ["copy", "encoded again"])
def test_the_audit_stops_a_planted_leak(how: str, tmp_path: Path) -> None:
    manifest = helpers.digested(planted(tmp_path, how))
    with pytest.raises(LeakError, match="copy"):
        prepare("d", "c", manifest, DATA, 0)
    assert overlaps(manifest)["train_test"] == {"path": 0, "pixel": 1}
    with pytest.raises(LeakError, match="train–test: 1 by pixel"):
        protocol.check_overlaps(manifest)


def test_the_audit_follows_links(tmp_path: Path) -> None:
    made = helpers.digested(make_dataset(tmp_path, good=6, defective=3))
    split = [replace(s, split="train") for s in made.samples]
    link = tmp_path / "link.png"
    link.symlink_to(split[0].image)
    leak = replace(split[0], image=link, split="test")
    assert overlaps(replace(made, samples=(*split, leak)))["train_test"]["path"] == 1


def test_records_name_images_and_no_mask(images: Manifest, tmp_path: Path) -> None:
    part = prepare("d", "c", images, DATA, 1, 2)
    part.record(tmp_path)
    record = json.loads((tmp_path / "d-c-seed1-k2.json").read_text())
    assert record["selected"] == list(part.selected)
    assert record["effective_budget"] == 2
    assert record["audit"] == {
        "calibration_test": {"path": 0, "pixel": 0},
        "train_test": {"path": 0, "pixel": 0},
    }
    assert len(record["pictures"]) == len(part.manifest.samples)
    for entry in record["pictures"]:
        assert Path(entry["path"]).is_absolute()
        assert len(entry["sha256"]) == len(entry["pixel_sha256"]) == 64
    assert "mask" not in (tmp_path / "d-c-seed1-k2.json").read_text().replace(str(tmp_path), "")


def test_training_cannot_reach_masks_or_test_images(images: Manifest) -> None:
    part = prepare("d", "c", images, DATA, 0)
    assert {f.name for f in fields(WeakSplit)} == {
        "fit", "calibration", "train", "sha256", "good_fit_sha256", "own_calibration", "counts",
        "fit_groups", "calibration_groups",
    }  # fmt: skip
    assert all(isinstance(n, int) for counts in part.weak.counts.values() for n in counts)
    assert {f.name for f in fields(WeakSample)} == {"image", "defective"}
    test = {s.image for s in part.manifest.of("test")}
    assert not test & {s.image for s in (*part.weak.fit, *part.weak.calibration, *part.weak.train)}


def test_a_test_part_without_defects_is_an_error(tmp_path: Path) -> None:
    made = make_dataset(tmp_path, good=12, defective=6)
    split = [replace(s, split="train" if s.defective or i % 2 else "test")
             for i, s in enumerate(made.samples)]  # fmt: skip
    with pytest.raises(DataError, match="d/c has no defective image"):
        prepare("d", "c", helpers.digested(replace(made, samples=tuple(split))), DATA, 0)


def test_masks_shrink_by_nearest_neighbour() -> None:
    """Every output pixel is the input pixel under its centre."""
    rng = np.random.default_rng(0)
    mask = rng.random((635, 230)) < 0.3
    found = resize_mask(mask, (64, 48))
    rows = ((np.arange(64) + 0.5) * 635 / 64).astype(int)
    columns = ((np.arange(48) + 0.5) * 230 / 48).astype(int)
    np.testing.assert_array_equal(found, mask[np.ix_(rows, columns)])
    assert resize_mask(mask, (635, 230)) is mask


def test_a_defect_that_vanishes_is_noted_and_keeps_its_label(tmp_path: Path) -> None:
    mask = np.zeros((640, 240), np.uint8)
    mask[1, 1] = mask[1, 2] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    sample = Sample(tmp_path / "x.png", True, (tmp_path / "m.png",))
    notes: dict[str, list[str]] = {
        key: [] for key in ("good_with_marked_mask", "defective_without_mask",
                            "defective_with_empty_mask", "defect_vanishes_at_metric_size")
    }  # fmt: skip
    native = true_mask(sample, (640, 240), (640, 240), "x", notes)
    assert native is not None and native.sum() == 2
    assert true_mask(sample, (640, 240), (64, 64), "x", notes) is None
    assert notes["defect_vanishes_at_metric_size"] == ["x"]
    bare = replace(sample, masks=())
    assert true_mask(bare, (640, 240), (64, 64), "y", notes) is None
    assert notes["defective_without_mask"] == ["y"]
    good = true_mask(replace(bare, defective=False), (640, 240), (64, 64), "z", notes)
    assert good is not None and good.shape == (64, 64) and not good.any()


def test_digests_are_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_dataset(tmp_path / "data", good=4, defective=2)
    cache = tmp_path / "digests.json"
    first = cached_digests(made, DATA, cache, Quiet())
    assert first == helpers.digested(made)
    read: list[int] = []

    real = scan.digested

    def counted(manifest: Manifest, *rest: Any) -> Manifest:
        read.append(len(manifest.samples))
        return real(manifest, *rest)

    monkeypatch.setattr(scan, "digested", counted)
    assert cached_digests(made, DATA, cache, Quiet()) == first
    assert read == []
    changed = made.samples[0].image
    Image.open(made.samples[1].image).save(changed)
    again = cached_digests(made, DATA, cache, Quiet())
    assert read == [1]
    assert again == helpers.digested(made) != first


def test_stated_digests_are_checked_once(tmp_path: Path) -> None:
    """A table's digests do not bypass the audit: files that changed since are refused."""
    made = helpers.digested(make_dataset(tmp_path / "data", good=4, defective=2))
    cache = tmp_path / "digests.json"
    assert cached_digests(made, DATA, cache, Quiet()) == made
    first, second = made.samples[:2]
    first.image.write_bytes(second.image.read_bytes())
    for _ in range(2):
        with pytest.raises(DataError, match="is not the file that the manifest was made with"):
            cached_digests(made, DATA, cache, Quiet())


def test_masks_have_a_digest_of_their_own(tmp_path: Path) -> None:
    """Metrics depend on them, trainings do not."""
    made = make_dataset(tmp_path, good=20, defective=20)
    before = prepare("d", "c", helpers.digested(made), DATA, 0)
    masks_before = before.masks_sha256
    mask = next(s.masks[0] for s in before.manifest.of("test") if s.masks)
    values = np.asarray(Image.open(mask)).copy()
    values[:2] = True
    Image.fromarray(values).save(mask)
    after = prepare("d", "c", helpers.digested(made), DATA, 0)
    assert after.masks_sha256 != masks_before
    assert after.manifest.sha256 == before.manifest.sha256
    assert after.weak == before.weak


def test_images_bound_by_group_and_pixels_move_together(tmp_path: Path) -> None:
    """A chain: the first of the budget shares a group with a good one that equals a third."""
    made = make_dataset(tmp_path, good=30, defective=30)
    order = prepare("d", "c", helpers.digested(made), DATA, 0).selected
    first = next(s for s in made.samples if made.name(s.image) == order[0])
    good = next(s for s in made.samples if not s.defective)
    twin = tmp_path / "good" / "twin.png"
    twin.write_bytes(good.image.read_bytes())
    grouped = [replace(s, group="g") if s in (first, good) else s for s in made.samples]
    chained = replace(made, samples=(*grouped, Sample(twin, False)))
    for seed in range(4):
        found = prepare("d", "c", helpers.digested(chained), DATA, seed, 1).manifest
        parts = {s.image: s.split for s in found.samples}
        if first.image in parts:
            assert parts[first.image] == parts[good.image] == parts[twin]


@pytest.mark.parametrize("parts", [1, 3])
def test_rankings_stay_outside_every_reported_test_part(images: Manifest, parts: int) -> None:
    """Images and whole groups, for every seed to rank on; what remains is divided anew."""
    grouped = replace(images, samples=tuple(
        replace(s, group=f"{s.defective}{i // parts}") for i, s in enumerate(images.samples)
    ))  # fmt: skip
    reported = [prepare("d", "c", grouped, DATA, seed).manifest for seed in REPORTED_SEEDS]
    tested = {s.image for part in reported for s in part.of("test")}
    groups = {s.group for part in reported for s in part.of("test")}
    kept = {s.image for s in grouped.samples} - tested
    calibrating = set()
    for seed in range(5):
        found = ranking_split(grouped, DATA, seed)
        assert {s.image for s in found.samples} == kept
        assert not {s.group for s in found.samples} & groups
        both = {s.defective for s in found.of("calibration")}
        assert set(found.counts()) == {"fit", "calibration"} and both == {False, True}
        calibrating.add(frozenset(s.image for s in found.of("calibration")))
    assert len(calibrating) > 1
    on_the_seed = {s.image for s in reported[0].of("calibration")}
    assert on_the_seed & tested, "what rankings on a seed's own calibration images had seen"


def test_every_ready_plan_reports_seeds_that_rankings_stay_out_of() -> None:
    for name in ready_plans():
        assert set(read_plan(name).seeds) <= set(REPORTED_SEEDS), name


def test_a_stated_test_part_is_that_of_every_seed(images: Manifest) -> None:
    stated = replace(images, samples=tuple(
        replace(s, split="test" if i % 4 == 0 else "train") for i, s in enumerate(images.samples)
    ))  # fmt: skip
    found = ranking_split(stated, DATA, 0)
    assert {s.image for s in found.samples} == {s.image for s in stated.of("train")}
