"""Colours, overlays and output names: odd input breaks none of them."""

import os
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageFont
from tests.cdgp.report.stubs import SCALE, predicted

from cdgp.report.overlay import (
    ANCHORS,
    MAX_BOXES,
    SCORE_NAMES,
    _caption,
    heat,
    output_name,
    overlay,
    panels,
    score_text,
    write_overlay,
)


def luminance(colours: ArrayLike) -> NDArray[np.float64]:
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    unit = np.asarray(colours) / 255
    linear = np.where(unit <= 0.04045, unit / 12.92, ((unit + 0.055) / 1.055) ** 2.4)
    return np.asarray(linear @ np.array([0.2126, 0.7152, 0.0722]))


def lightness(colours: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(116 * np.cbrt(luminance(colours)) - 16)


def test_heat_rises_in_luminance_from_near_black_to_pale() -> None:
    ramp = heat(np.linspace(0, 10, 500, dtype=np.float32)[None], SCALE)
    assert ramp.shape == (1, 500, 3)
    assert ramp.dtype == np.uint8
    values = luminance(ramp[0])
    assert (np.diff(values) >= -1e-3).all()  # one step of 8-bit rounding
    assert values[0] < 0.01
    assert values[-1] > 0.9


def test_anchors_are_evenly_spaced_in_lightness() -> None:
    steps = np.diff(lightness(ANCHORS))
    assert steps.min() > 0.7 * steps.mean()
    assert steps.max() < 1.3 * steps.mean()


def test_heat_clips_to_its_scale_and_bears_an_empty_one() -> None:
    ends = heat(np.array([[-5, 0, 10, 99]], np.float32), SCALE)[0].tolist()
    assert ends[0] == ends[1] == list(ANCHORS[0])
    assert ends[2] == ends[3] == list(ANCHORS[-1])
    assert heat(np.zeros((1, 1), np.float32), (0.0, 0.0)).tolist() == [[list(ANCHORS[0])]]


@pytest.mark.parametrize(
    ("height", "width", "panel", "stacked"),
    [
        (100, 80, (205, 256), False),
        (300, 300, (300, 300), False),
        (2048, 512, (256, 1024), False),
        (300, 900, (900, 300), True),
        (10, 4096, (1024, 2), True),
        (4096, 8, (2, 1024), False),
    ],
)
def test_panels_have_one_size_and_lie_as_the_shape_asks(
    height: int, width: int, panel: tuple[int, int], stacked: bool
) -> None:
    image = np.zeros((height, width, 3), np.float32)
    prediction = predicted(np.zeros((height, width)))
    plain, laid = panels(image, prediction, SCALE)
    assert plain.size == laid.size == panel
    drawn = overlay(image, prediction, SCALE)
    across = (panel[0], 2 * panel[1]) if stacked else (2 * panel[0], panel[1])
    assert drawn.width >= across[0]
    assert across[1] < drawn.height < across[1] + 60  # gap and caption


@pytest.mark.parametrize("shade", [0.0, 1.0])
def test_boxes_stand_around_regions_on_dark_and_light(shade: float) -> None:
    image = np.full((300, 300, 3), shade, np.float32)
    surprisal = np.zeros((300, 300))
    surprisal[100:120, 150:180] = 9
    plain, laid = panels(image, predicted(surprisal), SCALE)
    inner, outer = np.asarray(laid)[98, 148:182], np.asarray(laid)[97, 147:183]
    assert (inner == 255).all()
    assert (outer == 0).all()
    assert (np.asarray(plain) == round(shade * 255)).all()
    assert (np.asarray(laid)[100:120, 150:180] != round(shade * 255)).any(axis=2).all()


def test_boxes_at_the_edges_stay_within_the_image() -> None:
    surprisal = np.full((300, 300), 9.0)
    _, laid = panels(np.full((300, 300, 3), 0.5, np.float32), predicted(surprisal), SCALE)
    pixels = np.asarray(laid)
    assert (pixels[0] == 0).all()
    assert (pixels[1, 1:-1] == 255).all()
    assert (pixels[-1] == 0).all()
    assert (pixels[-2, 1:-1] == 255).all()


def test_only_the_highest_regions_are_boxed() -> None:
    surprisal = np.zeros((300, 300))
    for i in range(MAX_BOXES + 1):
        x, y = 20 + 40 * (i % 7), 20 + 40 * (i // 7)
        surprisal[y : y + 6, x : x + 6] = 9.9 - i * 0.01
    prediction = predicted(surprisal)
    _, laid = panels(np.zeros((300, 300, 3), np.float32), prediction, SCALE)
    corners = [(np.asarray(laid)[r.y - 2, r.x - 2] == 255).all() for r in prediction.regions]
    assert corners == [True] * MAX_BOXES + [False]


def test_quiet_areas_keep_their_image() -> None:
    image = np.random.default_rng(0).random((300, 300, 3), np.float32)
    plain, laid = panels(image, predicted(np.full((300, 300), 1.0)), SCALE)
    assert np.abs(np.asarray(plain, int) - np.asarray(laid, int)).max() <= 8


def test_write_overlay_leaves_one_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "part.png.jpg"
    write_overlay(path, np.zeros((40, 40, 3), np.float32), predicted(np.zeros((40, 40))), SCALE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with Image.open(path) as image:
        assert image.format == "JPEG"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.0004, "<0.001"), (0.5, "0.500"), (0.9996, ">0.999"), (1.0, "1.000")],
)
def test_probability_is_never_rounded_to_certainty(value: float, text: str) -> None:
    assert score_text(value) == text


PARTS = st.one_of(
    st.sampled_from(["..", ".", "", "con", "COM1.png", "nul.tar.gz", "a.png", "a.jpg", " a", "a.",
                     "%2E", "%", "ü", "u\u0308", "C:", "x" * 300, "x" * 299 + "y", "ü" * 200,
                     os.fsdecode(b"\xff.png")]),
    st.text(max_size=12),
    st.text(st.characters(categories=["Cs", "Lu", "Mn", "Po", "Zs"]), max_size=4),
)  # fmt: skip


NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


@given(NAMES)
@example("/etc/passwd")
@example("../../x.png")
@example("C:\\x\\y.png")
def test_output_names_are_safe_everywhere(name: str) -> None:
    made = output_name(name)
    assert not PurePosixPath(made).is_absolute()
    assert not PureWindowsPath(made).anchor
    assert not PureWindowsPath(made).is_reserved()
    for part in made.split("/"):
        assert part
        assert len(f"{part}.png".encode()) <= 200  # and it is UTF-8
        assert part[0] not in " ."
        assert part[-1] not in " ."
        assert not re.search(r'[\x00-\x1f<>:"\\|?*\x7f]', part)


@given(NAMES, NAMES)
@example("ü.png", "u\u0308.png")
@example("a", "./a")
@example("a/b", "a//b")
@example("%2E%2E", "..")
@example("x" * 300, "x" * 301)
@example("\udcc3\udcbc\u0300", "ü\u0300")
def test_output_names_are_distinct(first: str, second: str) -> None:
    assert (output_name(first) == output_name(second)) == (first == second)


@given(st.lists(st.text(max_size=15), min_size=1, max_size=3).map("/".join))
def test_output_names_decode_to_the_name(name: str) -> None:
    parts = [unquote_to_bytes(part).decode() for part in output_name(name).split("/")]
    assert parts == [part or "%" for part in name.split("/")]


def test_output_names_keep_what_is_harmless() -> None:
    for name in ("good/000.png", "line 2/Prüfteil_1+2 (a).jpg", "部品/001.tif"):
        assert output_name(name) == name


@pytest.mark.parametrize("kind", list(SCORE_NAMES))
def test_captions_name_the_score_in_letters_that_can_be_drawn(kind: str) -> None:
    """A letter that the font lacks is drawn as an empty box."""
    font = ImageFont.load_default(16)
    missing = bytes(font.getmask("\uffff"))
    caption = _caption(replace(predicted(np.zeros((8, 8))), score_kind=kind), coarse=False)
    assert caption.startswith(f"{SCORE_NAMES[kind]} 0.900")
    assert all(bytes(font.getmask(letter)) != missing for letter in caption)
