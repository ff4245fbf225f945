"""The newer reported faults: a test for each of the cases in ../shared/cases/reported_2."""

import csv
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import ROOT, SHARED, TINY_OPTIONS, WHITE, cdgp, plain

from cdgp.data import images
from cdgp.workflows import Run
from cdgp_bench.synthetic import make_dataset

REPORTED = SHARED / "cases/reported_2"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not REPORTED.is_dir(), reason=f"{REPORTED} is missing"),
]
COMMAND = [sys.executable, "-m", "cdgp.cli.main"]


def case(name: str) -> Path:
    return REPORTED / name


def facts(name: str) -> dict[str, Any]:
    found = json.loads((case(name) / "case.json").read_text("utf-8"))["facts"]
    assert isinstance(found, dict)
    return found


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def model(tiny_run: Run) -> Path:
    assert tiny_run.folder is not None
    return tiny_run.folder / "model.safetensors"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set to train on: 24 good and 12 defective surfaces."""
    folder = tmp_path_factory.mktemp("parts")
    make_dataset(folder, good=24, defective=12, size=(64, 64))
    return folder


# ---------------------------------------------------------------------------------------- images


def test_jpeg_with_a_hole(model: Path, tmp_path: Path) -> None:
    damaged = facts("img-jpeg-hole")["damaged"]
    checked = cdgp("check", case("img-jpeg-hole") / "set")
    assert checked.exit_code == 3 and Path(damaged[0]).name in plain(checked)
    trained = cdgp("train", case("img-jpeg-hole") / "set", "--out", tmp_path / "r", *TINY_OPTIONS)
    assert trained.exit_code == 3 and Path(damaged[0]).name in plain(trained)
    for folder, whole in (("set/good", 5), ("pictures", 1)):
        out = tmp_path / folder.replace("/", "-")
        result = cdgp("predict", model, case("img-jpeg-hole") / folder, "--out", out, "--quiet")
        assert result.exit_code == 3, result.output
        assert len(table(out / "scores.csv")) == whole
        (row,) = table(out / "unreadable.csv")
        assert any(row["image"] == Path(name).name for name in damaged)


def test_png_metadata(model: Path, tmp_path: Path) -> None:
    """The pixels are of interest, the metadata is not."""
    folder = case("img-png-metadata") / "pictures"
    result = cdgp("predict", model, folder, "--out", tmp_path / "o", "--quiet")
    assert result.exit_code == 0, result.output
    assert {r["image"] for r in table(tmp_path / "o/scores.csv")} == {
        "after_end.png", "big_ztxt.png", "text_bad_crc.png",
    }  # fmt: skip


def test_foreign_profile(model: Path, tmp_path: Path) -> None:
    folder = case("img-icc-mixed") / "twins"
    most = facts("img-icc-mixed")["max_mean_abs_diff"]
    expected = images.read_image(folder / "plain.png", WHITE)
    for name in ("linear_icc.png", "linear_icc.jpg"):
        found = images.read_image(folder / name, WHITE)
        assert 255 * np.abs(found - expected).mean() <= most
    result = cdgp("predict", model, folder, "--out", tmp_path / "o", "--quiet")
    assert result.exit_code == 0, result.output
    scores = [float(r["pred_score"]) for r in table(tmp_path / "o/scores.csv")]
    assert np.ptp(scores) < 0.01


def test_unlisted_formats(model: Path, tmp_path: Path) -> None:
    folder, out = case("img-unlisted-formats") / "pictures", tmp_path / "o"
    result = cdgp("predict", model, folder, "--out", out, "--quiet")
    listed = table(out / "unreadable.csv") if (out / "unreadable.csv").is_file() else []
    names = {row["image"] for row in (*table(out / "scores.csv"), *listed)}
    found = {path.name for path in folder.iterdir()} - {"notes.txt"}
    assert names == found and len(found) == facts("img-unlisted-formats")["pictures"]
    assert result.exit_code == (3 if listed else 0)


# ------------------------------------------------------------------------------------------ data


def test_black_frames(model: Path, tmp_path: Path) -> None:
    names = {Path(name).name for name in facts("data-black-frames")["empty"]}
    checked = cdgp("check", case("data-black-frames"), "--out", tmp_path / "c")
    (finding,) = [
        f for f in json.loads((tmp_path / "c/check.json").read_text())["findings"]
        if f["kind"] == "no_content"
    ]  # fmt: skip
    assert checked.exit_code == 0 and finding["severity"] == "warning"
    assert {Path(name).name for (name,) in finding["pictures"]} == names
    out = tmp_path / "o"
    result = cdgp("predict", model, case("data-black-frames"), "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    warned = {Path(r["image"]).name: r for r in table(out / "scores.csv") if r["warnings"]}
    assert set(warned) == names
    assert all(row["pred_label"] != "good" for row in warned.values())


def test_labels_beside_images(model: Path, tmp_path: Path) -> None:
    expected = facts("data-labels-beside")
    result = cdgp("check", case("data-labels-beside"))
    assert f"{expected['n_good']} good, {expected['n_defective']} defective" in plain(result)
    out = tmp_path / "o"
    predicted = cdgp("predict", model, case("data-labels-beside"), "--out", out, "--quiet")
    assert predicted.exit_code == 0, predicted.output
    names = [row["image"] for row in table(out / "scores.csv")]
    assert len(names) == expected["n_good"] + expected["n_defective"]
    assert not any("label" in name for name in names)


@pytest.mark.parametrize("layout", ["val", "third"])
def test_unread_folders(layout: str, tmp_path: Path) -> None:
    unread = facts("data-unread-folders")[f"{layout}_unread"]
    result = cdgp("check", case("data-unread-folders") / layout, "--out", tmp_path / "c")
    findings = json.loads((tmp_path / "c/check.json").read_text())["findings"]
    told = " ".join(f["text"] for f in findings if f["kind"] == "not_read")
    assert result.exit_code == 0, result.output
    assert ("val" if layout == "val" else "scratch") in told
    assert sum(map(int, re.findall(r"\b(\d+) images?\b", told))) == unread, told


def test_mask_with_an_ignore_rim(model: Path, tmp_path: Path) -> None:
    """Every value above zero counts, the rim too; check and evaluate name the masks."""
    expected, folder = facts("mask-ignore-rim"), case("mask-ignore-rim")
    for name, inside in expected["inside"].items():
        size = images.image_size(folder / f"defective/{name}.png")
        mask = images.read_mask(folder / f"masks/{name}.png", size)
        assert mask.sum() == inside + expected["rim"].get(name, 0)
    checked = cdgp("check", folder)
    assert all(f"{name}.png" in plain(checked) for name in expected["inside"])
    result = cdgp("evaluate", model, folder, "--out", tmp_path / "o", "--quiet")
    assert result.exit_code == 0, result.output
    assert "0, 1, 255" in (tmp_path / "o/metrics.json").read_text()


# ---------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_umask(mask: int, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    subprocess.run(
        [*COMMAND, "predict", model, case("img-png-metadata") / "pictures", "--out", out,
         "--save-maps", "--quiet"],
        check=True, umask=mask,
    )  # fmt: skip
    for path in (out, *out.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_two_trainings(parts: Path, tmp_path: Path) -> None:
    """Started together: one is refused in one sentence, and the run is of one seed."""
    out = tmp_path / "r"
    command = [*COMMAND, "train", str(parts), "--out", str(out), *TINY_OPTIONS]
    both = [
        subprocess.Popen([*command, "--seed", seed], stderr=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    ends = [(process.communicate()[1], process.returncode) for process in both]
    assert sorted(code for _, code in ends) == [0, 1], ends
    won = next(i for i, (_, code) in enumerate(ends) if code == 0)
    assert ends[1 - won][0].count("error:") == 1
    config = json.loads((out / "config.json").read_text())
    assert config["seed"] == won + 1
    ids = {row["run_id"] for row in table(out / "manifest.csv")}
    assert ids == {config["run_id"]}
    evaluated = cdgp("evaluate", out, out / "manifest.csv", "--quiet")
    assert evaluated.exit_code == 0 and "trained on" not in plain(evaluated)


# ---------------------------------------------------------------------------- models and Python


def test_mixed_pair(exported: dict[str, Path], tmp_path: Path) -> None:
    """The .xml of one model with the .bin of another."""
    xml = tmp_path / "m.xml"
    shutil.copy(exported["openvino"], xml)
    weights = bytearray(exported["openvino"].with_suffix(".bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    xml.with_suffix(".bin").write_bytes(weights)
    image = next((case("data-black-frames") / "good").iterdir())
    result = cdgp("predict", xml, image, "--out", tmp_path / "o", "--quiet")
    assert result.exit_code == 1 and "m.bin" in plain(result)
    assert not (tmp_path / "o/scores.csv").exists()


@pytest.mark.parametrize("home", [True, False])
def test_openvino_stays_at_home(home: bool, exported: dict[str, Path], tmp_path: Path) -> None:
    """Nothing is written into a home, and none is needed."""
    image = next((case("data-black-frames") / "good").iterdir())
    environment = {"PATH": "/usr/bin:/bin"}
    if home:
        (tmp_path / "home").mkdir()
        environment["HOME"] = str(tmp_path / "home")
    arguments = (exported["openvino"], image, "--out", tmp_path / "o", "--quiet")
    command = [*COMMAND, "predict", *map(str, arguments)]
    unshared: list[str] = ["unshare", "--user", "--map-user=54321"]
    if home or subprocess.run([*unshared, "true"], check=False, capture_output=True).returncode:
        unshared = []  # a machine that forbids user namespaces
    found = subprocess.run(
        [*unshared, *command], env=environment, check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    if home:
        assert not list((tmp_path / "home").iterdir())


@pytest.mark.parametrize("name", ["api-fork-hang/fork_after_predict", "api-input-kinds/api_inputs"])
def test_scripts(name: str, model: Path, tmp_path: Path) -> None:
    script = case(name.split("/")[0]) / f"{name.split('/')[1]}.py"
    found = subprocess.run(
        [sys.executable, script, model],
        check=False, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
