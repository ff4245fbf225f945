"""Retraining: a snapshot of a line's bins becomes a manifest, a job, and at last a candidate.

Suspects are a biased sample, so they are trained on and nothing else; calibration and test are of
the random share. Each group keeps the split that it entered with. Jobs work one at a time, in
processes of their own, and outlive the station.
"""

import json
import logging
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from sqlalchemy import Connection, or_, select, update

from cdgp.data.manifest import Manifest, Sample
from cdgp.errors import CdgpError, SettingsError, StationError
from cdgp.files import atomic_write
from cdgp.station import drawing, jobs, messages, trail
from cdgp.station.candidates import add_candidate
from cdgp.station.drawing import Shape
from cdgp.station.intake import Intake
from cdgp.station.pipeline import Pipeline
from cdgp.station.schema import AnyRow, images, insert_row, lines
from cdgp.station.schema import jobs as table

JOBS = "jobs"
TABLE, MASKS = "manifest.csv", "masks"
LOOK = 2.0
"""Seconds between two looks at the jobs."""

log = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """The bins of a line as training may have them."""

    manifest: Manifest
    contradicting: int
    """Files left out since people called them both good and defective."""
    drawn: dict[Path, tuple[tuple[Shape, ...], tuple[int, int]]]
    """Masks of the manifest, which do not exist yet: what was drawn, and (height, width)."""


def snapshot(connection: Connection, intake: Intake, line_id: int, root: Path) -> Snapshot:
    """The judged images of a line; each file once, with its first group.

    What people drew on defective images of the split test are their masks.

    Args:
        connection: to read from.
        intake: that has the files.
        line_id: of the line.
        root: folder of the manifest.
    """
    rows = connection.execute(
        select(images.c.id, images.c.digest, images.c.verdict, images.c.group_name, images.c.split,
               images.c.height, images.c.width)
        .where(images.c.line_id == line_id, images.c.removed_at.is_(None))
        .where(images.c.verdict.in_(("good", "defective")))
        .where(or_(images.c.split == "fit", images.c.audit))
        .order_by(images.c.id)
    ).fetchall()  # fmt: skip
    tested = [row.id for row in rows if row.verdict == "defective" and row.split == "test"]
    drawings = drawing.newest(connection, tested)
    found: dict[str, Sample] = {}
    contradicting, drawn = set[str](), {}
    for row in rows:
        defective = row.verdict == "defective"
        sample = Sample(
            intake.path(row.digest), defective, group=row.group_name, split=row.split,
            sha256=row.digest,
        )  # fmt: skip
        if found.setdefault(row.digest, sample).defective != defective:
            contradicting.add(row.digest)
        elif row.id in drawings and drawings[row.id].shapes:
            path = root / MASKS / f"{row.id}.png"
            drawn[path] = drawings[row.id].shapes, (row.height, row.width)
            kept = found[row.digest]
            found[row.digest] = replace(kept, masks=(*kept.masks, path))
    for key in contradicting:
        for path in found.pop(key).masks:
            del drawn[path]
    return Snapshot(Manifest(root, tuple(found.values())), len(contradicting), drawn)


class Retraining:
    """The jobs of a station. ``run`` starts them one after the other, and takes their models in."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.store = pipeline, pipeline.store
        self.problem = ""
        """Why jobs do not go on; empty where all is well."""
        self._changing = threading.Lock()

    def folder(self, job: AnyRow) -> Path:
        """Where a job works."""
        return self.store.home / JOBS / str(job.folder)

    def status(self, job: AnyRow) -> jobs.Status:
        """How far a job is; failed where its folder is gone, as after a backup was restored."""
        try:
            return jobs.status(self.folder(job))
        except SettingsError as error:
            return jobs.Status("failed", str(error), 0, None, None)

    def create(self, who: tuple[int, str], line_id: int) -> int:
        """Enter a job on the bins as they are now; returns its id.

        Args:
            who: id and name of the user.
            line_id: of the line.

        Raises:
            StationError: no such line, no image to train on, or Windows.
        """
        if not jobs.POSSIBLE:
            raise StationError(
                "jobs run on Linux and macOS alone; use cdgp train, and add its run as a candidate"
            )
        name = secrets.token_hex(8)
        folder = self.store.home / JOBS / name
        with self.store.read() as connection:
            line = connection.scalar(select(lines.c.name).where(lines.c.id == line_id))
            bins, _, drawn = snapshot(connection, self.pipeline.intake, line_id, folder)
        if line is None:
            raise StationError(f"line {line_id}: there is none")
        if not any(not sample.defective for sample in bins.of("fit")):
            raise StationError(
                f"line {line}: no image of the split fit was judged good, so there is nothing to "
                "train on; review some"
            )
        folder.mkdir(parents=True)
        for path, (shapes, size) in drawn.items():
            with atomic_write(path) as temporary:
                Image.fromarray(drawing.mask(shapes, size)).save(temporary, "PNG")
        bins.write_csv(folder / TABLE)
        jobs.create(folder, folder / TABLE, self.pipeline.config.train)
        counts = {split: list(pair) for split, pair in bins.counts().items()}
        with self.store.write() as connection:
            job = insert_row(
                connection, table, line_id=line_id, user_id=who[0], folder=name,
                counts=json.dumps(counts), created_at=time.time(), problem="",
            )  # fmt: skip
            after = {"job": job, "images": counts, "manifest": bins.sha256}
            trail.append(connection, who[1], "retraining asked for", f"line {line}", after=after)
        return job

    def cancel(self, who: str, job_id: int) -> None:
        """End a job; StationError where there is none."""
        job = self._row(job_id)
        with self._changing:
            jobs.cancel(self.folder(job))
        self._note(who, job_id, "job cancelled")

    def retry(self, who: str, job_id: int) -> None:
        """Go on with a job that ended without a model.

        Raises:
            StationError: there is none, it left a model, or another one is at work.
        """
        job = self._row(job_id)
        with self._changing:
            with self.store.read() as connection:
                query = select(table.c.id).where(table.c.ended_at.is_(None), table.c.id != job_id)
                other = connection.scalar(query.limit(1))
            if other is not None:
                raise StationError(f"job {other} is not done yet; cancel it, or wait")
            if job.ended_at is None or job.model_id is not None:
                raise StationError(f"job {job_id}: did neither fail nor was it cancelled")
            with self.store.write() as connection:
                again = update(table).where(table.c.id == job_id)
                connection.execute(again.values(ended_at=None, problem=""))
            jobs.retry(self.folder(job))
        self._note(who, job_id, "job continued")

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set; the jobs themselves go on."""
        while not stop.is_set():
            try:
                self.step()
                self.problem = ""
            except Exception as error:  # a full disk, a database that is away, a lost folder
                log.exception("jobs do not go on for a moment")
                self.problem = f"jobs: {error}"
            stop.wait(LOOK)

    def step(self) -> None:
        """Start the oldest job that has not ended, or enter what it left."""
        with self._changing:
            with self.store.read() as connection:
                query = select(table).where(table.c.ended_at.is_(None)).order_by(table.c.id)
                job = connection.execute(query.limit(1)).first()
            if job is None:
                return
            state = self.status(job).state
            if state in ("waiting", "interrupted", "silent"):
                jobs.start(self.folder(job))
            elif state in jobs.ENDED:
                self._end(job, state)

    def _end(self, job: AnyRow, state: str) -> None:
        model, problem = None, ""
        if state == "finished":
            run = self.folder(job) / jobs.RUN
            try:
                model = add_candidate(
                    self.pipeline, trail.STATION, job.line_id, run, f"job {job.id}"
                )
            except CdgpError as error:
                problem = str(error)
        with self.store.write() as connection:
            done = update(table).where(table.c.id == job.id)
            connection.execute(done.values(ended_at=time.time(), model_id=model, problem=problem))
            messages.job_ended(connection, job, state, model)

    def _row(self, job_id: int) -> AnyRow:
        with self.store.read() as connection:
            row = connection.execute(select(table).where(table.c.id == job_id)).first()
        if row is None:
            raise StationError(f"job {job_id}: there is none")
        return row

    def _note(self, who: str, job_id: int, action: str) -> None:
        with self.store.write() as connection:
            trail.append(connection, who, action, f"job {job_id}")
