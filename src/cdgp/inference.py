"""Pictures to predictions: map at the picture's own size, probability, decision, regions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from cdgp import artifact
from cdgp.data.images import MIN_SIDE, read_picture, to_input
from cdgp.errors import PictureError
from cdgp.method.calibration import upsample
from cdgp.method.detector import Calibration, Evidence, Network, Scores, calibrated
from cdgp.presets import Settings

MAX_REGIONS = 100
"""At most so many regions a picture are reported, the highest peaks first."""


@dataclass(frozen=True)
class Region:
    """A connected part of the picture that is rarer than the region level on good parts."""

    x: int
    """Left edge of its box, in pixels of the picture."""
    y: int
    """Top edge of its box."""
    width: int
    height: int
    area: int
    """In pixels of the picture."""
    peak: float
    """Largest surprisal inside, in nats: minus the log of the normal-tail probability."""


@dataclass(frozen=True)
class Prediction:
    """What the detector says of one picture."""

    anomaly_map: NDArray[np.float32]
    """(H, W) of the original picture; higher is more anomalous. In nats, comparable between
    pictures of one model: surprisal plus image_weight times log probability."""
    surprisal: NDArray[np.float32]
    """(H, W) of the original picture; minus the log of the normal-tail probability, at least 0."""
    pred_score: float
    """Calibrated probability that the part is defective, in [0, 1]."""
    pred_label: bool
    """True: defective, that is, ``pred_score`` is above the model's threshold."""
    regions: tuple[Region, ...]
    """Highest peak first."""
    pred_mask: NDArray[np.bool_]
    """(H, W) of the original picture, True where a pixel is rarer than the region level."""


class Detector:
    """A trained model, ready to predict.

    Example:
        >>> import cdgp                                              # doctest: +SKIP
        >>> detector = cdgp.load("runs/x/model.safetensors")         # doctest: +SKIP
        >>> detector.predict("part.png").pred_score                  # doctest: +SKIP
        0.97
    """

    def __init__(self, model: artifact.Model, device: torch.device | None = None) -> None:
        self.model = model
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def settings(self) -> Settings:
        return self.model.settings

    @property
    def threshold(self) -> float:
        """A picture is called defective when its probability is above this."""
        return self.model.decision.threshold

    @property
    def colour_scale(self) -> tuple[float, float]:
        """Ends of the one colour scale of all this model's maps: 0 and the largest counted
        surprisal, in nats."""
        tail = self.model.calibration.tail
        return 0.0, min(tail.floor, float(np.log(len(tail.scores) + 1)))

    @property
    def region_level(self) -> float:
        """Surprisal, in nats, above which a pixel belongs to a region."""
        return float(-np.log(self.settings.decision.region_level))

    def predict(self, picture: str | Path | NDArray[Any]) -> Prediction:
        """Predict one picture.

        Args:
            picture: a path, or an array as ``as_picture`` takes it.

        Raises:
            PictureError: a file that cannot be read, or an array of another kind.
        """
        if isinstance(picture, str | Path):
            pixels = read_picture(Path(picture), self.settings.data.white_level)
        else:
            pixels = as_picture(picture, self.settings.data.white_level)
        size = self.settings.input_size
        _, scores = score_picture(
            self.model.network, self.model.calibration, pixels, size, self.device
        )
        native = (pixels.shape[0], pixels.shape[1])
        anomaly_map = upsample(scores.anomaly_map, native)[0].numpy()
        surprisal = upsample(scores.surprisal, native)[0].numpy()
        probability = float(torch.sigmoid(scores.logit.double())[0])
        return Prediction(
            anomaly_map,
            surprisal,
            probability,
            probability > self.threshold,
            find_regions(surprisal, self.region_level),
            surprisal > self.region_level,
        )


@torch.inference_mode()
def score_picture(
    network: Network,
    calibration: Calibration,
    pixels: NDArray[np.float32],
    size: tuple[int, int],
    device: torch.device,
) -> tuple[Evidence, Scores]:
    """Evidence and calibrated scores, on the processor, of one HWC float32 RGB picture in [0, 1].

    The scores are at the network's input ``size`` (H, W), the evidence is at a quarter of it.
    """
    evidence = network(to_input(pixels, size)[None].to(device))
    evidence = Evidence(*(part.float().cpu() for part in evidence))
    return evidence, calibrated(evidence, calibration, size)


def resized(values: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """A map (h, w) at another (height, width), bilinear; the same where it has that size."""
    if values.shape == tuple(size):
        return values
    found: NDArray[np.float32] = upsample(torch.from_numpy(values)[None], size)[0].numpy()
    return found


def load(path: str | Path) -> Detector:
    """Load a trained model from its file, or from the folder of a run.

    Raises:
        ModelFileError: no such file, damaged, not ours, or of a newer version.
    """
    return Detector(artifact.load(model_file(Path(path))))


def model_file(path: Path) -> Path:
    """The model file that a path means: itself, or the one in the folder of a run."""
    return path / "model.safetensors" if path.is_dir() else path


def as_picture(array: NDArray[Any], white_level: int) -> NDArray[np.float32]:
    """An array as HWC float32 RGB in [0, 1].

    Args:
        array: (H, W) grey or (H, W, 3) RGB, uint8, uint16 up to the white level, or float in
            [0, 1].
        white_level: the value that means white in uint16.

    Raises:
        PictureError: another shape, type or range.
    """
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise PictureError(
            f"an array of shape {array.shape}: expected (H, W) grey or (H, W, 3) RGB"
        )
    if min(array.shape[:2]) < MIN_SIDE:
        raise PictureError(
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
        raise PictureError(f"an array of {array.dtype}: expected uint8, uint16 or float in [0, 1]")
    if not bool(np.isfinite(array).all()) or array.min() < 0 or array.max() > scale:
        raise PictureError(
            f"an array of {array.dtype} with values outside [0, {scale}] or not finite"
        )
    pixels = array.astype(np.float32) / np.float32(scale)
    return np.ascontiguousarray(np.broadcast_to(pixels[..., None], (*pixels.shape, 3))
                                if pixels.ndim == 2 else pixels)  # fmt: skip


def find_regions(surprisal: NDArray[np.float32], level: float) -> tuple[Region, ...]:
    """8-connected parts of an (H, W) map above a level, highest peak first."""
    labels, count = ndimage.label(surprisal > level, structure=np.ones((3, 3)))
    if not count:
        return ()
    index = np.arange(1, count + 1)
    areas = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    peaks = ndimage.maximum(surprisal, labels, index)
    regions = [
        Region(
            x=int(columns.start),
            y=int(rows.start),
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
