"""Scores of the test part to metrics; the one place of the benchmark that reads masks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.data.groups import group_numbers
from cdgp.data.manifest import Manifest
from cdgp.data.resize import resize_map
from cdgp.evaluation import MapFile, odd_images, pixel_metrics, true_mask
from cdgp.metrics.ranking import image_auroc
from cdgp.metrics.reliability import at_rate, expected_calibration_error
from cdgp.progress import Progress
from cdgp_bench.methods import Fitted

METRICS = ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")
SCORED_RATE = 0.5
"""The share of defective parts that the image scores of all rows refer to."""
IMAGE = ("pixel_sha256", "group", "defective", "score")
"""What a row holds of each test image: the first 12 digits, the number of its group within the test
part, 0 or 1, and the image score."""


class Scores(NamedTuple):
    """A method's scores of n test images."""

    image_scores: list[float]
    defective: NDArray[np.bool_]
    masks: list[NDArray[np.bool_] | None]
    """(H, W) each; None where the image takes no part in the pixel metrics."""
    maps: dict[str, MapFile]
    """``final`` and, where asked for, the branches; of the images with a mask."""
    notes: dict[str, list[str]]
    """Names of odd images."""


def scores_of(
    fitted: Fitted,
    manifest: Manifest,
    size: tuple[int, int] | None,
    branches: bool,
    progress: Progress,
) -> Scores:
    """Score the test part; a mask is read once its image is scored.

    Maps and masks are brought to ``size``, (height, width); None is each image's own.
    """
    samples = manifest.of("test")
    labels = np.array([bool(s.defective) for s in samples])
    found = Scores([], labels, [], defaultdict(MapFile), defaultdict(list))
    with progress.phase("Scoring", len(samples)) as advance:
        for sample, scored in zip(samples, fitted.score([s.image for s in samples]), strict=True):
            found.image_scores.append(scored.image_score)
            target = size or scored.size
            name = manifest.name(sample.image)
            found.masks.append(true_mask(sample, scored.size, target, name, found.notes))
            if found.masks[-1] is not None:
                found.maps["final"].append(resize_map(scored.anomaly_map, target))
                for branch, values in scored.branches.items() if branches else ():
                    found.maps[branch].append(resize_map(values, target))
            advance()
    return found


def metrics_of(
    found: Scores,
    manifest: Manifest,
    size: tuple[int, int] | None,
    probability: bool,
    details: bool,
) -> dict[str, Any]:
    """Metrics over the scored test part, as a row holds them.

    Args:
        found: what ``scores_of`` gave for ``manifest`` and ``size``.
        manifest: with the test part.
        size: (height, width) of maps and masks; None is each image's own.
        probability: whether the image score is meant as one.
        details: also metrics of branches and kinds of defects, and the score of each image.
    """
    samples = manifest.of("test")
    inside = [s for s, mask in zip(samples, found.masks, strict=True) if mask is not None]
    masks = [mask for mask in found.masks if mask is not None]
    names = [manifest.name(s.image) for s in inside]
    ranking = image_auroc(found.image_scores, found.defective)
    row = {
        "image_auroc": ranking.value,
        "image_auroc_reason": ranking.reason,
        **pixel_metrics(found.maps["final"].maps(), masks, names),
        "metric_size": "input" if size else "native",
    }
    if probability:
        # At the rate of the training part, as the product tells a probability.
        rate = np.mean([s.defective for s in manifest.of("train")])
        told = at_rate(np.array(found.image_scores), SCORED_RATE, float(rate))
        row["image_ece"] = expected_calibration_error(told, found.defective).value
    if details:
        row["images"] = image_scores(found, manifest)
        kinds = [kind_of(s.image.stem) if s.defective else None for s in inside]
        maps = {branch: store.maps() for branch, store in found.maps.items()}
        row["branches"] = {
            branch: _short(pixel_metrics(values, masks, names))
            for branch, values in maps.items() if branch != "final"
        }  # fmt: skip
        row["kinds"] = {
            branch: kind_metrics(values, masks, names, kinds) for branch, values in maps.items()
        }
    row["notes"] = odd_images(found.notes, samples)
    return row


def image_scores(found: Scores, manifest: Manifest) -> list[list[Any]]:
    """``IMAGE`` of each test image: all that intervals and reliability of image scores need."""
    samples = manifest.of("test")
    groups = group_numbers(manifest, samples).tolist()
    return [
        [str(s.pixel_sha256)[:12], group, int(s.defective), float(score)]
        for s, group, score in zip(samples, groups, found.image_scores, strict=True)
    ]


def kind_of(stem: str) -> str | None:
    """The kind of defect where the file's name holds it, as in ``blowhole_exp1_num_108719``."""
    kind, found, _ = stem.partition("_exp")
    return kind if found else None


def kind_metrics(
    maps: Sequence[Any], masks: Sequence[Any], names: Sequence[str], kinds: Sequence[str | None]
) -> dict[str, Any]:
    """Pixel metrics of each kind of defect against all good images."""
    good = [i for i, mask in enumerate(masks) if not mask.any()]
    metrics = {}
    for kind in sorted({k for k in kinds if k}):
        chosen = good + [i for i, k in enumerate(kinds) if k == kind]
        of_kind = [(maps[i], masks[i], names[i]) for i in chosen]
        metrics[kind] = _short(pixel_metrics(*zip(*of_kind, strict=True)))
    return metrics


def _short(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: round(metrics[key], 4) for key in METRICS[1:] if metrics[key] is not None}
