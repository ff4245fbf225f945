"""Graphs that cannot be made, and files that are whole or not there."""

from pathlib import Path
from typing import Any

import onnx
import openvino
import pytest
import torch

from cdgp.errors import ModelFileError, OutputError
from cdgp.export import OPSET
from cdgp.runtimes.card import FORMAT
from cdgp.runtimes.sealed import read_exported
from cdgp.runtimes.writers import save_onnx, save_openvino, to_onnx, to_openvino


class Broken(torch.nn.Module):
    """A graph that the exporter cannot trace."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("first line\nsecond line")


class Unreadable:
    """In place of an ``onnx.ModelProto``."""

    metadata_props: Any = onnx.ModelProto().metadata_props

    def SerializeToString(self) -> bytes:
        return b"no graph"


def test_graphs_that_cannot_be_made() -> None:
    graph: Any = Broken()
    with pytest.raises(ModelFileError, match=f"operator set {OPSET}"):
        to_onnx(graph, (64, 64), False, OPSET)
    with pytest.raises(ModelFileError, match=f"operator set {OPSET}"):
        to_openvino(Unreadable(), OPSET)


def test_both_files_of_openvino_are_replaced(exported: dict[str, Path], tmp_path: Path) -> None:
    network = openvino.Core().read_model(exported["openvino"])
    out = tmp_path / "new" / "a.xml"
    save_openvino(network, {"format": "first"}, out)
    weights = out.with_suffix(".bin").read_bytes()
    assert weights == exported["openvino"].with_suffix(".bin").read_bytes()
    out.with_suffix(".bin").write_bytes(b"of an earlier export")
    save_openvino(network, {"format": "second"}, out)
    assert out.with_suffix(".bin").read_bytes() == weights
    assert read_exported(out).metadata["format"] == "second"
    assert openvino.Core().read_model(out).get_rt_info([FORMAT, "format"]).astype(str) == "second"
    assert sorted(path.name for path in out.parent.iterdir()) == ["a.bin", "a.xml"]


def test_a_place_that_cannot_be_written(exported: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    network = openvino.Core().read_model(exported["openvino"])
    with pytest.raises(OutputError, match="file"):
        save_openvino(network, {}, tmp_path / "file" / "a.xml")
    with pytest.raises(OutputError, match="file"):
        save_onnx(Unreadable(), {}, tmp_path / "file" / "a.onnx")
