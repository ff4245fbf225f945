"""Every row of docs/refused/models.toml; a seal against hashlib, metadata against onnx."""

import copy
import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.refused import rows

import cdgp
from cdgp.artifact import TAIL, digest_of
from cdgp.errors import ModelFileError
from cdgp.runtimes.card import card_of, to_metadata
from cdgp.runtimes.sealed import onnx_metadata, read_exported
from cdgp.runtimes.writers import save_onnx, save_openvino, to_openvino
from cdgp.workflows import Run
from cdgp_bench.studies.refused import Row


class Files:
    """The files of one trained model, and changed copies of them in a folder."""

    def __init__(self, run: Run, exported: dict[str, Path], folder: Path) -> None:
        assert run.folder is not None
        self.onnx, self.xml, self.folder = exported["onnx"], exported["openvino"], folder
        self.model = run.folder / "model.safetensors"
        self.metadata = to_metadata(card_of(run.detector.model)) | {"export": "{}"}

    def proto(self) -> Any:
        """The graph of the .onnx file, without metadata."""
        proto = onnx.load(self.onnx)
        del proto.metadata_props[:]
        return proto

    def edited(self, source: Path, change: Callable[[bytes], bytes]) -> Path:
        """A copy with other bytes; of an .xml with its .bin."""
        out = self.folder / f"m{source.suffix}"
        if source.suffix == ".xml":
            out.with_suffix(".bin").write_bytes(source.with_suffix(".bin").read_bytes())
        out.write_bytes(change(source.read_bytes()))
        return out

    def with_weights(self, change: Callable[[bytes], bytes]) -> Path:
        """A copy of the .xml beside other weights."""
        out = self.edited(self.xml, bytes)
        out.with_suffix(".bin").write_bytes(change(out.with_suffix(".bin").read_bytes()))
        return out

    def mixed(self) -> Path:
        """The .xml beside the .bin of a model with other weights."""
        proto = self.proto()
        tensor = next(t for t in proto.graph.initializer if t.name.endswith("heads.0.weight"))
        values = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values * 1.5, tensor.name))
        other = self.folder / "other.xml"
        save_openvino(to_openvino(proto, 18), self.metadata, other)
        ours, theirs = self.xml.with_suffix(".bin"), other.with_suffix(".bin")
        assert ours.stat().st_size == theirs.stat().st_size
        cdgp.load(other)
        return self.with_weights(lambda _: theirs.read_bytes())

    def exported(self, change: Callable[[Any], object], **metadata: str) -> Path:
        """A changed graph, sealed as an export is."""
        proto = self.proto()
        change(proto)
        save_onnx(proto, self.metadata | metadata, self.folder / "m.onnx")
        return self.folder / "m.onnx"

    def of_another_size(self) -> Path:
        settings = self.metadata["settings"].replace("[64,64]", "[96,96]")
        assert settings != self.metadata["settings"]
        return self.exported(lambda _: None, settings=settings)

    def external(self) -> Path:
        out = self.folder / "m.onnx"
        onnx.save(onnx.load(self.onnx), out, save_as_external_data=True, location="m.data")
        assert (self.folder / "m.data").stat().st_size > out.stat().st_size
        return out

    def trained(
        self,
        metadata: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        signed: bool = True,
    ) -> Path:
        """The model file with other tensors, or other values in a part of its metadata.

        Where it is not signed, it is of version 1, or has lost its digest at a version of its own.
        """
        with safe_open(self.model, "pt") as file:
            texts = dict(file.metadata())
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        held |= tensors or {}
        for key, value in (metadata or {}).items():
            new = merged(json.loads(texts[key]), value) if isinstance(value, dict) else value
            texts[key] = json.dumps(new)
        del texts["sha256"]
        if signed:
            texts["sha256"] = digest_of(texts, held)
        elif metadata is None:
            texts["version"] = "1"
        save_file(held, self.folder / "m.safetensors", texts)
        return self.folder / "m.safetensors"

    def tail(self) -> torch.Tensor:
        with safe_open(self.model, "pt") as file:
            tail: torch.Tensor = file.get_tensor(TAIL)
            return tail


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested values with changes on top."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        values[key] = merged(values[key], value) if isinstance(value, dict) else value
    return values


def flipped(content: bytes, at: float = 0.5) -> bytes:
    """One bit changed, at a share of the length."""
    place = int(len(content) * at)
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def without_digest(content: bytes) -> bytes:
    """An .onnx file as the first format had it."""
    proto = onnx.load_from_string(content)
    kept = {p.key: p.value for p in proto.metadata_props if p.key != "sha256"}
    onnx.helper.set_model_props(proto, kept | {"version": "1"})
    return bytes(proto.SerializeToString())


def other_threshold(content: bytes) -> bytes:
    changed = re.sub(rb'{"threshold": 0.\d', b'{"threshold": 0.9', content)
    assert changed != content
    return changed


def turned_outputs(proto: Any) -> None:
    outputs = list(proto.graph.output)
    del proto.graph.output[:]
    proto.graph.output.extend(reversed(outputs))


def unknown_operator(proto: Any) -> None:
    proto.opset_import.add(domain="of.somebody", version=1)
    proto.graph.node.add(
        op_type="Unknown", domain="of.somebody", input=["images"], output=["more"], name="more"
    )


def changed_graph(content: bytes) -> bytes:
    changed = content.replace(b'strides="2, 2"', b'strides="1, 1"', 1)
    assert changed != content
    return changed


MAKERS: dict[str, Callable[[Files], Path]] = {
    "pair-mixed": Files.mixed,
    "bin-missing": lambda f: without_bin(f.edited(f.xml, bytes)),
    "bin-empty": lambda f: f.with_weights(lambda _: b""),
    "bin-flipped": lambda f: f.with_weights(flipped),
    "xml-edited": lambda f: f.edited(f.xml, changed_graph),
    "xml-cut": lambda f: f.edited(f.xml, lambda content: content[:-1000]),
    "bin-given": lambda f: f.edited(f.xml, bytes).with_suffix(".bin"),
    "onnx-empty": lambda f: f.edited(f.onnx, lambda _: b""),
    "onnx-cut": lambda f: f.edited(f.onnx, lambda content: content[:-1000]),
    "onnx-flipped": lambda f: f.edited(f.onnx, flipped),
    "onnx-external": Files.external,
    "onnx-threshold": lambda f: f.edited(f.onnx, other_threshold),
    "onnx-foreign": lambda f: f.edited(f.onnx, lambda _: bytes(f.proto().SerializeToString())),
    "onnx-older": lambda f: f.edited(f.onnx, without_digest),
    "onnx-size": Files.of_another_size,
    "onnx-outputs": lambda f: f.exported(turned_outputs),
    "onnx-custom-op": lambda f: f.exported(unknown_operator),
    "export-list": lambda f: f.exported(lambda _: None, export="[]"),
    "model-cut": lambda f: f.edited(f.model, lambda content: content[:-1000]),
    "model-flipped": lambda f: f.edited(f.model, flipped),
    "model-nan": lambda f: f.trained(tensors={"gps.normal.m": torch.full((8,), math.nan).double()}),
    "tail-empty": lambda f: f.trained(tensors={TAIL: f.tail()[:0]}),
    "tail-unsorted": lambda f: f.trained(tensors={TAIL: f.tail().flip(0)}),
    "tail-infinite": lambda f: f.trained(tensors={TAIL: f.tail().clone().index_fill_(
        0, torch.tensor([len(f.tail()) - 1]), math.inf)}),
    "spread-zero": lambda f: f.trained({"calibration": {"residual": {"std": 0.0}}}),
    "slope-negative": lambda f: f.trained({"calibration": {"image": {"slope": [-1.0] * 3}}}),
    "bound-of-two": lambda f: f.trained({"decision": {"false_reject_bound": 2.0}}),
    "provenance-text": lambda f: f.trained({"provenance": "mine"}),
    "model-unsigned": lambda f: f.trained(signed=False),
    "model-digest-lost": lambda f: f.trained({}, signed=False),
}  # fmt: skip


def without_bin(path: Path) -> Path:
    path.with_suffix(".bin").unlink()
    return path


@rows("models", MAKERS)
def test_every_row(tiny_run: Run, exported: dict[str, Path], tmp_path: Path, row: Row) -> None:
    path = MAKERS[row.id](Files(tiny_run, exported, tmp_path))
    if row.result == "read":
        pixels = np.full((64, 64), 90, np.uint8)
        expected = tiny_run.detector.predict(pixels).pred_score
        assert cdgp.load(path).predict(pixels).pred_score == expected
        return
    with pytest.raises(ModelFileError) as raised:
        cdgp.load(path)
    assert str(raised.value).startswith(f"{path}: ") and row.says in str(raised.value)


def test_unchanged_copies_are_read(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    """Else every row would be refused for another reason."""
    files = Files(tiny_run, exported, tmp_path)
    for path in (files.edited(files.xml, bytes), files.edited(files.onnx, bytes), files.trained()):
        assert cdgp.load(path).card.image == tiny_run.detector.card.image
    assert cdgp.load(files.exported(lambda _: None)).threshold == tiny_run.detector.threshold


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_a_seal_is_the_digest_of_all_bytes(exported: dict[str, Path], target: str) -> None:
    found = read_exported(exported[target])
    seal = found.metadata["sha256"]
    zeros = found.content.replace(seal.encode(), b"0" * 64)
    assert found.content.count(seal.encode()) == 1
    assert hashlib.sha256(zeros + found.weights).hexdigest() == seal
    assert bool(found.weights) == (target == "openvino")


@pytest.mark.parametrize("target", ["onnx", "openvino"])
@pytest.mark.parametrize("at", [0.001, 0.2, 0.8, 0.95, 0.9999])
def test_no_bit_may_change(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path, target: str, at: float
) -> None:
    files = Files(tiny_run, exported, tmp_path)
    path = files.edited(exported[target], lambda content: flipped(content, at))
    with pytest.raises(ModelFileError, match=r"m\.(onnx|xml): "):
        cdgp.load(path)


def test_metadata_are_those_that_the_onnx_package_reads(exported: dict[str, Path]) -> None:
    content = exported["onnx"].read_bytes()
    proto = onnx.load_from_string(content)
    expected = {entry.key: entry.value for entry in proto.metadata_props}
    assert len(expected) > 5 and onnx_metadata(content) == expected
    proto.metadata_props.add(key="größe", value="ä" * 70_000)
    assert onnx_metadata(proto.SerializeToString())["größe"] == "ä" * 70_000


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x72", b"\x0b", b"\x09\x00"])
def test_bytes_that_are_no_message(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"empty|cut off|no field"):
        onnx_metadata(content)
