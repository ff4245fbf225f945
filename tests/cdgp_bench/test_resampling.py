"""Curves kept per image, and the bootstrap over groups, against metrics of copied images."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from cdgp.errors import DataError
from cdgp.metrics.ranking import image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro
from cdgp.metrics.resampling import group_draws
from cdgp_bench.resampling import (
    averaged,
    difference,
    profile,
    region_areas,
    resampled,
    weighted_metrics,
)

SIZES = ((20, 30), (14, 9), (25, 25), (8, 40), (16, 16), (12, 12))


Images = tuple[list[NDArray[np.float64]], list[NDArray[np.bool_] | None], list[float], list[bool]]
"""Maps, masks, scores, labels."""


def images(seed: int, levels: int) -> Images:
    """Maps of few or many levels; the third image has no mask, two are good."""
    rng = np.random.default_rng(seed)
    maps: list[NDArray[np.float64]] = []
    masks: list[NDArray[np.bool_] | None] = []
    for index, size in enumerate(SIZES):
        mask = np.zeros(size, bool)
        if index < 4:
            mask[2:5, 3:7] = True
            mask[6, 1:3] = True
        values = rng.normal(size=size) + mask
        maps.append(np.round(values * levels) / levels)
        masks.append(None if index == 2 else mask)
    return maps, masks, list(rng.normal(size=6).round(1)), [True] * 4 + [False] * 2


def copied(found: Images, weights: NDArray[np.float64]) -> dict[str, float]:
    """The exact metrics over as many copies of each image as were drawn."""
    maps, masks, scores, labels = found
    drawn = np.repeat(np.arange(len(maps)), weights.astype(int))
    pairs = [(maps[i], mask) for i in drawn if (mask := masks[i]) is not None]
    inside, marked = [p[0] for p in pairs], [p[1] for p in pairs]
    regions = aupro(inside, marked)
    exact = {
        "image_auroc": image_auroc([scores[i] for i in drawn], [labels[i] for i in drawn]).value,
        "pixel_auroc": pixel_auroc(inside, marked).value,
        "pixel_aupro_30": regions[0.3].value,
        "pixel_aupro_05": regions[0.05].value,
    }
    return {name: value for name, value in exact.items() if value is not None}


@pytest.mark.parametrize("levels", [10, 10**6])
def test_weighted_metrics_are_those_of_copied_images(levels: int) -> None:
    found = images(0, levels)
    weights = np.array([[1, 1, 1, 1, 1, 1], [2, 0, 1, 0, 3, 1], [0, 1, 0, 2, 0, 4]], float)
    metrics = weighted_metrics(profile(*found), weights)
    for row, drawn in enumerate(weights):
        exact = copied(found, drawn)
        assert {k: metrics[k][row] for k in exact} == pytest.approx(exact, abs=1e-12)


def test_many_scores_are_cut_close_to_the_exact_curve() -> None:
    rng = np.random.default_rng(3)
    mask = np.zeros((300, 300), bool)
    mask[100:140, 50:90] = mask[200:203, 200:260] = True
    maps = [rng.normal(size=mask.shape) + 1.5 * mask, rng.normal(size=mask.shape)]
    masks: list[NDArray[np.bool_] | None] = [mask, np.zeros_like(mask)]
    found = maps, masks, [1.0, 0.0], [True, False]
    kept = profile(*found)
    assert kept.normal.shape[1] < 3100
    for weights in (np.array([1.0, 1.0]), np.array([1.0, 5.0])):
        metrics = weighted_metrics(kept, weights[None])
        exact = copied(found, weights)
        assert {k: v[0] for k, v in metrics.items()} == pytest.approx(exact, abs=2.5e-4)


def test_regions_average_to_aupro() -> None:
    found = images(1, 10)
    kept = profile(*found)
    assert kept.area.tolist() == [12, 2] * 3
    assert kept.image_of.tolist() == [0, 0, 1, 1, 3, 3]
    exact = copied(found, np.ones(6))
    assert region_areas(kept, 0.3).mean() == pytest.approx(exact["pixel_aupro_30"], abs=1e-12)


def test_draws_take_whole_groups() -> None:
    weights = group_draws(["a", "b", "a", "c"], 4000, seed=1)
    assert (weights[:, 0] == weights[:, 2]).all()
    assert (weights[:, [0, 1, 3]].sum(1) == 3).all()
    # Of 27 ordered draws of three groups: none of a 8, one 12, two 6, three 1.
    shares = np.bincount(weights[:, 0].astype(int)) / 4000
    assert shares == pytest.approx(np.array([8, 12, 6, 1]) / 27, abs=0.03)


def test_interval_against_all_draws() -> None:
    found = [images(seed, 10) for seed in (5, 6)]
    groups = list("abcdef")
    kept = [profile(*one[:2], *found[0][2:]) for one in found]
    # Every draw of six out of six groups, and how many of the 6^6 ordered ones it stands for.
    drawn = [
        np.bincount(d, minlength=6) for d in itertools.combinations_with_replacement(range(6), 6)
    ]
    times = [math.factorial(6) // math.prod(math.factorial(n) for n in d) for d in drawn]
    assert sum(times) == 6**6
    metrics = [weighted_metrics(k, np.array(drawn, float))["pixel_aupro_30"] for k in kept]
    spread = np.repeat(metrics[0] - metrics[1], times)
    exact = np.percentile(spread[~np.isnan(spread)], [2.5, 97.5])
    weights = group_draws(groups, 40_000, seed=2)
    first, second = (resampled(k, weights) for k in kept)
    found_difference = difference(first, second, "pixel_aupro_30")
    assert found_difference is not None
    width = exact[1] - exact[0]
    assert [found_difference.low, found_difference.high] == pytest.approx(
        exact.tolist(), abs=0.03 * width
    )
    wider = np.nanpercentile(spread, [0.5, 99.5])
    assert np.abs(wider - exact).max() > 0.06 * width  # so that one of 99 % would be seen
    # Draws of good images and the one without a mask have no marked pixel, and are left out.
    undefined = (weights[:, [0, 1, 3]].sum(1) == 0).sum()
    assert found_difference.draws == 40_000 - undefined < 40_000
    scores, labels = found[0][2:]
    exact_values = [copied((*f[:2], scores, labels), np.ones(6))["pixel_aupro_30"] for f in found]
    assert found_difference.value == pytest.approx(exact_values[0] - exact_values[1], abs=1e-12)


def test_interval_over_folds_against_all_draws() -> None:
    """Two folds of three groups: all 27 x 27 draws, measured by copying images."""
    groups = [*"aabbcc"]
    members = [np.flatnonzero(np.array(groups) == name) for name in "abc"]
    drawn = np.zeros((27, 6))
    for row, chosen in enumerate(itertools.product(range(3), repeat=3)):
        for group in chosen:
            drawn[row, members[group]] += 1
    methods, exact = [], []
    for shift in (0, 10):
        folds = [images(20 + shift + fold, 10) for fold in range(2)]
        shared = [images(20 + fold, 10)[1:] for fold in range(2)]  # masks, scores and labels
        alike = [(one[0], *rest) for one, rest in zip(folds, shared, strict=True)]
        methods.append([profile(*one) for one in alike])
        exact.append([
            np.array([copied(one, w).get("pixel_aupro_30", math.nan) for w in drawn])
            for one in alike
        ])  # fmt: skip
    both = [one[0][:, None] / 2 + one[1][None] / 2 for one in exact]
    spread = (both[0] - both[1]).ravel()
    ends = np.percentile(spread[~np.isnan(spread)], [2.5, 97.5])
    weights = [group_draws(groups, 40_000, seed=fold) for fold in range(2)]
    pooled = [
        averaged([resampled(k, w) for k, w in zip(kept, weights, strict=True)]) for kept in methods
    ]
    found = difference(pooled[0], pooled[1], "pixel_aupro_30")
    assert found is not None
    width = ends[1] - ends[0]
    assert [found.low, found.high] == pytest.approx(ends.tolist(), abs=0.03 * width)
    one_fold = np.nanpercentile(exact[0][0] - exact[1][0], [2.5, 97.5])
    assert np.abs(one_fold - ends).max() > 0.1 * width  # so that a single fold would be seen
    whole = [
        np.mean([copied((one[0], *rest), np.ones(6))["pixel_aupro_30"]
                 for one, rest in zip(folds, shared, strict=True)])
        for folds in ([images(20 + s + f, 10) for f in range(2)] for s in (0, 10))
    ]  # fmt: skip
    assert found.value == pytest.approx(whole[0] - whole[1], abs=1e-12)
    # A draw of good images alone has no marked pixel; one such fold makes the draw undefined.
    lacking = [(w[:, :4].sum(1) == 0) for w in weights]
    assert found.draws == 40_000 - np.count_nonzero(lacking[0] | lacking[1]) < 40_000


def test_a_known_difference_over_folds() -> None:
    """One method ranks perfectly in every fold, one the wrong way round: + 1 in every draw."""
    maps, masks, _, labels = images(3, 10)
    scores = [float(label) for label in labels]
    weights = [group_draws(list("abcdef"), 500, seed=fold) for fold in range(3)]
    pooled = [
        averaged([resampled(profile(maps, masks, [sign * s for s in scores], labels), w)
                  for w in weights])
        for sign in (1, -1)
    ]  # fmt: skip
    found = difference(pooled[0], pooled[1], "image_auroc")
    assert found is not None and found[:3] == (1, 1, 1)


def test_a_method_against_itself_and_without_defects() -> None:
    found = images(7, 10)
    kept, weights = profile(*found), group_draws(list("aabbcc"), 200)
    same = resampled(kept, weights)
    for metric in same.whole:
        none = difference(same, same, metric)
        assert none is not None and none[:3] == (0, 0, 0)
    maps, _, scores, _ = found
    good = profile(maps, [np.zeros(m.shape, bool) for m in maps], scores, [False] * 6)
    same = resampled(good, weights)
    assert {difference(same, same, metric) for metric in same.whole} == {None}


def test_images_without_masks_have_image_metrics() -> None:
    maps, _, scores, labels = images(9, 10)
    metrics = weighted_metrics(profile(maps, [None] * 6, scores, labels), np.ones((1, 6)))
    assert metrics["image_auroc"][0] == pytest.approx(image_auroc(scores, labels).value)
    assert all(np.isnan(metrics[k][0]) for k in metrics if k != "image_auroc")


def test_faults_are_errors() -> None:
    maps, masks, scores, labels = images(8, 10)
    with pytest.raises(DataError, match="non-finite"):
        profile([maps[0] * np.nan, *maps[1:]], masks, scores, labels)
    with pytest.raises(DataError, match="one length"):
        profile(maps, masks, scores[:-1], labels)
