"""Large images: windows against loops written out, and training and prediction by them."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from tests.helpers import Interrupting, assert_same, sparse_gps, tiny_settings, weights_of
from tests.tiny_transformers import DINOV2
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import cdgp
from cdgp import artifact
from cdgp.cli.main import app
from cdgp.data.manifest import Manifest
from cdgp.errors import ModelFileError, OutputError, SettingsError
from cdgp.export import ExportOptions, export
from cdgp.inference import Detector, load
from cdgp.method import tiles, windows
from cdgp.method.backbone import STRIDES
from cdgp.method.build import new_pair, new_projection, pretrained_encoder, seeded
from cdgp.method.network import Evidence, pool
from cdgp.method.score import image_score, pool_maps
from cdgp.metrics.ranking import Measure
from cdgp.presets import Settings, settings_from_json
from cdgp.progress import Quiet
from cdgp.runtimes.sealed import outputs_path
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.training import calibrate, dual_gp, loop, student
from cdgp.training.calibrate import CalibrationEvidence, fit_calibration
from cdgp.training.context import new_context, shared_parts, stage_key
from cdgp.training.dataset import InputCache, WeakDataset, new_inputs
from cdgp.workflows import Run
from cdgp.workflows import train_run as fit
from cdgp_bench.plan import read_plan
from cdgp_bench.synthetic import make_surface

SIDES = [
    *((side, STRIDES) for side in (64, 80, 96, 160, 256, 320)),
    *((side, (14, 14, 14)) for side in (70, 84, 98, 252, 392)),
    *((side, (16, 16, 16)) for side in (64, 80, 256)),
    *((side, (32, 32, 32)) for side in (96, 128)),
]
"""Sides of windows, with the strides of the encoder."""
LENGTHS = [8, 63, 64, 65, 95, 96, 97, 128, 200, 256, 257, 640, 999, 1001]
WINDOW = (64, 64)
SIZES = [
    (WINDOW, STRIDES, (40, 52)), (WINDOW, STRIDES, (64, 64)), (WINDOW, STRIDES, (131, 97)),
    (WINDOW, STRIDES, (200, 260)), (WINDOW, STRIDES, (255, 64)),
    ((70, 84), (14, 14, 14), (40, 52)), ((70, 84), (14, 14, 14), (131, 197)),
]  # fmt: skip
"""Windows, strides and images."""


def tiled_settings(**changes: object) -> Settings:
    return tiny_settings(tile=True, **changes)


@pytest.mark.parametrize(("side", "strides"), SIDES)
@pytest.mark.parametrize("length", LENGTHS)
def test_windows_cover_a_length(length: int, side: int, strides: windows.Strides) -> None:
    starts, grid = windows.starts(length, side, strides), 2 * strides[2]
    assert starts[0] == 0
    assert all(start % grid == 0 for start in starts)
    assert starts == sorted(set(starts))
    covered = {pixel for start in starts for pixel in range(start, start + side)}
    assert set(range(length)) <= covered
    assert max(covered) < max(length, side) + grid - 1, "no further than the grid makes it"
    for one, next_one in pairwise(starts):
        assert one + side - next_one >= side / 4, "neighbours overlap by a quarter"
    least = 1 if length <= side else math.ceil((length - side) / max(grid, 0.75 * side)) + 1
    assert len(starts) <= 2 * least, "and no more windows than that takes"


@pytest.mark.parametrize(("side", "strides"), SIDES)
@pytest.mark.parametrize("length", LENGTHS)
def test_weights_are_distances_from_the_nearest_edge(
    length: int, side: int, strides: windows.Strides
) -> None:
    starts = windows.starts(length, side, strides)
    found = windows.weights(length, side, strides)
    expected = np.zeros_like(found, dtype=np.float64)
    for row, start in enumerate(starts):
        for cell in range(found.shape[1]):
            centre = strides[0] * (cell + 0.5)
            if start <= centre < start + side:
                expected[row, cell] = min(centre - start, start + side - centre)
    assert expected.sum(0).min() > 0
    np.testing.assert_allclose(found, expected / expected.sum(0), atol=1e-6)
    np.testing.assert_allclose(found.sum(0), 1, atol=1e-6)


def test_two_windows_fade_linearly() -> None:
    first, second = windows.weights(96, 64, STRIDES)  # they begin at 0 and 32
    fading = np.concatenate([np.ones(8), (7.5 - np.arange(8)) / 8, np.zeros(8)])
    np.testing.assert_allclose(first, fading, atol=1e-6)
    np.testing.assert_allclose(second, 1 - fading, atol=1e-6)


@pytest.mark.parametrize("size", [(8, 20), (20, 30), (64, 64), (65, 200), (150, 97), (256, 131)])
def test_windows_are_those_of_the_image_and_its_mirror_image(size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).random((*size, 3), dtype=np.float32)
    padded = np.pad(image, ((0, 128), (0, 128), (0, 0)), mode="reflect")
    whole = torch.from_numpy(image).permute(2, 0, 1)
    corners = windows.places(size, WINDOW, STRIDES)
    found = list(windows.windows(whole, WINDOW, STRIDES))
    assert len(found) == len(corners)
    for (y, x), window in zip(corners, found, strict=True):
        expected = padded[y : y + 64, x : x + 64].transpose(2, 0, 1)
        np.testing.assert_array_equal(window.numpy(), expected)
    stacked = list(windows.batches(iter(found)))
    assert all(len(batch) <= windows.BATCH for batch in stacked)
    assert all(torch.equal(a, b) for a, b in zip(chain(*stacked), found, strict=True))


@pytest.mark.parametrize("size", [(20, 30), (64, 64), (70, 210), (150, 97)])
def test_blending_against_a_loop(size: tuple[int, int]) -> None:
    """Random parts; every position is the weighted mean over the windows that hold it."""
    corners = windows.places(size, WINDOW, STRIDES)
    parts = np.random.default_rng(0).standard_normal((len(corners), 2, 16, 16), np.float32)
    found = windows.blended(parts, size, WINDOW, STRIDES)
    height, width = (math.ceil(side / 4) for side in size)
    assert found.shape == (2, height, width)
    for i in range(height):
        for j in range(width):
            total, weight = np.zeros(2), 0.0
            for (y, x), part in zip(corners, parts, strict=True):
                a, b = i - y // 4, j - x // 4
                if 0 <= a < 16 and 0 <= b < 16:
                    w = min(a + 0.5, 15.5 - a) * min(b + 0.5, 15.5 - b)
                    total, weight = total + w * part[:, a, b], weight + w
            np.testing.assert_allclose(found[:, i, j], total / weight, atol=1e-5)


class Means(nn.Module):
    """Evidence of a position from its own pixels alone, so windows change nothing."""

    sharpness = 8.0
    image_evidence = "all"

    def __init__(self, strides: windows.Strides) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.teacher = SimpleNamespace(strides=strides)

    def forward(self, images: Tensor) -> Evidence:
        means = functional.avg_pool2d(images, self.teacher.strides[0])
        return Evidence(self.scale * means[:, 0], means[:, 1], None, means.mean((2, 3)))


@pytest.mark.parametrize(("window", "strides", "size"), SIZES)
def test_evidence_without_context_is_that_of_the_whole_image(
    window: tuple[int, int], strides: windows.Strides, size: tuple[int, int]
) -> None:
    cell = strides[0]
    image = np.random.default_rng(1).random((*size, 3), dtype=np.float32)
    whole = torch.from_numpy(image).permute(2, 0, 1)
    found = tiles.tiled_evidence(Means(strides), whole, window)  # type: ignore[arg-type]
    rows, columns = (-(-side // cell) for side in size)
    edges = ((0, cell * rows - size[0]), (0, cell * columns - size[1]), (0, 0))
    padded = np.pad(image, edges, mode="reflect")
    blocks = padded.reshape(rows, cell, columns, cell, 3).mean((1, 3))
    assert found.dominance is not None
    np.testing.assert_allclose(found.dominance[0], 2 * blocks[..., 0], atol=1e-6)
    np.testing.assert_allclose(found.residual[0], blocks[..., 1], atol=1e-6)
    pooled = (logsumexp(8.0 * 2 * blocks[..., 0]) - np.log(rows * columns)) / 8.0
    peaks = np.sort(blocks[..., 1].ravel())[-math.ceil(rows * columns / 100) :]
    assert found.pooled[0].tolist() == pytest.approx([pooled, peaks.mean()], abs=1e-6)


@pytest.fixture(scope="module")
def tiled_run(surfaces: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained on surfaces of 96 x 80 by windows of 64 x 64: two by two an image."""
    return fit(surfaces.root, tmp_path_factory.mktemp("tiled") / "run", tiled_settings())


def torch_of(detector: Detector) -> TorchRuntime:
    assert isinstance(detector.runtime, TiledRuntime)
    return detector.runtime.runtime


@pytest.mark.parametrize("size", [(96, 80), (97, 133), (40, 200), (8, 8), (64, 64)])
@pytest.mark.parametrize("band", [1, 5, 64])
def test_bands_give_what_the_whole_map_gives(
    tiled_run: Run, size: tuple[int, int], band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding: a band's upsampling has the weights of the whole map's."""
    graph = torch_of(tiled_run.detector).graph
    rows, columns = (-(-side // 4) for side in size)
    generator = torch.Generator().manual_seed(0)
    evidence = Evidence(
        torch.randn(1, rows, columns, generator=generator),
        torch.rand(1, rows, columns, generator=generator),
        None,
        torch.tensor([[0.3, 0.4]]),
    )
    whole = graph.outputs(evidence, (4 * rows, 4 * columns))
    monkeypatch.setattr(windows, "BAND", band)
    found = tiles.outputs_of(graph, evidence, size)
    for a, b, atol in zip(found[:3], whole[:3], (1e-2, 1e-2, 1e-4), strict=True):
        # The surprisal climbs by log 2 between two entries of its table at the end of the tail.
        torch.testing.assert_close(a, b[:, : size[0], : size[1]], rtol=1e-5, atol=atol)
    assert torch.equal(found.pred_score, whole.pred_score)


@pytest.mark.parametrize("size", [(300, 212), (97, 133), (64, 64), (30, 90)])
def test_prediction_keeps_the_images_scale(
    tiled_run: Run, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loaded model tiles by itself, and nothing is resized on the way."""
    assert tiled_run.folder is not None
    image = make_surface(size, np.random.default_rng(3))
    monkeypatch.delattr("cdgp.data.images.to_input")
    detector = cdgp.load(tiled_run.folder)
    assert detector.settings.tile
    found, again = detector.predict(image), tiled_run.detector.predict(image)
    assert found.anomaly_map.shape == found.pred_mask.shape == size
    np.testing.assert_array_equal(found.anomaly_map, again.anomaly_map)
    assert found.pred_score == again.pred_score
    if size == (64, 64):  # one window: the plain graph on the image itself
        plain = torch_of(detector).run(image.transpose(2, 0, 1)[None])
        np.testing.assert_allclose(found.surprisal, plain.surprisal[0], atol=1e-4)
        assert found.pred_score == pytest.approx(float(plain.pred_score[0]), abs=1e-5)


def test_calibration_evidence_is_that_of_prediction(tiled_run: Run) -> None:
    """Bit by bit, so that an image at the threshold stays on its side."""
    dataset = WeakDataset(
        tiled_run.manifest.weak("calibration"), new_inputs(tiled_run.detector.settings)
    )
    balanced = load(tiled_run.folder or "", defect_rate=0.5)
    graph = torch_of(tiled_run.detector).graph
    found = calibrate.collect_evidence(graph.evidence, dataset, Quiet())
    assert found.sizes == [(96, 80)] * len(dataset)
    for evidence, sample in zip(found.evidence, dataset.samples, strict=True):
        score = balanced.predict(sample.image).pred_score
        probability = image_score(evidence.pooled, tiled_run.detector.card.image)
        assert float(probability[0]) == score


def maps_of(evidence: Evidence) -> list[Tensor]:
    """The maps of the branches that there are."""
    return [m for m in evidence.maps if m is not None]


def test_calibration_over_images_of_several_sizes() -> None:
    """Every pixel of every good image counts once; NumPy over all of them."""
    generator = torch.Generator().manual_seed(2)
    cells = [(3, 4), (7, 5), (2, 9), (4, 4)]
    evidence = [
        Evidence(torch.randn(1, *s, generator=generator), torch.randn(1, *s, generator=generator),
                 None, torch.randn(1, 2, generator=generator))
        for s in cells
    ]  # fmt: skip
    defective = torch.tensor([False, False, True, False])
    sizes = [(4 * h, 4 * w) for h, w in cells]
    chosen = tiny_settings(calibration={"tail_pixels": 10_000})
    found = fit_calibration(CalibrationEvidence(evidence, defective, sizes), chosen)

    def pixels(branch: int) -> NDArray[np.float64]:
        return np.concatenate([
            functional.interpolate(maps_of(one)[branch][None], size=size, mode="bilinear")
            .double().numpy().ravel()
            for one, size, bad in zip(evidence, sizes, defective, strict=True) if not bad
        ])  # fmt: skip

    G, R = pixels(0), pixels(1)
    for statistics, values in ((found.dominance, G), (found.residual, R)):
        assert statistics.mean == pytest.approx(values.mean(), abs=1e-6)
        assert statistics.std == pytest.approx(values.std(), rel=1e-5)
    weight = chosen.calibration.fusion_weight
    U = weight * (G - G.mean()) / (G.std() + 1e-6) + (1 - weight) * (R - R.mean()) / R.std()
    np.testing.assert_allclose(found.tail.scores.numpy(), np.sort(U), atol=1e-4)


def new_training(chosen: Settings) -> dual_gp.DualGPTraining:
    """An untrained first stage whose means are not all zero."""
    generator = torch.Generator().manual_seed(5)
    Z = functional.normalize(torch.randn(6, 256, generator=generator), dim=1)
    gps = new_pair(Z[:4], Z[4:], chosen.dual_gp)
    for gp in sparse_gps(gps):
        gp.m.data = torch.randn(len(gp.m), generator=generator)
    encoder = pretrained_encoder(chosen)
    projection = new_projection(encoder, chosen)
    return dual_gp.DualGPTraining(encoder, projection, gps, chosen.dual_gp, 8.0)


def test_an_image_is_shown_by_its_window_of_the_largest_margin(surfaces: Manifest) -> None:
    chosen = tiled_settings()
    dataset = WeakDataset(surfaces.weak(None)[:5], new_inputs(chosen))
    training = new_training(chosen).train()
    shown = dual_gp.hardest_windows(dataset, [4, 0, 2], training)
    assert not shown.requires_grad
    training.eval()
    best = set()
    for index, found in zip([4, 0, 2], shown, strict=True):
        largest, expected = -math.inf, None
        for y in (0, 32):
            for x in (0, 32):
                window = np.pad(dataset.input(index).numpy(), ((0, 0), (0, 0), (0, 16)), "reflect")
                part = torch.from_numpy(window[:, y : y + 64, x : x + 64].copy())[None]
                encoder = training.encoder
                tokens = training.projection(encoder(encoder.normalise(part))).flatten(0, 2)
                normal, anomaly = training.gps.normal(tokens), training.gps.anomaly(tokens)
                margin = float((anomaly.mean - normal.mean).detach().max())
                if margin > largest:
                    largest, expected, place = margin, part[0], (y, x)
        assert expected is not None
        assert torch.equal(found, expected)
        best.add(place)
    assert len(best) > 1, "not always the same place"
    images, labels = dual_gp.weak_batch(dataset, chosen, 0, training)
    assert images.shape == (4, 3, 64, 64)
    assert labels.shape == (4,)


def test_student_is_shown_one_window_of_each_good_image(surfaces: Manifest) -> None:
    dataset = WeakDataset(surfaces.weak(None)[:3], new_inputs(tiled_settings()))

    def drawn(step: int) -> Tensor:
        generator = seeded(0, "windows", step)
        images, shown = student.drawn_windows(dataset, [0, 1, 2], generator, STRIDES)
        for one, (index, place) in zip(images, shown, strict=True):
            assert torch.equal(one, windows.cut(dataset.input(index), place, WINDOW))
        return images

    assert torch.equal(drawn(1), drawn(1))
    seen: list[set[int]] = [set(), set(), set()]
    for step in range(40):
        for index, window in enumerate(drawn(step)):
            all_of_it = windows.windows(dataset.input(index), WINDOW, STRIDES)
            (place,) = [i for i, one in enumerate(all_of_it) if torch.equal(one, window)]
            seen[index].add(place)
    assert seen == [{0, 1, 2, 3}] * 3
    plain = WeakDataset(dataset.samples, InputCache(WINDOW, 65535, False))
    images, shown = student.drawn_windows(plain, [2, 0], seeded(0), STRIDES)
    assert shown == [(2, (0, 0)), (0, (0, 0))]
    assert torch.equal(images, plain.batch([2, 0])), "without tiles the whole of each image"


def test_separation_pools_all_windows(surfaces: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tiled_settings()
    dataset = WeakDataset(surfaces.weak(None), new_inputs(chosen))
    training = new_training(chosen).eval()
    seen: list[Sequence[float]] = []

    def keep(scores: Sequence[float], labels: object) -> Measure:
        seen.append(scores)
        return Measure(None, "not computed")

    monkeypatch.setattr(dual_gp, "image_auroc", keep)
    with torch.inference_mode():
        dual_gp.separation_of(dataset, training)
        expected = []
        for index in [*dataset.indices(False), *dataset.indices(True)]:
            images = torch.stack(list(windows.windows(dataset.input(index), WINDOW, STRIDES)))
            margins = dual_gp.token_margins(training, images).double().numpy()
            expected.append((logsumexp(8 * margins) - np.log(margins.size)) / 8)
    np.testing.assert_allclose(seen[0], expected, atol=1e-5)


def test_inducing_tokens_come_from_all_windows(
    surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tiled_settings(inducing={"tokens_per_class": 40, "normal": 8, "anomaly": 4})
    weak = surfaces.weak(None)
    both = WeakDataset((*weak[:2], *weak[-2:]), new_inputs(chosen))  # two of each label
    encoder = pretrained_encoder(chosen)
    projection = new_projection(encoder, chosen)
    held: list[Tensor] = []

    def keep(normal: Tensor, anomaly: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        held.extend([normal, anomaly])
        return normal, anomaly

    monkeypatch.setattr(dual_gp, "inducing_sets", keep)
    dual_gp.select_inducing(both, encoder, projection, chosen, new_context(None, None, Quiet()))
    assert [len(tokens) for tokens in held] == [40, 40]
    encoder.eval()
    with torch.inference_mode():
        for number, index in enumerate(both.indices(False)):
            for place, image in enumerate(windows.windows(both.input(index), WINDOW, STRIDES)):
                grid = projection(encoder(encoder.normalise(image[None]))).flatten(0, 2)
                taken = held[0][20 * number + 5 * place :][:5]
                assert float((taken @ grid.T).amax(1).min()) > 1 - 1e-4


@pytest.mark.parametrize(("phase", "after"), [("Dual GP", 2), ("Reverse student", 2)])
def test_interrupted_and_resumed_is_the_same(
    surfaces: Manifest, tiled_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    phase: str, after: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(surfaces.root, out, tiled_settings(), progress=Interrupting(phase, after))
    with pytest.raises(SettingsError, match="other settings \\(tile\\)"):
        fit(surfaces.root, out, tiny_settings(), resume=True)
    resumed = fit(surfaces.root, out, tiled_settings(), resume=True)
    assert_same(weights_of(tiled_run), weights_of(resumed))


def test_tile_is_named_only_where_it_is_on() -> None:
    """So that trainings and rows without it keep their digests."""
    plain, tiled = tiny_settings(), tiled_settings()
    assert "tile" not in shared_parts(plain)
    assert shared_parts(tiled) == shared_parts(plain) | {"tile": True}
    for stage in ("dual_gp", "student"):
        assert stage_key(plain, "", stage) != stage_key(tiled, "", stage)
    text = plain.model_dump_json().replace('"tile":false,', "")
    assert "tile" not in text
    assert settings_from_json(text, "an old file") == plain


def test_windows_run_eager_alone() -> None:
    with pytest.raises(SettingsError, match=r"inference\.mode = 'graph': .*'eager'"):
        tiled_settings(inference={"mode": "graph"})
    assert tiled_settings(inference={"precision": "bfloat16"}).tile


def test_command_line(surfaces: Manifest, tmp_path: Path) -> None:
    steps = ["--set", "dual_gp.steps=2", "--set", "student.steps=2", "--set",
             "dual_gp.batch_size=4", "--set", "dual_gp.no_separation=flag"]  # fmt: skip
    out = tmp_path / "run"
    arguments = ["train", str(surfaces.root), "--out", str(out), "--input-size", "64", "--tile"]
    found = CliRunner().invoke(app, [*arguments, *steps, "--quiet"])
    assert found.exit_code == 0, found.output
    assert artifact.load(out / "model.safetensors").settings.tile


@pytest.mark.parametrize(("size", "cells"), [((97, 133), (7, 10)), ((40, 200), (3, 15))])
def test_windows_of_a_transformer(
    surfaces: Manifest, tmp_path: Path, size: tuple[int, int], cells: tuple[int, int]
) -> None:
    """Trained and run on windows of five by five patches of 14 pixels."""
    chosen = tiled_settings(input_size=(70, 70), backbone={"name": DINOV2, "weights": "random"})
    run = fit(surfaces.root, tmp_path / "run", chosen)
    graph = torch_of(run.detector).graph
    image = make_surface(size, np.random.default_rng(3))
    whole = torch.from_numpy(image).permute(2, 0, 1)
    evidence = tiles.tiled_evidence(graph.evidence, whole, (70, 70))
    assert evidence.dominance is not None
    assert evidence.dominance.shape == evidence.residual.shape == (1, *cells)
    found = run.detector.predict(image)
    assert found.surprisal.shape == size and np.isfinite(found.surprisal).all()
    dataset = WeakDataset(run.manifest.weak("calibration"), new_inputs(chosen))
    collected = calibrate.collect_evidence(graph.evidence, dataset, Quiet())
    assert collected.sizes == [(7 * 14, 6 * 14)] * len(dataset), "images of 96 x 80"


def test_a_plan_with_tiles_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    text = (
        'title = "t"\npreset = "lite"\nseeds = [0]\nmetric_size = "native"\nmethods = ["cdgp"]\n'
        'settings.tile = {}\n[datasets.a]\npath = "a"\ninput_size = [64, 64]\n'
        '[experiments]\nmain = ["a"]\n'
    )
    plan.write_text(text.format("true"))
    with pytest.raises(
        SettingsError, match=r"plan\.toml: datasets\.a: settings\.tile: .*leave it out"
    ):
        read_plan(str(plan))
    plan.write_text(text.format("false"))
    assert not read_plan(str(plan)).settings["tile"]


def test_image_evidence_without_torch_is_that_of_the_network() -> None:
    maps = np.random.default_rng(0).standard_normal((2, 17, 31)).astype(np.float32)
    dominance, residual = torch.from_numpy(maps)[:, None]
    for evidence in ("all", "dominance"):
        expected = pool(dominance, residual, None, 8.0, evidence)
        np.testing.assert_allclose(pool_maps(maps, 8.0, evidence), expected, atol=1e-6)
    alone = pool(None, residual, None, 8.0, "all")
    np.testing.assert_allclose(pool_maps(maps[1:], 8.0, "all"), alone, atol=1e-6)


@pytest.fixture(scope="module", params=["a.onnx", "a.xml"])
def exported(
    request: pytest.FixtureRequest, tiled_run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    assert tiled_run.folder is not None
    out: Path = tmp_path_factory.mktemp("exported") / request.param
    target = {".onnx": "onnx", ".xml": "openvino"}[out.suffix]
    export(tiled_run.folder, ExportOptions(target, out), Quiet())
    return out


@pytest.mark.parametrize("size", [(300, 212), (97, 133), (64, 64), (30, 90)])
def test_an_exported_file_tiles_as_torch_does(
    tiled_run: Run, exported: Path, size: tuple[int, int]
) -> None:
    image = make_surface(size, np.random.default_rng(3))
    found, expected = load(exported).predict(image), tiled_run.detector.predict(image)
    assert found.pred_score == pytest.approx(expected.pred_score, abs=1e-4)
    # The surprisal climbs by log 2 between two entries of its table at the end of the tail.
    off = np.abs(found.surprisal - expected.surprisal)
    assert off.mean() < 1e-3 and off.max() < 0.05
    assert found.anomaly_map.shape == size


def test_an_exported_file_takes_bands(
    tiled_run: Run, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector, image = load(exported), make_surface((150, 70), np.random.default_rng(4))
    whole = detector.predict(image)
    monkeypatch.setattr(windows, "BAND", 7)
    banded = detector.predict(image)
    np.testing.assert_allclose(banded.surprisal, whole.surprisal, atol=0.02)
    assert banded.pred_score == whole.pred_score


def test_both_files_of_a_tiled_export_belong_together(
    tiled_run: Run, exported: Path, tmp_path: Path
) -> None:
    for file in exported.parent.iterdir():
        if file.stem == "a" or file.suffix == ".bin":
            shutil.copy(file, tmp_path)
    alone, second = tmp_path / exported.name, outputs_path(exported)
    with pytest.raises(ModelFileError, match="no such model file"):
        load(alone)
    other = tmp_path / "other" / exported.name
    shutil.copytree(exported.parent, other.parent)
    rewritten = second.read_bytes().replace(b"cdgp-export-outputs", b"cdgp-export-another")
    (tmp_path / second.name).write_bytes(rewritten)
    with pytest.raises(ModelFileError, match=r"changed since|belongs to another"):
        load(alone)
    with pytest.raises(ModelFileError, match="second file of a tiled export"):
        load(outputs_path(other))


def test_what_a_tiled_export_refuses(tiled_run: Run, tmp_path: Path) -> None:
    assert tiled_run.folder is not None
    options = ExportOptions("onnx", tmp_path / "a.onnx")
    for change in ({"input_size": (96, 96)}, {"flavour": "anomalib"}):
        with pytest.raises(SettingsError, match="trained with --tile"):
            export(tiled_run.folder, replace(options, **change), Quiet())
    (tmp_path / "a.outputs.onnx").write_text("mine")
    with pytest.raises(OutputError, match=r"a\.outputs\.onnx: exists"):
        export(tiled_run.folder, options, Quiet())
