"""The inspection station under kills, under load, and on a disk that is full.

    python -m cdgp_bench.studies.station [--only kills|load|real|full] [--kills 200]
        [--images 10000] [--model MODEL] [--real 1000]

Adds one row a campaign to docs/results/station.jsonl. The station is `cdgp station serve` in a
process of its own, on SQLite. Its scorer is a stub, so that every score can be computed again: the
mean brightness, moved by the number that is the model. MODEL is what ``real`` scores with; the
campaign is left out where none is given.

- kills: SIGKILL at random moments under an uploader, a reviewer and an engineer who adds models,
  promotes and rolls back.
- load: 64 clients at once, and 100 promotions meanwhile.
- real: the same with MODEL, and no promotion.
- full: a tmpfs that uploads fill, and then another program, to the last byte. Needs root.
"""

import argparse
import hashlib
import io
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image
from sqlalchemy import Connection, select

from cdgp.data.images import read_image
from cdgp.errors import CdgpError, ModelFileError
from cdgp.files import digest, write_text
from cdgp.station import accounts, service, trail
from cdgp.station.config import CONFIG
from cdgp.station.intake import IMAGES, add_line
from cdgp.station.pipeline import MODELS, LiveModel, Policy, Scored, load_model
from cdgp.station.schema import AnyRow, images, models, policies, reviews, scores, users
from cdgp.station.schema import trail as trail_table
from cdgp.station.store import Store
from cdgp_bench.measure import harness

OUT = Path("docs/results/station.jsonl")
PASSWORD = "a password of the study"
LINE = "a"
PEOPLE = {"uploader": "operator", "reviewer": "operator", "engineer": "engineer"}
CLIENTS, SWAPS = 64, 100
SIDE = 224
"""Of an image of noise: as PNG it has about 150 kB."""
DISK_MIB, RESERVE_MIB = 64, 16
MOST_WRITES = 3000
"""To a database that cannot grow."""
STUB_BYTES = 100
"""A model that is smaller is a number."""
LOOK = 2.0
"""Seconds between two looks at the station's memory."""


# --- the stub -----------------------------------------------------------------------------------


def stub_score(path: Path, offset: float) -> float:
    """What the stub of a model tells: mean brightness, moved by the model's own number."""
    return float((read_image(path, 65535).mean() + offset) % 1)


def stub_load(path: Path) -> LiveModel:
    """A model that is a text file with a number."""
    try:
        offset = float(path.read_text())
    except ValueError as error:
        raise ModelFileError(f"{path}: is no model") from error

    def score(image: Path) -> Scored:
        pixels = read_image(image, 65535)
        heat = np.zeros((*pixels.shape[:2], 4), np.uint8)
        heat[:4, :4] = 255
        regions = ((0, 0, 4, 4, 3.0),)
        return Scored(stub_score(image, offset), regions, (), False, pixels, heat)

    return LiveModel(score, "probability", 0.5)


def noise_png(number: int) -> bytes:
    """An image like no other, of about 150 kB."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8) // 2 + number % 128
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG", compress_level=0)
    return out.getvalue()


# --- the station --------------------------------------------------------------------------------


def new_home(home: Path, config: str = "") -> None:
    """A station with a line and three people, whose settings are ``config``."""
    store = Store(home)
    with store.write() as connection:
        for name, role in PEOPLE.items():
            accounts.add_user(connection, "study", name, role)
        hashed = accounts.HASHER.hash(PASSWORD)
        connection.execute(users.update().values(must_change=False, password_hash=hashed))
        add_line(connection, "study", LINE)
    store.close()
    (home / CONFIG).write_text(config)


def serve(home: str, port: str, stub: str) -> None:
    """`cdgp station serve`, with the stub where ``stub`` is not empty."""
    from cdgp.cli.main import app

    if stub:
        service.Station = partial(service.Station, load=stub_load)  # type: ignore[misc, assignment]
    app(["station", "serve", "--home", home, "--port", port])


class Served:
    """A station in a process of its own."""

    def __init__(self, home: Path, stub: bool = True) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        call = "import sys; from cdgp_bench.studies.station import serve; serve(*sys.argv[1:])"
        self._command = [sys.executable, "-c", call, str(home), str(self.port), "y" if stub else ""]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        if code := self.process.wait():
            raise SystemExit(f"the station ended with exit code {code}")

    def wait(self) -> None:
        """Until it answers."""
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the station ended with exit code {self.process.returncode}")
            try:
                httpx.get(f"{self.address}/login", timeout=20)
                return
            except httpx.HTTPError:
                time.sleep(0.05)

    def metric(self, name: str) -> float:
        """What Prometheus would read; a counter's values are added up."""
        text = httpx.get(f"{self.address}/metrics", timeout=60).text
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def wait_for_scores(self) -> None:
        while self.metric("cdgp_station_backlog"):
            time.sleep(0.2)

    def memory(self) -> float:
        """Resident memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        assert found
        return int(found[1]) / 1024


@contextmanager
def running(home: Path, stub: bool = True) -> Iterator[Served]:
    served = Served(home, stub)
    try:
        served.wait()
        yield served
        served.close()
    finally:
        served.kill()


@contextmanager
def signed_in(address: str, name: str) -> Iterator[httpx.Client]:
    """A client that a person has signed in with."""
    # Without TLS: its certificates would be read for each client.
    with httpx.Client(base_url=address, timeout=60, verify=False) as http:
        http.post("/login", data={"name": name, "password": PASSWORD})
        found = re.search(r'name="csrf" content="([^"]+)"', http.get("/password").text)
        if not found:
            raise httpx.TransportError("not signed in")
        http.headers["X-CSRF-Token"] = found[1]
        yield http


def known_model(http: httpx.Client, number: float) -> int:
    """The id of the stub with this number, which is added where the station has none."""
    name = f"plus-{number:g}.onnx"
    pattern = rf'<option value="(\d+)"[^>]*>{re.escape(name)} '
    found = re.search(pattern, http.get("/settings").text)
    if not found:
        told(http.post("/models", data={"file": name}))
        found = re.search(pattern, http.get("/settings").text)
    assert found
    return int(found[1])


class OddError(CdgpError):
    """An answer that should not have been given."""


def by_status(answers: Counter[int]) -> dict[str, int]:
    """How often each status was answered."""
    return {str(code): count for code, count in sorted(answers.items())}


def told(answer: httpx.Response) -> Any:
    """What an answer tells; OddError where it is a refusal."""
    if answer.status_code in (200, 202):
        return answer.json()
    if answer.status_code == 303:
        return None
    raise OddError(f"{answer.request.url.path}: {answer.status_code} {answer.text[:200]}")


# --- what a home holds afterwards ---------------------------------------------------------------


class Held(NamedTuple):
    """A home that was closed."""

    parts: Counter[str]
    reviews: dict[tuple[int, int], str | None]
    """Verdicts by image and version."""
    reasons: Counter[str]
    """Of the policies."""
    scored: int
    models: int
    """How many gave scores."""
    removed: list[AnyRow]
    """Images whose file retention has removed."""
    wrong: list[str]
    """What should not be."""


def held(home: Path) -> Held:
    """Read a home, and compute again all that can be: digests, scores, decisions, the trail."""
    store = Store(home)
    with store.read() as connection:
        found = _held(home, connection)
    store.close()
    return found


def scorer(model: Path) -> Callable[[Path], float]:
    """What computes the score of an image again."""
    if model.stat().st_size < STUB_BYTES:
        return partial(stub_score, offset=float(model.read_text()))
    loaded = load_model(model)
    return lambda path: loaded.score(path).score


def _held(home: Path, connection: Connection) -> Held:
    wrong: list[str] = []
    scorers: dict[int, Callable[[Path], float]] = {}
    for row in connection.execute(select(models)):
        path = home / MODELS / f"{row.digest}{row.suffix}"
        if not path.is_file() or digest(path) != row.digest:
            wrong.append(f"model {row.id} has no file, or another one")
        else:
            scorers[row.id] = scorer(path)
    rules = {row.id: row for row in connection.execute(select(policies))}
    entries = connection.scalars(
        select(trail_table.c.why).where(trail_table.c.action == "policy set")
    )
    if Counter(entries) != Counter(row.reason for row in rules.values()):
        wrong.append("policies are not those of the trail")
    rows = {row.id: row for row in connection.execute(select(images))}
    for row in rows.values():
        path = home / IMAGES / row.digest[:2] / row.digest
        if row.removed_at is None and (not path.is_file() or digest(path) != row.digest):
            wrong.append(f"image {row.id} has no file, or another one")
    counted: Counter[int] = Counter()
    for score in connection.execute(select(scores)):
        rule, image = rules[score.policy_id], rows[score.image_id]
        counted[score.image_id] += 1
        path = home / IMAGES / image.digest[:2] / image.digest
        decision = Policy(rule.accept_below, rule.reject_above).decide(score.score)
        if score.model_id != rule.model_id or score.decision != decision:
            wrong.append(f"score {score.id} is not of its policy")
        again = scorers.get(score.model_id)
        if again and path.is_file() and score.score != again(path):
            wrong.append(f"score {score.id} is not that of its model")
    given: dict[tuple[int, int], str | None] = {}
    newest: dict[int, tuple[int, str | None]] = {}
    for row in connection.execute(select(reviews).order_by(reviews.c.image_id, reviews.c.version)):
        given[row.image_id, row.version] = row.verdict
        newest[row.image_id] = row.version, row.verdict
    for row in rows.values():
        if newest.get(row.id, (0, None)) != (row.version, row.verdict):
            wrong.append(f"image {row.id} has another verdict than its newest review")
        if row.decision is None or counted[row.id] != (row.problem == ""):
            wrong.append(f"image {row.id} has {counted[row.id]} scores")
    trail.verify(connection)
    return Held(
        Counter(row.part for row in rows.values()), given,
        Counter(row.reason for row in rules.values()), counted.total(),
        len({rule.model_id for rule in rules.values()}),
        [row for row in rows.values() if row.removed_at is not None], wrong,
    )  # fmt: skip


# --- kills --------------------------------------------------------------------------------------


class Script(threading.Thread):
    """A person who does the same over and over until told to stop, whatever the station does."""

    def __init__(self, address: str, name: str, step: Callable[[httpx.Client], None]) -> None:
        super().__init__(name=name)
        self.address, self.step = address, step
        self.ended = threading.Event()
        self.odd: list[str] = []

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                with signed_in(self.address, self.name) as http:
                    while not self.ended.is_set():
                        self.step(http)
            except httpx.HTTPError:
                time.sleep(0.1)
            except Exception as error:
                self.odd.append(f"{self.name}: {error}")


class Told:
    """What an uploader, a reviewer and an engineer did, and what was acknowledged."""

    def __init__(self, home: Path, seed: int | None) -> None:
        self.home = home
        self.rng = random.Random(seed)
        self.uploads = 0
        self.taken: dict[str, int] = {}
        """The id that an acknowledged part was given."""
        self.tried: dict[tuple[int, int], str] = {}
        """Verdicts that were sent, by image and the version that they make."""
        self.ticked: set[tuple[int, int]] = set()
        """Those that were acknowledged."""
        self.undone = 0
        self.attempts = 0
        self.promoted: list[str] = []
        """Reasons of acknowledged promotions and rollbacks."""

    def upload(self, http: httpx.Client) -> None:
        part = str(self.uploads)
        content = small_png(self.uploads % 200)
        for _ in range(2):  # again, as a sender does that was not answered
            query = {"line": LINE, "part": part}
            key = told(http.post("/api/v1/images", params=query, content=content))["id"]
            if self.taken.setdefault(part, key) != key:
                raise OddError(f"part {part} has two ids")
        self.uploads += 1

    def review(self, http: httpx.Client) -> None:
        asked = {"line": 1, "count": 2}
        claimed = told(http.post("/api/v1/queue/claim", json=asked))["images"]
        for image in claimed:
            key, verdict = (
                (image["id"], image["version"] + 1),
                ("good", "defective")[image["id"] % 2],
            )
            self.tried[key] = verdict
            seen = [{"id": image["id"], "version": image["version"]}]
            told(http.post("/api/v1/reviews", json={"verdict": verdict, "images": seen}))
            self.ticked.add(key)
        if claimed and self.rng.random() < 0.1:
            versions = told(http.post("/api/v1/reviews/undo", json={}))["versions"]
            self.undone += len(versions)

    def promote(self, http: httpx.Client) -> None:
        """Another model and policy; an earlier model's again is a rollback."""
        number = self.rng.randrange(50) / 100
        place = self.home / "candidates" / f"plus-{number:g}.onnx"
        if not place.exists():
            place.write_text(str(number))
        self.attempts += 1
        reason = f"attempt {self.attempts}"
        policy = {"accept_below": 0.1, "reject_above": 0.9, "reason": reason}
        model = known_model(http, number)
        told(http.post("/lines/1/policy", data={"model": model, **policy}))
        self.promoted.append(reason)
        time.sleep(0.2)

    def missing(self, found: Held) -> list[str]:
        """What was acknowledged and is not there, or is there and was never sent, or twice."""
        kept = {key: verdict for key, verdict in found.reviews.items() if verdict is not None}
        wrong = [f"part {part} is lost" for part in self.taken if part not in found.parts]
        wrong += [f"part {part} is there {n} times" for part, n in found.parts.items() if n > 1]
        wrong += [f"review {key} is lost" for key in self.ticked if key not in kept]
        wrong += [
            f"review {key} was never sent" for key in kept if kept[key] != self.tried.get(key)
        ]
        wrong += [f"{why} is there {found.reasons[why]} times" for why in self.promoted
                  if found.reasons[why] != 1]  # fmt: skip
        wrong += [f"{why} is there {n} times" for why, n in found.reasons.items() if n > 1]
        undone = len(found.reviews) - len(kept)
        if undone < self.undone:
            wrong.append(f"{self.undone - undone} undone reviews are lost")
        return wrong


def small_png(level: int) -> bytes:
    """A small image of one brightness, with noise that makes it unlike others."""
    rng = np.random.default_rng(level)
    pixels = level + 20 + rng.integers(-2, 3, (16, 20))
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def kills(folder: Path, count: int, seed: int | None = 0) -> dict[str, Any]:
    """Kill a station at random moments, and compare what it holds with what it acknowledged.

    Other moments each time where ``seed`` is None.
    """
    home, rng = folder / "home", random.Random(seed)
    new_home(home, "reserve_gib = 0\naudit_share = 0.1\n")
    served, state = Served(home), Told(home, seed)
    steps = {"uploader": state.upload, "reviewer": state.review, "engineer": state.promote}
    scripts = [Script(served.address, name, step) for name, step in steps.items()]
    for script in scripts:
        script.start()
    while_starting = 0
    try:
        for number in range(count):
            before = state.uploads
            if number:
                served.start()
            if number % 10 == 9:  # also before it answers
                time.sleep(rng.uniform(0, 2))
                while_starting += state.uploads == before
            else:
                while state.uploads < before + 2:
                    if served.process.poll() is not None:
                        raise SystemExit(f"the station ended: {served.process.returncode}")
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 1))
            served.kill()
            print(f"\r{number + 1} of {count}", end="", file=sys.stderr, flush=True)
        served.start()
        served.wait()
    finally:
        for script in scripts:
            script.ended.set()
        for script in scripts:
            script.join()
        if sys.exc_info()[0]:
            served.kill()
    served.wait_for_scores()
    served.close()
    found = held(home)
    return {
        "kills": count, "while_starting": while_starting, "uploads": len(state.taken),
        "uploads_held": len(found.parts), "reviews": len(state.ticked),
        "reviews_held": sum(verdict is not None for verdict in found.reviews.values()),
        "undone": state.undone, "promotions": len(state.promoted),
        "promotions_held": len(found.reasons), "scores": found.scored,
        "refused": [text for script in scripts for text in script.odd],
        "wrong": found.wrong + state.missing(found),
    }  # fmt: skip


# --- load ---------------------------------------------------------------------------------------


class Sender(threading.Thread):
    """One of many clients, which sends its share of the images."""

    def __init__(self, address: str, token: str, numbers: range, image: Callable[[int], bytes]
                 ) -> None:  # fmt: skip
        super().__init__()
        self.address, self.token, self.numbers, self.image = address, token, numbers, image
        self.taken: dict[str, tuple[int, str]] = {}
        """Id and digest by part."""
        self.seconds: list[float] = []
        """Of each upload that was taken in, without the waiting that the station asked for."""
        self.answers: Counter[int] = Counter()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"}
        with httpx.Client(
            base_url=self.address, headers=headers, timeout=120, verify=False
        ) as http:
            for number in self.numbers:
                self._send(http, str(number), self.image(number))

    def _send(self, http: httpx.Client, part: str, content: bytes) -> None:
        while True:
            began = time.perf_counter()
            answer = http.post("/api/v1/images", params={"part": part}, content=content)
            self.answers[answer.status_code] += 1
            if answer.status_code in (200, 202):
                self.seconds.append(time.perf_counter() - began)
                self.taken[part] = answer.json()["id"], hashlib.sha256(content).hexdigest()
                return
            if answer.status_code != 429:
                return
            time.sleep(float(answer.headers["Retry-After"]))


def load(
    folder: Path, count: int, clients: int = CLIENTS, swaps: int = SWAPS, model: Path | None = None
) -> dict[str, Any]:
    """Send images from many clients at once, with promotions in between; with a model, none."""
    home = folder / "home"
    new_home(home, "reserve_gib = 0\nfree_gib = 0\n")
    (home / "candidates").mkdir()
    names = [f"plus-{number / 1000:g}.onnx" for number in range(swaps + 1)]
    if model:
        names = [model.name]
        shutil.copyfile(model, home / "candidates" / model.name)
    else:
        for number, name in enumerate(names):
            (home / "candidates" / name).write_text(str(number / 1000))
    store = Store(home)
    with store.write() as connection:
        token = accounts.add_token(connection, "study", 1, "clients")
    store.close()
    memory: list[tuple[float, float]] = []
    with running(home, not model) as served, signed_in(served.address, "engineer") as http:
        ids = []
        for name in names:
            told(http.post("/models", data={"file": name}))
            ids.append(
                max(map(int, re.findall(r'<option value="(\d+)"', http.get("/settings").text)))
            )

        def swap(number: int) -> None:
            policy = {"accept_below": 0.2, "reject_above": 0.8, "reason": f"swap {number}"}
            told(http.post("/lines/1/policy", data={"model": ids[number], **policy}))

        swap(0)
        senders = [Sender(served.address, token, range(i, count, clients), noise_png)
                   for i in range(clients)]  # fmt: skip
        began, swapped = time.perf_counter(), 0
        memory.append((0.0, served.memory()))
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders) or swapped < swaps:
            done = sum(len(sender.taken) for sender in senders)
            if not model and swapped < swaps and done * (swaps + 1) >= count * (swapped + 1):
                swapped += 1
                swap(swapped)
            now = time.perf_counter() - began
            if now - memory[-1][0] >= LOOK:
                memory.append((now, served.memory()))
            time.sleep(0.01)
        sent = time.perf_counter() - began
        while served.metric("cdgp_station_backlog"):
            time.sleep(LOOK)
            memory.append((time.perf_counter() - began, served.memory()))
        scored = time.perf_counter() - began
    found = held(home)
    taken = {part: facts for sender in senders for part, facts in sender.taken.items()}
    wrong = found.wrong + [f"part {part} is lost" for part in taken if found.parts[part] != 1]
    wrong += [f"part {part} was never sent" for part in found.parts if part not in taken]
    wrong += [f"part {number} was not taken in" for number in range(count)
              if str(number) not in taken]  # fmt: skip
    seconds = [one for sender in senders for one in sender.seconds]
    answers = sum((sender.answers for sender in senders), Counter[int]())
    every = max(1, len(memory) // 20)
    return {
        "images": count, "clients": clients, "model": "stub" if not model else "lite, onnxruntime",
        "kilobytes": round(len(noise_png(0)) / 1000), "swaps": swapped, "models_live": found.models,
        "taken": len(taken), "scores": found.scored,
        "answers": by_status(answers),
        "sent_s": round(sent, 1), "scored_s": round(scored, 1),
        "uploads_a_second": round(count / sent, 1), "scores_a_second": round(count / scored, 1),
        "p50_s": round(float(np.quantile(seconds, 0.5)), 3),
        "p95_s": round(float(np.quantile(seconds, 0.95)), 3),
        "longest_s": round(max(seconds), 2),
        "memory_mib": [[round(at), round(mib)] for at, mib in memory[::every]],
        "peak_mib": round(max(mib for _, mib in memory)),
        "wrong": wrong[:20],
    }  # fmt: skip


# --- a full disk --------------------------------------------------------------------------------


@contextmanager
def tmpfs(folder: Path, mib: int) -> Iterator[Path]:
    """A small disk of its own; PermissionError where it may not be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PermissionError(str(error)) from error
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def until(true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.2)
    return true()


def full(folder: Path, mib: int = DISK_MIB, reserve: int = RESERVE_MIB) -> dict[str, Any]:
    """Fill a station's disk by uploads up to the reserve, then by another program to the last byte;
    then send more than a disk holds to a station that removes what may go.

    Raises:
        PermissionError: nothing may be mounted here.
    """
    return {"disk_mib": mib, "reserve_mib": reserve, **kept_while_full(folder, mib, reserve),
            "retention": cleared_while_full(folder, mib, reserve)}  # fmt: skip


def kept_while_full(folder: Path, mib: int, reserve: int) -> dict[str, Any]:
    """Nothing may be removed; PermissionError where nothing may be mounted."""
    watched = folder / "watched"
    watched.mkdir()
    with tmpfs(folder / "disk", mib) as disk:
        home = disk / "home"
        new_home(home, f"reserve_gib = {reserve / 1024}\nfree_gib = 0\naudit_share = 0.5\n"
                 f'[[watch]]\nfolder = "{watched}"\nline = "{LINE}"\n')  # fmt: skip
        with running(home) as served, at_work(served) as (sender, reviewer):
            found = _fill(served, sender, reviewer, disk, watched, mib)
        kept = held(home)
        lost = [key for key, version in found.pop("reviewed") if (key, version) not in kept.reviews]
        return {**found, "reviews_lost": len(lost), "images": kept.parts.total(),
                "wrong": kept.wrong}  # fmt: skip


def cleared_while_full(folder: Path, mib: int, reserve: int) -> dict[str, Any]:
    """Three disks full of images; those that nobody reviewed may be removed."""
    answers, answers_to_reviews = Counter[int](), Counter[int]()
    with tmpfs(folder / "second", mib) as disk:
        home = disk / "home"
        new_home(home, f"reserve_gib = {reserve / 1024}\nfree_gib = {1.5 * reserve / 1024}\n"
                 "audit_share = 0.1\n")  # fmt: skip
        with running(home) as served, at_work(served) as (sender, reviewer):
            count = 3 * mib * 2**20 // len(noise_png(0))
            for number in range(count):
                query, content = {"line": LINE, "part": f"{number}"}, noise_png(number)
                while True:
                    answer = sender.post("/api/v1/images", params=query, content=content)
                    answers[answer.status_code] += 1
                    if answer.status_code != 507:
                        break
                    time.sleep(1)
                if number % 20 == 0:
                    reviews, _ = review_each(reviewer, 1)
                    answers_to_reviews += reviews
            served.wait_for_scores()
        found = held(home)
        return {
            "images": found.parts.total(), "answers": by_status(answers),
            "removed": len(found.removed), "reviews": by_status(answers_to_reviews),
            "removed_that_must_stay": sum(row.version > 0 or row.audit for row in found.removed),
            "wrong": found.wrong,
        }  # fmt: skip


@contextmanager
def at_work(served: Served) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """An uploader and a reviewer, under a model and a policy that accept every image of noise."""
    (served.home / "candidates" / "plus-0.onnx").write_text("0")
    policy = {"accept_below": 0.9, "reject_above": 1, "reason": "study"}
    with signed_in(served.address, "engineer") as engineer:
        model = known_model(engineer, 0)
        told(engineer.post("/lines/1/policy", data={"model": model, **policy}))
    with (
        signed_in(served.address, "uploader") as sender,
        signed_in(served.address, "reviewer") as reviewer,
    ):
        yield sender, reviewer


def review_each(http: httpx.Client, count: int) -> tuple[Counter[int], list[tuple[int, int]]]:
    """Review the oldest of the queue one by one: the answers, and (image, version) of each verdict
    that was acknowledged."""
    answers, given = Counter[int](), list[tuple[int, int]]()
    asked = http.post("/api/v1/queue/claim", json={"line": 1, "count": count})
    if asked.status_code != 200:
        return Counter({asked.status_code: 1}), given
    for image in asked.json()["images"]:
        seen = [{"id": image["id"], "version": image["version"]}]
        answer = http.post("/api/v1/reviews", json={"verdict": "good", "images": seen})
        answers[answer.status_code] += 1
        if answer.status_code == 200:
            given.append((image["id"], image["version"] + 1))
    return answers, given


def _fill(
    served: Served,
    sender: httpx.Client,
    reviewer: httpx.Client,
    disk: Path,
    watched: Path,
    mib: int,
) -> dict[str, Any]:
    reviewed: list[tuple[int, int]] = []
    numbers = iter(range(10**6))

    def upload() -> int:
        number = next(numbers)
        query = {"line": LINE, "part": f"{number}"}
        return sender.post("/api/v1/images", params=query, content=noise_png(number)).status_code

    def review(count: int) -> Counter[int]:
        answers, given = review_each(reviewer, count)
        reviewed.extend(given)
        return answers

    def count() -> float:
        return served.metric("cdgp_station_images_total") + served.metric("cdgp_station_backlog")

    filling: Counter[int] = Counter()
    while not filling[507] and filling.total() < 10_000:
        filling[upload()] += 1
    served.wait_for_scores()
    at_reserve = count()
    file = watched / "waits.png"
    file.write_bytes(noise_png(10**7))
    told_so = until(lambda: "free some space" in reviewer.get("/").text)
    waits = file.exists() and count() == at_reserve
    at_the_reserve = review(20)
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as other:
        try:
            while other.write(bytes(65536)) == 65536:
                pass
        except OSError:
            pass
    free = shutil.disk_usage(disk).free
    to_the_last_byte = review(60)
    later = Counter[int]()  # SQLite writes over its log for a while, and then needs more space
    while later.total() < MOST_WRITES and not later[507]:
        asked = {"line": 1, "count": 60}
        later[reviewer.post("/api/v1/queue/claim", json=asked).status_code] += 1
    uploads_then: Counter[int] = Counter(upload() for _ in range(5))
    filler.unlink()
    again = review(20)
    # Room for uploads again, as when somebody moves other files away.
    subprocess.run(["mount", "-o", f"remount,size={2 * mib}m", str(disk)], check=True)
    taken = until(lambda: upload() in (200, 202))
    entered = until(lambda: count() > at_reserve + 1)
    served.wait_for_scores()
    return {
        "filling": by_status(filling),
        "watched_file_stays": waits, "told_on_page": told_so,
        "reviews_at_the_reserve": by_status(at_the_reserve), "free_bytes_then": free,
        "reviews_without_any_space": by_status(to_the_last_byte),
        "more_writes": by_status(later),
        "uploads_without_any_space": by_status(uploads_then), "reviews_after": by_status(again),
        "uploads_recover": taken, "watched_file_entered": entered and file.exists(),
        "reviewed": reviewed,
    }  # fmt: skip


# --- all of it ----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("kills", "load", "real", "full"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--real", type=int, default=1000)
    given = parser.parse_args()
    campaigns: Mapping[str, Callable[[Path], dict[str, Any]]] = {
        "kills": lambda folder: kills(folder, given.kills),
        "load": lambda folder: load(folder, given.images),
        "real": lambda folder: load(folder, given.real, swaps=0, model=given.model),
        "full": full,
    }
    for name, campaign in campaigns.items():
        if given.only not in (None, name) or (name == "real" and given.model is None):
            continue
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            row = campaign(Path(folder))
        seconds = round(time.time() - began)
        row = {"campaign": name, **row, "seconds": seconds, "machine": harness.machine()}
        print(json.dumps(row, indent=1), flush=True)
        # Not with cdgp_bench.rows, which loads torch: the station's process imports this module.
        old = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
        rows = [*(one for one in old if one["campaign"] != name), row]
        write_text(OUT, "".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    main()
