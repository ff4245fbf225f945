"""The throughput study, on a few images."""

from pathlib import Path

import pytest
from tests.helpers import noise_image

from cdgp.export import ExportOptions, export
from cdgp.progress import Quiet
from cdgp.workflows import Run
from cdgp_bench.studies.throughput import link_images, measured


@pytest.mark.slow
def test_a_runtime_is_measured_beside_its_bare_loop(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    model, images, one = tmp_path / "a.onnx", tmp_path / "images", tmp_path / "one"
    export(tiny_run.folder, ExportOptions("onnx", model), Quiet())
    for i in range(3):
        noise_image(tmp_path / f"made/{i}.png", seed=i)
    link_images(tmp_path / "made", images, 7)
    link_images(tmp_path / "made", one, 1)
    assert len({path.resolve() for path in images.iterdir()}) == 3
    found = measured(str(model), images, one, rounds=1)
    (row,) = found["rounds"]
    assert row == found["median"] and min(row.values()) > 0
    loop = (row["bare_1"] + row["bare_1_again"]) / 2
    assert row["share_all"] == pytest.approx(row["all"] / loop, abs=2e-3)
    assert found["cold_start_s"] > 0 and found["cold_start_peak_mib"] > 50
