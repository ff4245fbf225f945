"""Turns, processes of their own, and peak memory."""

import sys
import time

import numpy as np
import pytest

from cdgp.errors import SettingsError
from cdgp_bench.errors import LatencyError
from cdgp_bench.measure.harness import (
    Worker,
    alternate,
    command_cost,
    in_process,
    machine,
    peak_memory,
    reset_peak_memory,
    seconds_of,
)

MIB = 2**20


class Counter:
    """What a worker process holds in these tests."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise SettingsError("negative")
        self.count = start

    def add(self, number: int) -> int:
        if number < 0:
            raise SystemExit(1)
        self.count += number
        return self.count


def test_runs_take_turns() -> None:
    order: list[str] = []

    def turn(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    steps: list[int] = []
    found = alternate(
        {"a": lambda: turn("a", 1.0), "b": lambda: turn("b", 2.0)}, 3, warm_ups=5,
        advance=lambda: steps.append(1),
    )  # fmt: skip
    assert found == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert order == ["a", "b"] * 8
    assert len(steps) == len(order)


def test_a_run_is_timed() -> None:
    assert 0.05 <= seconds_of(lambda: time.sleep(0.05)) < 1


def test_a_worker_keeps_its_object() -> None:
    with Worker(Counter, 3) as worker:
        assert worker.call("add", 4) == 7
        assert worker.call("add", 1) == 8


def test_errors_of_a_worker() -> None:
    with pytest.raises(SettingsError):
        Worker(Counter, -1)
    with Worker(Counter, 0) as worker, pytest.raises(LatencyError):
        worker.call("add", -1)


def peak_of(count: int) -> float:
    """Growth of this process' peak while so many MiB are held."""
    reset_peak_memory()
    before = peak_memory().mib
    held = np.ones(count * MIB, np.uint8)
    after = peak_memory().mib
    assert before is not None and after is not None
    assert held.any()
    return after - before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_peak_is_that_of_the_array() -> None:
    assert in_process(peak_of, 64) == pytest.approx(64, abs=4)
    assert in_process(peak_of, 128) == pytest.approx(128, abs=4)


def test_the_cost_of_a_command() -> None:
    large = command_cost([sys.executable, "-c", f"b'1' * {200 * MIB}"])
    small = command_cost([sys.executable, "-c", "pass"])
    assert small.seconds > 0
    assert (large.peak_kib - small.peak_kib) / 1024 == pytest.approx(200, abs=20)


def test_the_machine() -> None:
    assert {"python", "system", "processor", "threads", "libraries", "torch"} <= machine().keys()
