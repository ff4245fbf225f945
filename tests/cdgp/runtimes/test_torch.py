"""The torch runtime, whole and by windows."""

import pytest
import torch
from tests.helpers import random_model

from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.workflows import Run

CPU = torch.device("cpu")


def test_the_runtime_runs_the_inference_graph(tiny_run: Run) -> None:
    model = tiny_run.detector.model
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        rate = model.decision.defect_rate
        graph = InferenceGraph(EvidenceGraph(model.network), model.calibration, rate)
        expected = graph(images)
    outputs = TorchRuntime(model, CPU).run(images)
    for a, b in zip(outputs, expected, strict=True):
        assert a.dtype == torch.float32 and a.device == CPU
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_tiled_runtime_takes_images_of_any_size_one_at_a_time() -> None:
    runtime = TorchRuntime(random_model("no distance"), CPU)
    tiled = TiledRuntime(runtime, (64, 64))
    image = torch.rand(3, 90, 130, generator=torch.Generator().manual_seed(0))
    outputs = tiled.run(image[None])
    assert outputs.anomaly_map.shape == (1, 90, 130)
    for a, b in zip(outputs, runtime.run_tiled(image, (64, 64)), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="too many values"):
        tiled.run(image.repeat(2, 1, 1, 1))
