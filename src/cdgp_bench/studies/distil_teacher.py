"""Make EfficientAD's teacher from the default backbone, where the published weights are not given.

    python -m cdgp_bench.studies.distil_teacher --data IMAGES --out teacher.pth

IMAGES is a folder of images of many kinds (published: ImageNet), searched through. A plan names
the file as ``options.efficientad.teacher``; anomalib loads it as it does its own. Killed and
called again, the command goes on; it keeps its state in ``NAME-checkpoints`` beside the file,
which may be deleted once the file is there.

As published (Batzner et al., 2024, supplement), a small patch description network learns the
channel-normalised features of a pretrained network: mean squared error, Adam at 1e-4 with weight
decay 1e-5, batches of 16 at 256 x 256, one image in ten in grey. Its authors have 60,000 steps on
ImageNet; two cores have about 80 in a quarter of an hour, which is the default. The features are
PatchCore's, as theirs are, here of EfficientNet-Lite0 in place of WideResNet-101: its stages at
strides 8 and 16 of the image at 512 x 512 (so that stride 8 is the teacher's grid), the second
brought to the size of the first, 3 x 3 neighbourhoods, and adaptive averages to 384 channels.
"""

import argparse
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2.functional import rgb_to_grayscale

from cdgp.data.images import read_image, to_input
from cdgp.errors import CdgpError, DataError, OutputError, SettingsError
from cdgp.files import atomic_write, save_tensors, subsample_evenly
from cdgp.locks import one_writer
from cdgp.method.backbone import Encoder
from cdgp.method.build import pretrained_encoder, seeded
from cdgp.presets import Settings
from cdgp.presets import settings as preset
from cdgp.progress import Bars, Progress
from cdgp.training.context import new_context, shared_parts
from cdgp.training.dataset import shuffled_stream
from cdgp.training.loop import Stage, read_checkpoint, run_stage
from cdgp_bench.methods import images_digest, images_in
from cdgp_bench.methods.efficientad import FEATURES, PUBLISHED_TEACHER_STEPS, read_teacher

STEPS = 80
"""A quarter of an hour on two cores."""
SIDE = 256
"""Of the teacher's input; the backbone's is twice as large."""
BATCH = 16
GREY = 0.1
"""Share of the images that are shown without their colours."""
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 1e-5
MOST_FOR_STATISTICS = 10_000
PATCH = 3
STAGE_FEATURES = 1024
"""To so many features PatchCore brings the neighbourhoods of each stage."""
STAGES = (1, 2)
"""Of the encoder's, strides 8 and 16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of images of many kinds")
    parser.add_argument("--out", required=True, type=Path, help="file of the teacher's weights")
    parser.add_argument("--steps", type=int, default=STEPS,
                        help=f"training steps; {STEPS} if not given, "
                             f"published {PUBLISHED_TEACHER_STEPS}")  # fmt: skip
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: give at least 1")
    try:
        distil(given.data, given.out, given.steps, Bars())
    except CdgpError as error:
        raise SystemExit(str(error)) from error
    print(f"{given.out}: a teacher for options.efficientad.teacher of a plan")


def distil(data: str, out: Path, steps: int, progress: Progress) -> None:
    """Train a teacher on the images of a folder, resumably, and write its weights.

    Does nothing where ``out`` holds this teacher already.

    Raises:
        DataError: there are no images, or one cannot be read.
        OutputError: ``out`` holds something else, or cannot be written.
        TrainingError: the loss is not finite, or the checkpoint is damaged.
    """
    settings = preset("lite")
    paths = images_in(data)
    if not paths:
        raise DataError(f"--data {data}: there are no images in it")
    decides = [images_digest(data), steps, SIDE, BATCH, shared_parts(settings)]
    cache_key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    about = {"backbone": settings.backbone.name, "steps": steps, "images": len(paths),
             "cache_key": cache_key}  # fmt: skip
    with one_writer(out.parent, "distil_teacher", "choose another --out", out):
        if out.exists() and not is_teacher(out, about):
            raise OutputError(f"--out {out}: exists, and is another file; choose another name")
        if out.exists():
            return
        folder = out.with_name(f"{out.stem}-checkpoints")
        folder.mkdir(exist_ok=True)
        network = trained(paths, settings, steps, cache_key, folder, progress)
        save_teacher(out, network, about)


def trained(
    paths: Sequence[Path],
    settings: Settings,
    steps: int,
    cache_key: str,
    folder: Path,
    progress: Progress,
) -> nn.Module:
    """The teacher after its last step, from a checkpoint where there is one."""
    context = new_context(folder, folder / "log.jsonl", progress)
    device = context.fabric.device
    features = PatchFeatures(pretrained_encoder(settings)).to(device).eval()
    channels = kept_statistics(folder / "channels.safetensors", paths, settings, features,
                               cache_key, progress)  # fmt: skip

    def batch(step: int) -> tuple[Tensor, Tensor]:
        order = range(len(paths))
        chosen = shuffled_stream(order, step * BATCH, BATCH, settings.seed, "teacher")
        grey = torch.rand(BATCH, generator=seeded(settings.seed, "grey", step)) < GREY
        shown = [inputs(paths[i], settings) for i in chosen]
        small, large = (torch.stack(of_size).to(device) for of_size in zip(*shown, strict=True))
        for images in (small, large):
            images[grey] = rgb_to_grayscale(images[grey], num_output_channels=3)
        return small, (features(large) - channels.mean) / channels.std

    module = Distillation(settings.seed)
    optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    stage = Stage("Teacher", module, optimizer, steps, lambda step: 1.0, batch, cache_key,
                  "teacher.safetensors")  # fmt: skip
    run_stage(stage, context)
    return module.network


def inputs(path: Path, settings: Settings) -> tuple[Tensor, Tensor]:
    """One image for the teacher and, twice as large, for the backbone; CHW RGB in [0, 1]."""
    pixels = read_image(path, settings.data.white_level, settings.data.first_page)
    small, large = (torch.from_numpy(to_input(pixels, (n, n))) for n in (SIDE, 2 * SIDE))
    return small, large


class PatchFeatures(nn.Module):
    """PatchCore's features of a frozen encoder, half of the channels from each of two stages.

    PatchCore unfolds 3 x 3 neighbourhoods, averages them channel by channel to 1024 features a
    stage, and these to 384 over both stages. All of it is linear and the same at every position,
    and 384 features split evenly between two stages, so it is one fixed convolution a stage.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        first, second = (projection(encoder.channels[stage]) for stage in STAGES)
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.first: Tensor
        self.second: Tensor

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to (B, 384, H/8, W/8)."""
        stages = self.encoder(self.encoder.normalise(images))
        fine, coarse = (stages[stage] for stage in STAGES)
        fine = functional.conv2d(fine, self.first, padding=PATCH // 2)
        coarse = functional.conv2d(coarse, self.second, padding=PATCH // 2)
        coarse = functional.interpolate(coarse, fine.shape[-2:], mode="bilinear")
        return torch.cat([fine, coarse], 1)


def projection(channels: int) -> Tensor:
    """PatchCore's two averages of a stage with so many channels, as a kernel (192, C, 3, 3)."""
    every = torch.eye(channels * PATCH**2)
    averaged = functional.adaptive_avg_pool1d(every, STAGE_FEATURES)
    averaged = functional.adaptive_avg_pool1d(averaged, FEATURES // len(STAGES))
    return averaged.T.reshape(-1, channels, PATCH, PATCH).contiguous()


class Channels(NamedTuple):
    """Mean and standard deviation of each feature, (1, 384, 1, 1)."""

    mean: Tensor
    std: Tensor


def statistics(
    paths: Sequence[Path], settings: Settings, features: PatchFeatures, progress: Progress
) -> Channels:
    """Of at most 10,000 images, each once and in its colours."""
    total = torch.zeros(2, FEATURES, dtype=torch.float64)
    positions = 0
    device = features.first.device
    with progress.phase("Channel statistics", len(paths)) as advance:
        for path in paths:
            found = features(inputs(path, settings)[1][None].to(device)).double()
            total += torch.stack([found.sum((0, 2, 3)), found.square().sum((0, 2, 3))]).cpu()
            positions += found[:, 0].numel()
            advance()
    mean, squares = total / positions
    std = (squares - mean.square()).sqrt()
    return Channels(*(values.float().view(1, -1, 1, 1).to(device) for values in (mean, std)))


def kept_statistics(
    file: Path,
    paths: Sequence[Path],
    settings: Settings,
    features: PatchFeatures,
    cache_key: str,
    progress: Progress,
) -> Channels:
    """The statistics, from ``file`` where an earlier call has left them."""
    kept = read_checkpoint(file, cache_key)
    if kept is None:
        chosen = subsample_evenly(paths, MOST_FOR_STATISTICS)
        found = statistics(chosen, settings, features, progress)
        metadata = {"step": "0", "seconds": "0", "fingerprint": cache_key}
        save_tensors(file, found._asdict(), metadata)
        return found
    device = features.first.device
    return Channels(kept.tensors["mean"].to(device), kept.tensors["std"].to(device))


class Distillation(nn.Module):
    """anomalib's small teacher, padded while it learns, as published; a function of the seed."""

    def __init__(self, seed: int) -> None:
        from anomalib.models.image.efficient_ad.torch_model import SmallPatchDescriptionNetwork

        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeded(seed, "teacher").initial_seed())
            self.network: nn.Module = SmallPatchDescriptionNetwork(FEATURES, padding=True)

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The mean squared error of (B, 3, 256, 256) images' (B, 384, 64, 64) features."""
        return functional.mse_loss(self.network(images), targets), {}


def is_teacher(path: Path, about: dict[str, Any]) -> bool:
    """Whether a file holds the teacher that ``about`` tells of."""
    try:
        return read_teacher(path).distilled == about
    except SettingsError:
        return False


def save_teacher(path: Path, network: nn.Module, about: dict[str, Any]) -> None:
    """Write the weights in the form of anomalib's release; ``read_teacher`` reads them.

    ``about`` goes with torch's own metadata of a state dict, which no reader minds.
    """
    state: Any = network.state_dict()
    for key, value in state.items():
        state[key] = value.cpu()
    state._metadata[""]["distilled"] = about
    stream = io.BytesIO()  # a file's own name would be part of its bytes
    torch.save(state, stream)
    with atomic_write(path) as temporary:
        temporary.write_bytes(stream.getvalue())


if __name__ == "__main__":
    main()
