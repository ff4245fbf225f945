"""CDGP in the benchmark: what a sweep computes again, and the GP-free variant."""

from pathlib import Path

import numpy as np
import pytest
from tests.cdgp_bench.helpers import tiny_variant_settings

from cdgp.progress import Quiet
from cdgp_bench.grid import EXPERIMENTS
from cdgp_bench.methods import cdgp
from cdgp_bench.protocol import Prepared


def test_inference_settings_neither_train_nor_run_the_network(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep over weights reads the network's evidence from its file."""
    paths = [s.image for s in prepared.manifest.of("test")]
    base = list(cdgp.fit(prepared.weak, tiny_variant_settings(), tmp_path, Quiet()).score(paths))
    monkeypatch.setattr(cdgp, "train", lambda *a, **k: pytest.fail("trained again"))
    variants = [
        *EXPERIMENTS["fusion_weight"],
        *EXPERIMENTS["image_weight"],
        EXPERIMENTS["components"][0],
    ]
    for variant in variants:
        found = list(
            cdgp.fit(prepared.weak, tiny_variant_settings(variant), tmp_path, Quiet()).score(paths)
        )
        same = variant.label.endswith("(paper)")
        equal = all(np.array_equal(a.anomaly_map, b.anomaly_map)
                    for a, b in zip(base, found, strict=True))  # fmt: skip
        assert equal == same, variant
        if "image_weight" not in variant.setting:
            assert [f.image_score for f in found] == [b.image_score for b in base], "w keeps p_A"


def test_without_spatial_weight_the_map_is_the_tail_of_residual_and_distance(
    prepared: Prepared, tmp_path: Path
) -> None:
    """GP-free: the map is what good images alone give, and its tail is refitted to that."""
    paths = [s.image for s in prepared.manifest.of("test")]
    free = EXPERIMENTS["components"][0]
    for one in cdgp.fit(prepared.weak, tiny_variant_settings(free), tmp_path, Quiet()).score(
        paths[:2]
    ):
        np.testing.assert_array_equal(one.anomaly_map, one.branches["surprisal"])
    fitted = cdgp.fit(prepared.weak, tiny_variant_settings(free), tmp_path, Quiet())
    good = [s.image for s in prepared.weak.calibration if not s.defective]
    values = np.concatenate([s.anomaly_map.ravel() for s in fitted.score(good)])
    # On its own calibration pixels a counted tail is uniform: P(p <= x) = x.
    for share in (0.5, 0.1, 0.01):
        assert (values >= -np.log(share)).mean() == pytest.approx(share, abs=0.01)
