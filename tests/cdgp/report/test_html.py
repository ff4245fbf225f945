"""The report: what it shows, and that odd input does not break it."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from PIL import Image
from tests.cdgp.report.stubs import ROWS, Page, StubDetector, on_disk

from cdgp.decision import Decision
from cdgp.evaluation import ScoredImage, image_metrics, pixel_metrics
from cdgp.report.html import TrainingFacts, format_metrics, training_charts, write_report


def test_undefined_metrics_are_a_dash_with_their_reason() -> None:
    (shown,) = format_metrics(
        {"escape": None, "escape_reason": "no defective image"}, {"escape": "words"}
    )
    assert (shown.name, shown.value, shown.reason) == ("Escape", "–", "no defective image")
    (zero,) = format_metrics({"overkill": 0.0}, {"overkill": "words"})
    assert (zero.value, zero.reason) == ("0.0 %", None)


def test_training_charts_take_the_later_of_two_equal_steps_and_leave_out_nonsense() -> None:
    log: list[dict[str, Any]] = [
        {"stage": "Dual GP", "step": 0, "loss": 99.0, "margin_good": 0.1},
        {"stage": "Dual GP", "step": 0, "loss": 1.0, "margin_good": 0.1, "margin_defective": 0.2},
        {"stage": "Dual GP", "step": 10, "loss": float("nan"), "margin_good": None},
        {"stage": "Dual GP", "separation": 0.9},
        {"stage": "Reverse student", "step": 0, "loss": 0.5},
    ]
    captions = dict(training_charts(log))
    assert list(captions) == ["Dual GP: margins", "Dual GP: loss", "Reverse student: loss"]
    assert "99" not in captions["Dual GP: loss"]


@dataclass
class Written:
    page: Page
    size: int


def write(
    tmp_path: Path,
    rows: Sequence[ScoredImage],
    metrics: dict[str, Any] | None,
    detector: StubDetector | None = None,
    training: TrainingFacts | None = None,
) -> Written:
    out = tmp_path / "out" / "report.html"
    write_report(out, "Line <2>", detector or StubDetector(), rows, metrics, "7 images", training)
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    return Written(Page(out), out.stat().st_size)


def evaluated(rows: Sequence[ScoredImage], detector: StubDetector) -> dict[str, Any]:
    metrics = image_metrics(rows, detector) | pixel_metrics([], [], [])
    return metrics | {"notes": {"defective_without_mask": [r.name for r in rows if r.defective]}}


def test_report_of_labelled_images(tmp_path: Path) -> None:
    detector = StubDetector(notes=("a single defective image",), bound=0.05)
    rows = [on_disk(tmp_path, f"{r.name}.png", r.pred_score, r.defective) for r in ROWS]
    log = [{"stage": "Dual GP", "step": s, "loss": 1 / (s + 1), "margin_good": 0.0} for s in (0, 9)]
    written = write(tmp_path, rows, evaluated(rows, detector), detector,
                    TrainingFacts(log, {"fit": (20, 10)}))  # fmt: skip
    page = written.page
    assert page.tags[0] == ("html", {"lang": "en"})
    assert "Line <2>" in page.text
    assert "4 good, 3 defective" in page.text
    assert "with a probability of at most 5 %" in page.text
    assert "2 of 4 good images rejected" in page.text
    assert "2 of 3 defective images passed" in page.text
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


def test_what_rests_on_one_part_has_no_four_digits(tmp_path: Path) -> None:
    """One defective part: a count in place of a rate, no calibration error, few digits."""
    detector = StubDetector(notes=("the probability rests on a single defective image",))
    image = detector.card.image._replace(good_groups=9, defective_groups=1)
    decision = Decision(0.54321, "of the test", None).at(0.123456)
    detector.card = detector.card._replace(image=image, decision=decision)
    scores = [0.012345, 0.2, 0.3, 0.98765]
    rows = [on_disk(tmp_path, f"{i}.png", s, i == 3) for i, s in enumerate(scores)]
    page = write(tmp_path, rows, evaluated(rows, detector), detector).page
    assert "rests on 9 good and 1 defective part: with a single one, take it as a rank" in page.text
    assert "12.3 % of parts defective" in page.text
    assert re.search(r"Escape ?0 of 1 ?95 %: 0\.0 to 97\.5 %, 1 group", page.text)
    assert "Undefined: a single group of defective images." in page.text
    assert "Is the probability right?" not in page.text
    told = set(re.findall(r"P\(defective\) ?([<>]?\d\.\d+)", page.text))
    assert told == {"<0.1", "0.2", "0.3", ">0.9"}
    assert f"{decision.threshold:.2g}" in page.text
    assert f"{decision.threshold:.4g}" not in page.text


def test_rates_are_shown_with_their_intervals_and_groups(tmp_path: Path) -> None:
    rows = [on_disk(tmp_path, f"{r.name}.png", r.pred_score, r.defective) for r in ROWS]
    page = write(tmp_path, rows, evaluated(rows, StubDetector())).page
    assert re.search(r"50\.0 % ?95 %: 6\.8 to 93\.2 %, 4 groups", page.text), "2 of 4, exact"
    assert "4 good and 3 defective groups" in page.text
    assert "this set's own share of defective images, 42.9 %" in page.text
    assert "the same number of good and defective parts" in page.text


def test_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    rows = [on_disk(tmp_path, "a.png", 0.9, True), on_disk(tmp_path, "b.png", 0.1, False)]
    page = write(tmp_path, rows, evaluated(rows, StubDetector())).page
    assert not re.search(r"https?://", page.source)
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object"}
    assert set(page.all("a", "href")) == {"../a.png", "../b.png"}


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses these names")
def test_report_escapes_names(tmp_path: Path) -> None:
    names = ["<b>&\"'.png", "[x] {{ 7*7 }} %20#?.png", "🔩 ü.png", "a\x1b[2J\u202egnp.png",
             os.fsdecode(b"byte\xff.png")]  # fmt: skip
    rows = [on_disk(tmp_path, f"sub/{name}", 0.9) for name in names]
    page = write(tmp_path, rows, None).page
    shown = [*names[:3], "a\\x1b[2J\\u202egnp.png", "byte\\udcff.png"]
    for name in shown:
        assert f"sub/{name}" in page.text
        assert f"Image sub/{name}" in page.all("img", "alt")
    links = {unquote_to_bytes(link) for link in page.all("a", "href")}
    assert links == {b"../sub/" + os.fsencode(name) for name in names}
    assert all(re.fullmatch(r"[\w./%~-]+", link) for link in page.all("a", "href"))


def test_report_without_labels_shows_no_errors(tmp_path: Path) -> None:
    rows = [on_disk(tmp_path, f"{i}.png", 0.1 * i) for i in range(9)]
    page = write(tmp_path, rows, None).page
    assert "· computed on 7 images A part" in page.text
    assert re.search(r"Images ?9 Called defective ?3 Called good ?6", page.text)
    assert "Most doubtful" in page.text
    assert "Most wrong" not in page.text
    assert "perfect" not in page.text
    assert "labelled" not in page.text
    assert sum(map(int, page.all("rect", "data-count"))) == 9


def test_missing_and_broken_images_are_listed_and_skipped(tmp_path: Path) -> None:
    rows = [on_disk(tmp_path, f"{i}.png", 0.9) for i in range(3)]
    rows[0].path.unlink()
    rows[1].path.write_bytes(b"")
    page = write(tmp_path, rows, None).page
    assert page.text.count("Not shown: there is no such file.") == 2  # once a gallery
    assert page.text.count("Not shown: is empty (0 bytes); copy it again.") == 2
    assert len(page.all("img", "src")) == 2 * 2


@pytest.mark.parametrize("scores", [[], [0.5], [1.0, 1.0], [0.0, 1.0]])
def test_report_of_few_or_extreme_scores(tmp_path: Path, scores: list[float]) -> None:
    rows = [on_disk(tmp_path, f"{i}.png", score) for i, score in enumerate(scores)]
    page = write(tmp_path, rows, None).page
    assert sum(map(int, page.all("rect", "data-count"))) == len(scores)
    assert not re.search(r"\b(nan|inf)\b", page.source)


def test_one_class_alone(tmp_path: Path) -> None:
    rows = [on_disk(tmp_path, f"{i}.png", 0.1 * i, False) for i in range(3)]
    page = write(tmp_path, rows, evaluated(rows, StubDetector())).page
    assert "Undefined: no defective image." in page.text
    assert "None: every defective part was rejected." not in page.text


def test_full_galleries_of_noise_stay_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(40):
        made = on_disk(tmp_path, f"{i}.png", (i % 20) / 20 + 0.02, i >= 20)
        Image.fromarray(rng.integers(0, 256, (320, 320, 3), np.uint8)).save(made.path)
        rows.append(replace(made, regions=()))
    assert write(tmp_path, rows, evaluated(rows, StubDetector())).size < 2_700_000


def test_settings_in_the_page_are_the_settings(tmp_path: Path) -> None:
    page = write(tmp_path, [], None).page
    source = page.source.split("<pre>")[1].split("</pre>")[0].replace("&#34;", '"')
    assert json.loads(source) == StubDetector().settings.model_dump(mode="json")


def test_a_p_value_is_called_no_probability(tmp_path: Path) -> None:
    detector = StubDetector()
    image = detector.card.image._replace(good_logits=(0.0, 1.0), good_groups=2)
    decision = Decision(0.95, "p-value below 0.05", None, is_p_value=True)
    made = {"rests_on": "good images alone"}
    detector.card = detector.card._replace(image=image, decision=decision, provenance=made)
    metrics = image_metrics(ROWS, detector)
    assert metrics["expected_calibration_error"] is None
    assert (metrics["score_kind"], metrics["rests_on"]) == ("p-value", "good images alone")
    text = write(tmp_path, ROWS, metrics, detector).page.text
    assert "P(defective)" not in text and "Is the probability right?" not in text
    assert "called defective when 1 - p is above 0.95" in text
    assert "its score is no probability" in text and "It rests on 2 good parts set aside" in text
    assert "learnt from good images alone; it gets better with every defective image" in text


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"rests_on": "14 defects of 3 parts"}, "14 defects of 3 parts"),
        ({"counts": {"fit": [9, 2], "calibration": [3, 1], "test": [4, 4]}}, "3 defects"),
        ({}, ""),
    ],
)
def test_what_a_model_rests_on_is_told(tmp_path: Path, made: dict[str, Any], words: str) -> None:
    """Of older models too, which only have their counts."""
    detector = StubDetector()
    detector.card = detector.card._replace(provenance=made)
    assert (detector.score_kind, detector.rests_on) == ("probability", words)
    text = write(tmp_path, ROWS, None, detector).page.text
    assert (f"learnt from {words} beside good images." in text) == bool(words)
    assert "gets better" not in text
