"""The times of training: minutes by hand, and a run of a few small steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import tiny_settings

from cdgp.progress import Advance
from cdgp.training.dual_gp import DualGPTraining
from cdgp.training.student import StudentTraining
from cdgp_bench.studies import training
from cdgp_bench.synthetic import make_dataset


def stage(seconds: list[float], loss: float) -> dict[str, Any]:
    """As ``run`` and ``operations`` give it, half of each step's time being its batch."""
    shares = {"batch": 0.5, "forward": 0.125, "backward": 0.375}
    return {
        "losses": [loss] * training.COMPARED,
        "seconds": seconds,
        "phases": {name: [share * t for t in seconds] for name, share in shares.items()},
        "operations": {"aten::mm": 0.75, "aten::add": 0.25},
    }


def result(dual: float, first: float, again: float, loss: float) -> dict[str, Any]:
    """Of a data set of 200 good images; the steps that do not count take an hour."""
    warm_up = [3600.0] * training.WARM_UP
    # 50 images in batches of 5: ten steps see images for the first time, nine intervals end there.
    student = [*warm_up, *[first] * (9 - training.WARM_UP), *[again] * 33]
    return {
        "Dual GP": stage([*warm_up, *[dual] * 40], loss),
        "Reverse student": stage(student, 2 * loss),
        "good": 200,
    }


def test_minutes_are_those_of_the_median_steps() -> None:
    rounds = {"this": [result(1.0, 0.25, 0.125, 0.5)], "other": [result(1.5, 0.5, 0.125, 0.75)]}
    found = training.compared(rounds, threads=1)
    # 128 fit images in 26 batches are new, 334 of 360 steps see images again.
    student = {"this": 26 * 0.25 + 334 * 0.125, "other": 26 * 0.5 + 334 * 0.125}
    assert found["this"]["minutes"] == pytest.approx((400 * 1.0 + student["this"]) / 60)
    assert found["other"]["minutes"] == pytest.approx((400 * 1.5 + student["other"]) / 60)
    assert found["ratio"]["dual_gp"] == pytest.approx(1.5)
    assert found["ratio"]["student_first"] == pytest.approx(2)
    assert found["ratio"]["minutes_student"] == pytest.approx(student["other"] / student["this"])
    assert found["largest_difference"] == pytest.approx(0.5)
    assert found["phases"]["Dual GP"] == {"batch": 0.5, "forward": 0.125, "backward": 0.375}
    assert found["operations"]["Dual GP"]["aten::mm"] == 0.75


def test_one_version_alone_has_no_ratio() -> None:
    found = training.compared({"this": [result(1.0, 0.25, 0.125, 0.5)] * 2}, threads=1)
    assert "ratio" not in found
    assert found["this"]["dual_gp"] == 1.0


def test_clock_stops_a_stage_and_leaves_other_phases_alone() -> None:
    seen: list[int] = []
    clock = training.Clock(3, seen.append)
    with clock.phase("Inducing tokens", 9) as advance:
        for _ in range(9):
            advance()

    def count(advance: Advance) -> None:
        for _ in range(9):
            advance()

    with pytest.raises(training.EnoughError), clock.phase("Dual GP", 9) as advance:
        count(advance)
    assert seen == [1, 2, 3]
    assert len(clock.ends) == 3


def test_both_stages_are_timed_and_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path, good=12, defective=6, size=(64, 64))
    monkeypatch.setattr(
        training, "settings",
        lambda preset: tiny_settings(dual_gp={"steps": 20, "batch_size": 4,
                                              "no_separation": "flag"},
                                     student={"steps": 20, "batch_size": 2}),
    )  # fmt: skip
    monkeypatch.setattr(training, "STEPS", {"Dual GP": 6, "Reverse student": 6})
    monkeypatch.setattr(training, "PROFILED", (2, 3))
    forwards = [kind.forward for kind in (DualGPTraining, StudentTraining)]
    found = training.one(tmp_path, torch.get_num_threads())
    assert found["good"] == 12
    for name in training.STEPS:
        timed = found[name]
        assert len(timed["losses"]) == training.COMPARED
        assert len(timed["seconds"]) == 5
        # The phases of a step are all of it.
        for parts in zip(timed["seconds"], *timed["phases"].values(), strict=True):
            assert parts[0] == pytest.approx(sum(parts[1:]))
            assert min(parts) > 0
        shares = timed["operations"]
        assert "aten::convolution_backward" in shares
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
        assert 0 < sum(shares.values()) <= 1 + 1e-3
    assert forwards == [kind.forward for kind in (DualGPTraining, StudentTraining)]
