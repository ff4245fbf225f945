"""Both stages and the whole fit: determinism, resumption, what reaches training, advice."""

import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers import (
    WHITE,
    Interrupting,
    assert_same,
    digested,
    divided,
    tiny_settings,
    weights_of,
)

from cdgp import artifact
from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import Manifest, WeakSample
from cdgp.errors import DataError, NoSeparationError, OutputError, SettingsError
from cdgp.files import subsample_evenly
from cdgp.method.resize import upsample
from cdgp.method.student import residual_map, residuals
from cdgp.metrics.ranking import pixel_auroc
from cdgp.presets import settings
from cdgp.progress import Quiet
from cdgp.training import dual_gp, loop
from cdgp.training.context import new_context
from cdgp.training.dataset import InputCache, WeakDataset, new_inputs, shuffled_stream
from cdgp.training.student import train_student
from cdgp.workflows import Run
from cdgp.workflows import train_run as fit
from cdgp_bench.synthetic import make_dataset, plant_defect


def test_training_sees_no_mask() -> None:
    assert {field.name for field in fields(WeakSample)} == {"image", "defective"}


@pytest.mark.slow
def test_same_seed_same_weights_and_other_masks_change_nothing(
    surfaces: Manifest, tiny_run: Run
) -> None:
    masks = [s.masks for s in surfaces.samples if s.masks]
    swapped = iter(masks[1:] + masks[:1])
    other = replace(
        surfaces,
        samples=tuple(replace(s, masks=next(swapped) if s.masks else ()) for s in surfaces.samples),
    )
    again = fit(other, None, tiny_settings())
    assert_same(weights_of(tiny_run), weights_of(again))


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "after"), [("Dual GP", 3), ("Reverse student", 2)])
def test_interrupted_and_resumed_is_the_same(
    surfaces: Manifest,
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    after: int,
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(surfaces.root, out, tiny_settings(), progress=Interrupting(phase, after))
    assert not (out / "model.safetensors").exists()
    assert list((out / "checkpoints").glob("*.safetensors"))
    resumed = fit(surfaces.root, out, tiny_settings(), resume=True)
    assert_same(weights_of(tiny_run), weights_of(resumed))
    assert not (out / "checkpoints").exists()


@pytest.mark.slow
def test_killed_process_resumes_to_the_same(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    """SIGKILL at a random moment of the training; what is left resumes to the same weights."""
    out = tmp_path / "run"
    code = (
        "import sys; sys.path.insert(0, sys.argv[3]); import torch; torch.set_num_threads(1)\n"
        "from tests.helpers import tiny_settings; from cdgp.training import loop, fit\n"
        "import time; loop.SAVE_SECONDS = 0.0; save = loop.save_checkpoint\n"
        "loop.save_checkpoint = lambda *a: (save(*a), time.sleep(0.5))\n"
        "fit.fit(sys.argv[1], sys.argv[2], tiny_settings())\n"
    )
    arguments = [str(surfaces.root), str(out), str(Path(__file__).parent)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    while process.poll() is None and not list(out.glob("checkpoints/*.safetensors")):
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1.5))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    resumed = fit(surfaces.root, out, tiny_settings(), resume=True)
    assert_same(weights_of(tiny_run), weights_of(resumed))


def test_resumed_run_may_decide_otherwise_but_not_train_otherwise(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(surfaces.root, out, tiny_settings(), progress=Interrupting("Reverse student", 2))
    with pytest.raises(SettingsError, match=r"other settings \(student\.steps\)"):
        fit(surfaces.root, out, tiny_settings(student={"steps": 5, "batch_size": 2}), resume=True)
    chosen = tiny_settings(decision={"threshold": 0.25})
    resumed = fit(surfaces.root, out, chosen, resume=True)
    assert resumed.detector.model.decision.threshold == 0.25
    assert_same(weights_of(tiny_run), weights_of(resumed))
    with pytest.raises(SettingsError, match=r"other settings \(decision\.threshold\)"):
        fit(surfaces.root, out, tiny_settings(), resume=True)


def test_split_does_not_depend_on_the_order(surfaces: Manifest) -> None:
    ready = digested(surfaces)
    shuffled = list(ready.samples)
    random.Random(0).shuffle(shuffled)
    a, b = divided(ready, 3), divided(replace(ready, samples=tuple(shuffled)), 3)
    assert {s.image: s.split for s in a.samples} == {s.image: s.split for s in b.samples}
    assert a.sha256 == b.sha256


def test_run_leaves_its_files(tiny_run: Run) -> None:
    assert tiny_run.folder is not None
    names = {path.name for path in tiny_run.folder.iterdir()}
    assert names == {
        "check.json", "config.json", "manifest.csv", "log.jsonl", "model.safetensors",
    }  # fmt: skip
    config = json.loads((tiny_run.folder / "config.json").read_text())
    assert config["dual_gp"]["steps"] == 4
    assert config["dual_gp"]["weight_decay"] == 1e-4, "the whole effective configuration"


def test_log_holds_the_diagnostics(tiny_run: Run) -> None:
    assert tiny_run.folder is not None
    records = [json.loads(line) for line in (tiny_run.folder / "log.jsonl").open()]
    diagnostics = {"margin_good", "margin_defective", "variance_normal", "variance_anomaly",
             "token_cosine"}  # fmt: skip
    assert any(diagnostics <= record.keys() for record in records)


def test_model_file_round_trip(tiny_run: Run, surfaces: Manifest) -> None:
    assert tiny_run.folder is not None
    loaded = artifact.load(tiny_run.folder / "model.safetensors")
    original = tiny_run.detector.model
    assert loaded.settings == original.settings
    assert loaded.decision == original.decision
    assert loaded.calibration.image == original.calibration.image
    assert torch.equal(loaded.calibration.tail.scores, original.calibration.tail.scores)
    pixels = surfaces.samples[0].image
    from cdgp.inference import Detector

    a, b = tiny_run.detector.predict(pixels), Detector.of(loaded).predict(pixels)
    np.testing.assert_allclose(a.anomaly_map, b.anomaly_map, atol=1e-5)
    assert a.pred_score == pytest.approx(b.pred_score, abs=1e-6)


def test_no_separation_ends_with_advice_and_no_model(
    surfaces: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual_gp, "LEAST_SEPARATION", 1.01)
    chosen = tiny_settings(
        dual_gp={"steps": 1, "batch_size": 4, "no_separation": "stop"},
    )
    with pytest.raises(NoSeparationError, match=r"are not separable.*Try, in this order"):
        fit(surfaces.root, tmp_path / "run", chosen)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_too_few_good_images_for_the_rate_is_said_before_training(
    surfaces: Manifest, tmp_path: Path
) -> None:
    chosen = tiny_settings(
        decision={"max_false_rejects": 0.01}, calibration={"pictures": "held_out"}
    )
    with pytest.raises(SettingsError, match="at least 99"):
        fit(surfaces.root, tmp_path / "run", chosen)


@pytest.mark.slow
def test_false_reject_threshold_is_a_rank_of_held_out_good_images(
    surfaces: Manifest, tmp_path: Path
) -> None:
    chosen = tiny_settings(
        decision={"max_false_rejects": 0.25}, calibration={"pictures": "held_out"}
    )
    run = fit(surfaces.root, None, chosen)
    good = [s for s in run.manifest.of("calibration") if not s.defective]
    scores = [run.detector.predict(s.image) for s in good]
    assert run.detector.model.decision.false_reject_bound is not None
    assert run.detector.model.decision.false_reject_bound <= 0.25
    assert sum(p.pred_label for p in scores) <= 0.25 * (len(good) + 1)


def test_existing_folder_is_kept(tiny_run: Run, surfaces: Manifest) -> None:
    assert tiny_run.folder is not None
    keep = tiny_run.folder / "KEEP_me.txt"
    keep.write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        fit(surfaces.root, tiny_run.folder, tiny_settings())
    assert keep.read_text() == "mine"
    keep.unlink()


def test_resume_refuses_other_settings_and_other_data(
    tiny_run: Run, surfaces: Manifest, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    with pytest.raises(SettingsError, match="seed"):
        fit(surfaces.root, tiny_run.folder, tiny_settings(seed=1), resume=True)
    other = make_dataset(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="changed"):
        fit(other.root, tiny_run.folder, tiny_settings(), resume=True)
    with pytest.raises(OutputError, match="no run to resume"):
        fit(surfaces.root, tmp_path / "nothing", tiny_settings(), resume=True)


def test_refused_resume_changes_nothing(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    before = (tiny_run.folder / "manifest.csv").read_bytes()
    other = make_dataset(tmp_path / "other", seed=2)
    with pytest.raises(DataError, match="changed"):
        fit(other.root, tiny_run.folder, tiny_settings(), resume=True)
    assert (tiny_run.folder / "manifest.csv").read_bytes() == before
    with pytest.raises(SettingsError, match="one of them"):
        fit(other.root, tiny_run.folder, tiny_settings(), resume=True, overwrite=True)


@pytest.mark.parametrize("place", ["", "good", "defective/run"])
@pytest.mark.parametrize("as_csv", [True, False])
def test_run_inside_its_data_is_refused(surfaces: Manifest, place: str, as_csv: bool) -> None:
    data = surfaces.root / "manifest.csv" if as_csv else surfaces.root
    before = (surfaces.root / "manifest.csv").read_bytes()
    with pytest.raises(OutputError, match="lies in the data"):
        fit(data, surfaces.root / place, tiny_settings(), overwrite=True)
    assert (surfaces.root / "manifest.csv").read_bytes() == before


def test_bad_data_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fit(tmp_path / "mistyped", tmp_path / "run", tiny_settings())
    assert not (tmp_path / "run").exists()


def test_resume_of_a_finished_run_trains_nothing(tiny_run: Run, surfaces: Manifest) -> None:
    again = fit(surfaces.root, tiny_run.folder, tiny_settings(), resume=True,
                progress=Interrupting("Dual GP", 1))  # fmt: skip
    assert_same(weights_of(tiny_run), weights_of(again))


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user without root rights")
def test_read_only_place_fails_before_training(surfaces: Manifest, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written"):
        fit(surfaces.root, tmp_path / "run", tiny_settings())


def test_shuffled_stream_shows_everything_once_an_epoch_and_continues() -> None:
    items = list(range(7))
    whole = shuffled_stream(items, 0, 21, seed=0, key="x")
    for epoch in range(3):
        assert sorted(whole[7 * epoch : 7 * epoch + 7]) == items
    assert shuffled_stream(items, 5, 9, seed=0, key="x") == whole[5:14]
    assert shuffled_stream(items, 0, 21, seed=1, key="x") != whole
    assert shuffled_stream([4], 0, 3, seed=0, key="x") == [4, 4, 4]


def test_subsample_evenly_is_bounded_and_keeps_the_ends() -> None:
    assert subsample_evenly(range(10), 20) == list(range(10))
    assert len(subsample_evenly(range(1000), 64)) == 64
    assert subsample_evenly(range(1000), 64)[0] == 0


def test_balanced_batches_are_half_defective(surfaces: Manifest) -> None:
    samples = divided(digested(surfaces), 0).weak("train")
    dataset = WeakDataset(samples, InputCache((64, 64), 65535, False))
    for step in range(5):
        chosen = dual_gp.batch_indices(dataset, "balanced", 7, step, seed=0)
        assert int(dataset.defective[chosen].sum()) == 3
        assert len(chosen) == 7


def test_images_beyond_the_cache_are_the_same(
    surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = surfaces.weak(None)[:4]
    cached = WeakDataset(samples, InputCache((64, 64), 65535, False)).batch([0, 1, 2, 3])
    monkeypatch.setattr("cdgp.training.dataset.CACHE_BYTES", 0)
    bare = WeakDataset(samples, InputCache((64, 64), 65535, False))
    assert torch.equal(bare.batch([0, 1, 2, 3]), cached)
    assert not bare.inputs._kept


@pytest.mark.slow
def test_student_reconstructs_normal_images_and_fails_on_defects(tmp_path: Path) -> None:
    """Residual AUROC-P at least 0.9 on planted defects; a student that copies cannot pass."""
    manifest = divided(digested(make_dataset(tmp_path, good=60, defective=12, size=(128, 128))), 0)
    chosen = settings("lite", input_size=(128, 128), student={"steps": 150})
    fit_images = [s for s in manifest.weak_split().fit if not s.defective]
    dataset = WeakDataset(fit_images, new_inputs(chosen))
    teacher, student, _ = train_student(dataset, chosen, new_context(None, None, Quiet()), "")
    maps: dict[str, list[np.ndarray]] = {"student": [], "copy": []}
    masks = []
    for index, sample in enumerate(s for s in manifest.samples if not s.defective):
        if sample.split == "fit":
            continue
        pixels, mask = plant_defect(read_image(sample.image, WHITE), np.random.default_rng(index))
        with torch.inference_mode():
            features = teacher(teacher.normalise(to_input(pixels, (128, 128))[None]))
            rebuilt = student(features[2], [(f.shape[-2], f.shape[-1]) for f in features])
            for name, output in (("student", rebuilt), ("copy", features)):
                r = residual_map(residuals(features, output))
                maps[name].append(upsample(r, mask.shape)[0].numpy())
        masks.append(mask)
    student_auroc = pixel_auroc(maps["student"], masks).value
    copy_auroc = pixel_auroc([np.round(m, 5) for m in maps["copy"]], masks).value
    assert student_auroc is not None and student_auroc >= 0.9
    assert copy_auroc is not None and copy_auroc < 0.9


MEMORY = """
import re, torch
from pathlib import Path
from cdgp.training.context import keep_freed_memory, return_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

torch.ones(2**20)
start = resident()
keep_freed_memory()
torch.ones(2**26)
kept = resident() - start
return_freed_memory()
torch.ones(2**26)
print(kept, resident() - start)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory")
def test_freed_memory_is_kept_for_training_and_returned_for_collecting() -> None:
    printed = subprocess.run(  # the switches are the process's own
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    ).stdout
    kept, returned = map(int, printed.split())
    assert kept > 200  # MiB, of a tensor of 256
    assert returned < 50
