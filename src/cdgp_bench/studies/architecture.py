"""How the source is built: lines, long functions, call depth, and calls of a higher layer.

    python -m cdgp_bench.studies.architecture

Trains a few steps on generated surfaces, predicts, and prints one JSON record:

- ``lines``: of Python, by package;
- ``long_functions``: those of more than 60 lines;
- ``frames_to_torch``: frames of our own from ``Detector.predict`` and from ``cdgp.fit`` to the
  first call of torch;
- ``climbs``: pairs of modules of which the lower one calls the higher one, on the path of an image
  through ``cdgp predict`` and of a training. The layers are those of the import law.
"""

import ast
import json
import re
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import cdgp
from cdgp.cli.main import app
from cdgp.presets import settings
from cdgp_bench.synthetic import make_dataset

SOURCE = Path(cdgp.__file__).parents[1]
MOST_LINES = 60
LAW = SOURCE.parent / "pyproject.toml"


def levels() -> dict[str, int]:
    """The level of each part of ``cdgp`` in the import law, 0 the lowest."""
    law = tomllib.loads(LAW.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"][0]
    return {
        part: level
        for level, line in enumerate(reversed(law["layers"]))
        for part in re.findall(r"\w+", line)
    }


def lines_of(package: str) -> int:
    """Lines of Python in a package."""
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in (SOURCE / package).rglob("*.py")
    )


def long_functions() -> list[str]:
    """Functions of more than ``MOST_LINES`` lines, with their file and length."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES:
                    found.append(f"{path.relative_to(SOURCE)}:{node.name}: {length}")
    return found


def module_of(frame: FrameType) -> str | None:
    """Our module that a frame runs, None for others and for imports."""
    name = str(frame.f_globals.get("__name__", ""))
    ours = name.startswith("cdgp.") and frame.f_code.co_name != "<module>"
    return name if ours else None


def own_callers(frame: FrameType | None) -> list[str]:
    """Our modules on the stack, the innermost first."""
    frames = [inner for inner, _ in traceback.walk_stack(frame)] if frame else []
    return [name for name in map(module_of, frames) if name is not None]


def profiled(call: Callable[[], object], watch: Callable[[FrameType, str, Any], None]) -> None:
    """Make a call with Python's profile function set."""
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)


def frames_to_torch(call: Callable[[], object]) -> int:
    """Frames of our own below the first call of torch, in a call whose imports are done."""
    depth: list[int] = []

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if depth or event not in ("call", "c_call"):
            return
        if event == "call":
            torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
        else:
            owner = getattr(called, "__self__", None)
            torch = type(owner).__module__.startswith("torch") or (
                str(getattr(called, "__module__", "")).startswith("torch")
            )
        if torch:
            depth.append(len(own_callers(frame)))

    profiled(call, watch)
    return depth[0]


def climbs(call: Callable[[], object]) -> list[str]:
    """Pairs of modules of which the lower one calls the higher one."""
    found: set[str] = set()
    level = levels()

    def watch(frame: FrameType, event: str, called: object) -> None:
        name = module_of(frame)
        callers = own_callers(frame.f_back) if event == "call" and name else []
        if callers:
            low, high = (level.get(str(module).split(".")[1], 0) for module in (callers[0], name))
            if high > low:
                found.add(f"{callers[0]} -> {name}")

    profiled(call, watch)
    return sorted(found)


def command(*arguments: object) -> None:
    """A command of the product, in this process."""
    app([str(argument) for argument in arguments], standalone_mode=False)


def main() -> None:
    tiny = settings(
        "lite",
        input_size=(64, 64),
        dual_gp={"steps": 4, "batch_size": 4, "no_separation": "flag"},
        student={"steps": 4, "batch_size": 2},
        inducing={"normal": 8, "anomaly": 4},
    )
    with tempfile.TemporaryDirectory(prefix="cdgp-architecture-") as place:
        folder = Path(place)
        data = make_dataset(folder / "parts").root
        run = cdgp.fit(data, folder / "run", tiny)  # imports are done after this
        image = data / "good" / "000.png"
        run.detector.predict(image)
        record = {
            "lines": {package: lines_of(package) for package in ("cdgp", "cdgp_bench")},
            "long_functions": long_functions(),
            "frames_to_torch": {
                "Detector.predict": frames_to_torch(lambda: run.detector.predict(image)),
                "cdgp.fit": frames_to_torch(lambda: cdgp.fit(data, None, tiny)),
            },
            "climbs": {
                "cdgp predict": climbs(
                    lambda: command("predict", folder / "run", data / "good", "--out",
                                    folder / "scores", "--quiet")
                ),
                "cdgp.fit": climbs(lambda: cdgp.fit(data, folder / "again", tiny)),
            },
        }  # fmt: skip
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
