"""Second stage: the reverse student on normal fit images (Section 3.5)."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cdgp.method.backbone import Encoder
from cdgp.method.build import new_student, pretrained_encoder, seeded
from cdgp.method.fold import fold_batch_norms
from cdgp.method.student import (
    ReverseStudent,
    StageTerms,
    corrupt,
    loss_of_terms,
    reconstruction_terms,
)
from cdgp.method.windows import Place, Strides, cut, places
from cdgp.presets import Settings, StudentSettings
from cdgp.training.context import TrainingContext, reduced, reduced_dtype
from cdgp.training.convolutions import fast_convolutions
from cdgp.training.dataset import WeakDataset, shuffled_stream
from cdgp.training.devices import ALONE, Share, synchronised
from cdgp.training.loop import Stage, cosine, run_stage

FILE = "student.safetensors"
KEPT_BYTES = 2**30
"""The teacher's features of clean images stay in memory up to this total."""

Window = tuple[int, Place]
"""Position of an image in the dataset, and where the window begins in it."""


class TrainedStudent(NamedTuple):
    """What the second stage leaves."""

    teacher: Encoder
    student: ReverseStudent
    seconds: float


class TeacherFeatureCache:
    """The frozen teacher, and its features of clean images, which are computed once.

    They lie where the teacher does. In evaluation mode an image's features are its own in any
    batch, so that a resumed run is the same wherever kernels do not depend on the batch.
    """

    def __init__(self, teacher: Encoder) -> None:
        self._teacher = teacher
        self._kept: dict[Window, list[Tensor]] = {}
        self._room = KEPT_BYTES

    @torch.no_grad()
    def features(self, images: Tensor) -> list[Tensor]:
        """All three stages (B, C_l, H_l, W_l) of normalised images (B, 3, H, W)."""
        return list(self._teacher(images.contiguous(memory_format=torch.channels_last)))

    def of(self, drawn: Sequence[Window], clean: Tensor) -> list[Tensor]:
        """The same of clean images, from memory where these windows have been computed before."""
        found = {window: self._kept[window] for window in drawn if window in self._kept}
        new = [row for row, window in enumerate(drawn) if window not in found]
        if new:
            stages = self.features(clean[new])
            for place, row in enumerate(new):
                # Clones, so that none holds on to the whole batch.
                pyramid = [
                    f[place : place + 1].clone(memory_format=torch.channels_last) for f in stages
                ]
                found[drawn[row]] = pyramid
                size = sum(stage.nbytes for stage in pyramid)
                if drawn[row] not in self._kept and size <= self._room:
                    self._kept[drawn[row]] = pyramid
                    self._room -= size
        pyramids = [found[window] for window in drawn]
        return [torch.cat(stage) for stage in zip(*pyramids, strict=True)]


class StudentTraining(nn.Module):
    """The student behind its frozen teacher; called with a batch, returns the loss."""

    def __init__(
        self,
        teacher: Encoder,
        student: ReverseStudent,
        settings: StudentSettings,
        share: Share = ALONE,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # No module: the teacher is no part of the trained weights.
        self.target = TeacherFeatureCache(teacher)
        self.student = student
        self.settings = settings
        self.share = share
        self.dtype = dtype
        """Of the networks' own computations; None is float32."""

    def forward(
        self, clean: Tensor, corrupted: Tensor, drawn: Sequence[Window]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of Eq. 22, of clean and corrupted normalised images (B, 3, H, W).

        ``drawn`` names their windows. The images are this process's rows of a batch, the loss is
        that of the whole batch.
        """
        self.student.train()
        with reduced(self.dtype, clean.device):
            target = self.target.of(drawn, clean)
            sizes = [(f.shape[-2], f.shape[-1]) for f in target]
            rebuilt = self.student(self.target.features(corrupted)[2], sizes)
        own = reconstruction_terms([t.float() for t in target], [r.float() for r in rebuilt])
        s, share = self.settings, self.share
        terms = [
            StageTerms(share.gathered(r, s.batch_size), share.mean(smooth, s.batch_size))
            for r, smooth in own
        ]
        loss = loss_of_terms(terms, s.hard_fraction, s.hard_weight, s.smooth_weight)
        means = [term.residual.detach().mean() for term in terms]
        return loss, {f"residual_{i + 1}": value for i, value in enumerate(means)}


def train_student(
    dataset: WeakDataset, settings: Settings, context: TrainingContext, cache_key: str
) -> TrainedStudent:
    """Train the reverse student on the good fit images; arguments as ``train_dual_gp``.

    Raises:
        ValueError: a defective image among them.
    """
    if bool(dataset.defective.any()):
        raise ValueError("the student trains on good images only")
    s, device = settings.student, context.fabric.device
    teacher = pretrained_encoder(settings).requires_grad_(False).eval()
    student = new_student(teacher, settings)
    for part in (teacher, student):
        part.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    frozen = folded(teacher)
    share = context.share
    training = StudentTraining(frozen, student, s, share, reduced_dtype(settings))
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=s.learning_rate, weight_decay=s.weight_decay
    )
    indices = list(range(len(dataset)))

    def batch(step: int) -> tuple[Tensor, Tensor, list[Window]]:
        start = step * s.batch_size
        chosen = shuffled_stream(indices, start, s.batch_size, settings.seed, "student")
        rows = share.rows(s.batch_size)
        places_drawn = seeded(settings.seed, "windows", step)
        images, drawn = drawn_windows(
            dataset, chosen[: rows.stop], places_drawn, teacher.strides, rows.start
        )
        clean = teacher.normalise(images.to(device))
        generator = seeded(settings.seed, "corruption", step)
        corrupted = corrupt(
            clean, generator, s.noise, s.blur_probability, s.erase_probability, s.erase_sides,
            rows.start,
        )  # fmt: skip
        return clean, corrupted, drawn

    lr_lambda = cosine(s.steps, s.final_learning_rate / s.learning_rate)
    stage = Stage(
        "Reverse student", training, optimizer, s.steps, lr_lambda, batch, cache_key, FILE
    )
    with fast_convolutions(frozen), synchronised(student, share):
        seconds = run_stage(stage, context)
    return TrainedStudent(teacher, student.eval(), seconds)


def folded(teacher: Encoder) -> Encoder:
    """A copy of the frozen teacher with its batch norms in the convolutions, as in ``graph``."""
    found = copy.deepcopy(teacher)
    fold_batch_norms(found.trunk)
    return found.requires_grad_(False).to(memory_format=torch.channels_last)


def drawn_windows(
    dataset: WeakDataset,
    indices: Sequence[int],
    generator: torch.Generator,
    strides: Strides,
    first: int = 0,
) -> tuple[Tensor, list[Window]]:
    """(B, 3, H, W): of each image one window, drawn among all; all of it where it is not tiled.

    Eq. 22 is a mean over the positions of good images, so any of their windows estimates it. Images
    before ``first`` have their draws and nothing else.
    """
    images, windows = [], []
    for row, index in enumerate(indices):
        whole = dataset.input(index) if dataset.tile or row >= first else None
        size = dataset.size if whole is None else whole.shape[1:]
        possible = places(size, dataset.size, strides)
        place = possible[int(torch.randint(len(possible), (), generator=generator))]
        if whole is not None and row >= first:
            images.append(cut(whole, place, dataset.size))
            windows.append((index, place))
    return torch.stack(images), windows
