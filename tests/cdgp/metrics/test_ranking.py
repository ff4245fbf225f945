"""AUROC against scikit-learn, and its refusals."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from tests.helpers import random_maps

from cdgp.errors import DataError
from cdgp.metrics.ranking import image_auroc, pixel_auroc


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_image_auroc_equals_sklearn(seed: int, levels: int | None) -> None:
    rng = np.random.default_rng(seed)
    labels = np.arange(40) % 3 == 0
    scores = 1000 * (rng.normal(size=40) + labels)
    scores = np.round(scores / 1000 * levels) if levels else scores
    expected = roc_auc_score(labels, scores)
    assert image_auroc(scores, labels).value == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("levels", [None, 1, 3])
def test_pixel_auroc_equals_sklearn(levels: int | None, dtype: type) -> None:
    maps, masks = random_maps(3, levels, dtype)
    scores, labels = (np.concatenate([a.ravel() for a in arrays]) for arrays in (maps, masks))
    expected = roc_auc_score(labels, scores)
    assert pixel_auroc(maps, masks).value == pytest.approx(expected, rel=0, abs=1e-12)


def test_unfit_scores_are_named() -> None:
    with pytest.raises(DataError, match=r"b\.png: score at index 1 is nan"):
        image_auroc([0.0, np.nan], [0, 1], names=["a.png", "b.png"])
    with pytest.raises(DataError, match="score at index 0 is inf"):
        image_auroc([np.inf, 0.0], [0, 1])
    with pytest.raises(DataError, match="label at index 2 is 2"):
        image_auroc([0.0, 1.0, 2.0], [0, 1, 2])
    with pytest.raises(DataError, match="one length"):
        image_auroc([0.0, 1.0], [0, 1, 1])
    with pytest.raises(DataError, match="one length"):
        image_auroc([[0.0, 1.0]], [[0, 1]])
    with pytest.raises(DataError, match="1 names"):
        image_auroc([0.0, 1.0], [0, 1], names=["a.png"])
