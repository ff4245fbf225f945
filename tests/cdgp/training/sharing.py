"""What the processes of ``test_devices.py`` do; they import it by its name."""

import os
import signal

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from cdgp.data.manifest import WeakSplit
from cdgp.errors import ImageError
from cdgp.presets import Settings
from cdgp.training import loop
from cdgp.training.context import TrainingContext
from cdgp.training.dataset import InputCache, WeakDataset, new_inputs
from cdgp.training.devices import synchronised
from cdgp.training.fit import stage_places, train_stages
from cdgp.training.student import train_student


def in_float64() -> None:
    """Everything that this process computes from now on: rounding no longer shows in a loss."""
    torch.set_default_dtype(torch.float64)
    own = InputCache.input
    InputCache.input = lambda self, path: own(self, path).double()  # type: ignore[method-assign]
    Tensor.float = Tensor.double  # type: ignore[method-assign]


def all_losses(context: TrainingContext, data: WeakSplit, settings: Settings) -> None:
    """Train both stages, log each step, and check that all processes end with the same network."""
    in_float64()
    loop.LOG_EVERY = 1
    places = stage_places(data, settings, context)
    found = train_stages(data, settings, new_inputs(settings), *places)
    assert found.dual is not None
    for module in (*found.dual.tuned, found.student.student):
        state = torch.cat([value.double().flatten() for value in module.state_dict().values()])
        assert torch.equal(context.share.from_first(state, context.fabric.device), state)


def student_losses(context: TrainingContext, data: WeakSplit, settings: Settings) -> None:
    """Train the student, log each step and save after each."""
    in_float64()
    loop.LOG_EVERY, loop.SAVE_SECONDS = 1, 0.0
    good = [sample for sample in data.fit if not sample.defective]
    train_student(WeakDataset(good, new_inputs(settings)), settings, context, "key")


class Normed(nn.Module):
    """Both kinds of batch norms that there are, one of them not training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), BatchNormAct2d(4, act_layer=nn.ReLU6), nn.Conv2d(4, 5, 3, stride=2),
            nn.BatchNorm2d(5, eps=1e-3, momentum=0.3), nn.BatchNorm2d(5).eval(),
        ).double()  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return found


def close(found: Tensor | None, expected: Tensor | None, name: str) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9, msg=name)


def check_norms(context: TrainingContext) -> None:
    """Outputs, gradients and running statistics are those of torch's own norms on all rows."""
    share = context.share
    generator = torch.Generator().manual_seed(1)
    images = 3 + torch.randn(5, 3, 9, 9, dtype=torch.float64, generator=generator)
    weights = torch.randn(5, 5, 3, 3, dtype=torch.float64, generator=generator)
    whole, own = Normed(), Normed()
    expected = whole(images)
    ((expected - 1).square() * weights).mean().backward()
    rows = slice(share.rows(5).start, share.rows(5).stop)
    module = context.fabric.setup_module(own)
    with synchronised(own, share):
        found = module(images[rows])
        loss = share.gathered((found - 1).square() * weights[rows], 5).mean()
        context.fabric.backward(loss)
    close(found, expected[rows], "output")
    for (name, parameter), other in zip(own.named_parameters(), whole.parameters(), strict=True):
        close(parameter.grad, other.grad, name)
    for (name, buffer), kept in zip(own.named_buffers(), whole.buffers(), strict=True):
        close(buffer, kept, name)
    part = images[rows].mean().requires_grad_()
    mean = share.mean(part, 5)
    assert abs(float(mean - images.mean())) < 1e-12
    mean.backward()  # divided by the number of processes it is this one's weight
    assert part.grad is not None and float(part.grad) / share.count == len(images[rows]) / 5
    context.log({"checked": share.sizes(5)})


def fail(context: TrainingContext, how: str) -> None:
    """The last process fails while the others wait for it."""
    share = context.share
    if share.rank == share.count - 1:
        if how == "image":
            raise ImageError("parts/good/7.png: cannot be read")
        if how == "defect":
            raise ZeroDivisionError("of the test")
        os.kill(os.getpid(), signal.SIGKILL)
    share.gathered(torch.ones(len(share.rows(4))), 4)
