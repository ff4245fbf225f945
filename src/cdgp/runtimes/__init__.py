"""What can run a trained model: torch, or an exported file under onnxruntime or OpenVINO.

Every runtime takes the input that ``data.images.to_input`` makes and returns the same ``Outputs``.
What else a prediction needs is the ``Card``. Optional packages are imported when a runtime is made.
"""

from pathlib import Path

from cdgp.errors import ModelFileError
from cdgp.runtimes.base import INPUT, Runtime, check_signature, require_package
from cdgp.runtimes.card import SECOND, Card, check_version, from_metadata
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.openvino import OpenVinoRuntime
from cdgp.runtimes.sealed import SEAL, check_seal, outputs_path, read_exported
from cdgp.runtimes.tiled import EVIDENCE, TiledExport, Tiling

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
            ``.xml`` beside the ``.bin`` of another export; a graph that its card does not fit; a
            tiled export without its second file, or beside that of another.
        SettingsError: the runtime is not installed.
    """
    exported = read_exported(path)
    check_version(exported.metadata, str(path))
    check_seal(exported)
    card = from_metadata(exported.metadata, str(path))
    runtime = EXPORTED[path.suffix.lower()](exported, threads)
    size, source = card.settings.input_size, str(path)
    if not card.settings.tile:
        check_signature(*runtime.signature(), size, source)
        return card, runtime
    check_signature(*runtime.signature(), size, source, {EVIDENCE: 4})
    return card, TiledExport(runtime, *_second(path, card, threads))


def _second(
    path: Path, card: Card, threads: int | None
) -> tuple[OnnxRuntime | OpenVinoRuntime, Tiling]:
    """What runs the second file of a tiled export, and how it is tiled."""
    try:
        tiling = Tiling(**card.export["tiling"])
    except (KeyError, TypeError) as error:
        raise ModelFileError(f"{path}: does not say how it is tiled; export again") from error
    second = read_exported(outputs_path(path))
    check_seal(second)
    if (second.metadata.get("format"), second.metadata[SEAL]) != (SECOND, tiling.outputs_sha256):
        raise ModelFileError(
            f"{path}: {second.path.name} belongs to another export; copy all files of one export "
            "together"
        )
    if path.suffix.lower() == ".xml":
        return OpenVinoRuntime(second, threads, any_size=True), tiling
    return OnnxRuntime(second, threads), tiling
