"""The simulated days: what is reviewed, trained on and measured under each policy."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cdgp.data.manifest import Manifest, Sample, WeakSplit
from cdgp_bench import grid
from cdgp_bench.rows import read_rows
from cdgp_bench.studies import loop

DAYS = range(loop.DAYS + 1)


@pytest.fixture
def line(tmp_path: Path) -> loop.Line:
    """Pairs of images share a group; every ninth group is defective."""
    samples = [
        Sample(tmp_path / f"{i:04}.png", (i // 2) % 9 == 0, group=f"g{i // 2}",
               split="test" if i < 100 else "train", sha256=f"{i:064x}", pixel_sha256=f"{i:064x}")
        for i in range(1000)
    ]  # fmt: skip
    return loop.line_of(Manifest(tmp_path, tuple(samples)), 0)


@pytest.fixture
def trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[WeakSplit]:
    """What each day's model was given; the model knows the truth."""
    given: list[WeakSplit] = []

    def score(paths: Sequence[Path]) -> Iterator[Any]:
        for path in paths:
            yield SimpleNamespace(image_score=float((int(path.stem) // 2) % 9 == 0))

    def fit(data: WeakSplit, *_: object) -> Any:
        given.append(data)
        return SimpleNamespace(score=score)

    monkeypatch.setitem(grid.METHODS, "cdgp", grid.METHODS["cdgp"]._replace(fit=fit))
    monkeypatch.setattr(loop, "OUT", tmp_path / "loop.jsonl")
    return given


def test_parts_come_once_and_groups_keep_their_split(line: loop.Line) -> None:
    came = [*line.first, *(s for day in line.days for s in day)]
    assert len({s.image for s in came}) == len(came)
    assert not {s.image for s in came} & {s.image for s in line.test.of("test")}
    split: dict[str | None, str | None] = {}
    for sample in came:
        assert split.setdefault(sample.group, sample.split) == sample.split
    assert set(split.values()) == {"fit", "calibration"}


@pytest.mark.parametrize("policy", loop.POLICIES)
def test_days_under_a_policy(line: loop.Line, trained_on: list[WeakSplit], policy: str) -> None:
    loop.ten_days(line, policy, 0)
    assert len(trained_on) == len(DAYS)
    rows = read_rows(loop.OUT)
    assert [row["reviewed"] for row in rows] == [loop.REVIEWS * day for day in DAYS]
    assert all((row["auroc"], row["escape"]) == (1.0, 0.0) for row in rows), "scores are the truth"
    known = [{s.image for s in data.train} for data in trained_on]
    for day, (before, after) in enumerate(pairwise(known)):
        assert before < after <= before | {s.image for s in line.days[day]}
        assert len(after - before) <= loop.REVIEWS
    # A true score finds every defect that may be trained on; each day has more reviews than those.
    came = [s for day in line.days for s in day if s.defective]
    missed = [s for s in came if s.image not in known[-1]]
    if policy == "suspects":
        assert all(s.split == "calibration" for s in missed), "suspects do not calibrate"
    else:
        assert any(s.split == "fit" for s in missed), "of random review some are not seen"
    assert np.isclose(rows[-1]["defects"], loop.FIRST[True] + len(came) - len(missed))


def test_finished_days_stay(line: loop.Line, trained_on: list[WeakSplit]) -> None:
    loop.ten_days(line, "random", 0)
    rows = read_rows(loop.OUT)
    loop.ten_days(line, "random", 0)
    assert read_rows(loop.OUT) == rows
