"""An exported ``.onnx`` file under onnxruntime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cdgp.errors import ModelFileError
from cdgp.runtimes.base import (
    INPUT,
    Array,
    Outputs,
    Shape,
    outlive_forks,
    require_package,
    source_name,
)
from cdgp.runtimes.sealed import Exported


class OnnxRuntime:
    """An ONNX graph under onnxruntime, on the CPU; safe in threads, as its session is.

    Args:
        source: an exported file, or the bytes of a graph.
        threads: number of threads; onnxruntime's own choice where None.

    Raises:
        ModelFileError: onnxruntime cannot run the graph.
    """

    name = "onnxruntime"

    def __init__(self, source: Exported | bytes, threads: int | None = None) -> None:
        onnxruntime = require_package("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self.session = onnxruntime.InferenceSession(
                source if isinstance(source, bytes) else source.content,
                options,
                providers=["CPUExecutionProvider"],
            )
        except Exception as error:  # onnxruntime's exceptions share no class of their own
            raise ModelFileError(
                f"{source_name(source)}: onnxruntime cannot run it: {error}"
            ) from error
        outlive_forks(self.session)

    def signature(self) -> tuple[dict[str, tuple[str, Shape]], dict[str, tuple[str, Shape]]]:
        """(type, shape) of the inputs and of the outputs, by name."""
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        return _signature(inputs), _signature(outputs)

    def run(self, images: Array) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores."""
        return Outputs(*self.call({INPUT: images}, Outputs._fields))

    def call(self, inputs: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
        """The outputs of some names, for inputs by their names."""
        given = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        return [*self.session.run(list(names), given)]


def _signature(arguments: Any) -> dict[str, tuple[str, Shape]]:
    """Of onnxruntime's descriptions; a free dimension has a name, or None, for its length."""
    return {
        a.name: (
            "float32" if a.type == "tensor(float)" else a.type,
            tuple(side if isinstance(side, int) else None for side in a.shape or ()),
        )
        for a in arguments
    }
