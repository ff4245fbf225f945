"""Second stage: the reverse student on normal fit pictures (Section 3.5)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from cdgp.method.backbone import Encoder
from cdgp.method.student import ReverseStudent, corrupt, reconstruction_loss, residuals
from cdgp.method.tiles import cut, places
from cdgp.presets import Settings, StudentSettings
from cdgp.progress import Progress
from cdgp.training.loop import cosine, run_stage
from cdgp.training.pictures import Pictures, seeded, shuffled_stream


class StudentTraining(nn.Module):
    """The student behind its frozen teacher; called with a batch, returns the loss."""

    def __init__(
        self, teacher: Encoder, student: ReverseStudent, settings: StudentSettings
    ) -> None:
        super().__init__()
        self._teacher = [teacher]  # in a list: the teacher is no part of the trained state
        self.student = student
        self.settings = settings

    def forward(self, clean: Tensor, corrupted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of Eq. 22, of clean and corrupted normalised pictures (B, 3, H, W)."""
        self.student.train()
        (teacher,) = self._teacher
        with torch.no_grad():
            target = teacher(clean.contiguous(memory_format=torch.channels_last))
            coarse = teacher(corrupted.contiguous(memory_format=torch.channels_last))[2]
        sizes = [(f.shape[-2], f.shape[-1]) for f in target]
        rebuilt = self.student(coarse, sizes)
        s = self.settings
        loss = reconstruction_loss(target, rebuilt, s.hard_fraction, s.hard_weight, s.smooth_weight)
        with torch.no_grad():
            means = [r.mean() for r in residuals(target, rebuilt)]
        return loss, {f"residual_{i + 1}": value for i, value in enumerate(means)}


def train_student(
    pictures: Pictures,
    teacher: Encoder,
    settings: Settings,
    fabric: Fabric,
    fingerprint: str,
    state: Path | None,
    log: Callable[[Mapping[str, Any]], None],
    progress: Progress,
) -> ReverseStudent:
    """Train the reverse student on pictures that are all good.

    Args:
        pictures: the good fit pictures.
        teacher: pretrained and frozen.
        settings, fabric, fingerprint, state, log, progress: as for ``train_dual_gp``.

    Raises:
        ValueError: a defective picture among them.
        TrainingError: see ``run_stage``.
    """
    if bool(pictures.defective.any()):
        raise ValueError("the student trains on good pictures only")
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
    indices = list(range(len(pictures)))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        start = step * s.batch_size
        chosen = shuffled_stream(indices, start, s.batch_size, settings.seed, "student")
        images = drawn_windows(pictures, chosen, seeded(settings.seed, "windows", step))
        clean = teacher.normalise(images.to(fabric.device))
        generator = seeded(settings.seed, "corruption", step)
        corrupted = corrupt(
            clean, generator, s.noise, s.blur_probability, s.erase_probability, s.erase_sides
        )
        return clean, corrupted

    factor = cosine(s.steps, s.final_learning_rate / s.learning_rate)
    run_stage("Reverse student", fabric, training, optimizer, s.steps, factor, batch,
              fingerprint, state, log, progress)  # fmt: skip
    return student.eval()


def drawn_windows(pictures: Pictures, indices: Sequence[int], generator: torch.Generator) -> Tensor:
    """(B, 3, H, W): of each picture one window, drawn among all; all of it where it is not tiled.

    Eq. 22 is a mean over good pictures' positions, which any window of theirs stands for.
    """
    images = []
    for index in indices:
        picture = pictures.input(index)
        possible = places(picture.shape[1:], pictures.size)
        drawn = int(torch.randint(len(possible), (), generator=generator))
        images.append(cut(picture, possible[drawn], pictures.size))
    return torch.stack(images)
