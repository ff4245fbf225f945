"""Which images the galleries show, and that none is scored twice for them."""

from pathlib import Path

import numpy as np
from tests.cdgp.report.stubs import ROWS, StubDetector, on_disk, row

from cdgp.audit.types import Suspect
from cdgp.evaluation import ScoredImage
from cdgp.inference import Region
from cdgp.report.galleries import SELECTIONS, SHOWN, Thumbnails, galleries, suspect_galleries


def test_galleries_come_worst_first() -> None:
    shown = {g.title: [r.name for r in g.rows] for g in galleries(ROWS, 0.5)}
    assert list(shown.values()) == [
        ["miss worst", "miss mild"],
        ["reject worst", "reject mild"],
        ["good doubtful", "reject mild", "miss mild", "defective right", "miss worst",
         "good right", "reject worst"],
        ["reject worst", "defective right", "reject mild", "good doubtful", "miss mild",
         "miss worst", "good right"],
    ]  # fmt: skip


def test_doubt_is_measured_in_log_odds_and_galleries_are_short() -> None:
    rows = [row(f"{p}", p) for p in (0.0005, 0.002, 0.1)] + [row(f"x{i}", 0.9) for i in range(9)]
    doubtful, most = galleries(rows, 0.001)
    assert [r.name for r in doubtful.rows][:3] == ["0.0005", "0.002", "0.1"]
    assert len(doubtful.rows) == len(most.rows) == 8


def test_equal_probabilities_are_ordered_by_their_peaks() -> None:
    peaks = [Region(0, 0, 1, 1, 1, peak) for peak in (8.5, 9.5)]
    rows = [row("a", 1.0, regions=(peaks[0],)), row("b", 1.0, regions=(peaks[1],)), row("c", 1.0)]
    assert [r.name for r in galleries(rows, 0.5)[1].rows] == ["b", "a", "c"]


def scored(
    folder: Path, count: int, detector: StubDetector
) -> tuple[list[ScoredImage], Thumbnails]:
    """Rows of images on disk, and the thumbnails that were kept while they were scored."""
    thumbnails = Thumbnails(detector)
    scores = np.random.default_rng(0).permutation(count) / count
    rows = [
        on_disk(folder, f"{i}.png", float(score), defective=bool(i % 3 == 0))
        for i, score in enumerate(scores)
    ]
    for made in rows:
        pixels = detector.read(made.path)
        thumbnails.add(made, pixels, detector.predict_pixels(pixels))
    return rows, thumbnails


def test_galleries_need_no_image_that_was_scored_again(tmp_path: Path) -> None:
    detector = StubDetector()
    rows, thumbnails = scored(tmp_path, 60, detector)
    assert detector.predicted == 60
    shown = {r.path: r for gallery in galleries(rows, 0.5) for r in gallery.rows}
    assert len(shown) > 8
    plain = Thumbnails(detector)
    for made in shown.values():
        assert thumbnails.of(made).image.startswith("data:image/jpeg;base64,")
    assert detector.predicted == 60
    for made in shown.values():  # the same as from the files
        assert thumbnails.of(made)[1:] == plain.of(made)[1:]
    assert detector.predicted == 60 + len(shown)


def test_memory_for_thumbnails_is_bounded(tmp_path: Path) -> None:
    detector = StubDetector()
    rows, thumbnails = scored(tmp_path, 100, detector)
    assert len(thumbnails._kept) <= SHOWN * len(SELECTIONS)
    assert set(thumbnails._kept) == {r.path for g in galleries(rows, 0.5) for r in g.rows}


def test_images_to_keep_are_kept_whatever_their_score(tmp_path: Path) -> None:
    detector = StubDetector()
    rows = [on_disk(tmp_path, f"{i}.png", i / 40) for i in range(40)]
    kept = rows[5]
    assert all(kept not in gallery.rows for gallery in galleries(rows, 0.5))
    thumbnails = Thumbnails(detector, keep=[kept.path])
    for made in rows:
        pixels = detector.read(made.path)
        thumbnails.add(made, pixels, detector.predict_pixels(pixels))
    assert thumbnails.of(kept).row == kept
    assert detector.predicted == 40


def test_suspects_come_by_label_without_those_that_are_gone(tmp_path: Path) -> None:
    detector = StubDetector()
    rows = [on_disk(tmp_path, f"{i}.png", 0.5) for i in range(4)]
    suspects = [
        Suspect(r.name, r.path, defective, "fit", 0.9)
        for r, defective in zip(rows, (False, False, True, True), strict=True)
    ]
    rows[1].path.unlink()
    good, defective = suspect_galleries(suspects, Thumbnails(detector))
    assert [r.name for r in good.rows] == ["0.png"]
    assert [r.name for r in defective.rows] == ["2.png", "3.png"]
    assert "P = 0.90" in good.remarks["0.png"] and "P = 0.10" in defective.remarks["2.png"]
