"""RD4AD (Deng and Li, 2022) through anomalib: reverse distillation from a bottleneck.

The map is the sum of the stages' cosine distances, the image score its maximum. anomalib has
decoders for residual networks alone. For any other backbone, bottleneck and decoder are ours, of
the same design: the stages are fused at stride 16, a residual block goes down to stride 32, and one
residual stage goes up to each stage of the encoder. The last convolution of a stage is linear,
since an encoder's stage may end without an activation.
"""

import functools
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.training.dual_gp import dual_gp_samples
from cdgp_bench.methods import MethodOptions
from cdgp_bench.methods import through_anomalib as through

PUBLISHED_EPOCHS = 200
BATCH = 16
RESIDUAL = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d",
    "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2",
)  # fmt: skip
"""The backbones that anomalib has a decoder for."""


class Options(MethodOptions):
    """How long RD4AD trains."""

    epochs: int = Field(ge=1)


PAPER = Options(epochs=PUBLISHED_EPOCHS)
LITE = Options(epochs=PUBLISHED_EPOCHS // 4)


class Bottleneck(nn.Module):
    """Stages of (c1, c2, c3) channels at strides 4, 8 and 16 to 2·c3 channels at stride 32."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        c1, c2, c3 = channels
        self.first = nn.Sequential(_halved(c1, c2), _halved(c2, c3))
        self.second = _halved(c2, c3)
        shortcut = nn.Sequential(
            nn.Conv2d(3 * c3, 2 * c3, 1, 2, bias=False), nn.BatchNorm2d(2 * c3)
        )
        self.fused = nn.Sequential(
            BasicBlock(3 * c3, 2 * c3, 2, shortcut), BasicBlock(2 * c3, 2 * c3)
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        fused: Tensor = self.fused(
            torch.cat([self.first(features[0]), self.second(features[1]), features[2]], 1)
        )
        return fused


class Decoder(nn.Module):
    """From the bottleneck back to the stages, finest first."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        c1, c2, c3 = channels
        self.ups = nn.ModuleList([_doubled(2 * c3, c3), _doubled(c3, c2), _doubled(c2, c1)])
        self.heads = nn.ModuleList([nn.Conv2d(c, c, 1) for c in (c3, c2, c1)])

    def forward(self, fused: Tensor) -> list[Tensor]:
        stages = []
        for up, head in zip(self.ups, self.heads, strict=True):
            fused = up(fused)
            stages.append(head(fused))
        return stages[::-1]


def _halved(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()
    )


def _doubled(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(inner, outer, 2, 2, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
        BasicBlock(outer, outer),
    )  # fmt: skip


def build(encoder: Encoder, settings: Settings, options: Options) -> Any:
    """anomalib's module, untrained."""
    from anomalib.models import ReverseDistillation

    architecture = settings.backbone.name.split(".")[0]
    module = ReverseDistillation(
        backbone=architecture if architecture in RESIDUAL else "resnet18", pre_trained=False,
        **through.parts(settings, encoder),
    )  # fmt: skip
    module.model.encoder.feature_extractor = through.Stages(encoder, through.ALL_STAGES)
    module.model.encoder.layers = through.stage_names(encoder)
    if architecture not in RESIDUAL:
        module.model.bottleneck = Bottleneck(encoder.channels)
        module.model.decoder = Decoder(encoder.channels)
    return module


def recipe(data: WeakSplit, settings: Settings, options: Options) -> through.Recipe:
    """Distil on all good training images."""
    through.check_sides("rd4ad", settings)
    own = settings.backbone.name.split(".")[0] not in RESIDUAL
    facts = {"budget_share": options.epochs / PUBLISHED_EPOCHS}
    return through.Recipe(
        "rd4ad", build, dual_gp_samples(data, settings), BATCH, {"max_epochs": options.epochs},
        facts | ({"decoder": "ours"} if own else {}),
    )  # fmt: skip


fit = functools.partial(through.fit, recipe)
