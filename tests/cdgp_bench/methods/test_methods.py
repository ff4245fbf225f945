"""What every method returns, and that it trains once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cdgp_bench.helpers import tiny_options, tiny_variant_settings
from tests.helpers import WHITE

from cdgp.data.images import read_image, to_input
from cdgp.progress import Quiet
from cdgp_bench.grid import METHODS, Run, Variant
from cdgp_bench.protocol import Prepared
from cdgp_bench.scoring import metrics_of, scores_of


@pytest.mark.parametrize("method", METHODS)
def test_methods_score_every_image_and_train_once(
    method: str, prepared: Prepared, tmp_path: Path
) -> None:
    variant = Variant("", method)
    chosen = tiny_variant_settings(variant)
    own = tiny_options(method, tmp_path / "given")
    paths = [s.image for s in prepared.manifest.of("test")]
    run = Run("surfaces", "surfaces", variant, 0, None, chosen, own)
    fitted = run.fit(prepared.weak, tmp_path, Quiet())
    scored = list(fitted.score(paths))
    assert len(scored) == len(paths)
    for one in scored:
        assert one.size == (96, 80)
        assert one.anomaly_map.ndim == 2 and one.anomaly_map.dtype == np.float32
        assert np.isfinite(one.anomaly_map).all()
        assert np.isfinite(one.image_score)
        assert not fitted.probability or 0 <= one.image_score <= 1
    assert np.ptp(scored[0].anomaly_map) > 0
    checkpoints = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    again = list(run.fit(prepared.weak, tmp_path, Quiet()).score(paths))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == checkpoints
    np.testing.assert_allclose(again[0].anomaly_map, scored[0].anomaly_map, atol=1e-6)
    network, predict = fitted.pipeline()
    image = to_input(read_image(paths[0], WHITE), chosen.input_size)
    predict(torch.from_numpy(image)[None])
    assert sum(p.numel() for p in network.parameters()) > 10_000
    for size, expected in ((None, "native"), (chosen.input_size, "input")):
        found = scores_of(fitted, prepared.manifest, size, True, Quiet())
        row = metrics_of(found, prepared.manifest, size, fitted.probability, details=True)
        assert row["metric_size"] == expected
        for key in ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05"):
            assert row[key] is None or 0 <= row[key] <= 1
