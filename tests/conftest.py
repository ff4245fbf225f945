"""Fixtures that several files share."""

import logging

import pytest
import torch
from tests.helpers import tiny_settings

from cdgp.data.manifest import Manifest
from cdgp.workflows import Run, train_run
from cdgp_bench.synthetic import make_dataset

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def audible_log(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings reach the log in each test, whatever a library did to it in an earlier one."""
    logging.disable(logging.NOTSET)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.filters.clear()
    caplog.handler.setLevel(logging.NOTSET)
    caplog.handler.filters.clear()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] in ("cdgp", "cdgp_bench") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """24 good and 12 defective textured surfaces with masks, 96 × 80 pixels."""
    return make_dataset(tmp_path_factory.mktemp("surfaces"))


@pytest.fixture(scope="session")
def tiny_run(surfaces: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a few steps, with all its files."""
    return train_run(surfaces.root, tmp_path_factory.mktemp("runs") / "tiny", tiny_settings())
