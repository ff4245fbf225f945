"""The one comparison of runtimes, on runtimes whose outputs are known, and who judges it."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit

from cdgp.artifact import Model
from cdgp.decision import Decision
from cdgp.errors import ModelFileError, TrainingError
from cdgp.export import BATCHES, check_parity
from cdgp.method.score import ImageCalibrator
from cdgp.runtimes.base import Array, Outputs
from cdgp.runtimes.parity import Parity, compare
from cdgp.runtimes.torch import TiledRuntime, TorchRuntime
from cdgp.training.dataset import InputCache, WeakDataset
from cdgp.training.fit import check_inference
from cdgp.workflows import Run

NORMALS = 99
Change = Callable[[Outputs], Outputs]


class Fake:
    """Outputs that are read off the images; all runs and what changes them are on record.

    Args:
        change: of the outputs of a run.
        only: size of batch that is changed; every one where None.
    """

    name = "fake"

    def __init__(self, change: Change | None = None, only: int | None = None) -> None:
        self.change, self.only = change, only
        self.sizes: list[int] = []

    def run(self, images: Array) -> Outputs:
        self.sizes.append(len(images))
        red, green, blue = (images[:, i] for i in range(3))
        a = blue.mean((1, 2))
        pooled = np.stack([a, red.max((1, 2))], 1)
        outputs = Outputs(red + green, green.copy(), red.copy(), pooled, expit(a))
        if self.change and self.only in (None, len(images)):
            return self.change(outputs)
        return outputs


@pytest.fixture
def model(tiny_run: Run) -> Model:
    """Its probability is the sigmoid of a(x), its threshold that of a(x) = 0.5.

    It has no distance, as tiled models have none, and the residual counts nothing.
    """
    trained = tiny_run.detector.model
    network = copy.copy(trained.network)
    network._modules = network._modules | {"distance": None}
    tail = trained.calibration.tail._replace(scores=torch.linspace(0, 1, NORMALS))
    image = ImageCalibrator((0.0, 0.0), (1.0, 1.0), (1.0, 0.0), 0.0)
    known = trained.calibration._replace(tail=tail, image=image)
    threshold = float(expit(0.5))
    decision = Decision(threshold, "of the test", None)
    return trained._replace(network=network, calibration=known, decision=decision)


def images(count: int) -> list[Array]:
    return list(np.random.default_rng(0).random((count, 3, 8, 8), np.float32))


def compared(model: Model, runtime: Fake, count: int = 17) -> Parity:
    return compare(Fake(), runtime, images(count), model, BATCHES)


def test_the_same_numbers_have_no_difference(model: Model) -> None:
    parity = compared(model, Fake())
    assert parity.images == 17 and parity.worst == parity.surprisal == parity.ranks == 0
    assert parity.changed == ()
    assert parity.scores == parity.expected_scores
    expected = [float(expit(image[2].mean(dtype=np.float64))) for image in images(17)]
    assert parity.scores == pytest.approx(expected, abs=1e-7)


def test_every_image_goes_through_every_batch_and_is_read_once(model: Model) -> None:
    read, advanced = 0, 0
    reference, runtime = Fake(), Fake()

    def inputs() -> Iterator[Array]:
        nonlocal read
        for image in images(17):
            read += 1
            assert read - len(reference.sizes) <= 15, "few images are in memory"
            yield image

    def advance() -> None:
        nonlocal advanced
        advanced += 1

    compare(reference, runtime, inputs(), model, BATCHES, advance)
    assert read == 17 and reference.sizes == [1] * 17
    assert sorted(runtime.sizes) == sorted([1] * 17 + [3] * 5 + [2] + [5] * 3 + [2])
    assert advanced == 17 * len(BATCHES)


@pytest.mark.parametrize("name", ["fused", "pooled", "pred_score", "surprisal"])
@pytest.mark.parametrize("only", BATCHES)
def test_one_moved_value_is_found(model: Model, name: str, only: int) -> None:
    """In the last image of each batch of one size alone."""

    def move(outputs: Outputs) -> Outputs:
        value: Array = getattr(outputs, name)
        value.reshape(len(value), -1)[-1, -1] += 0.25
        return outputs

    parity = compared(model, Fake(move, only))
    assert getattr(parity, name) == pytest.approx(0.25, abs=1e-6)
    others = {"fused", "pooled", "pred_score", "surprisal"} - {name}
    assert all(getattr(parity, other) == 0 for other in others)
    assert parity.worst == (0 if name == "surprisal" else getattr(parity, name))


@pytest.mark.parametrize("name", ["fused", "pooled", "pred_score", "surprisal"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_a_number_is_the_largest_difference(model: Model, name: str, value: float) -> None:
    """In one image of a batch of three alone, where nothing else would show it."""

    def spoil(outputs: Outputs) -> Outputs:
        getattr(outputs, name).reshape(3, -1)[1, 0] = value
        return outputs

    assert getattr(compared(model, Fake(spoil, only=3)), name) == math.inf


def test_ranks_among_the_normal_scores(model: Model) -> None:
    """A surprisal of -log(r / 100) is rank r: the neighbour is allowed, the one beyond counts."""
    ranks = np.arange(1.0, 65).reshape(8, 8)

    def of_rank(shift: int) -> Change:
        surprisal = -np.log((ranks + shift) / (NORMALS + 1)).astype(np.float32)
        return lambda outputs: outputs._replace(
            surprisal=np.broadcast_to(surprisal, (len(outputs.fused), 8, 8))
        )

    for shift, share in [(0, 0.0), (1, 0.0), (2, 1.0)]:
        parity = compare(Fake(of_rank(0)), Fake(of_rank(shift)), images(4), model, BATCHES)
        assert parity.ranks == share
    one = compare(Fake(of_rank(0)), Fake(of_rank(1)), images(4), model, BATCHES)
    assert one.surprisal == pytest.approx(math.log(2), abs=1e-6), "at the end of the tail"


def test_changed_decisions(model: Model) -> None:
    """Images are counted once, whatever the number of batches that they change in."""
    means = np.stack([image[2].mean() for image in images(17)])
    raised = [i for i, mean in enumerate(means.tolist()) if mean <= 0.5 < mean + 0.02]
    assert 0 < len(raised) < 17

    def raise_pooled(outputs: Outputs) -> Outputs:
        return outputs._replace(pooled=outputs.pooled + 0.02)

    parity = compared(model, Fake(raise_pooled))
    assert parity.changed == tuple(raised)
    assert parity.record()["labels"] == len(raised)
    in_threes = compared(model, Fake(raise_pooled, only=3))
    assert in_threes.changed == tuple(i for i in raised if i < 15), "the last two are a batch of 2"
    assert in_threes.scores == in_threes.expected_scores, "scores are those of single images"


def test_the_record_keeps_the_keys_of_the_file_format(model: Model) -> None:
    assert list(compared(model, Fake()).record()) == [
        "pictures", "fused", "pooled", "pred_score", "surprisal", "ranks", "labels",
    ]  # fmt: skip


class Changed(TorchRuntime):
    """The torch runtime with other outputs, whole and tiled."""

    change: Change

    def run(self, images: Array) -> Outputs:
        return self.change(super().run(images))

    def run_tiled(self, image: Array, window: tuple[int, int]) -> Outputs:
        return self.change(super().run_tiled(image, window))


def moved(outputs: Outputs) -> Outputs:
    return outputs._replace(pred_score=outputs.pred_score + 0.02)


def broken(outputs: Outputs) -> Outputs:
    return outputs._replace(pred_score=outputs.pred_score * math.nan)


def decided_otherwise(outputs: Outputs) -> Outputs:
    return outputs._replace(pooled=np.where(outputs.pooled > 0.5, np.float32(-9), np.float32(9)))


def changed_runtime(model: Model, change: Change) -> Changed:
    runtime = Changed(model, torch.device("cpu"))
    runtime.change = change
    return runtime


@pytest.fixture(params=[False, True], ids=["whole", "tiled"])
def dataset(request: pytest.FixtureRequest, tiny_run: Run) -> WeakDataset:
    samples = tiny_run.manifest.weak_split().calibration[:3]
    return WeakDataset(samples, InputCache((64, 64), 65535, tile=request.param))


@pytest.mark.parametrize("change", [moved, broken, decided_otherwise])
def test_export_and_training_refuse_what_moves(
    model: Model, dataset: WeakDataset, change: Change
) -> None:
    fast = changed_runtime(model, change)
    with pytest.raises(TrainingError, match="--resume"):
        check_inference(fast, model, dataset)
    if not dataset.tile:  # tiled models cannot be exported
        plain = TorchRuntime(model, torch.device("cpu"))
        inputs = [dataset.input(i).numpy() for i in range(len(dataset))]
        parity = compare(plain, fast, inputs, model, (1, 3))
        with pytest.raises(ModelFileError, match=r"a\.onnx"):
            check_parity(parity, Path("a.onnx"), "fake")


def test_export_and_training_accept_the_same_numbers(model: Model, dataset: WeakDataset) -> None:
    fast = changed_runtime(model, lambda outputs: outputs)
    record = check_inference(fast, model, dataset)
    assert record == {"fused": 0, "pooled": 0, "pred_score": 0, "decisions_changed": 0}
    if not dataset.tile:
        inputs = [dataset.input(i).numpy() for i in range(len(dataset))]
        parity = compare(fast, fast, inputs, model, (1,))
        check_parity(parity, Path("a.onnx"), "fake")


def test_a_decision_may_change_next_to_the_threshold(model: Model, dataset: WeakDataset) -> None:
    """In training alone: a bound on false rejects puts the threshold on the score of an image."""
    plain = TorchRuntime(model, torch.device("cpu"))
    inputs = [dataset.input(i).numpy() for i in range(len(dataset))]
    runtime = TiledRuntime(plain, dataset.size) if dataset.tile else plain
    scores = compare(runtime, runtime, inputs, model, (1,)).scores
    at_a_score = model._replace(decision=model.decision._replace(threshold=max(scores)))
    fast = changed_runtime(at_a_score, lambda o: o._replace(pooled=o.pooled + 1e-3))
    assert check_inference(fast, at_a_score, dataset)["decisions_changed"] == 0
    below = model._replace(decision=model.decision._replace(threshold=max(scores) - 0.02))
    fast = changed_runtime(below, lambda o: o._replace(pooled=o.pooled - 1))
    with pytest.raises(TrainingError):
        check_inference(fast, below, dataset)
