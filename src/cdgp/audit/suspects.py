"""Suspect labels: images whose label is contradicted by a classifier that has not seen them.

The classifier is a support vector machine (RBF kernel, balanced classes) on the mean, maximum and
standard deviation of the pretrained encoder's features. It takes seconds, where training the
detector anew for every fold would take an hour. A training image is judged by a classifier that was
fitted without the image's group; a test image by one that was fitted on all training images. Images
are ranked by the probability of their label, as in Northcutt et al., "Confident Learning", 2021.

Images are resized to the input size, also where the detector cuts them into tiles. No label is
changed, and nothing from here reaches a model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from cdgp.audit.types import Suspect
from cdgp.data.groups import group_numbers
from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import Manifest, WeakSample
from cdgp.files import path_cell, printable, write_csv
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.progress import Progress

FOLDS = 5
Folds = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""(training, judged) positions of each fold."""


def suspects(
    manifest: Manifest, encoder: Encoder, settings: Settings, progress: Progress
) -> list[Suspect]:
    """All images, the most doubtful label first; none where no folds have both classes.

    Args:
        manifest: images with digests and splits.
        encoder: the pretrained one, such as a trained model's teacher.
        settings: of the run; its input size, white level and seed are used.
        progress: shows how far the work is.
    """
    train = tuple(s for s in manifest.samples if s.split != "test")
    samples = (*train, *manifest.of("test"))
    groups = group_numbers(manifest, train)
    label = np.array([s.defective for s in train], np.bool_)
    folds = folds_of(label, groups, settings.seed)
    if not folds:
        return []
    weak = [WeakSample(s.image, s.defective) for s in samples]
    features = pooled_features(weak, encoder, settings, progress)
    probability = probabilities(features, label, folds)
    found = [
        Suspect(manifest.name(s.image), s.image, s.defective, s.split, float(p))
        for s, p in zip(samples, probability, strict=True)
    ]
    return sorted(found, key=lambda s: (-s.doubt, s.name))


def write_suspects(path: Path, found: Sequence[Suspect], run_id: str) -> None:
    """``suspects.csv``: rank, image, split, label, probability of being defective, doubt, run."""
    rows = (
        (
            rank,
            path_cell(printable(s.name)),
            s.split or "",
            "defective" if s.defective else "good",
            f"{s.probability:.6f}",
            f"{s.doubt:.6f}",
            run_id,
        )
        for rank, s in enumerate(found, start=1)
    )
    header = ["rank", "image", "split", "label", "probability", "doubt", "run_id"]
    write_csv(path, header, rows)


def folds_of(label: NDArray[np.bool_], groups: NDArray[np.int64], seed: int) -> Folds:
    """Up to five folds whose training parts have both classes; none where two are not possible.

    ``label`` (n,) is True for defective; each of the ``groups`` (n,) stays in one fold.
    """
    most = min(FOLDS, *(len(np.unique(groups[label == value])) for value in (False, True)))
    for count in range(most, 1, -1):
        dealer = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
        folds = list(dealer.split(label, label, groups))
        # A group of both classes can hold all images of one class.
        if all(len(np.unique(label[train])) == 2 for train, _ in folds):
            return folds
    return []


def probabilities(
    features: NDArray[np.float64], label: NDArray[np.bool_], folds: Folds
) -> NDArray[np.float64]:
    """(n,) P(defective) of each image by a classifier that was fitted without its group.

    ``features`` (n, d) are those of the labelled images, which the folds divide, then of images
    that are judged only.
    """
    count = len(label)
    margins: NDArray[np.float64] = cross_val_predict(
        _classifier(), features[:count], label, cv=folds, method="decision_function"
    )
    if len(features) > count:
        fitted = _classifier().fit(features[:count], label)
        margins = np.concatenate([margins, fitted.decision_function(features[count:])])
    # Without an intercept, 0.5 is the classifier's own boundary: with one, 64 % instead of 77 % of
    # flipped labels were among the 5 % most doubtful (magnetic tiles, six draws).
    logistic = LogisticRegression(fit_intercept=False, class_weight="balanced")
    slope = float(logistic.fit(margins[:count, None], label).coef_[0, 0])
    found: NDArray[np.float64] = expit(max(slope, 0.0) * margins)
    return found


@torch.inference_mode()
def pooled_features(
    samples: Sequence[WeakSample], encoder: Encoder, settings: Settings, progress: Progress
) -> NDArray[np.float64]:
    """(n, 3 C) mean, maximum and standard deviation over positions of the C channels."""
    encoder = encoder.eval()
    device = next(encoder.parameters()).device
    rows = []
    with progress.phase("Doubtful labels", len(samples)) as advance:
        for sample in samples:
            data = settings.data
            pixels = read_image(sample.image, data.white_level, data.first_page)
            batch = torch.from_numpy(to_input(pixels, settings.input_size))[None].to(device)
            levels = [level.float() for level in encoder(encoder.normalise(batch))]
            rows.append(torch.cat([
                value[0].cpu() for level in levels
                for value in (level.mean((2, 3)), level.amax((2, 3)), level.std((2, 3)))
            ]))  # fmt: skip
            advance()
    return torch.stack(rows).double().numpy()


def _classifier() -> Any:  # scikit-learn has no types
    return make_pipeline(StandardScaler(), SVC(C=1.0, class_weight="balanced"))
