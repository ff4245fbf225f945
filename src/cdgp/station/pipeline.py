"""Images that wait are scored by the live model of their line, and decided by its policy."""

import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sqlalchemy import Connection, func, insert, select, update

from cdgp.data.images import read_image
from cdgp.errors import CdgpError, StationError
from cdgp.files import atomic_write, digest
from cdgp.inference import Detector, load
from cdgp.report.overlay import heat
from cdgp.runtimes.base import cores
from cdgp.station import messages, trail
from cdgp.station.config import Config
from cdgp.station.drift import ImageStatistics, image_statistics
from cdgp.station.intake import Intake
from cdgp.station.schema import AnyRow, images, insert_row, lines, models, policies, scores, users
from cdgp.station.store import Store

MODELS, DERIVED = "models", "derived"
SUFFIXES = (".safetensors", ".onnx")
"""Of models that are one file."""
BATCH = 16
"""Images whose scores are written in one go."""
TRIES = 2
"""An image during which the process ended so often is not tried again."""
RETRY = 30.0
"""Seconds until a model that could not be loaded is tried again."""
IDLE = 0.5
"""Seconds between two looks for images, where nobody wakes the scorer."""
VIEW, THUMBNAIL = 1280, 256
"""Longer side, in pixels, of what the pages show."""
VIEW_NAME, THUMBNAIL_NAME, FULL_NAME = "view.jpg", "thumbnail.jpg", "full.jpg"

log = logging.getLogger(__name__)


class Scored(NamedTuple):
    """What a model tells of one image."""

    score: float
    regions: tuple[tuple[int, int, int, int, float], ...]
    """(x, y, width, height, peak) in pixels of the image."""
    warnings: tuple[str, ...]
    nothing: bool
    """Whether the image holds nothing to see, so that no score makes it good."""
    pixels: NDArray[np.float32]
    """HWC RGB in [0, 1]."""
    heat: NDArray[np.uint8] | None
    """(h, w, 4) RGBA of the anomaly map, at most ``VIEW`` on a side."""
    statistics: ImageStatistics | None = None
    """Of light and optics; None where they were not measured."""


class LiveModel(NamedTuple):
    """A model that is loaded."""

    score: Callable[[Path], Scored]
    score_kind: str
    threshold: float


@dataclass(frozen=True)
class Policy:
    """What decides: below, the image is accepted; above, rejected; between, a person is asked."""

    accept_below: float
    reject_above: float

    def __post_init__(self) -> None:
        if not 0 <= self.accept_below <= self.reject_above <= 1:
            raise StationError(
                f"a policy of {self.accept_below} and {self.reject_above}: both are between 0 and "
                "1, and accept_below is not above reject_above"
            )

    def decide(self, score: float) -> str:
        """The decision; exactly at a threshold the image is unsure, or where both are one,
        accepted as by ``Detector.predict``."""
        if score > self.reject_above:
            return "reject"
        if score < self.accept_below or self.accept_below == self.reject_above:
            return "accept"
        return "unsure"


def load_model(path: Path) -> LiveModel:
    """A trained or exported model, for one thread an image."""
    detector = load(path, threads=1)
    return LiveModel(
        lambda image: predicted(detector, image), detector.score_kind, detector.threshold
    )


def predicted(detector: Detector, path: Path) -> Scored:
    """One image through a detector."""
    pixels, warned = detector.read_with_warnings(path)
    prepared = detector.prepare(pixels, warned, path)
    (found,) = detector.infer([prepared])
    prediction = detector.finish(prepared, found)
    regions = tuple((r.x, r.y, r.width, r.height, r.peak) for r in prediction.regions)
    return Scored(
        prediction.pred_score, regions, prediction.warnings, bool(prepared.nothing), pixels,
        heat_layer(prediction.anomaly_map, detector.colour_scale),
    )  # fmt: skip


def heat_layer(values: NDArray[np.float32], scale: tuple[float, float]) -> NDArray[np.uint8]:
    """(h, w, 4) RGBA: the colours of a map (H, W), the less opaque the lower, for a page to lay
    over the image."""
    size = fitted((values.shape[1], values.shape[0]), VIEW)
    shrunk = np.asarray(Image.fromarray(values).resize(size, Image.Resampling.BILINEAR))
    share = np.clip((shrunk - scale[0]) / max(scale[1] - scale[0], 1e-12), 0, 1)
    alpha = np.rint(255 * share**2 * (3 - 2 * share)).astype(np.uint8)
    return np.dstack([heat(shrunk, scale), alpha])


def fitted(size: tuple[int, int], side: int) -> tuple[int, int]:
    """(width, height) made smaller until the longer side fits."""
    factor = min(1.0, side / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


class Pipeline:
    """Scores the backlog in a thread of its own. All methods are safe in threads."""

    def __init__(
        self,
        store: Store,
        intake: Intake,
        config: Config,
        load: Callable[[Path], LiveModel] = load_model,
    ) -> None:
        self.store, self.intake, self.config = store, intake, config
        self.derived = store.home / DERIVED
        self.models = store.home / MODELS
        self.problem = ""
        """Why images of a line wait for ever; empty where all is well."""
        self._load = load
        self._loaded: dict[int, LiveModel] = {}
        self._failed: dict[int, tuple[float, CdgpError]] = {}
        """Models that could not be loaded, since when, and why."""
        self._loading = threading.Lock()
        self._wake = threading.Event()
        self._begun: dict[int, int] = {}
        """Images that this process tries, and how many processes ended while they did."""
        self._expected: dict[int, list[Future[str]]] = {}
        self._expecting = threading.Lock()

    def wake(self) -> None:
        """Tell the scorer that an image has come."""
        self._wake.set()

    def expect(self, image_id: int) -> "Future[str]":
        """The decision of an image, once there is one."""
        future: Future[str] = Future()
        with self._expecting:
            self._expected.setdefault(image_id, []).append(future)
        with self.store.read() as connection:  # it may have been decided in between
            decision = connection.scalar(select(images.c.decision).where(images.c.id == image_id))
        if decision:
            self._tell({image_id: decision})
        return future

    def run(self, stop: threading.Event) -> None:
        """Score what waits until ``stop`` is set."""
        with ThreadPoolExecutor(cores()) as pool:
            while not stop.is_set():
                try:
                    done = self.step(pool)
                except Exception as error:  # a full disk, a database that is away
                    log.exception("scoring stopped for a moment")
                    self.problem, done = f"{type(error).__name__}: {error}", 0
                if not done:
                    self._wake.wait(IDLE)
                    self._wake.clear()

    def step(self, pool: ThreadPoolExecutor) -> int:
        """Score and decide at most ``BATCH`` images; returns how many."""
        with self.store.read() as connection:
            known = connection.scalars(select(lines.c.id)).all()
            live = {line: live_policy(connection, line) for line in known}
        ready: dict[int, LiveModel | None] = {}
        problems = []
        for line, policy in live.items():
            try:
                ready[line] = self._ready(policy) if policy else None
            except CdgpError as error:  # the other lines go on
                problems.append(f"no model, so images wait: {error}")
        self.problem = "; ".join(problems)
        with self.store.read() as connection:
            waiting = self._next(connection, ready)
        if not waiting:
            return 0
        self._begin(waiting)

        def work(row: AnyRow) -> Scored | str:
            return self._score(row, live[row.line_id], ready[row.line_id])

        found = list(pool.map(work, waiting))
        with self.store.write() as connection:
            told = {
                row.id: record(connection, row.id, live[row.line_id], result)
                for row, result in zip(waiting, found, strict=True)
            }
        for key in told:
            del self._begun[key]
        self._tell(told)
        return len(waiting)

    def _next(self, connection: Connection, of: Iterable[int]) -> list[AnyRow]:
        """The oldest images of these lines that wait; one alone that may have ended the process
        before."""
        query = select(images.c.id, images.c.line_id, images.c.digest, images.c.attempts)
        query = query.where(images.c.decision.is_(None), images.c.line_id.in_(of))
        query = query.order_by(images.c.id).limit(BATCH)
        rows = list(connection.execute(query))
        suspected = [self._begun.get(row.id, row.attempts) > 0 for row in rows]
        if not any(suspected):
            return rows
        first = suspected.index(True)
        return rows[:first] or rows[:1]

    def _begin(self, rows: list[AnyRow]) -> None:
        """Note on the disk that these are tried now; once a process."""
        new = {row.id: row.attempts for row in rows if row.id not in self._begun}
        if new:
            with self.store.write() as connection:
                counted = update(images).where(images.c.id.in_(new))
                connection.execute(counted.values(attempts=images.c.attempts + 1))
            self._begun |= new

    def _ready(self, policy: AnyRow) -> LiveModel:
        return self.ready(policy.model_id, f"{policy.digest}{policy.suffix}")

    def ready(self, model_id: int, name: str) -> LiveModel:
        """A model, loaded once.

        Raises:
            CdgpError: it cannot be loaded, or its file is not the one that was added.
        """
        with self._loading:
            since, failed = self._failed.get(model_id, (0.0, None))
            if failed is not None and time.monotonic() - since < RETRY:
                raise failed
            if model_id not in self._loaded:
                path = self.models / name
                try:
                    if digest(path) != path.stem:
                        raise StationError(f"{path}: was changed; restore it from a backup")
                    self._loaded[model_id] = self._load(path)
                except CdgpError as error:
                    self._failed[model_id] = time.monotonic(), error
                    raise
                self._failed.pop(model_id, None)
            return self._loaded[model_id]

    def ready_to_serve(self, model_id: int) -> None:
        """Load a model that was adopted.

        Raises:
            CdgpError: there is none of this id, or it cannot be loaded.
        """
        with self.store.read() as connection:
            row = connection.execute(select(models).where(models.c.id == model_id)).first()
        if row is None:
            raise StationError(f"model {model_id}: there is none")
        with self._loading:
            self._failed.pop(model_id, None)  # who asks for it may have mended it
        self.ready(model_id, f"{row.digest}{row.suffix}")

    def adopt(self, path: Path, who: str, name: str = "") -> int:
        """Copy a model into the station, try it, and enter it; returns its id.

        Known by ``name``, else by that of its file.

        Raises:
            CdgpError: no model of one file, or one that cannot be loaded.
        """
        if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
            raise StationError(f"{path}: is no model; give a {' or '.join(SUFFIXES)} file")
        self.models.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.models) as folder:
            copy = Path(folder) / path.name
            shutil.copyfile(path, copy)
            sha256, model = digest(copy), self._load(copy)
            kept = self.models / f"{sha256}{path.suffix}"
            if not kept.exists():
                with atomic_write(kept) as temporary:
                    shutil.copyfile(copy, temporary)
        with self.store.write() as connection:
            known = connection.scalar(select(models.c.id).where(models.c.digest == sha256))
            if known is None:
                name = name or path.name
                values = {"digest": sha256, "name": name, "suffix": path.suffix,
                          "score_kind": model.score_kind, "threshold": model.threshold}  # fmt: skip
                known = insert_row(connection, models, **values, added_at=time.time())
                trail.append(connection, who, "model added", f"model {name}", after=values)
        with self._loading:
            self._loaded[known] = model
        return known

    def keep_live(self) -> None:
        """Let go of all loaded models that no line uses any more."""
        with self.store.read() as connection:
            newest = select(func.max(policies.c.id)).group_by(policies.c.line_id)
            live = connection.scalars(select(policies.c.model_id).where(policies.c.id.in_(newest)))
            kept = set(live)
        with self._loading:
            self._loaded = {key: value for key, value in self._loaded.items() if key in kept}

    def _score(self, row: AnyRow, policy: AnyRow | None, model: LiveModel | None) -> Scored | str:
        """What the model tells of an image; why there is no score, else."""
        path = self.intake.path(row.digest)
        if self._begun[row.id] >= TRIES:
            return "the process ended twice while this image was read"
        try:
            if policy is None or model is None:
                self.draw(row.digest)
                return "the line has no model"
            result = model.score(path)
            self.keep_views(row.digest, result, policy.model_id)
            return result._replace(statistics=image_statistics(result.pixels))
        except Exception as error:
            if not isinstance(error, CdgpError | MemoryError):
                log.exception("image %s cannot be scored", row.id)
            return str(error).replace(str(path), "the image") or type(error).__name__

    def keep_views(self, image_digest: str, result: Scored, model_id: int) -> None:
        """What pages show of an image; where the disk is full, they show it without the map."""
        folder = self.views(image_digest)
        try:
            write_views(folder, result.pixels)
            if result.heat is not None:
                with atomic_write(folder / heat_name(model_id)) as temporary:
                    Image.fromarray(result.heat).save(temporary, "PNG", compress_level=3)
        except CdgpError as error:
            log.warning("%s", error)

    def draw(self, image_digest: str) -> Path:
        """Draw what pages show of an image, where it is missing; returns the folder.

        Raises:
            CdgpError: the image cannot be read, or the disk is full.
        """
        folder = self.views(image_digest)
        if not (folder / VIEW_NAME).exists():
            pixels = read_image(self.intake.path(image_digest), 65535, first_page=True)
            write_views(folder, pixels)
        return folder

    def views(self, image_digest: str) -> Path:
        """Folder of what pages show of an image."""
        return self.derived / image_digest[:2] / image_digest

    def _tell(self, decisions: dict[int, str]) -> None:
        with self._expecting:
            waiting = [(self._expected.pop(key, []), value) for key, value in decisions.items()]
        for futures, decision in waiting:
            for future in futures:
                if future.set_running_or_notify_cancel():
                    future.set_result(decision)


def record(
    connection: Connection, image_id: int, policy: AnyRow | None, result: Scored | str
) -> str:
    """Write what was found for an image, and return the decision."""
    now, problem, decision = time.time(), "", "unsure"
    score = None
    if isinstance(result, str) or policy is None:
        problem = result if isinstance(result, str) else "the line has no model"
    else:
        decision = Policy(policy.accept_below, policy.reject_above).decide(result.score)
        score = result.score
        if result.nothing and decision == "accept":
            decision = "unsure"
        connection.execute(
            insert(scores).values(
                image_id=image_id, model_id=policy.model_id, policy_id=policy.id,
                score=result.score, decision=decision, regions=json.dumps(result.regions),
                warnings=json.dumps(result.warnings), at=now,
                **(result.statistics._asdict() if result.statistics else {}),
            )
        )  # fmt: skip
    connection.execute(
        update(images)
        .where(images.c.id == image_id)
        .values(decision=decision, decided_at=now, problem=problem)
    )
    messages.decided(connection, image_id, policy, score)
    return decision


def live_policy(connection: Connection, line_id: int) -> AnyRow | None:
    """The newest policy of a line, with digest, name, suffix, score_kind and threshold of its
    model; None where there is none yet."""
    return connection.execute(
        select(
            policies, models.c.digest, models.c.name, models.c.suffix, models.c.score_kind,
            models.c.threshold,
        )
        .join(models, models.c.id == policies.c.model_id)
        .where(policies.c.line_id == line_id)
        .order_by(policies.c.id.desc())
        .limit(1)
    ).first()  # fmt: skip


def policy_history(connection: Connection, most: int, line_id: int | None = None) -> list[AnyRow]:
    """The newest policies, of all lines or of one, with the names of model, user and line."""
    query = (
        select(policies, models.c.name.label("model"), users.c.name.label("user"),
               lines.c.name.label("line"))
        .join(models, models.c.id == policies.c.model_id)
        .join(users, users.c.id == policies.c.user_id)
        .join(lines, lines.c.id == policies.c.line_id)
        .order_by(policies.c.id.desc())
        .limit(most)
    )  # fmt: skip
    if line_id is not None:
        query = query.where(policies.c.line_id == line_id)
    return list(connection.execute(query))


def promote(
    connection: Connection,
    who: tuple[int, str],
    line_id: int,
    model_id: int,
    policy: Policy,
    reason: str,
) -> int:
    """Make a model and a policy the live ones of a line, at once; returns the policy's id.

    Args:
        connection: of the one transaction.
        who: id and name of the user.
        line_id: of the line.
        model_id: of a model that was adopted.
        policy: its two thresholds.
        reason: why; it stays in the trail.

    Raises:
        StationError: no reason, or no such line or model.
    """
    reason = reason.strip()
    if not reason:
        raise StationError("reason: say why; it stays in the audit trail")
    line = connection.scalar(select(lines.c.name).where(lines.c.id == line_id))
    model = connection.scalar(select(models.c.name).where(models.c.id == model_id))
    if line is None or model is None:
        raise StationError(f"line {line_id} or model {model_id}: there is none")
    before = live_policy(connection, line_id)
    values = {"accept_below": policy.accept_below, "reject_above": policy.reject_above}
    added = insert_row(
        connection, policies, line_id=line_id, model_id=model_id, **values, reason=reason,
        user_id=who[0], created_at=time.time(),
    )  # fmt: skip
    trail.append(
        connection, who[1], "policy set", f"line {line}",
        before=before and {"model": before.name, "accept_below": before.accept_below,
                           "reject_above": before.reject_above},
        after={"model": model, **values}, why=reason,
    )  # fmt: skip
    now = live_policy(connection, line_id)
    assert now is not None
    messages.policy_set(connection, line, now, before, who[1])
    return added


def write_views(folder: Path, pixels: NDArray[np.float32]) -> None:
    """Write the thumbnail and the view of an image, HWC RGB in [0, 1]."""
    image = Image.fromarray(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8))
    for name, side in ((THUMBNAIL_NAME, THUMBNAIL), (VIEW_NAME, VIEW)):
        with atomic_write(folder / name) as temporary:
            drawn = image.resize(fitted(image.size, side), Image.Resampling.LANCZOS)
            drawn.save(temporary, "JPEG", quality=88)


def write_full(path: Path, pixels: NDArray[np.float32]) -> None:
    """Write an image, HWC RGB in [0, 1], at its own size."""
    image = Image.fromarray(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8))
    with atomic_write(path) as temporary:
        image.save(temporary, "JPEG", quality=92, subsampling=0)


def heat_name(model_id: int) -> str:
    """The file of a model's map of an image."""
    return f"heat-{model_id}.png"
