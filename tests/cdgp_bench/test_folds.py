"""Folds: every image tested once, groups whole, labels even, and a plan that runs them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score
from tests import helpers
from tests.cdgp_bench.helpers import here, run_cli, written

from cdgp.data.manifest import Manifest, Sample, WeakSplit
from cdgp.errors import DataError
from cdgp.presets import DataSettings
from cdgp_bench import grid
from cdgp_bench.folds import cross_test
from cdgp_bench.methods import Fitted
from cdgp_bench.plan import read_plan
from cdgp_bench.protocol import overlaps, prepare
from cdgp_bench.results import Results
from cdgp_bench.rows import ROWS, read_rows, run_name
from cdgp_bench.run import run_plan
from cdgp_bench.scoring import METRICS
from cdgp_bench.studies import paired
from cdgp_bench.synthetic import make_dataset

FOLDS = 3
IN_FOLDS = ("seeds = [0]", f"seeds = [0]\nfolds = {FOLDS}")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Groups of one to four images, and equal pixels that join one of both labels to another."""
    folder = tmp_path_factory.mktemp("grouped")
    made = make_dataset(folder, good=40, defective=20)
    last = made.samples[-1]
    twin = folder / "twin.bmp"
    Image.open(last.image).save(twin)
    sizes = (1, 2, 3, 4, 1, 1)
    groups = [f"g{block}{i % 6}" for block in range(10) for i in range(6) for _ in range(sizes[i])]
    named = [replace(s, group=groups[i]) for i, s in enumerate(made.samples)]
    both = replace(made, samples=(*named, Sample(twin, last.defective, group=named[6].group)))
    return helpers.digested(both)


def fold_of(divided: list[Manifest]) -> dict[Path, int]:
    """The fold in which each image is the test part; an image that is tested twice fails."""
    found: dict[Path, int] = {}
    for fold, manifest in enumerate(divided):
        for sample in manifest.of("test"):
            assert sample.image not in found
            found[sample.image] = fold
    return found


def bound_together(samples: tuple[Sample, ...]) -> list[set[Path]]:
    """Images of one group or of equal pixels, joined until nothing changes."""
    found = [{s.image} for s in samples]
    links = [
        {a.image, b.image} for a in samples for b in samples
        if (a.group is not None and a.group == b.group) or a.pixel_sha256 == b.pixel_sha256
    ]  # fmt: skip
    for link in links:
        touched = [one for one in found if one & link]
        found = [one for one in found if not one & link] + [set().union(*touched)]
    return found


def test_every_image_is_tested_once_with_its_whole_group(images: Manifest) -> None:
    divided = cross_test(images, 5)
    place = fold_of(divided)
    assert set(place) == {s.image for s in images.samples}
    components = bound_together(images.samples)
    assert max(map(len, components)) > 4, "two groups are joined by equal pixels"
    assert all(len({place[image] for image in one}) == 1 for one in components)
    for manifest in divided:
        assert set(manifest.counts()) == {"train", "test"}
        assert overlaps(manifest)["train_test"] == {"path": 0, "pixel": 0}
    for label in (False, True):
        of_label = [place[s.image] for s in images.samples if s.defective == label]
        counts = Counter(of_label)
        # A fold may be off by the largest group.
        assert max(counts.values()) - min(counts.values()) <= max(map(len, components))


def test_folds_depend_on_pixels_alone(images: Manifest, tmp_path: Path) -> None:
    place = fold_of(cross_test(images, 4))
    digest = {s.image: s.pixel_sha256 for s in images.samples}
    by_pixels = {(digest[image], fold) for image, fold in place.items()}
    moved = []
    for number, sample in enumerate(reversed(images.samples)):
        target = tmp_path / f"{number:03d}{sample.image.suffix}"
        target.write_bytes(sample.image.read_bytes())
        moved.append(replace(sample, image=target, masks=(), sha256=None, pixel_sha256=None))
    again = helpers.digested(Manifest(tmp_path, tuple(moved)))
    found = fold_of(cross_test(again, 4))
    assert {(s.pixel_sha256, found[s.image]) for s in again.samples} == by_pixels


def test_training_sees_nothing_of_its_fold(images: Manifest) -> None:
    """Fit and calibration hold both labels, and share no image, group or pixels with test."""
    for fold, manifest in enumerate(cross_test(images, 4)):
        for seed in (0, 1):
            part = prepare("d", "c", manifest, DataSettings(), seed, fold=fold)
            assert part.fold == fold
            test, weak = part.manifest.of("test"), part.weak
            assert {s.image for s in test} == {s.image for s in manifest.of("test")}
            seen = {s.image for s in (*weak.fit, *weak.calibration, *weak.train)}
            assert not seen & {s.image for s in test}
            assert not {s.group for s in test} & {s.group for s in part.manifest.of("train")}
            for samples in (weak.fit, weak.calibration):
                assert {s.defective for s in samples} == {True, False}
            assert sum(n for counts in part.facts()["audit"].values() for n in counts.values()) == 0


def test_what_cannot_be_folded_is_an_error(images: Manifest, tmp_path: Path) -> None:
    stated = replace(
        images, samples=(replace(images.samples[0], split="test"), *images.samples[1:])
    )
    with pytest.raises(DataError, match="states a split"):
        cross_test(stated, 3)
    few = [replace(s, group="all" if s.defective else None) for s in images.samples]
    with pytest.raises(DataError, match="of 3 folds, only 1 get a defective image"):
        cross_test(replace(images, samples=tuple(few)), 3)
    one = replace(images, samples=images.samples[:1])
    with pytest.raises(DataError, match="of 2 folds"):
        cross_test(one, 2)


def test_a_plan_tests_every_image_and_goes_on_where_it_was_stopped(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row a fold; killed after the first, the rest is computed and the first stays."""
    file = written(tmp_path, surfaces.root, IN_FOLDS, (', "cdgp"', ""))
    plan, method = read_plan(str(file)), grid.METHODS["static_max"]
    trained: list[str] = []

    def fit(data: WeakSplit, *rest: Any) -> Fitted:
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(data.sha256)
        return method.fit(data, *rest)

    with monkeypatch.context() as patched:
        patched.setitem(grid.METHODS, "static_max", method._replace(fit=fit))
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, here(tmp_path / "out"))
    (first,) = read_rows(tmp_path / "out" / ROWS)
    code, output = run_cli(file, "--out", tmp_path / "out")
    assert code == 0, output
    rows = read_rows(tmp_path / "out" / ROWS)
    assert rows[0] == first
    assert [row["fold"] for row in rows] == list(range(FOLDS))
    assert [run_name(row).endswith(f"seed 0 fold {i}") for i, row in enumerate(rows)] == [True] * 3
    assert len({row["manifest_sha256"] for row in rows}) == FOLDS
    tested = [image[0] for row in rows for image in row["images"]]
    assert sorted(tested) == sorted(
        str(s.pixel_sha256)[:12] for s in helpers.digested(surfaces).samples
    )
    for row in rows:
        _, _, labels, scores = zip(*row["images"], strict=True)
        assert roc_auc_score(labels, scores) == pytest.approx(row["image_auroc"])
        record = (
            tmp_path / "out" / "manifests" / f"surfaces-surfaces-seed0-fold{row['fold']}-full.json"
        )
        assert json.loads(record.read_text())["manifest_sha256"] == row["manifest_sha256"]
    page = (tmp_path / "out" / "evidence.md").read_text()
    assert "mean ± standard deviation over 3 folds" in page
    assert "(1 of 3 folds)" not in page
    summary = Results(plan, rows).summary("surfaces", grid.Variant("", "static_max"), "image_auroc")
    assert summary is not None and summary.repeats == FOLDS
    assert summary.mean == pytest.approx(sum(row["image_auroc"] for row in rows) / FOLDS)
    half = Results(plan, rows[:1]).summary(
        "surfaces", grid.Variant("", "static_max"), "image_auroc"
    )
    assert half is not None and half.repeats == 1


def test_pairs_of_a_plan_are_measured_from_kept_curves(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image is scored again, and the differences are those of the rows."""
    file = written(tmp_path, surfaces.root, IN_FOLDS)
    plan, out = read_plan(str(file)), tmp_path / "out"
    rows = run_plan(plan, here(out)).rows
    with monkeypatch.context() as patched:
        patched.setattr(paired, "profiled", lambda *a: pytest.fail("scored again"))
        found = paired.compared(plan, out, out / "checkpoints")
    assert [row["metric"] for row in found] == list(METRICS)
    for row in found:
        means = {
            m: sum(r[row["metric"]] for r in rows if r["method"] == m) / FOLDS
            for m in ("static_max", "cdgp")
        }
        assert row["value"] == pytest.approx(means["static_max"] - means["cdgp"], abs=1e-3)
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["folds"], row["images"], row["groups"]) == (FOLDS, 36, 36)
    for curves in (out / "checkpoints" / "surfaces" / "curves").iterdir():
        curves.unlink()
    assert paired.compared(plan, out, out / "checkpoints") == found, "scored again, to the same"
