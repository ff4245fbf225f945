"""AUPRO against a loop over thresholds, its limit identities, and its refusals."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import ndimage
from tests.helpers import SHARED, random_maps

from cdgp.errors import DataError, SettingsError
from cdgp.metrics import regions
from cdgp.metrics.ranking import Measure, image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro

LIMITS = (0.3, 0.05, 1.0)
CASES = SHARED / "cases" / "make_cases.py"
Maps = list[NDArray[Any]]


def slow_aupro(maps: Maps, masks: Maps, limit: float) -> float:
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
            return float((area + (limit - x0) * (y0 + y_end) / 2) / limit)
        area += (x1 - x0) * (y0 + y1) / 2
        x0, y0 = x1, y1
    raise AssertionError("the curve ends at 1, so it passes every limit")


def assert_like_loop(maps: Maps, masks: Maps) -> None:
    for limit, measure in aupro(maps, masks, LIMITS).items():
        assert measure.value == pytest.approx(slow_aupro(maps, masks, limit), rel=0, abs=1e-9)


def assert_same(found: dict[float, Measure], expected: dict[float, Measure]) -> None:
    """Equal up to the order in which equal scores are added up."""
    assert {limit: m.value for limit, m in found.items()} == pytest.approx(
        {limit: m.value for limit, m in expected.items()}, rel=0, abs=1e-12
    )


def test_auroc_leaves_its_arguments_as_they_were() -> None:
    maps, masks = random_maps(1, None)
    before = [values.copy() for values in maps]
    pixel_auroc(maps, masks)
    aupro(maps, masks, LIMITS)
    for values, copy in zip(maps, before, strict=True):
        np.testing.assert_array_equal(values, copy)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("levels", [None, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_aupro_equals_the_loop(seed: int, levels: int | None, dtype: type) -> None:
    assert_like_loop(*random_maps(seed, levels, dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), height=st.integers(1, 6), width=st.integers(2, 6), levels=st.integers(1, 5))
def test_aupro_equals_the_loop_whatever_the_ties(
    data: st.DataObject, height: int, width: int, levels: int
) -> None:
    n = height * width
    scores = data.draw(st.lists(st.integers(0, levels), min_size=n, max_size=n))
    marks = data.draw(
        st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda m: any(m) and not all(m))
    )
    values = np.reshape(scores, (height, width)).astype(float)
    assert_like_loop([values], [np.reshape(marks, (height, width))])


def test_aupro_by_hand() -> None:
    # 2 regions (4 and 2 pixels), 94 normal pixels. The curve: (0, 1/2) at 0.9, (4/94, 1/2) at 0.6,
    # (4/94, 1) at 0.4, then level at 1.
    values, mask = np.full((10, 10), 0.1), np.zeros((10, 10), bool)
    mask[1, 1:5] = mask[7, 7:9] = True
    values[1, 1:5], values[7, 7:9], values[4, 2:6] = 0.9, 0.4, 0.6
    expected = (4 / 94 * 0.5 + (0.3 - 4 / 94)) / 0.3
    assert aupro([values], [mask])[0.3].value == pytest.approx(expected, abs=1e-12)


def test_regions_touching_at_a_corner_are_one() -> None:
    mask = np.zeros((6, 6), bool)
    mask[:2, :2] = mask[2, 2] = True
    values = np.where(mask, 1.0, 0.0)
    values[2, 2] = -1.0
    # One region of 5 pixels, 4 of them found at once, the last with all normal pixels.
    assert aupro([values], [mask], [0.5])[0.5].value == pytest.approx(0.8, abs=1e-12)


def test_extremes_of_aupro() -> None:
    mask = np.zeros((7, 5), bool)
    mask[2:4, 1:3] = True
    for limit in LIMITS:
        constant = aupro([np.full((7, 5), 0.37)], [mask], [limit])[limit].value
        assert constant == pytest.approx(limit / 2, abs=1e-12)
        assert aupro([mask.astype(float)], [mask], [limit])[limit].value == pytest.approx(1.0)
        assert aupro([1.0 - mask], [mask], [limit])[limit].value == pytest.approx(0.0)
    assert pixel_auroc([np.full((7, 5), 0.37)], [mask]).value == 0.5


@pytest.mark.parametrize("transform", [np.exp, np.cbrt, lambda v: 1e6 * v - 3e7])
def test_only_the_order_of_scores_counts(transform: Callable[[Any], Any]) -> None:
    maps, masks = random_maps(5, 4)
    moved = [transform(values) for values in maps]
    assert_same(aupro(moved, masks, LIMITS), aupro(maps, masks, LIMITS))
    assert pixel_auroc(moved, masks) == pixel_auroc(maps, masks)


def test_order_of_images_and_kind_of_mask_do_not_matter() -> None:
    maps, masks = random_maps(6, 4)
    turned = aupro(maps[::-1], [np.where(mask, 255, 0) for mask in masks[::-1]], LIMITS)
    assert_same(turned, aupro(maps, masks, LIMITS))


def test_the_guessed_cut_saves_work_and_never_changes_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_ties_at_the_guessed_cut() -> None:
    rng = np.random.default_rng(2)
    values = np.round(4 * rng.normal(size=(256, 256))) / 4
    mask = np.zeros((256, 256), bool)
    mask[100:120, 50:90] = mask[30:33, 200:] = True
    cut = regions._probable_cut([(values, mask)], 0.3)
    assert np.isfinite(cut)
    assert (values[~mask] == cut).sum() > 1000
    assert_like_loop([values], [mask])


def test_mixed_precision_equals_double() -> None:
    maps, masks = random_maps(7, None, np.float32)
    mixed = [maps[0].astype(np.float64), *maps[1:]]
    double = [values.astype(np.float64) for values in maps]
    assert_same(aupro(mixed, masks, LIMITS), aupro(double, masks, LIMITS))


def test_whole_numbers_serve_as_scores() -> None:
    maps, masks = random_maps(8, 1)
    whole: Maps = [(values + 10).astype(np.uint8) for values in maps]
    assert_same(aupro(whole, masks, LIMITS), aupro(maps, masks, LIMITS))
    assert pixel_auroc(whole, masks) == pixel_auroc(maps, masks)


def test_undefined_has_a_reason_and_no_value() -> None:
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
def test_unfit_maps_are_named(metric: Callable[..., object]) -> None:
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
def test_impossible_limits_are_refused(limits: list[float]) -> None:
    with pytest.raises(SettingsError, match="limits"):
        aupro([np.zeros((2, 2))], [np.eye(2)], limits)


@pytest.mark.shared
@pytest.mark.skipif(not CASES.exists(), reason=f"{CASES} is missing")
def test_case_of_ties_and_oddities(tmp_path: Path) -> None:
    command = [sys.executable, str(CASES), str(tmp_path), "--only", "num-metrics-ties"]
    subprocess.run(command, check=True, capture_output=True)
    folder = tmp_path / "num-metrics-ties"
    expected = json.loads((folder / "expected.json").read_text())
    arrays = np.load(folder / "metrics.npz")

    def assert_near(found: float | None, wanted: float | None, what: str) -> None:
        assert (found is None) == (wanted is None), what
        assert found is None or wanted is None or abs(found - wanted) <= 1e-6, what

    def assert_values(maps: Maps, masks: Maps, values: dict[str, float | None]) -> None:
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
            metrics: tuple[Callable[..., object], ...] = (aupro, pixel_auroc)
            for metric in metrics:
                with pytest.raises(DataError, match=f"{name}: the map has 1 non-finite pixel"):
                    metric(maps, masks, names=[name])
        else:
            assert {"aupro_030", "aupro_005", "pixel_auroc"} <= values.keys()
            assert_values(maps, masks, values)
    maps, masks = (
        [arrays[f"{kind}_{name}"] for name in ("tied", "hand")] for kind in ("map", "mask")
    )
    assert pooled.keys() == {"aupro_030", "pixel_auroc"}
    assert_values(maps, masks, pooled)
