"""Candidates of a line: models that may become live, tried on the images that the live one is
judged by.

Those are held-out images: of the random share, with a verdict, in a split that no training sees.
Thresholds rest on the calibration split, comparisons on the test split.
"""

import csv
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, func, insert, select

from cdgp import run_folder
from cdgp.errors import CdgpError, DataError, SettingsError, StationError
from cdgp.station import compare, trail
from cdgp.station.pipeline import Pipeline, Policy, live_policy
from cdgp.station.schema import (
    AnyRow,
    candidates,
    images,
    insert_row,
    lines,
    models,
    scores,
    trials,
)

LOOK = 20.0
"""Seconds between two looks for held-out images without a score: each look may load models."""
TRIED = 3
"""So many of a line's newest candidates are scored; older ones keep the scores that they have."""
AT_ONCE = 16
"""Images that one model scores before the next look."""

log = logging.getLogger(__name__)


class Compared(NamedTuple):
    """A candidate beside the live model."""

    scored: int
    """Held-out images that both have scored."""
    of: int
    """Held-out images of the test split."""
    result: compare.Comparison | None
    """None where no image is scored by both."""


class Labelled(NamedTuple):
    """Held-out images with a model's scores; all of one length."""

    images: list[int]
    scores: list[float]
    defective: list[bool]
    groups: list[str]


def held_out(line_id: int, *splits: str) -> ColumnElement[bool]:
    """Images of a line that may judge a model."""
    return and_(
        images.c.line_id == line_id, images.c.audit, images.c.split.in_(splits),
        images.c.verdict.in_(("good", "defective")), images.c.removed_at.is_(None),
    )  # fmt: skip


def add_candidate(pipeline: Pipeline, who: str, line_id: int, path: Path, source: str) -> int:
    """Adopt a model file, or that of a run folder, as a line's candidate; returns the model's id.

    Raises:
        StationError: no such line, or the run was trained on held-out images of the line.
        CdgpError: the model cannot be loaded.
    """
    model = run_folder.model_file(path)
    with pipeline.store.read() as connection:
        line = connection.scalar(select(lines.c.name).where(lines.c.id == line_id))
        if line is None:
            raise StationError(f"line {line_id}: there is none")
        if model != path:
            _check_unseen(connection, line_id, path)
    model_id = pipeline.adopt(model, who, path.name if model != path else "")
    with pipeline.store.write() as connection:
        which = (candidates.c.line_id == line_id) & (candidates.c.model_id == model_id)
        if connection.execute(select(candidates.c.id).where(which)).first() is None:
            insert_row(
                connection, candidates, line_id=line_id, model_id=model_id, source=source,
                added_at=time.time(),
            )  # fmt: skip
            trail.append(connection, who, "candidate added", f"line {line}", after=source)
    return model_id


def _check_unseen(connection: Connection, line_id: int, run: Path) -> None:
    """Refuse a run that was trained on what it would be judged by, as far as its table tells."""
    try:
        with (run / run_folder.MANIFEST).open(encoding="utf-8", errors="replace") as file:
            rows = list(csv.DictReader(file))
    except OSError:
        return
    trained = {row.get("sha256") for row in rows if row.get("split") != "test"}
    test = connection.execute(select(images.c.id, images.c.digest).where(held_out(line_id, "test")))
    seen = [row.id for row in test if row.digest in trained]
    if seen:
        raise StationError(
            f"{run.name}: was trained on {len(seen)} test images of this line, for example image "
            f"{seen[0]}, so a comparison would flatter it; retrain from a snapshot of the line"
        )


def of_line(connection: Connection, line_id: int) -> list[AnyRow]:
    """The candidates of a line with their models, newest first."""
    return list(
        connection.execute(
            select(
                candidates, models.c.name, models.c.digest, models.c.suffix, models.c.threshold,
                models.c.score_kind,
            )
            .join(models, models.c.id == candidates.c.model_id)
            .where(candidates.c.line_id == line_id)
            .order_by(candidates.c.id.desc())
        )
    )  # fmt: skip


def labelled(connection: Connection, line_id: int, model_id: int, split: str) -> Labelled:
    """Held-out images of a split that a model has scored, in the order of their ids."""
    rows = connection.execute(
        select(images.c.id, trials.c.score, images.c.verdict, images.c.group_name)
        .join(trials, trials.c.image_id == images.c.id)
        .where(held_out(line_id, split), trials.c.model_id == model_id)
        .where(trials.c.score.is_not(None))
        .order_by(images.c.id)
    ).fetchall()
    return Labelled(
        [row.id for row in rows], [row.score for row in rows],
        [row.verdict == "defective" for row in rows], [row.group_name for row in rows],
    )  # fmt: skip


def compared(connection: Connection, live: AnyRow, model_id: int, policy: Policy) -> Compared:
    """Compare a candidate under a policy with a live policy, on the line's test images."""
    of = connection.scalar(
        select(func.count()).select_from(images).where(held_out(live.line_id, "test"))
    )
    first = labelled(connection, live.line_id, live.model_id, "test")
    second = labelled(connection, live.line_id, model_id, "test")
    other = dict(zip(second.images, second.scores, strict=True))
    both = [i for i, image in enumerate(first.images) if image in other]
    if not both:
        return Compared(0, of or 0, None)
    result = compare.compare(
        [str(first.images[i]) for i in both],
        [first.defective[i] for i in both],
        compare.Side([first.scores[i] for i in both], Policy(live.accept_below, live.reject_above)),
        compare.Side([other[first.images[i]] for i in both], policy),
        [first.groups[i] for i in both],
    )
    return Compared(len(both), of or 0, result)


def proposed(
    connection: Connection,
    line_id: int,
    model_id: int,
    max_false_rejects: float = 0.01,
    max_doubts: float = 0.05,
) -> tuple[compare.Thresholds | None, str]:
    """Thresholds from budgets and the calibration images, or why there are none."""
    found = labelled(connection, line_id, model_id, "calibration")
    try:
        return compare.choose_thresholds(
            found.scores, found.defective, found.groups, max_false_rejects, max_doubts
        ), ""
    except (SettingsError, DataError) as error:
        return None, str(error)


class Trials:
    """Scores held-out images by live models and candidates, in a thread of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.problem = ""
        """Why held-out images stay without a score; empty where all is well."""
        self.wake = threading.Event()
        """Set it to have the next look at once."""

    def run(self, stop: threading.Event) -> None:
        """Score until ``stop`` is set."""
        busy = False
        while not stop.is_set():
            try:
                done = self.step()
                if busy and not done:
                    self.pipeline.keep_live()
                busy = bool(done)
            except Exception as error:  # a full disk, a database that is away
                log.exception("candidates are not scored for a moment")
                self.problem, busy = f"candidates: {type(error).__name__}: {error}", False
            if not busy:
                self.wake.wait(LOOK)
                self.wake.clear()

    def step(self) -> int:
        """Score some images by one model that lacks them; returns how many."""
        problems = []
        for model_id, name, line_id in self._models():
            with self.pipeline.store.read() as connection:
                missing = connection.execute(
                    select(images.c.id, images.c.digest)
                    .where(held_out(line_id, "calibration", "test"))
                    .where(images.c.id.not_in(
                        select(trials.c.image_id).where(trials.c.model_id == model_id)
                    ))
                    .order_by(images.c.id)
                    .limit(AT_ONCE)
                ).fetchall()  # fmt: skip
            try:
                for row in missing:
                    self._try(model_id, name, row)
            except CdgpError as error:  # of the model; the others go on
                problems.append(f"candidates: {error}")
                continue
            if missing:
                return len(missing)
        self.problem = "; ".join(problems)
        return 0

    def _models(self) -> Iterator[tuple[int, str, int]]:
        """Models to try, their files, and the line of each."""
        with self.pipeline.store.read() as connection:
            found = []
            for line in connection.scalars(select(lines.c.id)).all():
                live = live_policy(connection, line)
                if live:
                    found.append((live.model_id, f"{live.digest}{live.suffix}", line))
                found += [
                    (row.model_id, f"{row.digest}{row.suffix}", line)
                    for row in of_line(connection, line)[:TRIED]
                ]
        yield from found

    def _try(self, model_id: int, name: str, row: AnyRow) -> None:
        with self.pipeline.store.read() as connection:
            known = connection.execute(
                select(scores.c.score)
                .where(scores.c.image_id == row.id, scores.c.model_id == model_id)
                .limit(1)
            ).first()
        values: dict[str, object] = {"score": known.score if known else None, "problem": ""}
        if known is None:
            model = self.pipeline.ready(model_id, name)
            try:
                result = model.score(self.pipeline.intake.path(row.digest))
                self.pipeline.keep_views(row.digest, result, model_id)
                values["score"] = result.score
            except (CdgpError, MemoryError) as error:
                values["problem"] = str(error) or type(error).__name__
        with self.pipeline.store.write() as connection:
            connection.execute(insert(trials).values(image_id=row.id, model_id=model_id, **values))
