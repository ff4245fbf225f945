"""Scores of the test part to metrics; the one place of the benchmark that reads masks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.data.manifest import Manifest
from cdgp.evaluation import MapFile, odd_images, pixel_metrics, true_mask
from cdgp.inference import resize_map
from cdgp.metrics.ranking import image_auroc
from cdgp.metrics.reliability import expected_calibration_error
from cdgp.progress import Progress, Quiet
from cdgp_bench.methods import Fitted

METRICS = ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")


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


def score_test(
    fitted: Fitted, manifest: Manifest, size: tuple[int, int] | None, details: bool
) -> dict[str, Any]:
    """Metrics over the test part at a (height, width), or at each image's own size, as a row holds
    them; with details, of branches and kinds of defects too.
    """
    samples = manifest.of("test")
    found = scores_of(fitted, manifest, size, details, Quiet())
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
    if fitted.probability:
        ece = expected_calibration_error(found.image_scores, found.defective)
        row["image_ece"] = ece.value
    if details:
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
