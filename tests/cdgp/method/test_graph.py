"""The inference graph against the plain order of the stages, and its parts against brute force."""

import copy
import math
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from tests.helpers import (
    KINDS,
    form_dominance,
    random_gp,
    random_model,
    random_pair,
    sparse_gps,
    unit_tokens,
)
from tests.tiny_transformers import DINOV2, DINOV3
from torch import Tensor, nn
from torch.nn import functional

from cdgp.errors import TrainingError
from cdgp.method.backbone import Encoder, load_weights
from cdgp.method.calibration import BranchStatistics, Calibration, NormalTail, fit_tail, surprisal
from cdgp.method.fold import fix_padding, fold_batch_norms
from cdgp.method.gp import DualGP
from cdgp.method.graph import (
    DominanceHead,
    Encoders,
    EvidenceGraph,
    InferenceGraph,
    OutputGraph,
    PValue,
    SurprisalTable,
    TokenHead,
    check_table,
    cosine,
    head_of,
)
from cdgp.method.kernels import linear, spherical_rbf
from cdgp.method.network import Evidence, Network, calibrated
from cdgp.method.resize import upsample_matmul
from cdgp.method.score import TIED, ImageCalibrator, conformal_table, image_score, p_value
from cdgp.method.student import ReverseStudent
from cdgp.method.tokens import TokenProjection
from cdgp.presets import InferenceSettings
from cdgp.runtimes.torch import TorchRuntime
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.fit import check_inference
from cdgp.workflows import Run

LITE = "tf_efficientnet_lite0"


def random_images(count: int, size: tuple[int, int]) -> Tensor:
    coarse = torch.rand(count, 3, 9, 7, generator=torch.Generator().manual_seed(count))
    return functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)


def transformers(name: str, gps: DualGP) -> Network:
    """Two random transformers behind one stem, and a random student."""
    torch.manual_seed(0)
    encoder, teacher = Encoder(name), Encoder(name)
    for one in (encoder, teacher):
        for parameter in one.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    own = encoder.trunk.state_dict()
    teacher.trunk.load_state_dict(
        {k: v for k, v in own.items() if not k.startswith(("blocks", "norm"))}, strict=False
    )
    projection = TokenProjection(encoder.channels, 64)
    student = ReverseStudent(teacher.channels, (8, 8, 16, 32))
    return Network(
        encoder, projection, gps, teacher, student, None, 8.0, 1e-6, "dominance", "dominance"
    )


def network(gps: DualGP, evidence: str = "dominance", floor: float = 1e-6) -> Network:
    """Pretrained encoders, the first one changed beyond its stem; a random student."""
    encoder, teacher = Encoder(LITE), Encoder(LITE)
    for one in (encoder, teacher):
        load_weights(one, LITE, "bundled")
    generator = torch.Generator().manual_seed(0)
    stem = {id(p) for module in encoder.stem() for p in module.parameters()}
    with torch.no_grad():
        for parameter in encoder.parameters():
            if id(parameter) not in stem and parameter.ndim == 4:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    torch.manual_seed(1)
    projection = TokenProjection(encoder.channels, 64)
    student = ReverseStudent(teacher.channels, (8, 16, 16, 32))
    return Network(
        encoder, projection, gps, teacher, student, None, 8.0, floor, evidence, "dominance"
    )


def tuned(network: Network) -> tuple[Encoder, TokenProjection, DualGP]:
    """The branch that is trained on labels, which must be there."""
    assert network.encoder is not None
    assert network.projection is not None
    assert network.gps is not None
    return network.encoder, network.projection, network.gps


def features_of(network: Network, images: Tensor) -> tuple[Tensor, ...]:
    """Three stages of the fine-tuned encoder."""
    encoder, _, _ = tuned(network)
    features: tuple[Tensor, ...] = encoder(encoder.normalise(images))
    return features


@pytest.fixture(scope="module")
def linear_network() -> Network:
    return network(random_pair(0, 0.3, torch.float32))


@pytest.mark.parametrize("size", [(64, 64), (96, 160)])
def test_evidence_is_that_of_the_plain_order(
    linear_network: Network, size: tuple[int, int]
) -> None:
    images = random_images(3, size)
    with torch.inference_mode():
        plain, found = linear_network(images), EvidenceGraph(linear_network)(images)
    assert plain.dominance is not None
    assert plain.dominance.std() > 0.1
    torch.testing.assert_close(found.dominance, plain.dominance, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.residual, plain.residual, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found.pooled, plain.pooled, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [DINOV2, DINOV3])
@pytest.mark.parametrize("cells", [(5, 8), (7, 19)])
def test_evidence_of_a_transformer_is_that_of_the_plain_order(
    name: str, cells: tuple[int, int]
) -> None:
    """Also on grids with odd sides, which the student's bottleneck does not divide."""
    plain = transformers(name, random_pair(0, 0.3, torch.float32))
    patch = plain.teacher.strides[0]
    size = (patch * cells[0], patch * cells[1])
    images = random_images(2, size)
    graph = EvidenceGraph(plain)
    with torch.inference_mode():
        expected, found = plain(images), graph(images)
    assert found.dominance is not None and expected.dominance is not None
    assert found.dominance.shape == found.residual.shape == (2, *cells)
    assert expected.dominance.std() > 0.01
    torch.testing.assert_close(found.dominance, expected.dominance, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.residual, expected.residual, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found.pooled, expected.pooled, atol=1e-5, rtol=1e-5)
    calibration = Calibration(
        BranchStatistics(0.0, 1.0), BranchStatistics(0.3, 0.1),
        fit_tail(heavy_tailed(1000), "counting", 16.0),
        ImageCalibrator((0.0,), (1.0,), (1.0,), 0.0), 0.025, 1 / 3,
    )  # fmt: skip
    whole = InferenceGraph(graph, calibration)
    with torch.inference_mode():
        for a, b in zip(whole.at_size(size)(images), whole(images), strict=True):
            assert torch.equal(a, b)
        other = random_images(2, (5 * patch, 5 * patch))
        assert whole(other).fused.shape == (2, 5 * patch, 5 * patch), "the graph itself stays free"


@pytest.mark.parametrize("scale", [0.03, 0.3, 1.0, 3.0])
def test_head_against_float64(linear_network: Network, scale: float) -> None:
    """Tokens, moments and dominance in float64, from the same features."""
    chosen = copy.deepcopy(linear_network)
    chosen.gps = random_pair(round(10 * scale), scale, torch.float32)
    head = head_of(chosen)
    assert isinstance(head, DominanceHead)
    with torch.inference_mode():
        features = features_of(chosen, random_images(2, (64, 96)))
        _, projection, gps = tuned(copy.deepcopy(chosen).double())
        tokens = projection([f.double() for f in features])
        expected = gps.dominance(tokens.flatten(0, 2), 1e-6).view(tokens.shape[:3])
        found = head(features)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("gps", "evidence", "floor", "kind"),
    [
        (random_pair(1, 0.3, torch.float32), "mean_margin", 1e-6, DominanceHead),
        (random_pair(2, 0.3, torch.float32, spherical_rbf(0.5)), "dominance", 1e-6, TokenHead),
        (random_pair(2, 0.3, torch.float32, spherical_rbf(0.5)), "mean_margin", 1e-6, TokenHead),
        (random_pair(3, 0.0, torch.float32), "dominance", 1.99, TokenHead),  # the floor binds
    ],
)
def test_other_evidence(gps: DualGP, evidence: str, floor: float, kind: type) -> None:
    plain = network(gps, evidence, floor)
    head = head_of(plain)
    assert type(head) is kind
    images = random_images(2, (64, 64))
    with torch.inference_mode():
        features = features_of(plain, images)
        torch.testing.assert_close(head(features), plain.dominance(images), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("dim", "groups"), [(16, 1), (100, 2), (256, 2)])
def test_more_and_fewer_dimensions_than_stages_give(dim: int, groups: int) -> None:
    """Fewer than the first stage has channels, as in the paper's network, and more than all."""
    plain = network(random_pair(4, 0.3, torch.float32, dim=dim))
    encoder, _, gps = tuned(plain)
    plain.projection = TokenProjection(encoder.channels, dim).requires_grad_(False)
    images = random_images(2, (64, 64))
    head = head_of(plain)
    assert isinstance(head, DominanceHead) and len(head.along) == groups
    with torch.inference_mode():
        features = features_of(plain, images)
        # In float64: with more inducing tokens than dimensions float32 loses four digits.
        tokens = copy.deepcopy(plain.projection).double()([f.double() for f in features])
        expected = form_dominance(gps, tokens.flatten(0, 2)).view(tokens.shape[:3])
        torch.testing.assert_close(head(features).double(), expected, atol=3e-5, rtol=1e-4)


def test_head_of_means_that_are_all_zero() -> None:
    gps = random_pair(5, 0.3, torch.float32)
    for gp in sparse_gps(gps):
        gp.m.data.zero_()
    plain = network(gps)
    with torch.inference_mode():
        features = features_of(plain, random_images(1, (64, 64)))
        assert torch.equal(head_of(plain)(features), torch.zeros(1, 16, 16))


def test_stem_is_shared_only_where_it_is_the_same(linear_network: Network) -> None:
    encoder, teacher = tuned(linear_network)[0], linear_network.teacher
    assert len(list(Encoders(encoder, teacher).stem.children())) == 2
    changed = copy.deepcopy(encoder)
    next(changed.parameters()).data.mul_(1.01)
    own = Encoders(changed, teacher)
    assert isinstance(own.stem, nn.Identity)
    images = random_images(1, (64, 64))
    with torch.inference_mode():
        for found, plain in zip(own(images), (changed, teacher), strict=True):
            for a, b in zip(found, plain(plain.normalise(images)), strict=True):
                torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [LITE, "resnet18", "densenet121", "convnext_atto"])
def test_folding_keeps_the_features(name: str) -> None:
    """Also where a norm follows no convolution, or its convolution feeds something else too."""
    torch.manual_seed(0)
    trunk = timm.create_model(name, features_only=True).eval()
    for module in trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    folded = copy.deepcopy(trunk)
    fold_batch_norms(folded)
    fix_padding(folded)

    def norms(part: nn.Module) -> int:
        return sum(isinstance(m, nn.BatchNorm2d) for m in part.modules())

    if name in (LITE, "resnet18"):
        assert norms(trunk) and not norms(folded)
    elif name == "densenet121":
        assert 0 < norms(folded) < norms(trunk)
    with torch.inference_mode():
        for a, b in zip(trunk(random_images(2, (64, 96))), folded(random_images(2, (64, 96))),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(a, b, atol=1e-4 * float(a.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("name", [DINOV2, DINOV3, "vit_tiny_patch16_224"])
def test_folding_leaves_a_transformer_alone(name: str) -> None:
    trunk = Encoder(name).trunk
    layers = list(trunk.named_modules())
    before = {key: value.clone() for key, value in trunk.state_dict().items()}
    fold_batch_norms(trunk)
    fix_padding(trunk)
    assert list(trunk.named_modules()) == layers
    after = trunk.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [((4, 6), (16, 24)), ((1, 3), (4, 12)), ((5, 2), (7, 9))]
)
def test_upsampling_by_products(inputs: tuple[int, int], outputs: tuple[int, int]) -> None:
    maps = torch.randn(3, *inputs, generator=torch.Generator().manual_seed(0)).double()
    expected = functional.interpolate(maps[:, None], size=outputs, mode="bilinear")[:, 0]
    torch.testing.assert_close(upsample_matmul(maps, outputs), expected)


def test_cosine() -> None:
    a, b = torch.randn(2, 3, 5, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cosine(a, b), functional.cosine_similarity(a, b, dim=1))
    assert torch.isfinite(cosine(torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2))).all()


def heavy_tailed(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    body = torch.randn(count, generator=generator)
    return torch.where(body > 2.5, body**2, body).sort().values


@pytest.mark.parametrize("tail", ["counting", "pareto"])
def test_table_is_the_surprisal(tail: str) -> None:
    scores = heavy_tailed(100_000)
    fitted = fit_tail(scores, tail, 16.0)
    table = SurprisalTable(fitted)
    U = torch.cat([torch.linspace(-6, 60, 100_001), scores[::10]])
    P, expected = table(U), surprisal(U, fitted)
    assert P.shape == U.shape and float(P.min()) >= 0
    ranks = [((len(scores) + 1) * torch.exp(-p.double())).round() for p in (P, expected)]
    assert float((ranks[0] - ranks[1]).abs().max()) <= 4
    assert float(((ranks[0] - ranks[1]).abs() > 1).double().mean()) < 1e-3
    if tail == "counting":
        beyond = table(torch.tensor([float(scores[-1]) + 1e-3, 1e6, 1e9]))
        assert torch.equal(beyond, torch.full((3,), math.log(len(scores) + 1)))
    else:
        far = torch.tensor([70.0, 100.0, 500.0, 5000.0])
        torch.testing.assert_close(table(far), surprisal(far, fitted), rtol=2e-3, atol=0)
        assert (table(far).diff() > 0).all()


@pytest.mark.parametrize("scores", [torch.zeros(50), torch.tensor([3.0]), torch.arange(3.0)])
def test_table_of_a_poor_tail(scores: Tensor) -> None:
    tail = NormalTail(scores, math.nan, math.nan, math.nan, 16.0)
    table = SurprisalTable(tail)
    away = torch.tensor([-10.0, float(scores[0]) - 0.3, float(scores[-1]) + 0.3, 50.0])
    torch.testing.assert_close(table(away), surprisal(away, tail))


def flat(share: float, level: float, count: int = 50_000) -> Tensor:
    """Scores of images whose background is one colour, at a level, and whose parts are not."""
    alike = int(share * count)
    parts = torch.randn(count - alike, generator=torch.Generator().manual_seed(1)).exp()
    return torch.cat([torch.full((alike,), level), parts]).sort().values


@pytest.mark.parametrize("tail", ["counting", "pareto"])
@pytest.mark.parametrize(
    "scores",
    [heavy_tailed(100_000), flat(0.8, 0.0), flat(0.8, 3.0), flat(0.3, 9.0), flat(0.9, 1.0)],
)
def test_tables_follow_the_tail_and_coarse_ones_are_found(scores: Tensor, tail: str) -> None:
    """The end of the tail, by counting: between the scores next to each."""
    fitted = fit_tail(scores, tail, 16.0)
    table = SurprisalTable(fitted)
    check_table(table, fitted)
    if tail == "counting":
        distinct = scores.unique()[-200:]
        middles = (distinct[1:] + distinct[:-1]) / 2
        apart = distinct.diff() > 1e-3 * distinct.diff().mean()
        ranks = torch.tensor([float((scores > m).sum()) for m in middles])
        expected = -torch.log((1 + ranks) / (len(scores) + 1))
        torch.testing.assert_close(table(middles)[apart], expected[apart], atol=0.02, rtol=0)
    with pytest.raises(TrainingError, match="more than one rank off"):
        check_table(SurprisalTable(fitted, size=256), fitted)


@pytest.mark.parametrize("spoil", [lambda v: v + 0.5, lambda v: v.flip(0), lambda v: v * math.nan])
def test_a_table_of_other_values_is_found(spoil: Callable[[Tensor], Tensor]) -> None:
    fitted = fit_tail(heavy_tailed(10_000), "counting", 16.0)
    table = SurprisalTable(fitted)
    table.values = spoil(table.values)
    with pytest.raises(TrainingError, match="more than one rank off"):
        check_table(table, fitted)


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.9])
def test_the_rate_moves_the_image_score_and_no_map(tiny_run: Run, rate: float) -> None:
    calibration = tiny_run.detector.model.calibration
    slopes = (0.7, 0.2, 0.4)
    known = calibration._replace(image=calibration.image._replace(slope=slopes, intercept=0.2))
    generator = torch.Generator().manual_seed(0)
    scale, centre = (torch.tensor(v) for v in (known.image.scale, known.image.centre))
    pooled = centre + scale * torch.randn(4, 3, generator=generator)
    dominance, residual, distance = torch.randn(3, 4, 16, 16, generator=generator)
    evidence = Evidence(dominance, residual, distance, pooled)
    plain, shifted = (OutputGraph(known, r)(evidence, (64, 64)) for r in (0.5, rate))
    for name in ("anomaly_map", "surprisal", "fused", "pooled"):
        assert torch.equal(getattr(plain, name), getattr(shifted, name))
    odds = plain.pred_score / (1 - plain.pred_score) * rate / (1 - rate)
    torch.testing.assert_close(shifted.pred_score, odds / (1 + odds), atol=1e-6, rtol=1e-5)


def test_whole_graph_of_a_trained_run(tiny_run: Run) -> None:
    model = tiny_run.detector.model
    images = random_images(3, model.settings.input_size)
    with torch.inference_mode():
        found = InferenceGraph(EvidenceGraph(model.network), model.calibration)(images)
        plain = calibrated(model.network(images), model.calibration, model.settings.input_size)
    torch.testing.assert_close(found.fused, plain.fused, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found.pred_score, plain.pred_score)
    off = (found.surprisal - plain.surprisal).abs()
    assert float(off.max()) <= math.log(2) + 1e-3, "one rank at the end of the tail"
    assert float((off > 0.01).double().mean()) < 0.01
    torch.testing.assert_close(
        found.anomaly_map - found.surprisal, plain.anomaly_map - plain.surprisal
    )


@pytest.mark.parametrize("kind", KINDS)
def test_graph_of_every_kind_of_model(kind: str) -> None:
    """Against the plain order, over images like those that calibrated and unlike them."""
    model = random_model(kind)
    images = torch.cat([random_images(3, (64, 64)), torch.rand(2, 3, 64, 64)])
    with torch.inference_mode():
        graph = InferenceGraph(EvidenceGraph(model.network), model.calibration)
        evidence, plain_evidence = graph.evidence(images), model.network(images)
        found = graph(images)
        plain = calibrated(plain_evidence, model.calibration, (64, 64))
    there = [m is not None for m in evidence.maps]
    assert there == [kind != "good alone", True, kind not in ("no distance", "paper")]
    entries = {"all": 3, "no calibrating defect": 3, "good alone": 2, "no distance": 2, "paper": 1}
    assert evidence.pooled.shape == (5, entries[kind])
    for a, b in zip(evidence.maps, plain_evidence.maps, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(found.pooled, plain.pooled, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.fused, plain.fused, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(found.pred_score, plain.pred_score, atol=1e-4, rtol=0)
    off = (found.surprisal - plain.surprisal).abs()
    assert float(off.max()) <= math.log(2) + 1e-3, "one rank at the end of the tail"
    torch.testing.assert_close(
        found.anomaly_map - found.surprisal, plain.anomaly_map - plain.surprisal, atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decimals", [None, 2, 1, 0])
def test_p_value_in_torch_is_that_of_numpy(decimals: int | None, dtype: torch.dtype) -> None:
    """On 50 draws of 1 to 200 good images, rounded so that some tie or are nearly one number."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        good = rng.normal(-3, 2, int(rng.integers(1, 201)))
        good = good if decimals is None else good.round(decimals)
        # Numbers that float32 holds, so that both read the same place off the same table.
        good = np.r_[good, good[:9] + rng.uniform(0, TIED, len(good[:9]))].astype(np.float32)
        table = conformal_table(good.tolist())
        low, high, spread = float(good.min()), float(good.max()), table.spread
        queries = np.r_[good, np.linspace(low - spread, high + 20 * spread, 999, dtype=np.float32)]
        found = PValue(table).to(dtype)(torch.from_numpy(queries).to(dtype))
        assert found.dtype == dtype and found.shape == (len(queries),)
        expected = p_value(queries.astype(np.float64), table)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("good", [
    np.random.default_rng(0).normal(-3, 2, 60), np.array([0.7]), np.array([-1.0, -1.0, 2.0]),
    np.array([1.0, 1.0 + 1e-12, 1.0 + 3e-8, 2.0]), np.full(5, 3.0),
])  # fmt: skip
def test_p_value_of_the_graph_against_float64(good: NDArray[np.float64]) -> None:
    """Good images too that are one number in float32; at good images, between them and beyond."""
    known = ImageCalibrator((0.0,), (1.0,), (1.0,), 0.0, good_logits=tuple(np.sort(good).tolist()))
    tail = NormalTail(torch.arange(9.0), math.nan, math.nan, math.nan, 16.0)
    same = BranchStatistics(0.0, 1.0)
    graph = OutputGraph(Calibration(same, same, tail, known, 0.0, 1 / 3))
    spread = max(float(np.ptp(good)), 1.0)
    queries = np.r_[good, np.linspace(good.min() - spread, good.max() + 9 * spread, 2_000)]
    pooled = torch.from_numpy(np.sort(queries))[:, None].float()
    residual = torch.zeros(len(pooled), 2, 2)
    found = graph(Evidence(None, residual, None, pooled), (4, 4)).pred_score
    assert found.dtype == torch.float32
    assert float(found.min()) >= 0 and float(found.max()) < 1
    assert float(found.diff().min()) >= -1e-6
    expected = torch.from_numpy(image_score(pooled, known))
    # Within rounding of a good image its place between two others is not known in float32.
    clear = np.abs(pooled.numpy() - good).min(1) > 1e-5
    torch.testing.assert_close(found[clear].double(), expected[clear], atol=2e-5, rtol=0)
    off = float((found.double() - expected).abs().max())
    assert off <= max(2e-5, 3 / (len(good) + 1))


def test_the_network_itself_stays(linear_network: Network) -> None:
    before = {key: value.clone() for key, value in linear_network.state_dict().items()}
    EvidenceGraph(linear_network)
    after = linear_network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_variance_stays_above_the_least_floor() -> None:
    """Why the dominance head may leave the floor out: jitter / (M + jitter) a function at least."""
    Z = unit_tokens(1, 8, 0).repeat(32, 1)
    gp = random_gp(Z, linear, 1, 0.0)
    assert float(gp(Z[:1]).variance) == pytest.approx(1e-3 / (32 + 1e-3), rel=1e-3)


@pytest.mark.parametrize("inference", [{"precision": "bfloat16"}, {"mode": "compiled"}])
def test_other_precision_and_mode(tiny_run: Run, inference: dict[str, str]) -> None:
    """Both work on a processor too, where they are not used by themselves."""
    if inference.get("mode") == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler, and g++ is not here")
    model, cpu = tiny_run.detector.model, torch.device("cpu")
    chosen = InferenceSettings.model_validate(inference)
    images = random_images(2, model.settings.input_size).numpy()
    plain, found = (
        TorchRuntime(model, cpu).run(images),
        TorchRuntime(model, cpu, chosen).run(images),
    )
    if chosen.precision == "float32":
        torch.testing.assert_close(found.fused, plain.fused, atol=1e-4, rtol=1e-5)
    else:
        assert found.fused.dtype == np.float32
        moved = np.abs(found.fused - plain.fused)
        assert float(moved.max()) > 1e-4 and float(moved.mean()) < 0.2 * float(plain.fused.std())
    torch.testing.assert_close(found.pred_score, plain.pred_score, atol=0.01, rtol=0)


def test_inference_is_checked_before_the_model_is_written(tiny_run: Run) -> None:
    cpu, model = torch.device("cpu"), tiny_run.detector.model
    # Four good images of a few steps have next to no spread, so bfloat16 moves the evidence by much
    # of a scale; a model worth running has smaller slopes for that.
    image = model.calibration.image
    image = image._replace(slope=tuple(k / 20 for k in image.slope))
    model = model._replace(calibration=model.calibration._replace(image=image))
    samples = tiny_run.manifest.weak_split().calibration
    images = WeakDataset(samples, new_inputs(model.settings))
    fast = TorchRuntime(model, cpu, InferenceSettings(precision="bfloat16"))
    moved = check_inference(fast, model, images)
    assert moved["fused"] > 1e-4 and moved["decisions_changed"] == 0
    fast.graph.outputs.calibration = model.calibration._replace(
        image=model.calibration.image._replace(intercept=model.calibration.image.intercept + 1)
    )
    with pytest.raises(TrainingError, match=r"bfloat16.*--resume"):
        check_inference(fast, model, images)
