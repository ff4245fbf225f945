"""Images in bounded queues: the results of one by one, and no image at another's cost."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.helpers import save_image

import cdgp
from cdgp import streaming
from cdgp.errors import ImageError, OutputError, SettingsError
from cdgp.inference import Detector, Prediction, Prepared
from cdgp.prefetch import AHEAD, in_order, read_ahead
from cdgp.runtimes.base import Outputs
from cdgp.streaming import Threads, stream
from cdgp.workflows import Run


def kept(_: object, image: Prepared, prediction: Prediction) -> Prediction:
    return prediction


@pytest.fixture
def paths(odd_images: list[NDArray[np.uint8]], tmp_path: Path) -> list[Path]:
    """Eleven images of unlike sizes, the fifth of which cannot be read."""
    found = [tmp_path / f"{i:02}.png" for i in range(11)]
    for i, path in enumerate(found):
        image = odd_images[i % len(odd_images)]
        Image.fromarray(np.roll(image, i, axis=1)).save(path)
    found[4].write_bytes(b"no image")
    return found


@pytest.mark.parametrize("threads", [Threads(1, 1), Threads(3, 1), Threads(2, 4), Threads(5, 16)])
@pytest.mark.parametrize("target", ["torch", "onnx", "openvino"])
def test_results_are_those_of_one_by_one(
    tiny_run: Run, exported: dict[str, Path], paths: list[Path], target: str, threads: Threads
) -> None:
    detector = tiny_run.detector if target == "torch" else cdgp.load(exported[target])
    found = list(stream(detector, ((p.name, p) for p in paths), kept, threads))
    assert [name for name, _ in found] == [p.name for p in paths]
    for path, (_, prediction) in zip(paths, found, strict=True):
        if path is paths[4]:
            assert isinstance(prediction, ImageError) and str(path) in str(prediction)
            continue
        assert isinstance(prediction, Prediction)
        expected = detector.predict(path)
        same = expected.pred_label == prediction.pred_label
        if threads.batch == 1:
            same = same and np.array_equal(expected.anomaly_map, prediction.anomaly_map)
            assert same and expected.pred_score == prediction.pred_score
            assert expected.regions == prediction.regions
        assert same and prediction.pred_score == pytest.approx(expected.pred_score, abs=1e-6)
        np.testing.assert_allclose(
            prediction.anomaly_map, expected.anomaly_map, rtol=2e-5, atol=2e-4
        )


class Stub:
    """A runtime that answers by the images' own means, and cannot bear some of them."""

    name = "stub"

    def __init__(self, unbearable: float = -1) -> None:
        self.unbearable = unbearable
        self.batches: list[int] = []

    def run(self, images: NDArray[np.float32]) -> Outputs:
        self.batches.append(len(images))
        means = images.mean((1, 2, 3))
        if (np.abs(means - self.unbearable) < 1e-3).any():
            raise RuntimeError("the network fails")
        maps = np.broadcast_to(means[:, None, None], (len(images), 64, 64)).astype(np.float32)
        pooled = np.repeat(means[:, None], 3, axis=1)
        return Outputs(maps, maps, maps, pooled, means)


def stubbed(run: Run, runtime: Stub) -> Detector:
    return Detector(run.detector.card, runtime)


def shades(folder: Path, count: int) -> list[Path]:
    """Images of rising brightness, with some content."""
    found = []
    for i in range(count):
        image = np.full((40, 40, 3), 20 + i, np.uint8)
        image[:20:2] += 10
        found.append(folder / f"{i:03}.png")
        save_image(found[-1], image)
    return found


def test_a_batch_that_fails_costs_only_the_image_that_fails(tiny_run: Run, tmp_path: Path) -> None:
    paths = shades(tmp_path, 9)
    mean = float(tiny_run.detector.read(paths[5]).mean())
    runtime = Stub(mean)
    found = dict(stream(stubbed(tiny_run, runtime), enumerate(paths), kept, Threads(1, 4)))
    failed = [key for key, result in found.items() if isinstance(result, Exception)]
    assert failed == [5] and "the network fails" in str(found[5])
    assert runtime.batches == [4, 4, 1, 1, 1, 1, 1], "the batch of the culprit, then one by one"


def test_what_finishing_raises_comes_back_with_its_image(tiny_run: Run, tmp_path: Path) -> None:
    def finish(key: int, image: Prepared, prediction: Prediction) -> int:
        if key == 3:
            raise OutputError("the disk is full")
        return key

    paths = shades(tmp_path, 6)
    found = dict(stream(stubbed(tiny_run, Stub()), enumerate(paths), finish, Threads(2, 2)))
    assert isinstance(found.pop(3), OutputError)
    assert found == {key: key for key in (0, 1, 2, 4, 5)}


def test_images_are_taken_as_there_is_room_and_not_before(tiny_run: Run, tmp_path: Path) -> None:
    paths, taken = shades(tmp_path, 60), []

    def images() -> Iterator[tuple[int, Path]]:
        for i, path in enumerate(paths):
            taken.append(i)
            yield i, path

    threads, ahead = Threads(2, 2), 0
    with closing(stream(stubbed(tiny_run, Stub()), images(), kept, threads)) as found:
        for done, _ in enumerate(found):
            ahead = max(ahead, len(taken) - done)
    workers, batch = threads
    assert ahead <= 2 * workers * batch + 2 * batch, "begun, being made, being handed out"


def test_large_images_leave_little_room(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PIXEL_BYTES", 1)
    paths, taken, most = shades(tmp_path, 30), [], 0
    images = ((taken.append(i) or i, p) for i, p in enumerate(paths))  # type: ignore[func-returns-value]
    for done, _ in enumerate(stream(stubbed(tiny_run, Stub()), images, kept, Threads(4, 8))):
        if done > 20:  # the first are begun before their size is known
            most = max(most, len(taken) - done)
    assert most <= 3


def test_what_is_left_early_is_not_worked_on(tiny_run: Run, tmp_path: Path) -> None:
    runtime, images, threads = Stub(), enumerate(shades(tmp_path, 40)), Threads(2, 1)
    with closing(stream(stubbed(tiny_run, runtime), images, kept, threads)) as found:
        next(found)
    # Closed, nothing is in work any more.
    seen = len(runtime.batches)
    assert seen <= 2 * threads.workers + 1
    assert next(images)[0] <= 2 * threads.workers + 1
    assert len(runtime.batches) == seen


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-3, 4)])
def test_fewer_than_one_thread_or_image_is_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(SettingsError, match=r"--(workers|batch) (0|-3): at least 1"):
        Threads.of(*numbers)
    assert Threads.of().workers >= 1 and Threads.of(7, None) == (7, streaming.BATCH)


def test_in_order_gives_all_in_order_and_raises_in_place() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(i: int) -> int:
        time.sleep(0.001 * (i % 3))
        if i == 7:
            raise ValueError("seven")
        return -i

    given: Sequence[Any] = range(20)
    with ThreadPoolExecutor(4) as pool:
        found = in_order(pool, work, given, lambda: 5)
        assert [next(found) for _ in range(7)] == [-i for i in range(7)]
        with pytest.raises(ValueError, match="seven"):
            next(found)
        assert list(in_order(pool, work, range(7), lambda: 1)) == [-i for i in range(7)]
        assert not list(in_order(pool, work, [], lambda: 3))


def test_reading_ahead_keeps_the_order_stays_bounded_and_raises_in_place() -> None:
    begun: list[int] = []

    def read(i: int) -> int:
        begun.append(i)
        if i == 7:
            raise ValueError("seven")
        return -i

    found = read_ahead(read, range(100))
    for i in range(7):
        assert next(found) == -i
        assert max(begun) <= i + AHEAD
    with pytest.raises(ValueError, match="seven"):
        next(found)
    assert max(begun) <= 7 + AHEAD
