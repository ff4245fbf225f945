"""The core comparison: what every method returns, what a row holds, what is computed once."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cdgp.bench import run
from cdgp.bench.run import METHODS, Cell, config_sha256, core_cells, score_test, table
from cdgp.data.images import read_picture
from cdgp.data.manifest import Manifest
from cdgp.data.splits import hashed, split
from cdgp.data.synthetic import make_dataset
from cdgp.presets import merged
from cdgp.progress import Quiet
from conftest import tiny_settings


def tiny(method: str) -> dict[str, object]:
    steps = {
        "dual_gp": {"steps": 2, "batch_size": 4, "no_separation": "flag"},
        "student": {"steps": 2, "batch_size": 2},
    }
    return merged(steps, METHODS[method].changes)


@pytest.mark.parametrize("method", METHODS)
def test_methods_score_at_the_pictures_size_and_train_once(
    method: str, surfaces: Manifest, tmp_path: Path
) -> None:
    manifest = split(hashed(surfaces), 0)
    chosen = tiny_settings(**tiny(method))
    fitted = METHODS[method].fit(manifest, chosen, tmp_path, Quiet())
    picture = read_picture(manifest.samples[0].image)
    scored = fitted.score(picture)
    assert scored.anomaly_map.shape == picture.shape[:2] == (96, 80)
    assert np.isfinite(scored.anomaly_map).all()
    assert np.ptp(scored.anomaly_map) > 0
    assert np.isfinite(scored.image_score)
    if fitted.probability:
        assert 0 <= scored.image_score <= 1
    states = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    again = METHODS[method].fit(manifest, chosen, tmp_path, Quiet()).score(picture)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == states
    np.testing.assert_allclose(again.anomaly_map, scored.anomaly_map, atol=1e-6)
    row = score_test(fitted, manifest, Quiet())
    assert row["metric_size"] == "native"
    for key in run.METRICS:
        assert row[key] is None or 0 <= row[key] <= 1


def test_readings_share_their_student_and_no_two_cells_are_one() -> None:
    cells = list(core_cells())
    assert len({(c.setting, c.dataset, config_sha256(c)) for c in cells}) == len(cells) == 28
    settings = {m: run.cell_settings(Cell("x", m, "default", 0, (64, 64))) for m in METHODS}
    assert settings["cdgp"].student == settings["cdgp_paper"].student
    assert settings["cdgp_paper"].dual_gp.sigma_gradient
    assert not settings["cdgp"].dual_gp.sigma_gradient


def test_rows_are_kept_and_old_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path / "data" / "surfaces", good=20, defective=10)
    size = (64, 64)
    monkeypatch.setattr(run, "SIZES", {"default": {"surfaces": size}})
    cells = [Cell("surfaces", "static_max", "default", seed, size) for seed in (0, 1)]
    monkeypatch.setattr(run, "core_cells", lambda: iter(cells))
    out = tmp_path / "rows.jsonl"
    command = ["run", "--data", str(tmp_path / "data"), "--out", str(out),
               "--states", str(tmp_path / "states")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    run.main()
    first = out.read_text()
    rows = [json.loads(line) for line in first.splitlines()]
    assert [r["seed"] for r in rows] == [0, 1]
    keys = {"dataset", "category", "method", "setting", "seed", "preset", "input_size",
            "metric_size", "image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05",
            "seconds", "config_sha256", "manifest_sha256"}  # fmt: skip
    assert keys <= rows[0].keys()
    run.main()
    assert out.read_text() == first
    mean = 50 * (rows[0]["image_auroc"] + rows[1]["image_auroc"])
    assert f"| surfaces | default | static_max | 2 | {mean:.1f} ±" in table(rows)
    make_dataset(tmp_path / "data" / "surfaces", good=20, defective=10, seed=1)
    with pytest.raises(SystemExit, match="2 rows were made with other settings or pictures"):
        run.main()
    assert out.read_text() == first
