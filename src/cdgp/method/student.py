"""Hierarchical normal-residual evidence: corruption, reverse student, residual (Eq. 20-23)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cdgp.method.resize import upsample


def corrupt(
    images: Tensor,
    generator: torch.Generator,
    noise: float,
    blur_probability: float,
    erase_probability: float,
    erase_sides: tuple[float, float],
    first: int = 0,
) -> Tensor:
    """Additive noise, then 3 x 3 local averaging, then a zero rectangle, drawn per image.

    Args:
        images: (B, 3, H, W) on the backbone's normalised scale, where zero is the mean colour.
        generator: source of all randomness, on the processor.
        noise: standard deviation.
        blur_probability, erase_probability: of the averaging and of the rectangle.
        erase_sides: least and largest side as a share of the image's side.
        first: place of the first image in its batch; draws for those before it are skipped.
    """
    corrupted = torch.empty_like(images)
    height, width = images.shape[-2:]
    for _ in range(first):
        torch.rand(6, generator=generator)
        torch.randn(images.shape[1:], generator=generator)
    for image, out in zip(images, corrupted, strict=True):
        blur, erase, tall, wide, top, left = torch.rand(6, generator=generator).tolist()
        drawn = torch.randn(image.shape, generator=generator).to(image.device)
        torch.add(image, drawn, alpha=noise, out=out)
        if blur < blur_probability:
            out.copy_(local_mean(out))
        if erase < erase_probability:
            least, largest = erase_sides
            h = max(1, round(height * (least + (largest - least) * tall)))
            w = max(1, round(width * (least + (largest - least) * wide)))
            y, x = int(top * (height - h + 1)), int(left * (width - w + 1))
            out[:, y : y + h, x : x + w] = 0
    return corrupted


def local_mean(image: Tensor) -> Tensor:
    """Means of 3 x 3 pixels of an image (C, H, W), whose edges are repeated."""
    padded = functional.pad(image[None], (1, 1, 1, 1), mode="replicate")[0]
    # Sums of shifted copies, since avg_pool2d takes ten times as long on a processor.
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 9


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class ReverseStudent(nn.Module):
    """Reconstruct the three teacher stages from the coarsest one, through a bottleneck.

    The coarse feature is squeezed to twice its stride before anything is rebuilt, so passing it
    through unchanged is not in the student's reach: what normal images do not need is lost on the
    way, and a defect leaves a residual in all three stages.

    Args:
        channels: teacher channels at its three stages, the finest first.
        widths: student channels at these, and in the bottleneck.
    """

    def __init__(self, channels: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        coarse = widths[3]
        self.squeeze = nn.Sequential(
            _conv(channels[2], coarse, stride=2), _conv(coarse, coarse), _conv(coarse, coarse)
        )
        inputs = [widths[1], widths[2], widths[3]]
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(i, w), _conv(w, w)) for i, w in zip(inputs, widths, strict=False)
        )
        self.heads = nn.ModuleList(
            nn.Conv2d(w, c, kernel_size=1) for w, c in zip(widths, channels, strict=False)
        )

    def forward(self, coarse: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Teacher features (B, C_3, H_3, W_3) to reconstructions of all three stages.

        ``sizes`` are their heights and widths, finest first.
        """
        x = self.squeeze(coarse)
        reconstructions: list[Tensor] = []
        for stage in (2, 1, 0):
            x = upsample(x, sizes[stage])
            x = self.blocks[stage](x)
            reconstructions.insert(0, self.heads[stage](x))
        return reconstructions


def residuals(teacher: Sequence[Tensor], student: Sequence[Tensor]) -> list[Tensor]:
    """Cosine residuals r_l = 1 - <teacher, student>, (B, H_l, W_l) in [0, 2]  (Eq. 21)."""
    return [
        1 - (functional.normalize(t, dim=1) * functional.normalize(s, dim=1)).sum(1)
        for t, s in zip(teacher, student, strict=True)
    ]


def reconstruction_loss(
    teacher: Sequence[Tensor],
    student: Sequence[Tensor],
    hard_fraction: float,
    hard_weight: float,
    smooth_weight: float,
) -> Tensor:
    """Mean residual, mean of its largest share, and Smooth-L1, averaged over stages (Eq. 22).

    The hard tail is taken over all positions of the batch at one stage; the Smooth-L1 distance is
    between channel-normalised features.
    """
    terms = reconstruction_terms(teacher, student)
    return loss_of_terms(terms, hard_fraction, hard_weight, smooth_weight)


class StageTerms(NamedTuple):
    """What the loss takes of one stage."""

    residual: Tensor
    """(B, H_l, W_l) cosine residual."""
    smooth: Tensor
    """Mean Smooth-L1 distance of channel-normalised features."""


def reconstruction_terms(teacher: Sequence[Tensor], student: Sequence[Tensor]) -> list[StageTerms]:
    """The terms of Eq. 22, of features (B, C_l, H_l, W_l) and their reconstructions."""
    terms = []
    for t, s in zip(teacher, student, strict=True):
        t, s = functional.normalize(t, dim=1), functional.normalize(s, dim=1)
        terms.append(StageTerms(1 - (t * s).sum(1), functional.smooth_l1_loss(s, t)))
    return terms


def loss_of_terms(
    terms: Sequence[StageTerms], hard_fraction: float, hard_weight: float, smooth_weight: float
) -> Tensor:
    """Eq. 22 from the terms of all stages, see ``reconstruction_loss``."""
    stages = []
    for residual, smooth in terms:
        r = residual.flatten()
        hard = r.topk(max(1, round(hard_fraction * r.numel()))).values.mean()
        stages.append(r.mean() + hard_weight * hard + smooth_weight * smooth)
    return torch.stack(stages).mean()


def residual_map(stage_residuals: Sequence[Tensor]) -> Tensor:
    """Mean of the three residuals at the first stage's resolution, (B, H', W')  (Eq. 23)."""
    size = (stage_residuals[0].shape[-2], stage_residuals[0].shape[-1])
    total = stage_residuals[0]
    for r in stage_residuals[1:]:
        total = total + upsample(r, size)
    return total / len(stage_residuals)
