"""An exported ``.xml`` file, with its ``.bin``, under OpenVINO."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdgp.errors import ModelFileError
from cdgp.method.network import Outputs
from cdgp.runtimes.base import INPUT, require_package, source_name
from cdgp.runtimes.card import FORMAT, KEYS


class OpenVinoRuntime:
    """An OpenVINO graph, or a file of one, on the CPU; arguments and errors as ``OnnxRuntime``."""

    name = "openvino"

    def __init__(self, source: Any, threads: int | None = None) -> None:
        openvino = require_package("openvino")
        self.threads = threads
        try:
            self.model = openvino.Core().read_model(source) if isinstance(source, Path) else source
            shape = self.model.input(0).get_partial_shape()
            shape[0] = 1
            self.request = infer_request(self.model, shape, threads)
        except (RuntimeError, IndexError) as error:  # IndexError: the graph has no input
            raise ModelFileError(
                f"{source_name(source)}: OpenVINO cannot run it: {error}"
            ) from error
        self.metadata: dict[str, str] = {
            key: self.model.get_rt_info([FORMAT, key]).astype(str)
            for key in KEYS
            if self.model.has_rt_info([FORMAT, key])
        }

    def run(self, images: Tensor) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores."""
        array = images.contiguous().numpy()
        shape = require_package("openvino").PartialShape(list(array.shape))
        if self.request.model_inputs[0].get_partial_shape() != shape:
            self.request = infer_request(self.model, shape, self.threads)
        results = self.request.infer({INPUT: array}, share_inputs=True)
        return Outputs(*(torch.from_numpy(np.array(results[name])) for name in Outputs._fields))


def infer_request(model: Any, shape: Any, threads: int | None) -> Any:
    """An ``openvino.InferRequest`` of a model for inputs of one shape.

    With a fixed shape, OpenVINO plans its memory ahead and merges more operations: a run takes a
    tenth less, for a fifth of a second once.
    """
    # Without the hint some processors compute in bfloat16, which moves the map.
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        options["INFERENCE_NUM_THREADS"] = threads
    fixed = model.clone()  # the model itself is what is saved, and keeps its free batch size
    fixed.reshape(shape)
    core = require_package("openvino").Core()
    return core.compile_model(fixed, "CPU", options).create_infer_request()
