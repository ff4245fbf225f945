"""The counts of ``cdgp bench-latency`` against a plain reading of the network."""

import numpy as np
from torch import Tensor, nn

from cdgp.runtimes.torch import TorchRuntime
from cdgp.workflows import Run
from cdgp_bench.measure.latency import stages


def test_multiply_adds_against_the_layers(tiny_run: Run) -> None:
    runtime = tiny_run.detector.runtime
    assert isinstance(runtime, TorchRuntime)
    counted = 0

    def count(layer: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal counted
        kernel = layer.kernel_size[0] * layer.kernel_size[1]
        counted += output.numel() * kernel * layer.in_channels // layer.groups

    hooks = [m.register_forward_hook(count) for m in runtime.graph.modules()
             if isinstance(m, nn.Conv2d)]  # fmt: skip
    size = tiny_run.detector.settings.input_size
    images = np.random.default_rng(0).random((1, 3, *size), np.float32)
    runtime.run(images)
    for hook in hooks:
        hook.remove()
    found = stages(tiny_run.detector, images, 1)
    # Besides the convolutions there are two products of small matrices.
    assert counted <= found["macs"] <= 1.01 * counted
    assert found["parameters"] == sum(p.numel() for p in runtime.graph.parameters())
    assert set(found["stages_ms"]) >= {"encoders", "student", "regions"}
