"""What a user can do with images: check, train, evaluate, predict.

Commands and Python call these same functions, so both leave the same files; ``cdgp.run_folder``
lists them. A workflow checks everything that it can before the long work starts, and returns a
typed result. Where ``out`` is None it writes nothing.

The names are looked up when they are first used: to predict, nothing of training is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdgp.workflows.check import CheckedData, check_data
    from cdgp.workflows.evaluate import EvaluatedRun, evaluate_run
    from cdgp.workflows.predict import PredictedFolder, predict_folder
    from cdgp.workflows.train import Run, train_run

__all__ = [
    "CheckedData", "EvaluatedRun", "PredictedFolder", "Run", "check_data", "evaluate_run",
    "predict_folder", "train_run",
]  # fmt: skip

_MODULES = {
    "CheckedData": "check",
    "EvaluatedRun": "evaluate",
    "PredictedFolder": "predict",
    "Run": "train",
    "check_data": "check",
    "evaluate_run": "evaluate",
    "predict_folder": "predict",
    "train_run": "train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cdgp.workflows' has no attribute {name!r}")
    return getattr(import_module(f"cdgp.workflows.{_MODULES[name]}"), name)
