"""The core comparison as resumable cells: one row a dataset, method, setting and seed.

    python -m cdgp.bench.run --data ../shared/data --out docs/results/core.jsonl

Each row is appended as its cell ends; rows that are already there are not computed again, and
interrupted trainings go on. ``--table`` renders the rows as Markdown.
"""

import argparse
import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cdgp.bench.methods import Fit, Fitted, cdgp, classifier_cam, static_max
from cdgp.data.images import read_picture
from cdgp.data.layouts import load
from cdgp.data.manifest import Manifest
from cdgp.data.splits import hashed, split
from cdgp.evaluation import MapFile, pixel_metrics, true_mask
from cdgp.metrics.ranking import image_auroc
from cdgp.metrics.reliability import expected_calibration_error
from cdgp.presets import Settings, merged, settings
from cdgp.progress import Bars, Progress

METRICS = ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")


class Variant(NamedTuple):
    """A method under a name, with its settings on top of the `lite` preset."""

    fit: Fit
    changes: dict[str, Any]
    uses: tuple[str, ...]
    """The settings that its row depends on."""


class Cell(NamedTuple):
    """One row to compute."""

    dataset: str
    method: str
    setting: str
    seed: int
    input_size: tuple[int, int]


PAPER_READING = {
    "dual_gp": {"sigma_gradient": True, "sampler": "random", "mil_pooling": "max"},
    "calibration": {"fusion_weight": 0.025, "tail": "counting"},
}
CLASSIFIER_RATE = 3e-3
"""Ranked on calibration pictures; see docs/decisions.md."""
SHARED = ("preset", "seed", "input_size", "data", "backbone")
ALL = (*SHARED, "inducing", "dual_gp", "student", "calibration")
METHODS: dict[str, Variant] = {
    "static_max": Variant(static_max.fit, {}, (*SHARED, "inducing")),
    "cdgp": Variant(cdgp.fit, {}, ALL),
    "classifier_cam": Variant(
        classifier_cam.fit,
        {"dual_gp": {"learning_rate": CLASSIFIER_RATE, "sampler": "balanced"}},
        (*SHARED, "dual_gp"),
    ),
    "cdgp_paper": Variant(cdgp.fit, PAPER_READING, ALL),
}
SIZES = {
    "default": {"magnetic_tile": (192, 192), "ksdd": (384, 160)},
    "full_size": {"magnetic_tile": (256, 256), "ksdd": (640, 256)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "full_size": {},
    "held_out": {"calibration": {"pictures": "held_out"}},
}


def core_cells() -> Iterator[Cell]:
    """The grid, seed by seed, so that an early stop leaves whole comparisons."""
    for seed in (0, 1, 2):
        for method in METHODS:
            for dataset, size in SIZES["default"].items():
                yield Cell(dataset, method, "default", seed, size)
    for dataset, size in SIZES["default"].items():
        yield Cell(dataset, "cdgp", "held_out", 0, size)
    for dataset, size in SIZES["full_size"].items():
        yield Cell(dataset, "cdgp", "full_size", 0, size)


def cell_settings(cell: Cell) -> Settings:
    changes = merged(METHODS[cell.method].changes, SETTINGS[cell.setting])
    # A run that does not separate is scored and flagged here, never dropped.
    changes = merged(changes, {"dual_gp": {"no_separation": "flag"}})
    return settings("lite", seed=cell.seed, input_size=cell.input_size, **changes)


def config_sha256(cell: Cell) -> str:
    """Digest of the method's name and the settings that its row depends on."""
    used = cell_settings(cell).model_dump(mode="json", include=set(METHODS[cell.method].uses))
    config = [cell.method, used]
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def run_cell(cell: Cell, manifest: Manifest, states: Path, progress: Progress) -> dict[str, Any]:
    """Train, score the test pictures at their own size, and return the row."""
    chosen = cell_settings(cell)
    fitted = METHODS[cell.method].fit(manifest, chosen, states / cell.dataset, progress)
    began = time.monotonic()
    scored = score_test(fitted, manifest, progress)
    return {
        "dataset": cell.dataset,
        "category": cell.dataset,
        "method": cell.method,
        "setting": cell.setting,
        "seed": cell.seed,
        "preset": "lite",
        "input_size": list(cell.input_size),
        **scored,
        "seconds": round(fitted.seconds, 1),
        "evaluation_seconds": round(time.monotonic() - began, 1),
        "config_sha256": config_sha256(cell),
        "manifest_sha256": manifest.sha256,
        "facts": fitted.facts,
        "machine": {"cpus": torch.get_num_threads(), "python": platform.python_version(),
                    "torch": torch.__version__},
    }  # fmt: skip


def score_test(fitted: Fitted, manifest: Manifest, progress: Progress) -> dict[str, Any]:
    """Metrics over the test part; a mask is read once its picture is scored."""
    samples = manifest.of("test")
    stores: dict[str, MapFile] = defaultdict(MapFile)
    masks, names, kinds, image_scores = [], [], [], []
    notes: dict[str, list[str]] = defaultdict(list)
    with progress.phase("Test", len(samples)) as advance:
        for sample in samples:
            result = fitted.score(read_picture(sample.image))
            image_scores.append(result.image_score)
            name = manifest.name(sample.image)
            mask = true_mask(sample, result.anomaly_map.shape, name, notes)
            if mask is not None:
                stores["final"].append(result.anomaly_map)
                for branch, values in result.branches.items():
                    stores[branch].append(values)
                masks.append(mask)
                names.append(name)
                kinds.append(kind_of(sample.image.stem) if sample.defective else None)
            advance()
    labels = np.array([s.defective for s in samples])
    ranking = image_auroc(image_scores, labels)
    row: dict[str, Any] = {"image_auroc": ranking.value, "image_auroc_reason": ranking.reason}
    row |= pixel_metrics(stores["final"].maps(), masks, names)
    if fitted.probability:
        row["image_ece"] = expected_calibration_error(image_scores, labels).value
    row["branches"] = {
        branch: _short(pixel_metrics(store.maps(), masks, names))
        for branch, store in stores.items()
        if branch != "final"
    }
    row["kinds"] = {
        branch: kind_metrics(store.maps(), masks, names, kinds) for branch, store in stores.items()
    }
    row["notes"] = dict(notes)
    return row


def kind_of(stem: str) -> str | None:
    """The defect's kind where the file's name tells it, as in ``blowhole_exp1_num_108719``."""
    kind, found, _ = stem.partition("_exp")
    return kind if found else None


def kind_metrics(
    maps: Sequence[Any], masks: Sequence[Any], names: Sequence[str], kinds: Sequence[str | None]
) -> dict[str, Any]:
    """Pixel metrics of each kind of defect against all good pictures."""
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


def _short(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: round(metrics[key], 4) for key in METRICS[1:] if metrics[key] is not None}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Mean ± sample standard deviation (x 100) over seeds, a line a dataset, setting and method."""
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[row["dataset"], row["setting"], row["method"]].append(row)
    lines = [
        "| set | setting | method | seeds | AUROC-I | AUROC-P | AUPRO@.3 | AUPRO@.05 | ECE | s |",
        "|" + "---|" * 10,
    ]
    for (dataset, setting, method), cells in sorted(grouped.items()):
        values = [_mean_std([c[key] for c in cells]) for key in METRICS]
        collapsed = sum(not c["facts"].get("separated", True) for c in cells)
        if collapsed:
            method += f" ({collapsed} did not separate)"
        ece = [c["image_ece"] for c in cells if c.get("image_ece") is not None]
        lines.append(
            f"| {dataset} | {setting} | {method} | {len(cells)} | "
            + " | ".join(values)
            + f" | {_mean_std(ece)} | {np.mean([c['seconds'] for c in cells]):.0f} |"
        )
    return "\n".join(lines)


def _mean_std(values: Sequence[float | None]) -> str:
    defined = [100 * v for v in values if v is not None]
    if not defined:
        return "–"
    spread = f" ± {np.std(defined, ddof=1):.1f}" if len(defined) > 1 else ""
    return f"{np.mean(defined):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder that holds ksdd and magnetic_tile")
    parser.add_argument("--out", type=Path, default=Path("docs/results/core.jsonl"))
    parser.add_argument("--states", type=Path, default=Path("runs/core"))
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown and stop")
    arguments = parser.parse_args()
    if not arguments.table and arguments.data is None:
        parser.error("--data is needed, unless --table is given")
    rows = read_rows(arguments.out)
    if arguments.table:
        print(table(rows))
        return
    pictures = {name: hashed(load(arguments.data / name)) for name in SIZES["default"]}
    cells = []
    for cell in core_cells():
        data = cell_settings(cell).data
        parts = (cell.seed, data.test_fraction, data.calibration_fraction)
        cells.append((cell, split(pictures[cell.dataset], *parts)))
    done = {(r["setting"], r["config_sha256"], r["manifest_sha256"]) for r in rows}
    stale = len(done - {(c.setting, config_sha256(c), m.sha256) for c, m in cells})
    if stale:
        raise SystemExit(
            f"{arguments.out}: {stale} rows were made with other settings or pictures; remove "
            "them first"
        )
    for cell, manifest in cells:
        if (cell.setting, config_sha256(cell), manifest.sha256) in done:
            continue
        print(*cell)
        row = run_cell(cell, manifest, arguments.states, Bars())
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
