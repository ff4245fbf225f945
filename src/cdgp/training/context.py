"""What every stage of training needs beside its data: device, checkpoints, log, progress."""

import ast
import ctypes
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy

from cdgp.errors import ImageError, OutputError, WeightsError
from cdgp.files import digest
from cdgp.presets import Settings, TrainingSettings
from cdgp.progress import Progress
from cdgp.training.devices import Share

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""Names of glibc's malloc.h."""

CODE = (
    "method/*.py", "training/*.py", "data/images.py", "data/colours.py", "data/decode.py",
    "data/formats.py", "data/jpeg*.py", "data/png.py", "data/pnm.py", "data/tiff.py",
)  # fmt: skip
"""Where the code lies that trained weights rest on."""

Log = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class TrainingContext:
    """Passed down unchanged from a run to its stages."""

    fabric: Fabric
    checkpoints: Path | None
    """Folder of the unfinished and finished stages; None keeps none."""
    log: Log
    progress: Progress
    devices: int = 1
    """How many processes, each with its device, ``fit.train`` starts for the stages."""

    @property
    def share(self) -> Share:
        """Which part of every batch this process works on."""
        return Share(self.fabric.global_rank, self.fabric.world_size)

    def checkpoint(self, file: str) -> Path | None:
        """Where a stage keeps its checkpoint."""
        return None if self.checkpoints is None else self.checkpoints / file


def new_context(
    checkpoints: Path | None, log: Path | None, progress: Progress, devices: int = 1
) -> TrainingContext:
    """A context on the GPU where there is one, else on the processor, in float32.

    ``checkpoints`` is a folder, ``log`` a file that takes one JSON line a record.
    """
    return TrainingContext(new_fabric(), checkpoints, json_log(log), progress, devices)


def new_fabric(processes: int = 1) -> Fabric:
    """Lightning Fabric on the GPU where there is one, else on the processor, in float32.

    As one of several processes it waits for the others, see ``processes``.
    """
    keep_freed_memory()
    # Not "auto": it would take Apple's GPU, which lacks the float64 that the factorisation needs.
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if processes == 1:
        fabric = Fabric(accelerator=accelerator, devices=1, precision="32-true")
    else:
        strategy = DDPStrategy(
            cluster_environment=LightningEnvironment(),  # not what a scheduler's variables suggest
            static_graph=True,  # some parameters never train: L without sigma_gradient
        )
        fabric = Fabric(
            accelerator=accelerator, devices=processes, precision="32-true", strategy=strategy
        )
    fabric.launch()
    return fabric


def reduced_dtype(settings: Settings) -> torch.dtype | None:
    """What the networks compute in while they train; None is float32."""
    return torch.bfloat16 if settings.training.precision == "bfloat16" else None


def reduced(dtype: torch.dtype | None, device: torch.device) -> torch.autocast:
    """Within it, convolutions and products of matrices are computed in a dtype; None: as given."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def json_log(path: Path | None) -> Log:
    """A function that appends one JSON line a record, or does nothing."""
    if path is None:
        return lambda record: None

    def append(record: Mapping[str, Any]) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror}") from error

    return append


def stage_key(settings: Settings, sha256: str, stage: Literal["dual_gp", "student"]) -> str:
    """Digest of everything that a stage's result depends on, the code that trains it included.

    ``sha256`` is that of the images that the stage depends on, see ``WeakSplit``.
    """
    used = settings.model_dump(mode="json")
    parts = shared_parts(settings) | {stage: used[stage]}
    if stage == "dual_gp":
        parts |= {
            "inducing": used["inducing"],
            "pictures": used["calibration"]["pictures"],
            "pooling_sharpness": used["calibration"]["pooling_sharpness"],
        }
        parts["dual_gp"] = {k: v for k, v in used["dual_gp"].items() if k != "no_separation"}
    text = json.dumps([stage, sha256, parts, code_sha256()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def code_sha256() -> str:
    """Digest of the code that trained weights rest on, without its comments and layout.

    After an upgrade that changes it, stages that an earlier version has trained are not used.
    """
    package = Path(__file__).parents[1]
    files = sorted(path for pattern in CODE for path in package.glob(pattern))
    trees = [ast.dump(ast.parse(path.read_bytes())) for path in files]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()


def shared_parts(settings: Settings) -> dict[str, Any]:
    """What every training depends on: seed, the images' preparation, backbone and its weights."""
    used = settings.model_dump(mode="json")
    parts = {key: used[key] for key in ("seed", "input_size", "data", "backbone")}
    if settings.tile:  # named only then, so that other digests stay as they are
        parts["tile"] = True
    if settings.training != TrainingSettings():  # the same
        parts["training"] = used["training"]
    if settings.backbone.weights not in ("hub", "bundled", "random"):
        try:
            parts["weights_sha256"] = digest(Path(settings.backbone.weights))
        except ImageError as error:
            raise WeightsError(f"--weights {error}") from error
    return parts


def keep_freed_memory() -> None:
    """Make glibc keep large freed buffers instead of handing them back to the kernel.

    Every training step frees and takes the same buffers; page faults otherwise double its time.
    Does nothing where the C library is another.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 256 * 2**20)


def return_freed_memory() -> None:
    """Undo ``keep_freed_memory``, for work that is not the same step again and again.

    Where large and small buffers are taken by turns, kept ones may be cut up until none fits.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 2**16)  # its default, like the next two
    libc.mallopt(M_TRIM_THRESHOLD, 2**17)
    libc.mallopt(M_TOP_PAD, 2**17)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that it adapts to by itself
    libc.malloc_trim(0)
