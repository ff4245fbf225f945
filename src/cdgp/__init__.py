"""Defect detection and localisation learnt from two bins of images, good and defective.

``fit`` trains, ``load`` opens a trained model, and its ``predict`` returns a ``Prediction``. These
names are looked up when they are first used, so that ``import cdgp`` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cdgp.errors import (
    CdgpError,
    DataError,
    ImageError,
    Interrupted,
    LeakError,
    ModelFileError,
    NoSeparationError,
    OutputError,
    SettingsError,
    TrainingError,
    WeightsError,
)

if TYPE_CHECKING:
    from cdgp.data.manifest import Manifest
    from cdgp.inference import Detector, Prediction, load
    from cdgp.presets import settings
    from cdgp.workflows import train_run as fit

__all__ = [
    "CdgpError", "DataError", "Detector", "ImageError", "Interrupted", "LeakError", "Manifest",
    "ModelFileError", "NoSeparationError", "OutputError", "Prediction", "SettingsError",
    "TrainingError", "WeightsError", "fit", "load", "settings",
]  # fmt: skip

_HOMES = {
    "Detector": ("cdgp.inference", "Detector"),
    "Manifest": ("cdgp.data.manifest", "Manifest"),
    "Prediction": ("cdgp.inference", "Prediction"),
    "fit": ("cdgp.workflows", "train_run"),
    "load": ("cdgp.inference", "load"),
    "settings": ("cdgp.presets", "settings"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cdgp' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
