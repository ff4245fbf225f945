"""What the runtimes share: their protocol, the name of the input, and optional packages."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cdgp.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

    from cdgp.method.network import Outputs

INPUT = "images"


class Runtime(Protocol):
    """Something that runs the inference graph."""

    name: str

    def run(self, images: "Tensor") -> "Outputs":
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and scores, all on the CPU."""
        ...


def require_package(name: str) -> Any:
    """Import an optional package.

    Raises:
        SettingsError: it is not installed; the message says which extra has it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = "openvino" if name in ("openvino", "nncf") else "onnx"
        raise SettingsError(
            f"this needs {name}, which is not installed: pip install 'cdgp[{extra}]', or in a "
            f"clone pip install -e '.[{extra}]'"
        ) from error


def source_name(source: object) -> str:
    """How an error message calls the source of a graph: by its path, where it has one."""
    return str(source) if isinstance(source, Path) else "the exported graph"
