"""One adapter a method: weakly labelled pictures in, a scorer out.

A new method is one file with a ``fit`` of the type ``Fit``, and one line in ``grid.METHODS``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from cdgp.data.manifest import WeakSplit
from cdgp.presets import Settings
from cdgp.progress import Progress


class Scored(NamedTuple):
    """What a method says of one picture."""

    size: tuple[int, int]
    """(height, width) of the picture."""
    anomaly_map: NDArray[np.float32]
    """(h, w) of any resolution over the whole picture, raw scores, higher is more anomalous."""
    image_score: float
    """As the method defines it, higher is more anomalous."""
    branches: Mapping[str, NDArray[np.float32]] = MappingProxyType({})
    """Further maps that are worth their own metrics."""


class Pipeline(NamedTuple):
    """The whole computation, for its cost."""

    network: nn.Module
    """Everything whose parameters count."""
    run: Callable[[Tensor], object]
    """From an input (1, 3, H, W) in [0, 1], on the network's device, to map and image score."""


@dataclass(frozen=True)
class Fitted:
    """A trained method."""

    score: Callable[[Sequence[Path]], Iterator[Scored]]
    """Scores picture files one by one, in their order."""
    seconds: float
    """Training time."""
    probability: bool
    """Whether the image score is meant as a probability."""
    facts: dict[str, Any]
    """What the row should say besides: flags, settings of the method's own."""
    pipeline: Callable[[], Pipeline]
    """The trained network, for its cost."""


Fit = Callable[[WeakSplit, Settings, Path, Progress], Fitted]
"""Pictures to train on, settings, folder for resumable state, progress."""
