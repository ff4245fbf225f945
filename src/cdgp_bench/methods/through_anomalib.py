"""What the adapters of anomalib's models share: rows of good images, training, scoring.

The models, their losses and their data module are anomalib's; they see the backbone, the images
and the input size of this benchmark. Images pass through the product's own door and are handed
over as 8-bit files at the input size, since anomalib saturates 16-bit files and pairs masks by
their position in a list. Nothing is validated while training: early stopping and the validation
that anomalib takes from the test part by default would look at test images.
"""

import functools
import json
import logging
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from cdgp.training.stages import pretrained
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import WeakSample, WeakSplit
from cdgp.errors import SettingsError, TrainingError
from cdgp.files import atomic_write, digest, save_tensors
from cdgp.method.backbone import Encoder
from cdgp.presets import Settings
from cdgp.progress import Advance, Progress, Quiet
from cdgp.training.loop import new_fabric, read_state, return_freed_memory
from cdgp_bench.methods import Fitted, MethodOptions
from cdgp_bench.methods.common import fitted_network, state_of

CURVE_POINTS = 40
ALL_STAGES = (0, 1, 2)
PARTS_OFF: dict[str, Any] = {"post_processor": False, "evaluator": False, "visualizer": False}
"""Raw maps are wanted: anomalib's own scaling, metrics and images stay out."""


class Stages(nn.Module):
    """Some of an encoder's stages, in the place of the network that anomalib would fetch."""

    def __init__(self, encoder: Encoder, chosen: Sequence[int]) -> None:
        super().__init__()
        self.trunk = encoder.trunk
        self.chosen = tuple(chosen)

    def forward(self, images: Tensor) -> list[Tensor]:
        features = self.trunk(images)
        return [features[index] for index in self.chosen]


def stage_names(encoder: Encoder) -> list[str]:
    """What timm calls the stages at strides 4, 8 and 16."""
    info: Any = encoder.trunk.feature_info
    return list(info.module_name())


def input_steps(settings: Settings, encoder: Encoder | None) -> Any:
    """anomalib's pre-processor: the input size, and the backbone's scale where there is one."""
    from anomalib.pre_processing import PreProcessor
    from torchvision.transforms.v2 import Compose, Normalize, Resize

    steps: list[Any] = [Resize(settings.input_size, antialias=True)]
    if encoder is not None:
        steps.append(Normalize(encoder.mean.flatten().tolist(), encoder.std.flatten().tolist()))
    return PreProcessor(transform=Compose(steps))


def refuse_sides(name: str, settings: Settings) -> None:
    """Networks that halve five times and double back need sides that are multiples of 32.

    Raises:
        SettingsError: the input's are not.
    """
    if any(side % 32 for side in settings.input_size):
        height, width = settings.input_size
        raise SettingsError(
            f"{name} needs an input_size with multiples of 32 on both sides; {height}x{width} was "
            "given"
        )


def rows(samples: Sequence[WeakSample], settings: Settings, folder: Path) -> dict[str, list[Any]]:
    """anomalib's table of the good images among ``samples``, all of them for training.

    Each is decoded by the product's own door and written as an 8-bit file at the input size, once.

    Args:
        samples: images with their labels; there is no mask to pass on.
        settings: input size and white level.
        folder: where the files go.
    """
    height, width = settings.input_size
    paths = []
    for sample in samples:
        if sample.defective:
            continue
        name = f"{digest(sample.image)}-{settings.data.white_level}.png"
        path = folder / f"inputs-{height}x{width}" / name
        if not path.is_file():
            values = eight_bit(sample.image, settings).permute(1, 2, 0).numpy()
            with atomic_write(path) as temporary:
                Image.fromarray(values).save(temporary, format="PNG")
        paths.append(str(path))
    return {"image_path": paths, "label_index": [0] * len(paths), "split": ["train"] * len(paths)}


def eight_bit(path: Path, settings: Settings) -> Tensor:
    """(3, H, W) uint8 RGB of one image at the input size."""
    image = to_input(read_image(path, settings.data.white_level), settings.input_size)
    return image.mul(255).round().to(torch.uint8)


class Recipe(NamedTuple):
    """How one of anomalib's models is built and trained."""

    name: str
    build: Callable[[Any, Settings, Any], Any]
    """Its Lightning module, untrained, from an encoder or None, settings and options."""
    images: Sequence[WeakSample]
    """What it trains on; defective ones among them are left out."""
    batch: int
    length: Mapping[str, int]
    """``max_epochs`` or ``max_steps`` of Lightning's trainer."""
    facts: Mapping[str, Any]
    """What the row says besides."""
    pretrained: bool = True
    """Whether it takes the benchmark's backbone."""
    collects: bool = False
    """Whether it gathers features in one pass instead of training by steps; freed memory then goes
    back to the kernel."""
    finish: Callable[[Any], None] | None = None
    """Called with the trained module before it is kept."""


def fit_through_anomalib(
    recipe: Recipe,
    data: WeakSplit,
    settings: Settings,
    states: Path,
    progress: Progress,
    options: MethodOptions,
) -> Fitted:
    """Train one of anomalib's modules on good images, or take it from ``states``.

    A training that was killed starts again: its state would be one of Lightning's pickles.
    """
    device = new_fabric().device
    without = () if recipe.pretrained else ("backbone", "weights_sha256")
    mark, kept = state_of(recipe.name, options, data.sha256, settings, states, without)

    def built() -> Any:
        encoder = pretrained(settings) if recipe.pretrained else None
        with quiet_and_seeded(settings.seed):
            return recipe.build(encoder, settings, options)

    if not kept.is_file():
        module = built()
        began = time.monotonic()
        table = rows(recipe.images, settings, states)
        if recipe.collects:
            return_freed_memory()
        with quiet_and_seeded(settings.seed, bars=not isinstance(progress, Quiet)):
            curve = _train(recipe, module, table, device, progress)
            if recipe.finish is not None:
                recipe.finish(module)
        told = {"step": "0", "fingerprint": mark, "seconds": str(time.monotonic() - began),
                "curve": json.dumps(curve)}  # fmt: skip
        save_tensors(kept, module.state_dict(), told)
    # Read back even now, so that a second run cannot differ by how its tensors lie in memory.
    module = built()
    found = read_state(kept, mark)
    if found is None:
        raise TrainingError(f"{kept}: made with other settings; remove it")
    module.load_state_dict(found.tensors)
    module.to(device).eval()
    transform = module.pre_processor.transform

    @torch.inference_mode()
    def run(image: Tensor) -> tuple[NDArray[np.float32], float]:
        # What training saw has passed through 8-bit files.
        told = module.model(transform(image.mul(255).round().div(255)))
        return told.anomaly_map[0].squeeze(0).float().cpu().numpy(), float(told.pred_score[0])

    curve = json.loads(found.metadata["curve"])
    facts = {
        "code": f"anomalib {version('anomalib')}",
        "options": options.decides(),
        **recipe.facts,
        **({"learning_curve": curve} if curve else {}),
    }
    return fitted_network(module.model, run, settings, device, found.seconds, False, facts)


def _train(
    recipe: Recipe,
    module: Any,
    table: dict[str, list[Any]],
    device: torch.device,
    progress: Progress,
) -> list[list[float]]:
    """Run Lightning's trainer; returns (step, loss) at evenly spaced steps."""
    from anomalib.data import Tabular
    from lightning.pytorch import Trainer

    datamodule = Tabular(
        name=recipe.name, samples=table, train_batch_size=recipe.batch, eval_batch_size=1,
        num_workers=0, test_split_mode="none", val_split_mode="none",
    )  # fmt: skip
    datamodule.setup()
    a_pass = len(datamodule.train_dataloader())
    steps = recipe.length.get("max_steps") or recipe.length["max_epochs"] * a_pass
    losses: list[float] = []
    with progress.phase(recipe.name, steps) as advance, interruptible():
        Trainer(
            **{"max_epochs": -1, **recipe.length},
            accelerator=device.type, devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            num_sanity_val_steps=0, callbacks=[_teller(advance, losses)],
        ).fit(module, datamodule=datamodule)  # fmt: skip
    return averaged(losses)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C means here what it means elsewhere: Lightning would end the program itself."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def averaged(losses: Sequence[float]) -> list[list[float]]:
    """The mean loss of each of up to 40 equal stretches, with the step that ends it."""
    if not any(losses):  # methods without a loss tell zeros
        return []
    stretches = [s for s in np.array_split(np.arange(len(losses)), CURVE_POINTS) if len(s)]
    return [[int(s[-1]) + 1, round(float(np.mean([losses[i] for i in s])), 6)] for s in stretches]


def _teller(advance: Advance, losses: list[float]) -> Any:
    """A callback that tells the progress and keeps the losses."""
    from lightning.pytorch import Callback

    class Teller(Callback):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = float(outputs["loss"] if isinstance(outputs, dict) else outputs)
            losses.append(loss)
            advance(f"loss {loss:.3f}" if loss else "")

    return Teller()


@contextmanager
def quiet_and_seeded(seed: int, bars: bool = False) -> Iterator[None]:
    """Lightning's chatter off, and all global random numbers seeded, for the block alone.

    Args:
        seed: of Python's, NumPy's and torch's global generators, which anomalib draws from.
        bars: whether its own progress bars may show.
    """
    import lightning.pytorch  # sets its own level when it is first imported
    from tqdm.std import tqdm

    names = (lightning.pytorch.__name__, "anomalib")
    loggers = [logging.getLogger(name) for name in names]
    before = random.getstate(), np.random.get_state(), [x.level for x in loggers]  # noqa: NPY002
    devices = list(range(torch.cuda.device_count()))
    silent = tqdm.__init__ if bars else functools.partialmethod(tqdm.__init__, disable=True)
    try:
        with (
            torch.random.fork_rng(devices=devices),
            warnings.catch_warnings(),
            mock.patch.object(tqdm, "__init__", silent),
        ):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        for logger, level in zip(loggers, before[2], strict=True):
            logger.setLevel(level)
