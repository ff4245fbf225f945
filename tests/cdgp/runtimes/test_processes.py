"""One detector in many threads, after a fork, in a pool and in workers of a data loader."""

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers import ROOT, SHARED

import cdgp
from cdgp.errors import SettingsError
from cdgp.runtimes.base import Array
from cdgp.runtimes.openvino import OpenVinoRuntime
from cdgp.runtimes.sealed import read_exported
from cdgp.runtimes.torch import TorchRuntime
from cdgp.workflows import Run

IMAGES = [np.random.default_rng(i).integers(0, 255, (70, 64 + i, 3), np.uint8) for i in range(6)]
HANG = 600
"""Seconds after which a process is ended that waits for ever; no measure of speed."""
WORKERS = """
import multiprocessing, os, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
import cdgp

IMAGES = [np.random.default_rng(i).integers(0, 255, (70, 64 + i, 3), np.uint8) for i in range(6)]

class Scores(Dataset):
    def __init__(self, detector):
        self.detector = detector
    def __len__(self):
        return len(IMAGES)
    def __getitem__(self, index):
        return self.detector.predict(IMAGES[index]).pred_score

if __name__ == "__main__":
    detector = cdgp.load(sys.argv[1], threads=2)
    expected = [detector.predict(image).pred_score for image in IMAGES]
    child = os.fork()
    if child == 0:
        found = [detector.predict(image).pred_score for image in IMAGES]
        os._exit(0 if np.allclose(found, expected, atol=1e-6, rtol=0) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found = [p.pred_score for p in pool.map(detector.predict, IMAGES)]
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
        loader = DataLoader(
            Scores(detector), batch_size=None, num_workers=2, multiprocessing_context=method
        )
        np.testing.assert_allclose([float(s) for s in loader], expected, atol=1e-6, rtol=0)
"""


def model_of(target: str, run: Run, exported: dict[str, Path]) -> Path:
    assert run.folder is not None
    return run.folder / "model.safetensors" if target == "torch" else exported[target]


every_runtime = pytest.mark.parametrize("target", ["torch", "onnx", "openvino"])


@every_runtime
def test_threads_get_equal_results(tiny_run: Run, exported: dict[str, Path], target: str) -> None:
    detector = cdgp.load(model_of(target, tiny_run, exported), threads=1)
    expected = [detector.predict(image) for image in IMAGES]
    together = threading.Barrier(8)

    def work(turn: int) -> list[cdgp.Prediction]:
        together.wait()
        return [detector.predict(IMAGES[(i + turn) % len(IMAGES)]) for i in range(12)]

    with ThreadPoolExecutor(8) as pool:
        for turn, found in enumerate(pool.map(work, range(8))):
            for i, prediction in enumerate(found):
                same = expected[(i + turn) % len(IMAGES)]
                np.testing.assert_array_equal(prediction.anomaly_map, same.anomaly_map)
                assert prediction.pred_score == same.pred_score
                assert prediction.regions == same.regions


def test_threads_with_inputs_of_other_shapes(exported: dict[str, Path]) -> None:
    """A plan for one shape is not replaced under a thread that runs it."""
    runtime = OpenVinoRuntime(read_exported(exported["openvino"]), threads=1)
    rng = np.random.default_rng(0)
    inputs = [rng.random((batch, 3, 64, 64), np.float32) for batch in (1, 2, 3)]
    expected = [runtime.run(images).pooled for images in inputs]

    def work(turn: int) -> None:
        for i in range(4):
            index = (i + turn) % len(inputs)
            assert np.array_equal(runtime.run(inputs[index]).pooled, expected[index])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def run_to_its_end(script: Path, text: str, model: Path) -> None:
    """Run a script on a model, in a process of its own that has to end well."""
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script, model],
        capture_output=True, text=True, check=False, timeout=HANG,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@every_runtime
def test_forks_pools_and_loaders(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path, target: str
) -> None:
    run_to_its_end(tmp_path / "workers.py", WORKERS, model_of(target, tiny_run, exported))


@pytest.mark.shared
@pytest.mark.parametrize("case", ["api-fork-hang/fork_after_predict", "api-input-kinds/api_inputs"])
def test_reported_cases(tiny_run: Run, exported: dict[str, Path], case: str) -> None:
    script = SHARED / f"cases/reported_2/{case}.py"
    if not script.is_file():
        pytest.skip(f"{script} is missing")
    done = subprocess.run(
        [sys.executable, script, model_of("torch", tiny_run, exported)],
        capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_gpu_is_not_used_after_a_fork(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = TorchRuntime(tiny_run.detector.model, torch.device("cpu"))
    runtime.device = torch.device("cuda")
    monkeypatch.setattr("os.getpid", lambda: -1)
    image = np.zeros((1, 3, 64, 64), np.float32)
    with pytest.raises(SettingsError, match="load it in the child"):
        runtime.run(image)
    with pytest.raises(SettingsError, match="load it in the child"):
        runtime.run_tiled(image[0], (64, 64))


def test_openvino_is_not_used_where_a_fork_met_a_run(exported: dict[str, Path]) -> None:
    runtime = OpenVinoRuntime(read_exported(exported["openvino"]), threads=1)
    image, seen = np.zeros((1, 3, 64, 64), np.float32), []
    infer = runtime._infer

    def forked(inputs: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(SettingsError, match="forked while another thread predicted"):
                runtime.run(image)
        seen.append(inputs)
        return infer(inputs, names)

    runtime._infer = forked  # type: ignore[method-assign]
    runtime.run(image)
    assert len(seen) == 1
    runtime._infer = infer  # type: ignore[method-assign]
    assert np.isfinite(runtime.run(image).pooled).all()


CHILD_ENDS = """
import os, sys
import numpy as np
import cdgp

image = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
detector = cdgp.load(sys.argv[1], threads=4)
detector.predict(image)
child = os.fork()
if child == 0:
    detector.predict(image)
    del detector
    sys.exit(0)  # not os._exit: everything is torn down, as in a worker of gunicorn
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@every_runtime
def test_a_forked_child_ends(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path, target: str
) -> None:
    """A graph's threads stay with the parent: a child neither waits for them nor crashes."""
    run_to_its_end(tmp_path / "child.py", CHILD_ENDS, model_of(target, tiny_run, exported))
