"""Fixtures of the workflows' tests."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from tests.cdgp.workflows.watching import Counted

from cdgp.data import images
from cdgp.runtimes.base import Array, Outputs
from cdgp.runtimes.torch import TorchRuntime


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts what is decoded and predicted from here on."""
    found = Counted()
    read, run = images.read_with_facts, TorchRuntime.run

    def counting_read(path: Path, *arguments: Any, **options: Any) -> Any:
        found.reads[path] += 1
        return read(path, *arguments, **options)

    def counting_run(self: TorchRuntime, batch: Array) -> Outputs:
        for image in batch:
            found.inputs[hashlib.sha256(image.tobytes()).hexdigest()] += 1
        return run(self, batch)

    monkeypatch.setattr(images, "read_with_facts", counting_read)
    monkeypatch.setattr(TorchRuntime, "run", counting_run)
    return found
