"""CDGP itself and its controls; the settings decide whether it is the paper-literal one.

Images are scored by the product's own inference graph. Its evidence is kept on disk, so that
settings which only change what comes after it (weights, tail, calibration) neither train nor run
the network again.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from cdgp.data.images import network_input, to_input
from cdgp.data.manifest import WeakSplit
from cdgp.files import atomic_write, write_text
from cdgp.method.calibration import Calibration
from cdgp.method.graph import EvidenceGraph, InferenceGraph, OutputGraph
from cdgp.method.network import Evidence
from cdgp.method.score import BALANCED, image_score
from cdgp.prefetch import read_ahead
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp.training.calibrate import CalibrationEvidence, fit_calibration
from cdgp.training.context import new_context, stage_key
from cdgp.training.dataset import new_inputs
from cdgp.training.dual_gp import LEAST_SEPARATION
from cdgp.training.fit import StagePlace, TrainedNetwork, train_network
from cdgp_bench.controls import Control, new_control
from cdgp_bench.methods import Fitted, Pipeline, Scored
from cdgp_bench.methods.common import held_stage


class Keys(NamedTuple):
    """Digests of all that decides each stage; checkpoints lie in folders of these names."""

    dual_gp: str
    student: str
    evidence: str


def keys_of(data: WeakSplit, settings: Settings, control: Control | None) -> Keys:
    """The keys of both stages, and of the evidence that they give."""
    dual = stage_key(settings, data.sha256, "dual_gp")
    if control is not None:
        dual = hashlib.sha256(f"{dual} {control}".encode()).hexdigest()
    student = stage_key(settings, data.good_fit_sha256, "student")
    kind = settings.calibration.evidence
    c, d = settings.calibration, settings.distance
    distance = f"d{d.components}-{d.weight > 0}-{c.image_evidence}-{c.pooling_sharpness:g}"
    return Keys(dual, student, f"graph-{dual[:16]}-{student[:16]}-{kind}-{distance}")


def train(
    data: WeakSplit,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    control: Control | None = None,
) -> TrainedNetwork:
    """All branches, each stage trained once for all settings that share it.

    Another process that trains the same stage is waited for.
    """
    keys = keys_of(data, settings, control)
    dual, student = (
        checkpoints / f"{stage}-{key[:16]}"
        for stage, key in (("dual_gp", keys.dual_gp), ("student", keys.student))
    )
    context = new_context(dual, None, progress)
    of_student = replace(context, checkpoints=student)
    with held_stage(dual), held_stage(student):
        found = train_network(
            data, settings, new_inputs(settings),
            StagePlace(context, keys.dual_gp), StagePlace(of_student, keys.student),
            None if control is None else lambda: new_control(control, settings),
        )  # fmt: skip
    return found._replace(network=found.network.to(context.fabric.device))


class StoredEvidence(NamedTuple):
    """The evidence of some images, read one by one from its file."""

    maps: Path
    """(n, branches, h, w) of the branches that there are, a ``.npy`` file."""
    branches: list[bool]
    """Whether there are dominance, residual and distance."""
    pooled: list[list[float]]
    """Image evidence of each image."""
    sizes: list[tuple[int, int]]
    """(height, width) of each image."""
    separation: float | None
    seconds: float

    def evidence(self) -> Iterator[Evidence]:
        maps = np.load(self.maps, mmap_mode="r")
        for stored, pooled in zip(maps, self.pooled, strict=True):
            left = iter(torch.from_numpy(np.array(stored))[:, None])
            dominance, residual, distance = (next(left) if b else None for b in self.branches)
            assert residual is not None
            yield Evidence(dominance, residual, distance, torch.tensor([pooled]))


def stored_evidence(
    folder: Path,
    paths: Sequence[Path],
    trained: Callable[[], TrainedNetwork],
    settings: Settings,
    name: str,
    progress: Progress,
) -> StoredEvidence:
    """The evidence of image files: from its files, or from the graph and then kept."""
    # By size and time of change, so that an edited image is not answered from the store.
    stamps = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
    read = [settings.data.white_level, settings.data.pages]
    key = hashlib.sha256(json.dumps([stamps, *read]).encode()).hexdigest()
    maps, facts = (folder / f"{key[:16]}.{ending}" for ending in ("npy", "json"))
    with held_stage(folder):
        if not facts.is_file():
            found = trained()
            write_evidence(maps, facts, paths, found, settings, progress, name)
    kept = json.loads(facts.read_text(encoding="utf-8"))
    sizes = [(height, width) for height, width in kept["sizes"]]
    return StoredEvidence(
        maps, kept["branches"], kept["pooled"], sizes, kept["separation"], kept["seconds"]
    )


@torch.inference_mode()
def write_evidence(
    maps: Path,
    facts: Path,
    paths: Sequence[Path],
    trained: TrainedNetwork,
    settings: Settings,
    progress: Progress,
    name: str,
) -> None:
    """Run the graph over image files, straight to disk: memory does not grow with their number."""
    device = next(trained.network.parameters()).device
    graph = EvidenceGraph(trained.network).to(device)
    pooled, sizes, branches = [], [], list[bool]()
    with atomic_write(maps) as temporary, progress.phase(name, len(paths)) as advance:
        store: NDArray[np.float32] | None = None
        read = read_ahead(lambda path: network_input(path, settings), paths)
        for index, (image, native) in enumerate(read):
            batch = torch.from_numpy(image)[None].to(device)
            found = graph(batch.contiguous(memory_format=torch.channels_last))
            values = torch.cat([m for m in found.maps if m is not None]).cpu()
            if store is None:
                branches = [m is not None for m in found.maps]
                shape = (len(paths), *values.shape)
                store = open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
            store[index] = values
            pooled.append(found.pooled[0].tolist())
            sizes.append([*native])
            advance()
        del store  # on disk now
    # Last: it says that the maps are whole.
    record = {
        "pooled": pooled, "branches": branches, "sizes": sizes,
        "separation": trained.separation, "seconds": trained.seconds,
    }  # fmt: skip
    write_text(facts, json.dumps(record))


class Calibrated(NamedTuple):
    """The calibration of a trained network, which itself is loaded when it is called for."""

    trained: Callable[[], TrainedNetwork]
    folder: Path
    """Where evidence is kept."""
    calibration: Calibration
    separation: float | None
    seconds: float


def calibrate(
    data: WeakSplit,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    control: Control | None = None,
) -> Calibrated:
    """Both stages, where their evidence is not kept already, and the calibration."""
    trained = functools.cache(lambda: train(data, settings, checkpoints, progress, control))
    folder = checkpoints / keys_of(data, settings, control).evidence
    paths = [s.image for s in data.calibration]
    seen = stored_evidence(folder, paths, trained, settings, "Calibration", progress)
    defective = torch.tensor([s.defective for s in data.calibration])
    sizes = [settings.input_size] * len(paths)
    collected = CalibrationEvidence(list(seen.evidence()), defective, sizes)
    calibration = fit_calibration(collected, settings)
    return Calibrated(trained, folder, calibration, seen.separation, seen.seconds)


def fit(
    data: WeakSplit,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    control: Control | None = None,
) -> Fitted:
    """Both stages and the calibration."""
    trained, folder, calibration, separation, seconds = calibrate(
        data, settings, checkpoints, progress, control
    )
    outputs = OutputGraph(calibration)

    def score(paths: Sequence[Path]) -> Iterator[Scored]:
        stored = stored_evidence(folder, paths, trained, settings, "Test", progress)
        for size, evidence in zip(stored.sizes, stored.evidence(), strict=True):
            with torch.inference_mode():
                found = outputs(evidence, settings.input_size)
            branches = zip(("dominance", "residual", "distance"), evidence.maps, strict=True)
            yield Scored(
                size,
                found.anomaly_map[0].numpy(),
                float(image_score(found.pooled, calibration.image, BALANCED)[0]),
                {name: m[0].numpy() for name, m in branches if m is not None}
                | {"surprisal": found.surprisal[0].numpy()},
            )

    def pipeline() -> Pipeline:
        network = trained().network
        graph = InferenceGraph(EvidenceGraph(network), calibration)
        return Pipeline(network, graph.to(next(network.parameters()).device))

    facts = {
        "separated": separation is None or separation >= LEAST_SEPARATION,
        "separation": None if separation is None else round(separation, 4),
        "slope": [round(slope, 4) for slope in calibration.image.slope],
        "intercept": round(calibration.image.intercept, 4),
    }
    return Fitted(score, seconds, not calibration.image.is_p_value, facts, pipeline)


class Parts(NamedTuple):
    """What the paper's qualitative figure shows of one image."""

    normal: NDArray[np.float32]
    """mu_N on the token grid."""
    anomaly: NDArray[np.float32]
    """mu_A on the token grid."""
    final: NDArray[np.float32]
    """The final map at the input's size."""


def decompose(
    data: WeakSplit,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    image: NDArray[np.float32],
) -> Parts:
    """Both predictive means and the final map of an image, HWC float32 RGB in [0, 1]."""
    found = calibrate(data, settings, checkpoints, progress)
    network = found.trained().network
    device = next(network.parameters()).device
    batch = torch.from_numpy(to_input(image, settings.input_size))[None].to(device)
    graph = InferenceGraph(EvidenceGraph(network), found.calibration).to(device)
    with torch.inference_mode():
        normal, anomaly = network.means(batch)
        final = graph(batch.contiguous(memory_format=torch.channels_last)).anomaly_map
    return Parts(*(m[0].cpu().numpy() for m in (normal, anomaly, final)))
