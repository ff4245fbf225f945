"""onnxruntime: what it is given, and files that it cannot run."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import cdgp
from cdgp.errors import ModelFileError
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.sealed import read_exported


def test_a_file_and_its_bytes_are_the_same(exported: dict[str, Path]) -> None:
    by_path = OnnxRuntime(read_exported(exported["onnx"]), threads=1)
    by_bytes = OnnxRuntime(exported["onnx"].read_bytes(), threads=1)
    assert by_path.signature() == by_bytes.signature()
    image = np.random.default_rng(0).random((1, 3, 64, 64), np.float32)
    for a, b in zip(by_path.run(image), by_bytes.run(image), strict=True):
        assert a.dtype == np.float32 and np.array_equal(a, b)


def test_threads_are_those_asked_for(exported: dict[str, Path]) -> None:
    options = OnnxRuntime(read_exported(exported["onnx"]), threads=2).session.get_session_options()
    assert options.intra_op_num_threads == 2


def test_any_layout_of_the_input(exported: dict[str, Path]) -> None:
    runtime = OnnxRuntime(read_exported(exported["onnx"]), threads=1)
    images = np.random.default_rng(0).random((2, 3, 64, 64), np.float32)
    last = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert not last.flags.c_contiguous
    assert np.array_equal(runtime.run(images).fused, runtime.run(last).fused)


def test_files_that_cannot_be_run(exported: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(exported["onnx"].read_bytes()[:100_000])
    foreign = tmp_path / "foreign.onnx"
    proto = onnx.load(exported["onnx"])
    del proto.metadata_props[:]
    onnx.save(proto, foreign)
    for path in (cut, foreign, tmp_path / "none.onnx"):
        with pytest.raises(ModelFileError, match=path.name):
            cdgp.load(path)
    with pytest.raises(ModelFileError):
        OnnxRuntime(b"no graph")
