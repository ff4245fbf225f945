"""From an image to a prediction: map at the image's own size, score, decision, regions."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from cdgp.data import images
from cdgp.data.images import MIN_SIDE, as_input, no_content
from cdgp.data.resize import resize_map
from cdgp.errors import ImageError, ModelFileError, SettingsError
from cdgp.files import absolute, path_of
from cdgp.method.score import BALANCED, ImageCalibrator, image_score
from cdgp.presets import Settings
from cdgp.run_folder import model_file
from cdgp.runtimes import EXPORTED, Runtime, open_exported
from cdgp.runtimes.base import Outputs, is_out_of_memory
from cdgp.runtimes.card import Card, card_of

if TYPE_CHECKING:
    import torch

    from cdgp import artifact

MAX_REGIONS = 100
"""An image has at most so many regions: those with the highest peaks."""
TAKEN = (
    "taken are a path (str or os.PathLike) and a NumPy array, (H, W) grey or (H, W, 3) RGB, of "
    "uint8, uint16, or float in [0, 1]"
)
ADVICE = {
    "PIL.": 'give np.asarray(image.convert("RGB")), or the path of its file',
    "torch.": "give image.cpu().numpy(); of a tensor with its channels first, "
    "image.permute(1, 2, 0).cpu().numpy()",
    "numpy.ma.": "give image.filled(0), or another value for what is masked",
    "builtins.list": "give np.asarray(image, np.uint8); several images are predicted one by one",
    "builtins.tuple": "give np.asarray(image, np.uint8); several images are predicted one by one",
    "builtins.byte": "write the content of an image file to a file and give its path",
    "builtins.memoryview": "give np.asarray(image) where it holds pixels",
    "builtins.NoneType": "cv2.imread, for one, gives it where it cannot read a file",
    "_io.": "give the path of the file",
    "tempfile.": "give the path of the file",
}
"""What to do instead, by how the name of a kind begins."""


@dataclass(frozen=True)
class Region:
    """A connected part of the image whose surprisal is above the region level."""

    x: int
    """Left edge of its box, in pixels of the image."""
    y: int
    """Top edge of its box."""
    width: int
    height: int
    area: int
    """In pixels of the image."""
    peak: float
    """Largest surprisal inside, in nats: minus the log of the normal-tail probability."""


@dataclass(frozen=True)
class Prediction:
    """The result for one image."""

    anomaly_map: NDArray[np.float32]
    """(H, W) of the original image; higher is more anomalous. Surprisal plus image_weight times
    the log of the image's probability (by the prior of good images alone, where the score is a
    p-value) at equal numbers of good and defective parts, in nats;
    comparable between all images of one model, whatever the defect rate."""
    surprisal: NDArray[np.float32]
    """(H, W) of the original image; minus the log of the normal-tail probability, in nats, at
    least 0."""
    pred_score: float
    """Calibrated probability that the part is defective, in [0, 1]. It refers to a line with the
    defect rate of the model's decision. Where ``score_kind`` is "p-value", it is one minus the
    p-value of the part being good instead, and refers to no rate."""
    pred_label: bool
    """True where the part is called defective: ``pred_score`` is above the model's threshold, or
    the image holds nothing to see, as ``warnings`` then say."""
    regions: tuple[Region, ...]
    """Highest peak first."""
    pred_mask: NDArray[np.bool_]
    """(H, W) of the original image; True where the surprisal is above the region level."""
    warnings: tuple[str, ...] = ()
    """What is in doubt about the image itself: its colours, or that it holds nothing to see."""
    score_kind: str = "probability"
    """What ``pred_score`` is, as ``Detector.score_kind``."""
    rests_on: str = ""
    """What the model has learnt from, as ``Detector.rests_on``."""


class Detector:
    """A trained model, ready to predict.

    Safe in threads: one detector gives the same results in all of them. Safe after a fork, except
    on a GPU. A detector that was loaded from a file can be sent to another process: it is loaded
    there again, from the same file.

    Examples:
        >>> import cdgp                                              # doctest: +SKIP
        >>> detector = cdgp.load("runs/x/model.safetensors")         # doctest: +SKIP
        >>> detector.predict("part.png").pred_score                  # doctest: +SKIP
        0.97
    """

    def __init__(self, card: Card, runtime: Runtime, model: "artifact.Model | None" = None) -> None:
        self.card = card
        self.runtime = runtime
        self._model = model
        self._loaded_by: dict[str, Any] | None = None
        """The arguments of ``load``; None where this was made in memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self._loaded_by is None:
            raise ModelFileError(
                "a detector that was not loaded from a file cannot be sent to another process; "
                "write the model, and load it there with cdgp.load"
            )
        return _load_again, (self._loaded_by, self.card.image)

    @classmethod
    def of(cls, model: "artifact.Model", device: "torch.device | None" = None) -> "Detector":
        """A detector that runs in torch.

        Without a device it runs on the GPU where there is one, else on the processor.
        """
        import torch  # an exported file needs neither

        from cdgp.runtimes.torch import TiledRuntime, TorchRuntime

        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # A faster precision or mode is used only if training compared it with float32 on a GPU.
        checked = device.type == "cuda" and "inference" in model.provenance
        chosen = model.settings.inference if checked else None
        whole = TorchRuntime(model, device, chosen)
        tile, window = model.settings.tile, model.settings.input_size
        return cls(card_of(model), TiledRuntime(whole, window) if tile else whole, model)

    @property
    def model(self) -> "artifact.Model":
        """The trained model with its networks; ModelFileError where this runs an exported graph."""
        if self._model is None:
            raise ModelFileError("an exported model holds no networks; load model.safetensors")
        return self._model

    @property
    def settings(self) -> Settings:
        return self.card.settings

    @property
    def threshold(self) -> float:
        """An image is called defective when its ``pred_score`` is above this."""
        return self.card.decision.threshold

    @property
    def coarse(self) -> bool:
        """Whether the score rests on a single part of a class, so that digits mean little."""
        return self.card.image.rests_on_one

    @property
    def score_kind(self) -> str:
        """What ``pred_score`` is: "probability", or "p-value" for one minus a p-value, where no
        defective image has calibrated the model."""
        return self.card.image.score_kind

    @property
    def rests_on(self) -> str:
        """What the model has learnt from, in words: "good images alone", "14 defects", "14 defects
        of 3 parts"; of a model that does not say so, the defective images among its training
        images; empty where it does not tell these either."""
        made = self.card.provenance
        if "rests_on" in made or "counts" not in made:
            return str(made.get("rests_on", ""))
        number = sum(bad for name, (_, bad) in made["counts"].items() if name != "test")
        return f"{number} defect{'' if number == 1 else 's'}"

    @property
    def colour_scale(self) -> tuple[float, float]:
        """Ends, in nats, of the one colour scale of all maps of this model: 0 and the largest
        surprisal that its normal pixels can show."""
        return 0.0, self.card.largest_surprisal

    @property
    def region_level(self) -> float:
        """A pixel belongs to a region when its surprisal, in nats, is above this."""
        return float(-np.log(self.settings.decision.region_level))

    def predict(self, image: str | os.PathLike[str] | NDArray[Any]) -> Prediction:
        """Predict one image.

        Args:
            image: a path, or an array as ``as_image`` takes it. OpenCV's arrays are BGR, which
                looks like RGB: give ``image[..., ::-1]``.

        Raises:
            ImageError: a file that cannot be read, an array or an object of another kind, too
                little memory, or no finite result.
        """
        pixels, warnings = self.read_with_warnings(image)
        source = image if isinstance(image, str | os.PathLike) else None
        return self.predict_pixels(pixels, warnings, source)

    def read(self, image: str | os.PathLike[str] | NDArray[Any]) -> NDArray[np.float32]:
        """An image as ``predict_pixels`` takes it: HWC float32 RGB in [0, 1], at its own size."""
        return self.read_with_warnings(image)[0]

    def read_with_warnings(
        self, image: str | os.PathLike[str] | NDArray[Any]
    ) -> tuple[NDArray[np.float32], tuple[str, ...]]:
        """As ``read``, with what is in doubt about the colours of a file, in sentences."""
        white_level = self.settings.data.white_level
        if isinstance(image, str | os.PathLike) and isinstance(path := os.fspath(image), str):
            first_page = self.settings.data.first_page
            with memory_errors(path):
                pixels, facts = images.read_with_facts(Path(path), white_level, first_page)
            return pixels, facts.warnings
        with memory_errors("an array"):
            return as_image(image, white_level), ()

    def predict_pixels(
        self,
        pixels: NDArray[np.float32],
        warnings: tuple[str, ...] = (),
        source: object = None,
    ) -> Prediction:
        """Predict an image that is already read: HWC float32 RGB in [0, 1].

        An image that holds nothing to see is never called good, whatever its score.

        Args:
            pixels: as ``read_with_warnings`` gives them.
            warnings: those of ``read_with_warnings``.
            source: its path, with which an error begins; its size where None.

        Raises:
            ImageError: too little memory, or no finite result.
        """
        prepared = self.prepare(pixels, warnings, source)
        (found,) = self.infer([prepared])
        return self.finish(prepared, found)

    def prepare(
        self,
        pixels: NDArray[np.float32],
        warnings: tuple[str, ...] = (),
        source: object = None,
    ) -> "Prepared":
        """The first part of ``predict_pixels``, before the network; arguments as there."""
        size = f"{pixels.shape[1]} × {pixels.shape[0]} pixels"
        name = f"an image of {size}" if source is None else f"{source} ({size})"
        with memory_errors(name):
            given = as_input(pixels, self.settings)
            return Prepared(name, pixels, warnings, no_content(pixels), given)

    def infer(self, images: Sequence["Prepared"]) -> list[Outputs]:
        """The second part: the network's answer for each image, (1, h, w), as one batch."""
        with memory_errors(", ".join(image.name for image in images)):
            if self.settings.tile:
                found = [self.runtime.run(image.input[None]) for image in images]
            else:
                found = self.runtime.run(np.stack([image.input for image in images])).split()
        for image, outputs in zip(images, found, strict=True):
            check_finite(outputs, image.name)
        return found

    def finish(self, image: "Prepared", found: Outputs) -> Prediction:
        """The last part: from the network's answer to the image's own size and the decision."""
        with memory_errors(image.name):
            native = (image.pixels.shape[0], image.pixels.shape[1])
            surprisal = resize_map(found.surprisal[0], native)
            decision = self.card.decision
            # From the pooled evidence and in float64, exactly as the threshold was set.
            balanced, score = (
                float(image_score(found.pooled, self.card.image, rate)[0])
                for rate in (BALANCED, decision.defect_rate)
            )
            pred_score, pred_label = decision.told(balanced, score)
            return Prediction(
                anomaly_map=resize_map(found.anomaly_map[0], native),
                surprisal=surprisal,
                pred_score=pred_score,
                pred_label=bool(image.nothing) or pred_label,
                regions=find_regions(surprisal, self.region_level),
                pred_mask=surprisal > self.region_level,
                warnings=(*image.warnings, image.nothing) if image.nothing else image.warnings,
                score_kind=self.score_kind,
                rests_on=self.rests_on,
            )


class Prepared(NamedTuple):
    """An image that is read and resized, before the network."""

    name: str
    """Its path and size, for messages."""
    pixels: NDArray[np.float32]
    """HWC RGB in [0, 1], at its own size."""
    warnings: tuple[str, ...]
    nothing: str
    """Why it holds nothing to see; empty where it does."""
    input: NDArray[np.float32]
    """(3, h, w), at the network's size; at its own where it is cut into windows."""


@contextmanager
def memory_errors(image: str) -> Iterator[None]:
    """What any library raises where memory is short, as an ImageError that begins with a name."""
    try:
        yield
    except Exception as error:
        # The reader of image files gives an ImageError of whatever its decoder raises.
        if not is_out_of_memory(error.__cause__ if isinstance(error, ImageError) else error):
            raise
        raise ImageError(
            f"{image}: needs more memory than there is; crop it, make it smaller, or use a machine "
            "with more"
        ) from error


def check_finite(found: Outputs, image: str) -> None:
    """Raise ImageError where a network's answer is no number: nothing can be told from it."""
    odd = [name for name, part in found._asdict().items() if not np.isfinite(part).all()]
    if odd:
        raise ImageError(
            f"{image}: the model gives no finite number for it ({', '.join(odd)}), so that it can "
            "be called neither good nor defective; if others fail too, train or export again"
        )


def load(
    path: str | os.PathLike[str], threads: int | None = None, defect_rate: float | None = None
) -> Detector:
    """Load a trained model from its file, from the folder of a run, or from an exported file.

    Args:
        path: ``model.safetensors``, a run's folder, or what ``cdgp export`` wrote (``.onnx``, or
            ``.xml`` with its ``.bin``).
        threads: number that the runtime may use for a prediction; its own choice where None.
            Predictions at the same time have threads of their own. In torch the number holds for
            the whole process, and a forked process has one.
        defect_rate: share of defective parts on the line, which ``pred_score`` then refers to; the
            model's own where None. No decision, map or order of images changes with it. Refused
            where the score is a p-value.

    Raises:
        ModelFileError: no such file, damaged, not ours, or of a newer version.
        SettingsError: the runtime of an exported file is not installed, ``threads`` < 1, a defect
            rate outside (0, 1) or of a p-value, or arguments of another kind.
    """
    place = path_of(path, "the model")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise SettingsError(f"threads = {threads!r}: a whole number of at least one is needed")
    if place.suffix == ".bin":
        raise ModelFileError(f"{place}: holds weights alone; give the .xml beside it")
    if place.suffix.lower() in EXPORTED:
        card, runtime = open_exported(place, threads)
        if defect_rate is not None:
            card = card._replace(decision=card.decision.at(defect_rate))
        detector = Detector(card, runtime)
    else:
        from cdgp import artifact
        from cdgp.runtimes.torch import set_threads

        if threads is not None:
            set_threads(threads)
        model = artifact.load(model_file(place))
        if defect_rate is not None:
            model = model._replace(decision=model.decision.at(defect_rate))
        detector = Detector.of(model)
    detector._loaded_by = {
        "path": absolute(place), "threads": threads, "defect_rate": defect_rate,
    }  # fmt: skip
    return detector


def _load_again(arguments: dict[str, Any], image: ImageCalibrator) -> Detector:
    detector = load(**arguments)
    if detector.card.image != image:
        raise ModelFileError(
            f"{arguments['path']}: holds another model than the detector that was sent to this "
            "process; load it anew"
        )
    return detector


def as_image(array: Any, white_level: int) -> NDArray[np.float32]:
    """An array as HWC float32 RGB in [0, 1], in memory of its own.

    Args:
        array: (H, W) or (H, W, 1) grey or (H, W, 3) RGB, uint8, uint16 up to the white level, or
            float in [0, 1]; of any byte order and memory layout.
        white_level: the value that means white in uint16.

    Raises:
        ImageError: no plain array, or of another shape, type or range.
    """
    array = _plain(array)
    _check_shape(array.shape)
    kind = array.dtype.kind
    if (kind, array.dtype.itemsize) == ("u", 1):
        scale = 255
    elif (kind, array.dtype.itemsize) == ("u", 2):
        scale = white_level
    elif kind == "f":
        scale = 1
    else:
        advice = "image.astype(np.uint8)" + (
            " * 255" if kind == "b" else " where it holds 0 to 255"
        )
        raise ImageError(
            f"an array of {array.dtype}: expected uint8, uint16 or float in [0, 1]; give {advice}"
        )
    if not bool(np.isfinite(array).all()) or array.min() < 0 or array.max() > scale:
        raise ImageError(
            f"an array of {array.dtype} with values outside [0, {scale}] or not finite"
            + ("; divide it by the value that means white" if kind == "f" else "")
        )
    pixels = array.astype(np.float32) / np.float32(scale)
    if pixels.ndim == 2 or pixels.shape[2] == 1:
        pixels = np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(pixels, np.float32)


def _plain(image: object) -> NDArray[Any]:
    """An array of NumPy's own kind; ImageError, with a line that converts it, for all else."""
    if isinstance(image, np.ndarray) and not isinstance(image, np.ma.MaskedArray):
        return np.asarray(image)
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(image).__mro__]
    advice = [text for kind in kinds for start, text in ADVICE.items() if kind.startswith(start)]
    raise ImageError(
        f"a {kinds[0].removeprefix('builtins.')} is no image: {TAKEN}; "
        f"{advice[0] if advice else 'convert it with np.asarray'}"
    )


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) == 4:
        advice = "; several images are predicted one by one"
    elif len(shape) == 3 and shape[2] == 4:
        advice = "; leave its transparency out: image[..., :3]"
    elif len(shape) == 3 and shape[0] in (1, 3):
        advice = "; its channels come first: give image.transpose(1, 2, 0)"
    else:
        advice = ""
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3)):
        raise ImageError(
            f"an array of shape {shape}: expected (H, W) grey or (H, W, 3) RGB{advice}"
        )
    if min(shape[:2]) < MIN_SIDE:
        raise ImageError(
            f"an array of {shape[1]} × {shape[0]} pixels: smaller than the least that can be "
            f"scored, {MIN_SIDE} × {MIN_SIDE}"
        )


def find_regions(surprisal: NDArray[np.float32], level: float) -> tuple[Region, ...]:
    """8-connected parts of an (H, W) map above a level, highest peak first."""
    above = surprisal > level
    if not above.any():
        return ()
    # Most of an image is below the level: label only the box around the rest.
    top, bottom = np.flatnonzero(above.any(1))[[0, -1]]
    left, right = np.flatnonzero(above.any(0))[[0, -1]]
    box = above[top : bottom + 1, left : right + 1]
    labels, count = ndimage.label(box, structure=np.ones((3, 3)))
    inside = labels[box] - 1
    areas = np.bincount(inside, minlength=count)
    peaks = np.full(count, -np.inf, surprisal.dtype)
    np.maximum.at(peaks, inside, surprisal[top : bottom + 1, left : right + 1][box])
    regions = [
        Region(
            x=int(left + columns.start),
            y=int(top + rows.start),
            width=int(columns.stop - columns.start),
            height=int(rows.stop - rows.start),
            area=int(area),
            peak=round(float(peak), 4),
        )
        for (rows, columns), area, peak in zip(
            ndimage.find_objects(labels), areas, peaks, strict=True
        )
    ]
    regions.sort(key=lambda region: (-region.peak, -region.area, region.y, region.x))
    return tuple(regions[:MAX_REGIONS])
