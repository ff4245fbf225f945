"""Overlays and the report: what is drawn, what is told, and that odd input breaks neither."""

import json
import os
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from tests.helpers import WHITE

from cdgp.data.images import read_image
from cdgp.evaluation import ScoredImage, image_metrics, pixel_metrics
from cdgp.inference import Prediction, Region, find_regions
from cdgp.metrics.reliability import reliability_curve
from cdgp.presets import settings
from cdgp.report import charts
from cdgp.report.html import galleries, told, training_charts, write_report
from cdgp.report.overlay import (
    ANCHORS,
    MAX_BOXES,
    heat,
    output_name,
    overlay,
    panels,
    probability,
    write_overlay,
)

SCALE = (0.0, 10.0)
LEVEL = 8.0
VOID = {"meta", "img", "br", "link", "input", "hr"}


class StubDetector:
    """Bright pixels are surprising; nothing is trained."""

    settings = settings("lite", input_size=(64, 64))
    threshold = 0.5
    colour_scale = SCALE
    region_level = LEVEL

    def __init__(self, notes=(), bound=None):
        self.card = SimpleNamespace(
            decision=SimpleNamespace(
                threshold=self.threshold, source="the default", false_reject_bound=bound
            ),
            image=SimpleNamespace(notes=notes),
            provenance={"cdgp": "0.1.0", "versions": {"torch": "2.9"}},
        )

    def predict(self, path):
        return predicted(read_image(path, WHITE).max(axis=2) * 10)


def predicted(surprisal, score=0.9):
    surprisal = np.asarray(surprisal, np.float32)
    marked = surprisal > LEVEL
    regions = find_regions(surprisal, LEVEL)
    return Prediction(surprisal - 0.1, surprisal, score, score > 0.5, regions, marked)


def row(name, score, defective=None, regions=(), path=Path("gone.png")):
    return ScoredImage(name, path, "test", defective, score, score > 0.5, regions)


def on_disk(folder, name, score, defective=None):
    """A row whose image exists: 40 × 30, dark, with a bright spot."""
    pixels = np.full((30, 40, 3), 60, np.uint8)
    pixels[10:14, 20:26] = 250
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")
    spot = Region(x=20, y=10, width=6, height=4, area=24, peak=9.8)
    return row(name, score, defective, (spot,), path)


class Page(HTMLParser):
    """Tags with attributes, the text, and whether every tag is closed in order."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.open, self.words = [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())

    def all(self, tag, key):
        return [attrs[key] for name, attrs in self.tags if name == tag and key in attrs]


def luminance(colours):
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    unit = np.asarray(colours) / 255
    linear = np.where(unit <= 0.04045, unit / 12.92, ((unit + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def lightness(colours):
    return 116 * np.cbrt(luminance(colours)) - 16


# Colours


def test_heat_rises_in_luminance_from_near_black_to_pale():
    ramp = heat(np.linspace(0, 10, 500, dtype=np.float32)[None], SCALE)
    assert ramp.shape == (1, 500, 3)
    assert ramp.dtype == np.uint8
    values = luminance(ramp[0])
    assert (np.diff(values) >= -1e-3).all()  # one step of 8-bit rounding
    assert values[0] < 0.01
    assert values[-1] > 0.9


def test_anchors_are_evenly_spaced_in_lightness():
    steps = np.diff(lightness(ANCHORS))
    assert steps.min() > 0.7 * steps.mean()
    assert steps.max() < 1.3 * steps.mean()


def test_heat_clips_to_its_scale_and_bears_an_empty_one():
    ends = heat(np.array([[-5, 0, 10, 99]], np.float32), SCALE)[0].tolist()
    assert ends[0] == ends[1] == list(ANCHORS[0])
    assert ends[2] == ends[3] == list(ANCHORS[-1])
    assert heat(np.zeros((1, 1), np.float32), (0.0, 0.0)).tolist() == [[list(ANCHORS[0])]]


# Overlays


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
def test_panels_have_one_size_and_lie_as_the_shape_asks(height, width, panel, stacked):
    image = np.zeros((height, width, 3), np.float32)
    prediction = predicted(np.zeros((height, width)))
    plain, laid = panels(image, prediction, SCALE)
    assert plain.size == laid.size == panel
    drawn = overlay(image, prediction, SCALE)
    across = (panel[0], 2 * panel[1]) if stacked else (2 * panel[0], panel[1])
    assert drawn.width >= across[0]
    assert across[1] < drawn.height < across[1] + 60  # gap and caption


@pytest.mark.parametrize("shade", [0.0, 1.0])
def test_boxes_stand_around_regions_on_dark_and_light(shade):
    image = np.full((300, 300, 3), shade, np.float32)
    surprisal = np.zeros((300, 300))
    surprisal[100:120, 150:180] = 9
    plain, laid = panels(image, predicted(surprisal), SCALE)
    inner, outer = np.asarray(laid)[98, 148:182], np.asarray(laid)[97, 147:183]
    assert (inner == 255).all()
    assert (outer == 0).all()
    assert (np.asarray(plain) == round(shade * 255)).all()
    assert (np.asarray(laid)[100:120, 150:180] != round(shade * 255)).any(axis=2).all()


def test_boxes_at_the_edges_stay_within_the_image():
    surprisal = np.full((300, 300), 9.0)
    _, laid = panels(np.full((300, 300, 3), 0.5, np.float32), predicted(surprisal), SCALE)
    pixels = np.asarray(laid)
    assert (pixels[0] == 0).all()
    assert (pixels[1, 1:-1] == 255).all()
    assert (pixels[-1] == 0).all()
    assert (pixels[-2, 1:-1] == 255).all()


def test_only_the_highest_regions_are_boxed():
    surprisal = np.zeros((300, 300))
    for i in range(MAX_BOXES + 1):
        x, y = 20 + 40 * (i % 7), 20 + 40 * (i // 7)
        surprisal[y : y + 6, x : x + 6] = 9.9 - i * 0.01
    prediction = predicted(surprisal)
    _, laid = panels(np.zeros((300, 300, 3), np.float32), prediction, SCALE)
    corners = [(np.asarray(laid)[r.y - 2, r.x - 2] == 255).all() for r in prediction.regions]
    assert corners == [True] * MAX_BOXES + [False]


def test_quiet_areas_keep_their_image():
    image = np.random.default_rng(0).random((300, 300, 3), np.float32)
    plain, laid = panels(image, predicted(np.full((300, 300), 1.0)), SCALE)
    assert np.abs(np.asarray(plain, int) - np.asarray(laid, int)).max() <= 8


def test_write_overlay_leaves_one_png(tmp_path):
    path = tmp_path / "deep" / "part.jpg.png"
    write_overlay(path, np.zeros((40, 40, 3), np.float32), predicted(np.zeros((40, 40))), SCALE)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    with Image.open(path) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.0004, "<0.001"), (0.5, "0.500"), (0.9996, ">0.999"), (1.0, "1.000")],
)
def test_probability_is_never_rounded_to_certainty(value, text):
    assert probability(value) == text


# Output names


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
def test_output_names_are_safe_everywhere(name):
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
def test_output_names_are_distinct(first, second):
    assert (output_name(first) == output_name(second)) == (first == second)


@given(st.lists(st.text(max_size=15), min_size=1, max_size=3).map("/".join))
def test_output_names_decode_to_the_name(name):
    parts = [unquote_to_bytes(part).decode() for part in output_name(name).split("/")]
    assert parts == [part or "%" for part in name.split("/")]


def test_output_names_keep_what_is_harmless():
    for name in ("good/000.png", "line 2/Prüfteil_1+2 (a).jpg", "部品/001.tif"):
        assert output_name(name) == name


# Histogram and galleries


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.lists(st.floats(0, 1), max_size=60),
    st.one_of(st.floats(1e-9, 1 - 1e-9), st.sampled_from([0.5, 1e-4])),
)
def test_histogram_counts_everything_on_its_side_of_the_threshold(good, defective, threshold):
    scores = [*good, threshold]  # exactly at the threshold: called good
    found = charts.histogram({"good": scores, "defective": defective}, threshold)
    assert sum(found.counts["good"]) == len(scores)
    assert sum(found.counts["defective"]) == len(defective)
    edge = int(np.argmin(np.abs(np.array(found.edges) - charts.log_odds(threshold))))
    assert found.edges[edge] == pytest.approx(float(charts.log_odds(threshold)), abs=1e-9)
    above = charts.log_odds(scores) > charts.log_odds(threshold)
    assert sum(found.counts["good"][edge:]) == above.sum()
    assert len(found.edges) == len(found.counts["good"]) + 1 <= 200


def test_histogram_bars_carry_the_counts():
    groups = {"good": [0.1, 0.1, 0.2, 0.7], "defective": [0.99, 1.0]}
    chart = charts.histogram_chart(charts.histogram(groups, 0.5), 0.5)
    for name, scores in groups.items():
        bars = re.findall(rf'class="bar {name}" data-count="(\d+)"', chart)
        assert sum(map(int, bars)) == len(scores)


def test_reliability_chart_has_a_dot_for_every_bin_with_images():
    chart = charts.reliability_chart(reliability_curve([0.05, 0.06, 0.5, 1.0], [0, 0, 1, 1]))
    assert chart.count("<circle") == 3


ROWS = [
    row("good right", 0.01, False),
    row("good doubtful", 0.45, False),
    row("reject mild", 0.6, False),
    row("reject worst", 0.99, False),
    row("defective right", 0.98, True),
    row("miss mild", 0.3, True),
    row("miss worst", 0.02, True),
]


def test_galleries_come_worst_first():
    shown = {g.title: [r.name for r in g.rows] for g in galleries(ROWS, 0.5)}
    assert list(shown.values()) == [
        ["miss worst", "miss mild"],
        ["reject worst", "reject mild"],
        ["good doubtful", "reject mild", "miss mild", "defective right", "miss worst",
         "good right", "reject worst"],
        ["reject worst", "defective right", "reject mild", "good doubtful", "miss mild",
         "miss worst", "good right"],
    ]  # fmt: skip


def test_doubt_is_measured_in_log_odds_and_galleries_are_short():
    rows = [row(f"{p}", p) for p in (0.0005, 0.002, 0.1)] + [row(f"x{i}", 0.9) for i in range(9)]
    doubtful, most = galleries(rows, 0.001)
    assert [r.name for r in doubtful.rows][:3] == ["0.0005", "0.002", "0.1"]
    assert len(doubtful.rows) == len(most.rows) == 8


def test_equal_probabilities_are_told_apart_by_their_peaks():
    peaks = [Region(0, 0, 1, 1, 1, peak) for peak in (8.5, 9.5)]
    rows = [row("a", 1.0, regions=(peaks[0],)), row("b", 1.0, regions=(peaks[1],)), row("c", 1.0)]
    assert [r.name for r in galleries(rows, 0.5)[1].rows] == ["b", "a", "c"]


# Metrics and training


def test_undefined_metrics_are_a_dash_with_their_reason():
    (shown,) = told({"escape": None, "escape_reason": "no defective image"}, {"escape": "words"})
    assert (shown.name, shown.value, shown.reason) == ("Escape", "–", "no defective image")
    (zero,) = told({"overkill": 0.0}, {"overkill": "words"})
    assert (zero.value, zero.reason) == ("0.0 %", None)


def test_training_charts_take_the_later_of_two_equal_steps_and_leave_out_nonsense():
    log = [
        {"stage": "Dual GP", "step": 0, "loss": 99.0, "margin_good": 0.1},
        {"stage": "Dual GP", "step": 0, "loss": 1.0, "margin_good": 0.1, "margin_defective": 0.2},
        {"stage": "Dual GP", "step": 10, "loss": float("nan"), "margin_good": None},
        {"stage": "Dual GP", "separation": 0.9},
        {"stage": "Reverse student", "step": 0, "loss": 0.5},
    ]
    captions = dict(training_charts(log))
    assert list(captions) == ["Dual GP: margins", "Dual GP: loss", "Reverse student: loss"]
    assert "99" not in captions["Dual GP: loss"]


# The page


@dataclass
class Written:
    page: Page
    size: int


def write(tmp_path, rows, metrics, detector=None, **extra):
    out = tmp_path / "out" / "report.html"
    write_report(out, "Line <2>", detector or StubDetector(), rows, metrics, "7 images", extra)
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    return Written(Page(out), out.stat().st_size)


def evaluated(rows, detector):
    metrics = image_metrics(rows, detector) | pixel_metrics([], [], [])
    return metrics | {"notes": {"defective_without_mask": [r.name for r in rows if r.defective]}}


def test_report_of_labelled_images(tmp_path):
    detector = StubDetector(notes=("a single defective image",), bound=0.05)
    rows = [on_disk(tmp_path, f"{r.name}.png", r.pred_score, r.defective) for r in ROWS]
    log = [{"stage": "Dual GP", "step": s, "loss": 1 / (s + 1), "margin_good": 0.0} for s in (0, 9)]
    written = write(tmp_path, rows, evaluated(rows, detector), detector,
                    log=log, manifest_counts={"fit": (20, 10)})  # fmt: skip
    page = written.page
    assert page.tags[0] == ("html", {"lang": "en"})
    assert "Line <2>" in page.text
    assert "4 good, 3 defective" in page.text
    assert "with a probability of at most 5 %" in page.text
    assert "2 of 4 good parts rejected" in page.text
    assert "2 of 3 defective parts passed" in page.text
    assert "Undefined: no marked pixel." in page.text
    assert "Calibration: a single defective image." in page.text
    assert "Defective without a mask" in page.text
    assert "Most wrong" in page.text
    assert "Dual GP: margins" in page.text
    assert '"input_size": [ 64, 64 ]' in page.text
    assert '{"torch": "2.9"}' in page.text
    images = page.all("img", "src")
    assert len(images) == 2 * (2 + 2 + 7 + 7)
    assert all(source.startswith("data:image/jpeg;base64,") for source in images)
    assert all(page.all("img", "alt"))
    counts = [int(count) for count in page.all("rect", "data-count")]
    assert sum(counts) == len(rows)
    assert written.size < 1_000_000


def test_report_needs_nothing_from_outside(tmp_path):
    rows = [on_disk(tmp_path, "a.png", 0.9, True), on_disk(tmp_path, "b.png", 0.1, False)]
    page = write(tmp_path, rows, evaluated(rows, StubDetector())).page
    assert not re.search(r"https?://", page.source)
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    assert set(page.all("a", "href")) == {"../a.png", "../b.png"}


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses these names")
def test_report_escapes_names(tmp_path):
    names = ["<b>&\"'.png", "[x] {{ 7*7 }} %20#?.png", "🔩 ü.png", os.fsdecode(b"byte\xff.png")]
    rows = [on_disk(tmp_path, f"sub/{name}", 0.9) for name in names]
    page = write(tmp_path, rows, None).page
    shown = [*names[:3], "byte\\udcff.png"]
    for name in shown:
        assert f"sub/{name}" in page.text
        assert f"Image sub/{name}" in page.all("img", "alt")
    links = {unquote_to_bytes(link) for link in page.all("a", "href")}
    assert links == {b"../sub/" + os.fsencode(name) for name in names}
    assert all(re.fullmatch(r"[\w./%~-]+", link) for link in page.all("a", "href"))


def test_report_without_labels_shows_no_errors(tmp_path):
    rows = [on_disk(tmp_path, f"{i}.png", 0.1 * i) for i in range(9)]
    page = write(tmp_path, rows, None).page
    assert "· computed on 7 images A part" in page.text
    assert re.search(r"Images ?9 Called defective ?3 Called good ?6", page.text)
    assert "Most doubtful" in page.text
    assert "Most wrong" not in page.text
    assert "perfect" not in page.text
    assert "labelled" not in page.text
    assert sum(map(int, page.all("rect", "data-count"))) == 9


def test_missing_and_broken_images_are_told_and_skipped(tmp_path):
    rows = [on_disk(tmp_path, f"{i}.png", 0.9) for i in range(3)]
    rows[0].path.unlink()
    rows[1].path.write_bytes(b"")
    page = write(tmp_path, rows, None).page
    assert page.text.count("Not shown: there is no such file.") == 2  # once a gallery
    assert page.text.count("Not shown: is empty (0 bytes); copy it again.") == 2
    assert len(page.all("img", "src")) == 2 * 2


@pytest.mark.parametrize("scores", [[], [0.5], [1.0, 1.0], [0.0, 1.0]])
def test_report_of_few_or_extreme_scores(tmp_path, scores):
    rows = [on_disk(tmp_path, f"{i}.png", score) for i, score in enumerate(scores)]
    page = write(tmp_path, rows, None).page
    assert sum(map(int, page.all("rect", "data-count"))) == len(scores)
    assert not re.search(r"\b(nan|inf)\b", page.source)


def test_one_class_alone(tmp_path):
    rows = [on_disk(tmp_path, f"{i}.png", 0.1 * i, False) for i in range(3)]
    page = write(tmp_path, rows, evaluated(rows, StubDetector())).page
    assert "Undefined: no defective image." in page.text
    assert "None: every defective part was rejected." not in page.text


def test_full_galleries_of_noise_stay_small(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for i in range(40):
        made = on_disk(tmp_path, f"{i}.png", (i % 20) / 20 + 0.02, i >= 20)
        Image.fromarray(rng.integers(0, 256, (320, 320, 3), np.uint8)).save(made.path)
        rows.append(replace(made, regions=()))
    assert write(tmp_path, rows, evaluated(rows, StubDetector())).size < 2_700_000


def test_settings_in_the_page_are_the_settings(tmp_path):
    page = write(tmp_path, [], None).page
    source = page.source.split("<pre>")[1].split("</pre>")[0].replace("&#34;", '"')
    assert json.loads(source) == StubDetector.settings.model_dump(mode="json")
