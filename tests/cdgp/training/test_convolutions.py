"""Faster training of convolutions changes no number: against the modules' own and torch's."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cdgp.method.backbone import Encoder
from cdgp.training.convolutions import (
    PaddedReLU6,
    WideDepthwise,
    fast_convolutions,
    is_wide_depthwise,
)
from cdgp.training.student import folded


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder("tf_efficientnet_lite0")


def images(count: int = 2, side: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, 3, side, side, generator=generator)
    return found.contiguous(memory_format=torch.channels_last)


def step(encoder: Encoder, x: Tensor) -> list[Tensor]:
    """Features, and the gradients of all trained weights."""
    features = encoder(x)
    weights = [p for p in encoder.parameters() if p.requires_grad]
    total = sum((f.square().mean() for f in features), x.new_zeros(()))
    return [*features, *torch.autograd.grad(total, weights)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_of_the_lite_backbone_is_the_same(encoder: Encoder, dtype: torch.dtype) -> None:
    """1e-10 in float64, 1e-4 of each tensor's largest entry in float32."""
    network = copy.deepcopy(encoder).to(dtype).to(memory_format=torch.channels_last)
    network.freeze_stem()
    network.train_trunk("train")
    x = images().to(dtype)
    plain = copy.deepcopy(network)
    expected = step(plain, x)
    own = [module for module in network.modules() if "forward" in vars(module)]
    with fast_convolutions(network):
        changed = [module for module in network.modules() if "forward" in vars(module)]
        found = step(network, x)
    # Four wide convolutions; three that are padded, each with the activation before it.
    assert (len(own), len(changed)) == (0, 4 + 2 * 3)
    assert not any("forward" in vars(module) for module in network.modules())
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()
    for (key, mine), theirs in zip(
        network.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert (mine - theirs).abs().max() <= 1e-6 * (1 + theirs.abs().max()), key


def test_modules_are_as_before_also_after_an_error(encoder: Encoder) -> None:
    with pytest.raises(KeyboardInterrupt), fast_convolutions(encoder):
        assert any("forward" in vars(module) for module in encoder.modules())
        raise KeyboardInterrupt
    assert not any("forward" in vars(module) for module in encoder.modules())


def test_folded_teacher_sees_what_the_teacher_sees(encoder: Encoder) -> None:
    """With running statistics away from where they begin; 1e-4 of the largest feature."""
    teacher = copy.deepcopy(encoder)
    with torch.no_grad():
        for seed in range(3):
            teacher.train()(images(4, seed=seed))
    teacher.eval()
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    frozen = folded(teacher)
    x = images()
    with torch.no_grad(), fast_convolutions(frozen):
        assert sum("forward" in vars(module) for module in frozen.modules()) == 2 * 3
        found = frozen(x)
    for mine, theirs in zip(found, teacher(x), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())


@pytest.mark.parametrize("kernel", [(5, 5), (7, 7), (3, 5), (1, 9)])
def test_wide_depthwise_is_torchs(kernel: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 9, 10, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(4, 1, *kernel, dtype=torch.float64, generator=generator).requires_grad_()
    conv = nn.Conv2d(4, 4, kernel, padding="same", groups=4, bias=False).double()
    conv.weight = nn.Parameter(weight.detach().clone())
    g = torch.randn(2, 4, 9, 10, dtype=torch.float64, generator=generator)
    found, expected = WideDepthwise.apply(x, weight), conv(x)
    assert torch.equal(found, expected)
    mine = torch.autograd.grad(found, [x, weight], g)
    theirs = torch.autograd.grad(expected, [x, conv.weight], g)
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("conv", "wide"),
    [
        (nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False), True),
        (nn.Conv2d(4, 4, (3, 5), padding=(1, 2), groups=4, bias=False), True),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), False),
        (nn.Conv2d(4, 4, 4, padding=2, groups=4, bias=False), False),
        (nn.Conv2d(4, 4, 5, padding=2, groups=2, bias=False), False),
        (nn.Conv2d(4, 8, 5, padding=2, groups=4, bias=False), False),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=True), False),
        (nn.Conv2d(4, 4, 5, padding=1, groups=4, bias=False), False),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False, stride=2), False),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False, dilation=2), False),
        (nn.Conv2d(4, 4, 5, padding=2, groups=4, bias=False, padding_mode="reflect"), False),
        (nn.ReLU(), False),
    ],
)
def test_only_what_stays_the_same_is_changed(conv: nn.Module, wide: bool) -> None:
    assert is_wide_depthwise(conv) == wide
    own = nn.Sequential(nn.Conv2d(4, 4, 1), conv)
    x = torch.randn(1, 4, 9, 10)
    expected = own(x)
    with fast_convolutions(own):
        assert ("forward" in vars(conv)) == wide
        assert torch.equal(own(x), expected)


@pytest.mark.parametrize("padding", [(0, 1, 0, 1), (1, 2, 1, 2), (0, 0, 0, 0), (2, 0, 0, 3)])
def test_padded_relu6_is_relu6_and_padding(padding: tuple[int, int, int, int]) -> None:
    """With values at both ends of the range, where its derivative jumps."""
    x = 4 * torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = torch.tensor([0.0, 6.0, -1.0, 7.0])
    x.requires_grad_()
    found, expected = PaddedReLU6.apply(x, padding), functional.pad(functional.relu6(x), padding)
    assert torch.equal(found, expected)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (mine,), (theirs,) = (torch.autograd.grad(y, x, g) for y in (found, expected))
    assert torch.equal(mine, theirs)
