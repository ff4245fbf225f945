"""MIL-TopK: a linear token classifier under a bag loss, on the shared tokens.

The picture's logit is the mean of its k largest token logits, trained by binary cross-entropy; the
map is the token logits. The paper does not fix k: the largest 5 % of the tokens, as the ``top``
pooling of the Dual GP has it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdgp.bench.methods import Fitted, Pipeline, Scored
from cdgp.data.images import read_picture, to_input
from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.method.controls import LinearHead
from cdgp.method.losses import TOP_SHARE, bag_margin
from cdgp.method.tokens import TokenProjection
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.dual_gp import new_projection, weak_batch
from cdgp.training.loop import new_fabric, run_stage
from cdgp.training.pictures import Pictures
from cdgp.training.stages import dual_gp_samples, fingerprint, pretrained


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
        """Token logits (B, h, w) to the picture's logit (B,)."""
        return bag_margin(logits.flatten(1), "top", 1.0)

    def forward(self, images: Tensor, defective: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.encoder.train_trunk("train")
        logit = self.bag(self.logits(images))
        return functional.binary_cross_entropy_with_logits(logit, defective.float()), {}


def fit(data: WeakSplit, settings: Settings, states: Path, progress: Progress) -> Fitted:
    """Train on fit and calibration pictures, with the rates of the Dual GP's section."""
    s = settings.dual_gp
    fabric = new_fabric()
    size = settings.input_size
    pictures = Pictures(dual_gp_samples(data, settings), size, settings.data.white_level)
    encoder = pretrained(settings)
    encoder.freeze_stem()
    model = TopK(encoder, new_projection(encoder, settings), settings.backbone.token_dim)
    model.to(fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    base = [p for p in (*encoder.parameters(), *model.projection.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": base, "lr": s.learning_rate, "weight_decay": s.weight_decay},
            {"params": [model.head.beta, model.bias], "lr": s.inducing_learning_rate,
             "weight_decay": 0.0},
        ]
    )  # fmt: skip
    mark = fingerprint(settings, data.sha256, "dual_gp")
    signs: dict[str, Any] = {}
    run_stage(
        "MIL-TopK", fabric, model, optimizer, s.steps, s.final_learning_rate,
        lambda step: weak_batch(pictures, settings, step), f"mil_topk {mark}",
        states / f"mil_topk-{mark[:16]}" / "mil_topk.safetensors", signs.update, progress,
    )  # fmt: skip
    model.eval()

    @torch.inference_mode()
    def run(image: Tensor) -> tuple[Tensor, float]:
        logits = model.logits(image)
        return logits[0].cpu(), float(torch.sigmoid(model.bag(logits).double())[0])

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        for path in paths:
            picture = read_picture(path, settings.data.white_level)
            logits, probability = run(to_input(picture, size)[None].to(fabric.device))
            yield Scored((picture.shape[0], picture.shape[1]), logits.numpy(), probability)

    facts = {"top_share": TOP_SHARE, "learning_rate": s.learning_rate}
    return Fitted(score, signs["seconds"], True, facts, lambda: Pipeline(model, run))
