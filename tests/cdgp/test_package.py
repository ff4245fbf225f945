"""The package's own laws: which room may import which, the public names, what help costs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers import ROOT

import cdgp
from cdgp.data.manifest import Manifest

SOURCE = Path(cdgp.__file__).parent


def test_import_law() -> None:
    """The contracts of pyproject.toml, checked on the source that is tested."""
    code = "import sys; from importlinter.cli import lint_imports as l; sys.exit(l(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_network_build_and_graph_import_all_stages() -> None:
    stages = {"backbone", "tokens", "gp", "student", "calibration", "losses"}
    for path in (SOURCE / "method").glob("*.py"):
        names = {
            node.module.split(".")[2]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("cdgp.method.")
        }
        if path.stem not in ("network", "build", "graph"):
            assert len(names & stages) <= 1, path


def test_public_names() -> None:
    assert cdgp.__all__ == [
        "CdgpError", "DataError", "Detector", "ImageError", "Interrupted", "LeakError", "Manifest",
        "ModelFileError", "NoSeparationError", "OutputError", "Prediction", "SettingsError",
        "TrainingError", "WeightsError", "fit", "load", "settings",
    ]  # fmt: skip
    for name in cdgp.__all__:
        assert getattr(cdgp, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cdgp.nothing


def test_help_and_import_need_no_torch() -> None:
    code = (
        "import sys, cdgp\n"
        "from cdgp.cli.main import app\n"
        "try: app(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


PREDICTING = """
import sys
import cdgp, cdgp.workflows.predict, cdgp.inference, cdgp.cli.main

prediction = cdgp.load(sys.argv[1], threads=1).predict(sys.argv[2])
print(prediction.anomaly_map.shape)
print(*sorted({"torch", "timm", "sklearn", "scipy.stats"} & set(sys.modules)))
"""


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_an_exported_file_predicts_without_what_trains(
    surfaces: Manifest, exported: dict[str, Path], target: str
) -> None:
    """What trains takes seconds to import."""
    done = subprocess.run(
        [sys.executable, "-c", PREDICTING, exported[target], surfaces.samples[0].image],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(96, 80)\n\n"
