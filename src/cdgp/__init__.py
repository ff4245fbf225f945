"""Defect detection and localisation learnt from two bins of images, good and defective.

``fit`` trains, ``load`` opens a trained model, and its ``predict`` returns a ``Prediction``. The
names are looked up when they are first used, so that ``import cdgp`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdgp.data.manifest import Manifest
    from cdgp.inference import Detector, Prediction, load
    from cdgp.presets import settings
    from cdgp.training.fit import fit

__all__ = ["Detector", "Manifest", "Prediction", "fit", "load", "settings"]

_HOMES = {
    "Detector": "cdgp.inference",
    "Manifest": "cdgp.data.manifest",
    "Prediction": "cdgp.inference",
    "fit": "cdgp.training.fit",
    "load": "cdgp.inference",
    "settings": "cdgp.presets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cdgp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
