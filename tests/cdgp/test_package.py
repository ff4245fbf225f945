"""The package's own laws: which room may import which, the public names, what help costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cdgp

SOURCE = Path(cdgp.__file__).parent
FLOOR = {"errors", "presets", "progress", "files"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "presets": {"errors"},
    "progress": {"errors"},
    "files": {"errors"},
    "method": FLOOR,
    "data": FLOOR,
    "metrics": FLOOR,
}
BASE = FLOOR | {"method", "data", "metrics"}
ALLOWED["run_folder"] = FLOOR
ALLOWED["artifact"] = BASE
ALLOWED["audit"] = BASE
ALLOWED["runtimes"] = BASE | {"artifact"}
ALLOWED["inference"] = BASE | {"artifact", "runtimes", "run_folder"}
ALLOWED["export"] = ALLOWED["inference"] | {"inference"}
ALLOWED["training"] = BASE | {"artifact", "runtimes", "inference"}
ALLOWED["evaluation"] = BASE | {"inference"}
ALLOWED["ledger"] = FLOOR | {"inference", "evaluation", "run_folder"}
ALLOWED["report"] = BASE | {"audit", "inference", "evaluation", "run_folder"}
ALLOWED["workflows"] = BASE | {
    "artifact", "audit", "inference", "training", "evaluation", "ledger", "report", "run_folder",
}  # fmt: skip
ALLOWED["cli"] = ALLOWED["workflows"] | {"workflows", "export"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [node.module]
            if node.module == "cdgp":
                modules = [f"cdgp.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
        rooms |= {m.split(".")[1] for m in modules if m.startswith("cdgp.")}
    return rooms


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_import_law(path: Path) -> None:
    room = room_of(path)
    assert imported_rooms(path) <= ALLOWED[room] | {room}


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


def test_metrics_know_no_torch() -> None:
    for path in (SOURCE / "metrics").glob("*.py"):
        assert "torch" not in path.read_text(encoding="utf-8"), path


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
