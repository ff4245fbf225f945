"""Scores of the test part to metrics; the one place of the benchmark that opens masks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cdgp.data.manifest import Manifest
from cdgp.evaluation import MapFile, odd_images, pixel_metrics, true_mask
from cdgp.inference import resize_map
from cdgp.metrics.ranking import image_auroc
from cdgp.metrics.reliability import expected_calibration_error
from cdgp_bench.methods import Fitted

METRICS = ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")
Row = dict[str, Any]


def cell_name(row: Mapping[str, Any]) -> str:
    """A row in words."""
    name = f"{row['dataset']}/{row['category']} {row['method']} {row['setting']} seed {row['seed']}"
    return name if row["budget"] is None else f"{name} k={row['budget']}"


def score_test(
    fitted: Fitted, manifest: Manifest, size: tuple[int, int] | None, details: bool
) -> Row:
    """Metrics over the test part; a mask is read once its image is scored.

    Args:
        fitted: the method.
        manifest: with the test part and its masks.
        size: (height, width) that maps and masks are brought to; None is each image's own.
        details: whether branches and kinds of defects get metrics of their own.
    """
    samples = manifest.of("test")
    stores: dict[str, MapFile] = defaultdict(MapFile)
    masks, names, kinds, image_scores = [], [], [], []
    notes: dict[str, list[str]] = defaultdict(list)
    for sample, scored in zip(samples, fitted.score([s.image for s in samples]), strict=True):
        image_scores.append(scored.image_score)
        name = manifest.name(sample.image)
        target = size or scored.size
        mask = true_mask(sample, scored.size, target, name, notes)
        if mask is None:
            continue
        stores["final"].append(resize_map(scored.anomaly_map, target))
        for branch, values in scored.branches.items() if details else ():
            stores[branch].append(resize_map(values, target))
        masks.append(mask)
        names.append(name)
        kinds.append(kind_of(sample.image.stem) if sample.defective else None)
    labels = np.array([s.defective for s in samples])
    ranking = image_auroc(image_scores, labels)
    row: Row = {"image_auroc": ranking.value, "image_auroc_reason": ranking.reason}
    row |= pixel_metrics(stores["final"].maps(), masks, names)
    row["metric_size"] = "input" if size else "native"
    if fitted.probability:
        row["image_ece"] = expected_calibration_error(image_scores, labels).value
    if details:
        row["branches"] = {
            branch: _short(pixel_metrics(store.maps(), masks, names))
            for branch, store in stores.items()
            if branch != "final"
        }
        row["kinds"] = {
            branch: kind_metrics(store.maps(), masks, names, kinds)
            for branch, store in stores.items()
        }
    row["notes"] = odd_images(notes, samples)
    return row


def kind_of(stem: str) -> str | None:
    """The defect's kind where the file's name tells it, as in ``blowhole_exp1_num_108719``."""
    kind, found, _ = stem.partition("_exp")
    return kind if found else None


def kind_metrics(
    maps: Sequence[Any], masks: Sequence[Any], names: Sequence[str], kinds: Sequence[str | None]
) -> dict[str, Any]:
    """Pixel metrics of each kind of defect against all good images."""
    told = {}
    good = [i for i, mask in enumerate(masks) if not mask.any()]
    for kind in sorted({k for k in kinds if k}):
        chosen = good + [i for i, k in enumerate(kinds) if k == kind]
        told[kind] = _short(
            pixel_metrics(
                [maps[i] for i in chosen], [masks[i] for i in chosen], [names[i] for i in chosen]
            )
        )
    return told


def _short(metrics: Row) -> Row:
    return {key: round(metrics[key], 4) for key in METRICS[1:] if metrics[key] is not None}
