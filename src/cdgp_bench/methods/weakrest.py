"""WeakREST (Li et al., 2023) under image labels: a reimplementation, since there is no public code.

Published: features of a frozen network are compared with a memory of normal features and their
positions. A Swin transformer classifies the residual of every block as normal or anomalous.
Synthetic anomalies give it labelled blocks; where only an image tag is known, the blocks learn as
in MixMatch, from sharpened guesses.

Guessed: the strides 8 and 16 and their pooling (PatchCore's), one block a position at stride 8, the
memory's size, its images (every second good one, so that none is compared with itself in
training), the weight of positions, four Swin blocks of 96 channels, the absolute residual,
anomalib's Perlin textures as synthetic anomalies, two flips for a guess, temperature, weights and
their rise, no mixing of images, the tag's term (the mean of the highest 1 % of a defective image's
blocks is anomalous), the length of the training and its rates, and the image score (the mean
probability of the highest 1 %).
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.swin_transformer import SwinTransformerBlock

from cdgp.data.manifest import WeakSplit
from cdgp.files import subsample_evenly
from cdgp.method.backbone import Encoder
from cdgp.method.build import pretrained_encoder, seeded
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.context import new_fabric
from cdgp.training.dataset import WeakDataset, new_inputs, shuffled_stream
from cdgp.training.dual_gp import dual_gp_samples
from cdgp.training.loop import Stage, cosine
from cdgp_bench.methods import Fitted, MethodOptions, common
from cdgp_bench.methods.through_anomalib import quiet_and_seeded

STAGES = (1, 2)
WIDTH, HEADS, WINDOW, DEPTH = 96, 4, 6, 4
CANDIDATES = 20_000
"""Normal positions that the memory is chosen from."""
TEMPERATURE, GUESS_WEIGHT, GUESS_RISE = 0.5, 1.0, 0.4
"""Sharpening, the guesses' weight, and the share of the training in which it rises from zero."""
TOP = 0.01
COVERED = 0.25
"""Share of a block that a synthetic anomaly must cover to make it one."""
FLIPS: tuple[tuple[int, ...], ...] = ((-1,), (-2,))


class Options(MethodOptions):
    """WeakREST's sizes and rates, all guessed."""

    steps: int = Field(ge=1)
    batch: int = Field(ge=4)
    learning_rate: float = Field(gt=0)
    memory: int = Field(ge=1)
    """Normal positions that are kept."""
    position_weight: float = Field(ge=0)
    """How much a distance of one image side counts, in standard deviations of the features."""


PAPER = Options(steps=4000, batch=16, learning_rate=1e-4, memory=10_000, position_weight=1.0)
LITE = Options(steps=400, batch=16, learning_rate=1e-3, memory=1000, position_weight=1.0)


class Residuals(nn.Module):
    """A frozen encoder and its memory: images to their distance from normal, by channel."""

    def __init__(self, encoder: Encoder, options: Options) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.position_weight = options.position_weight
        channels = sum(encoder.channels[i] for i in STAGES)
        self.register_buffer("memory", torch.zeros(options.memory, channels + 2))
        self.register_buffer("scale", torch.ones(channels))
        self.memory: Tensor
        self.scale: Tensor

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to (B, C, H/8, W/8)."""
        return common.neighbourhoods(self.encoder, images, STAGES, 1)

    def placed(self, features: Tensor) -> Tensor:
        """(B, C, h, w) to (B, h·w, C + 2): features in their own scale, and their positions."""
        batch, channels, height, width = features.shape
        scaled = (features / self.scale.view(1, -1, 1, 1)).flatten(2).mT
        rows = torch.linspace(0, 1, height, device=features.device)
        columns = torch.linspace(0, 1, width, device=features.device)
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
        weight = self.position_weight * channels**0.5
        return torch.cat([scaled, (weight * grid).expand(batch, -1, -1)], 2)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to absolute residuals (B, h, w, C)."""
        features = self.features(images)
        placed = self.placed(features)
        nearest = torch.cdist(placed.flatten(0, 1), self.memory).argmin(1)
        away = (placed.flatten(0, 1) - self.memory[nearest]).abs()[:, :-2]
        return away.view(features.shape[0], *features.shape[2:], -1)


class WeakREST(nn.Module):
    """Residuals and the Swin blocks that classify them; called with a batch, returns the loss."""

    def __init__(self, encoder: Encoder, options: Options) -> None:
        super().__init__()
        self.residuals = Residuals(encoder, options)
        self.project = nn.Linear(len(self.residuals.scale), WIDTH)
        self.blocks = nn.Sequential(
            *[
                SwinTransformerBlock(
                    WIDTH, HEADS, [WINDOW, WINDOW],
                    [0, 0] if index % 2 == 0 else [WINDOW // 2, WINDOW // 2],
                    norm_layer=partial(nn.LayerNorm, eps=1e-5),
                )
                for index in range(DEPTH)
            ]
        )  # fmt: skip
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def logits(self, residuals: Tensor) -> Tensor:
        """(B, h, w, C) to block logits (B, h, w)."""
        logits: Tensor = self.head(self.blocks(self.project(residuals)))
        return logits.squeeze(-1)

    def forward(
        self, known: Tensor, anomalous: Tensor, tagged: Tensor, weight: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch.

        Args:
            known: (G, 3, H, W) good images, some with synthetic anomalies.
            anomalous: (G, h, w) bool: their blocks' labels.
            tagged: (D, 3, H, W) defective images, whose blocks' labels are unknown.
            weight: of the guesses at this step.
        """
        labelled = self.logits(self.residuals(known))
        labels = functional.binary_cross_entropy_with_logits(labelled, anomalous.float())
        away = self.residuals(tagged)
        unlabelled = self.logits(away)
        guesses = functional.binary_cross_entropy_with_logits(unlabelled, self.guessed(away))
        highest = top_mean(unlabelled)
        tags = functional.binary_cross_entropy_with_logits(highest, torch.ones_like(highest))
        terms = {"labels": labels, "guesses": guesses, "tags": tags}
        return labels + tags + weight * guesses, {k: v.detach() for k, v in terms.items()}

    @torch.no_grad()
    def guessed(self, residuals: Tensor) -> Tensor:
        """Sharpened mean probability over two flips, (B, h, w)."""
        # Axes of an image are one before those of its residuals, which end with channels.
        probability = torch.stack([
            torch.sigmoid(self.logits(residuals.flip([a - 1 for a in axes]))).flip(axes)
            for axes in FLIPS
        ]).mean(0)  # fmt: skip
        return sharpened(probability)


def sharpened(probability: Tensor) -> Tensor:
    """p^(1/T) / (p^(1/T) + (1 − p)^(1/T)), MixMatch's sharpening of two classes."""
    power = 1 / TEMPERATURE
    return probability**power / (probability**power + (1 - probability) ** power)


def top_mean(values: Tensor) -> Tensor:
    """(B, h, w) to the mean of each image's highest 1 %, at least one: (B,)."""
    flat = values.flatten(1)
    return flat.topk(max(1, round(TOP * flat.shape[1])), dim=1).values.mean(1)


def fill_memory(model: Residuals, images: Iterable[Tensor], seed: int) -> None:
    """Keep a coreset of good images' positions, and the scale of their features.

    The images are good ones, (1, 3, H, W) RGB in [0, 1].
    """
    from anomalib.models.components import KCenterGreedy

    features = torch.cat([model.features(image.to(model.memory.device)) for image in images])
    model.scale.copy_(features.std((0, 2, 3)).clamp_min(1e-6))
    placed = model.placed(features).flatten(0, 1)
    with quiet_and_seeded(seed):
        placed = placed[torch.randperm(len(placed))[:CANDIDATES]]
        wanted = min(len(model.memory), len(placed))
        chosen = KCenterGreedy(placed, wanted / len(placed)).select_coreset_idxs()
    kept = placed[torch.as_tensor(chosen)]
    model.memory = kept[torch.arange(len(model.memory), device=kept.device) % len(kept)]


def synthetic(images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Perlin textures blended into half of the images, by chance; and masks (B, 1, H, W)."""
    from anomalib.data.utils.generators.perlin import PerlinAnomalyGenerator

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        changed, masks = PerlinAnomalyGenerator()(images)
    return changed, masks


def fit(
    data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress, options: Options
) -> Fitted:
    """Train on fit and calibration images."""
    device = new_fabric().device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "weakrest").initial_seed())
        model = WeakREST(pretrained_encoder(settings), options)
    model.to(device)
    images = WeakDataset(dual_gp_samples(data, settings), new_inputs(settings))
    bad, every = images.indices(defective=True), images.indices(defective=False)
    remembered, good = every[::2], every[1::2]
    key = common.cache_key_of("weakrest", options, data.sha256, settings)
    if not common.checkpoint_of("weakrest", key, checkpoints).is_file():
        positions = settings.input_size[0] // 8 * (settings.input_size[1] // 8)
        shown = subsample_evenly(remembered, 4 * -(-CANDIDATES // positions))
        fill_memory(model.residuals, (images.batch([i]) for i in shown), settings.seed)
    half = options.batch // 2

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor, float]:
        known = shuffled_stream(good, step * half, half, settings.seed, "weakrest good")
        tagged = shuffled_stream(bad, step * half, half, settings.seed, "weakrest bad")
        key = seeded(settings.seed, "weakrest", step).initial_seed()
        changed, masks = synthetic(images.batch(known), key)
        anomalous = functional.avg_pool2d(masks, 8)[:, 0] > COVERED
        weight = GUESS_WEIGHT * min(1.0, step / (GUESS_RISE * options.steps))
        return changed, anomalous, images.batch(tagged), weight

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    stage = Stage(
        "weakrest", model, optimizer, options.steps, cosine(options.steps, 0.05), batch, key,
        "weakrest.safetensors",
    )  # fmt: skip

    @torch.inference_mode()
    def predict(image: Tensor) -> tuple[NDArray[np.float32], float]:
        logits = model.logits(model.residuals(image))
        probability = top_mean(torch.sigmoid(logits.double()))
        return logits[0].cpu().numpy(), float(probability[0])

    return common.fit_stage(stage, predict, options, settings, checkpoints, progress)
