"""Every metric against an independent computation, its limit identities and its refusals."""

import itertools
import json
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from sklearn.metrics import roc_auc_score
from tests.helpers import ROOT

from cdgp.errors import DataError, SettingsError
from cdgp.metrics import regions
from cdgp.metrics.ranking import Measure, image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro
from cdgp.metrics.reliability import (
    expected_calibration_error,
    false_reject_threshold,
    overkill_and_escape,
    reliability_curve,
)

LIMITS = (0.3, 0.05, 1.0)
CASES = ROOT.parent / "shared" / "cases" / "make_cases.py"


def slow_aupro(maps, masks, limit):
    """AUPRO threshold by threshold, in plain loops."""
    found = []  # the scores in each region
    for values, mask in zip(maps, masks, strict=True):
        labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
        found += [values[labels == region] for region in range(1, count + 1)]
    normal = np.concatenate([v[~m] for v, m in zip(maps, masks, strict=True)])
    area = x0 = y0 = 0.0
    for threshold in np.unique(np.concatenate([v.ravel() for v in maps]))[::-1]:
        x1 = np.mean(normal >= threshold)
        y1 = np.mean([np.mean(region >= threshold) for region in found])
        if x1 >= limit:
            y_end = y1 if x1 == x0 else y0 + (y1 - y0) * (limit - x0) / (x1 - x0)
            return (area + (limit - x0) * (y0 + y_end) / 2) / limit
        area += (x1 - x0) * (y0 + y1) / 2
        x0, y0 = x1, y1
    raise AssertionError("the curve ends at 1, so it passes every limit")


def assert_like_loop(maps, masks):
    for limit, measure in aupro(maps, masks, LIMITS).items():
        assert measure.value == pytest.approx(slow_aupro(maps, masks, limit), rel=0, abs=1e-9)


def assert_same(found, expected):
    """Equal up to the order in which equal scores are added up."""
    assert {limit: m.value for limit, m in found.items()} == pytest.approx(
        {limit: m.value for limit, m in expected.items()}, rel=0, abs=1e-12
    )


def random_images(seed, levels, dtype=np.float64):
    """Four maps of different sizes, quantised when `levels` is given; the last has no defect."""
    rng = np.random.default_rng(seed)
    maps, masks = [], []
    for size in [(9, 14), (1, 20), (13, 6), (8, 8)]:
        mask = ndimage.binary_dilation(rng.random(size) < 0.06) & (len(maps) < 3)
        values = rng.normal(size=size) + mask
        maps.append((np.round(values * levels) / levels if levels else values).astype(dtype))
        masks.append(mask)
    return maps, masks


# ---------------------------------------------------------------- AUROC


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_image_auroc_equals_sklearn(seed, levels):
    rng = np.random.default_rng(seed)
    labels = np.arange(40) % 3 == 0
    scores = 1000 * (rng.normal(size=40) + labels)
    scores = np.round(scores / 1000 * levels) if levels else scores
    expected = roc_auc_score(labels, scores)
    assert image_auroc(scores, labels).value == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("levels", [None, 1, 3])
def test_pixel_auroc_equals_sklearn(levels, dtype):
    maps, masks = random_images(3, levels, dtype)
    scores, labels = (np.concatenate([a.ravel() for a in arrays]) for arrays in (maps, masks))
    expected = roc_auc_score(labels, scores)
    assert pixel_auroc(maps, masks).value == pytest.approx(expected, rel=0, abs=1e-12)


def test_auroc_leaves_its_arguments_as_they_were():
    maps, masks = random_images(1, None)
    before = [values.copy() for values in maps]
    pixel_auroc(maps, masks)
    aupro(maps, masks, LIMITS)
    for values, copy in zip(maps, before, strict=True):
        np.testing.assert_array_equal(values, copy)


# ---------------------------------------------------------------- AUPRO


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("levels", [None, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_aupro_equals_the_loop(seed, levels, dtype):
    assert_like_loop(*random_images(seed, levels, dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), height=st.integers(1, 6), width=st.integers(2, 6), levels=st.integers(1, 5))
def test_aupro_equals_the_loop_whatever_the_ties(data, height, width, levels):
    n = height * width
    scores = data.draw(st.lists(st.integers(0, levels), min_size=n, max_size=n))
    marks = data.draw(
        st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda m: any(m) and not all(m))
    )
    values = np.reshape(scores, (height, width)).astype(float)
    assert_like_loop([values], [np.reshape(marks, (height, width))])


def test_aupro_by_hand():
    # 2 regions (4 and 2 pixels), 94 normal pixels. The curve: (0, 1/2) at 0.9, (4/94, 1/2) at 0.6,
    # (4/94, 1) at 0.4, then level at 1.
    values, mask = np.full((10, 10), 0.1), np.zeros((10, 10), bool)
    mask[1, 1:5] = mask[7, 7:9] = True
    values[1, 1:5], values[7, 7:9], values[4, 2:6] = 0.9, 0.4, 0.6
    expected = (4 / 94 * 0.5 + (0.3 - 4 / 94)) / 0.3
    assert aupro([values], [mask])[0.3].value == pytest.approx(expected, abs=1e-12)


def test_regions_touching_at_a_corner_are_one():
    mask = np.zeros((6, 6), bool)
    mask[:2, :2] = mask[2, 2] = True
    values = np.where(mask, 1.0, 0.0)
    values[2, 2] = -1.0
    # One region of 5 pixels, 4 of them found at once, the last with all normal pixels.
    assert aupro([values], [mask], [0.5])[0.5].value == pytest.approx(0.8, abs=1e-12)


def test_extremes_of_aupro():
    mask = np.zeros((7, 5), bool)
    mask[2:4, 1:3] = True
    for limit in LIMITS:
        constant = aupro([np.full((7, 5), 0.37)], [mask], [limit])[limit].value
        assert constant == pytest.approx(limit / 2, abs=1e-12)
        assert aupro([mask.astype(float)], [mask], [limit])[limit].value == pytest.approx(1.0)
        assert aupro([1.0 - mask], [mask], [limit])[limit].value == pytest.approx(0.0)
    assert pixel_auroc([np.full((7, 5), 0.37)], [mask]).value == 0.5


@pytest.mark.parametrize("transform", [np.exp, np.cbrt, lambda v: 1e6 * v - 3e7])
def test_only_the_order_of_scores_counts(transform):
    maps, masks = random_images(5, 4)
    moved = [transform(values) for values in maps]
    assert_same(aupro(moved, masks, LIMITS), aupro(maps, masks, LIMITS))
    assert pixel_auroc(moved, masks) == pixel_auroc(maps, masks)


def test_order_of_images_and_kind_of_mask_do_not_matter():
    maps, masks = random_images(6, 4)
    turned = aupro(maps[::-1], [np.where(mask, 255, 0) for mask in masks[::-1]], LIMITS)
    assert_same(turned, aupro(maps, masks, LIMITS))


def test_the_guessed_cut_saves_work_and_never_changes_the_result(monkeypatch):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(512, 512))
    mask = np.zeros((512, 512), bool)
    mask[100:120, 50:90] = True
    expected = aupro([values], [mask], LIMITS)
    normal = mask.size - mask.sum()
    for limit in (0.3, 0.05):
        kept = regions._highest_normal([(values, mask)], normal, limit).size
        assert limit * normal <= kept < 1.1 * limit * normal
    sizes = []
    for guess in (-1.0, 0.0, 5.0):  # too low, too high for a limit of 1, too high for all
        monkeypatch.setattr(regions, "_probable_cut", lambda *_, g=guess: np.float64(g))
        assert aupro([values], [mask], LIMITS) == expected
        sizes.append(regions._highest_normal([(values, mask)], normal, 0.3).size)
    assert sizes == [(values[~mask] >= -1).sum(), (values[~mask] >= 0).sum(), normal]


def test_ties_at_the_guessed_cut():
    rng = np.random.default_rng(2)
    values = np.round(4 * rng.normal(size=(256, 256))) / 4
    mask = np.zeros((256, 256), bool)
    mask[100:120, 50:90] = mask[30:33, 200:] = True
    cut = regions._probable_cut([(values, mask)], 0.3)
    assert np.isfinite(cut)
    assert (values[~mask] == cut).sum() > 1000
    assert_like_loop([values], [mask])


def test_mixed_precision_equals_double():
    maps, masks = random_images(7, None, np.float32)
    mixed = [maps[0].astype(np.float64), *maps[1:]]
    double = [values.astype(np.float64) for values in maps]
    assert_same(aupro(mixed, masks, LIMITS), aupro(double, masks, LIMITS))


def test_whole_numbers_serve_as_scores():
    maps, masks = random_images(8, 1)
    whole = [(values + 10).astype(np.uint8) for values in maps]
    assert_same(aupro(whole, masks, LIMITS), aupro(maps, masks, LIMITS))
    assert pixel_auroc(whole, masks) == pixel_auroc(maps, masks)


# ---------------------------------------------------------------- undefined, refused


def test_undefined_has_a_reason_and_no_value():
    noise = np.random.default_rng(0).normal(size=(4, 4))
    blank, full = np.zeros((4, 4), bool), np.ones((4, 4), bool)
    for mask, reason in [(blank, "no marked pixel"), (full, "no unmarked pixel")]:
        assert pixel_auroc([noise], [mask]) == Measure(None, reason)
        assert aupro([noise], [mask]) == dict.fromkeys((0.3, 0.05), Measure(None, reason))
    assert pixel_auroc([], []) == Measure(None, "no marked pixel")
    assert image_auroc([1.0, 2.0], [1, 1]) == Measure(None, "no good image")
    assert image_auroc([1.0, 2.0], [0, 0]) == Measure(None, "no defective image")
    for both_or_neither in [(None, None), (0.5, "why")]:
        with pytest.raises(ValueError):
            Measure(*both_or_neither)


@pytest.mark.parametrize("metric", [pixel_auroc, aupro])
def test_unfit_maps_are_named(metric):
    good, mask = np.zeros((3, 3)), np.eye(3, dtype=bool)
    holes = good.copy()
    holes[0, 1], holes[2, 2] = np.nan, np.inf
    with pytest.raises(DataError, match=r"b\.png: the map has 2 non-finite pixels"):
        metric([good, holes], [mask, mask], names=["a.png", "b.png"])
    with pytest.raises(DataError, match="image 1: the map has 2 non-finite"):
        metric([good, holes], [mask, mask])
    with pytest.raises(DataError, match=r"b\.png: map \(3, 3\) and mask \(3, 4\)"):
        metric([good, good], [mask, np.zeros((3, 4))], names=["a.png", "b.png"])
    with pytest.raises(DataError, match="image 0: map"):
        metric([good.ravel()], [mask.ravel()])
    with pytest.raises(DataError, match="image 0: map"):
        metric([np.zeros((0, 3))], [np.zeros((0, 3))])
    with pytest.raises(DataError, match="1 maps, 2 masks"):
        metric([good], [mask, mask])
    with pytest.raises(DataError, match="1 names"):
        metric([good, good], [mask, mask], names=["a.png"])


@pytest.mark.parametrize("limits", [[], [0.0], [0.3, 1.01], [-0.1], [math.nan]])
def test_impossible_limits_are_refused(limits):
    with pytest.raises(SettingsError, match="limits"):
        aupro([np.zeros((2, 2))], [np.eye(2)], limits)


def test_unfit_scores_are_named():
    with pytest.raises(DataError, match=r"b\.png: score at index 1 is nan"):
        image_auroc([0.0, np.nan], [0, 1], names=["a.png", "b.png"])
    with pytest.raises(DataError, match="score at index 0 is inf"):
        image_auroc([np.inf, 0.0], [0, 1])
    with pytest.raises(DataError, match="label at index 2 is 2"):
        image_auroc([0.0, 1.0, 2.0], [0, 1, 2])
    with pytest.raises(DataError, match="one length"):
        image_auroc([0.0, 1.0], [0, 1, 1])
    with pytest.raises(DataError, match="one length"):
        image_auroc([[0.0, 1.0]], [[0, 1]])
    with pytest.raises(DataError, match="1 names"):
        image_auroc([0.0, 1.0], [0, 1], names=["a.png"])


# ---------------------------------------------------------------- reliability


@pytest.mark.parametrize("bins", [1, 5, 10, 15])
def test_calibration_error_equals_a_loop(bins):
    rng = np.random.default_rng(bins)
    # Tenths lie on edges, where rounding could move them; 0 and 1 are the ends.
    probabilities = np.concatenate([rng.random(60), np.arange(11) / 10])
    labels = rng.random(71) < probabilities**2
    expected, counts = 0.0, []
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = (probabilities >= low) & ((probabilities < high) | (b == bins - 1))
        counts.append(inside.sum())
        if inside.any():
            gap = abs(probabilities[inside].mean() - labels[inside].mean())
            expected += inside.mean() * gap
    measure = expected_calibration_error(probabilities, labels, bins)
    assert measure.value == pytest.approx(expected, rel=0, abs=1e-12)
    assert reliability_curve(probabilities, labels, bins).counts == tuple(counts)


def test_reliability_curve_by_hand():
    curve = reliability_curve([0.0, 0.125, 1.0], [0, 1, 1], bins=4)
    assert curve.edges == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert curve.counts == (2, 0, 0, 1)
    assert curve.mean_probability == (0.0625, None, None, 1.0)
    assert curve.observed_rate == (0.5, None, None, 1.0)


def test_reliability_refuses_what_is_no_probability():
    assert expected_calibration_error([], []) == Measure(None, "no image")
    for bad in (-0.1, 1.5, np.nan):
        with pytest.raises(DataError, match="index 1"):
            expected_calibration_error([0.5, bad], [0, 1])
    with pytest.raises(SettingsError, match="bin"):
        expected_calibration_error([0.5], [1], bins=0)


@pytest.mark.parametrize("max_rate", [0.5, 0.35, 0.3, 0.25])
@pytest.mark.parametrize("pool", [range(6), [0, 0, 1, 2, 2, 2], [4] * 6])
def test_false_rejects_stay_below_the_bound(pool, max_rate):
    # Exchangeable scores: every order of the pool is equally likely, the last one is new.
    orders = list(itertools.permutations(pool))
    found = [false_reject_threshold(order[:-1], max_rate) for order in orders]
    rejected = sum(order[-1] > f.threshold for order, f in zip(orders, found, strict=True))
    rate, bound = Fraction(rejected, len(orders)), Fraction(found[0].bound).limit_denominator(100)
    assert rate <= bound <= Fraction(str(max_rate))
    if len(set(pool)) == len(
        pool
    ):  # without ties the bound is met, so it is no looser than it says
        assert rate == bound


@pytest.mark.parametrize(("max_rate", "needed"), [(0.01, 99), (0.05, 19), (0.1, 9), (0.3, 3)])
def test_normal_images_needed_for_a_rate(max_rate, needed):
    scores = np.arange(needed, dtype=float)[::-1]
    enough = false_reject_threshold(scores, max_rate)
    assert (enough.threshold, enough.normals) == (needed - 1, needed)
    assert enough.bound == pytest.approx(1 / (needed + 1))
    assert enough.bound <= max_rate
    with pytest.raises(
        SettingsError,
        match=f": {needed - 1} are held out of training, at least {needed} are needed",
    ):
        false_reject_threshold(scores[1:], max_rate)


def test_false_reject_rank_is_free_of_rounding():
    for percent, n in itertools.product(range(1, 100), range(99, 400, 50)):
        k = -(-(n + 1) * (100 - percent) // 100)  # in whole numbers
        found = false_reject_threshold(np.arange(1, n + 1), percent / 100)
        assert found.threshold == k
        assert found.bound <= percent / 100


@pytest.mark.parametrize("max_rate", [0, 1, -0.1, math.nan])
def test_impossible_false_reject_rates_are_refused(max_rate):
    with pytest.raises(SettingsError, match="between 0 and 1"):
        false_reject_threshold(np.arange(200.0), max_rate)


def test_false_reject_threshold_refuses_nan_scores():
    with pytest.raises(DataError, match="index 1 is nan"):
        false_reject_threshold([0.0, np.nan], 0.4)


def test_overkill_and_escape_by_hand():
    result = overkill_and_escape([0.1, 0.5, 0.6, 0.9, 0.5, 0.2], [0, 0, 0, 1, 1, 1], 0.5)
    assert result.overkill == Measure(1 / 3)  # 0.5 is not above the threshold
    assert result.escape == Measure(2 / 3)
    assert (result.good, result.false_rejects, result.defective, result.misses) == (3, 1, 3, 2)
    assert overkill_and_escape([1.0], [1], 0).overkill == Measure(None, "no good image")
    assert overkill_and_escape([1.0], [0], 0).escape == Measure(None, "no defective image")
    with pytest.raises(SettingsError, match="NaN"):
        overkill_and_escape([1.0], [1], math.nan)


# ---------------------------------------------------------------- the case of ties and oddities


@pytest.mark.shared
@pytest.mark.skipif(not CASES.exists(), reason=f"{CASES} is missing")
def test_case_of_ties_and_oddities(tmp_path):
    command = [sys.executable, str(CASES), str(tmp_path), "--only", "num-metrics-ties"]
    subprocess.run(command, check=True, capture_output=True)
    folder = tmp_path / "num-metrics-ties"
    expected = json.loads((folder / "expected.json").read_text())
    arrays = np.load(folder / "metrics.npz")

    def assert_near(found, wanted, what):
        assert (found is None) == (wanted is None), what
        assert wanted is None or abs(found - wanted) <= 1e-6, what

    def assert_values(maps, masks, values):
        found = {f"aupro_{100 * k:03.0f}": m.value for k, m in aupro(maps, masks).items()}
        found |= {"pixel_auroc": pixel_auroc(maps, masks).value}
        for key in found.keys() & values.keys():
            assert_near(found[key], values[key], key)

    pooled = expected.pop("pooled tied+hand_as_two_pictures")
    for name, value in expected.pop("image_auroc").items():
        scores, labels = arrays[f"img_{name}"]
        assert_near(image_auroc(scores, labels).value, value, name)
    for name, values in expected.items():
        maps, masks = [arrays[f"map_{name}"]], [arrays[f"mask_{name}"]]
        if values == "error":
            for metric in (aupro, pixel_auroc):
                with pytest.raises(DataError, match=f"{name}: the map has 1 non-finite pixel"):
                    metric(maps, masks, names=[name])
        else:
            assert {"aupro_030", "aupro_005", "pixel_auroc"} <= values.keys()
            assert_values(maps, masks, values)
    two = [[arrays[f"{kind}_{name}"] for name in ("tied", "hand")] for kind in ("map", "mask")]
    assert pooled.keys() == {"aupro_030", "pixel_auroc"}
    assert_values(*two, pooled)
