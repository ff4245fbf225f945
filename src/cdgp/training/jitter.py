"""Colour jitter: torchvision's draws and results, with fewer passes over an image."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from cdgp.method.build import seeded

GREY = torch.tensor([0.2989, 0.587, 0.114]).view(3, 1, 1)
"""The weights that torchvision turns colours into grey with."""
HUES = (0.0, 2.0, 4.0)
"""Where red, green and blue lie on the circle of hues, of circumference 6."""


def jittered(
    images: Tensor,
    strengths: tuple[float, float, float, float],
    seed: int,
    step: int,
    first: int = 0,
) -> Tensor:
    """Colour jitter (brightness, contrast, saturation, hue), drawn per image.

    Draws and results are those of torchvision's ``v2.ColorJitter``, applied to one image after the
    other.

    Args:
        images: (B, 3, H, W) RGB in [0, 1].
        strengths: as ``ColorJitter`` takes them.
        seed, step, first: all that the draws depend on; ``first`` is the place of the first image
            in its batch.
    """
    jitter = v2.ColorJitter(*strengths)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(seed, "jitter", step).initial_seed())
        drawn = [jitter.make_params([]) for _ in range(first + len(images))][first:]
    found = images.clone()
    for image, factors in zip(found, drawn, strict=True):
        jitter_image(image, factors)
    return found


def jitter_image(image: Tensor, drawn: Mapping[str, Any]) -> None:
    """Jitter one image (3, H, W) in place, by what ``ColorJitter.make_params`` has drawn."""
    brightness, contrast, saturation, hue = (
        drawn[f"{name}_factor"] for name in ("brightness", "contrast", "saturation", "hue")
    )
    for kind in drawn["fn_idx"].tolist():
        if kind == 0 and brightness is not None:
            image.mul_(brightness).clamp_(0, 1)
        elif kind == 1 and contrast is not None:
            blend(image, grey(image).mean(), contrast)
        elif kind == 2 and saturation is not None:
            blend(image, grey(image), saturation)
        elif kind == 3 and hue is not None:
            turn_hue(image, hue)


def grey(image: Tensor) -> Tensor:
    """The brightness (1, H, W) of an image (3, H, W)."""
    return (image * GREY).sum(0, keepdim=True)


def blend(image: Tensor, other: Tensor, share: float) -> None:
    """Share of the image, and the rest of the other, in place."""
    image.mul_(share).add_(other, alpha=1 - share).clamp_(0, 1)


def turn_hue(image: Tensor, turn: float) -> None:
    """Turn the hue of an image (3, H, W) by a share of the circle in [-0.5, 0.5], in place.

    With v the largest and c the range of a pixel's colours, a colour is
    v - c min(1, max(0, d - 1)), d being the distance of its place on the circle from the hue.
    Grey pixels have no hue, so that an image without colours, as many cameras give, stays as it is.
    """
    red, green, blue = image
    if torch.equal(red, green) and torch.equal(green, blue):
        return
    least, v = torch.aminmax(image, dim=0)
    c = v - least
    # From the place of the largest colour, by what the other two differ.
    is_red, is_green = v == red, v == green
    hue = torch.where(is_green, blue - red, red - green)
    hue = torch.where(is_red, green - blue, hue)
    hue.div_(c.clamp_min(torch.finfo(c.dtype).tiny))
    hue.add_(torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0)))
    hue.add_(6 * turn)
    for colour, place in zip(image, HUES, strict=True):
        # The distance the shorter way round, of a hue within -4 to 8.
        away = (hue - place).abs_().sub_(3).abs_().sub_(3).abs_()
        torch.addcmul(v, c, away.sub_(1).clamp_(0, 1), value=-1, out=colour)
