"""What `cdgp check` finds, against brute force and hand-made sets; and suspect labels."""

import json
import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from sklearn.metrics import roc_auc_score
from tests.helpers import tiny_settings
from typer.testing import CliRunner, Result

from cdgp.audit import findings as audit
from cdgp.audit import suspects as crossfit
from cdgp.cli.main import app
from cdgp.data import layouts, splits
from cdgp.data.manifest import Manifest, read_csv
from cdgp.errors import DataError, LeakError, OutputError
from cdgp.progress import Quiet
from cdgp.report.check import verdict
from cdgp.training.stages import pretrained
from cdgp_bench.synthetic import make_surface

DAY = 86_400


def cdgp(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def put(path: Path, image: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)
    return path


def surface(seed: int, size: tuple[int, int] = (60, 64)) -> np.ndarray:
    grey = make_surface(size, np.random.default_rng(seed))[..., 0]
    return np.rint(255 * grey).astype(np.uint8)


def bins(folder: Path, good: int = 12, defective: int = 6) -> Path:
    """Different surfaces of one size in two bins, all changed at one moment."""
    for i in range(good + defective):
        name = f"good/{i:02d}.png" if i < good else f"defective/{i - good:02d}.png"
        path = put(folder / name, surface(i))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return folder


def kinds(found: audit.Audit) -> dict[str, audit.Finding]:
    return {f.kind: f for f in found.findings}


def check(folder: Path) -> audit.Audit:
    return audit.check(layouts.load(folder))


# ---------------------------------------------------------------------------------- near duplicates


def test_a_clean_set_has_no_warning(tmp_path: Path) -> None:
    found = check(bins(tmp_path))
    assert not found.of("error") and not found.of("warning"), found.findings
    assert found.counts == {"unsplit": (12, 6)} and found.sizes == {"64 × 60": 18}


def test_near_duplicates_are_those_of_brute_force(tmp_path: Path) -> None:
    """Copies with more and more noise, shifts and brightness: told where they correlate."""
    bins(tmp_path)
    base, rng = surface(0).astype(float), np.random.default_rng(1)
    for i, strength in enumerate((0, 1, 2, 4, 8, 16, 32, 64)):
        noisy = base + rng.normal(0, strength, base.shape) + 3 * i
        put(tmp_path / f"good/noisy{i}.png", noisy.clip(0, 255).astype(np.uint8))
    put(tmp_path / "good/jpeg.jpg", surface(3), quality=80)
    put(tmp_path / "good/shift.png", np.roll(surface(4), 20, axis=1))
    put(tmp_path / "good/larger.png", np.asarray(Image.fromarray(surface(5)).resize((128, 120))))
    manifest = layouts.load(tmp_path)
    found = audit.check(manifest)
    small = []
    for sample in manifest.samples:
        grey = Image.fromarray(np.asarray(Image.open(sample.image).convert("RGB"), float).mean(2))
        small.append(np.asarray(grey.resize((48, 48), Image.Resampling.BILINEAR)).ravel())
    near = np.corrcoef(np.array(small)) > audit.NEAR
    names = [manifest.name(s.image) for s in manifest.samples]
    true = {(a, b) for (i, a), (j, b) in combinations(enumerate(names), 2) if near[i, j]}
    told = {pair for cluster in found.near for pair in combinations(sorted(cluster), 2)}
    assert true and true <= told
    # What is told beyond is joined through a third image.
    linked = {frozenset(pair) for pair in true}
    for a, b in told - true:
        assert any({frozenset((a, c)), frozenset((c, b))} <= linked for c in names), (a, b)
    assert ("good/03.png", "good/jpeg.jpg") in told and ("good/05.png", "good/larger.png") in told
    assert not any("shift" in name for pair in told for name in pair)
    assert kinds(found)["near_duplicates"].severity == "warning"


def test_bits_are_counted_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 2**63, (7, 5), np.uint64)
    expected = [[int(v).bit_count() for v in row] for row in values]
    assert audit._bit_count(values).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert audit._bit_count(values).tolist() == expected


def test_groups_that_cover_the_near_duplicates_silence_them(tmp_path: Path) -> None:
    put(bins(tmp_path) / "good/jpeg.jpg", surface(3), quality=80)
    first = cdgp("check", tmp_path, "--groups", tmp_path / "manifest.csv", "--quiet", "--strict")
    assert first.exit_code == 1 and "near duplicates" in first.output
    written = read_csv(tmp_path / "manifest.csv")
    groups = {s.image.name: s.group for s in written.samples if s.group}
    assert groups == {"03.png": "good/03.png", "jpeg.jpg": "good/03.png"}
    assert "near_duplicates" not in kinds(audit.check(written))
    assert cdgp("check", tmp_path, "--quiet", "--strict").exit_code == 0
    for target in ("manifest.csv", "good/00.png"):  # what is read is never replaced
        before = (tmp_path / target).read_bytes()
        for options in ((), ("--overwrite",)):
            result = cdgp("check", tmp_path, "--groups", tmp_path / target, "--quiet", *options)
            assert result.exit_code == 2
        assert (tmp_path / target).read_bytes() == before


def test_groups_are_joined_with_clusters(tmp_path: Path) -> None:
    bins(tmp_path)
    put(tmp_path / "good/jpeg.jpg", surface(3), quality=80)
    manifest = layouts.load(tmp_path)
    named = {"good/03.png": "part 1", "good/04.png": "part 1", "good/jpeg.jpg": "part 2",
             "good/05.png": "part 2"}  # fmt: skip
    manifest = replace(manifest, samples=tuple(
        replace(s, group=named.get(manifest.name(s.image))) for s in manifest.samples
    ))  # fmt: skip
    joined = audit.grouped(manifest, audit.check(manifest))
    groups = {joined.name(s.image): s.group for s in joined.samples if s.group}
    assert set(groups) == set(named) and len(set(groups.values())) == 1


def test_parts_in_a_fixture_are_no_copies(tmp_path: Path) -> None:
    """Where nearly all images look alike, copies cannot be told, and nobody is warned."""
    base = surface(0).astype(float)
    for i in range(30):
        noisy = base + np.random.default_rng(i).normal(0, 2, base.shape)
        name = f"good/{i}.png" if i < 20 else f"defective/{i}.png"
        put(tmp_path / name, noisy.clip(0, 255).astype(np.uint8))
    found = check(tmp_path)
    assert "near_duplicates" not in kinds(found) and found.near == ()
    assert kinds(found)["taken_alike"].severity == "note"
    assert len(kinds(found)["taken_alike"].images[0]) == 30
    grouped = audit.grouped(layouts.load(tmp_path), found)
    assert {s.group for s in grouped.samples} == {None}
    splits.split(splits.hashed(grouped), 0)


def test_flat_images_are_near_nothing(tmp_path: Path) -> None:
    bins(tmp_path)
    for i in range(3):
        put(tmp_path / f"good/flat{i}.png", np.full((60, 64), 100 + i, np.uint8))
    assert check(tmp_path).near == ()


# ------------------------------------------------------------------------------- copies and splits


def test_copies_across_labels_and_stated_splits(tmp_path: Path) -> None:
    for part in ("train", "test"):
        bins(tmp_path / part)
    for i in range(18):
        name = f"good/{i:02d}.png" if i < 12 else f"defective/{i - 12:02d}.png"
        put(tmp_path / "test" / name, surface(100 + i))
    clean = check(tmp_path)
    assert clean.counts == {"test": (12, 6), "train": (12, 6)} and not clean.of("error")
    put(tmp_path / "test/good/copy.bmp", surface(2))
    put(tmp_path / "train/defective/wrong.png", surface(3))
    put(tmp_path / "train/good/again.bmp", surface(4))
    found = kinds(check(tmp_path))
    assert found["pixel_leak"].images == (("test/good/copy.bmp", "train/good/02.png"),)
    assert found["label_conflict"].images == (("train/defective/wrong.png", "train/good/03.png"),)
    assert found["pixel_copy"].images == (("train/good/04.png", "train/good/again.bmp"),)
    assert [found[k].severity for k in ("pixel_leak", "label_conflict", "pixel_copy")] == [
        "error", "error", "note",
    ]  # fmt: skip


def test_rows_without_a_split_are_training_where_others_state_one(tmp_path: Path) -> None:
    """The check, the split and the evaluation must agree on it."""
    bins(tmp_path)
    put(tmp_path / "good/again.bmp", surface(2))

    def stated(**parts: str | None) -> Manifest:
        manifest = splits.hashed(layouts.load(tmp_path))
        return replace(manifest, samples=tuple(
            replace(s, split=parts.get(f"{s.image.parent.name}_{s.image.stem}", "train"))
            for s in manifest.samples
        ))  # fmt: skip

    both = stated(good_02=None, good_again="train", good_00="test", defective_00="test")
    assert not audit.check(both).of("error")
    splits.split(both, 0)
    leak = stated(good_02="test", good_again=None, good_00="test", defective_00="test")
    assert kinds(audit.check(leak))["pixel_leak"].severity == "error"
    for refuse in (splits.check_leaks, lambda m: splits.split(m, 0)):
        with pytest.raises(LeakError, match=r"again\.bmp"):
            refuse(leak)


def test_what_training_would_refuse_is_an_error(tmp_path: Path) -> None:
    for i in range(6):
        put(tmp_path / f"train/good/{i}.png", surface(i))
        put(tmp_path / f"test/{'good' if i < 3 else 'scratch'}/{i}.png", surface(20 + i))
    put(tmp_path / "ground_truth/scratch/3_mask.png", np.zeros((60, 64), np.uint8))
    found = check(tmp_path)
    assert found.counts == {"test": (3, 3), "train": (6, 0)}
    assert "fit has no defective image" in kinds(found)["no_split"].text
    only = Manifest(tmp_path, tuple(s for s in layouts.load(tmp_path).samples if not s.defective))
    assert kinds(audit.check(only))["no_split"].severity == "error"


def test_mvtec_folders_without_junk_and_links(tmp_path: Path) -> None:
    for name in ("train/ok/0.png", "train/@eaDir/t.png", "test/.ipynb_checkpoints/c.png",
                 "test/ok/1.png", "test/dent/2.png"):  # fmt: skip
        put(tmp_path / name, surface(0))
    (tmp_path / "ground_truth").mkdir()
    (tmp_path / "test/linked").symlink_to(tmp_path / "train/ok")
    found = layouts.load(tmp_path, good="ok")
    assert found.counts() == {"test": (1, 1), "train": (1, 0)}


def test_masks_of_parts(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("good/1.png", "defective/2.png", "defective/3.png"):
            put(tmp_path / part / name, surface(0))
    blank = np.zeros((60, 64), np.uint8)
    put(tmp_path / "test/masks/2.png", blank)
    found = {layouts.load(tmp_path).name(s.image): s.masks for s in layouts.load(tmp_path).samples}
    assert {n for n, m in found.items() if m} == {"test/defective/2.png"}
    put(tmp_path / "masks/3.png", blank)
    with pytest.raises(DataError, match="give the two images different names"):
        layouts.load(tmp_path)


def test_the_nearest_name_has_the_mask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("good/scratch/5.png", "defective/scratch.png", "defective/a.png"):
        put(tmp_path / name, surface(0))
    for name in ("scratch/5.png", "a.png", "a/9.png"):
        put(tmp_path / "masks" / name, np.zeros((60, 64), np.uint8))
    manifest = layouts.load(tmp_path)
    masks = {manifest.name(s.image): [manifest.name(m) for m in s.masks] for s in manifest.samples}
    assert masks == {"good/scratch/5.png": ["masks/scratch/5.png"], "defective/scratch.png": [],
                     "defective/a.png": ["masks/a.png"]}  # fmt: skip
    assert "9.png" in caplog.text


def test_results_do_not_land_among_images(tmp_path: Path) -> None:
    for part in ("train", "test"):
        bins(tmp_path / part)
    for place in ("test/good/run", "test/run", "train", "."):
        with pytest.raises(OutputError, match="lies in the data"):
            layouts.check_outside(tmp_path / place, tmp_path, "good", "defective")
    layouts.check_outside(tmp_path / "runs", tmp_path, "good", "defective")


def test_twelve_bits_in_their_own_range_are_not_dark(tmp_path: Path) -> None:
    bins(tmp_path)
    deep = surface(0).astype(np.uint16) * 16
    for i in range(2):
        tifffile.imwrite(tmp_path / f"good/deep{i}.tif", deep + i, bitspersample=12)
    assert "dark_16_bit" not in kinds(check(tmp_path))
    tifffile.imwrite(tmp_path / "good/deep0.tif", deep)
    assert kinds(check(tmp_path))["dark_16_bit"].images == (("good/deep0.tif",),)


def test_a_group_on_two_sides(tmp_path: Path) -> None:
    bins(tmp_path)
    manifest = layouts.load(tmp_path)
    parts = {"good/00.png": "fit", "good/01.png": "test", "defective/00.png": "calibration"}
    stated = replace(manifest, samples=tuple(
        replace(s, group="A", split=parts[manifest.name(s.image)])
        for s in manifest.samples if manifest.name(s.image) in parts
    ))  # fmt: skip
    assert len(kinds(audit.check(stated))["group_leak"].images) == 2


# --------------------------------------------------------------------------- masks and file formats


def test_masks_that_contradict_or_are_stored_oddly(tmp_path: Path) -> None:
    bins(tmp_path)
    spot = np.zeros((60, 64), np.uint8)
    spot[10:20, 10:30] = 255
    other = np.zeros((60, 64), np.uint8)
    other[30:40, 5:9] = 255
    for name, mask in (
        ("00", spot), ("01_mask", spot), ("01_mask_2", other), ("02/a", spot), ("02/b", other),
        ("03", spot * 0), ("04", 255 - spot * 0), ("11", spot),
    ):  # fmt: skip
        put(tmp_path / f"masks/{name}.png", mask)
    manifest = layouts.load(tmp_path)
    masks = {manifest.name(s.image): len(s.masks) for s in manifest.samples if s.masks}
    assert masks == {"defective/00.png": 1, "defective/01.png": 2, "defective/02.png": 2,
                     "defective/03.png": 1, "defective/04.png": 1, "good/11.png": 1}  # fmt: skip
    found = kinds(audit.check(manifest))
    assert [names[0] for names in found["mask_union"].images] == [
        "defective/01.png", "defective/02.png",
    ]  # fmt: skip
    expected = {"mask_missing": "defective/05.png", "mask_empty": "defective/03.png",
                "mask_on_good": "good/11.png", "mask_inverted": "defective/04.png"}  # fmt: skip
    assert {kind: found[kind].images[0][0] for kind in expected} == expected
    manifest.write_csv(tmp_path / "manifest.csv")
    assert read_csv(tmp_path / "manifest.csv") == manifest


def test_a_mask_of_the_wrong_way_up_is_told(tmp_path: Path) -> None:
    bins(tmp_path)
    put(tmp_path / "masks/00.png", np.zeros((64, 60), np.uint8))
    found = kinds(check(tmp_path))["broken"]
    assert found.severity == "error" and "turned by 90°" in found.text
    assert found.images == (("defective/00.png",),)


def test_transparency_is_told(tmp_path: Path) -> None:
    grey = surface(50)
    alpha = np.full_like(grey, 255)
    put(bins(tmp_path) / "good/opaque.png", np.dstack([grey, grey, grey, alpha]))
    assert "transparent" not in kinds(check(tmp_path))
    alpha[0, 0] = 254
    put(tmp_path / "good/clear.png", np.dstack([grey, grey, grey, alpha]))
    assert kinds(check(tmp_path))["transparent"].images == (("good/clear.png",),)


# ---------------------------------------------------------------------------- shortcuts and balance


def test_shortcuts_are_scikit_learns_auroc(tmp_path: Path) -> None:
    """Brighter, larger, newer, of another type: each is told, and none of the others."""
    rng = np.random.default_rng(0)
    for i in range(24):
        defective = i >= 14
        grey = surface(i, (60, 64 + (8 if defective or i == 0 else 0)))
        grey = (grey * (0.6 if defective else 1.0)).astype(np.uint8)
        folder, kind = ("defective", "bmp") if defective else ("good", "png")
        path = put(tmp_path / f"{folder}/{i}.{kind}", grey)
        then = 1_700_000_000 + (DAY if defective else 0) + float(rng.uniform(0, 3600))
        os.utime(path, (then, then))
    manifest = layouts.load(tmp_path)
    found = audit.check(manifest)
    told = {s.fact: s for s in found.shortcuts}
    label = [s.defective for s in manifest.samples]
    pixels = [np.asarray(Image.open(s.image).convert("RGB"), float) for s in manifest.samples]
    for fact, values in (
        ("brightness", [p.mean() for p in pixels]),
        ("contrast", [p.mean(2).std() for p in pixels]),
        ("width", [p.shape[1] for p in pixels]),
        ("time of change", [s.image.stat().st_mtime for s in manifest.samples]),
        ("file type BMP", [s.image.suffix == ".bmp" for s in manifest.samples]),
    ):
        auroc = roc_auc_score(label, values)
        assert told[fact].auroc == pytest.approx(max(auroc, 1 - auroc)), fact
    assert "height" not in told and "saturation" not in told  # they do not vary
    warned = {f.text.split(" alone")[0] for f in found.findings if f.kind == "shortcut"}
    assert warned >= {"brightness", "width", "time of change", "file type BMP"}


def test_few_images_separate_by_luck(tmp_path: Path) -> None:
    for i in range(4):
        put(tmp_path / f"{'good' if i < 2 else 'defective'}/{i}.png", (surface(i) // (1 + i // 2)))
    found = check(tmp_path)
    assert max(s.auroc for s in found.shortcuts) == 1
    assert "shortcut" not in kinds(found) and kinds(found)["too_few"].severity == "warning"


def test_a_folder_copied_at_once_tells_nothing_by_its_times(tmp_path: Path) -> None:
    bins(tmp_path)
    for i, path in enumerate(sorted(tmp_path.rglob("*.png"), key=lambda p: p.parent.name)):
        os.utime(path, (1_700_000_000 + i, 1_700_000_000 + i))
    assert "time of change" not in {s.fact for s in check(tmp_path).shortcuts}


# ------------------------------------------------------------------------------------ the command


def test_exit_codes_json_and_page(tmp_path: Path) -> None:
    data = bins(tmp_path / "data & <b>parts</b>")
    out = tmp_path / "out"
    assert cdgp("check", data, "--quiet").exit_code == 0
    put(data / "good/<i>x.jpg", surface(3), quality=80)
    assert cdgp("check", data, "--quiet").exit_code == 0
    assert cdgp("check", data, "--quiet", "--strict", "--out", out).exit_code == 1
    (data / "good/bad.png").write_bytes(b"no image")
    again = cdgp("check", data, "--quiet", "--out", out)
    assert again.exit_code == 2 and "--overwrite" in again.output
    last = cdgp("check", data, "--quiet", "--out", out, "--overwrite", "--strict")
    assert last.exit_code == 3 and "bad.png" in last.output and "Unusable" in last.output
    assert cdgp("check", tmp_path / "gone").exit_code == 3
    assert cdgp("check", data, "--out", data / "good").exit_code == 1
    record = json.loads((out / "check.json").read_text())
    assert record["counts"] == {"unsplit": [13, 6]}
    assert {f["kind"] for f in record["findings"]} >= {"broken", "near_duplicates"}
    page = (out / "check.html").read_text()
    assert "<i>x" not in page and "&lt;i&gt;x.jpg" in page and page.count("data:image/jpeg") == 2
    assert "Not shown: is not a JPEG" in page


def test_verdicts() -> None:
    assert verdict([]) == "Clean: nothing to tell."
    note = audit.Finding("few", "note", "few")
    assert verdict([note, note]) == "Usable: 2 notes."
    assert verdict([audit.Finding("x", "error", "x"), note]).startswith(
        "Unusable as it is: 1 error"
    )


def test_names_of_odd_bytes_reach_json_and_page(tmp_path: Path) -> None:
    bins(tmp_path / "data")
    odd = os.fsdecode(b"old_\xff.png")
    (tmp_path / "data/good" / odd).write_bytes((tmp_path / "data/good/00.png").read_bytes())
    result = cdgp("check", tmp_path / "data", "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0, result.output
    assert "old_\\\\udcff.png" in (tmp_path / "out/check.json").read_text()


# --------------------------------------------------------------------------------- suspect labels


def test_probabilities_come_from_folds_without_the_group() -> None:
    """Six images of one part, all wrong in the same way, would vouch for one another."""
    rng = np.random.default_rng(0)
    label = np.arange(66) % 3 == 0
    label[60:] = True
    features = rng.normal(0, 1, (66, 5))
    features[:, :4] += 4.0 * label[:, None]
    features[60:, 4] += 8.0  # what the part has of its own
    wrong = label.copy()
    wrong[60:] = False
    alone, together = np.arange(66), np.minimum(np.arange(66), 60)
    doubts = []
    for groups in (alone, together):
        folds = crossfit.folds_of(wrong, groups, seed=0)
        assert len(folds) == 5
        doubts.append(crossfit.probabilities(features, wrong, folds)[60:])
    assert doubts[0].max() < 0.2 and doubts[1].min() > 0.35
    more = np.concatenate([features[:60], features[:6]])
    folds = crossfit.folds_of(label[:60], alone[:60], seed=0)
    found = crossfit.probabilities(more, label[:60], folds)
    assert len(found) == 66 and ((found[60:] > 0.5) == label[:6]).all()
    assert ((found[:60] > 0.5) == label[:60]).mean() > 0.9


def test_a_group_that_holds_all_of_a_class_leaves_no_folds() -> None:
    """Found by a reader: a training part of one class ended a finished training in a traceback."""
    label = np.array([True, True, False, False, False])
    assert crossfit.folds_of(label, np.array([6, 2, 4, 4, 2]), seed=0) == []
    rng = np.random.default_rng(0)
    for _ in range(300):
        label, groups = rng.random(8) < 0.4, rng.integers(0, 4, 8)
        if 0 < label.sum() < 8:
            for train, judged in crossfit.folds_of(label, groups, seed=0):
                assert len(set(label[train])) == 2
                assert not set(groups[train]) & set(groups[judged])


def test_suspects_need_two_groups_of_a_class(tmp_path: Path) -> None:
    manifest = splits.hashed(layouts.load(bins(tmp_path, good=5, defective=1)))
    encoder = pretrained(tiny_settings())
    assert crossfit.suspects(manifest, encoder, tiny_settings(), Quiet()) == []


def test_suspects_are_written_with_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "suspects.csv"
    found = [crossfit.Suspect("a\udcff.png", Path("a.png"), False, "fit", 0.75),
             crossfit.Suspect("b.png", Path("b.png"), True, None, 0.5)]  # fmt: skip
    crossfit.write_suspects(path, found)
    assert path.read_text().splitlines() == [
        "rank,image,split,label,probability,doubt",
        "1,a\\udcff.png,fit,good,0.750000,0.750000",
        "2,b.png,,defective,0.500000,0.500000",
    ]


def test_no_mask_reaches_the_suspects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest: Manifest = splits.split(splits.hashed(layouts.load(bins(tmp_path))), 0)
    seen = []

    def features(samples: list[object], *rest: object) -> np.ndarray:
        seen.extend(samples)
        return np.random.default_rng(0).normal(size=(len(samples), 4))

    monkeypatch.setattr(crossfit, "pooled_features", features)
    crossfit.suspects(manifest, pretrained(tiny_settings()), tiny_settings(), Quiet())
    assert len(seen) == 18 and {type(s).__name__ for s in seen} == {"WeakSample"}
