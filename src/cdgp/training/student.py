"""Second stage: the reverse student on normal fit images (Section 3.5)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from cdgp.method.backbone import Encoder
from cdgp.method.student import ReverseStudent, corrupt, reconstruction_loss, residuals
from cdgp.method.tiles import Place, cut, places
from cdgp.presets import Settings, StudentSettings
from cdgp.progress import Progress
from cdgp.training.dataset import WeakDataset, seeded, shuffled_stream
from cdgp.training.loop import cosine, run_stage

KEPT_BYTES = 2**30
"""The teacher's features of clean images stay in memory up to this total."""

Shown = tuple[int, Place]
"""Which image, and where its window begins."""


class Target:
    """The frozen teacher, and its features of clean images, which are computed once.

    They lie where the teacher does. In evaluation mode an image's features are its own in any
    batch, so that a resumed run is the same wherever kernels do not depend on the batch.

    Args:
        teacher: stays as it is.
    """

    def __init__(self, teacher: Encoder) -> None:
        self._teacher = teacher
        self._kept: dict[Shown, list[Tensor]] = {}
        self._room = KEPT_BYTES

    @torch.no_grad()
    def features(self, images: Tensor) -> list[Tensor]:
        """All three stages (B, C_l, H_l, W_l) of normalised images (B, 3, H, W)."""
        return list(self._teacher(images.contiguous(memory_format=torch.channels_last)))

    def of(self, shown: Sequence[Shown], clean: Tensor) -> list[Tensor]:
        """The same of clean images, from memory where they have been seen.

        Args:
            shown: what the images show.
            clean: the images.
        """
        found = {one: self._kept[one] for one in shown if one in self._kept}
        new = [row for row, one in enumerate(shown) if one not in found]
        if new:
            stages = self.features(clean[new])
            for place, row in enumerate(new):
                # Clones, so that none holds on to the whole batch.
                pyramid = [
                    f[place : place + 1].clone(memory_format=torch.channels_last) for f in stages
                ]
                found[shown[row]] = pyramid
                size = sum(stage.nbytes for stage in pyramid)
                if shown[row] not in self._kept and size <= self._room:
                    self._kept[shown[row]] = pyramid
                    self._room -= size
        pyramids = [found[one] for one in shown]
        return [torch.cat(stage) for stage in zip(*pyramids, strict=True)]


class StudentTraining(nn.Module):
    """The student behind its frozen teacher; called with a batch, returns the loss."""

    def __init__(
        self, teacher: Encoder, student: ReverseStudent, settings: StudentSettings
    ) -> None:
        super().__init__()
        self.target = Target(teacher)  # no module: the teacher is no part of the trained state
        self.student = student
        self.settings = settings

    def forward(
        self, clean: Tensor, corrupted: Tensor, shown: Sequence[Shown]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of Eq. 22, of clean and corrupted normalised images (B, 3, H, W).

        ``shown`` says what they show.
        """
        self.student.train()
        target = self.target.of(shown, clean)
        sizes = [(f.shape[-2], f.shape[-1]) for f in target]
        rebuilt = self.student(self.target.features(corrupted)[2], sizes)
        s = self.settings
        loss = reconstruction_loss(target, rebuilt, s.hard_fraction, s.hard_weight, s.smooth_weight)
        with torch.no_grad():
            means = [r.mean() for r in residuals(target, rebuilt)]
        return loss, {f"residual_{i + 1}": value for i, value in enumerate(means)}


def train_student(
    dataset: WeakDataset,
    teacher: Encoder,
    settings: Settings,
    fabric: Fabric,
    fingerprint: str,
    state: Path | None,
    log: Callable[[Mapping[str, Any]], None],
    progress: Progress,
) -> ReverseStudent:
    """Train the reverse student on images that are all good.

    Args:
        dataset: the good fit images.
        teacher: pretrained and frozen.
        settings, fabric, fingerprint, state, log, progress: as for ``train_dual_gp``.

    Raises:
        ValueError: a defective image among them.
        TrainingError: see ``run_stage``.
    """
    if bool(dataset.defective.any()):
        raise ValueError("the student trains on good images only")
    s = settings.student
    teacher.requires_grad_(False).eval()
    teacher.to(fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "student").initial_seed())
        student = ReverseStudent(teacher.channels, s.widths)
    student.to(fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    training = StudentTraining(teacher, student, s)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=s.learning_rate, weight_decay=s.weight_decay
    )
    indices = list(range(len(dataset)))

    def batch(step: int) -> tuple[Tensor, Tensor, list[Shown]]:
        start = step * s.batch_size
        chosen = shuffled_stream(indices, start, s.batch_size, settings.seed, "student")
        images, shown = drawn_windows(dataset, chosen, seeded(settings.seed, "windows", step))
        clean = teacher.normalise(images.to(fabric.device))
        generator = seeded(settings.seed, "corruption", step)
        corrupted = corrupt(
            clean, generator, s.noise, s.blur_probability, s.erase_probability, s.erase_sides
        )
        return clean, corrupted, shown

    factor = cosine(s.steps, s.final_learning_rate / s.learning_rate)
    run_stage("Reverse student", fabric, training, optimizer, s.steps, factor, batch,
              fingerprint, state, log, progress)  # fmt: skip
    return student.eval()


def drawn_windows(
    dataset: WeakDataset, indices: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, list[Shown]]:
    """(B, 3, H, W): of each image one window, drawn among all; all of it where it is not tiled.

    Eq. 22 is a mean over good images' positions, which any window of theirs stands for.
    """
    images, shown = [], []
    for index in indices:
        whole = dataset.input(index)
        possible = places(whole.shape[1:], dataset.size)
        drawn = int(torch.randint(len(possible), (), generator=generator))
        images.append(cut(whole, possible[drawn], dataset.size))
        shown.append((index, possible[drawn]))
    return torch.stack(images), shown
