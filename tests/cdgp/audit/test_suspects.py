"""Suspect labels: folds by group, the ranking, and that no mask is read."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.helpers import digested, divided, load_folder, tiny_settings, two_bins

from cdgp.audit import suspects
from cdgp.audit.types import Suspect
from cdgp.method.build import pretrained_encoder
from cdgp.progress import Quiet


def test_probabilities_come_from_folds_without_the_group() -> None:
    """Six images of one part, all wrong in the same way, would vouch for one another."""
    rng = np.random.default_rng(0)
    label = np.arange(66) % 3 == 0
    label[60:] = True
    features = rng.normal(0, 1, (66, 5))
    features[:, :4] += 4.0 * label[:, None]
    features[60:, 4] += 8.0  # what the part has of its own
    wrong = label.copy()
    wrong[60:] = False
    alone, together = np.arange(66), np.minimum(np.arange(66), 60)
    doubts = []
    for groups in (alone, together):
        folds = suspects.folds_of(wrong, groups, seed=0)
        assert len(folds) == 5
        doubts.append(suspects.probabilities(features, wrong, folds)[60:])
    assert doubts[0].max() < 0.2 and doubts[1].min() > 0.35
    more = np.concatenate([features[:60], features[:6]])
    folds = suspects.folds_of(label[:60], alone[:60], seed=0)
    found = suspects.probabilities(more, label[:60], folds)
    assert len(found) == 66 and ((found[60:] > 0.5) == label[:6]).all()
    assert ((found[:60] > 0.5) == label[:60]).mean() > 0.9


def test_a_group_that_holds_all_of_a_class_leaves_no_folds() -> None:
    """Found by a reader: a training part of one class ended a finished training in a traceback."""
    label = np.array([True, True, False, False, False])
    assert suspects.folds_of(label, np.array([6, 2, 4, 4, 2]), seed=0) == []
    rng = np.random.default_rng(0)
    for _ in range(300):
        label, groups = rng.random(8) < 0.4, rng.integers(0, 4, 8)
        if 0 < label.sum() < 8:
            for train, judged in suspects.folds_of(label, groups, seed=0):
                assert len(set(label[train])) == 2
                assert not set(groups[train]) & set(groups[judged])


def test_suspects_need_two_groups_of_a_class(tmp_path: Path) -> None:
    manifest = digested(load_folder(two_bins(tmp_path, good=5, defective=1)))
    encoder = pretrained_encoder(tiny_settings())
    assert suspects.suspects(manifest, encoder, tiny_settings(), Quiet()) == []


def test_suspects_are_written_with_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "suspects.csv"
    found = [Suspect("a\udcff.png", Path("a.png"), False, "fit", 0.75),
             Suspect("b.png", Path("b.png"), True, None, 0.5)]  # fmt: skip
    suspects.write_suspects(path, found, "12ab")
    assert path.read_text().splitlines() == [
        "rank,image,split,label,probability,doubt,run_id",
        "1,a\\udcff.png,fit,good,0.750000,0.750000,12ab",
        "2,b.png,,defective,0.500000,0.500000,12ab",
    ]


def test_no_mask_reaches_the_suspects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = divided(digested(load_folder(two_bins(tmp_path))), 0)
    seen: list[object] = []

    def features(samples: list[object], *rest: object) -> NDArray[np.float64]:
        seen.extend(samples)
        return np.random.default_rng(0).normal(size=(len(samples), 4))

    monkeypatch.setattr(suspects, "pooled_features", features)
    suspects.suspects(manifest, pretrained_encoder(tiny_settings()), tiny_settings(), Quiet())
    assert len(seen) == 18 and {type(s).__name__ for s in seen} == {"WeakSample"}
