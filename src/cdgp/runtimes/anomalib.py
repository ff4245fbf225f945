"""The inference graph as anomalib's inferencers take it: images of any size in, four results out.

anomalib 2 builds its batch from the outputs by name and refuses a name that it does not know.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cdgp.decision import Decision
from cdgp.method.graph import InferenceGraph
from cdgp.runtimes.base import INPUT, Array
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.openvino import compiled_for


class AnomalibOutputs(NamedTuple):
    """What anomalib expects of n images; the maps have the size of the network's input."""

    anomaly_map: Any
    """(n, H, W) final map, in nats; tensors, or what a runtime gives for them."""
    pred_score: Any
    """(n,) the image score."""
    pred_label: Any
    """(n,) bool, whether the score is above the threshold."""
    pred_mask: Any
    """(n, H, W) bool, whether the surprisal is above the region level."""


class AnomalibGraph(nn.Module):
    """Resize, inference and decision as one module.

    Args:
        graph: for inputs of ``size``.
        size: (height, width) that images are resized to.
        decision: gives the threshold on the image score.
        region_level: a pixel is marked where its normal-tail probability is below this.
    """

    def __init__(
        self,
        graph: InferenceGraph,
        size: tuple[int, int],
        decision: Decision,
        region_level: float,
    ) -> None:
        super().__init__()
        self.inference, self.size = graph, size  # "graph" is what torch.export calls its own
        self.threshold, self.least = decision.threshold, -math.log(region_level)

    def forward(self, images: Tensor) -> AnomalibOutputs:
        """(n, 3, height, width) float32 RGB in [0, 1], of any size."""
        found = self.inference(resized(images, self.size))
        return AnomalibOutputs(
            found.anomaly_map,
            found.pred_score,
            found.pred_score > self.threshold,
            found.surprisal > self.least,
        )


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """``data.resize.resize_image`` in torch, for graphs: (n, 3, h, w) to (n, 3, height, width)."""
    rows, columns = (
        antialiased_weights(inputs, outputs, images)
        for inputs, outputs in zip(images.shape[-2:], size, strict=True)
    )
    return rows @ images @ columns.mT


def antialiased_weights(inputs: int, outputs: int, like: Tensor) -> Tensor:
    """(outputs, inputs): a triangle around each output's place, as wide as the wider pixel.

    Places are whole numbers of 1 / (2 inputs outputs), so that none is rounded in any runtime.
    """
    at = (2 * torch.arange(outputs, device=like.device)[:, None] + 1) * inputs
    centres = (2 * torch.arange(inputs, device=like.device) + 1) * outputs
    reach = 2 * (torch.ones_like(at[:1]) * inputs).clamp_min(outputs)
    shares = (1 - (centres - at).abs().to(like.dtype) / reach.to(like.dtype)).clamp_min(0)
    weights: Tensor = shares / shares.sum(1, keepdim=True)
    return weights


class Difference(NamedTuple):
    """How far a flavoured graph in its runtime is from torch, over all images."""

    anomaly_map: float
    """Mean over all pixels, in nats."""
    largest: float
    """The largest: the map is steep where it is beyond all normal pixels."""
    pred_score: float
    """The largest."""
    labels: int
    """Images with another decision."""
    marked: float
    """Share of all pixels that one of them marks and the other does not."""


def difference(
    graph: AnomalibGraph, run: Callable[[Array], Sequence[Array]], images: Iterable[Array]
) -> Difference:
    """Compare ``run``, the graph in its runtime, with torch on images (3, h, w) one by one."""
    found = []
    for image in images:
        with torch.inference_mode():
            expected = AnomalibOutputs(*(t.numpy() for t in graph(torch.from_numpy(image[None]))))
        given = AnomalibOutputs(*run(image[None]))
        off = np.nan_to_num(np.abs(given.anomaly_map - expected.anomaly_map), nan=math.inf)
        score = np.nan_to_num(np.abs(given.pred_score - expected.pred_score), nan=math.inf)
        label = given.pred_label != expected.pred_label
        marked = given.pred_mask != expected.pred_mask
        found.append((off.mean(), off.max(), score.max(), label.sum(), marked.mean()))
    mean, largest, score, labels, marked = np.array(found).T
    return Difference(
        float(mean.mean()), float(largest.max()), float(score.max()), int(labels.sum()),
        float(marked.mean()),
    )  # fmt: skip


def runner(written: Any) -> Callable[[Array], Sequence[Array]]:
    """What runs a written graph, an ``onnx.ModelProto`` or an ``openvino.Model``."""
    names = AnomalibOutputs._fields
    if hasattr(written, "SerializeToString"):
        session = OnnxRuntime(written.SerializeToString()).session
        return lambda images: session.run(list(names), {INPUT: images})
    compiled = compiled_for(written, written.input(0).get_partial_shape(), threads=None)

    def run(images: Array) -> Sequence[Array]:
        results = compiled({INPUT: images})
        return [np.array(results[name]) for name in names]

    return run
