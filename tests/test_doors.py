"""Random damage against every door that takes foreign files; `benchmarks/fuzz.py` throws more."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "door", ["pictures", "masks", "mask pairing", "manifest", "settings", "model"]
)
def test_doors_give_a_result_or_one_of_our_errors(
    fuzz: ModuleType, tmp_path: Path, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    (tmp_path / "tree").mkdir()
    strategy, take = fuzz.doors(tmp_path)[door]
    answers = fuzz.hammer(strategy, take, 100)
    assert answers.total() >= 100 and answers["taken"] and len(answers) > 1
