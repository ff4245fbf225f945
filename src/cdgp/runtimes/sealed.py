"""Exported files are sealed: each holds one digest of all its bytes, an .xml those of its .bin too.

So the weights of one model never run with the calibration of another, and a file that was cut off,
edited or saved again by another program is refused before a runtime reads it. The digest is a
metadata entry; it is taken while the entry holds ``UNSEALED``.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from cdgp.errors import ModelFileError
from cdgp.runtimes.card import FORMAT

SEAL = "sha256"
"""The metadata key of the digest."""
UNSEALED = "0" * 64
_METADATA_PROPS = 14
"""Number of this field of an ``onnx.ModelProto``."""


class Exported(NamedTuple):
    """An exported file as read: nothing of it has been run."""

    path: Path
    content: bytes
    weights: bytes
    """Of the .bin beside an .xml; empty otherwise."""
    metadata: dict[str, str]


def sealed(content: bytes, weights: bytes = b"") -> bytes:
    """A file's bytes with their digest in the last place of ``UNSEALED``."""
    head, _, tail = content.rpartition(UNSEALED.encode())
    return head + hashlib.sha256(content + weights).hexdigest().encode() + tail


def check_seal(exported: Exported) -> None:
    """Raise ModelFileError where a file, or the one beside it, is not as it was exported."""
    path, content, weights, metadata = exported
    seal = metadata.get(SEAL, "")
    head, _, tail = content.rpartition(seal.encode() or b"\0")
    if sealed(head + UNSEALED.encode() + tail, weights) == content:
        return
    if path.suffix.lower() == ".xml":
        raise ModelFileError(
            f"{path}: {path.with_suffix('.bin').name} belongs to another export, or one of the two "
            "has changed since; copy both files of one export together"
        )
    raise ModelFileError(
        f"{path}: has changed since it was exported: edited, or saved again by another program, "
        "maybe with its weights in a file of their own; copy it again, or export again"
    )


def read_exported(path: Path) -> Exported:
    """Read an .onnx file, or an .xml with its .bin; nothing is checked but its form.

    Raises:
        ModelFileError: no such file, no .bin beside it, or incomplete.
    """
    if not path.is_file():
        raise ModelFileError(f"{path}: no such model file")
    weights = path.with_suffix(".bin")
    is_xml = path.suffix.lower() == ".xml"
    if is_xml and not weights.is_file():
        raise ModelFileError(
            f"{path}: {weights.name} is missing beside it; copy both files of the export together"
        )
    try:
        content = path.read_bytes()
        metadata = xml_metadata(content) if is_xml else onnx_metadata(content)
        return Exported(path, content, weights.read_bytes() if is_xml else b"", metadata)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, ElementTree.ParseError) as error:
        kind = "OpenVINO" if is_xml else "ONNX"
        raise ModelFileError(
            f"{path}: incomplete or damaged, or not of {kind} ({error}); copy it again, or export "
            "again"
        ) from error


def files_of(path: Path) -> list[Path]:
    """A model file and all that belongs to it: an .xml's .bin, the second graph of a tiled export.

    Only those that exist, but for the model file itself.
    """
    second = outputs_path(path)
    beside = [path.with_suffix(".bin"), second, second.with_suffix(".bin")]
    kinds = {".onnx": [second], ".xml": beside}.get(path.suffix.lower(), [])
    return [path, *(file for file in kinds if file.is_file())]


def outputs_path(path: Path) -> Path:
    """Where the second graph of a tiled export lies, see ``tiled``."""
    return path.with_name(f"{path.stem}.outputs{path.suffix}")


def xml_metadata(content: bytes) -> dict[str, str]:
    """The entries that this tool wrote into an OpenVINO .xml."""
    entries = ElementTree.fromstring(content).iterfind(f"rt_info/{FORMAT}/*")
    return {entry.tag: entry.get("value", "") for entry in entries}


def onnx_metadata(content: bytes) -> dict[str, str]:
    """The ``metadata_props`` of a serialised ``onnx.ModelProto``, read without the onnx package."""
    if not content:
        raise ValueError("it is empty")
    found: dict[str, str] = {}
    for number, entry in _fields(content):
        if number == _METADATA_PROPS:
            pair = dict(_fields(entry))  # 1: key, 2: value
            found[pair.get(1, b"").decode()] = pair.get(2, b"").decode()
    return found


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the length-delimited fields of a protobuf message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, length = key & 7, 0
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            yield key >> 3, message[at : at + length]
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"byte {at} starts no field")
        at += length
    if at > len(message):
        raise ValueError("it is cut off")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte from a position on, and the position after it."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("it is cut off")
        value |= (message[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 128:
            return value, at
