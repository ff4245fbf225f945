"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest

from cdgp.workflows import Run


@pytest.fixture
def model(tiny_run: Run) -> Path:
    assert tiny_run.folder is not None
    return tiny_run.folder / "model.safetensors"
