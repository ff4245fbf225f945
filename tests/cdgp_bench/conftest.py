"""Fixtures of the benchmark's tests."""

import pytest

from cdgp.data.manifest import Manifest
from cdgp.data.splits import hashed
from cdgp.presets import DataSettings
from cdgp_bench.plan import Plan, read_plan
from cdgp_bench.protocol import Prepared, prepare


@pytest.fixture(scope="session")
def prepared(surfaces: Manifest) -> Prepared:
    """The generated surfaces, split with seed 0."""
    return prepare("surfaces", "surfaces", hashed(surfaces), DataSettings(), 0)


@pytest.fixture
def plan() -> Plan:
    """The paper's plan for MVTec AD 2."""
    return read_plan("paper-mvtec-ad2")
