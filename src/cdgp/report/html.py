"""One self-contained HTML file that an inspection engineer can read, send and print."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from cdgp.audit.types import Suspect
from cdgp.decision import GOOD_ALONE
from cdgp.evaluation import ScoredImage, interval_text, value_text
from cdgp.files import IN_PAGE, printable, visible, write_text
from cdgp.inference import Detector
from cdgp.metrics.reliability import at_rate, reliability_curve
from cdgp.report import charts
from cdgp.report.galleries import (
    SHOWN,
    Gallery,
    Thumbnail,
    Thumbnails,
    galleries,
    suspect_galleries,
)
from cdgp.report.overlay import SCORE_NAMES, threshold_text
from cdgp.report.page import link, template

CURVE_POINTS = 400

NAMES = {
    "overkill": "Overkill",
    "escape": "Escape",
    "image_auroc": "Image AUROC",
    "expected_calibration_error": "Expected calibration error",
    "pixel_auroc": "Pixel AUROC",
    "pixel_aupro_30": "AUPRO@0.3",
    "pixel_aupro_05": "AUPRO@0.05",
}
"""Name in metrics.json to the field's name."""
WORDS = {
    "overkill": "Share of the images of good parts that were rejected.",
    "escape": "Share of the images of defective parts that passed.",
    "image_auroc": "Chance that a defective part scores above a good one: 1 is perfect, 0.5 is "
    "guessing.",
    "expected_calibration_error": "Mean distance between the predicted probability and the share "
    "of images that are defective, at the share of defective images in this set: 0 is perfect.",
    "pixel_auroc": "Chance that a pixel of a defect scores above a pixel of good surface.",
    "pixel_aupro_30": "Share of each defect's area that is found, averaged over marking up to 30 % "
    "of the good surface by mistake: 1 is perfect.",
    "pixel_aupro_05": "The same, marking at most 5 % of the good surface.",
}
"""The same in plain words, in the order of the table."""
TILES = {
    "overkill": "{false_rejects} of {good} good images rejected",
    "escape": "{misses} of {defective} defective images passed",
    "image_auroc": "1 is perfect, 0.5 is guessing",
    "pixel_aupro_30": "of each defect's area found",
}
NOTES = {
    "defective_without_mask": "Defective without a mask, so counted in the image metrics alone",
    "defective_with_empty_mask": "Defective with an empty mask, so counted in the image metrics "
    "alone",
    "good_with_marked_mask": "Good with a mask that marks something; the marks were not used",
    "images_with_warnings": "Images with warnings of their own, see scores.csv",
    "mask_unusable": "With a mask that cannot be used, so counted in the image metrics alone",
    "mask_cut_at_half": "With a mask that was blurred or compressed",
    "mask_of_several_values": "With a mask of several values",
    "mask_marks_nearly_all": "With a mask that marks nearly all of it, inverted?",
    "trained_on": "The model was trained on these, so they measure nothing new",
    "a_single_good_part": "A single good part: image AUROC, overkill and every score rest on it",
    "a_single_defective_part": "A single defective part: image AUROC, escape and every score rest "
    "on it",
}


@dataclass(frozen=True)
class TrainingFacts:
    """What the report of a training run shows beside the scores."""

    log: Sequence[Mapping[str, Any]] = ()
    """Training records: ``stage``, ``step``, ``loss``, ``margin_good``, ``margin_defective``."""
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(good, defective) by split, as ``Manifest.counts`` gives them."""
    audit: Sequence[str] = ()
    suspects: Sequence[Suspect] = ()


class ShownMetric(NamedTuple):
    """A metric as the page shows it."""

    name: str
    words: str
    value: str
    interval: str
    reason: str | None


class _Card(NamedTuple):
    row: ScoredImage
    link: str
    thumbnail: Thumbnail
    remark: str


def write_report(
    out: Path,
    title: str,
    detector: Detector,
    rows: Collection[ScoredImage],
    metrics: Mapping[str, Any] | None,
    computed_on: str,
    training: TrainingFacts | None = None,
    thumbnails: Thumbnails | None = None,
    run_id: str = "",
) -> None:
    """Write the report of scored images.

    Args:
        out: the HTML file.
        title: its headline.
        detector: that scored the images.
        rows: walked through several times; where all have labels, errors and reliability are shown.
        metrics: as ``metrics.json`` holds them; None where there are no labels.
        computed_on: which images these are, in words: "42 test images".
        training: of a training run, what it shows of the training.
        thumbnails: made while the images were scored; otherwise the images that the galleries show
            are predicted now. One that cannot be read is shown with the reason.
        run_id: of the run that the report belongs to.
    """
    metrics, training = metrics or {}, training or TrainingFacts()
    thumbnails, folder = thumbnails or Thumbnails(detector), out.absolute().parent
    shown = [
        *(galleries(rows, detector.threshold) if rows else ()),
        *suspect_galleries(training.suspects, thumbnails),
    ]

    def card(row: ScoredImage, gallery: Gallery) -> _Card:
        remark = gallery.remarks.get(row.name, "")
        return _Card(row, link(row.path, folder), thumbnails.of(row), remark)

    text = template("report.html.j2").render(
        title=title,
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        computed_on=computed_on,
        decision=detector.card.decision,
        score=SCORE_NAMES[detector.score_kind],
        rests_on=detector.rests_on,
        good_alone=GOOD_ALONE,
        p_value=detector.settings.decision.p_value,
        threshold=threshold_text(detector.threshold, detector.coarse),
        calibrator=detector.card.image,
        coarse=detector.coarse,
        pixels=metrics.get("pictures_with_pixels"),
        warnings=[
            *training.audit,
            *warnings(metrics, detector),
            *(() if metrics else warned_images(rows)),
        ],
        colour_bar=charts.colour_bar(detector.colour_scale, detector.region_level),
        galleries=[(each, [card(row, each) for row in each.rows]) for each in shown],
        training=list(training_charts(training.log)),
        separation=next((r["separation"] for r in training.log[::-1] if "separation" in r), None),
        splits=training.counts,
        settings=json.dumps(
            detector.settings.model_dump(mode="json"), indent=2, ensure_ascii=False
        ),
        provenance={
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in detector.card.provenance.items()
        },
        version=version("cdgp"),
        run_id=run_id,
        **_summary(rows, metrics, detector),
    )
    # File names that are no UTF-8 are shown as scores.csv writes them.
    write_text(out, visible(printable(text), IN_PAGE))


def _summary(
    rows: Collection[ScoredImage], metrics: Mapping[str, Any], detector: Detector
) -> dict[str, Any]:
    """Counts, metrics and charts of all scored images."""
    labelled = bool(rows) and all(row.defective is not None for row in rows)
    reliability, share = None, metrics.get("expected_calibration_error_rate")
    if share is not None:  # with a single part of a label, there is no rate to compare with
        scores, labels = zip(*((row.pred_score, row.defective) for row in rows), strict=True)
        told = at_rate(scores, detector.card.decision.defect_rate, share)
        reliability = charts.reliability_chart(reliability_curve(told, labels))
    counts = {
        "good": sum(row.defective is False for row in rows),
        "defective": sum(row.defective is True for row in rows),
        "false_rejects": sum(row.defective is False and row.pred_label for row in rows),
        "misses": sum(row.defective is True and not row.pred_label for row in rows),
    }
    tiles = {name: words.format(**counts) for name, words in TILES.items()}
    return {
        "images": len(rows),
        "good": counts["good"],
        "defective": counts["defective"],
        "rejected": sum(row.pred_label for row in rows),
        "labelled": labelled,
        "tiles": format_metrics(metrics, tiles),
        "metrics": format_metrics(metrics, WORDS),
        "histogram": _histogram(rows, detector, labelled),
        "reliability": reliability,
        "share": share,
    }


def format_metrics(metrics: Mapping[str, Any], words: Mapping[str, str]) -> list[ShownMetric]:
    """The metrics that have words, as text; an undefined one is a dash with its reason."""
    shown = []
    for name, meaning in words.items():
        if name in metrics:
            why = metrics.get(f"{name}_reason") if metrics[name] is None else None
            text, interval = value_text(metrics, name), interval_text(metrics, name)
            shown.append(ShownMetric(NAMES[name], meaning, text, interval, why))
    return shown


def warnings(metrics: Mapping[str, Any], detector: Detector) -> Iterable[str]:
    """The notes of calibration and evaluation, in words."""
    yield from (f"Calibration: {note}." for note in detector.card.image.notes)
    for key, names in metrics.get("notes", {}).items():
        words = NOTES.get(key, key.replace("_", " ").capitalize())
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{words}: {', '.join(names[:SHOWN])}{more} ({len(names)} in all)."


def warned_images(rows: Iterable[ScoredImage]) -> Iterable[str]:
    """How many images carry warnings of their own, and the first of them.

    The others are not held, so that memory does not grow with them.
    """
    first, number = list[str](), 0
    for row in rows:
        if row.warnings:
            number += 1
            if number <= SHOWN:
                first.append(f"{row.name}: {'; '.join(row.warnings)}")
    if number:
        more = f" and {number - SHOWN} more" if number > SHOWN else ""
        counted = "1 image carries" if number == 1 else f"{number} images carry"
        yield f"{counted} warnings, see scores.csv: {' · '.join(first)}{more}."


def training_charts(log: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Markup]]:
    """(caption, chart) of margins and loss, stage by stage."""
    for stage in dict.fromkeys(str(record["stage"]) for record in log if "step" in record):
        records = [r for r in log if r.get("stage") == stage and "step" in r]
        margins = {
            style: (f"{style} images", points)
            for style in ("good", "defective")
            if (points := _points(records, f"margin_{style}"))
        }
        if margins:
            yield (
                f"{stage}: margins",
                charts.line_chart(f"{stage}: margins over steps", "largest margin", margins),
            )
        if loss := _points(records, "loss"):
            chart = charts.line_chart(
                f"{stage}: loss over steps", "loss", {"accent": ("loss", loss)}
            )
            yield f"{stage}: loss", chart


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """(step, value) by step, at most 400; of a step that was run twice, the later record."""
    values = {
        int(record["step"]): float(record[key])
        for record in records
        if record.get(key) is not None and math.isfinite(record[key])
    }
    points = [(float(step), value) for step, value in sorted(values.items())]
    return points[:: math.ceil(len(points) / CURVE_POINTS) or 1]


def _histogram(rows: Collection[ScoredImage], detector: Detector, labelled: bool) -> Markup | None:
    if not rows:
        return None
    if labelled:
        groups = {
            "good": [row.pred_score for row in rows if not row.defective],
            "defective": [row.pred_score for row in rows if row.defective],
        }
    else:
        groups = {"images": [row.pred_score for row in rows]}
    threshold = detector.threshold
    found = charts.histogram(groups, threshold)
    text, name = threshold_text(threshold, detector.coarse), SCORE_NAMES[detector.score_kind]
    return charts.histogram_chart(found, threshold, text, name)
