"""Exported files: what they hold, and that a graph with other numbers is never written."""

import copy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import torch
from numpy.typing import NDArray
from tests.helpers import ROOT
from torch.nn import Conv2d

import cdgp
from cdgp import artifact, export
from cdgp.artifact import Model
from cdgp.data.images import network_input, to_input
from cdgp.data.manifest import Manifest
from cdgp.decision import Decision
from cdgp.errors import DataError, ModelFileError, OutputError
from cdgp.export import TARGETS, TOLERANCE, ExportOptions
from cdgp.files import digest
from cdgp.method.calibration import fit_image_evidence
from cdgp.method.graph import DominanceHead, EvidenceGraph
from cdgp.method.score import image_score
from cdgp.progress import Quiet
from cdgp.runtimes import writers
from cdgp.runtimes.base import Array
from cdgp.runtimes.torch import TorchRuntime
from cdgp.workflows import Run

EXAMPLE = ROOT / "examples/onnx_numpy.py"


def folder(of: Run) -> Path:
    assert of.folder is not None
    return of.folder


@pytest.mark.parametrize("target", list(TARGETS))
def test_free_size(tiny_run: Run, tmp_path: Path, target: str) -> None:
    out = tmp_path / f"free{TARGETS[target].suffix}"
    export.export(folder(tiny_run), ExportOptions(target, out, "free"), Quiet())
    detector = cdgp.load(out)
    for shape in [(1, 3, 64, 64), (2, 3, 96, 176), (3, 3, 208, 64)]:
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).numpy()
        a, b = detector.runtime.run(images), tiny_run.detector.runtime.run(images)
        torch.testing.assert_close(a.fused, b.fused, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.pooled, b.pooled, atol=1e-5, rtol=0)
    assert detector.card.export["input"]["shape"] == ["batch", 3, "height", "width"]


def without_dual_gp(model: Model, inputs: Sequence[Array], ties: bool) -> Model:
    """As after a training with good images alone: its score is one minus a p-value."""
    network = copy.copy(model.network)
    network._modules = network._modules | dict.fromkeys(("encoder", "projection", "gps"))
    batch = torch.from_numpy(np.stack(inputs))
    pooled = EvidenceGraph(network)(batch).pooled.double().numpy()
    if ties:
        pooled[:] = pooled[:1]
    image = fit_image_evidence(pooled, np.zeros(len(pooled), np.bool_), has_dominance=False)
    assert image.is_p_value and len(image.slope) == 2
    calibration = model.calibration._replace(image=image, fusion_weight=0.0)
    provenance = model.provenance | {"rests_on": "good images alone"}
    decision = Decision(0.95, "of the test", None, is_p_value=True)
    return model._replace(
        network=network, calibration=calibration, decision=decision, provenance=provenance
    )


def as_in_the_paper(model: Model) -> Model:
    """No distance, and the dominance alone for the image."""
    network = copy.copy(model.network)
    network._modules = network._modules | {"distance": None}
    network.image_evidence = "dominance"
    c = model.calibration
    image = c.image._replace(
        centre=c.image.centre[:1], scale=c.image.scale[:1], slope=(0.7,), good_logits=()
    )
    calibration = c._replace(image=image, distance_weight=0.0)
    old = model.settings
    settings = old.model_copy(update={
        "calibration": old.calibration.model_copy(update={"image_evidence": "dominance"}),
        "distance": old.distance.model_copy(update={"weight": 0.0}),
    })  # fmt: skip
    return model._replace(network=network, calibration=calibration, settings=settings)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("kind", ["p-value", "p-value of ties", "paper"])
def test_models_with_other_branches(
    tiny_run: Run, odd_images: list[NDArray[np.uint8]], tmp_path: Path, kind: str, target: str
) -> None:
    """Exported as any other, with the numbers of torch, at batches of 1, 3 and 5."""
    model = tiny_run.detector.model
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(folder(tiny_run) / "manifest.csv", run)
    good = [sample.image for sample in tiny_run.manifest.of("calibration") if not sample.defective]
    inputs = [network_input(path, model.settings)[0] for path in good]
    if kind == "paper":
        model = as_in_the_paper(model)
    else:
        model = without_dual_gp(model, inputs, ties=kind != "p-value")
    artifact.save(run / "model.safetensors", model)
    out = tmp_path / f"a{TARGETS[target].suffix}"
    found = export.export(run, ExportOptions(target, out), Quiet()).parity
    assert found.worst <= TOLERANCE and found.ranks < 1e-3 and not found.changed
    detector, plain = cdgp.load(out), cdgp.load(run)
    entries = 1 if kind == "paper" else 2
    for image in odd_images:
        a, b = detector.predict(image), plain.predict(image)
        assert a.pred_score == pytest.approx(b.pred_score, abs=1e-4)
    for batch in (1, 4):
        outputs = detector.runtime.run(np.stack(inputs[:batch]))
        assert outputs.pooled.shape == (batch, entries)
        rate = model.decision.defect_rate
        scores = image_score(outputs.pooled, model.calibration.image, rate).astype(np.float32)
        torch.testing.assert_close(outputs.pred_score, scores, atol=1e-5, rtol=0)
    assert detector.card.image == model.calibration.image
    assert detector.card.export["score"] == {
        "kind": "probability" if kind == "paper" else "p-value",
        "rests_on": "10 defects" if kind == "paper" else "good images alone",
    }
    if target == "onnx":
        np.save(tmp_path / "image.npy", odd_images[1])
        done = subprocess.run([sys.executable, EXAMPLE, out, tmp_path / "image.npy"],
                              capture_output=True, text=True, check=True)  # fmt: skip
        expected = plain.predict(odd_images[1])
        label, score = done.stdout.splitlines()[0].split()
        assert label == ("defective" if expected.pred_label else "good")
        assert float(score) == pytest.approx(expected.pred_score, abs=2e-6)


def test_a_bound_does_not_hold_at_another_size(tiny_run: Run) -> None:
    model = tiny_run.detector.model
    bounded = model._replace(decision=model.decision._replace(false_reject_bound=0.05))
    assert export.with_input_size(bounded, (64, 96)).decision.false_reject_bound is None
    sizes: list[export.InputSize] = [None, "free", model.settings.input_size]
    assert all(export.with_input_size(bounded, size) is bounded for size in sizes)


def source_type(op: Any, place: int = 0) -> str:
    """The kind of operation that gives an input."""
    kind: str = op.input_value(place).get_node().get_type_name()
    return kind


def in_8_bits(op: Any) -> bool:
    """Whether a layer multiplies numbers of 8 bits: its weights are rounded."""
    return any(source_type(op, place) in ("FakeQuantize", "Reshape", "Multiply") and
               "fq_weights" in op.input_value(place).get_node().get_friendly_name()
               for place in (0, 1))  # fmt: skip


def test_int8_is_measured(
    tiny_run: Run, odd_images: list[NDArray[np.uint8]], tmp_path: Path
) -> None:
    out = tmp_path / "small.xml"
    export.export(folder(tiny_run), ExportOptions("openvino", out, int8=True), Quiet())
    detector = cdgp.load(out)
    about = detector.card.export
    assert about["precision"] == "int8" and about["parity"]["tolerance"] is None
    assert about["parity"]["fused"] > TOLERANCE, "8 bits leave a trace"
    assert set(about["image_auroc"]) == {"torch", "openvino"}
    quantised = [o for o in openvino.Core().read_model(out).get_ops()
                 if o.get_type_name() == "FakeQuantize"]  # fmt: skip
    assert len(quantised) > 50
    layers = [o for o in openvino.Core().read_model(out).get_ops()
              if o.get_type_name() in ("Convolution", "GroupConvolution", "MatMul")]  # fmt: skip
    graph = tiny_run.detector.runtime
    assert isinstance(graph, TorchRuntime)
    head = graph.graph.evidence.head
    assert isinstance(head, DominanceHead)
    channels = sorted(layer.out_channels for layer in head.modules() if isinstance(layer, Conv2d))
    channels += [32, 32]  # components of the distance
    exact = [o for o in layers if not in_8_bits(o)]
    assert sorted(
        o.output(0).get_partial_shape()[1].get_length()
        for o in exact
        if o.get_type_name() == "Convolution"
    ) == sorted(channels), "head and distance in float32, all other convolutions in 8 bits"
    assert not any(in_8_bits(o) for o in layers if o.get_type_name() == "MatMul")
    assert all(source_type(o) != "FakeQuantize" for o in exact)
    assert detector.predict(odd_images[0]).anomaly_map.shape == odd_images[0].shape[:2]


@pytest.mark.parametrize("target", list(TARGETS))
def test_what_a_file_says_of_itself(tiny_run: Run, exported: dict[str, Path], target: str) -> None:
    about = cdgp.load(exported[target]).card.export
    assert about["runtime"] == TARGETS[target].runtime
    assert about["classes"] == ["good", "defective"]
    assert about["input"]["range"] == [0, 1] and about["input"]["channels"] == "RGB"
    assert "antialiasing" in about["input"]["resize"]
    assert about["parity"]["tolerance"] == 1e-4
    assert max(about["parity"][k] for k in ("fused", "pooled", "pred_score")) <= 1e-4
    assert about["parity"]["pictures"] == len(tiny_run.manifest.of("calibration"))
    assert about["parity"]["labels"] == 0
    assert set(about["versions"]) == {"cdgp", "torch", "onnx", TARGETS[target].runtime}
    assert about["model_sha256"] == digest(folder(tiny_run) / "model.safetensors")


def test_a_file_that_differs_is_not_written(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is a real one: a graph with another weight does not pass."""
    plain = writers.to_onnx

    def spoilt(*arguments: Any) -> Any:
        proto = plain(*arguments)
        for tensor in proto.graph.initializer:
            if tensor.name.endswith("student.heads.0.weight"):
                values = onnx.numpy_helper.to_array(tensor)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values * 1.001, tensor.name))
                return proto
        raise AssertionError("the weight has another name")

    monkeypatch.setattr(export, "to_onnx", spoilt)
    out = tmp_path / "a.onnx"
    with pytest.raises(ModelFileError, match="not written"):
        export.export(folder(tiny_run), ExportOptions("onnx", out), Quiet())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.xml", "a.bin"])
def test_either_file_of_openvino_is_replaced_only_when_asked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    options = ExportOptions("openvino", tmp_path / "a.xml")
    with pytest.raises(OutputError, match=name):
        export.check_options(options)
    export.check_options(replace(options, overwrite=True))


def test_a_table_without_fit_images_is_not_compared_on(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    """Else nothing would be compared, and any graph would pass."""
    (tmp_path / "model.safetensors").write_bytes(
        (folder(tiny_run) / "model.safetensors").read_bytes()
    )
    surfaces.write_csv(tmp_path / "manifest.csv")
    with pytest.raises(DataError, match=r"manifest\.csv"):
        export.read_source(tmp_path)


def test_example_needs_onnxruntime_and_numpy_alone(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60
    image = np.random.default_rng(5).integers(0, 255, (150, 91, 3), np.uint8)
    np.save(tmp_path / "image.npy", image)
    code = (
        "import runpy, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('torch', 'cdgp', 'PIL', 'scipy'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"sys.argv = ['x', {str(exported['onnx'])!r}, {str(tmp_path / 'image.npy')!r}]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = tiny_run.detector.predict(image)
    label, score = done.stdout.splitlines()[0].split()
    assert label == ("defective" if expected.pred_label else "good")
    assert float(score) == pytest.approx(expected.pred_score, abs=2e-6)


def test_example_refuses_a_changed_file(exported: dict[str, Path], tmp_path: Path) -> None:
    content = exported["onnx"].read_bytes()
    changed = content.replace(b'"balanced_threshold": 0.5', b'"balanced_threshold": 0.9')
    assert changed != content
    (tmp_path / "changed.onnx").write_bytes(changed)
    onnx.save(onnx.load(exported["onnx"]), tmp_path / "parts.onnx", save_as_external_data=True)
    np.save(tmp_path / "image.npy", np.zeros((64, 64, 3), np.uint8))
    for name in ("changed.onnx", "parts.onnx"):
        done = subprocess.run(
            [sys.executable, EXAMPLE, name, "image.npy"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "has changed since cdgp exported it" in done.stderr


@pytest.mark.parametrize(
    "array",
    [
        np.full((64, 64, 3), 40_000, np.uint16),
        np.random.default_rng(0).random((64, 64, 3)),
        np.zeros((64, 64), np.uint8),
        np.zeros((64, 64, 4), np.uint8),
        np.zeros((3, 64, 64), np.uint8),
    ],
)
def test_example_refuses_other_arrays(
    exported: dict[str, Path], tmp_path: Path, array: NDArray[Any]
) -> None:
    np.save(tmp_path / "image.npy", array)
    done = subprocess.run(
        [sys.executable, EXAMPLE, exported["onnx"], "image.npy"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "of uint8 is expected" in done.stderr


def test_example_resizes_as_the_product() -> None:
    source = EXAMPLE.read_text("utf-8")
    names: dict[str, Any] = {"np": np}
    exec(source[source.index("def weights") : source.index("content =")], names)
    image = np.random.default_rng(0).random((150, 91, 3), dtype=np.float32)
    for size in [(64, 64), (160, 96), (150, 32)]:
        rows, columns = names["weights"](150, size[0]), names["weights"](91, size[1])
        found = np.einsum("hy,yxc,wx->chw", rows, image, columns)
        np.testing.assert_allclose(found, to_input(image, size), atol=1e-5)
