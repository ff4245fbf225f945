"""An exported ``.xml`` file, with its ``.bin``, under OpenVINO."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdgp.errors import ModelFileError, SettingsError
from cdgp.runtimes.base import (
    INPUT,
    Array,
    Outputs,
    Shape,
    cores,
    outlive_forks,
    require_package,
    source_name,
)
from cdgp.runtimes.sealed import Exported


class Plan(NamedTuple):
    """A graph compiled for inputs of one shape."""

    shape: Any
    """None where it is compiled for all of them."""
    compiled: Any
    idle: list[Any]
    """Its infer requests that no thread uses. A request runs one input at a time."""


class OpenVinoRuntime:
    """An OpenVINO graph, or an exported file, on the CPU; safe in threads.

    Arguments and errors as ``OnnxRuntime``; the graph is an ``openvino.Model``, with ``any_size``
    compiled once for inputs of all shapes.
    """

    name = "openvino"

    def __init__(self, source: Any, threads: int | None = None, any_size: bool = False) -> None:
        openvino = require_package("openvino")
        self.threads = threads
        self._running: list[int] = []
        """The process of each run that has not ended, as it stands when a child is forked."""
        try:
            self.model = source
            if isinstance(source, Exported):
                self.model = openvino.Core().read_model(source.content, source.weights)
            shape = None
            if not any_size:
                shape = self.model.input(0).get_partial_shape()
                shape[0] = 1
            self.plan = self._planned(shape)
        except (RuntimeError, IndexError) as error:  # IndexError: the graph has no input
            raise ModelFileError(
                f"{source_name(source)}: OpenVINO cannot run it: {error}"
            ) from error

    def signature(self) -> tuple[dict[str, tuple[str, Shape]], dict[str, tuple[str, Shape]]]:
        """(type, shape) of the inputs and of the outputs, by name."""
        return _signature(self.model.inputs), _signature(self.model.outputs)

    def run(self, images: Array) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores; errors as ``call``."""
        return Outputs(*self.call({INPUT: images}, Outputs._fields))

    def call(self, inputs: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
        """The outputs of some names, for inputs by their names.

        Raises:
            SettingsError: in a child that was forked while another thread ran, whose locks would
                be waited for for ever.
        """
        process = os.getpid()
        if any(other != process for other in self._running):
            raise SettingsError(
                "OpenVINO cannot be used in a process forked while another thread predicted; fork "
                "before, or start processes by spawn"
            )
        self._running.append(process)
        try:
            return self._infer(inputs, names)
        finally:
            self._running.remove(process)

    def _infer(self, inputs: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
        given = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        plan = self.plan  # another thread may replace it meanwhile
        if plan.shape is not None:
            first = next(iter(given.values()))
            shape = require_package("openvino").PartialShape(list(first.shape))
            if plan.shape != shape:
                plan = self.plan = self._planned(shape)
        try:
            request = plan.idle.pop()
        except IndexError:
            request = plan.compiled.create_infer_request()
        results = request.infer(given, share_inputs=True)
        outputs = [np.array(results[name]) for name in names]
        plan.idle.append(request)
        return outputs

    def _planned(self, shape: Any) -> Plan:
        compiled = compiled_for(self.model, shape, self.threads)
        outlive_forks(compiled)
        return Plan(shape, compiled, [compiled.create_infer_request()])


def compiled_for(model: Any, shape: Any, threads: int | None) -> Any:
    """An ``openvino.CompiledModel`` of a model for inputs of one shape, of all where it is None.

    With a fixed shape, OpenVINO plans its memory ahead and merges more operations: a run takes a
    tenth less, for a fifth of a second once.
    """
    # Without the hint some processors compute in bfloat16, which moves the map.
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:  # of each run; runs at the same time have threads of their own
        streams = max(1, cores() // threads)
        options |= {"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": threads * streams}
    fixed = model.clone()  # the model itself is what is saved, and keeps its free batch size
    if shape is not None:
        fixed.reshape(shape)
    return require_package("openvino").Core().compile_model(fixed, "CPU", options)


def _signature(ports: Any) -> dict[str, tuple[str, Shape]]:
    """Of a model's inputs or outputs; a port without a name counts by its place."""
    found: dict[str, tuple[str, Shape]] = {}
    for index, port in enumerate(ports):
        name = port.get_any_name() if port.get_names() else str(index)
        kind = port.get_element_type().get_type_name()
        shape = port.get_partial_shape()
        sides = (
            ()
            if shape.rank.is_dynamic
            else tuple(None if side.is_dynamic else side.get_length() for side in shape)
        )
        found[name] = ("float32" if kind == "f32" else kind, sides)
    return found
