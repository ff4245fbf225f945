"""Vision transformers train, predict and export: two tiny ones, and the network of `dino`."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from tests.helpers import tiny_settings
from tests.tiny_transformers import DINOV2, DINOV3

import cdgp
from cdgp.data.manifest import Manifest
from cdgp.errors import SettingsError
from cdgp.export import TARGETS, TOLERANCE, ExportOptions, export
from cdgp.presets import Settings, input_multiple, settings
from cdgp.progress import Quiet
from cdgp.workflows import Run, train_run
from cdgp_bench.synthetic import make_dataset, make_surface


def changed(one: object, other: object, place: str = "") -> dict[str, object]:
    """The values of nested settings that are not those of another, by their full names."""
    if isinstance(one, dict) and isinstance(other, dict):
        parts = [changed(one[key], other[key], f"{place}.{key}") for key in one]
        return {name: value for part in parts for name, value in part.items()}
    return {} if one == other else {place.removeprefix("."): one}


def test_dino_is_lite_with_another_backbone_and_its_rates() -> None:
    assert changed(settings("dino").model_dump(), settings("lite").model_dump()) == {
        "preset": "dino",
        "input_size": (392, 392),
        "backbone.name": "vit_small_patch14_dinov2.lvd142m",
        "backbone.weights": "hub",
        "dual_gp.learning_rate": 2e-5,
        "student.widths": (192, 192, 192, 256),
        "student.learning_rate": 1e-3,
    }


@pytest.mark.parametrize(
    ("name", "multiple"),
    [
        ("tf_efficientnet_lite0", 16),
        ("wide_resnet50_2.tv2_in1k", 16),
        ("convnext_atto", 16),
        ("swin_tiny_patch4_window7_224", 16),
        ("vit_small_patch14_dinov2.lvd142m", 14),
        ("vit_small_patch14_reg4_dinov2.lvd142m", 14),
        ("vit_small_patch16_dinov3.lvd1689m", 16),
        ("vit_small_patch8_224", 8),
        ("vit_base_patch32_clip_224", 32),
        ("no_such_model", 16),
        ("timm/vit_small_patch14_dinov2.lvd142m", 16),
    ],
)
def test_sizes_are_multiples_of_the_patch(name: str, multiple: int) -> None:
    assert input_multiple(name) == multiple


@pytest.mark.parametrize(
    ("name", "size", "nearest"),
    [
        ("vit_small_patch14_dinov2", (256, 256), "252x252"),
        ("vit_small_patch14_dinov2", (392, 260), "392x266"),
        ("vit_small_patch14_dinov2", (56, 70), "70x70"),
        ("vit_small_patch16_dinov3", (392, 256), "384x256"),  # 392 is half way to 400
        ("vit_base_patch32_clip_224", (64, 128), "96x128"),
        ("resnet18", (252, 256), "256x256"),
    ],
)
def test_another_size_is_refused_with_the_nearest(
    name: str, size: tuple[int, int], nearest: str
) -> None:
    backbone = {"name": name, "weights": "random"}
    message = (
        f"input_size {size[0]}x{size[1]}: each side must be a multiple of "
        f"{input_multiple(name)} for {name}.*the nearest is {nearest}$"
    )
    with pytest.raises(SettingsError, match=message):
        settings("lite", input_size=size, backbone=backbone)
    height, width = (int(side) for side in nearest.split("x"))
    assert settings("lite", input_size=(height, width), backbone=backbone)


def few_steps(name: str, weights: Path, input_size: tuple[int, int]) -> Settings:
    """Two steps of each stage: in the first, inducing means of zero pass nothing back."""
    return tiny_settings(
        input_size=input_size,
        backbone={"name": name, "weights": str(weights)},
        dual_gp={"steps": 2, "batch_size": 4, "no_separation": "flag"},
        student={"steps": 2, "batch_size": 2},
    )


@pytest.fixture(
    scope="module", params=[(DINOV2, (70, 98)), (DINOV3, (80, 112))], ids=["DINOv2", "DINOv3"]
)
def run(
    request: pytest.FixtureRequest, surfaces: Manifest, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A run of a tiny transformer, from a file of weights, on grids of 5 x 7 patches."""
    name, size = request.param
    place = tmp_path_factory.mktemp(name)
    torch.manual_seed(0)
    save_file(timm.create_model(name).state_dict(), place / "model.safetensors")
    return train_run(
        surfaces.root, place / "run", few_steps(name, place / "model.safetensors", size)
    )


def folder(of: Run) -> Path:
    assert of.folder is not None
    return of.folder


def test_a_step_of_each_stage_trains_all_but_the_stem(run: Run) -> None:
    """The teacher of the second stage has the weights that the encoder began with."""
    network = run.detector.model.network
    assert network.encoder is not None
    own = network.teacher.trunk.state_dict()
    moved = {
        ".".join(key.split(".")[: 2 if key.startswith("blocks") else 1])
        for key, value in network.encoder.trunk.state_dict().items()
        if not torch.equal(value, own[key])
    }
    assert moved == {"blocks.0", "blocks.1", "blocks.2", "norm"}
    assert float(network.student.heads[0].bias.abs().max()) > 0  # type: ignore[operator]


def test_a_saved_model_predicts_the_same(run: Run) -> None:
    image = make_surface((120, 90), np.random.default_rng(1))
    expected = run.detector.predict(image)
    assert expected.anomaly_map.shape == (120, 90)
    assert np.isfinite(expected.anomaly_map).all()
    found = cdgp.load(folder(run)).predict(image)
    np.testing.assert_array_equal(found.anomaly_map, expected.anomaly_map)
    assert found.pred_score == expected.pred_score


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_exported_numbers_are_those_of_torch(run: Run, target: str, tmp_path: Path) -> None:
    out = tmp_path / f"a{TARGETS[target].suffix}"
    written = export(folder(run), ExportOptions(target, out), Quiet())
    assert written.parity.worst <= TOLERANCE
    detector, size = cdgp.load(out), run.detector.settings.input_size
    images = np.random.default_rng(0).random((3, 3, *size), np.float32)
    a, b = detector.runtime.run(images), run.detector.runtime.run(images)
    torch.testing.assert_close(a.fused, b.fused, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(a.pooled, b.pooled, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_free_size(run: Run, tmp_path: Path) -> None:
    """onnxruntime resizes positions as torch does; OpenVINO can compute rotary ones."""
    name = run.detector.settings.backbone.name
    target = "onnx" if name == DINOV2 else "openvino"
    out = tmp_path / f"a{TARGETS[target].suffix}"
    export(folder(run), ExportOptions(target, out, "free"), Quiet())
    detector, patch = cdgp.load(out), input_multiple(name)
    for shape in [(1, 3, 5 * patch, 5 * patch), (2, 3, 9 * patch, 6 * patch)]:
        images = np.random.default_rng(0).random(shape, np.float32)
        a, b = detector.runtime.run(images), run.detector.runtime.run(images)
        torch.testing.assert_close(a.fused, b.fused, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(a.pooled, b.pooled, atol=TOLERANCE, rtol=0)


def test_what_a_transformer_is_not_exported_to(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--int8: .* is a transformer"):
        export(folder(run), ExportOptions("openvino", tmp_path / "a.xml", int8=True), Quiet())
    name = run.detector.settings.backbone.name
    if name == DINOV2:
        options = ExportOptions("openvino", tmp_path / "a.xml", "free")
        with pytest.raises(SettingsError, match="OpenVINO does not resize the position embedding"):
            export(folder(run), options, Quiet())
    patch = input_multiple(name)
    with pytest.raises(SettingsError, match=f"--input-size 100x100: .* a multiple of {patch}"):
        export(folder(run), ExportOptions("onnx", tmp_path / "a.onnx", (100, 100)), Quiet())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_preset_itself(tmp_path: Path) -> None:
    """Its whole network, with random weights, on grids of 5 x 6 patches."""
    make_dataset(tmp_path / "data", good=8, defective=6)
    chosen = settings(
        "dino",
        input_size=(70, 84),
        backbone={"weights": "random"},
        dual_gp={"steps": 1, "batch_size": 2, "no_separation": "flag"},
        student={"steps": 1, "batch_size": 2},
    )
    run = train_run(tmp_path / "data", tmp_path / "run", chosen)
    millions = sum(p.numel() for p in run.detector.model.network.parameters()) / 1e6
    assert millions == pytest.approx(2 * 22.1 + 4.6, rel=0.05)
    image = run.manifest.samples[0].image
    expected = cdgp.load(tmp_path / "run").predict(image)
    assert expected.anomaly_map.shape == (96, 80)
    assert np.isfinite(expected.anomaly_map).all()
    assert expected.pred_score == run.detector.predict(image).pred_score
    export(tmp_path / "run", ExportOptions("onnx", tmp_path / "a.onnx"), Quiet())
    found = cdgp.load(tmp_path / "a.onnx").predict(image)
    assert found.pred_score == pytest.approx(expected.pred_score, abs=TOLERANCE)
