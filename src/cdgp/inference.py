"""Images to predictions: map at the image's own size, probability, decision, regions."""

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
from cdgp.method.calibration import image_probability, upsample
from cdgp.presets import Settings
from cdgp.runtimes import EXPORTED, Runtime, open_exported
from cdgp.runtimes.card import Card, card_of
from cdgp.runtimes.torch import TorchRuntime

MAX_REGIONS = 100
"""At most so many regions an image are reported, the highest peaks first."""


@dataclass(frozen=True)
class Region:
    """A connected part of the image that is rarer than the region level on good parts."""

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
    """What the detector says of one image."""

    anomaly_map: NDArray[np.float32]
    """(H, W) of the original image; higher is more anomalous. In nats, comparable between
    images of one model: surprisal plus image_weight times log probability."""
    surprisal: NDArray[np.float32]
    """(H, W) of the original image; minus the log of the normal-tail probability, at least 0."""
    pred_score: float
    """Calibrated probability that the part is defective, in [0, 1]."""
    pred_label: bool
    """True: defective, that is, ``pred_score`` is above the model's threshold."""
    regions: tuple[Region, ...]
    """Highest peak first."""
    pred_mask: NDArray[np.bool_]
    """(H, W) of the original image, True where a pixel is rarer than the region level."""


class Detector:
    """A trained model, ready to predict.

    Example:
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
        """A detector that runs in torch, on the GPU where there is one and nothing is said."""
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Only where it was compared with float32, which needs a GPU when the model is made.
        checked = device.type == "cuda" and "inference" in model.provenance
        chosen = model.settings.inference if checked else None
        return cls(card_of(model), TorchRuntime(model, device, chosen), model)

    @property
    def model(self) -> artifact.Model:
        """The trained model with its networks.

        Raises:
            ModelFileError: this detector runs an exported graph.
        """
        if self._model is None:
            raise ModelFileError("an exported model holds no networks; load model.safetensors")
        return self._model

    @property
    def settings(self) -> Settings:
        return self.card.settings

    @property
    def threshold(self) -> float:
        """An image is called defective when its probability is above this."""
        return self.card.decision.threshold

    @property
    def colour_scale(self) -> tuple[float, float]:
        """Ends of the one colour scale of all this model's maps: 0 and the largest counted
        surprisal, in nats."""
        return 0.0, self.card.largest_surprisal

    @property
    def region_level(self) -> float:
        """Surprisal, in nats, above which a pixel belongs to a region."""
        return float(-np.log(self.settings.decision.region_level))

    def predict(self, image: str | Path | NDArray[Any]) -> Prediction:
        """Predict one image.

        Args:
            image: a path, or an array as ``as_image`` takes it.

        Raises:
            ImageError: a file that cannot be read, or an array of another kind.
        """
        if isinstance(image, str | Path):
            pixels = read_image(Path(image), self.settings.data.white_level)
        else:
            pixels = as_image(image, self.settings.data.white_level)
        native = (pixels.shape[0], pixels.shape[1])
        if self.settings.tile:
            if not isinstance(self.runtime, TorchRuntime):
                raise ModelFileError(
                    "an exported model cannot cut images into windows; load model.safetensors"
                )
            whole = torch.from_numpy(pixels).permute(2, 0, 1)
            found = self.runtime.run_tiled(whole, self.settings.input_size)
        else:
            found = self.runtime.run(to_input(pixels, self.settings.input_size)[None])
        anomaly_map, surprisal = (
            resized(m[0].numpy(), native) for m in (found.anomaly_map, found.surprisal)
        )
        # Of the pooled evidence and in float64, as where the threshold was set.
        probability = float(image_probability(found.pooled, self.card.image)[0])
        return Prediction(
            anomaly_map,
            surprisal,
            probability,
            probability > self.threshold,
            find_regions(surprisal, self.region_level),
            surprisal > self.region_level,
        )


def resized(values: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """A map (h, w) at another (height, width), bilinear; the same where it has that size."""
    if values.shape == tuple(size):
        return values
    found: NDArray[np.float32] = upsample(torch.from_numpy(values)[None], size)[0].numpy()
    return found


def load(path: str | Path, threads: int | None = None) -> Detector:
    """Load a trained model from its file, from the folder of a run, or from an exported file.

    Args:
        path: ``model.safetensors``, a run's folder, or what ``cdgp export`` wrote (``.onnx``, or
            ``.xml`` with its ``.bin``).
        threads: that the runtime may use; its own choice where None. In torch this holds for the
            whole process.

    Raises:
        ModelFileError: no such file, damaged, not ours, or of a newer version.
        SettingsError: the runtime of an exported file is not installed, or impossible threads.
    """
    if threads is not None and threads < 1:
        raise SettingsError(f"threads = {threads}: at least one is needed")
    path = Path(path)
    if path.suffix in EXPORTED:
        return Detector(*open_exported(path, threads))
    if threads is not None:
        torch.set_num_threads(threads)
    return Detector.of(artifact.load(model_file(path)))


def model_file(path: Path) -> Path:
    """The model file that a path means: itself, or the one in the folder of a run."""
    return path / "model.safetensors" if path.is_dir() else path


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
    return np.ascontiguousarray(np.broadcast_to(pixels[..., None], (*pixels.shape, 3))
                                if pixels.ndim == 2 else pixels)  # fmt: skip


def find_regions(surprisal: NDArray[np.float32], level: float) -> tuple[Region, ...]:
    """8-connected parts of an (H, W) map above a level, highest peak first."""
    above = surprisal > level
    if not above.any():
        return ()
    # Most of an image is quiet: only the box around what is not has to be labelled.
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
