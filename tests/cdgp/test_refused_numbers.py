"""The table of docs/refused/numbers.toml: every row's input is made and given to the product."""

import csv
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.helpers import (
    TINY_OPTIONS,
    Interrupting,
    cdgp,
    plain,
    save_image,
    surface,
    tiny_settings,
)
from tests.refused import rows

import cdgp as product
from cdgp import artifact
from cdgp.data.manifest import Manifest
from cdgp.errors import CdgpError
from cdgp.method.calibration import fit_tail
from cdgp.method.graph import SurprisalTable, check_table
from cdgp.presets import DecisionSettings
from cdgp.training import context
from cdgp.training.calibrate import CalibrationEvidence
from cdgp.training.fit import decide
from cdgp.workflows import Run, predict, predict_folder, train_run
from cdgp_bench.studies.refused import Row

Maker = Callable[[Path, Run, Manifest], str]
"""Makes the input, gives it to the product, and returns what that says; raises what it raises."""


def said(*arguments: object, code: int) -> str:
    """What a command prints; ``code`` is its expected exit code."""
    done = cdgp(*arguments)
    assert done.exit_code == code, done.output
    return plain(done)


def folder_of(run: Run) -> Path:
    assert run.folder is not None
    return run.folder


def surfaces_with_groups(place: Path, groups: int, images: int, defective: int = 6) -> Path:
    """A manifest of good images of so many parts, and of defective ones."""
    lines = ["image,label,group"]
    for i in range(images + defective):
        save_image(place / f"{i}.png", surface(i))
        group = f"part{i % groups}" if i < images else f"bad{i}"
        lines.append(f"{i}.png,{'good' if i < images else 'defective'},{group}")
    (place / "list.csv").write_text("\n".join(lines))
    return place / "list.csv"


def bound_too_few_parts(tmp: Path, run: Run, data: Manifest) -> str:
    listed = surfaces_with_groups(tmp / "data", groups=8, images=80)
    return said("train", listed, "--out", tmp / "run", "--max-false-rejects", 0.05,
                *TINY_OPTIONS, code=2)  # fmt: skip


def bound_too_few_images(tmp: Path, run: Run, data: Manifest) -> str:
    return said("train", data.root, "--out", tmp / "run", "--max-false-rejects", 0.01,
                *TINY_OPTIONS, code=2)  # fmt: skip


def bound_copies(tmp: Path, run: Run, data: Manifest) -> str:
    for part in range(4):
        for shot in range(6):
            brighter = np.clip(surface(part).astype(int) + 2 * shot, 0, 255).astype(np.uint8)
            save_image(tmp / f"data/good/{part}-{shot}.png", brighter)
    for i in range(10):
        save_image(tmp / f"data/defective/{i}.png", surface(100 + i))
    return said("train", tmp / "data", "--out", tmp / "run", "--max-false-rejects", 0.2,
                *TINY_OPTIONS, code=2)  # fmt: skip


def train_option(*options: object) -> Maker:
    def make(tmp: Path, run: Run, data: Manifest) -> str:
        return said("train", data.root, "--out", tmp / "run", *options, code=2)

    return make


def bound_without_ranking(tmp: Path, run: Run, data: Manifest) -> str:
    """A slope at its bound of zero: every image has one probability."""
    calibration = run.detector.model.calibration
    flat = calibration._replace(image=calibration.image._replace(slope=(0.0,) * 3, intercept=0.0))
    evidence = CalibrationEvidence([], torch.zeros(0, dtype=torch.bool), [])
    split = run.manifest.weak_split()
    decide(evidence, flat, DecisionSettings(max_false_rejects=0.3), split)
    return ""


def rate_of_one(tmp: Path, run: Run, data: Manifest) -> str:
    image = data.samples[0].image
    return said("predict", folder_of(run), image, "--out", tmp / "out", "--defect-rate", 1, code=2)


def rate_in_percent(tmp: Path, run: Run, data: Manifest) -> str:
    return said("evaluate", folder_of(run), data.root, "--defect-rate", 5, code=2)


def rate_not_a_number(tmp: Path, run: Run, data: Manifest) -> str:
    product.load(folder_of(run), defect_rate=math.nan)
    return ""


def rate_of_export(tmp: Path, run: Run, data: Manifest) -> str:
    return said("export", folder_of(run), "--to", "onnx", "--out", tmp / "a.onnx",
                "--defect-rate", -0.1, code=2)  # fmt: skip


def rate_not_stated(tmp: Path, run: Run, data: Manifest) -> str:
    return said("train", data.root, "--out", tmp / "run", *TINY_OPTIONS, code=0)


def resume_at_another_rate(tmp: Path, run: Run, data: Manifest) -> str:
    images = [s.image for s in data.samples[:2]]
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(predict, "_finished", lambda *a: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            predict_folder(folder_of(run), images, tmp / "out", defect_rate=0.02)
    return said("predict", folder_of(run), *images, "--out", tmp / "out", "--resume",
                "--defect-rate", 0.03, code=1)  # fmt: skip


def few_defective(tmp: Path, run: Run, data: Manifest) -> str:
    good = [s for s in data.samples if not s.defective][:8]
    bad = [s for s in data.samples if s.defective][:1]
    lines = [f"{s.image},{'defective' if s.defective else 'good'}" for s in (*good, *bad)]
    (tmp / "list.csv").write_text("\n".join(["image,label", *lines]))
    return said("train", tmp / "list.csv", "--out", tmp / "run", *TINY_OPTIONS, code=0)


def evaluated(groups: list[str], labels: list[str]) -> Maker:
    def make(tmp: Path, run: Run, data: Manifest) -> str:
        chosen = {"good": [s.image for s in data.samples if not s.defective],
                  "defective": [s.image for s in data.samples if s.defective]}  # fmt: skip
        with (tmp / "list.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["image", "label", "group"])
            for group, label in zip(groups, labels, strict=True):
                table.writerow([chosen[label].pop(), label, group])
        text = said("evaluate", folder_of(run), tmp / "list.csv", code=0)
        return text.replace("_", " ")

    return make


def decision_edited(tmp: Path, run: Run, data: Manifest) -> str:
    with safe_open(folder_of(run) / "model.safetensors", framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    threshold = run.detector.card.decision.threshold
    metadata["decision"] = metadata["decision"].replace(repr(threshold), "0.9")
    metadata["sha256"] = artifact.digest_of(metadata, tensors)
    save_file(tensors, tmp / "model.safetensors", metadata=metadata)
    artifact.load(tmp / "model.safetensors")
    return ""


def table_off_the_tail(tmp: Path, run: Run, data: Manifest) -> str:
    """A few pixels lie a million deviations away, and all others within some steps of the table."""
    body = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    scores = torch.cat([body, torch.linspace(1e6, 2e6, 20)])
    tail = fit_tail(scores.sort().values, "counting", 16.0)
    check_table(SurprisalTable(tail), tail)
    return ""


def stage_of_other_code(tmp: Path, run: Run, data: Manifest) -> str:
    """The message is one of the log."""
    with pytest.raises(KeyboardInterrupt):
        train_run(data.root, tmp / "run", tiny_settings(),
                  progress=Interrupting("Reverse student", 2))  # fmt: skip
    with pytest.MonkeyPatch.context() as upgraded:
        upgraded.setattr(context, "code_sha256", lambda: "that of another version")
        train_run(data.root, tmp / "run", tiny_settings(), resume=True)
    return ""


MAKERS: dict[str, Maker] = {
    "bound-too-few-parts": bound_too_few_parts,
    "bound-too-few-images": bound_too_few_images,
    "bound-copies": bound_copies,
    "bound-of-zero": train_option("--max-false-rejects", 0),
    "bound-in-percent": train_option("--max-false-rejects", 2),
    "bound-seen-images": train_option(
        "--set", "decision.max_false_rejects=0.2", "--set", "calibration.pictures=seen"
    ),
    "bound-without-ranking": bound_without_ranking,
    "rate-of-zero": train_option("--defect-rate", 0),
    "rate-of-one": rate_of_one,
    "rate-in-percent": rate_in_percent,
    "rate-not-a-number": rate_not_a_number,
    "rate-of-export": rate_of_export,
    "rate-not-stated": rate_not_stated,
    "resume-at-another-rate": resume_at_another_rate,
    "threshold-out-of-range": train_option("--set", "decision.threshold=1.5"),
    "single-defective-trained": few_defective,
    "single-defective-evaluated": evaluated(["", "", "", ""], ["good"] * 3 + ["defective"]),
    "single-defective-part": evaluated(
        ["a", "b", "c", "d", "d", "d"], ["good"] * 3 + ["defective"] * 3
    ),
    "decision-edited": decision_edited,
    "table-off-the-tail": table_off_the_tail,
    "stage-of-other-code": stage_of_other_code,
}


@rows("numbers", MAKERS)
def test_what_is_refused_and_what_is_told(
    row: Row, tmp_path: Path, tiny_run: Run, surfaces: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        told = MAKERS[row.id](tmp_path, tiny_run, surfaces)
    except CdgpError as error:
        assert row.result == "refused"
        told = str(error)
    assert row.says in f"{told} {caplog.text}"
