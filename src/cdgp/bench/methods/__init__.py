"""One adapter a method: weakly labelled samples in, a scorer out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cdgp.data.manifest import Manifest
from cdgp.presets import Settings
from cdgp.progress import Progress


class Scored(NamedTuple):
    """What a method says of one picture."""

    anomaly_map: NDArray[np.float32]
    """(H, W) of the original picture, raw scores, higher is more anomalous."""
    image_score: float
    """As the method defines it, higher is more anomalous."""
    branches: Mapping[str, NDArray[np.float32]] = MappingProxyType({})
    """Further maps of the same size that are worth their own metrics."""


@dataclass(frozen=True)
class Fitted:
    """A trained method."""

    score: Callable[[NDArray[np.float32]], Scored]
    """Scores one picture, HWC float32 RGB in [0, 1] at its own size."""
    seconds: float
    """Training time."""
    probability: bool
    """Whether the image score is meant as a probability."""
    facts: dict[str, Any]
    """What the row should say besides: flags, settings of the method's own."""


Fit = Callable[[Manifest, Settings, Path, Progress], Fitted]
"""Manifest (its test part is not to be read), settings, folder for resumable state, progress."""
