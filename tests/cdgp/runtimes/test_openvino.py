"""OpenVINO: one model for every shape of input, and files that it cannot run."""

from pathlib import Path

import numpy as np
import openvino
import pytest
import torch
from openvino import opset13

import cdgp
from cdgp.errors import ModelFileError
from cdgp.runtimes.openvino import OpenVinoRuntime
from cdgp.runtimes.sealed import read_exported


def test_another_batch_plans_the_graph_again(exported: dict[str, Path]) -> None:
    runtime = OpenVinoRuntime(read_exported(exported["openvino"]), threads=1)
    images = np.random.default_rng(0).random((3, 3, 64, 64), np.float32)
    first = runtime.plan
    alone = runtime.run(images[:1])
    assert runtime.plan is first
    together = runtime.run(images)
    assert runtime.plan is not first
    torch.testing.assert_close(together.fused[:1], alone.fused, atol=1e-4, rtol=0)
    assert runtime.model.input(0).get_partial_shape()[0].is_dynamic, "the model keeps a free batch"


def test_outputs_outlive_the_next_run(exported: dict[str, Path]) -> None:
    """OpenVINO writes into the same memory again; outputs are copies."""
    runtime = OpenVinoRuntime(read_exported(exported["openvino"]), threads=1)
    images = np.random.default_rng(0).random((2, 3, 64, 64), np.float32)
    first = runtime.run(images[:1])
    before = first.fused.copy()
    runtime.run(images[1:])
    assert np.array_equal(first.fused, before)


def test_files_that_cannot_be_run(exported: dict[str, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.xml"  # without its .bin
    alone.write_bytes(exported["openvino"].read_bytes())
    constant = tmp_path / "constant.xml"  # without an input
    openvino.save_model(openvino.Model([opset13.constant(1.0)], [], "no input"), constant)
    foreign = tmp_path / "foreign.xml"
    given = opset13.parameter([1, 3, 64, 64], name="images")
    openvino.save_model(openvino.Model([opset13.relu(given)], [given], "foreign"), foreign)
    for path in (alone, constant, foreign, tmp_path / "none.xml"):
        with pytest.raises(ModelFileError, match=path.name):
            cdgp.load(path)
