"""Fixtures of the exported files."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cdgp.export import TARGETS, ExportOptions, export
from cdgp.progress import Quiet
from cdgp.workflows import Run


@pytest.fixture(scope="session")
def exported(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny run as a file of every format."""
    assert tiny_run.folder is not None
    folder = tmp_path_factory.mktemp("exported")
    files = {target: folder / f"a{suffix}" for target, (suffix, _) in TARGETS.items()}
    for target, out in files.items():
        export(tiny_run.folder, ExportOptions(target, out), Quiet())
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", "a.onnx", "a.xml"]
    return files


@pytest.fixture(scope="session")
def odd_images() -> list[NDArray[np.uint8]]:
    """HWC uint8 RGB images of mixed sizes, with fine structure and unlike colours."""
    rng = np.random.default_rng(0)
    images = []
    for height, width in [(64, 64), (97, 63), (130, 50), (33, 33), (20, 300)]:
        image = rng.integers(0, 255, (height, width, 3)).astype(np.uint8)
        image[..., 0] //= 3
        image[: height // 2] = 255 * (np.indices((height // 2, width)).sum(0) % 2)[..., None]
        images.append(image)
    return images
