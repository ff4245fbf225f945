"""What can run a trained model: torch, or an exported file under onnxruntime or OpenVINO.

Every runtime takes the input that ``data.images.to_input`` makes and returns the same ``Outputs``.
What else a prediction needs is the ``Card``. Optional packages are imported when a runtime is made.
"""

from pathlib import Path

from cdgp.runtimes.base import INPUT, Runtime, check_signature, require_package
from cdgp.runtimes.card import Card, check_version, from_metadata
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.openvino import OpenVinoRuntime
from cdgp.runtimes.sealed import check_seal, read_exported

__all__ = ["EXPORTED", "INPUT", "Runtime", "open_exported", "require_package"]

EXPORTED: dict[str, type[OnnxRuntime] | type[OpenVinoRuntime]] = {
    ".onnx": OnnxRuntime,
    ".xml": OpenVinoRuntime,
}
"""The runtime of an exported file, by the file's suffix."""


def open_exported(path: Path, threads: int | None = None) -> tuple[Card, Runtime]:
    """The card and the runtime of an exported file.

    Args:
        path: of a file that ``cdgp export`` wrote; its suffix is one of ``EXPORTED``.
        threads: number of threads; the runtime's own choice where None.

    Raises:
        ModelFileError: no such file, damaged, not exported by this tool, or by another version; an
            ``.xml`` beside the ``.bin`` of another export; a graph that its card does not fit.
        SettingsError: the runtime is not installed.
    """
    exported = read_exported(path)
    check_version(exported.metadata, str(path))
    check_seal(exported)
    card = from_metadata(exported.metadata, str(path))
    runtime = EXPORTED[path.suffix.lower()](exported, threads)
    check_signature(*runtime.signature(), card.settings.input_size, str(path))
    return card, runtime
