"""From weakly labelled images to a calibrated model: the order of the stages."""

import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.artifact import Model
from cdgp.audit.types import count
from cdgp.data.manifest import WeakSplit
from cdgp.data.splits import CLASSES
from cdgp.decision import GOOD_ALONE, Decision
from cdgp.errors import SettingsError, TrainingError
from cdgp.method.build import assemble
from cdgp.method.calibration import Calibration
from cdgp.method.gp import DualGP
from cdgp.method.graph import EvidenceGraph, SurprisalTable, check_table
from cdgp.method.network import Network
from cdgp.method.score import ImageCalibrator, image_score
from cdgp.metrics.reliability import false_reject_threshold
from cdgp.presets import DecisionSettings, InferenceSettings, Settings
from cdgp.progress import Quiet
from cdgp.runtimes import Runtime
from cdgp.runtimes.parity import compare
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.training.calibrate import CalibrationEvidence, collect_evidence, fit_calibration
from cdgp.training.context import TrainingContext, stage_key
from cdgp.training.dataset import InputCache, WeakDataset, new_inputs
from cdgp.training.distance import train_distance
from cdgp.training.dual_gp import TrainedDualGP, dual_gp_samples, train_dual_gp
from cdgp.training.processes import run_on_devices
from cdgp.training.student import TrainedStudent, train_student

WITHOUT_BOUND = (
    "The training is kept: --resume with --set calibration.pictures=held_out in place of "
    "--max-false-rejects writes the model with decision.threshold, without a bound"
)
WITHOUT_CALIBRATION = (
    "a class has too few images to set some aside, so the calibration rests on the training "
    "images themselves: probabilities are surer than they should be"
)
MOST_MOVED = 0.01
"""Most that a probability may move in another precision or mode than float32, eager."""


def train(data: WeakSplit, settings: Settings, context: TrainingContext) -> Model:
    """`train_network` and the calibration.

    On several devices the stages train in processes of their own; their finished checkpoints are
    then read here, as those of an interrupted run are. Each process decodes an image once for all
    stages, as long as the inputs fit into memory. Where no defective image is given, or the only
    ones calibrate, there is no Dual GP: what good images alone give makes the model. Errors: see
    ``cdgp.errors``; SettingsError for a false-reject bound that the calibration cannot give.
    """
    of_stages = context
    if context.devices > 1:
        if context.checkpoints is None:
            with tempfile.TemporaryDirectory() as folder:
                return train(data, settings, replace(context, checkpoints=Path(folder)))
        run_on_devices(train_stages_of_run, context, data, settings)
        of_stages = replace(context, log=lambda record: None, progress=Quiet())
    inputs, device = new_inputs(settings), context.fabric.device
    network, separation, _ = train_network(
        data, settings, inputs, *stage_places(data, settings, of_stages)
    )
    graph = EvidenceGraph(network).to(device)
    dataset = WeakDataset(data.calibration, inputs)
    collected = collect_evidence(graph, dataset, context.progress)
    calibration = fit_calibration(collected, settings)
    check_table(SurprisalTable(calibration.tail), calibration.tail)
    image = with_groups(calibration.image, data)
    calibration = calibration._replace(image=image)
    context.log({"stage": "calibration", "slope": image.slope, "intercept": image.intercept,
                 "notes": image.notes})  # fmt: skip
    decision = decide(collected, calibration, settings.decision, data)
    made = provenance(data, separation, image)
    model = Model(network, calibration, decision, settings, made)
    if device.type == "cuda" and settings.inference != InferenceSettings():
        fast = TorchRuntime(model, device, settings.inference)
        made["inference"] = check_inference(fast, model, dataset)
    return model


class StagePlace(NamedTuple):
    """Where a stage keeps its checkpoint and shows its progress, and what the former must match."""

    context: TrainingContext
    cache_key: str


class TrainedNetwork(NamedTuple):
    """All branches in one network."""

    network: Network
    separation: float | None
    """Of the labels, by the Dual GP; None where it had no defective image."""
    seconds: float
    """Of the stages that train by steps."""


def train_network(
    data: WeakSplit,
    settings: Settings,
    inputs: InputCache,
    labelled_stage: StagePlace,
    good_stage: StagePlace,
    make_pair: Callable[[], DualGP] | None = None,
) -> TrainedNetwork:
    """All branches: the Dual GP, where there are defects to train on, and what good images give.

    ``make_pair`` as in `train_dual_gp`.
    """
    stages = train_stages(data, settings, inputs, labelled_stage, good_stage, make_pair)
    dual, good, (teacher, student, seconds) = stages
    distance = train_distance(good, teacher, settings, good_stage.context)
    network = assemble(dual.tuned if dual else None, teacher, student, distance, settings)
    if dual is None:
        return TrainedNetwork(network, None, seconds)
    return TrainedNetwork(network, dual.separation, dual.seconds + seconds)


class TrainedStages(NamedTuple):
    """What trains by steps."""

    dual: TrainedDualGP | None
    good: WeakDataset
    """The good fit images."""
    student: TrainedStudent


def train_stages(
    data: WeakSplit,
    settings: Settings,
    inputs: InputCache,
    labelled_stage: StagePlace,
    good_stage: StagePlace,
    make_pair: Callable[[], DualGP] | None = None,
) -> TrainedStages:
    """Dual GP, where there are defects to train on, and reverse student, as `train_network`."""
    dual: TrainedDualGP | None = None
    labelled = dual_gp_samples(data, settings)
    if any(s.defective for s in labelled):
        dual = train_dual_gp(WeakDataset(labelled, inputs), settings, *labelled_stage, make_pair)
    good = WeakDataset([s for s in data.fit if not s.defective], inputs)
    return TrainedStages(dual, good, train_student(good, settings, *good_stage))


def stage_places(
    data: WeakSplit, settings: Settings, context: TrainingContext
) -> tuple[StagePlace, StagePlace]:
    """The places of the Dual GP and of the reverse student in a run."""
    return (
        StagePlace(context, stage_key(settings, data.sha256, "dual_gp")),
        StagePlace(context, stage_key(settings, data.good_fit_sha256, "student")),
    )


def train_stages_of_run(context: TrainingContext, data: WeakSplit, settings: Settings) -> None:
    """`train_stages` as one of several processes, which leave their checkpoints alone."""
    inputs = new_inputs(settings)
    train_stages(data, settings, inputs, *stage_places(data, settings, context))


def check_inference(fast: TorchRuntime, model: Model, dataset: WeakDataset) -> dict[str, float]:
    """How far another precision or mode is from float32 on the calibration images.

    Raises:
        TrainingError: a probability moves by more than ``MOST_MOVED``, or a decision changes.
    """
    plain = TorchRuntime(model, fast.device)
    runtimes: tuple[Runtime, Runtime] = (plain, fast)
    if dataset.tile:
        runtimes = (TiledRuntime(plain, dataset.size), TiledRuntime(fast, dataset.size))
    inputs = (dataset.input(i).numpy() for i in range(len(dataset)))
    parity = compare(*runtimes, inputs, model, batches=(1,))
    # A bound on false rejects sets the threshold to the score of one of these images.
    limit = model.decision.balanced
    near = [abs(score - limit) <= MOST_MOVED for score in parity.expected_scores]
    changed = sum(not near[position] for position in parity.changed)
    if changed or parity.pred_score > MOST_MOVED:
        chosen = fast.inference
        raise TrainingError(
            f"inference.precision = {chosen.precision!r}, inference.mode = {chosen.mode!r}: "
            f"against float32 a probability moves by {parity.pred_score:.2g} ({MOST_MOVED:g} is "
            f"allowed) and {changed} of {len(dataset)} decisions change. The training is kept: "
            "--resume with --set inference.precision=float32 --set inference.mode=eager writes "
            "the model"
        )
    return {
        "fused": parity.fused,
        "pooled": parity.pooled,
        "pred_score": parity.pred_score,
        "decisions_changed": float(changed),
    }


def with_groups(image: ImageCalibrator, data: WeakSplit) -> ImageCalibrator:
    """The calibrator with the numbers of parts that it rests on, and notes where they are few."""
    parts = {
        label: {g for s, g in zip(data.calibration, data.calibration_groups, strict=True)
                if s.defective == label}
        for label in (False, True)
    }  # fmt: skip
    notes = list(image.notes)
    kind = image.score_kind
    for label, word in CLASSES.items():
        images = sum(s.defective == label for s in data.calibration)
        if len(parts[label]) == 1 and not (label and images == 1):  # which has its note already
            many = f" part (group) with {images} images" if images > 1 else " calibration image"
            notes.append(f"the {kind} rests on a single {word}{many}")
    if not data.own_calibration:
        notes.append(WITHOUT_CALIBRATION)
    return image._replace(
        notes=tuple(notes), good_groups=len(parts[False]), defective_groups=len(parts[True])
    )


def decide(
    collected: CalibrationEvidence,
    calibration: Calibration,
    settings: DecisionSettings,
    data: WeakSplit,
) -> Decision:
    """The threshold on the image score, as set or from good parts, and its defect rate, if any.

    Raises:
        SettingsError: too few good parts for the rate, or a probability without ranking.
    """
    decision = threshold_of(collected, calibration, settings, data)
    if decision.is_p_value:
        return decision
    if settings.defect_rate is not None:
        return decision.at(settings.defect_rate)
    good, bad = data.parts
    source = f"as {bad} of {good + bad} parts in the training bins"
    return decision.at(bad / (good + bad), source)


def threshold_of(
    collected: CalibrationEvidence,
    calibration: Calibration,
    settings: DecisionSettings,
    data: WeakSplit,
) -> Decision:
    """The threshold at equal numbers of good and defective parts: as set, or from good parts.

    A p-value has a limit of its own, ``decision.p_value``: a score of one minus it, or that of the
    oddest good calibration image where these are too few to reach it.

    The logistic is increasing, so ranks of the pooled evidence are ranks of the score, and the
    finite-sample bound carries over. A slope of zero would tie all images and is an error,
    which only the training can show. Errors as `decide`.
    """
    rate, image = settings.max_false_rejects, calibration.image
    if rate is None and image.is_p_value:
        return _p_value_limit(image_score(collected.pooled, image), settings.p_value)
    if rate is None:
        source = f"decision.threshold = {settings.threshold:g} at equal numbers of good and "
        return Decision(settings.threshold, f"{source}defective parts", None)
    if not any(image.slope):
        raise SettingsError(
            "decision.max_false_rejects: the image probability does not rise with the evidence, so "
            "no threshold can bound the false rejects; see the calibration notes in log.jsonl. "
            + WITHOUT_BOUND
        )
    # On the path of prediction, so that an image equal to the threshold's stays on its good side.
    scores = image_score(collected.pooled, image)
    good = held_out_groups(data)
    found = false_reject_threshold(
        [float(scores[place]) for place, _ in good], rate, [group for _, group in good]
    )
    threshold = found.threshold
    if threshold >= 1:
        raise SettingsError(
            "decision.max_false_rejects: good calibration images score 1, so no threshold bounds "
            "the false rejects; look for wrong labels in the calibration part of manifest.csv. "
            + WITHOUT_BOUND
        )
    return Decision(
        threshold,
        f"at most {rate:.3g} of good parts rejected: from {count(found.groups, 'good part')} "
        f"(groups) with {count(found.normals, 'image')} that no stage has trained on; the chance "
        f"that an image of the next good part, of about as many images, is rejected is at most "
        f"{found.bound:.3g}",
        found.bound,
        is_p_value=image.is_p_value,
    )


def _p_value_limit(scores: NDArray[np.float64], p_value: float) -> Decision:
    """The threshold on one minus a p-value, from the scores of the good calibration images."""
    most, images = float(scores.max()), count(len(scores), "good calibration image")
    if most < 1 - p_value:
        source = f"odder than all {images}: decision.p_value = {p_value:g} would need more of them"
        return Decision(most, source, None, is_p_value=True)
    source = f"p-value below decision.p_value = {p_value:g}, against {images}"
    return Decision(1 - p_value, source, None, is_p_value=True)


def held_out_groups(data: WeakSplit) -> list[tuple[int, int]]:
    """(place among the calibration images, group) of the good ones of groups not trained on.

    A group of near duplicates may have images in fit too; it tells nothing of a new part.
    """
    trained = set(data.fit_groups)
    return [
        (place, group)
        for place, (sample, group) in enumerate(
            zip(data.calibration, data.calibration_groups, strict=True)
        )
        if not sample.defective and group not in trained
    ]


def check_calibration(data: WeakSplit, settings: Settings) -> None:
    """Check what the decision asks of the calibration images.

    Raises:
        SettingsError: good parts that cannot support the false-reject rate asked for; a threshold
            or a rate of a probability, where no defective image gives one.
    """
    if settings.calibration.image_evidence == "all" and not any(
        s.defective for s in data.calibration
    ):
        _check_no_probability(settings.decision)
    rate = settings.decision.max_false_rejects
    if rate is not None:
        groups = [group for _, group in held_out_groups(data)]
        false_reject_threshold([0.0] * len(groups), rate, groups)


def _check_no_probability(decision: DecisionSettings) -> None:
    """Check that nothing is asked of a probability where the score will be a p-value."""
    given = {
        "threshold": (decision.threshold, DecisionSettings().threshold, "set decision.p_value"),
        "defect_rate": (decision.defect_rate, None, "leave it out"),
    }
    for name, (value, default, advice) in given.items():
        if value != default:
            raise SettingsError(
                f"decision.{name} = {value:g}: no defective image is there to calibrate with, so "
                f"the image score is one minus a p-value, and no probability; {advice}, or add "
                "defective images of two parts or more"
            )


def rests_on(data: WeakSplit) -> str:
    """What a model has learnt from, in words: "good images alone", "14 defects of 3 parts"."""
    number, parts = sum(s.defective for s in data.train), data.parts[1]
    if not number:
        return GOOD_ALONE
    return count(number, "defect") + (f" of {count(parts, 'part')}" if parts < number else "")


def provenance(data: WeakSplit, separation: float | None, image: ImageCalibrator) -> dict[str, Any]:
    """Where a model comes from: data digest, counts, versions, machine, time."""
    return {
        "score_kind": image.score_kind,
        "rests_on": rests_on(data),
        "manifest_sha256": data.sha256,
        "counts": {name: list(counts) for name, counts in data.counts.items()},
        "separation": separation,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("cdgp", "torch", "timm", "numpy")},
    }
