"""Random damage against every parser of foreign input; `cdgp_bench.studies.fuzzing` does more."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from cdgp import artifact
from cdgp.errors import ModelFileError
from cdgp.workflows import Run
from cdgp_bench.studies.fuzzing import fuzz, input_parsers


def changed(model: Path, folder: Path, key: str, change: Callable[[Any], None]) -> Path:
    """A copy of a model file with something else in its metadata."""
    with safe_open(model, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    value = json.loads(metadata[key])
    change(value)
    metadata |= {key: json.dumps(value)}
    metadata["sha256"] = artifact.digest_of(metadata, tensors)  # else it alone would refuse it
    save_file(tensors, folder / "changed.safetensors", metadata)
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
        ("calibration", lambda v: v["image"]["slope"].__setitem__(1, math.nan)),
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
    "name", ["images", "masks", "mask pairing", "manifest", "settings", "model"]
)
def test_parsers_give_a_result_or_one_of_our_errors(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    seeds, parse = input_parsers(tmp_path, name)[name]
    outcomes = fuzz(seeds, parse, 100)
    assert outcomes.total() >= 100 and outcomes["taken"] and len(outcomes) > 1
