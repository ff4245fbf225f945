"""Fixtures of the tests on Ray."""

import os
from pathlib import Path

import pytest
from tests.helpers import noise_image


@pytest.fixture(scope="module")
def model(exported: dict[str, Path]) -> Path:
    """The tiny run as a file that needs no torch."""
    return exported["onnx"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven images in two folders, one of them unreadable, one with a name that is no text."""
    folder = tmp_path_factory.mktemp("many") / "images"
    for i in range(8):
        noise_image(folder / f"a/{i:02}.png", (40 + 7 * i, 64), i)
    noise_image(folder / "b/plain.png", seed=9)
    (folder / "b/torn.png").write_bytes((folder / "a/00.png").read_bytes()[:200])
    noise_image(folder / "b/odd.png", seed=10)
    (folder / "b/odd.png").rename(folder / "b" / os.fsdecode(b"odd\xff\n.png"))
    return folder
