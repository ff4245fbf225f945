"""EfficientAD's teacher: its targets and training, that it resumes, and that anomalib takes it."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from tests.helpers import Interrupting, assert_same, noise_image, snapshot
from torch import Tensor
from torch.nn import functional

from cdgp.errors import DataError, OutputError
from cdgp.method.build import pretrained_encoder
from cdgp.presets import settings
from cdgp.progress import Advance, Quiet
from cdgp.training import loop
from cdgp_bench.methods.efficientad import read_teacher
from cdgp_bench.studies import distil_teacher
from cdgp_bench.studies.distil_teacher import (
    Distillation,
    PatchFeatures,
    distil,
    save_teacher,
    statistics,
)

LITE = settings("lite")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil_teacher, "SIDE", 64)
    monkeypatch.setattr(distil_teacher, "BATCH", 2)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for index in range(3):
        noise_image(tmp_path / "images" / f"{index}.png", (64, 64), index)
    return tmp_path / "images"


def averaged(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Adaptive averages over the last axis, bin by bin as torch documents it."""
    length = values.shape[-1]
    ends = [(i * length // count, math.ceil((i + 1) * length / count)) for i in range(count)]
    return np.stack([values[..., a:b].mean(-1) for a, b in ends], -1)


def by_patchcore(stages: list[Tensor]) -> NDArray[np.float64]:
    """PatchCore's way written out: neighbourhoods, one size, 1024 a stage, 384 together."""
    height, width = stages[0].shape[-2:]
    found = []
    for stage in stages:
        padded = functional.pad(stage.double(), (1, 1, 1, 1))
        h, w = stage.shape[-2:]
        shifted = [padded[..., y : y + h, x : x + w] for y in range(3) for x in range(3)]
        patches = torch.stack(shifted, 2).flatten(1, 2)  # by channel, then by place
        patches = functional.interpolate(patches, (height, width), mode="bilinear")
        found.append(averaged(patches.permute(0, 2, 3, 1).numpy(), 1024))
    return averaged(np.concatenate(found, -1), 384).transpose(0, 3, 1, 2)


def test_targets_are_patchcores_features() -> None:
    encoder = pretrained_encoder(LITE).eval()
    features = PatchFeatures(encoder)
    shown = torch.rand(2, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, second, third = encoder(encoder.normalise(shown))
    found = features(shown)
    assert found.shape == (2, 384, 12, 8)
    expected = by_patchcore([second, third])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_channels_are_normalised_over_all_images(images: Path) -> None:
    features = PatchFeatures(pretrained_encoder(LITE)).eval()
    paths = sorted(images.iterdir())
    mean, std = statistics(paths, LITE, features, Quiet())
    shown = np.stack([np.asarray(Image.open(p), np.float32) / 255 for p in paths])
    large = functional.interpolate(
        torch.from_numpy(shown).permute(0, 3, 1, 2), (128, 128), mode="bilinear"
    )
    every = features(large).double().numpy().transpose(1, 0, 2, 3).reshape(384, -1)
    np.testing.assert_allclose(mean.flatten(), every.mean(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(std.flatten(), every.std(1), rtol=1e-4)


@pytest.mark.slow
def test_a_step_is_adams_on_the_mean_squared_error(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image alone, so that the batch is it twice; network, gradient and step written out."""
    monkeypatch.setattr(distil_teacher, "GREY", 0.0)
    for path in sorted(images.iterdir())[1:]:
        path.unlink()
    (path,) = images.iterdir()
    out = images.parent / "teacher.pth"
    distil(str(images), out, 1, Quiet())

    image = torch.from_numpy(np.asarray(Image.open(path), np.float32) / 255).permute(2, 0, 1)[None]
    features = PatchFeatures(pretrained_encoder(LITE)).eval()
    target = features(functional.interpolate(image, (128, 128), mode="bilinear"))
    mean, std = target.mean((2, 3), keepdim=True), target.std((2, 3), keepdim=True, correction=0)
    before = Distillation(LITE.seed).network.state_dict()
    weights = {k: v.clone().requires_grad_() for k, v in before.items()}
    x = (image - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    for layer, padding in ((1, 3), (2, 3), (3, 1), (4, 0)):
        x = functional.conv2d(
            x, weights[f"conv{layer}.weight"], weights[f"conv{layer}.bias"], padding=padding
        )
        x = x.relu() if layer < 4 else x
        x = functional.avg_pool2d(x, 2, 2, 1) if layer < 3 else x
    assert x.shape == target.shape
    (x - (target - mean) / std).square().mean().backward()
    after = read_teacher(out).weights
    for key, start in before.items():
        gradient = weights[key].grad
        assert gradient is not None
        decayed = gradient + 1e-5 * start
        step = 1e-4 * decayed / (decayed.abs() + 1e-8)  # Adam's first
        # Where a gradient is all but zero, rounding decides its sign.
        clear = decayed.abs() > 1e-3 * decayed.abs().max()
        assert clear.float().mean() > 0.5
        torch.testing.assert_close((after[key] - start)[clear], -step[clear], rtol=1e-2, atol=1e-7)


def test_one_image_in_ten_is_grey_in_both_sizes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained: the batches alone are drawn. Every image comes once in a pass."""
    shown: list[Tensor] = []
    seen: list[Tensor] = []

    class Watched(PatchFeatures):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return torch.zeros(len(images), 384, 1, 1)

    def draw(stage: loop.Stage, context: Any) -> float:
        for step in range(150):
            shown.extend(stage.batch(step)[0])
        return 0.0

    monkeypatch.setattr(distil_teacher, "PatchFeatures", Watched)
    monkeypatch.setattr(distil_teacher, "run_stage", draw)
    distil(str(images), tmp_path / "teacher.pth", 5, Quiet())
    large = [image for batch in seen[3:] for image in batch]  # the first three: statistics
    assert len(shown) == len(large) == 300
    known = [np.asarray(Image.open(p), np.float32).transpose(2, 0, 1) / 255
             for p in sorted(images.iterdir())]  # fmt: skip
    weights = np.array([0.2989, 0.587, 0.114], np.float32)[:, None, None]
    greys = [np.repeat((weights * k).sum(0, keepdims=True), 3, 0) for k in known]
    which, grey = [], []
    for small_, large_ in zip(shown, large, strict=True):
        colourless = bool((small_[0] == small_[1]).all())
        assert colourless == bool((large_[0] == large_[1]).all())
        candidates = greys if colourless else known
        distances = [float(np.abs(small_.numpy() - c).max()) for c in candidates]
        assert min(distances) < 1e-3
        which.append(int(np.argmin(distances)))
        grey.append(colourless)
    passes = np.sort(np.array(which).reshape(100, 3), 1)
    assert (passes == [0, 1, 2]).all()
    assert 10 <= sum(grey) <= 55, "30 of 300 are expected, with a standard deviation of 5"


class Counting(Quiet):
    """Keeps the first step of each phase."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        self.first[name] = done
        yield lambda note="": None


@pytest.mark.slow
def test_killed_and_called_again_it_goes_on_to_the_same_teacher(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", -1.0)
    whole, stopped = tmp_path / "whole.pth", tmp_path / "stopped.pth"
    distil(str(images), whole, 4, Quiet())
    with pytest.raises(KeyboardInterrupt):
        distil(str(images), stopped, 4, Interrupting("Teacher", 3))
    assert not stopped.exists()
    again = Counting()
    distil(str(images), stopped, 4, again)
    assert again.first == {"Teacher": 2}, "two steps and the statistics were kept"
    assert_same(read_teacher(stopped).weights, read_teacher(whole).weights)
    before = Distillation(LITE.seed).network.state_dict()
    assert not torch.equal(before["conv4.bias"], read_teacher(whole).weights["conv4.bias"])


def test_anomalib_loads_the_file_unchanged(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put where anomalib keeps its release, it is read by anomalib's own code."""
    from anomalib.models import EfficientAd
    from anomalib.models.image.efficient_ad import lightning_model

    place = tmp_path / "efficientad_pretrained_weights" / "pretrained_teacher_small.pth"
    arguments = ["", "--data", str(images), "--out", str(place), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    distil_teacher.main()
    monkeypatch.setattr(lightning_model, "get_pretrained_weights_dir", lambda: tmp_path)
    module = EfficientAd()
    module.prepare_pretrained_model()
    (kept,) = tmp_path.rglob("teacher.safetensors")
    ours = {k.removeprefix("module.network."): v for k, v in load_file(kept).items()}
    assert_same(module.model.teacher.state_dict(), ours)
    distilled = read_teacher(place).distilled
    assert distilled is not None
    named = {key: distilled[key] for key in ("backbone", "steps", "images")}
    assert named == {"backbone": "tf_efficientnet_lite0", "steps": 1, "images": 3}


def test_a_finished_teacher_stays(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "teacher.pth"
    distil(str(images), out, 1, Quiet())
    before = snapshot(tmp_path)
    again = Counting()
    distil(str(images), out, 1, again)
    with pytest.raises(OutputError, match=r"teacher\.pth: exists, and is another file"):
        distil(str(images), out, 2, again)
    assert again.first == {} and snapshot(tmp_path) == before
    out.write_text("something else")
    with pytest.raises(OutputError, match=r"teacher\.pth: exists, and is another file"):
        distil(str(images), out, 1, again)
    assert out.read_text() == "something else"


def test_the_same_teacher_is_the_same_file(tmp_path: Path) -> None:
    """Rows name a teacher by the file's digest."""
    network = Distillation(0).network
    for name in ("a.pth", "b.pth"):
        save_teacher(tmp_path / name, network, {"steps": 1})
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()


def test_a_folder_without_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--data .+: there are no images"):
        distil(str(tmp_path), tmp_path / "out" / "teacher.pth", 1, Quiet())
    assert not (tmp_path / "out").exists()


def test_an_error_ends_the_command_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["", "--data", str(tmp_path), "--out", str(tmp_path / "t.pth")]
    )
    with pytest.raises(SystemExit, match="there are no images in it"):
        distil_teacher.main()
