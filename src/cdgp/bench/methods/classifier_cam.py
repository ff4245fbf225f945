"""A plain classifier on the same backbone, with its class activation map.

Global average pooling of the stage at stride 16 and one linear layer, binary cross-entropy, batches
that are half defective, the jitter and the number of steps of the Dual GP; the class activation map
(Zhou et al., 2016) is the linear layer applied at every position.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from cdgp.bench.methods import Fitted, Scored
from cdgp.data.images import to_input
from cdgp.data.manifest import Manifest
from cdgp.method.backbone import Encoder
from cdgp.method.calibration import upsample
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dual_gp import weak_batch
from cdgp.training.loop import new_fabric, run_stage
from cdgp.training.pictures import Pictures, seeded
from cdgp.training.stages import dual_gp_samples, fingerprint, pretrained


class Classifier(nn.Module):
    """Encoder, average pooling, one linear layer; called with a batch, returns the loss."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.linear = nn.Linear(encoder.channels[2], 1)

    def activation(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the class activation map (B, H/16, W/16)."""
        images = images.contiguous(memory_format=torch.channels_last)
        coarse = self.encoder(self.encoder.normalise(images))[2]
        return cast(Tensor, self.linear(coarse.permute(0, 2, 3, 1)))[..., 0]

    def forward(self, images: Tensor, defective: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.encoder.train_trunk("train")
        logit = self.activation(images).mean((1, 2))
        return functional.binary_cross_entropy_with_logits(logit, defective.float()), {}


def fit(manifest: Manifest, settings: Settings, states: Path, progress: Progress) -> Fitted:
    """Train on fit and calibration pictures; ``dual_gp.learning_rate`` is the classifier's."""
    s = settings.dual_gp
    fabric = new_fabric()
    size = settings.input_size
    pictures = Pictures(dual_gp_samples(manifest, settings), size, settings.data.white_level)
    encoder = pretrained(settings)
    encoder.freeze_stem()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "classifier").initial_seed())
        classifier = Classifier(encoder)
    classifier.to(fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    trained = [p for p in classifier.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=s.learning_rate, weight_decay=s.weight_decay)
    mark = fingerprint(settings, manifest.sha256, "dual_gp")
    signs: dict[str, Any] = {}
    run_stage(
        "Classifier", fabric, classifier, optimizer, s.steps, s.final_learning_rate,
        lambda step: weak_batch(pictures, settings, step), f"classifier {mark}",
        states / f"classifier-{mark[:16]}" / "classifier.safetensors", signs.update, progress,
    )  # fmt: skip
    classifier.eval()

    @torch.inference_mode()
    def score(picture: NDArray[np.float32]) -> Scored:
        activation = classifier.activation(to_input(picture, size)[None].to(fabric.device)).cpu()
        native = (picture.shape[0], picture.shape[1])
        probability = torch.sigmoid(activation.double().mean())
        return Scored(upsample(activation, native)[0].numpy(), float(probability))

    return Fitted(score, signs["seconds"], True, {"learning_rate": s.learning_rate})
