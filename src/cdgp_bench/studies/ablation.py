"""Rank the choices that the paper leaves open, on calibration images outside every test part.

Both stages train on fit images. The good calibration images of every other group, and all
defective ones, calibrate. Defects are planted into the other good ones, so that localisation is
ranked without a human mask. Images of any seed's reported test part are never read
(``protocol.ranking_split``); the committed rows are older, and were ranked on each seed's own
calibration images, which lie in test parts of other seeds. One row a variant, set, seed, fusion
weight and tail. Variants are screened at a small size in few steps; the student's rates run at the
size and the steps of the main comparison, since a slow student loses most in a short run.

    python -m cdgp_bench.studies.ablation --data ../shared/data

Rows that are already there are not computed again. `--table` prints the rows as Markdown.
"""

import argparse
import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from cdgp.data.images import read_image, to_input
from cdgp.data.layouts import load
from cdgp.data.manifest import Manifest, WeakSample
from cdgp.data.resize import resize_map
from cdgp.data.scan import digested
from cdgp.method.build import assemble
from cdgp.method.graph import EvidenceGraph, OutputGraph
from cdgp.method.network import Evidence, reconstruction_residual
from cdgp.metrics.ranking import image_auroc, pixel_auroc
from cdgp.metrics.regions import aupro
from cdgp.presets import Settings
from cdgp.presets import settings as preset
from cdgp.progress import Bars
from cdgp.training.calibrate import CalibrationEvidence, collect_evidence, fit_calibration
from cdgp.training.context import TrainingContext, new_context, new_fabric, stage_key
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.dual_gp import dual_gp_samples, train_dual_gp
from cdgp.training.student import TrainedStudent, train_student
from cdgp_bench.methods import Fit, classifier, mil_topk, padim, supersimplenet
from cdgp_bench.protocol import ranking_split
from cdgp_bench.rows import read_rows
from cdgp_bench.studies import grouped, markdown_table
from cdgp_bench.synthetic import plant_defect, save

SIZES = {"magnetic_tile": (160, 160), "ksdd": (256, 96)}
STEPS = 200
BASE = {
    "mean_weight": 0.0,
    "learning_rate": 1e-3,
    "sigma_gradient": False,
    "sampler": "balanced",
    "mil_pooling": "logsumexp",
    "batch_norm": "train",
    "initial_mean": 0.0,
    "initial_scale": 1.0,
}
RANDOM: dict[str, Any] = {"sampler": "random"}
RANDOM_MAXIMUM = RANDOM | {"mil_pooling": "max"}
DUAL_GP_VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "literal": RANDOM_MAXIMUM | {"sigma_gradient": True},
    "sigma gradient": {"sigma_gradient": True},
    "maximum": {"mil_pooling": "max"},
    "top 5 %": {"mil_pooling": "top"},
    "random sampler": RANDOM,
    "random sampler, maximum": RANDOM_MAXIMUM,
    "random sampler, maximum, 3e-3": RANDOM_MAXIMUM | {"learning_rate": 3e-3},
    "random sampler, maximum, frozen": RANDOM_MAXIMUM | {"batch_norm": "frozen"},
    "random sampler, top 5 %": RANDOM | {"mil_pooling": "top"},
    "frozen batch norm": {"batch_norm": "frozen"},
    "S = 0.01 I": {"initial_scale": 0.1},
    "m = 1": {"initial_mean": 1.0},
    "rate 3e-4": {"learning_rate": 3e-4},
}
CLASSIFIER_RATES = {"classifier 3e-4": 3e-4, "classifier 1e-3": 1e-3, "classifier 3e-3": 3e-3}
"""Learning rates of the reference, ranked the same way."""
MIL_RATES = {"mil_topk 3e-4": 3e-4, "mil_topk 1e-3": 1e-3, "mil_topk 3e-3": 3e-3}
"""Those of MIL-TopK, ranked the same way."""


def with_noise(noise: float) -> Fit:
    """SuperSimpleNet, whose learning rates are its own."""
    shorter = {"most_steps": STEPS, "batch": 8, "noise": noise}
    options = supersimplenet.LITE.model_copy(update=shorter)
    return functools.partial(supersimplenet.fit, options=options)


NOISES = {f"supersimplenet noise {noise:g}": noise for noise in (0.3, 1.0, 2.5, 6.0)}
"""SuperSimpleNet's synthetic anomalies, in batches of 8. The best one has the largest mean, over
sets, of all four metrics."""
BAG_METHODS: dict[str, tuple[Fit, float]] = {
    **{name: (classifier.fit_cam, rate) for name, rate in CLASSIFIER_RATES.items()},
    **{name: (mil_topk.fit, rate) for name, rate in MIL_RATES.items()},
    **{name: (with_noise(noise), 1e-3) for name, noise in NOISES.items()},
}
CORE_SIZES = {"magnetic_tile": (192, 192), "ksdd": (384, 160)}
STUDENT_RATES = {"student 3e-4": 3e-4, "student 1e-3": 1e-3, "student 3e-3": 3e-3}
"""The reverse student's learning rate, ranked by the residual alone on planted defects. The best
has the largest mean, over sets and seeds, of AUROC-P, AUPRO@.3 and AUPRO@.05."""
DISTANCES = {"distance": False, "residual + distance": True}
"""PaDiM's distance on the residual's own frozen features, alone and with the chosen student's
residual, each in standard deviations over good calibration images; ranked as the rates are."""
GRID = [(w, tail) for w in (0.0, 0.01, 0.025, 0.05, 0.1, 0.2) for tail in ("counting", "pareto")]
"""Fusion weights and tails, of the finalists."""
SHORT_GRID = [(0.025, "counting")]
CHOSEN = "random sampler, maximum"
FINALISTS = ("base", "literal", CHOSEN)
DIAGNOSTICS = ("margin_good", "margin_defective", "variance_normal", "variance_anomaly",
               "token_cosine")  # fmt: skip
"""Of the last step of the Dual GP; they are recorded beside the metrics."""


def main() -> None:
    every = [*DUAL_GP_VARIANTS, *BAG_METHODS, *STUDENT_RATES, *DISTANCES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/ablation.jsonl"))
    parser.add_argument("--sets", nargs="*", default=list(SIZES))
    parser.add_argument("--variants", nargs="*", default=every)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(given.out))
        return
    torch.set_num_threads(2)
    known = read_rows(given.out)
    if any("outside_tests" not in row for row in known):
        parser.error(f"--out {given.out}: holds rows that were ranked on images of test parts; "
                     "choose another file, they do not compare")  # fmt: skip
    done = {(r["dataset"], r["variant"], r["seed"]) for r in known}
    for seed in given.seeds:
        for name in given.sets:
            todo = [v for v in given.variants if (name, v, seed) not in done]
            if todo:
                screening = Screening.of(name, seed, given.data, given.checkpoints)
                for variant in todo:
                    append(given.out, rows_of(screening, variant))


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows of a variant at once, so that a kill leaves none half done."""
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Screening:
    """What all variants of one set and seed share."""

    name: str
    seed: int
    manifest: Manifest
    calibrating: Sequence[WeakSample]
    """The calibration images that calibrate."""
    native: Sequence[NDArray[np.float32]]
    """The other ones, with a planted defect and then without, at their own size."""
    masks: Sequence[NDArray[np.bool_]]
    checkpoints: Path

    @classmethod
    def of(cls, name: str, seed: int, data: Path, checkpoints: Path) -> Self:
        """Split a set, and plant the defects."""
        d = preset("lite").data
        listed = digested(load(data / name, d.good, d.defective), d.white_level)
        manifest = ranking_split(listed, d, seed)
        calibrating, planting = halves(manifest)
        whole = [read_image(s.image, d.white_level, d.first_page) for s in planting]
        planted = [
            plant_defect(image, np.random.default_rng([seed, index]))
            for index, image in enumerate(whole)
        ]
        masks = [mask for _, mask in planted]
        masks += [np.zeros_like(mask) for mask in masks]
        native = [image for image, _ in planted] + whole
        return cls(name, seed, manifest, calibrating, native, masks, checkpoints / f"{name}-{seed}")

    def settings(self, size: tuple[int, int], **changes: Any) -> Settings:
        """The `lite` preset with calibration images that the Dual GP has not seen."""
        pinned = {
            "calibration": {"pictures": "held_out", "image_evidence": "dominance"},
            "distance": {"weight": 0.0},
        }
        return preset("lite", seed=self.seed, input_size=size, **(pinned | changes))

    def save_native(self, folder: Path) -> list[Path]:
        """``native`` as files, for methods that read files."""
        paths = [folder / f"{index}.png" for index in range(len(self.native))]
        for path, image in zip(paths, self.native, strict=True):
            save(path, image)
        return paths

    def student(self, settings: Settings) -> TrainedStudent:
        """The teacher, and the student trained on good fit images, once for equal settings."""
        weak = self.manifest.weak_split()
        key = stage_key(settings, weak.good_fit_sha256, "student")
        context = new_context(self.checkpoints / f"student-{key[:16]}", None, Bars())
        good = [s for s in weak.fit if not s.defective]
        return train_student(WeakDataset(good, new_inputs(settings)), settings, context, key)


def halves(manifest: Manifest) -> tuple[list[WeakSample], list[WeakSample]]:
    """Calibration images that calibrate, and good ones of other groups that get a defect."""
    samples = manifest.of("calibration")
    planting = set(sorted({s.group or "" for s in samples if not s.defective})[1::2])
    calibrating: list[WeakSample] = []
    planted: list[WeakSample] = []
    for s in samples:
        half = planted if not s.defective and s.group in planting else calibrating
        half.append(WeakSample(s.image, s.defective))
    return calibrating, planted


def rows_of(screening: Screening, variant: str) -> list[dict[str, Any]]:
    """Train and rank one variant."""
    began = time.monotonic()
    head = {"dataset": screening.name, "variant": variant, "seed": screening.seed,
            "weight": None, "tail": None, "input_size": SIZES[screening.name],
            "steps": STEPS, "outside_tests": True}  # fmt: skip
    if variant in DUAL_GP_VARIANTS:
        return [head | row for row in dual_gp_rows(screening, variant)]
    if variant in BAG_METHODS:
        row: dict[str, Any] = bag_row(screening, *BAG_METHODS[variant])
    elif variant in DISTANCES:
        row = distance_row(screening, DISTANCES[variant])
    else:
        row = student_row(screening, STUDENT_RATES[variant])
    return [head | row | {"seconds": round(time.monotonic() - began, 1)}]


def dual_gp_rows(screening: Screening, variant: str) -> Iterator[dict[str, Any]]:
    """A variant of the Dual GP, for each fusion weight and tail."""
    began = time.monotonic()
    size, progress = SIZES[screening.name], Bars()
    s = screening.settings(
        size,
        dual_gp=BASE | {"steps": STEPS, "no_separation": "flag"} | DUAL_GP_VARIANTS[variant],
        student={"steps": STEPS},
    )
    teacher, student, _ = screening.student(s)
    diagnostics: dict[str, Any] = {}
    inputs = new_inputs(s)
    weak = screening.manifest.weak_split()
    fit_images = WeakDataset(dual_gp_samples(weak, s), inputs)
    context = TrainingContext(new_fabric(), None, diagnostics.update, progress)
    dual = train_dual_gp(fit_images, s, context, "")
    seconds = round(time.monotonic() - began, 1)
    network = assemble(dual.tuned, teacher, student, None, s)
    graph = EvidenceGraph(network).to(context.fabric.device)
    collected, everyone = (
        collect_evidence(graph, WeakDataset(samples, inputs), progress)
        for samples in (screening.calibrating, screening.manifest.weak("calibration"))
    )
    ranking = image_auroc(everyone.pooled.double().numpy(), everyone.defective.numpy()).value
    evidence = [evidence_of(graph, image, size) for image in screening.native]
    for weight, tail in GRID if variant in FINALISTS else SHORT_GRID:
        yield {
            "weight": weight, "tail": tail, "calibration_image_auroc": ranking,
            **localisation(collected, evidence, screening.masks, s, weight, tail),
            "separation": round(dual.separation, 4),
            **{key: diagnostics.get(key) for key in DIAGNOSTICS}, "seconds": seconds,
        }  # fmt: skip


@torch.inference_mode()
def evidence_of(
    graph: EvidenceGraph, image: NDArray[np.float32], size: tuple[int, int]
) -> Evidence:
    """The evidence of one image."""
    batch = torch.from_numpy(to_input(image, size))[None].to(next(graph.parameters()).device)
    found: Evidence = graph(batch.contiguous(memory_format=torch.channels_last))
    return found.on_cpu()


def bag_row(screening: Screening, fit: Fit, rate: float) -> dict[str, float | None]:
    """A reference on fit images, ranked on calibration images and planted defects."""
    s = screening.settings(
        SIZES[screening.name],
        dual_gp={"steps": STEPS, "learning_rate": rate, "sampler": "balanced"},
    )
    calibration = screening.manifest.of("calibration")
    with TemporaryDirectory() as folder:
        fitted = fit(screening.manifest.weak_split(), s, Path(folder), Bars())
        scores = [f.image_score for f in fitted.score([c.image for c in calibration])]
        planted = screening.save_native(Path(folder))
        maps = [resize_map(f.anomaly_map, f.size) for f in fitted.score(planted)]
    ranking = image_auroc(scores, [c.defective for c in calibration]).value
    return {"calibration_image_auroc": ranking, **planted_metrics(maps, screening.masks)}


def student_row(screening: Screening, rate: float) -> dict[str, Any]:
    """The student on good fit images, its residual ranked on planted defects."""
    size = CORE_SIZES[screening.name]
    s = screening.settings(size, student={"learning_rate": rate})
    residuals = residuals_of(screening.native, screening, s)
    maps = [resize_map(r, _shape(m)) for r, m in zip(residuals, screening.masks, strict=True)]
    return {"calibration_image_auroc": None, "input_size": size, "steps": s.student.steps,
            **planted_metrics(maps, screening.masks)}  # fmt: skip


@torch.inference_mode()
def residuals_of(
    images: Iterable[NDArray[np.float32]], screening: Screening, settings: Settings
) -> list[NDArray[np.float32]]:
    """Residual maps (h, w) of images, from a student on good fit images."""
    with torch.inference_mode(False):
        teacher, student, _ = screening.student(settings)
    device = next(teacher.parameters()).device
    size = settings.input_size
    inputs = (torch.from_numpy(to_input(image, size))[None].to(device) for image in images)
    return [reconstruction_residual(teacher, student, i)[0].cpu().numpy() for i in inputs]


def distance_row(screening: Screening, residual: bool) -> dict[str, Any]:
    """PaDiM's distance on good fit images, with the student's residual added to it or not."""
    size, masks = CORE_SIZES[screening.name], screening.masks
    s = screening.settings(size)
    good = [c.image for c in screening.calibrating if not c.defective]
    with TemporaryDirectory() as folder:
        fitted = padim.fit(screening.manifest.weak_split(), s, Path(folder), Bars(), padim.LITE)
        usual = [f.anomaly_map for f in fitted.score(good)]
        found = [f.anomaly_map for f in fitted.score(screening.save_native(Path(folder)))]
    sums = standardised(found, usual, masks)
    if residual:
        usual = residuals_of((read_image(path, s.data.white_level) for path in good), screening, s)
        found = residuals_of(screening.native, screening, s)
        sums = [a + b for a, b in zip(sums, standardised(found, usual, masks), strict=True)]
    return {"calibration_image_auroc": None, "input_size": size,
            "steps": s.student.steps if residual else 0,
            **planted_metrics(sums, masks)}  # fmt: skip


def standardised(
    maps: Sequence[NDArray[np.float32]],
    usual: Sequence[NDArray[np.float32]],
    masks: Sequence[NDArray[np.bool_]],
) -> list[NDArray[np.float32]]:
    """Maps at their masks' sizes, in standard deviations from the mean of the usual ones."""
    mean, spread = np.mean(usual), np.std(usual)
    return [
        resize_map((m - mean) / spread, _shape(mask)) for m, mask in zip(maps, masks, strict=True)
    ]


def _shape(mask: NDArray[np.bool_]) -> tuple[int, int]:
    return mask.shape[0], mask.shape[1]


def localisation(
    collected: CalibrationEvidence,
    evidence: Sequence[Evidence],
    masks: Sequence[NDArray[np.bool_]],
    settings: Settings,
    weight: float,
    tail: str,
) -> dict[str, float | None]:
    """Metrics on planted defects, calibrated with a fusion weight and a tail."""
    calibration = settings.calibration.model_copy(update={"fusion_weight": weight, "tail": tail})
    chosen = settings.model_copy(update={"calibration": calibration})
    outputs = OutputGraph(fit_calibration(collected, chosen))
    maps = [
        resize_map(outputs(e, collected.sizes[0]).anomaly_map[0].numpy(), _shape(mask))
        for e, mask in zip(evidence, masks, strict=True)
    ]
    return planted_metrics(maps, masks)


def planted_metrics(
    maps: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]]
) -> dict[str, float | None]:
    """Localisation over images with a planted defect and without."""
    regions = aupro(maps, masks)
    return {
        "planted_pixel_auroc": pixel_auroc(maps, masks).value,
        "planted_aupro_30": regions[0.3].value,
        "planted_aupro_05": regions[0.05].value,
    }


def table(path: Path) -> str:
    """Every variant at w = 0.025 with counting, then w and tail of the chosen one, over seeds."""
    metrics = ("planted_pixel_auroc", "planted_aupro_30", "planted_aupro_05")
    rows = sorted(read_rows(path), key=lambda row: (row["dataset"], row["seed"]))
    every = []
    for row in rows:
        if row["weight"] in (None, 0.025) and row["tail"] in (None, "counting"):
            ranked = [row.get(key) for key in ("calibration_image_auroc", *metrics)]
            shown = [row.get(key) for key in DIAGNOSTICS]
            every.append([
                row["variant"], row["dataset"], row["seed"], row["weight"] or "–",
                row["tail"] or "–",
                *("–" if value is None else f"{100 * value:.1f}" for value in ranked),
                *("–" if value is None else f"{value:.2f}" for value in shown),
            ])  # fmt: skip
    chosen = grouped((r for r in rows if r["variant"] == CHOSEN), "dataset", "weight", "tail")
    means = [
        [*key, *(f"{np.mean([100 * row[metric] for row in found]):.1f}" for metric in metrics)]
        for key, found in chosen.items()
    ]
    titles = ["AUROC-P", "AUPRO@.3", "AUPRO@.05"]
    head = ["variant", "set", "seed", "w", "tail", "AUROC-I", *titles, "margin good",
            "margin def.", "var N", "var A", "cosine"]  # fmt: skip
    return (
        f"{markdown_table(head, every)}\n\n{markdown_table(['set', 'w', 'tail', *titles], means)}"
    )


if __name__ == "__main__":
    main()
