"""Random damage against every door that takes foreign files; `benchmarks/fuzz.py` throws more."""

import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tests.helpers import ROOT

from cdgp import artifact
from cdgp.errors import ModelFileError
from cdgp.workflows import Run

SCRIPT = ROOT / "src/cdgp_bench/studies/fuzzing.py"


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz"]


def changed(model: Path, folder: Path, key: str, change: Callable[[Any], None]) -> Path:
    """A copy of a model file with something else in its metadata."""
    with safe_open(model, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    value = json.loads(metadata[key])
    change(value)
    save_file(tensors, folder / "changed.safetensors", metadata | {key: json.dumps(value)})
    return folder / "changed.safetensors"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        # A network of any size would be made before its weights are missed.
        ("settings", lambda v: v["student"].update(widths=[16, 32, 64, 128_000_000])),
        ("settings", lambda v: v["student"].update(widths=[16, 32, 64, 10**30])),
        ("settings", lambda v: v["backbone"].update(token_dim=10**12)),
        ("decision", lambda v: v.update(threshold="0.5")),
        ("decision", lambda v: v.update(threshold=True)),
        ("decision", lambda v: v.update(threshold=math.nan)),
        ("decision", lambda v: v.update(threshold=7)),
        ("decision", lambda v: v.update(false_reject_bound="x")),
        ("calibration", lambda v: v["image"].update(slope=math.nan)),
        ("calibration", lambda v: v.update(fusion_weight=[1])),
        ("calibration", lambda v: v["tail"].update(floor="high")),
        ("calibration", lambda v: v.update(tail=[])),
    ],
)
def test_model_files_with_impossible_contents(
    tiny_run: Run, tmp_path: Path, key: str, change: Callable[[Any], None]
) -> None:
    assert tiny_run.folder is not None
    path = changed(tiny_run.folder / "model.safetensors", tmp_path, key, change)
    with pytest.raises(ModelFileError, match="incomplete or damaged"):
        artifact.load(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "door", ["pictures", "masks", "mask pairing", "manifest", "settings", "model"]
)
def test_doors_give_a_result_or_one_of_our_errors(
    fuzz: ModuleType, tmp_path: Path, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    (tmp_path / "tree").mkdir()
    seeds, take = fuzz.doors(tmp_path, door)[door]
    answers = fuzz.hammer(seeds, take, 100)
    assert answers.total() >= 100 and answers["taken"] and len(answers) > 1
