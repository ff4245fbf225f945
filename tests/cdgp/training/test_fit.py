"""Thresholds and notes of a calibration: the parts that they rest on, and the defect rate."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers import digested, divided, noise_image, tiny_settings

from cdgp.data.manifest import Manifest, Sample, WeakSample, WeakSplit
from cdgp.errors import SettingsError
from cdgp.method.calibration import Calibration
from cdgp.method.network import Evidence
from cdgp.method.score import ImageCalibrator, image_score
from cdgp.presets import DecisionSettings
from cdgp.training.calibrate import CalibrationEvidence
from cdgp.training.fit import WITHOUT_CALIBRATION, check_calibration, decide, with_groups
from cdgp.workflows import Run

SAME = ImageCalibrator((0.0,), (1.0,), (1.0,), 0.0)


def weak(fit: dict[int, bool], calibration: list[tuple[int, bool]], own: bool = True) -> WeakSplit:
    """A split of images given by their groups and labels."""
    a = tuple(WeakSample(Path(f"f{i}"), bad) for i, bad in enumerate(fit.values()))
    b = tuple(WeakSample(Path(f"c{i}"), bad) for i, (_, bad) in enumerate(calibration))
    groups = tuple(fit), tuple(group for group, _ in calibration)
    return WeakSplit(a, b, (*a, *b), "", "", own, {}, *groups)


@pytest.fixture
def calibration(tiny_run: Run) -> Calibration:
    return tiny_run.detector.model.calibration._replace(image=SAME)


def evidence(pooled: list[float], split: WeakSplit) -> CalibrationEvidence:
    """Calibration evidence with this a(x); maps take no part in a decision."""
    none = torch.zeros(1, 1, 1)
    found = [Evidence(none, none, None, torch.tensor([[value]])) for value in pooled]
    labels = torch.tensor([s.defective for s in split.calibration])
    return CalibrationEvidence(found, labels, [(4, 4)] * len(pooled))


def test_the_threshold_is_the_rank_of_a_part_by_its_worst_image(calibration: Calibration) -> None:
    """Nine good parts of three images and two defective parts, in mixed order."""
    parts = [(group, False) for group in range(9) for _ in range(3)] + [(20, True), (21, True)]
    split = weak({100: False, 101: True}, parts)
    pooled = np.random.default_rng(0).normal(size=len(parts)).tolist()
    found = decide(
        evidence(pooled, split), calibration, DecisionSettings(max_false_rejects=0.2), split
    )
    worst = sorted(max(pooled[3 * g : 3 * g + 3]) for g in range(9))
    eighth = image_score(torch.tensor([[worst[7]]]), SAME)[0]  # ceil(10 * 0.8)
    assert found.balanced == float(eighth)
    assert found.false_reject_bound == pytest.approx(0.2)
    assert "from 9 good parts (groups) with 27 images" in found.source
    assert "an image of the next good part, of about as many images" in found.source


def test_parts_that_training_knows_do_not_count(calibration: Calibration) -> None:
    """A near duplicate of a fit image tells nothing of a new part."""
    split = weak({0: False, 30: True}, [*((g, False) for g in range(10)), (20, True)])
    pooled = [9.0, *map(float, range(9)), 5.0]
    found = decide(
        evidence(pooled, split), calibration, DecisionSettings(max_false_rejects=0.1), split
    )
    assert "from 9 good parts (groups) with 9 images" in found.source
    assert found.balanced == float(image_score(torch.tensor([[8.0]]), SAME)[0])
    settings = tiny_settings(
        decision={"max_false_rejects": 0.095}, calibration={"pictures": "held_out"}
    )
    with pytest.raises(SettingsError, match=": 9 are held out of training, at least 10 are needed"):
        check_calibration(split, settings)


def test_the_rate_is_that_of_the_training_parts_unless_it_is_stated(
    calibration: Calibration,
) -> None:
    """Five parts, two with a defective image; one of them is in the calibration part."""
    split = weak({0: False, 1: False, 2: True}, [(3, False), (4, False), (4, True)])
    found = decide(evidence([0.0] * 3, split), calibration, DecisionSettings(), split)
    assert split.parts == (3, 2)
    assert found.defect_rate == 0.4 and found.balanced == 0.5
    assert found.threshold == pytest.approx(0.4), "0.5 at equal numbers"
    assert "as 2 of 5 parts in the training bins" in found.refers_to
    stated = decide(
        evidence([0.0] * 3, split), calibration, DecisionSettings(defect_rate=0.02), split
    )
    assert (stated.defect_rate, stated.balanced) == (0.02, 0.5)
    assert stated.threshold == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("parts", "note"),
    [
        ([(0, False), (1, False), (2, True), (2, True)],
         "a single defective part (group) with 2 images"),
        ([(0, False), (0, False), (2, True), (3, True)],
         "a single good part (group) with 2 images"),
        ([(0, False), (2, True), (3, True)], "a single good calibration image"),
    ],
)  # fmt: skip
def test_a_single_part_is_noted(parts: list[tuple[int, bool]], note: str) -> None:
    image = with_groups(SAME, weak({}, parts))
    assert image.notes == (f"the probability rests on {note}",)
    assert image.rests_on_one
    assert (image.good_groups, image.defective_groups) == tuple(
        len({g for g, bad in parts if bad == label}) for label in (False, True)
    )


def test_calibration_on_training_images_is_noted() -> None:
    image = with_groups(SAME, weak({}, [(0, False), (1, False), (2, True), (3, True)], own=False))
    assert image.notes == (WITHOUT_CALIBRATION,) and not image.rests_on_one
    # The note of a single defective image is that of the calibrator's fit, and not repeated.
    assert with_groups(SAME, weak({}, [(0, False), (1, False), (2, True)])).notes == ()


def test_groups_of_a_split_are_parts_equal_pixels_and_near_duplicates(
    surfaces: Manifest, tmp_path: Path
) -> None:
    names = [noise_image(tmp_path / f"{i}.png", seed=min(i, 7)) for i in range(9)]  # 7, 8 are equal
    parts = [
        Sample(path, i > 5, group="g" if i in (0, 1) else None) for i, path in enumerate(names)
    ]
    states = {0: "fit", 1: "fit", 2: "fit", 6: "fit"}
    manifest = digested(
        Manifest(tmp_path, tuple(replace(s, split=states.get(i, "calibration"))
                                 for i, s in enumerate(parts)))
    )  # fmt: skip
    plain = manifest.weak_split()
    assert len(set(plain.fit_groups)) == 3 and plain.fit_groups[0] == plain.fit_groups[1]
    assert len(plain.calibration_groups) == 5
    assert len(set(plain.calibration_groups)) == 4, "equal pixels"
    assert not set(plain.fit_groups) & set(plain.calibration_groups)
    near = replace(manifest, samples=tuple(
        replace(s, group="near") if s.image.stem in ("2", "3", "4") else s
        for s in manifest.samples))  # fmt: skip
    joined = manifest.weak_split(near)
    assert joined.calibration_groups[0] == joined.calibration_groups[1] == joined.fit_groups[2]
    assert joined.parts == (3, 2), "g, the near ones, 5; 6 and the equal ones"
    same = {name: getattr(joined, name) for name in ("sha256", "good_fit_sha256", "calibration")}
    assert same == {name: getattr(plain, name) for name in same}, "training does not change"


def test_each_image_without_a_group_is_a_part(surfaces: Manifest) -> None:
    split = divided(digested(surfaces), 0).weak_split()
    numbers = (*split.fit_groups, *split.calibration_groups)
    assert len(set(numbers)) == len(numbers) == len(split.train)
