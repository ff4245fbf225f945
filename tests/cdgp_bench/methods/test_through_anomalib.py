"""Methods through anomalib: what they are given, and that their scores arrive unchanged."""

import gc
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.cdgp_bench.helpers import tiny_options
from tests.helpers import noise_image, reference_settings, snapshot

from cdgp.data.manifest import WeakSample
from cdgp.errors import SettingsError
from cdgp.method.build import pretrained_encoder
from cdgp.progress import Quiet
from cdgp_bench.errors import NotRunError
from cdgp_bench.grid import METHODS
from cdgp_bench.methods import draem, efficientad, padim, patchcore, rd4ad
from cdgp_bench.methods import through_anomalib as through
from cdgp_bench.protocol import Prepared
from cdgp_bench.studies.distil_teacher import Distillation, save_teacher

THROUGH = {"padim": padim, "patchcore": patchcore, "rd4ad": rd4ad, "draem": draem,
           "efficientad": efficientad}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH)
def test_anomalib_gets_good_images_only_and_its_scores_arrive_unchanged(
    name: str, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anomalib.data
    from anomalib.data import PredictDataset
    from anomalib.engine import Engine

    fed: list[dict[str, list[Any]]] = []

    class Watched(anomalib.data.Tabular):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            fed.append(arguments["samples"])
            super().__init__(**arguments)

    monkeypatch.setattr(anomalib.data, "Tabular", Watched)
    chosen, options = reference_settings(), tiny_options(name, tmp_path / "given")
    fitted = METHODS[name].fit(prepared.weak, chosen, tmp_path / "a", Quiet(), options)

    (table,) = fed
    assert set(table) == {"image_path", "label_index", "split"}, "no mask is passed on"
    assert set(table["label_index"]) == {0} and set(table["split"]) == {"train"}
    shown = chosen
    if name == "efficientad":
        shown = chosen.model_copy(update={"input_size": (256, 256)})
    part = prepared.weak.fit if name == "efficientad" else prepared.weak.train
    expected = {
        through.eight_bit(s.image, shown).numpy().tobytes() for s in part if not s.defective
    }
    pixels = {np.asarray(Image.open(p)).transpose(2, 0, 1).tobytes() for p in table["image_path"]}
    assert pixels == expected and len(table["image_path"]) == len(expected)

    # anomalib's own engine, on its own reading of the same image, with the weights we kept.
    image = next(s.image for s in prepared.manifest.of("test") if s.defective)
    (scored,) = fitted.score([image])
    file = tmp_path / "image.png"
    Image.fromarray(through.eight_bit(image, shown).permute(1, 2, 0).numpy()).save(file)
    module = THROUGH[name].build(pretrained_encoder(chosen), shown, options)
    (kept,) = (tmp_path / "a").rglob(f"{name}.safetensors")
    module.load_state_dict(load_file(kept))
    engine = Engine(default_root_dir=tmp_path / "engine", accelerator="cpu", devices=1)
    (said,) = engine.predict(model=module, dataset=PredictDataset(path=file))
    theirs = said.anomaly_map.squeeze().numpy()
    np.testing.assert_allclose(scored.anomaly_map, theirs, rtol=1e-4, atol=1e-5)
    assert scored.image_score == pytest.approx(float(said.pred_score[0]), rel=1e-4)

    again = METHODS[name].fit(prepared.weak, chosen, tmp_path / "b", Quiet(), options)
    (second,) = again.score([image])
    np.testing.assert_array_equal(second.anomaly_map, scored.anomaly_map)
    assert again.facts == fitted.facts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padim", "patchcore"])
def test_a_plain_module_of_anomalib_says_the_same(
    name: str, prepared: Prepared, tmp_path: Path
) -> None:
    """Built by hand: its own extractor with our weights, its scale typed in, the layers' names."""
    from anomalib.models import Padim, Patchcore
    from torchvision.transforms.v2.functional import normalize

    chosen, options = reference_settings(), tiny_options(name, tmp_path)
    fitted = METHODS[name].fit(prepared.weak, chosen, tmp_path, Quiet(), options)
    if name == "padim":
        module = Padim("tf_efficientnet_lite0", ["blocks.1", "blocks.2", "blocks.4"], False, 100)
    else:
        module = Patchcore("tf_efficientnet_lite0", ["blocks.2", "blocks.4"], False, 0.1)
    network: Any = fitted.pipeline().network
    state = {
        key.replace(
            "feature_extractor.feature_extractor.trunk.", "feature_extractor.feature_extractor."
        ): value
        for key, value in network.state_dict().items()
    }
    missing, unexpected = module.model.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("blocks.5" in key or "blocks.6" in key for key in missing), "beyond what is used"
    module.model.eval()
    for sample in prepared.manifest.of("test")[:3]:
        (scored,) = fitted.score([sample.image])
        image = through.eight_bit(sample.image, chosen).div(255)[None]
        with torch.inference_mode():
            said = module.model(normalize(image, [0.5] * 3, [0.5] * 3))
        np.testing.assert_allclose(scored.anomaly_map, said.anomaly_map[0, 0], rtol=1e-4)
        assert scored.image_score == pytest.approx(float(said.pred_score[0]), rel=1e-4)


@pytest.mark.slow
def test_efficientad_scales_by_good_calibration_images(prepared: Prepared, tmp_path: Path) -> None:
    """Quantiles recomputed from raw maps; and no other images give them."""
    options = tiny_options("efficientad", tmp_path / "given")
    chosen = reference_settings()
    fitted = efficientad.fit(prepared.weak, chosen, tmp_path, Quiet(), options)
    network: Any = fitted.pipeline().network
    shown = chosen.model_copy(update={"input_size": (256, 256)})

    def quantiles(samples: Any) -> list[float]:
        images = [through.eight_bit(s.image, shown).div(255)[None] for s in samples
                  if not s.defective]  # fmt: skip
        with torch.inference_mode():
            maps = [network.get_maps(image) for image in images]
        return [
            float(torch.cat([pair[i].flatten() for pair in maps]).quantile(q))
            for i in (0, 1) for q in (0.9, 0.995)
        ]  # fmt: skip

    kept = [float(network.quantiles[k]) for k in ("qa_st", "qb_st", "qa_ae", "qb_ae")]
    np.testing.assert_allclose(kept, quantiles(prepared.weak.calibration), rtol=1e-4)
    assert not np.allclose(kept, quantiles(prepared.weak.fit), rtol=1e-3)


def test_defective_images_are_left_out_of_the_rows(prepared: Prepared, tmp_path: Path) -> None:
    samples = prepared.weak.train
    bad = [WeakSample(s.image, True) for s in samples]
    assert through.rows(bad, reference_settings(), tmp_path)["image_path"] == []


def numpy_state() -> object:
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tolist()


def test_global_random_numbers_are_left_alone() -> None:
    before = random.getstate(), numpy_state(), torch.get_rng_state()
    with through.quiet_and_seeded(3):
        first = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
    with through.quiet_and_seeded(3):
        assert (random.random(), np.random.rand(), float(torch.rand(()))) == first  # noqa: NPY002
    assert random.getstate() == before[0]
    assert numpy_state() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("name", "missing"),
    [("draem", "a folder of texture images"), ("efficientad", "its teacher's weights")],
)
def test_what_is_not_given_is_named(
    name: str, missing: str, prepared: Prepared, tmp_path: Path
) -> None:
    with pytest.raises(NotRunError, match=f"{name} needs {missing}.*nothing was given"):
        METHODS[name].fit(
            prepared.weak, reference_settings(), tmp_path, Quiet(), METHODS[name].options["lite"]
        )


def test_a_folder_without_images_is_not_given(prepared: Prepared, tmp_path: Path) -> None:
    """Otherwise DRAEM would use its own noise as textures, without a word."""
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / "read.me").write_text("x")
    options = draem.LITE.model_copy(update={"auxiliary": str(tmp_path / "dtd")})
    with pytest.raises(NotRunError, match="there are none in"):
        draem.fit(prepared.weak, reference_settings(), tmp_path, Quiet(), options)


def test_rows_depend_on_the_auxiliary_images_not_on_where_they_lie(tmp_path: Path) -> None:
    first, second = (tiny_options("draem", tmp_path / name) for name in ("a", "b"))
    assert first.decides() == second.decides()
    Image.new("RGB", (9, 9)).save(tmp_path / "b" / "auxiliary" / "new.png")
    assert first.decides() != second.decides()


def test_draem_finds_its_textures_in_a_flat_folder(tmp_path: Path) -> None:
    textures = [noise_image(tmp_path / f"{name}.png") for name in ("b", "a", "c")]
    options = draem.LITE.model_copy(update={"auxiliary": str(tmp_path)})
    module = draem.build(None, reference_settings(), options)
    assert module.augmenter.anomaly_source_paths == sorted(textures)


@pytest.mark.parametrize("folders", [("",), ("cats", "dogs")])
def test_efficientad_takes_auxiliary_images_flat_or_by_class(
    folders: Sequence[str], tmp_path: Path
) -> None:
    """All of them in the order of their names, as they are; nothing is written beside them."""
    given = tmp_path / "given"
    images = [
        noise_image(given / folder / f"{name}.png", (512, 512), seed)
        for seed, (folder, name) in enumerate((f, n) for f in folders for n in ("b", "a"))
    ]
    options = efficientad.LITE.model_copy(update={"auxiliary": str(given)})
    module = efficientad.build(None, reference_settings(), options)
    before = snapshot(tmp_path)
    module.prepare_imagenette_data((256, 256))
    found = [Path(file) for file, _ in module.imagenet_loader.dataset.samples]
    assert [file.resolve() for file in found] == sorted(images)
    shown = next(module.imagenet_iterator)[0]
    assert shown.shape == (1, 3, 256, 256)
    centres = [np.asarray(Image.open(file))[128:384, 128:384] for file in images]
    colour = [c.transpose(2, 0, 1) / 255 for c in centres]
    grey = [np.stack([np.asarray(Image.fromarray(c).convert("L"))] * 3) / 255 for c in centres]
    assert any(np.allclose(shown[0], c, atol=1 / 255) for c in colour + grey)
    assert snapshot(tmp_path) == before
    folder = Path(module.imagenet_dir)
    del module
    gc.collect()
    assert not folder.exists(), "the link goes with the module"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("steps", "teacher_steps", "share"),
    [(700, 60_000, 0.01), (70_000, 600, 0.01), (70_000, None, 1.0)],
)
def test_a_short_teacher_makes_a_short_row(
    steps: int, teacher_steps: int | None, share: float, prepared: Prepared, tmp_path: Path
) -> None:
    """The share of the published training is the smaller one; anomalib's own teacher has all."""
    options = tiny_options("efficientad", tmp_path).model_copy(update={"steps": steps})
    if teacher_steps is not None:
        about = {"backbone": "tf_efficientnet_lite0", "steps": teacher_steps}
        save_teacher(tmp_path / "teacher.pth", Distillation(0).network, about)
    facts = efficientad.recipe(prepared.weak, reference_settings(), options).facts
    assert facts["budget_share"] == pytest.approx(share)
    said = None
    if teacher_steps is not None:
        said = f"distilled by us from tf_efficientnet_lite0, {teacher_steps:,} steps"
    assert facts.get("teacher") == said


@pytest.mark.parametrize("content", ["text", "tensor", "other network"])
def test_a_file_without_a_teacher_is_named_before_training(
    content: str, prepared: Prepared, tmp_path: Path
) -> None:
    options = tiny_options("efficientad", tmp_path)
    file = Path(options.teacher)
    if content == "text":
        file.write_text("something else")
    else:
        value = torch.zeros(3)
        torch.save(value if content == "tensor" else {"conv1.weight": value}, file)
    with pytest.raises(SettingsError, match=r"teacher\.pth: does not hold the weights"):
        efficientad.fit(prepared.weak, reference_settings(), tmp_path / "c", Quiet(), options)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["rd4ad", "draem"])
def test_sides_that_cannot_be_halved_five_times(
    name: str, prepared: Prepared, tmp_path: Path
) -> None:
    chosen = reference_settings(input_size=(80, 64))
    with pytest.raises(SettingsError, match=f"{name} needs an input_size.*80x64 was given"):
        METHODS[name].fit(
            prepared.weak, chosen, tmp_path, Quiet(), tiny_options(name, tmp_path / "given")
        )


def test_padim_names_what_would_not_fit(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padim, "memory_bytes", lambda: 2**20)
    with pytest.raises(NotRunError, match="padim would need 0 GiB of memory for 19 good images"):
        padim.fit(prepared.weak, reference_settings(), tmp_path, Quiet(), padim.LITE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padim", "patchcore", "rd4ad"])
def test_residual_backbones_run_as_anomalib_has_them(
    name: str, prepared: Prepared, tmp_path: Path
) -> None:
    """The way of the `paper` preset, on a smaller network of the same family."""
    chosen = reference_settings(backbone={"name": "resnet18", "weights": "random"})
    options = tiny_options(name, tmp_path)
    fitted = METHODS[name].fit(prepared.weak, chosen, tmp_path, Quiet(), options)
    (scored,) = fitted.score([prepared.manifest.of("test")[0].image])
    assert scored.anomaly_map.shape == (64, 64) and np.isfinite(scored.anomaly_map).all()
    assert "decoder" not in fitted.facts


def test_an_interrupt_reaches_the_user(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would end the program with its own exit code, and keep its signal handler."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(through, "_watcher", lambda advance, losses: _interrupting())
    with pytest.raises(KeyboardInterrupt):
        rd4ad.fit(prepared.weak, reference_settings(), tmp_path, Quiet(), rd4ad.Options(epochs=1))
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.rglob("rd4ad.safetensors"))


def _interrupting() -> Any:
    from lightning.pytorch import Callback

    class Interrupting(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    return Interrupting()


def test_rd4ad_reconstructs_the_stages_of_any_backbone() -> None:
    encoder = pretrained_encoder(reference_settings())
    stages = [torch.randn(2, c, 96 // s, 64 // s) for c, s in zip(encoder.channels, (4, 8, 16),
                                                                  strict=True)]  # fmt: skip
    back = rd4ad.Decoder(encoder.channels)(rd4ad.Bottleneck(encoder.channels)(stages))
    assert [b.shape for b in back] == [s.shape for s in stages]
    assert all(bool((b < 0).any()) for b in back), "stages without an activation can be reached"


def test_learning_curve_is_the_mean_of_stretches() -> None:
    losses = [float(i) for i in range(1, 101)]
    curve = through.averaged(losses)
    assert len(curve) == through.CURVE_POINTS and curve[-1][0] == 100
    assert curve[0] == [3, 2.0]
    assert through.averaged([0.0, 0.0]) == []
