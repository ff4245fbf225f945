"""Training as a workflow: files, interruption, resumption, what is refused before the long work."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.cdgp.workflows.watching import Counted, assert_same_files
from tests.helpers import (
    ROOT,
    TINY_OPTIONS,
    Interrupting,
    assert_same,
    cdgp,
    noise_image,
    save_image,
    snapshot,
    tiny_settings,
    two_bins,
    weights_of,
)

from cdgp import artifact, run_folder
from cdgp.data.manifest import Manifest
from cdgp.errors import DataError, NoSeparationError, OutputError, SettingsError, WeightsError
from cdgp.presets import read_settings
from cdgp.report.galleries import shown_suspects
from cdgp.training import dual_gp, loop
from cdgp.workflows import Run, train_run
from cdgp_bench.synthetic import make_dataset


def test_python_and_command_leave_the_same_files(surfaces: Manifest, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "python/run", tmp_path / "command/run"
    done = cdgp("train", surfaces.root, "--out", theirs, "--save-maps", *TINY_OPTIONS)
    assert done.exit_code == 0, done.output
    chosen = read_settings(theirs / "config.json")
    run = train_run(surfaces.root, ours, chosen, save_maps=True)
    assert_same_files(ours, theirs)
    assert_same(weights_of(run), artifact.load(theirs / "model.safetensors").network.state_dict())


def test_without_a_folder_nothing_is_written_and_the_results_are_the_same(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = snapshot(surfaces.root)
    run = train_run(surfaces.root, None, tiny_settings())
    assert run.folder is None and not list(tmp_path.iterdir())
    assert snapshot(surfaces.root) == before
    assert run.metrics == tiny_run.metrics and run.metrics is not None
    assert run.rows == tiny_run.rows and len(run.rows) == len(run.manifest.of("test"))
    assert run.suspects == tiny_run.suspects and run.audit.counts == tiny_run.audit.counts
    assert run.separation == tiny_run.separation


def test_without_test_images_there_are_no_metrics(surfaces: Manifest, tmp_path: Path) -> None:
    chosen = tiny_settings(data={"test_fraction": 0})
    run = train_run(surfaces.root, tmp_path / "run", chosen)
    assert run.metrics is None and run.rows == []
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.safetensors", "report.html", "suspects.csv"} <= names
    assert not names & {"scores.csv", "metrics.json", "overlays"}


def test_each_image_is_decoded_once_a_pass_and_predicted_once(
    surfaces: Manifest, tmp_path: Path, counted: Counted
) -> None:
    """Scan, training (all stages together), suspects, and scoring of the test images."""
    run = train_run(surfaces.root, tmp_path / "run", tiny_settings())
    shown = {s.path for label in (False, True) for s in shown_suspects(run.suspects, label)}
    expected = {s.image: 3 + (s.image in shown) for s in run.manifest.of("train")}
    expected |= {s.image: 3 for s in run.manifest.of("test")}
    assert counted.reads == expected
    test = {s.image for s in run.manifest.of("test")}
    assert len(counted.inputs) == len(test | shown)
    assert max(counted.inputs.values()) == 1


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
        train_run(surfaces.root, out, tiny_settings(), progress=Interrupting(phase, after))
    assert not (out / "model.safetensors").exists()
    assert list((out / "checkpoints").glob("*.safetensors"))
    resumed = train_run(surfaces.root, out, tiny_settings(), resume=True)
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
        "from tests.helpers import tiny_settings; from cdgp.training import loop\n"
        "from cdgp.workflows import train_run\n"
        "import time; loop.SAVE_SECONDS = 0.0; save = loop.save_checkpoint\n"
        "loop.save_checkpoint = lambda *a: (save(*a), time.sleep(0.5))\n"
        "train_run(sys.argv[1], sys.argv[2], tiny_settings())\n"
    )
    arguments = [str(surfaces.root), str(out), str(ROOT)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    while process.poll() is None and not list(out.glob("checkpoints/*.safetensors")):
        time.sleep(0.02)
    time.sleep(random.uniform(0, 1.5))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    resumed = train_run(surfaces.root, out, tiny_settings(), resume=True)
    assert_same(weights_of(tiny_run), weights_of(resumed))


def test_resumed_run_may_decide_otherwise_but_not_train_otherwise(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(surfaces.root, out, tiny_settings(), progress=Interrupting("Reverse student", 2))
    with pytest.raises(SettingsError, match=r"other settings \(student\.steps\)"):
        train_run(
            surfaces.root, out, tiny_settings(student={"steps": 5, "batch_size": 2}), resume=True
        )
    chosen = tiny_settings(decision={"threshold": 0.25})
    resumed = train_run(surfaces.root, out, chosen, resume=True)
    assert resumed.detector.model.decision.balanced == 0.25
    assert_same(weights_of(tiny_run), weights_of(resumed))
    with pytest.raises(SettingsError, match=r"other settings \(decision\.threshold\)"):
        train_run(surfaces.root, out, tiny_settings(), resume=True)


def test_run_leaves_its_files(tiny_run: Run) -> None:
    assert tiny_run.folder is not None
    names = {path.name for path in tiny_run.folder.iterdir()}
    assert names == {
        "check.json", "config.json", "log.jsonl", "manifest.csv", "metrics.json",
        "model.safetensors", "overlays", "report.html", "run.json", "scores.csv", "suspects.csv",
    }  # fmt: skip
    config = json.loads((tiny_run.folder / "config.json").read_text())
    assert config["dual_gp"]["steps"] == 4
    assert config["dual_gp"]["weight_decay"] == 1e-4, "the whole effective configuration"


def test_no_separation_ends_with_advice_and_no_model(
    surfaces: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dual_gp, "LEAST_SEPARATION", 1.01)
    chosen = tiny_settings(
        dual_gp={"steps": 1, "batch_size": 4, "no_separation": "stop"},
    )
    with pytest.raises(NoSeparationError, match=r"are not separable.*Try, in this order"):
        train_run(surfaces.root, tmp_path / "run", chosen)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_weights_that_are_gone_are_named_as_weights(surfaces: Manifest, tmp_path: Path) -> None:
    chosen = tiny_settings(backbone={"weights": str(tmp_path / "gone.safetensors")})
    for out in (None, tmp_path / "run"):
        with pytest.raises(WeightsError, match=r"gone\.safetensors"):
            train_run(surfaces.root, out, chosen)


def test_existing_folder_is_kept(tiny_run: Run, surfaces: Manifest) -> None:
    assert tiny_run.folder is not None
    keep = tiny_run.folder / "KEEP_me.txt"
    keep.write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        train_run(surfaces.root, tiny_run.folder, tiny_settings())
    assert keep.read_text() == "mine"
    keep.unlink()


def test_resume_refuses_other_settings_and_other_data(
    tiny_run: Run, surfaces: Manifest, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    with pytest.raises(SettingsError, match="seed"):
        train_run(surfaces.root, tiny_run.folder, tiny_settings(seed=1), resume=True)
    other = make_dataset(tmp_path / "other", seed=1)
    with pytest.raises(DataError, match="changed"):
        train_run(other.root, tiny_run.folder, tiny_settings(), resume=True)
    with pytest.raises(OutputError, match="no run to resume"):
        train_run(surfaces.root, tmp_path / "nothing", tiny_settings(), resume=True)


def test_refused_resume_changes_nothing(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    before = (tiny_run.folder / "manifest.csv").read_bytes()
    other = make_dataset(tmp_path / "other", seed=2)
    with pytest.raises(DataError, match="changed"):
        train_run(other.root, tiny_run.folder, tiny_settings(), resume=True)
    assert (tiny_run.folder / "manifest.csv").read_bytes() == before
    with pytest.raises(SettingsError, match="one of them"):
        train_run(other.root, tiny_run.folder, tiny_settings(), resume=True, overwrite=True)


@pytest.mark.parametrize("place", ["", "good", "defective/run"])
@pytest.mark.parametrize("as_csv", [True, False])
def test_run_inside_its_data_is_refused(surfaces: Manifest, place: str, as_csv: bool) -> None:
    data = surfaces.root / "manifest.csv" if as_csv else surfaces.root
    before = (surfaces.root / "manifest.csv").read_bytes()
    with pytest.raises(OutputError, match="lies in the data"):
        train_run(data, surfaces.root / place, tiny_settings(), overwrite=True)
    assert (surfaces.root / "manifest.csv").read_bytes() == before


def test_bad_data_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train_run(tmp_path / "mistyped", tmp_path / "run", tiny_settings())
    assert not (tmp_path / "run").exists()


def test_masks_that_cannot_be_used_do_not_stop_a_training(
    surfaces: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every mask is spoilt: named with both sizes, and the weights are those of no masks at all."""
    shutil.copytree(surfaces.root, tmp_path / "spoilt")
    shutil.copytree(surfaces.root, tmp_path / "without")
    shutil.rmtree(tmp_path / "without/masks")
    masks = sorted((tmp_path / "spoilt/masks").rglob("*.png"))
    for mask in masks[1:]:
        save_image(mask, np.zeros((10, 12), np.uint8))
    masks[0].write_bytes(b"")
    for name in ("spoilt", "without"):
        (tmp_path / name / "manifest.csv").unlink(missing_ok=True)
    run = train_run(tmp_path / "spoilt", tmp_path / "run", tiny_settings())
    told = caplog.text
    assert "defective" in told and str(masks[1]) in told and "12 × 10" in told
    assert "save the mask at the size of the image" in told and "is empty (0 bytes)" in told
    assert run.metrics is not None and run.metrics["pixel_auroc"] is None
    unusable = run.metrics["notes"]["mask_unusable"]
    assert len(unusable) == sum(s.defective for s in run.manifest.of("test"))
    assert "defective_without_mask" not in run.metrics["notes"]
    other = train_run(tmp_path / "without", None, tiny_settings())
    assert_same(weights_of(run), weights_of(other))


def test_resume_of_a_finished_run_trains_nothing(tiny_run: Run, surfaces: Manifest) -> None:
    again = train_run(surfaces.root, tiny_run.folder, tiny_settings(), resume=True,
                progress=Interrupting("Dual GP", 1))  # fmt: skip
    assert_same(weights_of(tiny_run), weights_of(again))


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user without root rights")
def test_read_only_place_fails_before_training(surfaces: Manifest, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written"):
        train_run(surfaces.root, tmp_path / "run", tiny_settings())


def test_finished_run_resumes_without_its_log_but_not_with_other_images(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    run = tmp_path / "run"
    shutil.copytree(tiny_run.folder, run)
    (run / "log.jsonl").unlink()
    assert run_folder.read_log(run) == []
    train_run(surfaces.root, run, tiny_settings(), resume=True)
    shutil.copytree(surfaces.root, tmp_path / "parts")
    noise_image(tmp_path / "parts/good/new.png", (96, 80))
    (tmp_path / "parts/manifest.csv").unlink()
    with pytest.raises(DataError, match="have changed"):
        train_run(tmp_path / "parts", run, tiny_settings(), resume=True)


def test_too_few_good_images_for_the_rate_are_refused_before_training(
    surfaces: Manifest, tmp_path: Path
) -> None:
    chosen = tiny_settings(
        decision={"max_false_rejects": 0.01}, calibration={"pictures": "held_out"}
    )
    with pytest.raises(SettingsError, match="at least 99"):
        train_run(surfaces.root, tmp_path / "run", chosen)


def test_images_that_are_not_read_are_told_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two_bins(tmp_path / "data")
    for i in range(5):
        noise_image(tmp_path / f"data/scratch/{i}.png", seed=i)
    expected = "5 images are not read: scratch (5)"
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        stop = Interrupting("Dual GP", 1)
        train_run(tmp_path / "data", tmp_path / "run", tiny_settings(), progress=stop)
    assert expected in caplog.text
    train_run(tmp_path / "data", tmp_path / "run", tiny_settings(), resume=True)
    found = json.loads((tmp_path / "run/check.json").read_text(encoding="utf-8"))["findings"]
    kinds = {f["kind"]: (f["severity"], f["text"]) for f in found}
    assert kinds["not_read"][0] == "warning" and expected in kinds["not_read"][1]
    assert expected in (tmp_path / "run/report.html").read_text(encoding="utf-8")
