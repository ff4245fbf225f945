"""Methods from elsewhere: what they are fed, and that nothing of theirs is lost on the way."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers import tiny_options, tiny_settings

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import Manifest, WeakSample
from cdgp.data.splits import hashed
from cdgp.errors import NotRunError, SettingsError
from cdgp.presets import DataSettings
from cdgp.progress import Quiet
from cdgp.training.dataset import WeakDataset
from cdgp.training.stages import pretrained
from cdgp_bench.formats import Table, TableRow, marks
from cdgp_bench.grid import METHODS, Variant, variant_settings
from cdgp_bench.methods import draem, efficientad, padim, patchcore, rd4ad, weakrest
from cdgp_bench.methods import supersimplenet as ssn
from cdgp_bench.methods import through_anomalib as through
from cdgp_bench.protocol import Prepared, prepare
from cdgp_bench.statistics import Summary

THROUGH = {"padim": padim, "patchcore": patchcore, "rd4ad": rd4ad, "draem": draem,
           "efficientad": efficientad}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(surfaces: Manifest) -> Prepared:
    return prepare("surfaces", "surfaces", hashed(surfaces), DataSettings(), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH)
def test_anomalib_is_fed_good_images_alone_and_says_what_we_pass_on(
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
    chosen, options = tiny_settings(), tiny_options(name, tmp_path / "given")
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
    pixels = next(s.image for s in prepared.manifest.of("test") if s.defective)
    (scored,) = fitted.score([pixels])
    file = tmp_path / "image.png"
    Image.fromarray(through.eight_bit(pixels, shown).permute(1, 2, 0).numpy()).save(file)
    module = THROUGH[name].build(pretrained(chosen), shown, options)
    (kept,) = (tmp_path / "a").rglob(f"{name}.safetensors")
    from safetensors.torch import load_file

    module.load_state_dict(load_file(kept))
    engine = Engine(default_root_dir=tmp_path / "engine", accelerator="cpu", devices=1)
    (said,) = engine.predict(model=module, dataset=PredictDataset(path=file))
    theirs = said.anomaly_map.squeeze().numpy()
    np.testing.assert_allclose(scored.anomaly_map, theirs, rtol=1e-4, atol=1e-5)
    assert scored.image_score == pytest.approx(float(said.pred_score[0]), rel=1e-4)

    again = METHODS[name].fit(prepared.weak, chosen, tmp_path / "b", Quiet(), options)
    (second,) = again.score([pixels])
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

    chosen, options = tiny_settings(), tiny_options(name, tmp_path)
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
    chosen = tiny_settings()
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
    assert through.rows(bad, tiny_settings(), tmp_path)["image_path"] == []


def test_global_random_numbers_are_left_alone() -> None:
    import random

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with through.quiet_and_seeded(3):
        first = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
    with through.quiet_and_seeded(3):
        assert (random.random(), np.random.rand(), float(torch.rand(()))) == first  # noqa: NPY002
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("name", "missing"),
    [("draem", "a folder of texture images"), ("efficientad", "its teacher's weights")],
)
def test_what_is_not_given_is_told(
    name: str, missing: str, prepared: Prepared, tmp_path: Path
) -> None:
    with pytest.raises(NotRunError, match=f"{name} needs {missing}.*nothing was given"):
        METHODS[name].fit(
            prepared.weak, tiny_settings(), tmp_path, Quiet(), METHODS[name].options["lite"]
        )


def test_a_folder_without_images_is_not_given(prepared: Prepared, tmp_path: Path) -> None:
    """Else DRAEM would take its own noise for textures and say nothing."""
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / "read.me").write_text("x")
    options = draem.LITE.model_copy(update={"auxiliary": str(tmp_path / "dtd")})
    with pytest.raises(NotRunError, match="there are none in"):
        draem.fit(prepared.weak, tiny_settings(), tmp_path, Quiet(), options)


def test_rows_depend_on_the_auxiliary_images_not_on_where_they_lie(tmp_path: Path) -> None:
    first, second = (tiny_options("draem", tmp_path / name) for name in ("a", "b"))
    assert first.decides() == second.decides()
    Image.new("RGB", (9, 9)).save(tmp_path / "b" / "auxiliary" / "new.png")
    assert first.decides() != second.decides()


@pytest.mark.parametrize("name", ["rd4ad", "draem"])
def test_sides_that_cannot_be_halved_five_times_are_told(
    name: str, prepared: Prepared, tmp_path: Path
) -> None:
    chosen = tiny_settings(input_size=(80, 64))
    with pytest.raises(SettingsError, match=f"{name} needs an input_size.*80x64 was given"):
        METHODS[name].fit(
            prepared.weak, chosen, tmp_path, Quiet(), tiny_options(name, tmp_path / "given")
        )


def test_padim_tells_what_would_not_fit(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padim, "memory_bytes", lambda: 2**20)
    with pytest.raises(NotRunError, match="padim would need 0 GiB of memory for 19 good images"):
        padim.fit(prepared.weak, tiny_settings(), tmp_path, Quiet(), padim.LITE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padim", "patchcore", "rd4ad"])
def test_residual_backbones_run_as_anomalib_has_them(
    name: str, prepared: Prepared, tmp_path: Path
) -> None:
    """The way of the `paper` preset, on a smaller network of the same family."""
    chosen = tiny_settings(backbone={"name": "resnet18", "weights": "random"})
    options = tiny_options(name, tmp_path)
    fitted = METHODS[name].fit(prepared.weak, chosen, tmp_path, Quiet(), options)
    (scored,) = fitted.score([prepared.manifest.of("test")[0].image])
    assert scored.anomaly_map.shape == (64, 64) and np.isfinite(scored.anomaly_map).all()
    assert "decoder" not in fitted.facts


def test_an_interrupt_reaches_the_user(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would end the program with its own exit code, and keep the signal to itself."""
    import signal

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(through, "_teller", lambda advance, losses: _interrupting())
    with pytest.raises(KeyboardInterrupt):
        rd4ad.fit(prepared.weak, tiny_settings(), tmp_path, Quiet(), rd4ad.Options(epochs=1))
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.rglob("rd4ad.safetensors"))


def _interrupting() -> Any:
    from lightning.pytorch import Callback

    class Interrupting(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    return Interrupting()


def test_published_hyperparameters_stand_in_the_paper_preset() -> None:
    """FINDINGS and the authors' papers, typed in a second time."""
    assert METHODS["padim"].options["paper"].model_dump() == {"features": 550}
    assert METHODS["patchcore"].options["paper"].model_dump() == {"coreset": 0.1, "neighbours": 9}
    assert METHODS["rd4ad"].options["paper"].model_dump() == {"epochs": 200}
    assert METHODS["draem"].options["paper"].epochs == 700
    assert METHODS["efficientad"].options["paper"].steps == 70_000
    weak = METHODS["supersimplenet"].options["paper"]
    assert (weak.epochs, weak.batch, weak.noise, weak.threshold) == (300, 32, 0.015, 0.2)


def test_rd4ad_reconstructs_the_stages_of_any_backbone() -> None:
    encoder = pretrained(tiny_settings())
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


def test_methods_with_too_little_training_are_not_ranked() -> None:
    one = Summary(0.9, 0.0, 3)
    other = Summary(0.8, 0.0, 3)
    rows = [TableRow("a", [one], ranked=False), TableRow("b", [other]), TableRow("c", [other])]
    assert marks(Table("t", "t", ["", "x"], rows), 3) == [[""], ["best"], ["best"]]


# SuperSimpleNet


def test_supersimplenet_loss_is_its_definition() -> None:
    torch.manual_seed(0)
    position = torch.randn(4, 1, 3, 5, dtype=torch.float64)
    image = torch.randn(4, dtype=torch.float64)
    defective = torch.tensor([False, True, False, False])
    synthetic = torch.zeros(4, 1, 3, 5, dtype=torch.bool)
    synthetic[2, 0, 1, 1:4] = True

    def focal(logit: float, target: bool) -> float:
        p = 1 / (1 + math.exp(-logit))
        right = p if target else 1 - p
        return -((1 - right) ** 4) * math.log(right)

    normal, abnormal, focals = [], [], []
    for b in range(4):
        if defective[b]:
            continue
        for y in range(3):
            for x in range(5):
                value, target = float(position[b, 0, y, x]), bool(synthetic[b, 0, y, x])
                focals.append(focal(value, target))
                if target:
                    abnormal.append(max(0.5 - value, 0))
                else:
                    normal.append(max(value + 0.5, 0))
    targets = [False, True, True, False]
    images = [focal(float(v), t) for v, t in zip(image, targets, strict=True)]
    expected = (np.mean(normal) + np.mean(abnormal), np.mean(focals), np.mean(images))
    total, terms = ssn.loss(ssn.Said(position, image), defective, synthetic)
    told = terms["truncated"], terms["positions"], terms["pictures"]
    np.testing.assert_allclose([float(t) for t in told], expected, rtol=1e-9)
    assert float(total) == pytest.approx(sum(expected), rel=1e-9)


def test_supersimplenet_without_anything_known_learns_from_images_alone() -> None:
    said = ssn.Said(torch.randn(2, 1, 2, 2), torch.randn(2))
    bad = torch.tensor([True, True])
    total, terms = ssn.loss(said, bad, torch.zeros(2, 1, 2, 2, dtype=torch.bool))
    assert float(total) == float(terms["pictures"]) > 0


def test_supersimplenet_noise_stays_where_it_may() -> None:
    """On good images, inside the mask, and nowhere else."""
    torch.manual_seed(0)
    options = tiny_options("supersimplenet", Path()).model_copy(update={"noise": 5.0})
    model = ssn.SuperSimpleNet(pretrained(tiny_settings()), options)
    seen: list[torch.Tensor] = []
    said = model.said
    model.said = lambda adapted: seen.append(adapted) or said(adapted)  # type: ignore[method-assign]
    images = torch.rand(2, 3, 64, 64)
    perlin = torch.zeros(4, 1, 16, 16, dtype=torch.bool)
    perlin[:, :, 4:9, 2:7] = True
    perlin[0] = False
    model(images, torch.tensor([False, True]), perlin, 7)
    clean = model.adaptor(model.features(images)).repeat(2, 1, 1, 1)
    changed = ((seen[0] - clean).abs() > 1e-6).any(1)
    assert not changed[0].any(), "an empty mask"
    assert not changed[1].any() and not changed[3].any(), "a defective image"
    assert torch.equal(changed[2], perlin[2, 0])


def test_perlin_masks_are_reproduced_and_half_are_empty() -> None:
    masks = ssn.perlin_masks(60, (16, 24), 0.2, torch.Generator().manual_seed(1))
    again = ssn.perlin_masks(60, (16, 24), 0.2, torch.Generator().manual_seed(1))
    assert masks.shape == (60, 1, 16, 24) and masks.dtype == torch.bool
    assert torch.equal(masks, again)
    assert 15 <= sum(bool(m.any()) for m in masks) <= 45


def test_supersimplenet_rates_fall_twice() -> None:
    factor = ssn.falling(100)
    assert [factor(s) for s in (0, 79, 80, 89, 90, 99)] == pytest.approx(
        [1, 1, 0.4, 0.4, 0.16, 0.16]
    )


@pytest.mark.slow
def test_supersimplenet_keeps_a_defect_free_map_quiet(prepared: Prepared, tmp_path: Path) -> None:
    """After a short training it is lower everywhere than the peak of any defective image."""
    changes = {"most_steps": 100, "batch": 8, "noise": 1.5}
    options = tiny_options("supersimplenet", Path()).model_copy(update=changes)
    fitted = ssn.fit(prepared.weak, tiny_settings(), tmp_path, Quiet(), options)
    part = prepared.manifest.of("test")
    peaks = {
        bad: [
            s.anomaly_map.max() for s in fitted.score([x.image for x in part if x.defective == bad])
        ]
        for bad in (False, True)
    }
    assert max(peaks[False]) < min(peaks[True])
    assert fitted.facts["budget_share"] < 0.05


def test_supersimplenet_map_is_blurred_at_the_input_size(
    prepared: Prepared, tmp_path: Path
) -> None:
    """Against scipy: upsampled logits under a Gaussian of four pixels."""
    from scipy.ndimage import gaussian_filter
    from torch.nn.functional import interpolate

    chosen = tiny_settings()
    options = tiny_options("supersimplenet", Path())
    fitted = ssn.fit(prepared.weak, chosen, tmp_path, Quiet(), options)
    path = prepared.manifest.of("test")[0].image
    (scored,) = fitted.score([path])
    network: Any = fitted.pipeline().network
    with torch.inference_mode():
        image = to_input(read_image(path), chosen.input_size)[None]
        logits = network.said(network.adaptor(network.features(image))).position
        spread = interpolate(logits, (64, 64), mode="bilinear")[0, 0].numpy()
    expected = gaussian_filter(spread, 4.0, mode="mirror", truncate=3.0)
    np.testing.assert_allclose(scored.anomaly_map, expected, atol=1e-4)


def test_options_take_part_in_the_rows_digest() -> None:
    from cdgp_bench.grid import Run

    chosen = variant_settings(Variant("", "padim"), "lite", 0, (64, 64), {})
    cells = [
        Run("d", "c", Variant("", "padim"), 0, None, chosen, padim.Options(features=n))
        for n in (100, 101)
    ]
    assert cells[0].config_sha256 != cells[1].config_sha256


# WeakREST


def test_weakrest_sharpening_is_mixmatch() -> None:
    p = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    two = torch.stack([p, 1 - p], 1) ** 2
    np.testing.assert_allclose(weakrest.sharpened(p), (two / two.sum(1, keepdim=True))[:, 0])


def test_weakrest_residual_is_the_distance_to_the_nearest_that_it_remembers() -> None:
    """Against a loop over memory entries, positions included."""
    torch.manual_seed(0)
    options = tiny_options("weakrest", Path()).model_copy(update={"memory": 7})
    model = weakrest.Residuals(pretrained(tiny_settings()), options)
    model.scale.uniform_(1, 3)
    images = torch.rand(2, 3, 64, 64)
    model.memory = model.placed(model.features(images)).flatten(0, 1)[::19]
    found = model(images)
    features = model.features(images)
    channels = features.shape[1]
    for b, y, x in ((0, 0, 0), (0, 3, 7), (1, 5, 2), (1, 7, 7)):
        own = features[b, :, y, x] / model.scale
        place = options.position_weight * channels**0.5 * torch.tensor([y / 7, x / 7])
        distances = [
            float(((m[:channels] - own) ** 2).sum() + ((m[channels:] - place) ** 2).sum())
            for m in model.memory
        ]
        nearest = model.memory[int(np.argmin(distances)), :channels]
        np.testing.assert_allclose(found[b, y, x], (own - nearest).abs(), atol=1e-4)


def test_weakrest_remembers_positions_that_it_has_seen(prepared: Prepared) -> None:
    chosen, options = tiny_settings(), tiny_options("weakrest", Path())
    model = weakrest.Residuals(pretrained(chosen), options)
    images = WeakDataset(prepared.weak.train, chosen.input_size, 65535)
    good = images.batch(images.indices(defective=False))
    weakrest.fill_memory(model, good.split(1), 0)
    everything = model.placed(model.features(good)).flatten(0, 1)
    away = torch.cdist(model.memory, everything).amin(1)
    np.testing.assert_allclose(away, 0, atol=0.05)
    assert model.memory.shape[0] == options.memory


def test_weakrest_guesses_are_those_of_the_flipped_image_turned_back() -> None:
    torch.manual_seed(0)
    model = weakrest.WeakREST(pretrained(tiny_settings()), tiny_options("weakrest", Path())).eval()
    away = torch.rand(1, 8, 6, len(model.residuals.scale))
    across = torch.sigmoid(model.logits(away.flip(2))).flip(2)
    down = torch.sigmoid(model.logits(away.flip(1))).flip(1)
    expected = weakrest.sharpened((across + down) / 2)
    np.testing.assert_allclose(model.guessed(away), expected.detach(), atol=1e-6)


@pytest.mark.parametrize(("module", "drawn"), [(ssn, "perlin_masks"), (weakrest, "synthetic")])
def test_reimplementations_go_on_where_they_were(
    module: Any, drawn: str, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any step they end with the same weights: what is drawn depends on the step."""
    name = module.__name__.rpartition(".")[2]
    options, chosen = tiny_options(name, Path()), tiny_settings()
    whole = module.fit(prepared.weak, chosen, tmp_path / "a", Quiet(), options)
    monkeypatch.setattr("cdgp.training.loop.SAVE_SECONDS", -1.0)
    draw = getattr(module, drawn)
    calls = []

    def killed(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(module, drawn, killed)
    with pytest.raises(KeyboardInterrupt):
        module.fit(prepared.weak, chosen, tmp_path / "b", Quiet(), options)
    resumed = module.fit(prepared.weak, chosen, tmp_path / "b", Quiet(), options)
    again = resumed.pipeline().network.state_dict()
    for key, value in whole.pipeline().network.state_dict().items():
        assert torch.equal(value, again[key]), key
