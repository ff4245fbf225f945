"""One self-contained HTML file that an inspection engineer can read, send and print."""

import base64
import heapq
import io
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from PIL import Image

from cdgp.audit.suspects import Suspect
from cdgp.data.images import read_image, reason
from cdgp.errors import ImageError
from cdgp.evaluation import ScoredImage
from cdgp.files import printable, write_text
from cdgp.inference import Detector
from cdgp.metrics.reliability import reliability_curve
from cdgp.report import charts
from cdgp.report.overlay import STACKED_FROM, panels, probability

SHOWN = 8
"""Images in a gallery, and names in a warning."""
THUMBNAIL_SIDES = (256, 320)
THUMBNAIL_BYTES = 30_000
"""Quality falls until a thumbnail fits: six full galleries then stay below 4 MB."""
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
    "overkill": "Share of good parts that were rejected.",
    "escape": "Share of defective parts that passed.",
    "image_auroc": "Chance that a defective part scores above a good one: 1 is perfect, 0.5 is "
    "guessing.",
    "expected_calibration_error": "Mean distance between the predicted probability and the share "
    "of parts that are defective: 0 is perfect.",
    "pixel_auroc": "Chance that a pixel of a defect scores above a pixel of good surface.",
    "pixel_aupro_30": "Share of each defect's area that is found, averaged over marking up to 30 % "
    "of the good surface by mistake: 1 is perfect.",
    "pixel_aupro_05": "The same, marking at most 5 % of the good surface.",
}
"""The same in plain words, in the order of the table."""
TILES = {
    "overkill": "{false_rejects} of {good} good parts rejected",
    "escape": "{misses} of {defective} defective parts passed",
    "image_auroc": "1 is perfect, 0.5 is guessing",
    "pixel_aupro_30": "of each defect's area found",
}
RATES = ("overkill", "escape")

NOTES = {
    "defective_without_mask": "Defective without a mask, so counted in the image metrics alone",
    "defective_with_empty_mask": "Defective with an empty mask, so counted in the image metrics "
    "alone",
    "good_with_marked_mask": "Good with a mask that marks something; the marks were not used",
}


class Extra(TypedDict, total=False):
    """What a report can tell beyond the scores."""

    log: Sequence[Mapping[str, Any]]
    """Training records: ``stage``, ``step``, ``loss``, ``margin_good``, ``margin_defective``."""
    manifest_counts: Mapping[str, tuple[int, int]]
    """(good, defective) by split, as ``Manifest.counts`` gives them."""
    audit: Sequence[str]
    """What was noticed of the training images, in words."""
    suspects: Sequence[Suspect]
    """Images whose label is doubtful, the most doubtful first."""


class Gallery(NamedTuple):
    """Images that deserve a look, the first one most."""

    title: str
    why: str
    rows: tuple[ScoredImage, ...]
    remarks: Mapping[str, str] = {}
    """What else is said of an image, by its name."""


class Told(NamedTuple):
    """A metric as it is shown."""

    name: str
    words: str
    value: str
    reason: str | None


class _Thumbnails(NamedTuple):
    """Data URIs of an image and its map, or why there are none."""

    image: str
    heat: str
    stacked: bool
    problem: str | None


@dataclass(frozen=True)
class _Card:
    row: ScoredImage
    link: str
    thumbnails: _Thumbnails
    remark: str


def write_report(
    out: Path,
    title: str,
    detector: Detector,
    rows: Collection[ScoredImage],
    metrics: Mapping[str, Any] | None,
    computed_on: str,
    extra: Extra | None = None,
) -> None:
    """Write the report of scored images whole.

    The images of the galleries are read and predicted again; one that cannot be read any more is
    listed with the reason.

    Args:
        out: the HTML file.
        title: its headline.
        detector: that scored the images.
        rows: the scored images, walked through several times; where all have labels, errors
            and reliability are shown.
        metrics: as `evaluation.evaluate` returns them, or None where there are no labels.
        computed_on: which images these are, in words: "42 test images".
        extra: the training log and the counts of the manifest, where they exist.

    Raises:
        OutputError: the place cannot be written.
    """
    extra = extra or {}
    threshold = detector.threshold
    labelled = bool(rows) and all(row.defective is not None for row in rows)
    viewer = _Viewer(detector, out)
    counts = {
        "good": sum(row.defective is False for row in rows),
        "defective": sum(row.defective is True for row in rows),
        "false_rejects": sum(row.defective is False and row.pred_label for row in rows),
        "misses": sum(row.defective is True and not row.pred_label for row in rows),
    }
    tiles = {name: words.format(**counts) for name, words in TILES.items()}
    text = template("report.html.j2").render(
        title=title,
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        computed_on=computed_on,
        images=len(rows),
        good=counts["good"],
        defective=counts["defective"],
        rejected=sum(row.pred_label for row in rows),
        labelled=labelled,
        decision=detector.card.decision,
        tiles=told(metrics or {}, tiles),
        metrics=told(metrics or {}, WORDS),
        pixels=(metrics or {}).get("pictures_with_pixels"),
        warnings=[*extra.get("audit", ()), *warnings(metrics or {}, detector)],
        histogram=_histogram(rows, threshold, labelled),
        reliability=_reliability(rows) if labelled else None,
        galleries=[
            (gallery, [viewer.card(row, gallery.remarks) for row in gallery.rows])
            for gallery in (
                *(galleries(rows, threshold) if rows else ()),
                *suspect_galleries(extra.get("suspects", ()), detector),
            )
        ],
        colour_bar=charts.colour_bar(detector.colour_scale, detector.region_level),
        training=list(training_charts(extra.get("log", ()))),
        separation=_last(extra.get("log", ()), "separation"),
        splits=extra.get("manifest_counts", {}),
        settings=json.dumps(
            detector.settings.model_dump(mode="json"), indent=2, ensure_ascii=False
        ),
        provenance={
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in detector.card.provenance.items()
        },
        version=version("cdgp"),
    )
    # Names of bytes that are no UTF-8 are shown as scores.csv writes them.
    write_text(out, printable(text))


def galleries(rows: Collection[ScoredImage], threshold: float) -> list[Gallery]:
    """The wrong ones, worst first, where all have labels; the doubtful; the most defective."""
    middle = float(charts.log_odds(threshold))

    def doubt(row: ScoredImage) -> float:
        return abs(float(charts.log_odds(row.pred_score)) - middle)

    def peak(row: ScoredImage) -> float:
        return max((region.peak for region in row.regions), default=0.0)

    found = []
    labelled = all(row.defective is not None for row in rows)
    if labelled and any(row.defective for row in rows):
        misses = [row for row in rows if row.defective and not row.pred_label]
        why = f"{len(misses)} in all, the least suspected first."
        found.append(
            Gallery(
                "Most wrong: defective parts that passed",
                why if misses else "None: every defective part was rejected.",
                _first(misses, lambda row: (row.pred_score, row.name)),
            )
        )
    if labelled and not all(row.defective for row in rows):
        rejects = [row for row in rows if not row.defective and row.pred_label]
        why = f"{len(rejects)} in all, the most suspected first. A wrong label would show up here."
        found.append(
            Gallery(
                "Most wrong: good parts that were rejected",
                why if rejects else "None: every good part passed.",
                _first(rejects, lambda row: (-row.pred_score, row.name)),
            )
        )
    return [
        *found,
        Gallery(
            "Most doubtful",
            "Closest to the threshold in log-odds: the parts that a person should look at.",
            _first(rows, lambda row: (doubt(row), row.name)),
        ),
        Gallery(
            "Most defective",
            "Highest probability first.",
            _first(rows, lambda row: (-row.pred_score, -peak(row), row.name)),
        ),
    ]


def template(name: str) -> Template:
    """A page's template; everything that is put in is escaped."""
    environment = Environment(
        loader=PackageLoader("cdgp.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["p"] = probability
    return environment.get_template(name)


def suspect_galleries(suspects: Sequence[Suspect], detector: Detector) -> Iterable[Gallery]:
    """The images of each label that a classifier without them doubts most."""
    for defective, word, other in ((False, "good", "defective"), (True, "defective", "good")):
        chosen = [s for s in suspects if s.defective == defective][:SHOWN]
        rows, remarks = [], {}
        for s in chosen:
            try:
                found = detector.predict(s.path)
            except ImageError:  # gone since: suspects.csv still names it
                continue
            rows.append(ScoredImage.of(found, s.name, s.path, s.split, s.defective))
            remarks[s.name] = f"looks {other} with P = {s.doubt:.2f} to a classifier without it"
        if rows:
            yield Gallery(
                f"Suspect labels: labelled {word}",
                f"Labelled {word}, and most like {other} to a classifier that was fitted without "
                "them. Look at these first; nothing was relabelled. All are in suspects.csv.",
                tuple(rows),
                remarks,
            )


def _first(
    rows: Iterable[ScoredImage], key: Callable[[ScoredImage], tuple[Any, ...]]
) -> tuple[ScoredImage, ...]:
    return tuple(heapq.nsmallest(SHOWN, rows, key=key))


def told(metrics: Mapping[str, Any], words: Mapping[str, str]) -> list[Told]:
    """The metrics that have words, as shown; an undefined one is a dash with its reason."""
    shown = []
    for name, meaning in words.items():
        if name in metrics:
            value = metrics[name]
            text = "–" if value is None else f"{value:.4f}"
            if name in RATES and value is not None:
                text = f"{100 * value:.1f} %"
            why = metrics.get(f"{name}_reason") if value is None else None
            shown.append(Told(NAMES[name], meaning, text, why))
    return shown


def warnings(metrics: Mapping[str, Any], detector: Detector) -> Iterable[str]:
    """What calibration and evaluation noted, in words."""
    yield from (f"Calibration: {note}." for note in detector.card.image.notes)
    for key, names in metrics.get("notes", {}).items():
        words = NOTES.get(key, key.replace("_", " ").capitalize())
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield f"{words}: {', '.join(names[:SHOWN])}{more} ({len(names)} in all)."


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
    """(step, value) upwards; of a step that was taken twice the later record, at most 400."""
    values = {
        int(record["step"]): float(record[key])
        for record in records
        if record.get(key) is not None and math.isfinite(record[key])
    }
    points = [(float(step), value) for step, value in sorted(values.items())]
    return points[:: math.ceil(len(points) / CURVE_POINTS) or 1]


def _last(log: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((record[key] for record in reversed(log) if key in record), None)


def _histogram(rows: Collection[ScoredImage], threshold: float, labelled: bool) -> Markup | None:
    if not rows:
        return None
    if labelled:
        groups = {
            "good": [row.pred_score for row in rows if not row.defective],
            "defective": [row.pred_score for row in rows if row.defective],
        }
    else:
        groups = {"images": [row.pred_score for row in rows]}
    return charts.histogram_chart(charts.histogram(groups, threshold), threshold)


def _reliability(rows: Collection[ScoredImage]) -> Markup:
    scores, labels = [row.pred_score for row in rows], [bool(row.defective) for row in rows]
    return charts.reliability_chart(reliability_curve(scores, labels))


class _Viewer:
    """Cards of images, each read and predicted once."""

    def __init__(self, detector: Detector, out: Path) -> None:
        self._detector = detector
        self._folder = out.absolute().parent
        self._seen: dict[Path, _Thumbnails] = {}

    def card(self, row: ScoredImage, remarks: Mapping[str, str]) -> _Card:
        if row.path not in self._seen:
            self._seen[row.path] = self._thumbnails(row.path)
        remark = remarks.get(row.name, "")
        return _Card(row, link(row.path, self._folder), self._seen[row.path], remark)

    def _thumbnails(self, path: Path) -> _Thumbnails:
        detector = self._detector
        try:
            image = read_image(path, detector.settings.data.white_level)
            prediction = detector.predict(path)
        except ImageError as error:
            return _Thumbnails("", "", False, reason(error, path))
        plain, laid = panels(image, prediction, detector.colour_scale, THUMBNAIL_SIDES)
        stacked = plain.width >= STACKED_FROM * plain.height
        return _Thumbnails(jpeg(plain), jpeg(laid), stacked, None)


def jpeg(image: Image.Image) -> str:
    """The best JPEG that fits, as data URI."""
    for quality in (88, 75, 60, 40, 20):
        data = io.BytesIO()
        image.save(data, "JPEG", quality=quality)
        if data.tell() <= THUMBNAIL_BYTES:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def link(path: Path, folder: Path) -> str:
    """URL from a file in the folder to the path; relative, so that both can move together."""
    try:
        relative = Path(os.path.relpath(path.absolute(), folder))
    except ValueError:  # another drive
        return path.absolute().as_uri()
    return quote(os.fsencode(relative.as_posix()))
