"""An exported ``.onnx`` file under onnxruntime."""

from pathlib import Path

import torch
from torch import Tensor

from cdgp.errors import ModelFileError
from cdgp.method.network import Outputs
from cdgp.runtimes.base import INPUT, require_package, source_name


class OnnxRuntime:
    """An ONNX graph under onnxruntime, on the CPU.

    Args:
        source: the file, or its bytes.
        threads: number of threads; onnxruntime's own choice where None.

    Raises:
        ModelFileError: onnxruntime cannot run the graph.
    """

    name = "onnxruntime"

    def __init__(self, source: Path | bytes, threads: int | None = None) -> None:
        onnxruntime = require_package("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self.session = onnxruntime.InferenceSession(
                source if isinstance(source, bytes) else str(source),
                options,
                providers=["CPUExecutionProvider"],
            )
        except Exception as error:  # onnxruntime's exceptions share no class of their own
            raise ModelFileError(
                f"{source_name(source)}: onnxruntime cannot run it: {error}"
            ) from error
        self.metadata: dict[str, str] = dict(self.session.get_modelmeta().custom_metadata_map)

    def run(self, images: Tensor) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores."""
        arrays = self.session.run(list(Outputs._fields), {INPUT: images.contiguous().numpy()})
        return Outputs(*(torch.from_numpy(array) for array in arrays))
