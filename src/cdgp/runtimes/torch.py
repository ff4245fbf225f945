"""The inference graph in torch: on CPU or GPU, in any precision and mode, whole or by windows."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdgp.artifact import Model
from cdgp.errors import SettingsError
from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.method.network import Outputs as Tensors
from cdgp.method.resize import Size
from cdgp.method.tiles import outputs_of, tiled_evidence
from cdgp.presets import InferenceSettings
from cdgp.runtimes.base import Array, Outputs

_PROCESS = os.getpid()


def set_threads(count: int) -> None:
    """Set the number of threads of torch, for the whole process; one in a forked child.

    A forked child has none of its parent's threads, and would wait for them for ever.
    """
    torch.set_num_threads(count if os.getpid() == _PROCESS else 1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: set_threads(1))


class _Recording(NamedTuple):
    """A CUDA graph, and the memory that it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    outputs: Tensors


class TorchRuntime:
    """The inference graph in torch; in float32 and eager where ``inference`` is None.

    Safe in threads. A child that was forked after it was made uses one thread, and no GPU.
    """

    name = "torch"

    def __init__(
        self, model: Model, device: torch.device, inference: InferenceSettings | None = None
    ) -> None:
        self.device = device
        self.inference = inference or InferenceSettings()
        precision = getattr(torch, self.inference.precision)
        evidence = EvidenceGraph(model.network, precision)
        self.graph = InferenceGraph(evidence, model.calibration, model.decision.defect_rate)
        self.graph.to(device)
        self._run: Callable[[Tensor], Tensors] = self.graph
        if self.inference.mode == "compiled":
            self._run = torch.compile(self.graph)
        self._recordings: dict[torch.Size, _Recording] = {}
        self._recording = threading.Lock()
        self._process = os.getpid()

    @torch.inference_mode()
    def run(self, images: Array) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores.

        Raises:
            SettingsError: a GPU, in a process that was forked after this was made.
        """
        self._check_process()
        given = torch.from_numpy(np.ascontiguousarray(images)).to(self.device)
        given = given.contiguous(memory_format=torch.channels_last)
        if self.inference.mode == "graph" and self.device.type == "cuda":
            with self._recording:  # its memory holds one input, and one result until it is copied
                return arrays(self._replay(given))
        return arrays(self._run(given))

    @torch.inference_mode()
    def run_tiled(self, image: Array, window: Size) -> Outputs:
        """(3, H, W) float32 RGB in [0, 1] of any size to maps of that size, by windows (h, w)."""
        self._check_process()
        evidence = tiled_evidence(self.graph.evidence, torch.from_numpy(image), window)
        return arrays(outputs_of(self.graph, evidence, (image.shape[1], image.shape[2])))

    def _check_process(self) -> None:
        if self.device.type == "cuda" and self._process != os.getpid():
            raise SettingsError(
                "a GPU cannot be used in a process forked after the detector was loaded; load it "
                "in the child, or start processes by spawn"
            )

    def _replay(self, images: Tensor) -> Tensors:
        """Run by a CUDA graph, which is recorded once for each shape of input."""
        if images.shape not in self._recordings:
            self._recordings[images.shape] = self._record(images)
        recording = self._recordings[images.shape]
        recording.images.copy_(images)
        recording.graph.replay()
        return recording.outputs

    def _record(self, images: Tensor) -> _Recording:
        kept = images.clone(memory_format=torch.channels_last)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries plan and take their memory before the recording
                self._run(kept)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._run(kept)
        return _Recording(graph, kept, outputs)


def arrays(outputs: Tensors) -> Outputs:
    """As arrays, in float32."""
    return Outputs(*(part.float().cpu().numpy() for part in outputs))


@dataclass
class TiledRuntime:
    """A torch runtime that cuts each image into windows of a size; it takes one image at a time."""

    runtime: TorchRuntime
    window: Size
    name = "torch"

    def run(self, images: Array) -> Outputs:
        """(1, 3, H, W) float32 RGB in [0, 1] of any size to maps and scores."""
        (image,) = images
        return self.runtime.run_tiled(image, self.window)
