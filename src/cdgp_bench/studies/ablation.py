"""Rank the choices that the paper leaves open, on calibration images alone.

Both stages train on fit images. The good calibration images of every other group, and all
defective ones, calibrate; into the other good ones defects are planted, so that localisation is
ranked without a human mask. Test images are never read. One row a variant, set, seed, fusion
weight and tail. Variants are screened small and short; the student's rates run at the size and the
step budget of the core comparison, since a student that learns slowly loses most in a short run.

    python benchmarks/ablation.py --data ../shared/data --out docs/results/ablation.jsonl

Rows that are already there are not computed again. `--table` prints the rows as Markdown.
"""

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from cdgp.training.stages import assemble, dual_gp_stage, fingerprint, student_stage
from PIL import Image

from cdgp.data.images import read_image, to_input
from cdgp.data.layouts import load
from cdgp.data.manifest import Manifest, WeakSample
from cdgp.data.scan import digested
from cdgp.data.splits import split
from cdgp.inference import resize_map
from cdgp.method.calibration import upsample
from cdgp.method.network import Evidence, calibrated, reconstruction_residual
from cdgp.metrics.ranking import image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro
from cdgp.presets import Settings
from cdgp.presets import settings as preset
from cdgp.progress import Bars
from cdgp.training.calibrate import CalibrationEvidence, collect_evidence, fit_calibration
from cdgp.training.dataset import WeakDataset
from cdgp.training.loop import new_fabric
from cdgp_bench.methods import Fit, classifier, mil_topk, padim, supersimplenet
from cdgp_bench.run import read_rows
from cdgp_bench.synthetic import plant_defect

SIZES = {"magnetic_tile": (160, 160), "ksdd": (256, 96)}
STEPS = 200
BASE = {
    "learning_rate": 1e-3,
    "sigma_gradient": False,
    "sampler": "balanced",
    "mil_pooling": "logsumexp",
    "batch_norm": "train",
    "initial_mean": 0.0,
    "initial_scale": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "literal": {"sigma_gradient": True, "sampler": "random", "mil_pooling": "max"},
    "sigma gradient": {"sigma_gradient": True},
    "maximum": {"mil_pooling": "max"},
    "top 5 %": {"mil_pooling": "top"},
    "random sampler": {"sampler": "random"},
    "random sampler, maximum": {"sampler": "random", "mil_pooling": "max"},
    "random sampler, maximum, 3e-3": {
        "sampler": "random",
        "mil_pooling": "max",
        "learning_rate": 3e-3,
    },
    "random sampler, maximum, frozen": {
        "sampler": "random",
        "mil_pooling": "max",
        "batch_norm": "frozen",
    },
    "random sampler, top 5 %": {"sampler": "random", "mil_pooling": "top"},
    "frozen batch norm": {"batch_norm": "frozen"},
    "S = 0.01 I": {"initial_scale": 0.1},
    "m = 1": {"initial_mean": 1.0},
    "rate 3e-4": {"learning_rate": 3e-4},
}
CLASSIFIER_RATES = {"classifier 3e-4": 3e-4, "classifier 1e-3": 1e-3, "classifier 3e-3": 3e-3}
"""The reference's own learning rate, ranked the same way."""
MIL_RATES = {"mil_topk 3e-4": 3e-4, "mil_topk 1e-3": 1e-3, "mil_topk 3e-3": 3e-3}
"""That of MIL-TopK, ranked the same way."""


def with_noise(noise: float) -> Fit:
    """SuperSimpleNet, whose learning rates are its own."""
    shorter = {"most_steps": STEPS, "batch": 8, "noise": noise}
    options = supersimplenet.LITE.model_copy(update=shorter)
    return functools.partial(supersimplenet.fit, options=options)


NOISES = {f"supersimplenet noise {noise:g}": noise for noise in (0.3, 1.0, 2.5, 6.0)}
"""SuperSimpleNet's synthetic anomalies, in batches of 8: the largest mean, over sets, of all four
figures."""
BAG_METHODS: dict[str, tuple[Fit, float]] = {
    **{name: (classifier.fit_cam, rate) for name, rate in CLASSIFIER_RATES.items()},
    **{name: (mil_topk.fit, rate) for name, rate in MIL_RATES.items()},
    **{name: (with_noise(noise), 1e-3) for name, noise in NOISES.items()},
}
CORE_SIZES = {"magnetic_tile": (192, 192), "ksdd": (384, 160)}
STUDENT_RATES = {"student 3e-4": 3e-4, "student 1e-3": 1e-3, "student 3e-3": 3e-3}
"""The reverse student's learning rate, ranked by the residual alone on planted defects: the largest
mean, over sets and seeds, of AUROC-P, AUPRO@.3 and AUPRO@.05."""
DISTANCES = {"distance": False, "residual + distance": True}
"""PaDiM's distance on the residual's own frozen features, alone and with the chosen student's
residual, each in standard deviations over good calibration images; ranked as the rates are."""
GRID = [(w, tail) for w in (0.0, 0.01, 0.025, 0.05, 0.1, 0.2) for tail in ("counting", "pareto")]
"""Fusion weights and tails, of the finalists."""
SHORT_GRID = [(0.025, "counting")]
CHOSEN = "random sampler, maximum"
FINALISTS = ("base", "literal", CHOSEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/ablation.jsonl"))
    parser.add_argument("--sets", nargs="*", default=list(SIZES))
    parser.add_argument(
        "--variants", nargs="*", default=list(VARIANTS | BAG_METHODS | STUDENT_RATES | DISTANCES)
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--states", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.out))
        return
    rows = read_rows(arguments.out)
    done = {(r["dataset"], r["variant"], r["seed"]) for r in rows}
    for seed in arguments.seeds:
        for name in arguments.sets:
            todo = [v for v in arguments.variants if (name, v, seed) not in done]
            if todo:
                run(name, seed, todo, arguments.data, arguments.out, arguments.states)


def halves(manifest: Manifest) -> tuple[list[WeakSample], list[WeakSample]]:
    """Calibration images that calibrate, and good ones of other groups that take a defect."""
    samples = manifest.of("calibration")
    planting = set(sorted({s.group or "" for s in samples if not s.defective})[1::2])
    calibrating, planted = [], []
    for s in samples:
        half = planted if not s.defective and s.group in planting else calibrating
        half.append(WeakSample(s.image, s.defective))
    return calibrating, planted


class Screening(NamedTuple):
    """What one set and seed give to every variant."""

    manifest: Manifest
    size: tuple[int, int]
    seed: int
    native: list[np.ndarray]
    """Good calibration images, with a planted defect and then without, at their own size."""
    masks: list[np.ndarray]


def run(name: str, seed: int, variants: list[str], data: Path, out: Path, states: Path) -> None:
    d = preset("lite").data
    manifest = split(
        digested(load(data / name, d.good, d.defective), d.white_level), seed,
        d.test_fraction, d.calibration_fraction, ("fit", "calibration"),
    )  # fmt: skip
    calibration = manifest.weak("calibration")
    calibrating, planting = halves(manifest)
    fabric, progress = new_fabric(), Bars()
    size = SIZES[name]
    planted = [
        plant_defect(read_image(s.image, d.white_level), np.random.default_rng([seed, index]))
        for index, s in enumerate(planting)
    ]
    native = [pixels for pixels, _ in planted] + [
        read_image(s.image, d.white_level) for s in planting
    ]
    masks = [mask for _, mask in planted]
    masks += [np.zeros_like(mask) for mask in masks]
    screening = Screening(manifest, size, seed, native, masks)
    folder = states / f"{name}-{seed}"
    student = None
    for variant in variants:
        began = time.monotonic()
        if variant in BAG_METHODS | STUDENT_RATES | DISTANCES:
            if variant in BAG_METHODS:
                row = bag_row(screening, *BAG_METHODS[variant])
            elif variant in DISTANCES:
                row = distance_row(screening, calibrating, CORE_SIZES[name], DISTANCES[variant],
                                   folder)  # fmt: skip
            else:
                row = student_row(screening, CORE_SIZES[name], STUDENT_RATES[variant],
                                  folder)  # fmt: skip
            row = {"dataset": name, "variant": variant, "seed": seed, "weight": None,
                   "tail": None, "input_size": size, "steps": STEPS, **row,
                   "seconds": round(time.monotonic() - began, 1)}  # fmt: skip
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            continue
        s = preset(
            "lite",
            seed=seed,
            input_size=size,
            dual_gp=BASE | {"steps": STEPS, "no_separation": "flag"} | VARIANTS[variant],
            student={"steps": STEPS},
            calibration={"pictures": "held_out"},
        )
        signs: dict[str, Any] = {}
        weak = manifest.weak_split()  # of which held_out leaves the Dual GP the fit images
        student = student or student_stage(weak, s, fabric, folder, lambda record: None, progress)
        dual = dual_gp_stage(weak, s, fabric, None, signs.update, progress)
        seconds = time.monotonic() - began
        network = assemble(dual, *student, s)
        images = WeakDataset(calibrating, size, s.data.white_level)
        collected = collect_evidence(network, images, fabric.device, progress)
        everyone = collect_evidence(
            network, WeakDataset(calibration, size, s.data.white_level), fabric.device, progress
        )
        ranking = image_auroc(everyone.pooled.double().numpy(), everyone.defective.numpy()).value
        evidence = [network(to_input(p, size)[None].to(fabric.device)) for p in native]
        kept = ("margin_good", "margin_defective", "variance_normal", "variance_anomaly",
                "token_cosine")  # fmt: skip
        lines = [
            json.dumps({
                "dataset": name, "variant": variant, "seed": seed, "weight": weight,
                "tail": tail, "input_size": size, "steps": STEPS,
                "calibration_image_auroc": ranking,
                **localisation(collected, evidence, masks, s, weight, tail),
                "separation": round(dual.separation, 4),
                **{key: signs.get(key) for key in kept},
                "seconds": round(seconds, 1),
            })
            for weight, tail in (GRID if variant in FINALISTS else SHORT_GRID)
        ]  # fmt: skip
        with out.open("a") as file:  # all rows of a variant at once, so that none is half done
            file.write("\n".join(lines) + "\n")


def bag_row(screening: Screening, fit: Fit, rate: float) -> dict[str, float | None]:
    """A reference on fit images, ranked on calibration images and planted defects."""
    manifest, size, seed, native, masks = screening
    s = preset(
        "lite",
        seed=seed,
        input_size=size,
        dual_gp={"steps": STEPS, "learning_rate": rate, "sampler": "balanced"},
        calibration={"pictures": "held_out"},
    )
    calibration = manifest.of("calibration")
    with TemporaryDirectory() as folder:
        fitted = fit(manifest.weak_split(), s, Path(folder), Bars())
        scores = [f.image_score for f in fitted.score([c.image for c in calibration])]
        planted = saved(native, Path(folder))
        maps = [resize_map(f.anomaly_map, f.size) for f in fitted.score(planted)]
    ranking = image_auroc(scores, [c.defective for c in calibration]).value
    return {"calibration_image_auroc": ranking, **planted_metrics(maps, masks)}


def saved(images: Sequence[np.ndarray], folder: Path) -> list[Path]:
    """Images, HWC in [0, 1], as files for methods that read files."""
    paths = [folder / f"{index}.png" for index in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(np.rint(image * 255).astype(np.uint8)).save(path)
    return paths


def student_row(
    screening: Screening, size: tuple[int, int], rate: float, states: Path
) -> dict[str, Any]:
    """The student on good fit images, its residual ranked on planted defects."""
    s = preset("lite", seed=screening.seed, input_size=size, student={"learning_rate": rate})
    residuals = residuals_of(screening.native, screening.manifest, s, states)
    maps = [resize_map(r, m.shape) for r, m in zip(residuals, screening.masks, strict=True)]
    return {"calibration_image_auroc": None, "input_size": size, "steps": s.student.steps,
            **planted_metrics(maps, screening.masks)}  # fmt: skip


def residuals_of(
    images: Iterable[np.ndarray], manifest: Manifest, settings: Settings, states: Path
) -> list[np.ndarray]:
    """Residual maps (H/4, W/4) of images, from a student on good fit images."""
    weak = manifest.weak_split()
    folder = states / f"student-{fingerprint(settings, weak.good_fit_sha256, 'student')[:16]}"
    fabric = new_fabric()
    teacher, student = student_stage(weak, settings, fabric, folder, lambda record: None, Bars())
    with torch.inference_mode():
        inputs = (to_input(image, settings.input_size)[None] for image in images)
        return [
            reconstruction_residual(teacher, student, i.to(fabric.device))[0].cpu().numpy()
            for i in inputs
        ]


def distance_row(
    screening: Screening,
    calibrating: Sequence[WeakSample],
    size: tuple[int, int],
    residual: bool,
    states: Path,
) -> dict[str, Any]:
    """PaDiM's distance on good fit images, with the student's residual added to it or not."""
    manifest, _, seed, native, masks = screening
    s = preset("lite", seed=seed, input_size=size, calibration={"pictures": "held_out"})
    good = [c.image for c in calibrating if not c.defective]
    with TemporaryDirectory() as folder:
        fitted = padim.fit(manifest.weak_split(), s, Path(folder), Bars(), padim.LITE)
        usual = [f.anomaly_map for f in fitted.score(good)]
        found = [f.anomaly_map for f in fitted.score(saved(native, Path(folder)))]
    sums = standardised(found, usual, masks)
    if residual:
        usual = residuals_of(
            (read_image(path, s.data.white_level) for path in good), manifest, s, states
        )
        found = residuals_of(native, manifest, s, states)
        sums = [a + b for a, b in zip(sums, standardised(found, usual, masks), strict=True)]
    return {"calibration_image_auroc": None, "input_size": size,
            "steps": s.student.steps if residual else 0,
            **planted_metrics(sums, masks)}  # fmt: skip


def standardised(
    maps: Sequence[np.ndarray], usual: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Maps at their masks' sizes, in standard deviations from the mean of the usual ones."""
    mean, spread = np.mean(usual), np.std(usual)
    return [
        resize_map((m - mean) / spread, mask.shape) for m, mask in zip(maps, masks, strict=True)
    ]


def localisation(
    collected: CalibrationEvidence,
    evidence: list[Evidence],
    masks: list[np.ndarray],
    settings: Any,
    weight: float,
    tail: str,
) -> dict[str, float | None]:
    chosen = settings.calibration.model_copy(update={"fusion_weight": weight, "tail": tail})
    calibration = fit_calibration(collected, chosen)
    maps = [
        upsample(calibrated(e, calibration, collected.sizes[0]).anomaly_map, mask.shape)[0].numpy()
        for e, mask in zip(evidence, masks, strict=True)
    ]
    return planted_metrics(maps, masks)


def planted_metrics(maps: list[np.ndarray], masks: list[np.ndarray]) -> dict[str, float | None]:
    regions = aupro(maps, masks)
    return {
        "planted_pixel_auroc": pixel_auroc(maps, masks).value,
        "planted_aupro_30": regions[0.3].value,
        "planted_aupro_05": regions[0.05].value,
    }


def table(path: Path) -> str:
    """Every variant at w = 0.025 with counting, then w and tail of the chosen one, over seeds."""
    keys = ("calibration_image_auroc", "planted_pixel_auroc", "planted_aupro_30",
            "planted_aupro_05", "margin_good", "margin_defective", "variance_normal",
            "variance_anomaly", "token_cosine")  # fmt: skip
    lines = ["| variant | set | seed | w | tail | AUROC-I | AUROC-P | AUPRO@.3 | AUPRO@.05 | "
             "margin good | margin def. | var N | var A | cosine |", "|" + "---|" * 14]  # fmt: skip
    grid: dict[Any, list[Any]] = defaultdict(list)
    for row in sorted(read_rows(path), key=lambda row: (row["dataset"], row["seed"])):
        cells = [row.get(k) for k in keys]
        text = [
            "–" if c is None else f"{100 * c:.1f}" if i < 4 else f"{c:.2f}"
            for i, c in enumerate(cells)
        ]
        if row["weight"] in (None, 0.025) and row["tail"] in (None, "counting"):
            lines.append("| " + " | ".join([row["variant"], row["dataset"], str(row["seed"]),
                         str(row["weight"] or "–"), row["tail"] or "–", *text]) + " |")  # fmt: skip
        if row["variant"] == CHOSEN:
            grid[row["dataset"], row["weight"], row["tail"]].append([100 * c for c in cells[1:4]])
    lines += ["", "| set | w | tail | AUROC-P | AUPRO@.3 | AUPRO@.05 |", "|---" * 6 + "|"]
    for key, values in grid.items():
        means = [f"{v:.1f}" for v in np.mean(values, axis=0)]
        lines.append("| " + " | ".join([*map(str, key), *means]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
