"""Colour jitter against torchvision's transform of one image after the other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from cdgp.method.build import seeded
from cdgp.training.jitter import jitter_image, jittered

STRENGTHS = [(0.12, 0.12, 0.05, 0.02), (0.9, 0.8, 0.7, 0.5), (0.3, 0, 0, 0), (0, 0, 0, 0.1)]
TOLERANCE = 4e-6
"""Sums of three colours and quotients of their differences, in float32."""


def noise(count: int) -> Tensor:
    return torch.rand(count, 3, 16, 12, generator=torch.Generator().manual_seed(count))


def primaries(count: int) -> Tensor:
    """Colours at the ends of the range: ties of two or three colours, black and white."""
    levels = torch.tensor([0.0, 0.25, 1.0])
    return torch.cartesian_prod(levels, levels, levels).T.view(3, 3, 9).expand(count, 3, 3, 9)


def grey(count: int) -> Tensor:
    return noise(count)[:, :1].expand(count, 3, 16, 12)


def nearly_grey(count: int) -> Tensor:
    """One pixel has a colour, so that the image's hue is not left out."""
    images = grey(count).clone()
    images[:, 0, 3, 4] = 1
    return images


@pytest.mark.parametrize("strengths", STRENGTHS)
@pytest.mark.parametrize("make", [noise, primaries, grey, nearly_grey])
def test_jitter_is_torchvisions(
    make: Callable[[int], Tensor], strengths: tuple[float, float, float, float]
) -> None:
    images = make(24)
    before = images.clone()
    jitter = v2.ColorJitter(*strengths)
    for step in range(3):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeded(7, "jitter", step).initial_seed())
            expected = torch.stack([jitter(image) for image in images])
        found = jittered(images, strengths, 7, step)
        assert (found - expected).abs().max() <= TOLERANCE
        assert torch.equal(images, before), "the originals stay"
        if make is not grey or strengths[0]:
            assert not torch.equal(found, images)


@pytest.mark.parametrize("turn", [-0.5, -0.3, -1 / 6, 0.0, 0.1, 1 / 3, 0.5])
def test_hue_turns_as_torchvisions(turn: float) -> None:
    drawn = {
        "fn_idx": torch.tensor([3, 0, 1, 2]), "brightness_factor": None, "contrast_factor": None,
        "saturation_factor": None, "hue_factor": turn,
    }  # fmt: skip
    for make in (noise, primaries, nearly_grey):
        (image,) = make(1).clone()
        expected = v2.functional.adjust_hue(image, turn)
        jitter_image(image, drawn)
        assert (image - expected).abs().max() <= TOLERANCE


def test_a_batch_is_a_function_of_seed_and_step_alone() -> None:
    images, strengths = noise(4), STRENGTHS[0]
    torch.manual_seed(1)
    first = jittered(images, strengths, 3, 5)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(jittered(images, strengths, 3, 5), first)
    assert not torch.equal(jittered(images, strengths, 3, 6), first)
    assert not torch.equal(jittered(images, strengths, 4, 5), first)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state), "the draws of others are left alone"
