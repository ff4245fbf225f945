"""An exported file runs with the packages of `examples/runtime-requirements.txt` alone."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from tests.helpers import ROOT, noise_image

LISTED = [
    Requirement(line)
    for line in (ROOT / "examples/runtime-requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
RUN = """
import json, sys
from pathlib import Path
import cdgp
from cdgp.workflows import predict_folder
model, images, out = sys.argv[1:]
cdgp.load(model).predict(next(Path(images).iterdir()))
predict_folder(model, images, out, overlays="all", save_maps=True)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def name_of(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def stated() -> dict[str, Requirement]:
    """What the package needs, and to export."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = project["dependencies"] + project["optional-dependencies"]["onnx"]
    return {name_of(r.name): r for r in map(Requirement, every)}


def test_bounds_are_those_of_the_package() -> None:
    listed = {(name_of(r.name), r.specifier) for r in LISTED}
    assert listed <= {(name, r.specifier) for name, r in stated().items()}


def test_a_prediction_imports_nothing_else(exported: dict[str, Path], tmp_path: Path) -> None:
    noise_image(tmp_path / "images/a.png")
    arguments = [exported["onnx"], tmp_path / "images", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=True
    )
    modules = set(json.loads(done.stdout.splitlines()[-1])) - sys.stdlib_module_names
    homes = packages_distributions()
    imported = {name_of(d) for module in modules for d in homes.get(module, [])}
    assert imported >= {"numpy", "onnxruntime", "pillow"}
    left_out = stated().keys() - {name_of(r.name) for r in LISTED}
    assert {"torch", "timm", "scikit-learn"} <= left_out and not imported & left_out
