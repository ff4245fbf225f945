"""What `cdgp bench-latency` writes, and its counts against a plain reading of the network."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from cdgp.cli.main import app
from cdgp.progress import Quiet
from cdgp.runtimes.torch import TorchRuntime
from cdgp.workflows import Run
from cdgp_bench.measure.latency import alternate, stages


def test_runs_take_turns() -> None:
    told: list[str] = []

    def turn(name: str, seconds: float) -> float:
        told.append(name)
        return seconds

    found = alternate([lambda: turn("a", 1.0), lambda: turn("b", 2.0)], 3, Quiet())
    assert found == [[1.0] * 3, [2.0] * 3]
    assert told == ["a", "b"] * 8, "five runs of each warm up"


def test_multiply_adds_against_the_layers(tiny_run: Run) -> None:
    runtime = tiny_run.detector.runtime
    assert isinstance(runtime, TorchRuntime)
    counted = 0

    def count(layer: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal counted
        kernel = layer.kernel_size[0] * layer.kernel_size[1]
        counted += output.numel() * kernel * layer.in_channels // layer.groups

    hooks = [m.register_forward_hook(count) for m in runtime.graph.modules()  # type: ignore[arg-type]
             if isinstance(m, nn.Conv2d)]  # fmt: skip
    images = torch.rand(1, 3, *tiny_run.detector.settings.input_size)
    runtime.run(images)
    for hook in hooks:
        hook.remove()
    found = stages(tiny_run.detector, images, 1)
    # Besides the convolutions there are two products of small matrices.
    assert counted <= found["macs"] <= 1.01 * counted
    assert found["parameters"] == sum(p.numel() for p in runtime.graph.parameters())
    assert set(found["stages_ms"]) >= {"encoders", "student", "regions"}


def test_command(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    arguments = ["bench-latency", str(tiny_run.folder), str(tiny_run.folder / "model.safetensors"),
                 "--out", str(tmp_path), "--threads", "1", "--runs", "3", "--quiet"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "latency.json").read_text())
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    assert len(found["files"]) == 2 and found["threads"] == 1 and found["machine"]["processor"]
    for facts in found["files"]:
        assert 0 < facts["latency_ms"]["median"] <= facts["latency_ms"]["p95"]
        assert facts["throughput"].keys() == {"1", "2", "4", "8", "16"}
        assert facts["peak_memory_mib"] > 100 and facts["cold_start_s"] > 0.1
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1 and "--overwrite" in again.output


@pytest.mark.parametrize(("name", "message"), [("none.onnx", "no such model file"), ("none", "no")])
def test_missing_files(tmp_path: Path, name: str, message: str) -> None:
    result = CliRunner().invoke(
        app, ["bench-latency", str(tmp_path / name), "--out", str(tmp_path / "out"), "--quiet"]
    )
    assert result.exit_code == 1 and message in result.output and name in result.output
    assert not (tmp_path / "out/latency.json").exists()


def test_unwritable_folder(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(
        app, ["bench-latency", str(tiny_run.folder), "--out", str(tmp_path / "file/x"), "--quiet"]
    )
    assert result.exit_code == 1 and "cannot be written" in result.output
