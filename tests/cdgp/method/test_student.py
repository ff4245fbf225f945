"""Corruption, residuals and the student's loss against loops; size and cost of the student."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cdgp.method.backbone import Encoder
from cdgp.method.gp import DualGP, SparseGP
from cdgp.method.kernels import linear
from cdgp.method.network import Network
from cdgp.method.student import (
    ReverseStudent,
    corrupt,
    reconstruction_loss,
    residual_map,
    residuals,
)
from cdgp.method.tokens import TokenProjection
from cdgp.presets import PRESETS, PresetName

NOISE = 0.035
BLUR = 0.70
ERASE = 0.75
SIDES = (1 / 16, 1 / 5)
LITE_CHANNELS = (24, 40, 112)
CHANNELS: dict[PresetName, tuple[int, int, int]] = {
    "lite": LITE_CHANNELS,
    "paper": (256, 512, 1024),
    "dino": (384, 384, 384),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def corrupted(
    images: Tensor, seed: int, noise: float = 0.0, blur: float = 0.0, erase: float = 0.0
) -> Tensor:
    return corrupt(images, torch.Generator().manual_seed(seed), noise, blur, erase, SIDES)


def assert_share(count: int, draws: int, probability: float) -> None:
    """Within four standard deviations of the binomial."""
    spread = math.sqrt(draws * probability * (1 - probability))
    assert abs(count - draws * probability) <= 4 * spread


def pyramid(batch: int, channels: Sequence[int], seed: int) -> list[Tensor]:
    sizes = [(8, 6), (4, 3), (2, 2)]
    return [random(batch, c, *s, seed=seed + c) for c, s in zip(channels, sizes, strict=True)]


def normalised(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in vector))
    return [v / length for v in vector]


def vectors(feature: Tensor) -> list[list[float]]:
    """The normalised channel vectors of all positions of a batch, walking as ``flatten`` does."""
    rows = feature.permute(0, 2, 3, 1).flatten(0, 2).tolist()
    return [normalised(row) for row in rows]


def slow_residuals(teacher: Tensor, student: Tensor) -> list[float]:
    pairs = zip(vectors(teacher), vectors(student), strict=True)
    return [1 - sum(a * b for a, b in zip(t, s, strict=True)) for t, s in pairs]


def slow_reconstruction_loss(
    teacher: list[Tensor], student: list[Tensor], q: float, hard_weight: float, smooth_weight: float
) -> float:
    """Eq. 22 in loops."""
    total = 0.0
    for t, s in zip(teacher, student, strict=True):
        r = slow_residuals(t, s)
        count = max(1, round(q * len(r)))
        hard = sum(sorted(r, reverse=True)[:count]) / count
        smooth = []
        for a, b in zip(vectors(t), vectors(s), strict=True):
            differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
            smooth += [d * d / 2 if d < 1 else d - 0.5 for d in differences]
        total += sum(r) / len(r) + hard_weight * hard + smooth_weight * sum(smooth) / len(smooth)
    return total / 3


def test_corruption_is_a_function_of_its_generator_alone() -> None:
    images = random(4, 3, 32, 48).float()
    torch.manual_seed(1)
    first = corrupted(images, 7, NOISE, BLUR, ERASE)
    torch.manual_seed(2)
    assert torch.equal(corrupted(images, 7, NOISE, BLUR, ERASE), first)
    assert not torch.equal(corrupted(images, 8, NOISE, BLUR, ERASE), first)
    assert first.shape == images.shape
    assert first.dtype == images.dtype


def test_corruption_leaves_the_originals_and_with_everything_off_does_nothing() -> None:
    images = random(4, 3, 32, 48).float()
    before = images.clone()
    assert not torch.equal(corrupted(images, 0, NOISE, 1.0, 1.0), images)
    assert torch.equal(images, before)
    assert torch.equal(corrupted(images, 0), images)


def test_noise_has_its_deviation_and_is_drawn_per_image_and_channel() -> None:
    noise = corrupted(torch.zeros(8, 3, 64, 64), 0, noise=NOISE)
    count = noise.numel()
    assert abs(float(noise.mean())) <= 5 * NOISE / math.sqrt(count)
    assert float(noise.std()) == pytest.approx(NOISE, rel=5 / math.sqrt(2 * count))
    correlation = np.corrcoef(noise.flatten(2).flatten(0, 1).numpy())
    assert np.abs(correlation - np.eye(24)).max() <= 5 / 64


def test_blur_is_the_mean_of_nine_neighbours_with_its_probability() -> None:
    draws = 600
    images = random(1, 3, 9, 11).float().expand(draws, 3, 9, 11)
    expected = torch.from_numpy(
        np.stack([ndimage.uniform_filter(c, 3, mode="nearest") for c in images[0].numpy()])
    )
    result = corrupted(images, 0, blur=BLUR)
    blurred = (result - expected).abs().amax((1, 2, 3)) <= 1e-6
    untouched = (result == images).flatten(1).all(1)
    assert bool((blurred ^ untouched).all())
    assert_share(int(blurred.sum()), draws, BLUR)


def test_rectangle_is_zero_with_its_probability_and_its_sides() -> None:
    draws, height, width = 800, 64, 160
    result = corrupted(torch.ones(draws, 1, height, width).expand(-1, 3, -1, -1), 0, erase=ERASE)
    holes = result == 0
    assert bool((holes | (result == 1)).all())
    assert bool((holes == holes[:, :1]).all()), "all channels alike"
    erased = holes[:, 0].flatten(1).any(1)
    assert_share(int(erased.sum()), draws, ERASE)
    sides, corners = [], []
    for hole in holes[erased, 0]:
        rows, columns = hole.any(1).nonzero().flatten(), hole.any(0).nonzero().flatten()
        h, w = len(rows), len(columns)
        assert int(hole.sum()) == h * w, "one full rectangle"
        sides.append((h, w))
        corners.append((int(rows[0]) / (height - h), int(columns[0]) / (width - w)))
    tall, wide = np.array(sides).T
    # 64 / 16 = 4 to 64 / 5 = 12.8, and 160 / 16 = 10 to 160 / 5 = 32, both rounded.
    assert (tall.min(), tall.max()) == (4, 13)
    assert (wide.min(), wide.max()) == (10, 32)
    assert abs(np.corrcoef(tall, wide)[0, 1]) <= 4 / math.sqrt(len(sides))
    places = np.array(corners)
    assert (places.min(0) == 0).all()
    assert (places.max(0) == 1).all()
    assert np.abs(places.mean(0) - 0.5).max() <= 5 * 0.3 / math.sqrt(len(sides))


def test_rectangle_lies_over_blur_and_noise_and_both_chances_are_independent() -> None:
    draws = 600
    images = torch.ones(1, 3, 16, 16)
    images[..., ::2] = -1
    result = corrupted(images.expand(draws, 3, 16, 16), 3, 1e-3, BLUR, ERASE)
    erased = (result == 0).flatten(1).any(1)
    blurred = (result.abs() < 0.5).flatten(1).float().mean(1) > 0.5
    assert_share(int((erased & blurred).sum()), draws, ERASE * BLUR)
    assert_share(int((erased & ~blurred).sum()), draws, ERASE * (1 - BLUR))
    assert_share(int((~erased & blurred).sum()), draws, (1 - ERASE) * BLUR)


def test_noise_is_averaged_where_the_image_is() -> None:
    """Noise comes first: nine independent values in one mean leave a third of its deviation."""
    averaged = corrupted(torch.zeros(8, 3, 64, 64), 0, noise=NOISE, blur=1.0)
    inner = averaged[..., 1:-1, 1:-1]
    assert float(inner.std()) == pytest.approx(NOISE / 3, rel=0.05)


def test_residuals_are_one_minus_the_cosine() -> None:
    teacher, student = pyramid(2, (3, 5, 4), 0), pyramid(2, (3, 5, 4), 9)
    for r, t, s in zip(residuals(teacher, student), teacher, student, strict=True):
        assert r.shape == (2, *t.shape[-2:])
        assert r.flatten().tolist() == pytest.approx(slow_residuals(t, s), abs=1e-12)


def test_residuals_are_zero_at_equal_and_two_at_opposite_features() -> None:
    teacher = pyramid(1, (3, 5, 4), 0)
    for r in residuals(teacher, [7 * t for t in teacher]):
        assert r.abs().max() <= 1e-12
    for r in residuals(teacher, [-t for t in teacher]):
        assert (r - 2).abs().max() <= 1e-12


@pytest.mark.parametrize("q", [0.001, 0.1, 1.0])
def test_reconstruction_loss_is_equation_22(q: float) -> None:
    """Two channels make differences above one, where Smooth-L1 is linear."""
    teacher, student = pyramid(3, (2, 5, 4), 0), pyramid(3, (2, 5, 4), 9)
    t, s = (torch.nn.functional.normalize(f[0], dim=1) for f in (teacher, student))
    assert (t - s).abs().max() > 1
    found = reconstruction_loss(teacher, student, q, 0.65, 0.10)
    expected = slow_reconstruction_loss(teacher, student, q, 0.65, 0.10)
    assert float(found) == pytest.approx(expected, abs=1e-12)


def test_reconstruction_loss_of_equal_features_is_zero() -> None:
    teacher = pyramid(2, (3, 5, 4), 0)
    assert float(reconstruction_loss(teacher, teacher, 0.1, 0.65, 0.1)) == pytest.approx(0)


def test_residual_map_of_a_hand_example() -> None:
    first = torch.zeros(1, 2, 4)
    second = torch.tensor([[[0.0, 1.0]]])
    third = torch.tensor([[[0.3]]])
    line = [(0 + v + 0.3) / 3 for v in (0, 0.25, 0.75, 1)]
    found = residual_map([first, second, third])
    assert found.shape == (1, 2, 4)
    assert found[0].flatten().tolist() == pytest.approx(line + line, abs=1e-6)


def test_residual_map_is_the_mean_of_bilinear_maps() -> None:
    """SciPy's linear spline at pixel centres; edges are held."""
    maps = [random(2, *size, seed=i) for i, size in enumerate([(11, 5), (6, 3), (3, 2)])]
    expected = np.zeros((2, 11, 5))
    for m in maps:
        h, w = m.shape[1:]
        rows = np.clip((np.arange(11) + 0.5) * h / 11 - 0.5, 0, h - 1)
        columns = np.clip((np.arange(5) + 0.5) * w / 5 - 0.5, 0, w - 1)
        grid = np.meshgrid(rows, columns, indexing="ij")
        for n in range(2):
            expected[n] += ndimage.map_coordinates(m[n].numpy(), grid, order=1) / 3
    np.testing.assert_allclose(residual_map(maps).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("height", "width"), [(256, 704), (176, 80), (64, 64), (80, 112)])
def test_student_rebuilds_the_teachers_shapes(height: int, width: int) -> None:
    """Also where a side at stride 16 is odd, so that stride 32 does not divide it."""
    sizes = [(height // s, width // s) for s in (4, 8, 16)]
    student = ReverseStudent(LITE_CHANNELS, (8, 8, 8, 8)).eval()
    with torch.inference_mode():
        found = student(torch.zeros(1, 112, *sizes[2]), sizes)
    expected = [(1, c, *size) for c, size in zip(LITE_CHANNELS, sizes, strict=True)]
    assert [tuple(f.shape) for f in found] == expected


@pytest.mark.parametrize("cells", [(16, 16), (18, 19), (5, 7)])
def test_student_rebuilds_three_grids_of_one_resolution(cells: tuple[int, int]) -> None:
    """As a transformer gives them; also where a side is odd, so that its half is none."""
    student = ReverseStudent((6, 6, 6), (4, 4, 4, 8)).eval()
    squeezed: list[Tensor] = []
    student.squeeze.register_forward_hook(lambda module, inputs, output: squeezed.append(output))
    with torch.inference_mode():
        found = student(torch.zeros(2, 6, *cells), [cells] * 3)
    assert squeezed[0].shape == (2, 8, math.ceil(cells[0] / 2), math.ceil(cells[1] / 2))
    assert [tuple(f.shape) for f in found] == [(2, 6, *cells)] * 3


@pytest.mark.parametrize("preset", ["lite", "paper", "dino"])
def test_what_passes_the_bottleneck_is_less_than_half_of_what_comes_in(preset: PresetName) -> None:
    """So that the student cannot be the identity on the teacher's coarse feature."""
    student = ReverseStudent(CHANNELS[preset], PRESETS[preset]["student"]["widths"]).eval()
    passed: list[Tensor] = []
    student.squeeze.register_forward_hook(lambda module, inputs, output: passed.append(output))
    coarse = torch.zeros(1, CHANNELS[preset][2], 8, 8)
    with torch.inference_mode():
        student(coarse, [(32, 32), (16, 16), (8, 8)])
    assert passed[0].shape[-2:] == (4, 4)
    assert passed[0].numel() < coarse.numel() / 2


def test_student_sees_nothing_but_the_bottleneck() -> None:
    """With the bottleneck's output held, the reconstruction no longer depends on the input."""
    torch.manual_seed(0)
    student = ReverseStudent((6, 8, 10), (4, 4, 4, 4)).eval()
    sizes = [(16, 16), (8, 8), (4, 4)]
    a, b = random(1, 10, 4, 4).float(), random(1, 10, 4, 4, seed=1).float()
    with torch.inference_mode():
        assert not torch.allclose(student(a, sizes)[0], student(b, sizes)[0])
        held = student.squeeze(a)
        student.squeeze.register_forward_hook(lambda module, inputs, output: held)
        for x, y in zip(student(a, sizes), student(b, sizes), strict=True):
            assert torch.equal(x, y)


def multiplications(module: torch.nn.Module, *inputs: object) -> int:
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        module(*inputs)
    return int(counter.get_total_flops()) // 2


def test_lite_student_costs_at_most_a_fifth_of_two_encoders() -> None:
    encoder = Encoder(PRESETS["lite"]["backbone"]["name"]).eval()
    student = ReverseStudent(encoder.channels, PRESETS["lite"]["student"]["widths"]).eval()
    sizes = [(64, 64), (32, 32), (16, 16)]
    of_encoder = multiplications(encoder, torch.zeros(1, 3, 256, 256))
    of_student = multiplications(student, torch.zeros(1, 112, 16, 16), sizes)
    assert 0.3e9 < of_encoder < 0.6e9, "a plausible count"
    assert of_student <= 2 * of_encoder / 5


def test_dino_student_costs_at_most_a_fifth_of_two_encoders() -> None:
    encoder = Encoder(PRESETS["dino"]["backbone"]["name"]).eval()
    student = ReverseStudent(encoder.channels, PRESETS["dino"]["student"]["widths"]).eval()
    of_encoder = multiplications(encoder, torch.zeros(1, 3, 140, 140))
    of_student = multiplications(student, torch.zeros(1, 384, 10, 10), [(10, 10)] * 3)
    assert 2e9 < of_encoder < 3e9, "a plausible count"
    assert of_student <= 2 * of_encoder / 5


@pytest.mark.slow
def test_paper_network_has_the_papers_63_8_million_parameters() -> None:
    backbone = PRESETS["paper"]["backbone"]["name"]
    encoder, teacher = Encoder(backbone), Encoder(backbone)
    assert encoder.channels == CHANNELS["paper"]
    tokens = torch.nn.functional.normalize(random(48, 256).float(), dim=1)
    gps = DualGP(*(SparseGP(Z, linear, 1e-3, 0.0, 1.0) for Z in (tokens[:32], tokens[32:])))
    student = ReverseStudent(encoder.channels, PRESETS["paper"]["student"]["widths"])
    projection = TokenProjection(encoder.channels, 256)
    network = Network(
        encoder, projection, gps, teacher, student, None, 8.0, 1e-6, *("dominance",) * 2
    )
    count = sum(p.numel() for p in network.parameters())
    assert count == pytest.approx(63.8e6, rel=0.02)
