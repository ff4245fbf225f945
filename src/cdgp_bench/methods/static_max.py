"""Static max similarity: our initialisation without any training of the evidence.

A token's score is its largest similarity to an anomaly anchor minus the largest to a normal
anchor; the image's score is the largest token score. The paper only says "our
initialization but direct token-anchor similarity"; the difference is our interpretation.
"""

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cdgp.data.manifest import WeakSplit
from cdgp.method.build import new_projection, pretrained_encoder
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.context import new_context
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.dual_gp import select_inducing
from cdgp_bench.methods import Fitted
from cdgp_bench.methods.common import fitted_network


def fit(data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress) -> Fitted:
    """Choose the anchors; nothing is trained."""
    context = new_context(None, None, progress)
    device = context.fabric.device
    images = WeakDataset(data.train, new_inputs(settings))
    encoder = pretrained_encoder(settings).eval().to(device)
    projection = new_projection(encoder, settings).to(device)
    began = time.monotonic()
    Zn, Za = select_inducing(images, encoder, projection, settings, context)
    seconds = time.monotonic() - began
    Zn, Za = Zn.to(device), Za.to(device)

    @torch.inference_mode()
    def predict(image: Tensor) -> tuple[NDArray[np.float32], float]:
        tokens = projection(encoder(encoder.normalise(image)))
        scores = (tokens @ Za.mT).amax(-1) - (tokens @ Zn.mT).amax(-1)
        return scores[0].cpu().numpy(), float(scores.max())

    network = nn.ModuleList([encoder, projection])
    return fitted_network(network, predict, settings, seconds, False, {})
