"""One adapter a method: weakly labelled images in, a scorer out.

To add a method, write a file here with a ``fit`` of the type ``Fit`` and add it to
``grid.METHODS``. Name the packages that it needs there and in the extra `bench`, and import them
inside ``fit``. A method that learns from good images only leaves the defective ones out itself.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS

from cdgp_bench.errors import NotRunError


class MethodOptions(BaseModel):
    """A method's own hyperparameters; a plan changes them under ``[options.METHOD]``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def decides(self) -> dict[str, Any]:
        """The values that a row depends on; files count by their content."""
        return self.model_dump(mode="json")


def images_in(path: str) -> list[Path]:
    """A folder's images, its subfolders' too, sorted; none where the path is empty."""
    return sorted(p for p in Path(path).rglob("*") if p.suffix in IMG_EXTENSIONS) if path else []


def images_digest(path: str) -> str:
    """Digest of the names and sizes of a folder's images; empty where there are none."""
    folder = Path(path)
    sizes = [[p.relative_to(folder).as_posix(), p.stat().st_size] for p in images_in(path)]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest() if sizes else ""


def require_images(method: str, path: str, what: str) -> None:
    """Check the folder of images that a method needs from outside."""
    if not images_in(path):
        given = f"there are none in {path}" if path else "nothing was given"
        raise NotRunError(
            f"{method} needs a folder of {what}: set options.{method}.auxiliary in the plan; "
            f"{given}"
        )


class Scored(NamedTuple):
    """A method's scores of one image."""

    size: tuple[int, int]
    """(height, width) of the image."""
    anomaly_map: NDArray[np.float32]
    """(h, w) of any resolution over the whole image, raw scores, higher is more anomalous."""
    image_score: float
    """As the method defines it, higher is more anomalous."""
    branches: Mapping[str, NDArray[np.float32]] = MappingProxyType({})
    """Further maps that get their own metrics."""


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
    """Scores image files one by one, in their order."""
    seconds: float
    """Training time."""
    probability: bool
    """Whether the image score is meant as a probability."""
    facts: dict[str, Any]
    """Further facts for the row, such as the method's own options; ``separated`` is False where
    training found no difference between the labels, which the tables then say."""
    pipeline: Callable[[], Pipeline]
    """The trained network, for its cost."""


Fit = Callable[..., Fitted]
"""Called with the images to train on (``WeakSplit``), ``Settings``, the folder of checkpoints,
``Progress`` and, where the method has some, ``MethodOptions``.

Called again with the same arguments it loads what it has trained. A checkpoint's name holds the
digest of all that decides it (``training.context.stage_key``); it is never a pickle.
"""
