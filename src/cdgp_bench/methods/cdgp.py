"""CDGP itself and its controls; which reading of the paper it is lies in the settings.

What the trained network says of an image is kept on disk, so that settings which only touch what
comes after it (weights, tail, calibration) neither train nor run the network again.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import WeakSplit
from cdgp.files import atomic_write, write_text
from cdgp.method.network import Calibration, Evidence, Network, calibrated
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.calibrate import CalibrationEvidence, fit_calibration
from cdgp.training.dual_gp import LEAST_SEPARATION, Head
from cdgp.training.loop import new_fabric
from cdgp.training.stages import assemble, dual_gp_stage, fingerprint, student_stage
from cdgp_bench.methods import Fitted, Pipeline, Scored


class Trained(NamedTuple):
    """Both stages in one network."""

    network: Network
    separation: float
    seconds: float


def train(
    data: WeakSplit, settings: Settings, states: Path, progress: Progress, head: Head = "gp"
) -> Trained:
    """Both stages, each trained once for all settings that share it."""
    fabric = new_fabric()
    folders = state_folders(data, settings, states, head)
    signs: dict[str, Any] = {}
    dual = dual_gp_stage(data, settings, fabric, folders["dual_gp"], signs.update, progress, head)
    last: dict[str, Any] = {}
    teacher, student = student_stage(
        data, settings, fabric, folders["student"], last.update, progress
    )
    network = assemble(dual, teacher, student, settings).to(fabric.device)
    return Trained(network, dual.separation, signs["seconds"] + last["seconds"])


def state_folders(data: WeakSplit, settings: Settings, states: Path, head: Head) -> dict[str, Path]:
    """Where each stage keeps its state; the name is the digest of all that decides it."""
    dual = fingerprint(settings, data.sha256, "dual_gp", head)[:16]
    student = fingerprint(settings, data.good_fit_sha256, "student")[:16]
    return {
        "dual_gp": states / f"dual_gp-{dual}",
        "student": states / f"student-{student}",
        "evidence": states / f"evidence-{dual}-{student}-{settings.calibration.evidence}",
    }


class Stored(NamedTuple):
    """The evidence of some images, read one by one from its file."""

    maps: Path
    """(n, 2, H/4, W/4) dominance and residual, a ``.npy`` file."""
    pooled: list[float]
    sizes: list[tuple[int, int]]
    """(height, width) of each image."""
    separation: float
    seconds: float

    def evidence(self) -> Iterator[Evidence]:
        maps = np.load(self.maps, mmap_mode="r")
        for both, pooled in zip(maps, self.pooled, strict=True):
            dominance, residual = torch.from_numpy(np.array(both))[:, None]
            yield Evidence(dominance, residual, torch.tensor([pooled]))


def stored_evidence(
    folder: Path,
    paths: Sequence[Path],
    trained: Callable[[], Trained],
    settings: Settings,
    name: str,
    progress: Progress,
) -> Stored:
    """The evidence of image files: from its files, or from the network and then kept."""
    # By size and time of change, so that an edited image is not answered from the store.
    stamps = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
    mark = hashlib.sha256(json.dumps([stamps, settings.data.white_level]).encode()).hexdigest()
    maps, facts = (folder / f"{mark[:16]}.{ending}" for ending in ("npy", "json"))
    if not facts.is_file():
        found = trained()
        device = next(found.network.parameters()).device
        told: dict[str, Any] = {
            "pooled": [], "sizes": [], "separation": found.separation, "seconds": found.seconds,
        }  # fmt: skip
        shape = (len(paths), 2, *(side // 4 for side in settings.input_size))
        with atomic_write(maps) as temporary, progress.phase(name, len(paths)) as advance:
            # Straight to disk, so that memory does not grow with the number of images.
            store = open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
            for index, path in enumerate(paths):
                image = read_image(path, settings.data.white_level)
                evidence = found.network(to_input(image, settings.input_size)[None].to(device))
                store[index, 0] = evidence.dominance[0].float().cpu()
                store[index, 1] = evidence.residual[0].float().cpu()
                told["pooled"].append(float(evidence.pooled[0]))
                told["sizes"].append([int(side) for side in image.shape[:2]])
                advance()
            store.flush()
        write_text(facts, json.dumps(told))  # last: it says that the maps are whole
    kept = json.loads(facts.read_text(encoding="utf-8"))
    sizes = [(height, width) for height, width in kept["sizes"]]
    return Stored(maps, kept["pooled"], sizes, kept["separation"], kept["seconds"])


class Calibrated(NamedTuple):
    """The calibration of a trained network, which itself is loaded when it is called for."""

    trained: Callable[[], Trained]
    folder: Path
    """Where evidence is kept."""
    calibration: Calibration
    separation: float
    seconds: float


def calibrate(
    data: WeakSplit, settings: Settings, states: Path, progress: Progress, head: Head = "gp"
) -> Calibrated:
    """Both stages, where their evidence is not kept already, and the calibration."""
    trained = functools.cache(lambda: train(data, settings, states, progress, head))
    folder = state_folders(data, settings, states, head)["evidence"]
    paths = [s.image for s in data.calibration]
    seen = stored_evidence(folder, paths, trained, settings, "Calibration", progress)
    defective = torch.tensor([s.defective for s in data.calibration])
    sizes = [settings.input_size] * len(paths)
    collected = CalibrationEvidence(list(seen.evidence()), defective, sizes)
    calibration = fit_calibration(collected, settings.calibration)
    return Calibrated(trained, folder, calibration, seen.separation, seen.seconds)


def fit(
    data: WeakSplit, settings: Settings, states: Path, progress: Progress, head: Head = "gp"
) -> Fitted:
    """Both stages and the calibration."""
    trained, folder, calibration, separation, seconds = calibrate(
        data, settings, states, progress, head
    )

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        stored = stored_evidence(folder, paths, trained, settings, "Test", progress)
        for size, evidence in zip(stored.sizes, stored.evidence(), strict=True):
            scores = calibrated(evidence, calibration, settings.input_size)
            yield Scored(
                size,
                scores.anomaly_map[0].numpy(),
                float(torch.sigmoid(scores.logit.double())[0]),
                {
                    "residual": evidence.residual[0].numpy(),
                    "dominance": evidence.dominance[0].numpy(),
                    "surprisal": scores.surprisal[0].numpy(),
                },
            )

    def pipeline() -> Pipeline:
        network = trained().network

        def run(image: Tensor) -> object:
            evidence = Evidence(*(part.float().cpu() for part in network(image)))
            return calibrated(evidence, calibration, settings.input_size)

        return Pipeline(network, run)

    facts = {
        "separated": separation >= LEAST_SEPARATION,
        "separation": round(separation, 4),
        "slope": round(calibration.image.slope, 4),
        "intercept": round(calibration.image.intercept, 4),
    }
    return Fitted(score, seconds, True, facts, pipeline)


class Parts(NamedTuple):
    """What the paper's qualitative figure shows of one image."""

    normal: NDArray[np.float32]
    """mu_N on the token grid."""
    anomaly: NDArray[np.float32]
    """mu_A on the token grid."""
    final: NDArray[np.float32]
    """The final map at the input's size."""


@torch.inference_mode()
def decompose(
    data: WeakSplit, settings: Settings, states: Path, progress: Progress,
    pixels: NDArray[np.float32],
) -> Parts:  # fmt: skip
    """Both predictive means and the final map of an image, HWC float32 RGB in [0, 1]."""
    found = calibrate(data, settings, states, progress)
    network = found.trained().network
    device = next(network.parameters()).device
    image = to_input(pixels, settings.input_size)[None].to(device)
    normal, anomaly = network.means(image)
    evidence = Evidence(*(part.float().cpu() for part in network(image)))
    scores = calibrated(evidence, found.calibration, settings.input_size)
    return Parts(*(m[0].cpu().numpy() for m in (normal, anomaly, scores.anomaly_map)))
