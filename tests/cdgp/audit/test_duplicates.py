"""Exact and near duplicates, against brute force and hand-made sets."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers import (
    audited,
    digested,
    divided,
    load_folder,
    save_image,
    surface,
    two_bins,
)
from typer.testing import CliRunner, Result

from cdgp.audit import duplicates
from cdgp.audit.duplicates import grouped
from cdgp.audit.findings import Audit, Finding
from cdgp.cli.main import app
from cdgp.data import splits
from cdgp.data.manifest import Manifest, read_csv
from cdgp.errors import LeakError


def cdgp(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def kinds(found: Audit) -> dict[str, Finding]:
    return {f.kind: f for f in found.findings}


def test_near_duplicates_are_those_of_brute_force(tmp_path: Path) -> None:
    """Images with more and more noise, shifts and brightness: found where they correlate."""
    two_bins(tmp_path)
    base, rng = surface(0).astype(float), np.random.default_rng(1)
    for i, strength in enumerate((0, 1, 2, 4, 8, 16, 32, 64)):
        noisy = base + rng.normal(0, strength, base.shape) + 3 * i
        save_image(tmp_path / f"good/noisy{i}.png", noisy.clip(0, 255).astype(np.uint8))
    save_image(tmp_path / "good/jpeg.jpg", surface(3), quality=80)
    save_image(tmp_path / "good/shift.png", np.roll(surface(4), 20, axis=1))
    save_image(
        tmp_path / "good/larger.png", np.asarray(Image.fromarray(surface(5)).resize((128, 120)))
    )
    manifest = load_folder(tmp_path)
    found = audited(manifest)
    small = []
    for sample in manifest.samples:
        grey = Image.fromarray(np.asarray(Image.open(sample.image).convert("RGB"), float).mean(2))
        small.append(np.asarray(grey.resize((48, 48), Image.Resampling.BILINEAR)).ravel())
    near = np.corrcoef(np.array(small)) > duplicates.NEAR
    names = [manifest.name(s.image) for s in manifest.samples]
    true = {(a, b) for (i, a), (j, b) in combinations(enumerate(names), 2) if near[i, j]}
    found_pairs = {pair for cluster in found.near for pair in combinations(sorted(cluster), 2)}
    assert true and true <= found_pairs
    # Further pairs are joined through a third image.
    linked = {frozenset(pair) for pair in true}
    for a, b in found_pairs - true:
        assert any({frozenset((a, c)), frozenset((c, b))} <= linked for c in names), (a, b)
    expected = {("good/03.png", "good/jpeg.jpg"), ("good/05.png", "good/larger.png")}
    assert expected <= found_pairs
    assert not any("shift" in name for pair in found_pairs for name in pair)
    assert kinds(found)["near_duplicates"].severity == "warning"


def test_bits_are_counted_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 2**63, (7, 5), np.uint64)
    expected = [[int(v).bit_count() for v in row] for row in values]
    assert duplicates._bit_count(values).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert duplicates._bit_count(values).tolist() == expected


def test_groups_that_cover_the_near_duplicates_silence_them(tmp_path: Path) -> None:
    save_image(two_bins(tmp_path) / "good/jpeg.jpg", surface(3), quality=80)
    first = cdgp("check", tmp_path, "--groups", tmp_path / "manifest.csv", "--quiet", "--strict")
    assert first.exit_code == 1 and "near duplicates" in first.output
    written = read_csv(tmp_path / "manifest.csv")
    groups = {s.image.name: s.group for s in written.samples if s.group}
    assert groups == {"03.png": "good/03.png", "jpeg.jpg": "good/03.png"}
    assert "near_duplicates" not in kinds(audited(written))
    assert cdgp("check", tmp_path, "--quiet", "--strict").exit_code == 0
    for target in ("manifest.csv", "good/00.png"):  # what is read is never replaced
        before = (tmp_path / target).read_bytes()
        for options in ((), ("--overwrite",)):
            result = cdgp("check", tmp_path, "--groups", tmp_path / target, "--quiet", *options)
            assert result.exit_code == 2
        assert (tmp_path / target).read_bytes() == before


def test_groups_are_joined_with_clusters(tmp_path: Path) -> None:
    two_bins(tmp_path)
    save_image(tmp_path / "good/jpeg.jpg", surface(3), quality=80)
    manifest = load_folder(tmp_path)
    named = {"good/03.png": "part 1", "good/04.png": "part 1", "good/jpeg.jpg": "part 2",
             "good/05.png": "part 2"}  # fmt: skip
    manifest = replace(manifest, samples=tuple(
        replace(s, group=named.get(manifest.name(s.image))) for s in manifest.samples
    ))  # fmt: skip
    joined = grouped(manifest, audited(manifest))
    groups = {joined.name(s.image): s.group for s in joined.samples if s.group}
    assert set(groups) == set(named) and len(set(groups.values())) == 1


def test_parts_in_a_fixture_are_no_duplicates(tmp_path: Path) -> None:
    """Where nearly all images look alike, duplicates cannot be found, and there is no warning."""
    base = surface(0).astype(float)
    for i in range(30):
        noisy = base + np.random.default_rng(i).normal(0, 2, base.shape)
        name = f"good/{i}.png" if i < 20 else f"defective/{i}.png"
        save_image(tmp_path / name, noisy.clip(0, 255).astype(np.uint8))
    found = audited(load_folder(tmp_path))
    assert "near_duplicates" not in kinds(found) and found.near == ()
    assert kinds(found)["taken_alike"].severity == "note"
    assert len(kinds(found)["taken_alike"].images[0]) == 30
    joined = grouped(load_folder(tmp_path), found)
    assert {s.group for s in joined.samples} == {None}
    divided(digested(joined), 0)


def test_flat_images_are_near_nothing(tmp_path: Path) -> None:
    two_bins(tmp_path)
    for i in range(3):
        save_image(tmp_path / f"good/flat{i}.png", np.full((60, 64), 100 + i, np.uint8))
    assert audited(load_folder(tmp_path)).near == ()


def test_duplicates_across_labels_and_stated_splits(tmp_path: Path) -> None:
    for part in ("train", "test"):
        two_bins(tmp_path / part)
    for i in range(18):
        name = f"good/{i:02d}.png" if i < 12 else f"defective/{i - 12:02d}.png"
        save_image(tmp_path / "test" / name, surface(100 + i))
    clean = audited(load_folder(tmp_path))
    assert clean.counts == {"test": (12, 6), "train": (12, 6)} and not clean.of("error")
    save_image(tmp_path / "test/good/copy.bmp", surface(2))
    save_image(tmp_path / "train/defective/wrong.png", surface(3))
    save_image(tmp_path / "train/good/again.bmp", surface(4))
    found = kinds(audited(load_folder(tmp_path)))
    assert found["pixel_leak"].images == (("test/good/copy.bmp", "train/good/02.png"),)
    assert found["label_conflict"].images == (("train/defective/wrong.png", "train/good/03.png"),)
    assert found["pixel_copy"].images == (("train/good/04.png", "train/good/again.bmp"),)
    assert [found[k].severity for k in ("pixel_leak", "label_conflict", "pixel_copy")] == [
        "error", "error", "note",
    ]  # fmt: skip


def test_rows_without_a_split_are_training_where_others_state_one(tmp_path: Path) -> None:
    """The check, the split and the evaluation must agree on it."""
    two_bins(tmp_path)
    save_image(tmp_path / "good/again.bmp", surface(2))

    def stated(**parts: str | None) -> Manifest:
        manifest = digested(load_folder(tmp_path))
        return replace(manifest, samples=tuple(
            replace(s, split=parts.get(f"{s.image.parent.name}_{s.image.stem}", "train"))
            for s in manifest.samples
        ))  # fmt: skip

    both = stated(good_02=None, good_again="train", good_00="test", defective_00="test")
    assert not audited(both).of("error")
    divided(both, 0)
    leak = stated(good_02="test", good_again=None, good_00="test", defective_00="test")
    assert kinds(audited(leak))["pixel_leak"].severity == "error"
    for call in (splits.check_leaks, lambda m: divided(m, 0)):
        with pytest.raises(LeakError, match=r"again\.bmp"):
            call(leak)


def test_a_group_on_two_sides(tmp_path: Path) -> None:
    two_bins(tmp_path)
    manifest = load_folder(tmp_path)
    parts = {"good/00.png": "fit", "good/01.png": "test", "defective/00.png": "calibration"}
    stated = replace(manifest, samples=tuple(
        replace(s, group="A", split=parts[manifest.name(s.image)])
        for s in manifest.samples if manifest.name(s.image) in parts
    ))  # fmt: skip
    assert len(kinds(audited(stated))["group_leak"].images) == 2
