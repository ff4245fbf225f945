"""The faults that users of such tools reported: a test for each of the cases in ../shared."""

import csv
import hashlib
import html.parser
import json
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers import (
    ROOT,
    SHARED,
    WHITE,
    audited,
    cdgp,
    digested,
    divided,
    load_folder,
    tiny_settings,
)

from cdgp import artifact
from cdgp.audit.findings import Audit
from cdgp.audit.suspects import suspects
from cdgp.data import images, splits
from cdgp.data.manifest import Manifest, read_csv
from cdgp.data.resize import resize_map
from cdgp.errors import CdgpError, DataError, ImageError, LeakError, ModelFileError, SettingsError
from cdgp.evaluation import pixel_metrics, true_mask
from cdgp.inference import load
from cdgp.method.build import pretrained_encoder
from cdgp.metrics.ranking import image_auroc
from cdgp.presets import read_settings
from cdgp.progress import Quiet
from cdgp.workflows import Run
from cdgp.workflows import train_run as fit
from cdgp.workflows.evaluate import score_samples
from cdgp_bench import datasets

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = SHARED / "cases/make_cases.py"
    if not script.is_file():
        pytest.skip(f"{script} is missing")
    out = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, script, out], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def model(tiny_run: Run) -> Path:
    assert tiny_run.folder is not None
    return tiny_run.folder / "model.safetensors"


def facts(case: Path) -> dict[str, Any]:
    found = json.loads((case / "case.json").read_text("utf-8"))["facts"]
    assert isinstance(found, dict)
    return found


def kinds(found: Audit) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {f.kind: f.images for f in found.findings}


def unreadable(path: Path) -> str:
    with pytest.raises(ImageError) as raised:
        images.read_image(path, WHITE)
    assert str(raised.value).startswith(str(path))
    return images.reason(raised.value, path)


# ------------------------------------------------------------------------------------------ images


def test_deep_grey(cases: Path) -> None:
    case = cases / "img-deep-gray"
    for part in ("good", "defective"):
        twin = images.read_image(case / "ref/twin8" / f"{part}.png", WHITE)
        for kind, white in (
            ("u16_png/{}/000.png", 65535),
            ("u16_tif/{}/000.tif", 65535),
            ("u16_tif_be/{}/000.tif", 65535),
            ("f32_unit/{}/000.tif", 65535),
            ("u12_in_u16/{}/000.tif", 4080),
        ):
            image = images.read_image(case / kind.format(part), white)
            assert np.abs(image - twin).max() <= 1 / 255
    assert "3 non-finite pixels" in unreadable(case / "f32_nan/good/000.tif")
    # Nobody is left with nearly black images: the scale that fits is named.
    found = audited(load_folder(case / "u12_in_u16"))
    dark = next(f for f in found.findings if f.kind == "dark_16_bit")
    assert dark.severity == "warning" and "white_level=4095" in dark.text
    assert "dark_16_bit" not in kinds(audited(load_folder(case / "u16_png")))
    assert "dark_16_bit" not in kinds(audited(load_folder(case / "u12_in_u16"), 4095))


def test_modes_and_alpha(cases: Path, tiny_run: Run) -> None:
    case = cases / "img-modes-alpha"
    found = load_folder(case)
    assert found.counts() == {"unsplit": (facts(case)["n_good"], 1)}
    assert {images.read_image(s.image, WHITE).shape for s in found.samples} == {(64, 64, 3)}
    index = np.asarray(Image.open(case / "good/e_palette.png"))
    opaque = index != Image.open(case / "good/e_palette.png").info["transparency"]
    shown = images.read_image(case / "good/e_palette.png", WHITE)
    looked_up = images.read_image(case / "ref/palette_rgb.png", WHITE)
    np.testing.assert_array_equal(shown[opaque], looked_up[opaque])
    clear = [("defective/g_RGBA_hidden.png",)] + [("good/e_palette.png",)] * (not opaque.all())
    assert kinds(audited(found))["transparent"] == tuple(clear)
    hidden, composed = (
        tiny_run.detector.predict(case / name).pred_score
        for name in ("defective/g_RGBA_hidden.png", "ref/hidden_composed_black.png")
    )
    assert hidden == composed


def test_exif_orientation(cases: Path, model: Path, tmp_path: Path) -> None:
    case = cases / "img-exif-orientation"
    result = cdgp("predict", model, case / "defective", "--out", tmp_path, "--save-maps", "--quiet")
    assert result.exit_code == 0, result.output
    maps = []
    for o in (1, 3, 6, 8):
        image = images.read_image(case / f"defective/o{o}.jpg", WHITE)
        assert image.shape == (96, 64, 3)
        mask, bright = images.read_mask(case / f"masks/o{o}.png", (96, 64)), image[..., 0] > 0.7
        assert (mask & bright).sum() / (mask | bright).sum() > 0.5
        record = json.loads((tmp_path / f"overlays/o{o}.jpg.json").read_text())
        assert record["size"] == [96, 64]
        maps.append(np.load(tmp_path / f"maps/o{o}.jpg.npy").astype(float))
    spread = np.ptp(maps[0])
    assert all(np.abs(m - maps[0]).mean() < 0.1 * spread for m in maps)


def test_broken(cases: Path, tmp_path: Path) -> None:
    case = cases / "img-broken"
    bad, truth = facts(case)["bad"], facts(case)
    found = audited(load_folder(case))
    assert [Path(group[0]).name for group in kinds(found)["broken"]] == bad
    assert found.counts == {"unsplit": (truth["usable_good"], truth["usable_defective"])}
    for command in (("check", case), ("train", case, "--out", tmp_path / "run")):
        result = cdgp(*command, "--quiet")
        assert result.exit_code == 3
        assert all(name in result.output for name in bad)
        assert "png_named" not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_extreme_size(cases: Path, model: Path, tmp_path: Path) -> None:
    folder = cases / "img-extreme-size/predict"
    assert images.image_size(folder / "line_scan.png") == (9000, 12000)  # decoding takes seconds
    assert "3600000000 pixels" in unreadable(folder / "claims_60000.png")
    assert "400 × 3" in unreadable(folder / "w400_h3.png")
    chosen = [p for p in sorted(folder.iterdir()) if p.name != "line_scan.png"]
    result = cdgp("predict", model, *chosen, "--out", tmp_path, "--quiet")
    assert result.exit_code == 3
    with (tmp_path / "scores.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["normal.png"]
    with (tmp_path / "unreadable.csv").open() as file:
        listed = {row["image"]: row["problem"] for row in csv.DictReader(file)}
    assert set(listed) == {"claims_60000.png", "w1_h1.png", "w1_h96.png", "w400_h3.png"}
    assert all("8 × 8" in listed[name] for name in listed if name.startswith("w"))


# ------------------------------------------------------------------------------------------- paths


class Links(html.parser.HTMLParser):
    """Where a page's links lead, and whether a name has become markup."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.bold_seven = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value or "" for key, value in attrs if tag == "a" and key == "href"]

    def handle_data(self, data: str) -> None:
        self.bold_seven |= data == "7"


def test_unicode_names(cases: Path, model: Path, tmp_path: Path) -> None:
    case = cases / "path-unicode"
    assert read_csv(case / "manifest.csv").counts() == {"unsplit": (8, 1)}
    result = cdgp("predict", model, case / "good", "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0, result.output
    count = facts(case)["n_good"]
    overlays = list((tmp_path / "out/overlays").rglob("*.jpg"))
    assert len(overlays) == count
    page = Links()
    page.feed((tmp_path / "out/report.html").read_text("utf-8"))
    assert page.targets and not page.bold_seven
    for target in page.targets:
        named = urllib.parse.unquote_to_bytes(target)
        assert Path(
            (tmp_path / "out").as_posix(), named.decode("utf-8", "surrogateescape")
        ).exists()
    copy = tmp_path / "copy.csv"
    found = digested(Manifest(case, tuple(load_folder(case).samples)))
    found.write_csv(copy)
    assert read_csv(copy, case) == found


def test_junk(cases: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = cases / "path-ext-junk"
    found = load_folder(case)
    assert found.counts() == {"unsplit": (facts(case)["n_good"], facts(case)["n_defective"])}
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1 and "entries are not used" in warned[0]
    assert not any("copy" in kind for kind in kinds(audited(found)))


# ------------------------------------------------------------------------------------------- masks


def test_class_number_masks(cases: Path) -> None:
    case = cases / "mask-01-visa"
    maps, masks, truth = [], [], []
    rng = np.random.default_rng(0)
    for name, positive in facts(case)["positive"].items():
        mask = images.read_mask(case / f"widget/Data/Masks/Anomaly/{name}.png", (64, 64))
        assert mask.sum() == positive
        masks.append(mask)
        truth.append(images.read_mask(case / f"ref/{name}.png", (64, 64)))
        maps.append(rng.random((64, 64), np.float32))
    names = [str(i) for i in range(len(maps))]
    assert pixel_metrics(maps, masks, names) == pixel_metrics(maps, truth, names)


def test_mask_encodings(cases: Path) -> None:
    case = cases / "mask-encodings"
    positive = facts(case)["positive"]
    marked = {
        path.stem: int(images.read_mask(path, (64, 64)).sum())
        for path in (case / "masks").iterdir()
    }
    assert marked.pop("inverted") == 64 * 64 - positive
    assert abs(marked.pop("lossy") / positive - 1) < 0.1
    assert len(marked) == 5 and set(marked.values()) == {positive}
    found = {f.kind: f for f in audited(load_folder(case)).findings}
    assert found["mask_grey"].images == (("defective/lossy.png", "masks/lossy.jpg"),)
    levels = len(np.unique(np.asarray(Image.open(case / "masks/lossy.jpg"))))
    assert f"lossy.jpg: {levels} levels" in found["mask_grey"].text
    assert found["mask_inverted"].images == (("defective/inverted.png", "masks/inverted.png"),)
    assert "96 % of the image is marked, inverted?" in found["mask_inverted"].text


def test_masks_paired_by_name(cases: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = cases / "mask-missing-name"
    found, truth = load_folder(case), facts(case)
    assert found.counts() == {"test": (2, 4), "train": (4, 0)}
    pairs = {s.image.stem: s.masks[0].name for s in found.samples if s.masks}
    assert pairs == truth["pairs"]
    assert truth["orphan"][0] in caplog.text
    missing = kinds(audited(found))["mask_missing"]
    assert [Path(group[0]).stem for group in missing] == truth["missing"]
    notes: dict[str, list[str]] = {"defective_without_mask": []}
    maps, masks = [], []
    for sample in found.of("test"):
        mask = true_mask(sample, (64, 64), (64, 64), sample.image.stem, notes)
        if mask is not None:
            masks.append(mask)
            ref = images.read_mask(case / f"ref/{sample.image.name}", (64, 64))
            maps.append(ref.astype(np.float32) if sample.defective else np.zeros((64, 64), "f4"))
    assert sum(m.any() for m in masks) == truth["n_pixel_defective"]
    assert notes["defective_without_mask"] == truth["missing"]
    assert pixel_metrics(maps, masks, list("abcde"))["pixel_auroc"] == 1


@pytest.mark.parametrize("kind", ["mixed", "all_empty"])
def test_empty_masks_of_defective_images(cases: Path, tiny_run: Run, kind: str) -> None:
    case = cases / "mask-empty-defective" / kind
    manifest = digested(load_folder(case))
    _, metrics = score_samples(tiny_run.detector, manifest, manifest.samples, None, Quiet())
    assert metrics["image_auroc"] is not None
    found, notes = kinds(audited(manifest)), metrics["notes"]
    if kind == "mixed":
        truth = facts(case.parent)["mixed"]
        for name, key in (("mask_empty", "empty_defective"), ("mask_on_good", "marked_good")):
            assert [Path(group[0]).stem for group in found[name]] == truth[key]
        assert [Path(n).stem for n in notes["defective_with_empty_mask"]] == ["d1", "d2"]
        assert [Path(n).stem for n in notes["good_with_marked_mask"]] == ["g1"]
        assert metrics["pictures_with_pixels"] == 3 and metrics["pixel_auroc"] is not None
    else:
        assert len(found["mask_empty"]) == 3
        for name in ("pixel_auroc", "pixel_aupro_30"):
            assert metrics[name] is None and "no marked pixel" in metrics[f"{name}_reason"]
        json.dumps(metrics, allow_nan=False)


def test_masks_beside_the_images(cases: Path) -> None:
    case = cases / "mask-ksdd2-layout"
    found, truth = datasets.ksdd2(case)["ksdd2"], facts(case)
    for part in ("train", "test"):
        assert found.counts()[part] == (truth[part]["good"], truth[part]["defective"])
    assert len(found.samples) == truth["pictures"]
    assert not any("_GT" in s.image.name for s in found.samples)
    tiny = next(s for s in found.samples if s.image == case / truth["tiny_defect"])
    assert tiny.defective and images.read_masks(tiny.masks, (126, 46)).sum() == 2
    # What training gets has no mask to look at; equal weights under other masks: test_training.
    assert set(vars(found.weak("train")[0])) == {"image", "defective"}


# --------------------------------------------------------------------------------------- data sets


def test_duplicates_and_leaks(cases: Path, model: Path, tmp_path: Path) -> None:
    case = cases / "data-duplicates-leak"
    result = cdgp("check", case, "--out", tmp_path / "check", "--quiet")
    assert result.exit_code == 3
    record = json.loads((tmp_path / "check/check.json").read_text())
    listed = {f["kind"]: f["pictures"] for f in record["findings"]}
    for kind, key in (
        ("byte_leak", "byte_copy"), ("pixel_leak", "pixel_copy"), ("near_leak", "near_copy"),
        ("label_conflict", "label_conflict"),
    ):  # fmt: skip
        expected = [sorted(pair) for pair in facts(case)[key]]
        assert [sorted(pair) for pair in listed[kind]] == expected, kind
    result = cdgp("evaluate", model, case, "--quiet")
    assert result.exit_code == 3 and "t0.png" in result.output and "t1.png" in result.output
    manifest = digested(load_folder(case))
    with pytest.raises(DataError, match=r"x\.png"):
        divided(manifest, 0)
    pooled = Manifest(
        case,
        tuple(s.__class__(s.image, s.defective, sha256=s.sha256, pixel_sha256=s.pixel_sha256)
              for s in manifest.samples if s.image.name != "x.png"),
    )  # fmt: skip
    for seed in range(20):
        splits.check_leaks(divided(pooled, seed))


def test_mislabelled(cases: Path) -> None:
    case = cases / "data-mislabelled"
    before = {p: p.read_bytes() for p in case.rglob("*.png")}
    manifest = divided(digested(load_folder(case)), 0)
    found = suspects(manifest, pretrained_encoder(tiny_settings()), tiny_settings(), Quiet())
    assert len(found) == 16
    good = [Path(s.name).stem for s in found if not s.defective]
    defective = [Path(s.name).stem for s in found if s.defective]
    assert set(facts(case)["suspect_good"]) <= set(good[:3])
    assert defective[0] == facts(case)["suspect_defective"][0]
    assert {p: p.read_bytes() for p in case.rglob("*.png")} == before


def test_mixed_sizes(cases: Path, model: Path, tmp_path: Path) -> None:
    case = cases / "data-mixed-size"
    scores = {}
    for out, files in (
        ("a", sorted((case / "defective").iterdir())),
        ("b", sorted((case / "defective").iterdir(), reverse=True)),
    ):
        result = cdgp("predict", model, *files, "--out", tmp_path / out, "--save-maps", "--quiet")
        assert result.exit_code == 0
        with (tmp_path / out / "scores.csv").open() as file:
            scores[out] = {row["image"]: float(row["pred_score"]) for row in csv.DictReader(file)}
    assert scores["a"] == pytest.approx(scores["b"], abs=1e-5)
    for name, truth in facts(case).items():
        width, height = truth["size_wh"]
        assert np.load(tmp_path / f"a/maps/{name}.png.npy").shape == (height, width)
        mask = images.read_mask(case / f"masks/{name}.png", (height, width))
        reduced = images.to_input(np.repeat(mask[..., None], 3, 2).astype("f4"), (64, 64))[0]
        back = resize_map(reduced, (height, width)) > 0.5
        assert (back & mask).sum() / (back | mask).sum() > 0.6
        # Nothing is cropped: the border takes part in what the network sees.
        image = images.read_image(case / f"defective/{name}.png", WHITE)
        other = image.copy()
        other[:6] = other[-6:] = other[:, :6] = other[:, -6:] = 0
        size = (64, 64)
        assert np.abs(images.to_input(other, size) - images.to_input(image, size)).max() > 0.1


@pytest.mark.parametrize("kind", ["five", "two"])
def test_fewer_images_than_a_batch(cases: Path, tmp_path: Path, kind: str) -> None:
    run = fit(cases / "data-smaller-than-batch" / kind, tmp_path / "run", tiny_settings())
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if "loss" in record]
    assert losses and np.isfinite(losses).all()
    assert {record["stage"] for record in log if "step" in record} >= {"Dual GP", "Reverse student"}
    assert "too_few" in kinds(run.audit)
    image = run.detector.model.calibration.image
    if kind == "two":
        assert any("training images themselves" in note for note in image.notes)
        assert not run.manifest.of("test") and not run.manifest.of("calibration")
    else:
        assert image.is_p_value, "the only defective image is trained on"
    assert 0 <= run.detector.predict(run.manifest.samples[0].image).pred_score <= 1


# ----------------------------------------------------------------------------------------- numbers


def test_metrics_with_ties(cases: Path) -> None:
    case = cases / "num-metrics-ties"
    arrays, expected = np.load(case / "metrics.npz"), facts(case)["expected"]
    for name, truth in expected.items():
        if name in ("image_auroc",) or name.startswith("pooled"):
            continue
        one, mask = arrays[f"map_{name}"].astype(np.float32), arrays[f"mask_{name}"].astype(bool)
        if truth == "error":
            with pytest.raises(DataError, match="image 7"):
                pixel_metrics([one], [mask], ["image 7"])
            continue
        found = pixel_metrics([one], [mask], [name])
        for key, ours in (("pixel_auroc", "pixel_auroc"), ("aupro_030", "pixel_aupro_30"),
                          ("aupro_005", "pixel_aupro_05")):  # fmt: skip
            if truth[key] is None:
                assert found[ours] is None and found[f"{ours}_reason"]
            else:
                assert found[ours] == pytest.approx(truth[key], abs=1e-6), (name, key)
    pooled = pixel_metrics(
        [arrays[f"map_{n}"].astype(np.float32) for n in ("tied", "hand")],
        [arrays[f"mask_{n}"].astype(bool) for n in ("tied", "hand")],
        ["tied", "hand"],
    )
    truth = expected["pooled tied+hand_as_two_pictures"]
    assert pooled["pixel_aupro_30"] == pytest.approx(truth["aupro_030"], abs=1e-6)
    assert pooled["pixel_auroc"] == pytest.approx(truth["pixel_auroc"], abs=1e-6)
    for name, value in expected["image_auroc"].items():
        scores, labels = arrays[f"img_{name}"]
        assert image_auroc(scores, labels.astype(bool)).value == value


def test_flat_images(cases: Path, tiny_run: Run) -> None:
    manifest = load_folder(cases / "num-metrics-ties/flat_set")
    for sample in manifest.samples:
        found = tiny_run.detector.predict(sample.image)
        assert np.isfinite(found.anomaly_map).all() and np.isfinite(found.pred_score)
    json.dumps(audited(manifest).record(), allow_nan=False)


# ---------------------------------------------------------------------------------------- training


def test_same_seed_same_result(cases: Path) -> None:
    case = cases / "run-seed-workers"
    runs = [fit(case / part, None, tiny_settings()) for part in ("a", "b")]
    names = [{(s.image.name, s.split) for s in run.manifest.samples} for run in runs]
    assert names[0] == names[1]
    for sample in runs[0].manifest.samples:
        a, b = (run.detector.predict(sample.image) for run in runs)
        assert a.pred_score == pytest.approx(b.pred_score, abs=facts(case)["score_tolerance"])
        np.testing.assert_allclose(a.anomaly_map, b.anomaly_map, atol=1e-6)
    ready = digested(load_folder(case / "a"))
    found = {tuple(s.split for s in divided(ready, seed).samples) for seed in range(10)}
    assert len(found) > 1


def test_training_needs_no_main_guard(cases: Path, tmp_path: Path) -> None:
    """Nothing starts worker processes, so a plain script under `spawn` ends like any other."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n"
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import cdgp\nfrom tests.helpers import tiny_settings\n"
        f"data = {str(cases / 'run-seed-workers/a')!r}\n"
        "print(cdgp.fit(data, None, tiny_settings()).separation)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=600, check=True
    )
    assert np.isfinite(float(done.stdout))


def test_rerun_into_a_folder_in_use(cases: Path, tmp_path: Path) -> None:
    case = cases / "run-interrupt-rerun"
    out, keep = case / "out_existing", case / "out_existing/KEEP_me.txt"
    for options in ((), ("--resume",), ("--overwrite",)):
        result = cdgp("train", case / "set", "--out", out, "--quiet", *options,
                      "--input-size", "64", "--set", "dual_gp.steps=2", "--set", "student.steps=2",
                      "--set", "dual_gp.no_separation=flag")  # fmt: skip
        assert result.exit_code == (0 if "--overwrite" in options else 1), result.output
        assert result.exit_code == 0 or str(out) in result.output.replace("\n", "")
        assert hashlib.sha256(keep.read_bytes()).hexdigest() == facts(case)["keep_sha256"]
    with pytest.raises(ModelFileError, match="incomplete or damaged"):
        artifact.load(out / "model.ckpt")


def test_untrusted_model_files(
    cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases / "ckpt-untrusted-cuda"
    monkeypatch.chdir(tmp_path)
    for name in ("canary.pt", "canary_zip.pt", "cuda_storage.pt", "noise.pt", "empty.pt"):
        with pytest.raises(ModelFileError, match="not a model file of this tool") as raised:
            artifact.load(case / name)
        assert str(case / name) in str(raised.value)
        # As backbone weights they are refused as well: no pickle is ever opened.
        with pytest.raises(CdgpError, match="safetensors"):
            fit(cases / "run-seed-workers/a", None,
                tiny_settings(backbone={"weights": str(case / name)}))  # fmt: skip
    assert not (tmp_path / facts(case)["canary_folder"]).exists()
    held = torch.load(case / "cuda_storage.pt", map_location="cpu", weights_only=True)["w"]
    assert held.tolist() == facts(case)["cuda_tensor"]  # the file is what it says


# ------------------------------------------------------------------------- prediction and settings


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_exported_numbers(cases: Path, tiny_run: Run, tmp_path: Path, suffix: str) -> None:
    """The same from torch and a runtime, a path and an array, in any batch."""
    case = cases / "export-parity"
    truth, target = facts(case), {".onnx": "onnx", ".xml": "openvino"}[suffix]
    out = tmp_path / f"a{suffix}"
    done = cdgp("export", tiny_run.folder, "--to", target, "--out", out, "--quiet")
    assert done.exit_code == 0, done.output
    native, other = tiny_run.detector, load(out)
    paths = sorted((case / "images").iterdir())
    assert len(paths) == truth["n"]
    for path in paths:
        a, b = native.predict(path), other.predict(path)
        c = other.predict(np.asarray(Image.open(path)))
        np.testing.assert_array_equal(b.anomaly_map, c.anomaly_map)
        assert abs(a.pred_score - b.pred_score) <= truth["tolerance"]
        assert a.pred_label == b.pred_label
    size = native.settings.input_size
    inputs = np.stack([images.to_input(images.read_image(p, WHITE), size) for p in paths])
    for batch in truth["batch_sizes"]:
        found, plain = other.runtime.run(inputs[:batch]), native.runtime.run(inputs[:batch])
        for name in ("fused", "pooled", "pred_score"):
            a, b = getattr(found, name), getattr(plain, name)
            spread = max(1.0, float(b.max() - b.min()))
            assert float(np.abs(a - b).max()) <= truth["tolerance"] * spread
    swapped = other.runtime.run(inputs[:, ::-1]).fused - native.runtime.run(inputs).fused
    assert float(np.abs(swapped).max()) > 1e-2
    rows = np.stack([
        torch.nn.functional.interpolate(
            torch.from_numpy(images.read_image(p, WHITE)).permute(2, 0, 1)[None],
            size,
            mode="bilinear",
        )[0].numpy()
        for p in paths
    ])  # fmt: skip
    coarse = other.runtime.run(rows).fused - native.runtime.run(inputs).fused
    assert float(np.abs(coarse).max()) > 1e-2
    assert "antialiasing" in other.card.export["input"]["resize"]


TOML = {
    "good": "input_size = [64, 64]\nseed = 3\n[dual_gp]\nsteps = 2\nbatch_size = 4\n",
    "typo": "inputsize = [64, 64]\n[dual_gp]\nlerning_rate = 0.1\n",
    "moved": "[data]\ninput_size = [64, 64]\n",
    "type": "[dual_gp]\nsteps = 'ten'\nbatch_size = -4\n",
    "number_in_quotes": "[dual_gp]\nlearning_rate = '0.002'\n",
    "sci_notation": "[dual_gp]\nlearning_rate = 2e-3\n",
    "duplicate": "seed = 3\nseed = 4\n",
    "empty": "",
    "tab": "[dual_gp]\n\tsteps: 2\n",
    "nan": "[dual_gp]\nlearning_rate = nan\n",
    "list": "[[dual_gp]]\nsteps = 2\n",
}
"""The variants of the case, in this tool's format and with its key names."""


@pytest.mark.parametrize("kind", TOML)
def test_settings_files(cases: Path, tmp_path: Path, kind: str) -> None:
    truth = facts(cases / "cli-bad-config")
    path = tmp_path / f"{kind}.toml"
    path.write_text(TOML[kind])
    if kind not in truth["must_fail"]:
        found = read_settings(path)
        changed = kind in ("number_in_quotes", "sci_notation")  # 0.001 is the default
        assert found.dual_gp.learning_rate == (0.002 if changed else 0.001)
        assert kind != "good" or (found.seed, found.dual_gp.steps) == (3, 2)
        return
    with pytest.raises(SettingsError) as raised:
        read_settings(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    result = cdgp("train", tmp_path / "no_such_data", "--out", tmp_path / "run", "--config", path)
    assert result.exit_code == truth["exit_code"]  # before any data is looked for
    for wrong, right in (("inputsize", "input_size"), ("lerning_rate", "learning_rate")):
        assert kind != "typo" or (wrong in message and right in message)


def test_a_settings_file_of_another_format(cases: Path) -> None:
    with pytest.raises(SettingsError, match=r"good\.yaml: not a valid TOML file"):
        read_settings(cases / "cli-bad-config/good.yaml")


def test_leaks_are_data_errors() -> None:
    assert issubclass(LeakError, DataError)
