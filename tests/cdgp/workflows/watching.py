"""Counting reads and predictions, and comparing folders."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

TIMES = re.compile(
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?([+-]\d\d:\d\d)?"
    rb'|"seconds": [\d.]+'
    rb"|(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])"  # a run id
)


@dataclass
class Counted:
    """How often each image was decoded, and each input was predicted."""

    reads: Counter[Path] = field(default_factory=Counter)
    inputs: Counter[str] = field(default_factory=Counter)
    """By the digest of the runtime's input."""


def contents(folder: Path) -> dict[str, object]:
    """The content of every file, without times and run ids; of a model, tensors and metadata."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                found[f"{name} metadata"] = {
                    key: TIMES.sub(b"TIME", value.encode())
                    for key, value in file.metadata().items()
                    if key != "sha256"  # of all the others, the run id too
                }
                found[name] = {key: file.get_tensor(key).tolist() for key in file.keys()}  # noqa: SIM118
        elif path.is_file():
            found[name] = TIMES.sub(b"TIME", path.read_bytes())
    return found


def assert_same_files(a: Path, b: Path) -> None:
    """Both folders hold files of the same names and contents, but for times and run ids."""
    ours, theirs = contents(a), contents(b)
    assert ours.keys() == theirs.keys()
    for name, content in ours.items():
        assert content == theirs[name], name
