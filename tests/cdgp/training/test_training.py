"""Both stages and the whole fit: determinism, resumption, what reaches training, advice."""

import ast
import json
import platform
import random
import subprocess
import sys
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers import (
    WHITE,
    assert_same,
    digested,
    divided,
    tiny_settings,
    weights_of,
)

from cdgp import artifact
from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import Manifest, WeakSample, WeakSplit
from cdgp.files import subsample_evenly
from cdgp.method.resize import upsample
from cdgp.method.student import residual_map, residuals
from cdgp.metrics.ranking import pixel_auroc
from cdgp.presets import settings
from cdgp.progress import Quiet
from cdgp.training import dual_gp
from cdgp.training import fit as stages
from cdgp.training.context import new_context
from cdgp.training.dataset import InputCache, WeakDataset, new_inputs, shuffled_stream
from cdgp.training.student import train_student
from cdgp.workflows import Run
from cdgp.workflows import train_run as fit
from cdgp_bench.synthetic import make_dataset, plant_defect


def test_training_receives_no_mask() -> None:
    """Neither its types nor its imports lead to one."""
    assert {field.name for field in fields(WeakSample)} == {"image", "defective"}
    assert next(iter(signature(stages.train).parameters.values())).annotation is WeakSplit
    for path in Path(stages.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = {alias.name for alias in node.names}
                assert not imported & {"Manifest", "Sample", "read_mask", "read_masks"}, path


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


def test_split_does_not_depend_on_the_order(surfaces: Manifest) -> None:
    ready = digested(surfaces)
    shuffled = list(ready.samples)
    random.Random(0).shuffle(shuffled)
    a, b = divided(ready, 3), divided(replace(ready, samples=tuple(shuffled)), 3)
    assert {s.image: s.split for s in a.samples} == {s.image: s.split for s in b.samples}
    assert a.sha256 == b.sha256


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
            batch = torch.from_numpy(to_input(pixels, (128, 128)))[None]
            features = teacher(teacher.normalise(batch))
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
