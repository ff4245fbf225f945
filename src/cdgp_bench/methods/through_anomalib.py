"""What the adapters of anomalib's models share: rows of good images, training, scoring.

The models, their losses and their data module are anomalib's; backbone, images and input size are
those of this benchmark. Images are read by the product's own reader and handed over as 8-bit files
at the input size, since anomalib saturates 16-bit files and pairs masks by their position in a
list. Nothing is validated during training: early stopping, and the validation that anomalib takes
from the test part by default, would use test images.
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
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn

from cdgp.data.images import network_input
from cdgp.data.manifest import WeakSample, WeakSplit
from cdgp.errors import SettingsError, TrainingError
from cdgp.files import atomic_write, digest, save_tensors
from cdgp.method.backbone import Encoder
from cdgp.method.build import pretrained_encoder
from cdgp.presets import Settings
from cdgp.progress import Advance, Progress, Quiet
from cdgp.training.context import new_fabric, return_freed_memory
from cdgp.training.loop import read_checkpoint
from cdgp_bench.methods import Fitted, MethodOptions
from cdgp_bench.methods.common import cache_key_of, checkpoint_of, fitted_network

CURVE_POINTS = 40
ALL_STAGES = (0, 1, 2)


class Stages(nn.Module):
    """Some of an encoder's stages, in place of the network that anomalib would download."""

    def __init__(self, encoder: Encoder, chosen: Sequence[int]) -> None:
        super().__init__()
        self.trunk = encoder.trunk
        self.chosen = tuple(chosen)

    def forward(self, images: Tensor) -> list[Tensor]:
        features = self.trunk(images)
        return [features[index] for index in self.chosen]


def stage_names(encoder: Encoder) -> list[str]:
    """timm's names of the stages at strides 4, 8 and 16."""
    info: Any = encoder.trunk.feature_info
    return list(info.module_name())


def parts(settings: Settings, encoder: Encoder | None) -> dict[str, Any]:
    """The parts around a model of anomalib: resizing, and the backbone's normalisation.

    Its own scaling, metrics and images are off, since the benchmark needs raw maps.
    """
    from anomalib.pre_processing import PreProcessor
    from torchvision.transforms.v2 import Compose, Normalize, Resize

    steps: list[Any] = [Resize(settings.input_size, antialias=True)]
    if encoder is not None:
        steps.append(Normalize(encoder.mean.flatten().tolist(), encoder.std.flatten().tolist()))
    off = {"post_processor": False, "evaluator": False, "visualizer": False}
    return {"pre_processor": PreProcessor(transform=Compose(steps)), **off}


def check_sides(name: str, settings: Settings) -> None:
    """Check that both sides can be halved five times."""
    if any(side % 32 for side in settings.input_size):
        height, width = settings.input_size
        raise SettingsError(
            f"{name} needs an input_size with multiples of 32 on both sides; {height}x{width} was "
            "given"
        )


def rows(samples: Sequence[WeakSample], settings: Settings, folder: Path) -> dict[str, list[Any]]:
    """anomalib's table of the good images among ``samples``, all of them for training.

    Each is read by the product's reader and written once, as an 8-bit file at the input size.
    """
    height, width = settings.input_size
    paths = []
    for sample in samples:
        if sample.defective:
            continue
        name = f"{digest(sample.image)}-{settings.data.white_level}-{settings.data.pages}.png"
        path = folder / f"inputs-{height}x{width}" / name
        if not path.is_file():
            values = eight_bit(sample.image, settings).permute(1, 2, 0).numpy()
            with atomic_write(path) as temporary:
                Image.fromarray(values).save(temporary, format="PNG")
        paths.append(str(path))
    return {"image_path": paths, "label_index": [0] * len(paths), "split": ["train"] * len(paths)}


def eight_bit(path: Path, settings: Settings) -> Tensor:
    """(3, H, W) uint8 RGB of one image at the input size."""
    image = torch.from_numpy(network_input(path, settings)[0])
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
    """Further facts for the row."""
    pretrained: bool = True
    """Whether it takes the benchmark's backbone."""
    collects: bool = False
    """Whether it collects features in one pass instead of training by steps; freed memory then
    goes back to the kernel."""
    finish: Callable[[Any], None] | None = None
    """Called with the trained module before it is saved."""


def fit(
    make_recipe: Callable[[WeakSplit, Settings, Any], Recipe],
    data: WeakSplit,
    settings: Settings,
    checkpoints: Path,
    progress: Progress,
    options: MethodOptions,
) -> Fitted:
    """Train one of anomalib's modules on good images, or take it from ``checkpoints``.

    A killed training starts again, since Lightning's checkpoints are pickles.
    """
    recipe = make_recipe(data, settings, options)
    device = new_fabric().device
    without = () if recipe.pretrained else ("backbone", "weights_sha256")
    cache_key = cache_key_of(recipe.name, options, data.sha256, settings, without)
    file = checkpoint_of(recipe.name, cache_key, checkpoints)

    def built() -> Any:
        encoder = pretrained_encoder(settings) if recipe.pretrained else None
        with quiet_and_seeded(settings.seed):
            return recipe.build(encoder, settings, options)

    if not file.is_file():
        module = built()
        began = time.monotonic()
        table = rows(recipe.images, settings, checkpoints)
        if recipe.collects:
            return_freed_memory()
        with quiet_and_seeded(settings.seed, bars=not isinstance(progress, Quiet)):
            curve = _train(recipe, module, table, device, progress)
            if recipe.finish is not None:
                recipe.finish(module)
        metadata = {"step": "0", "fingerprint": cache_key, "curve": json.dumps(curve),
                    "seconds": str(time.monotonic() - began)}  # fmt: skip
        save_tensors(file, module.state_dict(), metadata)
    # Read back even now, so that a second run cannot differ by its tensors' memory layout.
    module = built()
    found = read_checkpoint(file, cache_key)
    if found is None:
        raise TrainingError(f"{file}: made with other settings; remove it")
    module.load_state_dict(found.tensors)
    module.to(device).eval()
    transform = module.pre_processor.transform

    @torch.inference_mode()
    def predict(image: Tensor) -> tuple[NDArray[np.float32], float]:
        # Training images are 8-bit files, so this one is rounded, too.
        found = module.model(transform(image.mul(255).round().div(255)))
        return found.anomaly_map[0].squeeze(0).float().cpu().numpy(), float(found.pred_score[0])

    with safe_open(file, framework="pt") as opened:
        curve = json.loads(opened.metadata()["curve"])
    facts = {
        "code": f"anomalib {version('anomalib')}",
        "options": options.decides(),
        **recipe.facts,
        **({"learning_curve": curve} if curve else {}),
    }
    return fitted_network(module.model, predict, settings, found.seconds, False, facts)


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
            num_sanity_val_steps=0, callbacks=[_watcher(advance, losses)],
        ).fit(module, datamodule=datamodule)  # fmt: skip
    return averaged(losses)


@contextmanager
def interruptible() -> Iterator[None]:
    """Keep Ctrl-C a ``KeyboardInterrupt``: Lightning would end the program itself."""
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
    if not any(losses):  # methods without a loss report zeros
        return []
    stretches = [s for s in np.array_split(np.arange(len(losses)), CURVE_POINTS) if len(s)]
    return [[int(s[-1]) + 1, round(float(np.mean([losses[i] for i in s])), 6)] for s in stretches]


def _watcher(advance: Advance, losses: list[float]) -> Any:
    """A callback that shows the progress and collects the losses."""
    from lightning.pytorch import Callback

    class Watcher(Callback):  # type: ignore[misc]
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = float(outputs["loss"] if isinstance(outputs, dict) else outputs)
            losses.append(loss)
            advance(f"loss {loss:.3f}" if loss else "")

    return Watcher()


@contextmanager
def quiet_and_seeded(seed: int, bars: bool = False) -> Iterator[None]:
    """Silence Lightning and seed all global random numbers, for the block only.

    The seed is of Python's, NumPy's and torch's global generators, which anomalib draws from;
    ``bars`` lets its own progress bars show.
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
