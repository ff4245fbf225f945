"""Retraining as a job: a folder of files, worked on by a process of its own.

`start` starts a *supervisor* (``python -m cdgp.station.jobs``), which runs ``cdgp check`` and then
``cdgp train`` as its child and outlives the program that started it. A lock on the folder passes
from `start` to the supervisor and on to the child, and the operating system frees it when the last
of them has ended, in whatever way: there is never a second one. On Linux the child ends with its
supervisor; elsewhere it may work on alone, and the job starts again once it is done.

| File         | What it holds                                                   |
|--------------|-----------------------------------------------------------------|
| `job.json`   | the two commands and where they write; written once             |
| `state.json` | how far it is; replaced whole                                   |
| `heartbeat`  | its time of change is when the supervisor was last at work      |
| `cancel`     | it is there when somebody wants the job to end                  |
| `check/`     | what `cdgp check` found                                         |
| `run/`       | what `cdgp train` leaves, see `cdgp.run_folder`                 |
| `check.log`, `train.log`, `supervisor.log` | what was printed                  |
| `.lock`      | held while any process works in the folder                      |

A child that is killed is resumed. A job that was interrupted with its supervisor goes on when
`start` is called again. POSIX only.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cdgp import run_folder
from cdgp.errors import CdgpError, OutputError, SettingsError
from cdgp.files import shortened, write_text

try:
    import fcntl
except ImportError:  # Windows, where the station runs and jobs do not
    POSSIBLE = False
else:
    POSSIBLE = True

State = Literal["waiting", "checking", "training", "finished", "failed", "cancelled"]
ENDED = ("finished", "failed", "cancelled")
JOB, STATE, CANCEL, HEARTBEAT, LOCK = "job.json", "state.json", "cancel", "heartbeat", ".lock"
CHECKED, RUN = "check", "run"
LOGS = {"checking": "check.log", "training": "train.log"}
LEAKS = ("byte_leak", "pixel_leak", "group_leak", "near_leak")
"""Findings of ``cdgp check`` that stop a job: test images would have been seen in training."""
STAGES = {"Dual GP": "dual_gp", "Reverse student": "student"}
"""The stages of a training as its log names them, in order, and their settings."""
POLL_SECONDS = 0.1
GRACE_SECONDS = 20.0
"""So long a cancelled training may take to end by itself."""
SILENT_SECONDS = 60.0
"""A supervisor that has not been at work for so long is stopped or gone."""
MOST_DEATHS = 3
"""A child that was killed so often in a row, no step further, will be killed again."""
NICE = 5
"""Scoring goes before training."""
TRIES = 10
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a job runs; ``--resume`` or ``--overwrite`` is added where it goes on."""

    check: Sequence[str]
    train: Sequence[str]


@dataclass(frozen=True)
class Progress:
    """How far a job is, as ``state.json`` holds it."""

    state: State = "waiting"
    message: str = ""
    """Why it ended, where it did not finish."""
    attempts: int = 0
    """Times that the training was started."""
    deaths: int = 0
    """Times in a row that it was killed without a step in between."""
    pids: list[int] = field(default_factory=list)
    """Leaders of the process groups at work: the supervisor, and its child."""
    changed: float = 0.0
    """When the state began, or the last attempt, in seconds since 1970."""
    first_step: int = 0
    """Steps that were done by then."""


class Status(NamedTuple):
    """A job as a page shows it."""

    state: State | Literal["interrupted", "silent"]
    """``interrupted``: nobody works on it, `start` goes on; ``silent``: its processes are there and
    do nothing, `start` ends them and goes on."""
    message: str
    attempts: int
    share: float | None
    """Of the training's steps that are done; None where that is not known yet."""
    seconds_left: float | None
    """For the remaining steps, by the pace of this attempt; the evaluation comes on top."""


# What a program calls


def create(folder: Path, manifest: Path, options: Sequence[str] = ()) -> None:
    """Write a job that checks the images of a manifest and trains on them.

    Args:
        folder: of the job, new or without a job.
        manifest: CSV with a column ``split``, so that a leak can be told.
        options: of ``cdgp train``, such as ``("--config", "station.toml")``.

    Raises:
        OutputError: the folder holds a job, or cannot be written.
    """
    command, folder = [sys.executable, "-m", "cdgp.cli.main"], folder.absolute()
    table = str(manifest.absolute())
    write_job(folder, Job(
        [*command, "check", table, "--out", str(folder / CHECKED), "--overwrite"],
        [*command, "train", table, "--out", str(folder / RUN), *options],
    ))  # fmt: skip


def write_job(folder: Path, job: Job) -> None:
    """Write a job of any two commands that write what ``cdgp check`` and ``cdgp train`` do."""
    if (folder / JOB).exists():
        raise OutputError(f"{folder}: holds a job already; choose another folder")
    _write(folder / STATE, asdict(Progress(changed=time.time())))
    _write(folder / JOB, asdict(job))


def start(folder: Path) -> bool:
    """Work on a job, or go on with it, in the background.

    Returns:
        Whether a supervisor was started: not where one is at work, or the job has ended.

    Raises:
        SettingsError: there is no job in the folder.
        OutputError: the folder cannot be written, or silent processes cannot be ended.
    """
    read_job(folder)
    lock = _take(folder)
    if lock is None and _is_silent(folder):
        _end_groups(folder)
        lock = _take(folder)
        if lock is None:
            raise OutputError(
                f"{folder}: its processes {read_progress(folder).pids} do not end; end them by hand"
            )
    if lock is None:
        return False
    try:
        if read_progress(folder).state in ENDED:
            return False
        (folder / HEARTBEAT).touch()
        with (folder / "supervisor.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "cdgp.station.jobs", str(folder.absolute()), str(lock)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock],
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise OutputError(f"{folder}: cannot be worked on: {error.strerror}") from error
    finally:
        os.close(lock)
    threading.Thread(target=process.wait, daemon=True).start()  # or it would stay a zombie
    return True


def cancel(folder: Path) -> None:
    """Ask a job to end; what it has done stays, and `retry` goes on from there."""
    read_job(folder)
    write_text(folder / CANCEL, "")
    lock = _take(folder)
    if lock is not None:  # nobody is there to see it
        try:
            if (now := read_progress(folder)).state not in ENDED:
                _end(folder, now, "cancelled", "")
        finally:
            os.close(lock)


def retry(folder: Path) -> bool:
    """Go on with a job that failed or was cancelled; whether it was started."""
    read_job(folder)
    lock = _take(folder)
    if lock is None:
        return False
    try:
        if read_progress(folder).state == "finished":
            return False
        (folder / CANCEL).unlink(missing_ok=True)
        attempts = read_progress(folder).attempts
        _write(folder / STATE, asdict(Progress(attempts=attempts, changed=time.time())))
    finally:
        os.close(lock)
    return start(folder)


def status(folder: Path) -> Status:
    """How far a job is; SettingsError where there is none."""
    read_job(folder)
    held = _is_held(folder)  # before the state: a job that ends in between has ended
    now = read_progress(folder)
    state: Any = now.state
    if state in ("checking", "training"):
        state = "interrupted" if not held else "silent" if _is_silent(folder) else state
    share = left = None
    if (steps := _steps(folder / RUN)) and now.state in ("training", *ENDED):
        share = steps.done / steps.total
        if state == "training" and now.first_step < steps.done < steps.total:
            pace = (time.time() - now.changed) / (steps.done - now.first_step)
            left = pace * (steps.total - steps.done)
    return Status(state, now.message, now.attempts, share, left)


def tail(folder: Path, lines: int = 40) -> list[str]:
    """The last lines of what the latest command has printed."""
    for name in reversed(LOGS.values()):
        if (folder / name).is_file():
            return _last_lines(folder / name, lines)
    return []


def read_job(folder: Path) -> Job:
    """The job of a folder; SettingsError where there is none."""
    try:
        return Job(**json.loads((folder / JOB).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(f"{folder}: holds no job ({error}); create one there") from error


def read_progress(folder: Path) -> Progress:
    """What ``state.json`` says; SettingsError where it is missing or damaged."""
    try:
        return Progress(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise SettingsError(
            f"{folder / STATE}: cannot be read ({error}); create the job anew in another folder"
        ) from error


# The lock


def _take(folder: Path) -> int | None:
    """The lock's file descriptor, or None where a process of the job has it.

    Tries for a moment, since `status` holds it for one.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(0.02)
    os.close(descriptor)
    return None


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_silent(folder: Path) -> bool:
    """Whether the supervisor has not been at work for long; for a folder whose lock is held."""
    with suppress(FileNotFoundError):
        return time.time() - (folder / HEARTBEAT).stat().st_mtime > SILENT_SECONDS
    return False


def _end_groups(folder: Path) -> None:
    """Kill the processes of a job whose lock is held: while one lives, its numbers are its own."""
    for pid in read_progress(folder).pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


# The supervisor


def main() -> None:
    """Work on the job of a folder whose lock is held by an inherited file descriptor."""
    folder, lock = Path(sys.argv[1]), int(sys.argv[2])
    try:
        if _done(folder, "checking", lock) and _done(folder, "training", lock):
            _end(folder, read_progress(folder), "finished", "")
    except (CdgpError, OSError) as error:
        _end(folder, read_progress(folder), "failed", str(error))


def _done(folder: Path, step: Literal["checking", "training"], lock: int) -> bool:
    """Run a step until it succeeds; False where the job ended instead."""
    if step == "checking" and read_progress(folder).state == "training":
        return True
    while True:
        if (folder / CANCEL).exists():
            _end(folder, read_progress(folder), "cancelled", "")
            return False
        code = _run(folder, step, lock)
        now = read_progress(folder)
        if code == 0:
            if step == "checking" and (leaks := _findings(folder, "leak")):
                _end(folder, now, "failed", f"training and test share images: {leaks}; take one "
                     "of each out of the bins, or give them one group")  # fmt: skip
                return False
            return True
        if (folder / CANCEL).exists():
            continue
        if code > 0:
            said = " ".join(_last_lines(folder / LOGS[step], 3))
            if step == "checking":
                said = _findings(folder, "error") or said
            _end(folder, now, "failed", said or f"{step}: exit code {code}")
            return False
        steps = _steps(folder / RUN)
        further = steps is not None and steps.done > now.first_step
        deaths = 1 if further else now.deaths + 1
        if deaths >= MOST_DEATHS:
            _end(folder, now, "failed", f"{step} was killed {deaths} times at the same place "
                 f"(signal {-code}); the machine may be short of memory: end other programs, or "
                 "train with a smaller --input-size")  # fmt: skip
            return False
        _write(folder / STATE, asdict(replace(now, deaths=deaths)))


def _run(folder: Path, step: Literal["checking", "training"], lock: int) -> int:
    """Run a step's command once; its exit code, or the signal that killed it, negative."""
    job, now = read_job(folder), read_progress(folder)
    command = [*job.check] if step == "checking" else [*job.train, *_going_on(folder / RUN)]
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    own = os.getpid()

    def prepare() -> None:
        os.nice(NICE)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:  # the supervisor ended before that took effect
            os._exit(1)

    steps = _steps(folder / RUN)
    with (folder / LOGS[step]).open("ab") as log:
        begun = datetime.now().astimezone().isoformat(" ", "seconds")
        log.write(f"-- {begun}: {' '.join(command)}\n".encode("utf-8", "surrogateescape"))
        log.flush()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock],
            process_group=0, preexec_fn=prepare,
        )  # fmt: skip
    _write(folder / STATE, asdict(replace(
        now, state=step, pids=[own, child.pid], changed=time.time(),
        first_step=steps.done if steps else 0, attempts=now.attempts + (step == "training"),
    )))  # fmt: skip
    asked: float | None = None
    # Not reaped, as Popen's own methods would, before its group is killed: until then no other
    # process can get its number.
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        os.utime(folder / HEARTBEAT)
        time.sleep(POLL_SECONDS)
        if asked is None and (folder / CANCEL).exists():
            asked = time.monotonic()
            os.kill(child.pid, signal.SIGINT)
        elif asked is not None and time.monotonic() - asked > GRACE_SECONDS:
            os.kill(child.pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # workers that it has left behind
    return child.wait()


def _going_on(run: Path) -> list[str]:
    """The option of ``cdgp train`` for a folder in which a training may have begun."""
    if (run / run_folder.CONFIG).exists():
        return ["--resume"]
    return ["--overwrite"] if (run / run_folder.RUN).exists() else []


def _findings(folder: Path, which: Literal["leak", "error"]) -> str:
    """What ``cdgp check`` found, in words; empty where it found no such thing."""
    try:
        record = json.loads((folder / CHECKED / run_folder.CHECK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    found = [
        f"{f['text']} ({', '.join(f['pictures'][0])})" if f["pictures"] else str(f["text"])
        for f in record["findings"]
        if (f["kind"] in LEAKS if which == "leak" else f["severity"] == "error")
    ]
    return shortened("; ".join(found), 1000)


def _end(folder: Path, now: Progress, state: State, message: str) -> None:
    _write(folder / STATE, asdict(
        replace(now, state=state, message=message, pids=[], changed=time.time())
    ))  # fmt: skip


class _Steps(NamedTuple):
    done: int
    total: int


def _steps(run: Path) -> _Steps | None:
    """Steps of a training that its log tells, of those that its settings say."""
    try:
        config = json.loads((run / run_folder.CONFIG).read_text(encoding="utf-8"))
        of_stage = {name: int(config[key]["steps"]) for name, key in STAGES.items()}
        records = [r for r in run_folder.read_log(run) if r.get("stage") in STAGES and "step" in r]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    done = 0
    if records:
        names = list(STAGES)
        before = names[: names.index(records[-1]["stage"])]
        done = sum(of_stage[name] for name in before) + int(records[-1]["step"]) + 1
    return _Steps(done, max(1, sum(of_stage.values())))


def _last_lines(path: Path, lines: int) -> list[str]:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 200 * lines))
        return file.read().decode("utf-8", "replace").splitlines()[-lines:]


def _write(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
