"""MIL-TopK: a linear token classifier under a bag loss, on the shared tokens.

The image's logit is the mean of its k largest token logits, trained by binary cross-entropy; the
map is the token logits. The paper does not fix k: the largest 5 % of the tokens, as the ``top``
pooling of the Dual GP has it.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.method.build import new_projection, pretrained_encoder
from cdgp.method.losses import TOP_SHARE, bag_margin
from cdgp.method.tokens import TokenProjection
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp_bench.controls import LinearHead
from cdgp_bench.methods import Fitted
from cdgp_bench.methods.common import fit_on_labels


class TopK(nn.Module):
    """Encoder, projections and one linear token head; called with a batch, returns the loss."""

    def __init__(self, encoder: Encoder, projection: TokenProjection, dim: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.head = LinearHead(dim)
        self.bias = nn.Parameter(torch.zeros(()))

    def logits(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to token logits (B, H/4, W/4)."""
        images = images.contiguous(memory_format=torch.channels_last)
        tokens = self.projection(self.encoder(self.encoder.normalise(images)))
        return self.head.mean(tokens) + self.bias

    def bag(self, logits: Tensor) -> Tensor:
        """Token logits (B, h, w) to the image's logit (B,)."""
        return bag_margin(logits.flatten(1), "top", 1.0)

    def forward(self, images: Tensor, defective: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.encoder.train_trunk("train")
        logit = self.bag(self.logits(images))
        return functional.binary_cross_entropy_with_logits(logit, defective.float()), {}


def fit(data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress) -> Fitted:
    """Train on fit and calibration images, with the rates of the Dual GP's section."""
    encoder = pretrained_encoder(settings)
    encoder.freeze_stem()
    model = TopK(encoder, new_projection(encoder, settings), settings.backbone.token_dim)
    s = settings.dual_gp
    base = [p for p in (*encoder.parameters(), *model.projection.parameters()) if p.requires_grad]
    head = [model.head.beta, model.bias]
    groups = [
        {"params": base, "lr": s.learning_rate, "weight_decay": s.weight_decay},
        {"params": head, "lr": s.inducing_learning_rate, "weight_decay": 0.0},
    ]

    @torch.inference_mode()
    def predict(image: Tensor) -> tuple[NDArray[np.float32], float]:
        logits = model.logits(image)
        probability = torch.sigmoid(model.bag(logits).double())
        return logits[0].cpu().numpy(), float(probability[0])

    facts = {"top_share": TOP_SHARE, "learning_rate": s.learning_rate}
    return fit_on_labels(
        "mil_topk", model, groups, predict, data, settings, checkpoints, progress, facts
    )
