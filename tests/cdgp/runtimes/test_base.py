"""Optional packages that report nothing and need no home; signatures of graphs."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import ROOT

from cdgp.errors import ModelFileError, SettingsError
from cdgp.method import network
from cdgp.runtimes.base import OUTPUT_RANKS, Outputs, check_signature, require_package
from cdgp.workflows import Run

COMMANDS = """
import os, sys
from pathlib import Path
import numpy as np
import cdgp
from cdgp.export import ExportOptions, export
from cdgp.progress import Quiet

run, onnx, xml, out = map(Path, sys.argv[1:])
pixels = np.full((64, 64), 120, np.uint8)
print([cdgp.load(path).predict(pixels).pred_score for path in (run, onnx, xml)])
export(run, ExportOptions("openvino", out / "small.xml", int8=True), Quiet())
threads = [Path(f"/proc/self/task/{t}/comm").read_text() for t in os.listdir("/proc/self/task")]
assert not any("telemetry" in name.lower() for name in threads), threads
import openvino
from openvino.tools.ovc import telemetry_stub, telemetry_utils
assert telemetry_utils.tm is telemetry_stub
"""
UNKNOWN_USER = ["unshare", "--user", "--map-user=54321"]
"""A user id without an entry among the users, and so without a home."""


def can_be_unknown() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNKNOWN_USER, "true"], capture_output=True, check=False).returncode == 0


def in_environment(run: Run, exported: dict[str, Path], out: Path, prefix: list[str],
                   **environment: str) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Predict in every runtime and export to INT8, with these environment variables alone."""
    files = [run.folder, exported["onnx"], exported["openvino"], out]
    return subprocess.run(
        [*prefix, sys.executable, "-c", COMMANDS, *map(str, files)], capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), **environment},
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_nothing_is_written_into_the_home(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    done = in_environment(tiny_run, exported, tmp_path / "out", [], HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert list(home.rglob("*")) == []
    assert (tmp_path / "out/small.xml").is_file()


@pytest.mark.slow
def test_no_home_is_needed(tiny_run: Run, exported: dict[str, Path], tmp_path: Path) -> None:
    if not can_be_unknown():
        pytest.skip("unshare may not map another user here")
    done = in_environment(tiny_run, exported, tmp_path / "out", UNKNOWN_USER)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/small.xml").is_file()


def test_telemetry_is_off_before_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    monkeypatch.delitem(sys.modules, "openvino_telemetry", raising=False)
    seen: list[object] = []

    def look(name: str) -> object:
        seen.append((os.environ.get("ORT_DISABLE_TELEMETRY"), sys.modules["openvino_telemetry"]))
        return sys

    monkeypatch.setattr(importlib, "import_module", look)
    require_package("onnxruntime")
    assert seen == [("1", None)]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    monkeypatch.setenv("HOME", "/mine")
    require_package("onnxruntime")
    assert (os.environ["ORT_DISABLE_TELEMETRY"], os.environ["HOME"]) == ("0", "/mine")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Could not determine home directory."),
        ImportError("libtbb.so.12: cannot open shared object file"),
        OSError("[Errno 30] Read-only file system"),
        AttributeError("module 'numpy' has no attribute 'float_'"),
        SystemExit("no licence"),
    ],
)
def test_a_package_whose_import_fails(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(SettingsError) as raised:
        require_package("openvino")
    message = str(raised.value)
    assert str(error) in message and "import fails" in message and "cdgp[openvino]" in message


def test_what_a_package_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def incomplete(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'flatbuffers'", name="flatbuffers")

    monkeypatch.setattr(importlib, "import_module", incomplete)
    with pytest.raises(SettingsError, match="onnxruntime, which needs flatbuffers, which is not"):
        require_package("onnxruntime")


FREE = {"images": ("float32", (None, 3, None, None))}
FIXED = {"images": ("float32", (None, 3, 64, 96))}
OUTPUTS: dict[str, tuple[str, tuple[int | None, ...]]] = {
    name: ("float32", (None,) * rank) for name, rank in OUTPUT_RANKS.items()
}


@pytest.mark.parametrize("inputs", [FREE, FIXED])
def test_a_right_signature(inputs: dict[str, Any]) -> None:
    check_signature(inputs, OUTPUTS, (64, 96), "a.onnx")


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({}, OUTPUTS),
        ({"input": FIXED["images"]}, OUTPUTS),
        (FIXED | {"more": FIXED["images"]}, OUTPUTS),
        ({"images": ("float32", (1, 3, 64, 96))}, OUTPUTS),  # batch of one
        ({"images": ("float32", (None, 1, 64, 96))}, OUTPUTS),  # grey
        ({"images": ("float32", (None, 3, 96, 64))}, OUTPUTS),  # turned
        ({"images": ("float32", (None, 64, 96, 3))}, OUTPUTS),  # channels last
        ({"images": ("float32", (None, 3, 64))}, OUTPUTS),
        ({"images": ("float32", (None, 3, 64, 96, 1))}, OUTPUTS),
        ({"images": ("float32", ())}, OUTPUTS),
        ({"images": ("tensor(uint8)", (None, 3, 64, 96))}, OUTPUTS),
        (FIXED, dict(list(OUTPUTS.items())[:4])),
        (FIXED, dict(reversed(OUTPUTS.items()))),
        (FIXED, OUTPUTS | {"more": OUTPUTS["fused"]}),
        (FIXED, OUTPUTS | {"pooled": ("float32", (None,))}),
        (FIXED, OUTPUTS | {"pooled": ("float16", (None, 1))}),
    ],
)
def test_another_signature(inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"^a\.onnx: .*expected; export again"):
        check_signature(inputs, outputs, (64, 96), "a.onnx")


def test_outputs_of_runtimes_graphs_and_files_are_the_same() -> None:
    """In one order: runtimes take them from the graph by their place."""
    assert list(Outputs._fields) == list(network.Outputs._fields) == list(OUTPUT_RANKS)


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_are_split_by_image(batch: int) -> None:
    rng = np.random.default_rng(0)
    sides = {1: (batch,), 2: (batch, 2), 3: (batch, 5, 4)}
    outputs = Outputs(*(rng.random(sides[rank], np.float32) for rank in OUTPUT_RANKS.values()))
    parts = outputs.split()
    assert len(parts) == batch
    for index, part in enumerate(parts):
        for whole, one in zip(outputs, part, strict=True):
            assert one.shape == (1, *whole.shape[1:]) and np.array_equal(one[0], whole[index])
