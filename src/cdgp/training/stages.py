"""The two trained stages from settings and samples, each resumable under its own fingerprint."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fabric import Fabric

from cdgp.data.manifest import WeakSample, WeakSplit
from cdgp.files import digest
from cdgp.method.backbone import Encoder, load_weights
from cdgp.method.network import Network
from cdgp.method.student import ReverseStudent
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dataset import WeakDataset
from cdgp.training.dual_gp import Head, TrainedDualGP, train_dual_gp
from cdgp.training.student import train_student

Log = Callable[[Mapping[str, Any]], None]


def fingerprint(settings: Settings, sha256: str, stage: str, head: Head = "gp") -> str:
    """Digest of everything that a stage's result depends on.

    Args:
        settings: of the run.
        sha256: of the images that the stage depends on, see ``WeakSplit``.
        stage: ``dual_gp`` or ``student``.
        head: what the evidence functions of the first stage are.
    """
    used = settings.model_dump(mode="json")
    parts = shared_parts(settings) | {stage: used[stage]}
    if stage == "dual_gp":
        parts |= {
            "inducing": used["inducing"],
            "pictures": used["calibration"]["pictures"],
            "pooling_sharpness": used["calibration"]["pooling_sharpness"],
        }
        parts["dual_gp"] = {k: v for k, v in used["dual_gp"].items() if k != "no_separation"}
    if head != "gp":
        parts["head"] = head
    text = json.dumps([stage, sha256, parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def shared_parts(settings: Settings) -> dict[str, Any]:
    """What every training depends on: seed, images' preparation, backbone and its weights."""
    used = settings.model_dump(mode="json")
    parts = {key: used[key] for key in ("seed", "input_size", "data", "backbone")}
    if settings.tile:  # named only then, so that other digests stay as they are
        parts["tile"] = True
    if settings.backbone.weights not in ("hub", "bundled", "random"):
        parts["weights_sha256"] = digest(Path(settings.backbone.weights))
    return parts


def dual_gp_samples(data: WeakSplit, settings: Settings) -> tuple[WeakSample, ...]:
    """The Dual GP's images: fit and calibration, or fit alone where those are held out."""
    return data.fit if settings.calibration.pictures == "held_out" else data.train


def new_images(samples: Sequence[WeakSample], settings: Settings) -> WeakDataset:
    """Samples as the network sees them in training and calibration."""
    return WeakDataset(samples, settings.input_size, settings.data.white_level, settings.tile)


def pretrained(settings: Settings) -> Encoder:
    """A fresh encoder with the pretrained weights that the settings name."""
    encoder = Encoder(settings.backbone.name)
    load_weights(encoder, settings.backbone.name, settings.backbone.weights)
    return encoder


def dual_gp_stage(
    data: WeakSplit,
    settings: Settings,
    fabric: Fabric,
    states: Path | None,
    log: Log,
    progress: Progress,
    head: Head = "gp",
) -> TrainedDualGP:
    """Train the Dual GP, or take it from ``states`` where it has been trained."""
    encoder = pretrained(settings)  # first, since it tells what is wrong with a weights file
    mark = fingerprint(settings, data.sha256, "dual_gp", head)
    samples = dual_gp_samples(data, settings)
    dataset = new_images(samples, settings)
    state = states / "dual_gp.safetensors" if states else None
    return train_dual_gp(dataset, encoder, settings, fabric, mark, state, log, progress, head)


def student_stage(
    data: WeakSplit,
    settings: Settings,
    fabric: Fabric,
    states: Path | None,
    log: Log,
    progress: Progress,
) -> tuple[Encoder, ReverseStudent]:
    """The frozen teacher, and the student trained on the good fit images."""
    mark = fingerprint(settings, data.good_fit_sha256, "student")
    good = [sample for sample in data.fit if not sample.defective]
    dataset = new_images(good, settings)
    state = states / "student.safetensors" if states else None
    teacher = pretrained(settings)
    student = train_student(dataset, teacher, settings, fabric, mark, state, log, progress)
    return teacher, student


def assemble(
    dual: TrainedDualGP, teacher: Encoder, student: ReverseStudent, settings: Settings
) -> Network:
    """Both trained branches as the inference network."""
    return Network(
        dual.encoder,
        dual.projection,
        dual.gps,
        teacher,
        student,
        settings.calibration.pooling_sharpness,
        settings.dual_gp.variance_floor,
        settings.calibration.evidence,
    )
