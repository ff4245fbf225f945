"""CDGP itself; which reading of the paper it is lies in the settings."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdgp.bench.methods import Fitted, Scored
from cdgp.data.manifest import Manifest
from cdgp.inference import score_picture
from cdgp.method.calibration import upsample
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.calibrate import collect_evidence, fit_calibration
from cdgp.training.dual_gp import LEAST_SEPARATION
from cdgp.training.loop import new_fabric
from cdgp.training.pictures import Pictures
from cdgp.training.stages import (
    assemble,
    dual_gp_samples,
    dual_gp_stage,
    fingerprint,
    student_stage,
)


def fit(manifest: Manifest, settings: Settings, states: Path, progress: Progress) -> Fitted:
    """Both stages and the calibration; stages that other settings share are trained once."""
    fabric = new_fabric()
    sha = manifest.sha256
    folders = {
        stage: states / f"{stage}-{fingerprint(settings, sha, stage)[:16]}"
        for stage in ("dual_gp", "student")
    }
    signs: dict[str, Any] = {}
    dual = dual_gp_stage(
        dual_gp_samples(manifest, settings),
        settings, sha, fabric, folders["dual_gp"], signs.update, progress,
    )  # fmt: skip
    last: dict[str, Any] = {}
    teacher, student = student_stage(
        manifest.weak("fit"), settings, sha, fabric, folders["student"], last.update, progress
    )
    network = assemble(dual, teacher, student, settings).to(fabric.device)
    size = settings.input_size
    pictures = Pictures(manifest.weak("calibration"), size, settings.data.white_level)
    collected = collect_evidence(network, pictures, fabric.device, progress)
    calibration = fit_calibration(collected, settings.calibration)

    def score(picture: NDArray[np.float32]) -> Scored:
        native = (picture.shape[0], picture.shape[1])
        evidence, scores = score_picture(network, calibration, picture, size, fabric.device)
        return Scored(
            upsample(scores.anomaly_map, native)[0].numpy(),
            float(torch.sigmoid(scores.logit.double())[0]),
            {
                "residual": upsample(evidence.residual, native)[0].numpy(),
                "dominance": upsample(evidence.dominance, native)[0].numpy(),
                "surprisal": upsample(scores.surprisal, native)[0].numpy(),
            },
        )

    facts = {
        "separated": dual.separation >= LEAST_SEPARATION,
        "separation": round(dual.separation, 4),
        "slope": round(calibration.image.slope, 4),
        "intercept": round(calibration.image.intercept, 4),
    }
    return Fitted(score, signs["seconds"] + last["seconds"], True, facts)
