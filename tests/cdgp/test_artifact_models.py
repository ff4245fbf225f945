"""Model files of every kind: round trips, files of format 2, and damaged numbers."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.helpers import KINDS, random_model
from torch import Tensor

from cdgp import artifact
from cdgp.artifact import Model
from cdgp.errors import ModelFileError
from cdgp.method.graph import EvidenceGraph, InferenceGraph
from cdgp.method.network import Outputs
from cdgp.method.score import ImageCalibrator

Values = dict[str, Any]


def outputs(model: Model) -> Outputs:
    images = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(7))
    graph = InferenceGraph(EvidenceGraph(model.network), model.calibration)
    with torch.inference_mode():
        found: Outputs = graph(images)
    return found


def stored(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        return file.metadata(), {name: file.get_tensor(name) for name in names}


def write(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Sealed anew, so that it is not the digest that refuses it."""
    sealed = dict(metadata) | {"sha256": artifact.digest_of(metadata, tensors)}
    save_file(dict(tensors), path, sealed)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    """Bit by bit: weights, numbers, and what the model then says."""
    model = random_model(kind)
    artifact.save(tmp_path / "m.safetensors", model)
    assert stored(tmp_path / "m.safetensors")[0]["version"] == "4"
    again = artifact.load(tmp_path / "m.safetensors")
    before, after = model.network.state_dict(), again.network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert any(key.startswith("gps.") for key in after) == (kind != "good alone")
    assert any(key.startswith("distance.") for key in after) == (
        kind not in ("no distance", "paper")
    )
    first, second = model.calibration, again.calibration
    assert torch.equal(first.tail.scores, second.tail.scores)
    assert str(first.tail[1:]) == str(second.tail[1:]), "also where numbers are not given"
    none = first.tail._replace(scores=torch.zeros(1), start=0.0, shape=0.0, scale=1.0)
    assert first._replace(tail=none) == second._replace(tail=none)
    assert isinstance(second.image.slope, tuple) and isinstance(second.image.good_logits, tuple)
    assert second.image.is_p_value == (kind in ("no calibrating defect", "good alone"))
    assert (model.decision, model.settings, model.provenance) == again[2:5]
    for a, b in zip(outputs(model), outputs(again), strict=True):
        assert torch.equal(a, b)


def in_format_2(path: Path, version: str = "2") -> None:
    """The file in the layout of before: numbers in place of lists, and no word of a distance."""
    metadata, tensors = stored(path)
    numbers, settings = json.loads(metadata["calibration"]), json.loads(metadata["settings"])
    for key in ("centre", "scale", "slope"):
        (numbers["image"][key],) = numbers["image"][key]
    for holder, key in (
        (numbers, "distance"), (numbers, "distance_weight"), (numbers["image"], "good_logits"),
        (settings, "distance"), (settings["dual_gp"], "mean_weight"),
        (settings["calibration"], "image_evidence"),
    ):  # fmt: skip
        del holder[key]
    metadata |= {"version": version, "calibration": json.dumps(numbers),
                 "settings": json.dumps(settings)}  # fmt: skip
    if version == "1":
        del metadata["sha256"]
        save_file(tensors, path, metadata)
    else:
        write(path, metadata, tensors)


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_file_of_before_is_read_as_what_it_was(version: str, tmp_path: Path) -> None:
    model, path = random_model("paper"), tmp_path / "m.safetensors"
    artifact.save(path, model)
    in_format_2(path, version)
    again = artifact.load(path)
    chosen = again.settings
    assert (chosen.distance.weight, chosen.dual_gp.mean_weight) == (0.0, 0.0)
    assert chosen.calibration.image_evidence == "dominance"
    assert again.calibration.image == model.calibration.image
    assert again.calibration.weights == model.calibration.weights
    assert again.network.distance is None and not again.calibration.image.is_p_value
    for a, b in zip(outputs(model), outputs(again), strict=True):
        assert torch.equal(a, b)
    artifact.save(path, again)
    assert stored(path)[0]["version"] == "4"
    assert artifact.load(path).calibration.image == model.calibration.image


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    artifact.save(path, random_model("good alone"))
    metadata, tensors = stored(path)
    write(path, metadata | {"version": "5"}, tensors)
    with pytest.raises(ModelFileError, match="model format 5, this cdgp reads formats 1 and 2"):
        artifact.load(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file with all branches, and one of good images alone."""
    folder = tmp_path_factory.mktemp("files")
    found = {kind: folder / f"{kind}.safetensors" for kind in ("all", "good alone")}
    for kind, path in found.items():
        artifact.save(path, random_model(kind))
    return found


def image(**changes: Any) -> Callable[[Values], None]:
    return lambda values: values["image"].update(changes)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("all", image(centre=[0.0, 0.0])),
        ("all", image(slope=[])),
        ("all", image(centre=[], scale=[], slope=[])),
        ("all", image(centre=[0.0], scale=[1.0], slope=[1.0])),  # fewer than the branches give
        ("all", image(centre=[0.0] * 4, scale=[1.0] * 4, slope=[1.0] * 4)),
        ("all", image(scale=[1.0, -1.0, 1.0])),
        ("all", image(scale=[1.0, 0.0, 1.0])),
        ("all", image(slope=[1.0, -0.1, 1.0])),
        ("all", image(slope=[1.0, "0.1", 1.0])),
        ("all", image(centre=[0.0, None, 0.0])),
        ("all", image(centre="abc")),
        ("all", image(centre=math.inf)),
        ("all", image(intercept=math.nan)),
        ("all", image(good_logits={"a": 1})),
        ("good alone", image(good_logits=[0.0, -1.0, 2.0])),
        ("good alone", image(good_logits=[0.0, math.nan])),
        ("good alone", image(good_logits=["low"])),
        ("all", lambda v: v["distance"].update(std=0.0)),
        ("all", lambda v: v["distance"].update(mean=math.nan)),
        ("all", lambda v: v["distance"].pop("std")),
        ("all", lambda v: v.update(distance_weight=1.5)),
        ("all", lambda v: v.update(distance_weight=-0.1)),
        ("all", lambda v: v.update(distance_weight="half")),
    ],
)
def test_damaged_numbers_are_refused(
    files: dict[str, Path], tmp_path: Path, kind: str, change: Callable[[Values], None]
) -> None:
    metadata, tensors = stored(files[kind])
    numbers = json.loads(metadata["calibration"])
    change(numbers)
    path = tmp_path / "m.safetensors"
    write(path, metadata | {"calibration": json.dumps(numbers)}, tensors)
    with pytest.raises(ModelFileError, match=r"incomplete or damaged model file \("):
        artifact.load(path)


def test_what_was_not_changed_is_read(files: dict[str, Path], tmp_path: Path) -> None:
    """So that none of the refusals comes from how the tests write."""
    for kind, path in files.items():
        metadata, tensors = stored(path)
        numbers = json.dumps(json.loads(metadata["calibration"]))
        write(tmp_path / "m.safetensors", metadata | {"calibration": numbers}, tensors)
        assert artifact.load(tmp_path / "m.safetensors").provenance == {"made": kind}


def cut(name: str) -> Callable[[Tensor], Tensor]:
    return {"first": lambda t: t[1:], "last": lambda t: t[..., 1:], "nan": lambda t: t * math.nan}[
        name
    ]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("distance.stages.0.mean", "first"), ("distance.stages.0.mean", "last"),
        ("distance.stages.1.mean", "last"), ("distance.stages.0.basis", "first"),
        ("distance.stages.1.basis", "last"), ("distance.stages.0.whitening", "last"),
        ("distance.stages.1.whitening", "nan"), ("gps.normal.L", "last"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused(
    files: dict[str, Path], tmp_path: Path, name: str, how: str
) -> None:
    metadata, tensors = stored(files["all"])
    tensors[name] = cut(how)(tensors[name]).contiguous()
    write(tmp_path / "m.safetensors", metadata, tensors)
    with pytest.raises(ModelFileError, match=r"incomplete or damaged model file \("):
        artifact.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize("lost", ["gps.anomaly.m", "distance.stages.1.basis", "encoder.", "gps."])
def test_lost_tensors_are_refused(files: dict[str, Path], tmp_path: Path, lost: str) -> None:
    """A branch is whole or not there; a file without it is another model's."""
    metadata, tensors = stored(files["all"])
    kept = {name: value for name, value in tensors.items() if not name.startswith(lost)}
    assert len(kept) < len(tensors)
    write(tmp_path / "m.safetensors", metadata, kept)
    with pytest.raises(ModelFileError, match="incomplete or damaged"):
        artifact.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize("changes", [
    {"slope": (1.0, math.nan, 1.0)}, {"scale": (0.0, 1.0, 1.0)}, {"good_logits": (1.0, 0.0)},
    {"centre": (0.0,)},
])  # fmt: skip
def test_no_such_file_is_written(changes: dict[str, Any], tmp_path: Path) -> None:
    model = random_model("all")
    broken: ImageCalibrator = model.calibration.image._replace(**changes)
    with pytest.raises(ModelFileError, match="not written"):
        artifact.save(
            tmp_path / "m.safetensors",
            model._replace(calibration=model.calibration._replace(image=broken)),
        )
    assert not list(tmp_path.iterdir())
