"""Jobs whose processes are killed at random moments end once, and never two work at a time."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from tests.helpers import ROOT, Interrupting, raised, tiny_settings, two_bins

from cdgp import run_folder
from cdgp.artifact import load
from cdgp.data.manifest import Manifest
from cdgp.errors import OutputError, SettingsError
from cdgp.station import jobs
from cdgp.workflows import check_data, train_run

STUB = """
import fcntl, json, os, signal, sys, time
from pathlib import Path

run, steps, mood = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run.mkdir(exist_ok=True)
alone = (run / "alone").open("w")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (run / "two at once").touch()
print("stub", *sys.argv[3:], flush=True)
if mood == "fails":
    sys.exit("error: parts: no image of it can be read")
if mood == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if mood == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
(run / "config.json").write_text(
    json.dumps({"dual_gp": {"steps": steps // 2}, "student": {"steps": steps - steps // 2}}))
log = run / "log.jsonl"
done = len(log.read_text().splitlines()) if log.exists() else 0
assert not done or "--resume" in sys.argv
for step in range(done, steps):
    late = step >= steps // 2
    stage, number = ("Reverse student", step - steps // 2) if late else ("Dual GP", step)
    with log.open("a") as file:
        file.write(json.dumps({"stage": stage, "step": number}) + "\\n")
    time.sleep(0.01 if mood == "works" else 30)
if not (run / "model").exists():
    with (run / "finished").open("a") as file:
        file.write("once\\n")
    (run / "model").touch()
"""
CHECK = """
import json, sys
from pathlib import Path

folder, kind = Path(sys.argv[1]), sys.argv[2]
folder.mkdir(exist_ok=True)
found = [{"kind": kind, "severity": sys.argv[3], "text": "1 pair: alike",
          "pictures": [["a.png", "b.png"]]}] if kind != "none" else []
(folder / "check.json").write_text(json.dumps({"findings": found}))
sys.exit(3 if sys.argv[3] == "error" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of a job, whose processes are ended after the test."""
    place = tmp_path / "job"
    yield place
    if (place / jobs.STATE).exists() and jobs._is_held(place):
        jobs._end_groups(place)


def stub_job(
    folder: Path, steps: int = 40, mood: str = "works", kind: str = "none", severity: str = "note"
) -> None:
    folder.mkdir()
    check = [sys.executable, "-c", CHECK, str(folder / jobs.CHECKED), kind, severity]
    train = [sys.executable, "-c", STUB, str(folder / jobs.RUN), str(steps), mood]
    jobs.write_job(folder, jobs.Job(check, train))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait, for ever where it never comes: the suite has no other time limit."""
    while not condition():
        time.sleep(0.01)


def ended(folder: Path) -> jobs.Status:
    """Wait until nobody works on a job."""
    wait_for(lambda: not jobs._is_held(folder))
    return jobs.status(folder)


def steps_of(folder: Path) -> int:
    log = folder / jobs.RUN / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def further_or_free(folder: Path, steps: int) -> bool:
    return steps_of(folder) > steps or not jobs._is_held(folder)


def killed(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_is_killed_at_random_moments_finishes_once(folder: Path, seed: int) -> None:
    """Child, supervisor, or both; two programs try to start it again all the time."""
    rng = random.Random(seed)
    stub_job(folder)
    kills = 0
    while jobs.status(folder).state != "finished":
        started = [jobs.start(folder) for _ in range(2)]
        assert sum(started) <= 1
        before = steps_of(folder)
        time.sleep(rng.uniform(0, 0.3))
        if kills % 2:  # every second attempt comes at least one step further
            wait_for(partial(further_or_free, folder, before))
        pids = jobs.read_progress(folder).pids
        for pid in rng.sample(pids, rng.randint(0, len(pids))) if kills < 12 else []:
            killed(pid)
        kills += 1
        assert jobs.status(folder).state not in ("failed", "cancelled")
    assert ended(folder).state == "finished"
    assert (folder / jobs.RUN / "finished").read_text() == "once\n"
    assert not (folder / jobs.RUN / "two at once").exists()
    assert steps_of(folder) == 40
    before_again = (folder / jobs.STATE).read_bytes()
    assert not jobs.start(folder) and not jobs.retry(folder)
    assert (folder / jobs.STATE).read_bytes() == before_again


def test_a_job_goes_on_without_the_program_that_started_it(folder: Path) -> None:
    stub_job(folder)
    starts = "import sys; from pathlib import Path; from cdgp.station import jobs; " \
        "assert jobs.start(Path(sys.argv[1]))"  # fmt: skip
    subprocess.run([sys.executable, "-c", starts, str(folder)], check=True)
    assert not jobs.start(folder)
    found = ended(folder)
    assert (found.state, found.attempts, found.share) == ("finished", 1, 1.0)
    assert (found.message, found.seconds_left) == ("", None)
    assert jobs.tail(folder)[-1] == "stub works"


def test_how_far_it_is_is_told(folder: Path) -> None:
    stub_job(folder, steps=20, mood="sleeps")
    assert jobs.status(folder) == ("waiting", "", 0, None, None)
    assert jobs.start(folder)
    wait_for(lambda: steps_of(folder) == 1)
    found = jobs.status(folder)
    assert (found.state, found.share) == ("training", 1 / 20)
    assert found.seconds_left is not None
    elapsed = time.time() - jobs.read_progress(folder).changed
    assert 0 < found.seconds_left <= 19 * elapsed
    assert (folder / jobs.HEARTBEAT).stat().st_mtime > time.time() - jobs.SILENT_SECONDS
    with (folder / jobs.RUN / "log.jsonl").open("a") as log:
        log.write('{"stage": "Reverse student", "step": 4}\n{"stage": "Rever')  # in the second half
    assert jobs.status(folder).share == 15 / 20
    jobs.cancel(folder)
    assert ended(folder).state == "cancelled"


def test_a_cancelled_job_goes_on_when_asked(folder: Path) -> None:
    stub_job(folder, steps=40_000)  # far more than it does before it is cancelled
    jobs.start(folder)
    wait_for(lambda: steps_of(folder) > 3)
    jobs.cancel(folder)
    assert ended(folder).state == "cancelled"
    done = steps_of(folder)
    assert not jobs.start(folder), "only when asked"
    text = (folder / jobs.JOB).read_text()
    (folder / jobs.JOB).write_text(text.replace('"40000"', f'"{done + 5}"'))
    assert jobs.retry(folder)
    assert ended(folder).state == "finished"
    assert steps_of(folder) == done + 5, "and from where it was"
    assert "stub works --resume" in jobs.tail(folder)


def test_a_job_that_nobody_works_on_is_cancelled_at_once(folder: Path) -> None:
    stub_job(folder)
    jobs.cancel(folder)
    assert jobs.status(folder).state == "cancelled"


def test_a_training_that_ignores_it_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_job(folder, mood="stubborn")
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.2)
    lock = jobs._take(folder)
    assert lock is not None
    (folder / jobs.HEARTBEAT).touch()
    supervisor = threading.Thread(target=jobs._done, args=(folder, "training", lock))
    supervisor.start()
    wait_for(lambda: steps_of(folder) > 0)
    jobs.cancel(folder)
    supervisor.join()
    os.close(lock)
    assert jobs.status(folder).state == "cancelled"


@pytest.mark.parametrize(("kind", "severity"), [
    ("byte_leak", "error"), ("group_leak", "error"), ("near_leak", "warning"),
])  # fmt: skip
def test_leaks_between_splits_stop_a_job(folder: Path, kind: str, severity: str) -> None:
    stub_job(folder, kind=kind, severity=severity)
    jobs.start(folder)
    found = ended(folder)
    assert (found.state, found.attempts) == ("failed", 0)
    assert "alike (a.png, b.png)" in found.message
    assert not (folder / jobs.RUN).exists()


def test_failures_are_told(folder: Path, tmp_path: Path) -> None:
    stub_job(folder, mood="fails")
    jobs.start(folder)
    found = ended(folder)
    assert found.state == "failed" and "error: parts: no image of it can be read" in found.message
    dies = tmp_path / "dies"
    stub_job(dies, mood="dies")
    jobs.start(dies)
    found = ended(dies)
    assert (found.state, found.attempts) == ("failed", jobs.MOST_DEATHS)
    assert "killed 3 times" in found.message and "memory" in found.message
    gone = tmp_path / "gone"
    stub_job(gone)
    job = jobs.read_job(gone)
    (gone / jobs.JOB).unlink()
    jobs.write_job(gone, replace(job, train=["/no/such/program"]))
    jobs.start(gone)
    found = ended(gone)
    assert found.state == "failed" and "No such file" in found.message


def test_silent_processes_are_ended_and_the_job_goes_on(folder: Path) -> None:
    stub_job(folder, steps=60)
    jobs.start(folder)
    wait_for(lambda: steps_of(folder) > 0)
    first = jobs.read_progress(folder).pids
    for pid in first:
        os.kill(pid, signal.SIGSTOP)
    assert jobs.status(folder).state == "training" and not jobs.start(folder)
    long_ago = time.time() - jobs.SILENT_SECONDS - 1
    os.utime(folder / jobs.HEARTBEAT, (long_ago, long_ago))
    assert jobs.status(folder).state == "silent"
    assert jobs.start(folder)
    assert ended(folder).state == "finished"
    assert not (folder / jobs.RUN / "two at once").exists()
    assert steps_of(folder) == 60


def test_an_interrupted_job_is_told_as_such(folder: Path) -> None:
    stub_job(folder, mood="sleeps")
    jobs.start(folder)
    wait_for(lambda: steps_of(folder) > 0)
    killed(jobs.read_progress(folder).pids[0])
    wait_for(lambda: not jobs._is_held(folder))  # the child has gone with its supervisor
    assert jobs.status(folder).state == "interrupted"


def test_what_is_refused(folder: Path) -> None:
    for call in (jobs.start, jobs.status, jobs.cancel, jobs.retry):
        raised(partial(call, folder), "holds no job", error=SettingsError)
    stub_job(folder)
    job = jobs.read_job(folder)
    raised(lambda: jobs.write_job(folder, job), "holds a job already", error=OutputError)
    (folder / jobs.STATE).write_text("{")
    raised(lambda: jobs.status(folder), jobs.STATE, "cannot be read", error=SettingsError)


@pytest.mark.slow
def test_a_real_training_that_was_interrupted_finishes(
    folder: Path, surfaces: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run, table = folder / jobs.RUN, surfaces.root / "manifest.csv"
    with pytest.raises(KeyboardInterrupt):
        train_run(table, run, tiny_settings(), progress=Interrupting("Reverse student", 2))
    settings = shutil.copy(run / "config.json", tmp_path)
    jobs.create(folder, table, ["--config", str(settings), "--quiet"])
    now = jobs.read_progress(folder)
    jobs._write(folder / jobs.STATE, asdict(replace(now, state="training")))
    steps = jobs._steps(run)
    assert steps == (5, 8), "a log of real stages is understood"
    assert jobs.status(folder).state == "interrupted"
    assert jobs.start(folder)
    found = ended(folder)
    assert (found.state, found.attempts, found.share) == ("finished", 1, 1.0), jobs.tail(folder)
    assert any("--resume" in line for line in jobs.tail(folder))
    model = load(run / "model.safetensors")
    found_run = run_folder.read_run(run)
    assert found_run and found_run.run_id == model.provenance["run_id"]
    assert (run / "report.html").is_file()


def test_leaks_that_the_real_check_finds_are_understood(tmp_path: Path) -> None:
    bins = two_bins(tmp_path / "bins", 2, 1)
    (bins / "good/01.png").write_bytes((bins / "good/00.png").read_bytes())
    table = bins / "manifest.csv"
    table.write_text("image,label,split\ngood/00.png,good,train\ngood/01.png,good,test\n")
    check_data(table, tmp_path / jobs.CHECKED)
    found = jobs._findings(tmp_path, "leak")
    assert "files with equal bytes on two sides" in found and "good/01.png" in found
    assert found in jobs._findings(tmp_path, "error")
