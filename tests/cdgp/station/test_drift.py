"""The promise on false alarms by simulation, when a change is told, and what alarms name."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from tests.helpers import raised

from cdgp.errors import DataError, SettingsError
from cdgp.station.drift import (
    LEAST,
    OPEN,
    STAKES,
    WINDOW,
    Monitor,
    Part,
    _factors,
    _Windows,
    image_statistics,
)
from cdgp_bench.studies.drift import FIRST, STABLE, Line, alarms, monitor


@pytest.mark.slow
@pytest.mark.parametrize("name", STABLE)
def test_stable_months_keep_the_promise(name: str) -> None:
    """At most one alarm in 30 days, but in a share of 30 / (2 · 600) of such months."""
    counts = np.array([len(alarms(STABLE[name], 600, seed)) for seed in range(8)])
    expected = 30 / 600 * len(counts)
    assert counts.sum() <= expected + 3 * np.sqrt(expected)
    assert np.mean(counts > 1) <= 30 / 1200 + 3 * np.sqrt(30 / 1200 / len(counts))


@pytest.mark.slow
def test_the_bound_is_kept_where_it_is_met_whatever_the_volume() -> None:
    """With a false alarm each ten days allowed, so that there are enough to count."""
    few, many = (
        np.array([len(alarms(Line(parts=parts), 10, seed)) for seed in range(seeds)])
        for parts, seeds in ((20, 20), (200, 2))
    )
    for counts in (few, many):
        assert counts.mean() <= 30 / 10 + 3 * np.sqrt(30 / 10 / len(counts))
    assert few.sum() > 0, "a rule that never alarms keeps any bound"


def test_games_are_fair() -> None:
    for index, stake in enumerate(STAKES):
        # p = u^(1/stake) takes the pole at 0 away
        mean, _ = quad(
            lambda u, s=stake, i=index: (
                _factors(np.array([u ** (1 / s)]))[0, i] * u ** (1 / s - 1) / s
            ),
            1e-2, 1,
        )  # fmt: skip
        assert mean == pytest.approx(0.99, abs=1e-6)
    assert (_factors(np.array([np.nan])) == 1).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["independent", "lots of 10", "memory of 0.6", "three products"])
def test_exposure_down_by_15_percent_is_found_within_200_parts(name: str, seed: int) -> None:
    rng, line = np.random.default_rng(seed), STABLE[name]
    watching = monitor(line, rng)
    assert not any(watching.add(part) for part in line.stream(rng, 5, 0, "before "))
    dark = replace(line, parts=200, exposure=0.85)
    found = [alarm for part in dark.stream(rng, 1, 5, "dark ") if (alarm := watching.add(part))]
    assert found[0].kind == "light"
    assert found[0].moves[0] == ("brightness", "lower")
    assert "light or optics: brightness lower" in found[0].text
    named = found[0].images
    assert named[0].startswith("dark ")
    assert np.mean([image.startswith("dark ") for image in named]) > 0.6, (
        "windows may hold parts of before"
    )
    brightness = [alarm for alarm in found if ("brightness", "lower") in alarm.moves]
    assert len(brightness) == 1, "told once a day"


def test_exposure_of_images_moves_the_brightness_alone() -> None:
    """Darker pixels of the same scenes."""
    rng = np.random.default_rng(0)

    def part(number: int, exposure: float) -> Part:
        light = 0.5 + 0.02 * rng.normal()
        pixels = np.clip(light + 0.1 * rng.normal(size=(16, 16, 3)), 0, 1) * exposure
        pixels = np.rint(255 * pixels).astype(np.float32) / 255
        return Part(
            f"{exposure} {number}", FIRST, 0.0, image_statistics(pixels), rng.normal(size=4)
        )

    watching = Monitor([part(number, 1.0) for number in range(400)])
    parts = (part(number, 0.85) for number in range(200))
    alarm = next(found for one in parts if (found := watching.add(one)))
    assert (alarm.kind, [tuple(move) for move in alarm.moves]) == (
        "light", [("brightness", "lower")]
    )  # fmt: skip


@pytest.mark.parametrize("line", [Line(), Line(lot=5, of_lots=1.0)])
def test_another_mix_is_told_as_such(line: Line) -> None:
    """The third product becomes frequent: scores and brightness of the line rise, no product's."""
    rng = np.random.default_rng(3)
    line = replace(line, shares=(0.6, 0.3, 0.1))
    watching = monitor(line, rng)
    assert not any(watching.add(part) for part in line.stream(rng, 5, 0, "before "))
    other = replace(line, shares=(0.15, 0.15, 0.7), parts=400)
    parts = list(other.stream(rng, 2, 5, "after "))
    found = [alarm for part in parts if (alarm := watching.add(part))]
    assert {alarm.kind for alarm in found} == {"mix"} and not found[0].moves
    assert found[0].text.startswith("mix of products: product 2 is ")
    assert "10 % before" in found[0].text or "% before" in found[0].text
    products = {part.image: part.product for part in parts}
    named = [products.get(image, "before") for image in found[0].images]
    assert named.count("product 2") > 0.9 * len(named)


def test_a_new_product_is_told_as_a_mix() -> None:
    rng = np.random.default_rng(0)
    watching = monitor(Line(shares=(0.5, 0.5)), rng)
    parts = Line(parts=100, shares=(0.0, 0.5, 0.5)).stream(rng, 1, 0, "part ")
    alarm = next(found for part in parts if (found := watching.add(part)))
    assert alarm.kind == "mix" and "product 2 is " in alarm.text and " 0 % before" in alarm.text


def test_parts_that_differ_under_the_same_light_are_told_as_appearance() -> None:
    rng = np.random.default_rng(0)
    watching = monitor(Line(), rng)
    parts = (
        replace(part, features=part.features + 2.5, score=part.score + 2)
        for part in Line(parts=200).stream(rng, 1, 0, "rough ")
    )
    alarm = next(found for part in parts if (found := watching.add(part)))
    assert alarm.kind == "appearance" and "parts or material" in alarm.text
    assert alarm.moves[0].statistic in ("features", "score")


def test_lots_too_small_for_a_window_take_no_memory() -> None:
    windows = _Windows()
    part = next(Line().stream(np.random.default_rng(0), 1, 0, "part "))
    for number in range(OPEN + 50):
        assert windows.add(replace(part, lot=f"lot {number}")) is None
    assert len(windows._open) == OPEN
    last = [windows.add(replace(part, lot=f"lot {OPEN + 49}")) for _ in range(WINDOW)]
    assert [window is not None for window in last] == [False] * 3 + [True, False]


def test_the_same_parts_give_the_same_alarms() -> None:
    line = replace(STABLE["memory of 0.6"], parts=100)
    first, second = (alarms(line, 2, 5, length=10) for _ in range(2))
    assert first and first == second


def test_image_statistics_by_hand() -> None:
    pixels = np.random.default_rng(0).random((7, 9, 3))
    grey = pixels.mean(axis=2)
    found = image_statistics(pixels)
    padded = np.pad(grey, 1, mode="symmetric")
    edges = [
        abs(padded[y, x + 1] + padded[y + 2, x + 1] + padded[y + 1, x] + padded[y + 1, x + 2]
            - 4 * padded[y + 1, x + 1])
        for y in range(7) for x in range(9)
    ]  # fmt: skip
    assert found.brightness == pytest.approx(grey.mean(), rel=1e-5)
    assert found.contrast == pytest.approx(grey.std() / grey.mean(), rel=1e-5)
    assert found.sharpness == pytest.approx(np.mean(edges) / grey.std(), rel=1e-4)
    half = image_statistics(pixels / 2)
    assert half == pytest.approx((found.brightness / 2, *found[1:]), rel=1e-4)
    assert image_statistics(np.zeros((4, 4, 3))) == (0, 0, 0)


def test_what_is_refused() -> None:
    rng = np.random.default_rng(0)
    parts = list(Line(parts=LEAST * WINDOW).stream(rng, 1, 0, "part "))
    raised(lambda: Monitor(parts[:-1]), f"{LEAST - 1} independent windows", "give more parts")
    raised(lambda: Monitor([]), "0 independent windows")
    raised(lambda: Monitor(parts, days=0.5), "days = 0.5", error=SettingsError)
    watching = Monitor(parts)

    def added(features: NDArray[np.float64], score: float = 0.0) -> None:
        watching.add(replace(parts[0], features=features, score=score))

    raised(lambda: added(np.zeros(2)), "part 0", "shape (2,)")
    raised(lambda: added(np.full(6, np.nan)), "part 0", "not finite")
    raised(lambda: added(np.zeros(6), np.inf), "not finite", error=DataError)
