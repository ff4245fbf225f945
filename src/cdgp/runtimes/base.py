"""What the runtimes share: their protocol, the graph's signature, and optional packages."""

import ctypes
import importlib
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cdgp.errors import ModelFileError, SettingsError

INPUT = "images"
OUTPUT_RANKS = {"anomaly_map": 3, "surprisal": 3, "fused": 3, "pooled": 2, "pred_score": 1}
"""The outputs of a graph, in their order, with their numbers of dimensions."""
EXTRAS = {
    "openvino": "openvino", "nncf": "openvino", "ray": "ray", "pyarrow": "ray", "fsspec": "ray",
}  # fmt: skip
"""Which extra an optional package comes with, where it is not ``onnx``."""
Array = NDArray[np.float32]
Shape = tuple[int | None, ...]
"""Lengths of the dimensions; None where one is free."""
OUT_OF_MEMORY = re.compile(
    r"not enough memory|out of memory|bad.?alloc|(can't|cannot|failed to) allocate\b.*memory", re.I
)
"""What torch, onnxruntime and OpenVINO say, under error classes of many kinds."""


class Outputs(NamedTuple):
    """What a graph gives for images (B, 3, H, W); ``method.network.Outputs`` as arrays."""

    anomaly_map: Array
    """(B, H, W), in nats."""
    surprisal: Array
    """(B, H, W), in nats."""
    fused: Array
    """(B, H, W), in standard deviations of the normal branches."""
    pooled: Array
    """(B, F) image evidence."""
    pred_score: Array
    """(B,), at the defect rate of the graph."""

    def split(self) -> "list[Outputs]":
        """Of each image by itself, (1, H, W)."""
        return [Outputs(*(part[i : i + 1] for part in self)) for i in range(len(self.pred_score))]


class Runtime(Protocol):
    """Something that runs the inference graph."""

    name: str

    def run(self, images: Array) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores.

        One image of any size, where the model cuts images into windows.
        """
        ...


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_package(name: str) -> Any:
    """Import an optional package, with its telemetry off.

    Raises:
        SettingsError: it is not installed, or its import fails; the message says which extra
            has it.
    """
    turn_telemetry_off()
    extra = EXTRAS.get(name, "onnx")
    install = f"pip install 'cdgp[{extra}]', or in a clone pip install -e '.[{extra}]'"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name if error.name in (name, None) else f"{name}, which needs {error.name}"
        raise SettingsError(f"this needs {missing}, which is not installed: {install}") from error
    except (Exception, SystemExit) as error:  # whatever a broken installation raises
        raise SettingsError(
            f"this needs {name}, whose import fails ({type(error).__name__}: {error}); install it "
            f"again: {install}"
        ) from error


def turn_telemetry_off() -> None:
    """Keep optional packages from reporting usage and from writing into the home folder.

    Each of them looks when it is imported. What the user has set in the environment stays.
    """
    # OpenVINO and nncf do without the package that reports where its import fails.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        Path.home()
    except RuntimeError:  # nncf asks for one at its import; it writes nothing there
        os.environ["HOME"] = tempfile.gettempdir()


_THREADED: weakref.WeakSet[Any] = weakref.WeakSet()


def outlive_forks(native: Any) -> None:
    """Keep an object that has threads of its own from ever being destroyed in a forked child.

    The threads stay with the parent. At its end the child would wait for them for ever, or crash.
    """
    _THREADED.add(native)


def _keep_threaded() -> None:
    for native in _THREADED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_threaded)


def check_signature(
    inputs: Mapping[str, tuple[str, Shape]],
    outputs: Mapping[str, tuple[str, Shape]],
    size: tuple[int, int],
    source: str,
    expected_ranks: Mapping[str, int] = OUTPUT_RANKS,
) -> None:
    """Raise ModelFileError where a graph is not one that takes and gives what is expected.

    Args:
        inputs: element type ("float32" where it is right) and shape of each, by name.
        outputs: the same, in the graph's order.
        size: (height, width) that its card names.
        source: of the graph, for the message.
        expected_ranks: numbers of dimensions of the outputs, in their order.
    """
    found = next(iter(inputs.values()), ("nothing", ()))
    sides = tuple(
        None if side is None else wanted for side, wanted in zip(found[1][2:], size, strict=False)
    )
    expected = ("float32", (None, 3, *sides))
    if list(inputs) != [INPUT] or len(sides) != 2 or found != expected:
        raise ModelFileError(
            f"{source}: takes {dict(inputs)} where {INPUT}, float32, (batch, 3, {size[0]}, "
            f"{size[1]}) is expected; export again"
        )
    ranks = {name: len(shape) for name, (_, shape) in outputs.items()}
    others = [kind for kind, _ in outputs.values() if kind != "float32"]
    if list(ranks.items()) != list(expected_ranks.items()) or others:
        raise ModelFileError(
            f"{source}: gives {dict(outputs)} where {', '.join(expected_ranks)}, all float32, are "
            "expected; export again"
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of any library says that memory could not be had."""
    return isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)) is not None


def source_name(source: object) -> str:
    """How an error message calls the source of a graph: by its path, where it has one."""
    return str(getattr(source, "path", "the exported graph"))
