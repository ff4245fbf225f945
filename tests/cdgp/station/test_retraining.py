"""The bins become a manifest that keeps the two rules, and a finished job leaves a candidate."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import select, update
from tests.cdgp.station.serving import Served, grey, serving

from cdgp.data.manifest import read_csv
from cdgp.station import jobs, retraining, schema, trail
from cdgp.station.pipeline import live_policy
from cdgp.station.schema import images

CHECK = """
import json, sys, pathlib
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
(folder / "check.json").write_text(json.dumps({"findings": []}))
"""
TRAIN = """
import pathlib, shutil, sys, time
run, table, options = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
run.mkdir(exist_ok=True)
print("options:", *options, flush=True)
(run / "begun").touch()
while "slow" in options and not (run / "go").exists():
    time.sleep(0.02)
shutil.copy(table, run / "manifest.csv")
(run / "model.safetensors").write_text("0.25")
"""


def stub_job(folder: Path, manifest: Path, options: Sequence[str] = ()) -> None:
    check = [sys.executable, "-c", CHECK, str(folder / jobs.CHECKED)]
    train = [sys.executable, "-c", TRAIN, str(folder / jobs.RUN), str(manifest), *options]
    jobs.write_job(folder, jobs.Job(check, train))


@pytest.fixture
def line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A station with twelve judged images; its jobs are stubs, with the options of the marker."""
    monkeypatch.setattr(jobs, "create", stub_job)
    monkeypatch.setattr(retraining, "LOOK", 0.02)
    option = getattr(request, "param", "quick")
    with serving(tmp_path / "home", f'train = ["{option}"]\n') as served:
        served.model(0.0, 0.0, 1.0)  # everything goes to a person
        operator = served.person("operator")
        for level in range(20, 260, 20):
            operator.upload(grey(tmp_path, level), part=f"part {level}")
        served.wait()
        for image in operator.claim(served.line):
            operator.review("defective" if image["id"] % 3 == 0 else "good", image)
        yield served


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def change(served: Served, image: int, **values: object) -> None:
    with served.station.store.write() as connection:
        connection.execute(update(images).where(images.c.id == image).values(**values))


def test_suspects_are_trained_on_and_nothing_else(line: Served, tmp_path: Path) -> None:
    cells = [(split, audit) for split in ("fit", "calibration", "test") for audit in (False, True)]
    for image, (split, audit) in enumerate(cells, 1):
        change(line, image, split=split, audit=audit)
    for image in range(7, 13):
        change(line, image, split="fit")
    change(line, 7, verdict="unsure")
    change(line, 8, verdict=None)
    change(line, 9, removed_at=1.0)
    operator = line.person("operator")
    copies = {10: "good", 11: "defective"}  # of which the first agrees with its original
    for image, verdict in copies.items():
        other = operator.upload(grey(tmp_path, 20 * image), part="another")
        line.wait()
        (seen,) = [i for i in operator.claim(line.line) if i["id"] == other["id"]]
        assert operator.review(verdict, seen).status_code == 200
    with line.station.store.read() as connection:
        found = retraining.snapshot(connection, line.station.intake, line.line, tmp_path)
    digests = {line.row(image).digest: image for image in range(1, 13)}
    told = {digests[s.image.name]: (s.split, s.defective) for s in found.manifest.samples}
    assert told == {
        1: ("fit", False), 2: ("fit", False), 4: ("calibration", False), 6: ("test", True),
        10: ("fit", False), 12: ("fit", True),
    }  # fmt: skip
    assert found.contradicting == 1
    found.manifest.write_csv(tmp_path / "bins.csv")
    again = read_csv(tmp_path / "bins.csv")
    assert {s.sha256: s.group for s in again.samples} == {
        line.row(image).digest: f"part {20 * image}" for image in told
    }


def test_a_finished_job_leaves_a_candidate_and_changes_nothing(line: Served) -> None:
    for image in range(1, 13):
        change(line, image, split="fit")
    engineer = line.person("engineer")
    assert line.person("operator").post(f"/lines/{line.line}/jobs").status_code == 403
    answer = engineer.post(f"/lines/{line.line}/jobs")
    assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/1")
    wait_for(lambda: "Compare its model" in engineer.get("/jobs/1/status").text)
    assert "options: quick" in engineer.get("/jobs/1").text
    assert "finished" in engineer.get("/jobs").text
    page = engineer.get("/models").text
    assert "<td>job 1</td>" in page
    with line.station.store.read() as connection:
        live = live_policy(connection, line.line)
        told = [entry["action"] for entry in trail.entries(connection)]
    assert live and live.name == "plus-0.0.onnx"
    assert told[-3:] == ["retraining asked for", "model added", "candidate added"]


@pytest.mark.parametrize("line", ["slow"], indirect=True)
def test_jobs_wait_for_each_other_are_cancelled_and_go_on(line: Served) -> None:
    for image in range(1, 13):
        change(line, image, split="fit")
    engineer = line.person("engineer")
    engineer.post(f"/lines/{line.line}/jobs")
    engineer.post(f"/lines/{line.line}/jobs")
    with line.station.store.read() as connection:
        rows = connection.execute(select(schema.jobs).order_by(schema.jobs.c.id)).fetchall()
        first, second = (line.station.retraining.folder(row) for row in rows)
    wait_for((first / jobs.RUN / "begun").exists)
    assert engineer.post("/jobs/1/retry").status_code == 400
    assert engineer.post("/jobs/1/cancel").status_code == 303
    wait_for((second / jobs.RUN / "begun").exists)
    assert jobs.status(first).state == "cancelled"
    assert "cancelled" in engineer.get("/jobs/1").text
    assert engineer.post("/jobs/1/retry").status_code == 400, "the second one works"
    (second / jobs.RUN / "go").touch()
    wait_for(lambda: "Compare its model" in engineer.get("/jobs/2").text)
    (first / jobs.RUN / "go").touch()
    assert engineer.post("/jobs/1/retry").status_code == 303
    wait_for(lambda: "Compare its model" in engineer.get("/jobs/1").text)


def test_nothing_to_train_on_is_told_at_once(line: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for image in range(1, 13):
        change(line, image, split="test")
    answer = line.person("engineer").post(f"/lines/{line.line}/jobs")
    assert answer.status_code == 400
    assert "judged good" in answer.text
    monkeypatch.setattr(jobs, "POSSIBLE", False)
    assert "Linux and macOS" in line.person("engineer").post(f"/lines/{line.line}/jobs").text


def test_a_job_whose_folder_is_gone_has_failed(line: Served) -> None:
    for image in range(1, 13):
        change(line, image, split="fit")
    engineer = line.person("engineer")
    engineer.post(f"/lines/{line.line}/jobs")
    wait_for(lambda: "Compare its model" in engineer.get("/jobs/1").text)
    shutil.rmtree(line.station.store.home / retraining.JOBS)
    assert "failed" in engineer.get("/jobs").text
    assert "holds no job" in engineer.get("/jobs/1").text
