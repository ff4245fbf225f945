"""How well `cdgp check` and suspect labels find near duplicates, empty masks and wrong labels.

    python -m cdgp_bench.studies.doctor --data DATA

Writes docs/results/doctor.jsonl: one row a set for the near duplicates, the masks and the
shortcuts, with the group column hidden, and one row a draw of flipped labels. Nothing is trained.

The reference for near duplicates compares all pairs: 48 × 48 grey versions by the network's own
resize, each minus its mean, that correlate above 0.98. The audit makes its grey versions with
Pillow and compares perceptual hashes first.
"""

import argparse
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from cdgp.audit import duplicates
from cdgp.audit import suspects as crossfit
from cdgp.audit.findings import audit
from cdgp.data import layouts
from cdgp.data.groups import group_numbers
from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import Manifest
from cdgp.data.scan import THUMBNAIL, digested, scan
from cdgp.method.build import pretrained_encoder
from cdgp.presets import DataSettings, settings
from cdgp.progress import Bars
from cdgp_bench.measure.harness import machine
from cdgp_bench.rows import write_rows

DATA = DataSettings()
OUT = Path("docs/results/doctor.jsonl")
SIZES = {"magnetic_tile": (192, 192), "ksdd": (384, 160)}
FLIPPED, LISTED, DRAWS = 0.02, 0.05, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    data: Path = parser.parse_args().data
    rows: list[dict[str, Any]] = []
    for name in SIZES:
        listed = layouts.load(data / name, DATA.good, DATA.defective)
        rows.append(images(name, listed))
        print(rows[-1])
    rows += flips("magnetic_tile", layouts.load(data / "magnetic_tile", DATA.good, DATA.defective))
    write_rows(OUT, rows)
    for row in rows:
        print(row)


def images(name: str, listed: Manifest) -> dict[str, Any]:
    """What `cdgp check` finds in a set whose groups are hidden from it."""
    bare = replace(listed, samples=tuple(replace(s, group=None) for s in listed.samples))
    found = audit(scan(bare, DATA.white_level), DATA.white_level)
    reported = {pair for cluster in found.near for pair in combinations(sorted(cluster), 2)}
    true = correlated(bare)
    part = {listed.name(s.image): s.group for s in listed.samples}
    copies = {
        tuple(sorted(pair)): f.kind for f in found.findings if "copy" in f.kind for pair in f.images
    }
    return {
        "kind": "check",
        "dataset": name,
        "pictures": len(listed.samples),
        "near_pairs_by_brute_force": len(true),
        "near_pairs_told": len(reported),
        "found": len(true & (reported | set(copies))),
        "false_alarms": len(reported - true),
        "false_alarms_of_another_group": sum(part[a] != part[b] for a, b in reported - true),
        "clusters": len(found.near),
        "byte_copies": sum(kind == "byte_copy" for kind in copies.values()),
        "pixel_copies": sum(kind == "pixel_copy" for kind in copies.values()),
        "copies": sorted(copies),
        "clusters_across_groups": [c for c in found.near if len({part[n] for n in c}) > 1],
        "empty_masks": sum(len(f.images) for f in found.findings if f.kind == "mask_empty"),
        "shortcuts": {s.fact: round(s.auroc, 4) for s in found.shortcuts},
        "hash_bits": duplicates.HASH_BITS,
        "correlation": duplicates.NEAR,
    }  # fmt: skip


def correlated(manifest: Manifest) -> set[tuple[str, str]]:
    """All pairs of names that correlate above the threshold, by brute force."""
    small = []
    for sample in manifest.samples:
        image = read_image(sample.image, DATA.white_level)
        values = to_input(image, (THUMBNAIL, THUMBNAIL)).mean(0)
        small.append((values - values.mean()).ravel())
    matrix = np.corrcoef(np.array(small))
    names = [manifest.name(s.image) for s in manifest.samples]
    rows, columns = np.nonzero(np.triu(matrix > duplicates.NEAR, 1))
    pairs = (sorted((names[i], names[j])) for i, j in zip(rows, columns, strict=True))
    return {(first, second) for first, second in pairs}


def flips(name: str, listed: Manifest) -> list[dict[str, Any]]:
    """Share of the flipped labels that are found among the most doubted, over three draws.

    Every image is cross-fitted: there is no test part.
    """
    progress = Bars()
    with progress.phase("Reading", len(listed.samples)) as advance:
        manifest = digested(listed, DATA.white_level, advance)
    chosen = settings("lite", input_size=SIZES[name])
    weak = list(manifest.weak(None))
    # Features do not depend on labels, so they are computed once for all draws.
    features = crossfit.pooled_features(weak, pretrained_encoder(chosen), chosen, progress)
    rows = []
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        count = len(manifest.samples)
        flipped = set(rng.choice(count, round(FLIPPED * count), replace=False).tolist())
        groups = group_numbers(manifest, manifest.samples)
        label = np.array([s.defective != (i in flipped) for i, s in enumerate(manifest.samples)])
        folds = crossfit.folds_of(label, groups, chosen.seed)
        found = crossfit.probabilities(features, label, folds)
        doubt = np.where(label, 1 - found, found)
        order = np.argsort(-doubt, kind="stable")
        top = set(order[: round(LISTED * count)].tolist())
        rows.append({
            "kind": "flips", "dataset": name, "draw": draw, "pictures": count,
            "flipped": len(flipped), "listed": len(top),
            "found": len(flipped & top), "share": round(len(flipped & top) / len(flipped), 4),
            "by_chance": LISTED, "machine": machine(),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
