"""Static max similarity: our initialisation without any training of the evidence.

A token's score is its largest similarity to an anomaly anchor minus the largest to a normal
anchor; the picture's score is the largest token score. The paper says no more than "our
initialization but direct token-anchor similarity", so the difference is our reading.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cdgp.bench.methods import Fitted, Pipeline, Scored
from cdgp.data.images import read_picture, to_input
from cdgp.data.manifest import WeakSplit
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dual_gp import new_projection, select_inducing
from cdgp.training.loop import new_fabric
from cdgp.training.pictures import Pictures
from cdgp.training.stages import pretrained


def fit(data: WeakSplit, settings: Settings, states: Path, progress: Progress) -> Fitted:
    """Choose the anchors; nothing is trained."""
    fabric = new_fabric()
    size = settings.input_size
    pictures = Pictures(data.train, size, settings.data.white_level)
    encoder = pretrained(settings).eval().to(fabric.device)
    projection = new_projection(encoder, settings).to(fabric.device)
    began = time.monotonic()
    Zn, Za = select_inducing(pictures, encoder, projection, settings, fabric, progress)
    seconds = time.monotonic() - began
    Zn, Za = Zn.to(fabric.device), Za.to(fabric.device)

    @torch.inference_mode()
    def run(image: Tensor) -> Tensor:
        tokens = projection(encoder(encoder.normalise(image)))
        scores: Tensor = (tokens @ Za.mT).amax(-1) - (tokens @ Zn.mT).amax(-1)
        return scores[0].cpu()

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        for path in paths:
            picture = read_picture(path, settings.data.white_level)
            scores = run(to_input(picture, size)[None].to(fabric.device))
            native = (picture.shape[0], picture.shape[1])
            yield Scored(native, scores.numpy(), float(scores.max()))

    network = nn.ModuleList([encoder, projection])
    return Fitted(score, seconds, False, {}, lambda: Pipeline(network, run))
