"""Static max similarity: our initialisation without any training of the evidence.

A token's score is its largest similarity to an anomaly anchor minus the largest to a normal
anchor; the picture's score is the largest token score. The paper says no more than "our
initialization but direct token-anchor similarity", so the difference is our reading.
"""

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cdgp.bench.methods import Fitted, Scored
from cdgp.data.images import to_input
from cdgp.data.manifest import Manifest
from cdgp.method.calibration import upsample
from cdgp.method.tokens import TokenProjection
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dual_gp import new_projection, select_inducing
from cdgp.training.loop import new_fabric
from cdgp.training.pictures import Pictures
from cdgp.training.stages import pretrained


def fit(manifest: Manifest, settings: Settings, states: Path, progress: Progress) -> Fitted:
    """Choose the anchors; nothing is trained."""
    fabric = new_fabric()
    size = settings.input_size
    pictures = Pictures(manifest.weak("train"), size, settings.data.white_level)
    encoder = pretrained(settings).eval().to(fabric.device)
    projection: TokenProjection = new_projection(encoder, settings).to(fabric.device)
    began = time.monotonic()
    Zn, Za = select_inducing(pictures, encoder, projection, settings, fabric, progress)
    seconds = time.monotonic() - began

    @torch.inference_mode()
    def score(picture: NDArray[np.float32]) -> Scored:
        image = to_input(picture, size)[None].to(fabric.device)
        tokens = projection(encoder(encoder.normalise(image))).cpu()
        scores = (tokens @ Za.mT).amax(-1) - (tokens @ Zn.mT).amax(-1)
        native = (picture.shape[0], picture.shape[1])
        return Scored(upsample(scores, native)[0].numpy(), float(scores.max()))

    return Fitted(score, seconds, False, {})
