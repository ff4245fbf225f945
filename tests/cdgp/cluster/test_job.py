"""Jobs on Ray: the rows of ``cdgp predict``, whatever ends meanwhile."""

import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from pyarrow import dataset, parquet
from tests.cdgp.cluster.deadly import Deadly, beside, noted
from tests.helpers import ROOT, Interrupting, cdgp, noise_image, plain, raised

from cdgp.cluster import engine, job, predict_on_ray
from cdgp.cluster.scorer import schema
from cdgp.errors import Interrupted, ModelFileError, OutputError
from cdgp.files import cell_text, digest, printable
from cdgp.inference import load
from cdgp.workflows import predict_folder

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with one node of two processors; nodes may be added."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False,
                            "object_store_memory": 2**27},
        )  # fmt: skip
        ray.init(made.address, log_to_driver=False, logging_level="error")
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def small(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shards of two images, and scorers that tell what they do."""
    monkeypatch.setattr(job, "SHARDS", (2,))
    monkeypatch.setattr(engine, "Scorer", Deadly)
    return cluster


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """All rows of a folder of results, by their paths."""
    found: list[dict[str, Any]] = []
    for path in folder.glob("part-*.parquet"):
        found += parquet.read_table(path).to_pylist()
    return sorted(found, key=lambda row: row["path"])


def images_in(folder: Path) -> list[str]:
    return sorted(printable(str(path)) for path in folder.rglob("*.png"))


@pytest.fixture(scope="module")
def expected(model: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The rows of the images as ``cdgp predict`` and hashlib have them."""
    out = tmp_path_factory.mktemp("expected") / "out"
    predict_folder(model, images, out, overlays="none")
    with (out / "scores.csv").open(encoding="utf-8") as file:
        scores = {cell_text(row["image"]): row for row in csv.DictReader(file)}
    detector, found = load(model), []
    for path in sorted(images.rglob("*.png"), key=lambda path: printable(str(path))):
        place, name = printable(str(path)), printable(path.relative_to(images).as_posix())
        row: dict[str, Any] = {
            "path": place,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "model": hashlib.sha256(model.read_bytes()).hexdigest(),
        }
        if path.name == "torn.png":
            found.append(row)
            continue
        one, told = detector.predict(path), scores[name]
        assert float(told["pred_score"]) == pytest.approx(one.pred_score, abs=1e-6)
        regions = [vars(region) for region in one.regions]
        assert json.loads(told["regions"]) == regions
        found.append({
            **row, "score": one.pred_score, "label": one.pred_label, "regions": regions,
            "warnings": list(one.warnings), "problem": None,
        })  # fmt: skip
    return found


def check_rows(found: list[dict[str, Any]], expected: list[Any]) -> None:
    assert [row["path"] for row in found] == [row["path"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        if "score" in other:
            assert row == other
        else:
            assert row == {**row, **other}
            assert row["score"] is row["label"] is None and row["regions"] == []
            assert row["problem"].startswith(row["path"]) and "truncated" in row["problem"]


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_rows_are_those_of_predict(
    small: Any, model: Path, images: Path, tmp_path: Path, expected: list[Any], actors: int
) -> None:
    out = tmp_path / "out"
    done = predict_on_ray(model, images, out, actors=actors)
    check_rows(rows_in(out), expected)
    rejected = sum(row.get("label", False) for row in expected)
    assert (done.images, done.rejected, done.unreadable) == (11, rejected, 1)
    assert (done.skipped, done.ended) == (0, 0) and "torn.png" in done.problems[0]
    assert {path.name for path in out.iterdir()} == {
        "_job.json", "_list.parquet", *(name for name, _ in noted(out, "ended")),
    }  # fmt: skip
    assert len(set(noted(out, "began"))) == 6
    assert len({pid for _, pid in noted(out, "began")}) == actors
    assert dataset.dataset(out).count_rows() == 11  # readers skip the list of images
    table = parquet.read_table(next(out.glob("part-*")))
    assert table.schema.equals(schema())
    assert json.loads(table.schema.metadata[b"cdgp"])["threshold"] == load(model).threshold


@pytest.mark.slow
def test_command(cluster: Any, model: Path, images: Path, tmp_path: Path) -> None:
    """A whole shard at once, by the command, and again where nothing is left."""
    out = tmp_path / "out"
    result = cdgp("predict", model, images, "--ray", "--out", out, "--quiet", "--actors", 1)
    assert result.exit_code == 3 and "10 scored" in plain(result), result.output
    assert "torn.png" in plain(result) and "see the column problem" in plain(result)
    assert len(rows_in(out)) == 11
    again = ["predict", model, images, "--out", out, "--quiet", "--ray"]
    assert "--resume, replace it with --overwrite" in plain(cdgp(*again))
    assert "11 of these images had their rows already" in plain(cdgp(*again, "--resume"))
    assert "had their rows" not in plain(cdgp(*again, "--overwrite"))
    assert len(rows_in(out)) == 11
    for option in (["--save-maps"], ["--overlays", "all"], ["--best-runtime"]):
        assert cdgp(*again, *option).exit_code == 2
    assert cdgp(*again[:-1], "--actors", 1).exit_code == 2


@pytest.mark.slow
def test_interrupted_job_goes_on(
    small: Any, model: Path, images: Path, tmp_path: Path, expected: list[Any]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted, match=r"after [45678] of 11 images; --resume"):
        predict_on_ray(model, images, out, actors=1, progress=Interrupting("Prediction", 3))
    before = {path.name for path in out.glob("part-*")}
    assert 2 <= len(before) < 6
    done = predict_on_ray(model, images, out, actors=1, resume=True)
    assert done.images == 11 and 2 * len(before) - 1 <= done.skipped <= 2 * len(before)
    check_rows(rows_in(out), expected)
    again = Counter(name for name, _ in noted(out, "began"))
    assert all(again[name] == 1 for name in before) and sum(again.values()) <= 6 + 1
    assert predict_on_ray(model, images, out, resume=True).skipped == 11


@pytest.mark.slow
def test_image_that_ends_its_process_is_a_row(
    small: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SHARDS", (8,))
    folder, out = tmp_path / "images", tmp_path / "out"
    for name in ("0", "1", "2-crash"):
        noise_image(folder / f"{name}.png")
    done = predict_on_ray(model, folder, out, actors=1)
    rows = rows_in(out)
    assert [row["path"] for row in rows] == images_in(folder)
    assert [row["problem"] is None for row in rows] == [True, True, False]
    assert "the process ended" in rows[2]["problem"]
    # Three times on all of them, once on two, twice on the one alone.
    assert (done.images, done.unreadable, done.ended) == (3, 1, 6)
    begun = Counter(name for name, _ in noted(out, "began"))
    assert sorted(begun.values()) == [1, 1, 1, 2, 3]
    assert predict_on_ray(model, folder, out, resume=True).skipped == 3


@pytest.mark.slow
def test_workers_and_driver_are_killed(small: Any, model: Path, tmp_path: Path) -> None:
    """Nothing twice, nothing missing, and no more redone than was in work."""
    folder, out = tmp_path / "images", tmp_path / "slow"
    for i in range(24):
        noise_image(folder / f"{i:02}.png", seed=i)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(model), str(folder), str(out)],
        cwd=ROOT, env={**os.environ, "RAY_ADDRESS": small.address},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while len(list(noted(out, "ended"))) < 3 and driver.poll() is None:
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    killed: list[str] = []
    stop = Event()

    def kill() -> None:
        rng = random.Random(0)
        while len(killed) < 3 and not stop.wait(rng.uniform(0.3, 0.8)):
            name, pid = list(noted(out, "began"))[-1]
            if name not in dict(noted(out, "ended")):
                with suppress(ProcessLookupError):  # one of the driver that is gone
                    os.kill(pid, signal.SIGKILL)
                    killed.append(name)

    killer = Thread(target=kill)
    killer.start()
    try:
        done = predict_on_ray(model, folder, out, actors=2, resume=True)
    finally:
        stop.set()
        killer.join()
    assert [row["path"] for row in rows_in(out)] == images_in(folder)
    assert done.images == 24 and done.skipped >= 6 and 1 <= done.ended <= len(killed)
    began = Counter(name for name, _ in noted(out, "began"))
    assert sum(began.values()) <= len(began) + 2 + len(killed)


DRIVER = """
import sys
from cdgp.cluster import engine, job, predict_on_ray
from tests.cdgp.cluster.deadly import Deadly
job.SHARDS, engine.Scorer = (2,), Deadly
predict_on_ray(*sys.argv[1:], actors=2)
"""


@pytest.mark.slow
def test_lost_node_costs_no_row(small: Any, model: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "images", tmp_path / "held"
    for i in range(10):
        noise_image(folder / f"{i:02}.png", seed=i)
    node = small.add_node(num_cpus=2)
    small.wait_for_nodes()

    def lose() -> None:
        """Take the node away once every worker holds a piece."""
        while len({pid for _, pid in noted(out, "began")}) < 3:
            time.sleep(0.02)
        small.remove_node(node, allow_graceful=False)
        beside(out, "free").touch()

    loser = Thread(target=lose, daemon=True)
    loser.start()
    # One worker more than the other node takes.
    done = predict_on_ray(model, folder, out, actors=3, workers=1)
    loser.join()
    assert 1 <= done.ended <= 2
    assert [row["path"] for row in rows_in(out)] == images_in(folder)


@pytest.mark.slow
def test_other_model_images_or_rate_are_refused(
    small: Any, model: Path, images: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other.onnx"
    predict_on_ray(model, images / "b", out, actors=1)
    before = rows_in(out)
    other.write_bytes(model.read_bytes() + b" ")
    refused = {"the same one": "give the same one to go on"}
    raised(lambda: predict_on_ray(other, images / "b", out, resume=True),
           "was started with model", digest(model)[:12], *refused.values(),
           error=ModelFileError)  # fmt: skip
    raised(lambda: predict_on_ray(model, images, out, resume=True), str(images / "b"))
    raised(lambda: predict_on_ray(model, images / "b", out, resume=True, defect_rate=0.1),
           "--defect-rate None", error=OutputError)  # fmt: skip
    assert rows_in(out) == before
    # What is no model is told with its own path, and not with that of a worker's copy.
    message = raised(lambda: predict_on_ray(other, images, tmp_path / "new", actors=1),
                     str(other), error=ModelFileError)  # fmt: skip
    assert "cdgp-model-" not in message


@pytest.mark.slow
def test_full_place_ends_the_job(small: Any, model: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "full"
    raised(lambda: predict_on_ray(model, images, out, actors=1),
           f"{out}/part-", "File too large", error=OutputError)  # fmt: skip
    assert not list(out.glob("part-*"))


@pytest.mark.slow
def test_urls_are_read_and_written(
    small: Any, model: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By fsspec, as with a store elsewhere; an image that is not there is a row."""
    monkeypatch.setattr(engine, "Scorer", Deadly.__base__)
    names = tmp_path / "names.txt"
    there = [f"local://{images}/a/{i:02}.png" for i in range(4)]
    names.write_text("\n".join([*there, f"local://{images}/none.png", ""]))
    done = predict_on_ray(model, names, f"local://{tmp_path}/out", actors=1)
    rows = {row["path"]: row for row in rows_in(tmp_path / "out")}
    assert set(rows) == {*there, f"local://{images}/none.png"} and done.unreadable == 1
    missing = rows[f"local://{images}/none.png"]
    assert missing["problem"] == f"local://{images}/none.png: there is no such file"
    detector = load(model)
    for i, place in enumerate(there):
        assert rows[place]["score"] == detector.predict(images / f"a/{i:02}.png").pred_score
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
