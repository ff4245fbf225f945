"""The paper's network builds, has the paper's size, trains a step and predicts."""

from pathlib import Path

import numpy as np
import pytest

from cdgp.presets import settings
from cdgp.workflows import train_run as fit
from cdgp_bench.synthetic import make_dataset


def test_the_configuration_table_to_the_letter() -> None:
    s = settings("paper")
    assert s.backbone.name == "wide_resnet50_2.tv2_in1k"
    assert (s.input_size, s.backbone.token_dim) == ((256, 256), 256)
    assert s.dual_gp.colour_jitter == (0.12, 0.12, 0.05, 0.02)
    assert (s.dual_gp.kernel, s.inducing.normal, s.inducing.anomaly) == ("linear", 32, 16)
    assert (s.inducing.hard_fraction, s.dual_gp.jitter) == (0.2, 1e-3)
    assert (s.dual_gp.variance_floor, s.dual_gp.batch_size, s.dual_gp.steps) == (1e-6, 16, 400)
    assert (s.dual_gp.learning_rate, s.dual_gp.inducing_learning_rate) == (1e-4, 1e-3)
    assert (s.dual_gp.weight_decay, s.dual_gp.final_learning_rate) == (1e-4, 0.05)
    assert (s.dual_gp.margin, s.dual_gp.loss_weights) == (0.5, (1.0, 1.0, 4.0))
    assert (s.student.batch_size, s.student.steps) == (5, 360)
    assert (s.student.learning_rate, s.student.weight_decay) == (3e-4, 1e-4)
    assert s.student.final_learning_rate == 1e-6
    assert (s.student.hard_fraction, s.student.hard_weight) == (0.10, 0.65)
    assert s.student.smooth_weight == 0.10
    assert (s.student.noise, s.student.blur_probability) == (0.035, 0.70)
    assert (s.student.erase_probability, s.student.erase_sides) == (0.75, (1 / 16, 1 / 5))
    assert (s.data.calibration_fraction, s.calibration.fusion_weight) == (0.2, 0.025)
    assert (s.calibration.tail, s.calibration.tail_pixels) == ("counting", 10**6)
    assert (s.calibration.tail_floor, s.calibration.pooling_sharpness) == (16, 8)
    assert (s.calibration.logistic_c, s.calibration.image_weight) == (1, 1 / 3)
    assert (s.calibration.evidence, s.calibration.pictures) == ("dominance", "seen")
    # The paper-literal reading of what its table does not fix.
    assert s.dual_gp.sigma_gradient
    assert (s.dual_gp.sampler, s.dual_gp.mil_pooling) == ("random", "max")
    # What the paper does not have.
    assert (s.dual_gp.mean_weight, s.distance.weight) == (0, 0)
    assert s.calibration.image_evidence == "dominance"


@pytest.mark.slow
@pytest.mark.parametrize("size", [(256, 256), (256, 704)])
def test_one_step_and_one_prediction(tmp_path: Path, size: tuple[int, int]) -> None:
    """Random weights and batches of two: for the plumbing at full size, not for quality."""
    make_dataset(tmp_path, good=8, defective=6)
    chosen = settings(
        "paper",
        input_size=size,
        backbone={"weights": "random"},
        dual_gp={"steps": 1, "batch_size": 2, "no_separation": "flag"},
        student={"steps": 1, "batch_size": 2},
    )
    run = fit(tmp_path, None, chosen)
    network = run.detector.model.network
    millions = sum(p.numel() for p in network.parameters()) / 1e6
    assert millions == pytest.approx(63.8, rel=0.02)
    prediction = run.detector.predict(run.manifest.samples[0].image)
    assert prediction.anomaly_map.shape == (96, 80)
    assert np.isfinite(prediction.anomaly_map).all()
