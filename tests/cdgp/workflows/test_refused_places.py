"""The table of places: every row is made and given to the commands."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.helpers import ROOT, TINY_OPTIONS, cdgp, noise_image, plain, snapshot
from tests.refused import rows

from cdgp import run_folder
from cdgp.data.manifest import Manifest
from cdgp.inference import Detector, Prediction, Prepared
from cdgp.locks import one_writer
from cdgp.runtimes.base import Outputs
from cdgp.workflows import Run
from cdgp_bench.studies.refused import Row


class Place(NamedTuple):
    """What the inputs are made of."""

    path: Path
    model: Path
    run: Run
    data: Path
    monkeypatch: pytest.MonkeyPatch

    def image(self, name: str = "in/a.png") -> Path:
        return noise_image(self.path / name, (96, 80))

    def predict(self, images: Path, *options: object, out: str = "out") -> tuple[int, str]:
        return told("predict", self.model, images, "--out", self.path / out, "--quiet", *options)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Nothing below the place changes meanwhile."""
        before = snapshot(self.path)
        yield
        assert snapshot(self.path) == before


def told(*arguments: object) -> tuple[int, str]:
    """Exit code and words of a command."""
    result = cdgp(*arguments)
    return result.exit_code, plain(result)


def train(data: Path, out: Path, *options: object) -> tuple[int, str]:
    return told("train", data, "--out", out, *TINY_OPTIONS, *options)


def second_process(place: Place) -> tuple[int, str]:
    with run_folder.lock(place.path / "out", "train"), place.unchanged():
        return place.predict(place.data / "good")


def second_export(place: Place) -> tuple[int, str]:
    out = place.path / "a.onnx"
    with one_writer(place.path, "export", "", out), place.unchanged():
        return told("export", place.model, "--to", "onnx", "--out", out)


def share_without_locks(place: Place) -> tuple[int, str]:
    def flock(*arguments: object) -> None:
        raise OSError(95, os.strerror(95))

    place.monkeypatch.setattr("fcntl.flock", flock)
    found = place.predict(place.image())
    assert not list((place.path / "out").glob(".*"))
    return found


def mixed_run(place: Place) -> tuple[int, str]:
    assert place.run.folder is not None
    run = shutil.copytree(place.run.folder, place.path / "run")
    run_id = run_folder.read_run(run)
    assert run_id is not None
    table = run / "manifest.csv"
    table.write_text(table.read_text().replace(run_id.run_id, "0" * 32))
    for command in (
        ("export", run, "--to", "onnx", "--out", place.path / "a.onnx"),
        ("train", place.data, "--out", run, "--resume", *options_of(run)),
    ):
        code, words = told(*command)
        assert code == 3 and "mixes two runs" in words, words
    return told("evaluate", run, table)


def options_of(run: Path) -> tuple[object, ...]:
    return "--config", run / "config.json", "--quiet"


def seen_images(place: Place) -> tuple[int, str]:
    """From the model file alone, copied to another place."""
    table = ["image,label,split"]
    for i, sample in enumerate(place.run.manifest.of("train")[::4][:6]):
        name = f"again/{7 * i:03}.png"
        (place.path / "again").mkdir(exist_ok=True)
        shutil.copy(sample.image, place.path / name)
        table.append(f"{name},{'defective' if sample.defective else 'good'},test")
    (place.path / "again.csv").write_text("\n".join(table))
    alone = place.path / "alone.safetensors"
    shutil.copy(place.model, alone)
    out = place.path / "out"
    found = told("evaluate", alone, place.path / "again.csv", "--out", out)
    named = json.loads((out / "metrics.json").read_text())["notes"]["trained_on"]
    assert named == [row.split(",")[0] for row in table[1:]]
    return found


def foreign_folder(place: Place) -> tuple[int, str]:
    for name in ("config.json", "maps/depth.npy", "state/a.pt"):
        (place.path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (place.path / "out" / name).write_text("{}")
    with place.unchanged():
        return train(place.data, place.path / "out", "--overwrite")


def foreign_results(place: Place) -> tuple[int, str]:
    for name in ("scores.csv", "overlays/a.png"):
        (place.path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (place.path / "out" / name).write_text("mine")
    image = place.image()
    with place.unchanged():
        return place.predict(image, "--overwrite")


def damaged_run(place: Place) -> tuple[int, str]:
    image = place.image()
    assert place.predict(image)[0] == 0
    record = place.path / "out/run.json"
    run = run_folder.read_run(place.path / "out")
    assert run is not None
    record.write_text(record.read_text().replace(run.run_id, "../../etc"))
    with place.unchanged():
        return place.predict(image, "--overwrite")


def another_command(place: Place) -> tuple[int, str]:
    assert place.predict(place.image())[0] == 0
    with place.unchanged():
        return train(place.data, place.path / "out", "--overwrite")


def linked_overlays(place: Place) -> tuple[int, str]:
    image = place.image()
    assert place.predict(image)[0] == 0
    (place.path / "out/overlays").rename(place.path / "elsewhere")
    (place.path / "out/overlays").symlink_to(place.path / "elsewhere")
    with place.unchanged():
        return place.predict(image, "--overwrite")


def images_in_overlays(place: Place) -> tuple[int, str]:
    image = place.image()
    assert place.predict(image)[0] == 0
    (place.path / "alias").symlink_to(place.path / "out/overlays")
    with place.unchanged():
        return place.predict(place.path / "alias/a.png.jpg", "--overwrite")


def out_in_images(place: Place) -> tuple[int, str]:
    images = place.image().parent
    (place.path / "alias").symlink_to(images)
    with place.unchanged():
        return place.predict(images, out="alias/results")


def out_in_data(place: Place) -> tuple[int, str]:
    data = shutil.copytree(place.data, place.path / "parts")
    (place.path / "alias").symlink_to(data / "good")
    with place.unchanged():
        return train(data, place.path / "alias/run")


def groups_over_manifest(place: Place) -> tuple[int, str]:
    data = shutil.copytree(place.data, place.path / "parts")
    (place.path / "alias").symlink_to(data)
    with place.unchanged():
        table = place.path / "alias/manifest.csv"
        return told("check", data, "--groups", table, "--overwrite", "--quiet")


DYING = """
import os
from cdgp.cli.main import run
from cdgp.data import images
read = images.read_with_facts
images.read_with_facts = lambda path, *a, **k: (
    os._exit(9) if path.name == "b.png" else read(path, *a, **k)
)
run()
"""


def ends_the_process(place: Place) -> tuple[int, str]:
    for name in ("a.png", "b.png", "c.png"):
        place.image(f"in/{name}")
    command = ["predict", str(place.model), str(place.path / "in"), "--out",
               str(place.path / "out"), "--quiet"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    for options in ([], ["--resume"], ["--resume"]):
        done = subprocess.run(
            [sys.executable, "-c", DYING, *command, *options],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    with (place.path / "out/scores.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["a.png", "c.png"]
    with (place.path / "out/unreadable.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["b.png"]
    return done.returncode, " ".join(done.stderr.split())


def no_memory(place: Place) -> tuple[int, str]:
    place.image("in/a.png"), place.image("in/b.png")
    finish = Detector.finish

    def short_of_memory(self: Detector, image: Prepared, found: Outputs) -> Prediction:
        if "a.png" in image.name:
            raise MemoryError
        return finish(self, image, found)

    place.monkeypatch.setattr(Detector, "finish", short_of_memory)
    found = place.predict(place.path / "in")
    with (place.path / "out/scores.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["b.png"]
    return found


def full_tmpdir(place: Place) -> tuple[int, str]:
    def full(*arguments: object, **options: object) -> None:
        assert options["dir"] is None
        raise OSError(28, os.strerror(28))

    place.monkeypatch.setattr("tempfile.TemporaryFile", full)
    return told("evaluate", place.model, place.data, "--quiet")


def formula_name(place: Place) -> tuple[int, str]:
    names = ["=1+1.png", "+a.png", "-1.png", "@b.png", "plain.png"]
    for name in names:
        place.image(f"in/{name}")
    found = place.predict(place.path / "in")
    with (place.path / "out/scores.csv").open() as file:
        cells = [row["image"] for row in csv.DictReader(file)]
    assert sorted(cells) == sorted(["plain.png", *(f"./{name}" for name in names[:4])])
    return found


def control_name(place: Place) -> tuple[int, str]:
    name = "in/a\x1b[2J\u202egnp.png"
    (place.path / "in").mkdir()
    (place.path / name).write_bytes(b"")
    place.image()
    found = place.predict(place.path / "in")
    assert "\x1b" not in found[1] and r"\u202egnp" in found[1]
    assert "\x1b" not in (place.path / "out/report.html").read_text()
    return found


MAKERS: dict[str, Callable[[Place], tuple[int, str]]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        second_process, second_export, share_without_locks, mixed_run, seen_images,
        foreign_folder, foreign_results, damaged_run, another_command, linked_overlays,
        images_in_overlays, out_in_images, out_in_data, groups_over_manifest, ends_the_process,
        no_memory, full_tmpdir, formula_name, control_name,
    )
}  # fmt: skip


@rows("places", MAKERS)
def test_places(
    row: Row,
    tiny_run: Run,
    surfaces: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tiny_run.folder is not None
    model = tiny_run.folder / run_folder.MODEL
    code, words = MAKERS[row.id](Place(tmp_path, model, tiny_run, surfaces.root, monkeypatch))
    assert (code != 0) == (row.result == "refused"), words
    assert row.says in (caplog.text if row.result == "warned" else words)
    if row.result == "read":
        assert "warning" not in words and not caplog.records
