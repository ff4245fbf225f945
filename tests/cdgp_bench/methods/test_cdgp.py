"""CDGP in the benchmark: what a sweep computes again, and the GP-free variant."""

from pathlib import Path

import numpy as np
import pytest
from tests.cdgp_bench.helpers import tiny_variant_settings
from tests.tiny_transformers import DINOV2

from cdgp.presets import Settings
from cdgp.progress import Quiet
from cdgp_bench.grid import EXPERIMENTS, Variant
from cdgp_bench.methods import cdgp
from cdgp_bench.protocol import Prepared


def with_fixed_weight(variant: Variant) -> Settings:
    """Settings of a variant whose fusion weight no label raises."""
    chosen = tiny_variant_settings(variant)
    fixed = {"most_fusion_weight": chosen.calibration.fusion_weight}
    return chosen.model_copy(update={"calibration": chosen.calibration.model_copy(update=fixed)})


def test_inference_settings_neither_train_nor_run_the_network(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep over weights reads the network's evidence from its file."""
    paths = [s.image for s in prepared.manifest.of("test")]
    default = with_fixed_weight(EXPERIMENTS["fusion_weight"][2])
    base = list(cdgp.fit(prepared.weak, default, tmp_path, Quiet()).score(paths))
    monkeypatch.setattr(cdgp, "train", lambda *a, **k: pytest.fail("trained again"))
    variants = [
        *EXPERIMENTS["fusion_weight"],
        *EXPERIMENTS["image_weight"],
        EXPERIMENTS["components"][0],
    ]
    for variant in variants:
        chosen = with_fixed_weight(variant)
        found = list(cdgp.fit(prepared.weak, chosen, tmp_path, Quiet()).score(paths))
        same = chosen.model_dump() == default.model_dump()
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


def test_evidence_of_a_transformer_is_kept_on_its_grid(prepared: Prepared, tmp_path: Path) -> None:
    chosen = tiny_variant_settings().model_dump()
    chosen |= {"input_size": (70, 84)}
    chosen["backbone"] |= {"name": DINOV2, "weights": "random"}
    paths = [s.image for s in prepared.manifest.of("test")]
    fitted = cdgp.fit(prepared.weak, Settings.model_validate(chosen), tmp_path, Quiet())
    assert all(np.isfinite(found.anomaly_map).all() for found in fitted.score(paths))
    shapes = {np.load(file).shape[1:] for file in tmp_path.rglob("*.npy")}
    assert shapes == {(3, 5, 6)}
