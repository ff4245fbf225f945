"""The torch runtime, whole and by windows."""

import numpy as np
import pytest
import torch
from tests.helpers import random_model

from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.workflows import Run

CPU = torch.device("cpu")


def test_the_runtime_runs_the_inference_graph(tiny_run: Run) -> None:
    model = tiny_run.detector.model
    images = np.random.default_rng(0).random((2, 3, 64, 64), np.float32)
    with torch.inference_mode():
        rate = model.decision.defect_rate
        graph = InferenceGraph(EvidenceGraph(model.network), model.calibration, rate)
        expected = graph(torch.from_numpy(images))
    outputs = TorchRuntime(model, CPU).run(images)
    for a, b in zip(outputs, expected, strict=True):
        assert isinstance(a, np.ndarray) and a.dtype == np.float32
        torch.testing.assert_close(a, b.numpy(), atol=1e-5, rtol=1e-5)


def test_a_tiled_runtime_takes_images_of_any_size_one_at_a_time() -> None:
    runtime = TorchRuntime(random_model("no distance"), CPU)
    tiled = TiledRuntime(runtime, (64, 64))
    image = np.random.default_rng(0).random((3, 90, 130), np.float32)
    outputs = tiled.run(image[None])
    assert outputs.anomaly_map.shape == (1, 90, 130)
    for a, b in zip(outputs, runtime.run_tiled(image, (64, 64)), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="too many values"):
        tiled.run(np.stack([image, image]))
