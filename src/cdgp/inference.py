"""From an image to a prediction: map at the image's own size, probability, decision, regions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from cdgp import artifact
from cdgp.data.images import MIN_SIDE, read_image, to_input
from cdgp.errors import ImageError, ModelFileError, SettingsError
from cdgp.method.calibration import BALANCED, image_probability
from cdgp.method.network import Outputs
from cdgp.method.resize import upsample
from cdgp.presets import Settings
from cdgp.run_folder import model_file
from cdgp.runtimes import EXPORTED, Runtime, open_exported
from cdgp.runtimes.card import Card, card_of
from cdgp.runtimes.torch import TorchRuntime

MAX_REGIONS = 100
"""An image has at most so many regions: those with the highest peaks."""


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
    the log of the image's probability at equal numbers of good and defective parts, in nats;
    comparable between all images of one model, whatever the defect rate."""
    surprisal: NDArray[np.float32]
    """(H, W) of the original image; minus the log of the normal-tail probability, in nats, at
    least 0."""
    pred_score: float
    """Calibrated probability that the part is defective, in [0, 1]. It refers to a line with the
    defect rate of the model's decision."""
    pred_label: bool
    """True where the part is called defective: ``pred_score`` is above the model's threshold."""
    regions: tuple[Region, ...]
    """Highest peak first."""
    pred_mask: NDArray[np.bool_]
    """(H, W) of the original image; True where the surprisal is above the region level."""


class Detector:
    """A trained model, ready to predict.

    Examples:
        >>> import cdgp                                              # doctest: +SKIP
        >>> detector = cdgp.load("runs/x/model.safetensors")         # doctest: +SKIP
        >>> detector.predict("part.png").pred_score                  # doctest: +SKIP
        0.97
    """

    def __init__(self, card: Card, runtime: Runtime, model: artifact.Model | None = None) -> None:
        self.card = card
        self.runtime = runtime
        self._model = model

    @classmethod
    def of(cls, model: artifact.Model, device: torch.device | None = None) -> "Detector":
        """A detector that runs in torch.

        Without a device it runs on the GPU where there is one, else on the processor.
        """
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # A faster precision or mode is used only if training compared it with float32 on a GPU.
        checked = device.type == "cuda" and "inference" in model.provenance
        chosen = model.settings.inference if checked else None
        return cls(card_of(model), TorchRuntime(model, device, chosen), model)

    @property
    def model(self) -> artifact.Model:
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
        """Whether the probability rests on a single part of a class, so that digits mean little."""
        return self.card.image.rests_on_one

    @property
    def colour_scale(self) -> tuple[float, float]:
        """Ends, in nats, of the one colour scale of all maps of this model: 0 and the largest
        surprisal that its normal pixels can show."""
        return 0.0, self.card.largest_surprisal

    @property
    def region_level(self) -> float:
        """A pixel belongs to a region when its surprisal, in nats, is above this."""
        return float(-np.log(self.settings.decision.region_level))

    def predict(self, image: str | Path | NDArray[Any]) -> Prediction:
        """Predict one image.

        Args:
            image: a path, or an array as ``as_image`` takes it.

        Raises:
            ImageError: a file that cannot be read, or an array of another kind.
        """
        return self.predict_pixels(self.read(image))

    def read(self, image: str | Path | NDArray[Any]) -> NDArray[np.float32]:
        """An image as ``predict_pixels`` takes it: HWC float32 RGB in [0, 1], at its own size."""
        white_level = self.settings.data.white_level
        if isinstance(image, str | Path):
            return read_image(Path(image), white_level)
        return as_image(image, white_level)

    def predict_pixels(self, pixels: NDArray[np.float32]) -> Prediction:
        """Predict an image that is already read: HWC float32 RGB in [0, 1]."""
        if self.settings.tile:
            found = self._run_tiled(pixels)
        else:
            found = self.runtime.run(to_input(pixels, self.settings.input_size)[None])
        native = (pixels.shape[0], pixels.shape[1])
        surprisal = resize_map(found.surprisal[0].numpy(), native)
        decision = self.card.decision
        # From the pooled evidence and in float64, exactly as the threshold was set.
        balanced, score = (
            float(image_probability(found.pooled, self.card.image, rate)[0])
            for rate in (BALANCED, decision.defect_rate)
        )
        pred_score, pred_label = decision.told(balanced, score)
        return Prediction(
            anomaly_map=resize_map(found.anomaly_map[0].numpy(), native),
            surprisal=surprisal,
            pred_score=pred_score,
            pred_label=pred_label,
            regions=find_regions(surprisal, self.region_level),
            pred_mask=surprisal > self.region_level,
        )

    def _run_tiled(self, pixels: NDArray[np.float32]) -> Outputs:
        if not isinstance(self.runtime, TorchRuntime):
            raise ModelFileError(
                "an exported model cannot cut images into windows; load model.safetensors"
            )
        whole = torch.from_numpy(pixels).permute(2, 0, 1)
        return self.runtime.run_tiled(whole, self.settings.input_size)


def resize_map(values: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """A map (h, w) at another (height, width), bilinear; unchanged where it has that size."""
    found: NDArray[np.float32] = upsample(torch.from_numpy(values)[None], size)[0].numpy()
    return found


def load(
    path: str | Path, threads: int | None = None, defect_rate: float | None = None
) -> Detector:
    """Load a trained model from its file, from the folder of a run, or from an exported file.

    Args:
        path: ``model.safetensors``, a run's folder, or what ``cdgp export`` wrote (``.onnx``, or
            ``.xml`` with its ``.bin``).
        threads: number that the runtime may use; its own choice where None. In torch this holds
            for the whole process.
        defect_rate: share of defective parts on the line, which ``pred_score`` then refers to; the
            model's own where None. No decision, map or order of images changes with it.

    Raises:
        ModelFileError: no such file, damaged, not ours, or of a newer version.
        SettingsError: the runtime of an exported file is not installed, ``threads`` < 1, or a
            defect rate outside (0, 1).
    """
    if threads is not None and threads < 1:
        raise SettingsError(f"threads = {threads}: at least one is needed")
    path = Path(path)
    if path.suffix in EXPORTED:
        card, runtime = open_exported(path, threads)
        if defect_rate is not None:
            card = card._replace(decision=card.decision.at(defect_rate))
        return Detector(card, runtime)
    if threads is not None:
        torch.set_num_threads(threads)
    model = artifact.load(model_file(path))
    if defect_rate is not None:
        model = model._replace(decision=model.decision.at(defect_rate))
    return Detector.of(model)


def as_image(array: NDArray[Any], white_level: int) -> NDArray[np.float32]:
    """An array as HWC float32 RGB in [0, 1].

    Args:
        array: (H, W) grey or (H, W, 3) RGB, uint8, uint16 up to the white level, or float in
            [0, 1].
        white_level: the value that means white in uint16.

    Raises:
        ImageError: another shape, type or range.
    """
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise ImageError(f"an array of shape {array.shape}: expected (H, W) grey or (H, W, 3) RGB")
    if min(array.shape[:2]) < MIN_SIDE:
        raise ImageError(
            f"an array of {array.shape[1]} × {array.shape[0]} pixels: smaller than the least that "
            f"can be scored, {MIN_SIDE} × {MIN_SIDE}"
        )
    if array.dtype == np.uint8:
        scale = 255
    elif array.dtype == np.uint16:
        scale = white_level
    elif np.issubdtype(array.dtype, np.floating):
        scale = 1
    else:
        raise ImageError(f"an array of {array.dtype}: expected uint8, uint16 or float in [0, 1]")
    if not bool(np.isfinite(array).all()) or array.min() < 0 or array.max() > scale:
        raise ImageError(
            f"an array of {array.dtype} with values outside [0, {scale}] or not finite"
        )
    pixels = array.astype(np.float32) / np.float32(scale)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    return np.ascontiguousarray(pixels)


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
