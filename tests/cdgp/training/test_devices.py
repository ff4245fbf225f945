"""Training on several devices: the same losses, one writer, and no process left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cdgp.training import sharing
from tests.helpers import (
    ROOT,
    Interrupting,
    cdgp,
    digested,
    divided,
    plain,
    raised,
    tiny_settings,
)
from torch import Tensor, nn

from cdgp.data.manifest import Manifest, WeakSplit
from cdgp.errors import ImageError, SettingsError, TrainingError
from cdgp.method.build import seeded
from cdgp.method.student import corrupt
from cdgp.presets import Settings
from cdgp.progress import Quiet
from cdgp.training import processes
from cdgp.training.context import TrainingContext, new_context
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.devices import ALONE, Share, synchronised, synchronised_norm
from cdgp.training.jitter import jittered
from cdgp.training.processes import check_devices, run_on_devices
from cdgp.training.student import drawn_windows
from cdgp_bench.synthetic import make_dataset

Records = list[dict[str, Any]]
STEPS = 10


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Processes come from one that has imported torch once."""
    multiprocessing.set_forkserver_preload([sharing.__name__])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processes, "START", "forkserver")
        yield


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


def context_of(devices: int, records: Records, checkpoints: Path | None = None) -> TrainingContext:
    context = new_context(checkpoints, None, Quiet(), devices)
    return replace(context, log=lambda record: records.append(dict(record)))


def of_stage(records: Records, stage: str) -> Records:
    return [r for r in records if r["stage"] == stage and "loss" in r]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """10 good and 5 defective images."""
    return make_dataset(tmp_path_factory.mktemp("few"), good=10, defective=5)


@pytest.fixture(scope="module")
def split(few: Manifest) -> WeakSplit:
    return divided(digested(few), 0).weak_split()


@pytest.fixture(scope="module")
def ten_steps() -> Settings:
    """Batches that two and three processes cannot divide evenly."""
    return tiny_settings(
        dual_gp={"steps": STEPS, "batch_size": 3, "no_separation": "flag"},
        student={"steps": STEPS, "batch_size": 5},
    )


@pytest.fixture(scope="module")
def unshared(forked: None, split: WeakSplit, ten_steps: Settings) -> Records:
    """The log of one process."""
    found: Records = []
    run_on_devices(sharing.all_losses, context_of(1, found), split, ten_steps)
    return found


@pytest.mark.slow
def test_the_first_ten_losses_of_two_processes_are_those_of_one(
    forked: None, split: WeakSplit, ten_steps: Settings, unshared: Records
) -> None:
    """In float64, where ten steps cannot amplify rounding to 1e-6; all processes end alike."""
    shared: Records = []
    run_on_devices(sharing.all_losses, context_of(2, shared), split, ten_steps)
    for stage in ("Dual GP", "Reverse student"):
        one, two = of_stage(unshared, stage), of_stage(shared, stage)
        assert [r["step"] for r in two] == list(range(STEPS))
        assert len({r["loss"] for r in one}) == STEPS
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            for key in a.keys() - {"stage"}:
                assert b[key] == pytest.approx(a[key], abs=2e-6, rel=0), (stage, a["step"], key)


@pytest.mark.slow
def test_an_interrupted_stage_goes_on_with_another_number_of_devices(
    forked: None, split: WeakSplit, ten_steps: Settings, unshared: Records, tmp_path: Path
) -> None:
    context = context_of(2, [], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_on_devices(
            sharing.student_losses, replace(context, progress=Interrupting("Reverse student", 4)),
            split, ten_steps,
        )  # fmt: skip
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["student.safetensors"]
    resumed: Records = []
    run_on_devices(sharing.student_losses, context_of(3, resumed, tmp_path), split, ten_steps)
    expected, found = of_stage(unshared, "Reverse student"), of_stage(resumed, "Reverse student")
    assert 0 < found[0]["step"] < STEPS
    for a, b in zip(expected[found[0]["step"] :], found, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-6, rel=0)


def test_batch_norms_use_the_statistics_of_all_processes(forked: None) -> None:
    records: Records = []
    run_on_devices(sharing.check_norms, context_of(2, records))
    assert records == [{"checked": [2, 3]}]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("image", ImageError, ["parts/good/7.png: cannot be read"]),
        ("defect", TrainingError, ["process 2 of 2", "ZeroDivisionError: of the test", "--resume"]),
        ("kill", TrainingError, ["process 2 of 2", "SIGKILL", "memory", "--resume"]),
    ],
)
def test_a_failing_process_ends_all_with_its_cause(
    forked: None, how: str, error: type[TrainingError], words: list[str]
) -> None:
    """The other one waits for it, and would report that it has lost the connection."""
    raised(lambda: run_on_devices(sharing.fail, context_of(2, []), how), *words, error=error)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_killed_command_leaves_no_process_and_resumes_on_one_device(
    few: Manifest, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = ["train", str(few.root), "--out", str(out), "--input-size", "64x64", "--quiet"]
    for setting in ("dual_gp.steps=2", "dual_gp.batch_size=4", "dual_gp.no_separation=flag",
                    "student.steps=30", "student.batch_size=3", "inducing.normal=8",
                    "inducing.anomaly=4"):  # fmt: skip
        given += ["--set", setting]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = subprocess.Popen(
        [sys.executable, "-m", "cdgp.cli.main", *given, "--devices", "2"],
        env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    saved = out / "checkpoints/dual_gp.safetensors"
    until(lambda: saved.exists() or command.poll() is not None)
    started = children(command.pid)
    command.send_signal(signal.SIGKILL)
    _, errors = command.communicate()
    assert command.returncode == -signal.SIGKILL, errors
    # The two and the one that multiprocessing keeps for its own purposes.
    assert len(started) >= 2
    until(lambda: not any(runs(pid) for pid in started))
    assert "3 images of a batch (student.batch_size) are split 1 + 2" in errors
    assert "Traceback" not in errors and "Warning" not in errors, errors
    done = cdgp(*given, "--resume")
    assert done.exit_code == 0, done.output
    log = [json.loads(line) for line in (out / "log.jsonl").open()]
    assert [(r["devices"], r["resumed"]) for r in log if r["stage"] == "start"] == [
        (2, False), (1, True),
    ]  # fmt: skip
    assert len([r for r in log if r["stage"] == "Dual GP" and "loss" in r]) == 2


@pytest.mark.parametrize(
    ("devices", "changes", "words"),
    [
        (0, {}, ["--devices 0", "at least 1"]),
        (-2, {}, ["--devices -2", "at least 1"]),
        (True, {}, ["--devices True", "whole number"]),
        (2.0, {}, ["--devices 2.0", "whole number"]),
        (3, {}, ["--devices 3", "student.batch_size = 2", "--set student.batch_size=3"]),
        (2, {"backbone": {"weights": "random"}}, ["'random'", "leave --devices out"]),
    ],
)
def test_impossible_devices_are_refused(
    devices: Any, changes: dict[str, Any], words: list[str]
) -> None:
    raised(lambda: check_devices(devices, tiny_settings(**changes)), *words, error=SettingsError)


def test_the_command_refuses_before_it_writes(surfaces: Manifest, tmp_path: Path) -> None:
    done = cdgp("train", surfaces.root, "--out", tmp_path / "run", "--devices", "17")
    assert done.exit_code == 2
    assert "dual_gp.batch_size = 16 leaves some of them without an image" in plain(done)
    assert not (tmp_path / "run").exists()


def test_no_more_devices_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(2, tiny_settings())
    chosen = tiny_settings(student={"batch_size": 4})
    raised(lambda: check_devices(4, chosen), "this machine has 2 GPU(s)", error=SettingsError)


def test_a_script_without_a_guard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", f"{processes.NAME} 1")
    raised(lambda: check_devices(2, tiny_settings()), '__name__ == "__main__"', error=SettingsError)


def test_uneven_batches_are_told(caplog: pytest.LogCaptureFixture) -> None:
    check_devices(3, tiny_settings(student={"batch_size": 5}, dual_gp={"batch_size": 6}))
    (message,) = caplog.messages
    assert "5 images of a batch (student.batch_size) are split 1 + 2 + 2" in message


def test_shares_make_up_the_batch_and_one_alone_changes_nothing() -> None:
    for count in range(1, 9):
        for batch in range(count, 20):
            rows = [i for rank in range(count) for i in Share(rank, count).rows(batch)]
            sizes = Share(0, count).sizes(batch)
            assert rows == list(range(batch))
            assert sum(sizes) == batch and max(sizes) - min(sizes) <= 1
    x = torch.ones(3, requires_grad=True)
    assert ALONE.gathered(x, 3) is x and ALONE.mean(x, 3) is x
    assert ALONE.from_first(x, x.device) is x
    norm = nn.BatchNorm2d(3)
    with synchronised(norm, ALONE):
        assert "forward" not in vars(norm)


def test_norms_of_other_kinds_are_refused() -> None:
    kinds: list[tuple[nn.Module, Tensor]] = [
        (nn.BatchNorm1d(2), torch.ones(3, 2)),
        (nn.BatchNorm2d(2, affine=False), torch.ones(3, 2, 1, 1)),
    ]
    for norm, x in kinds:
        raised(lambda n=norm, x=x: synchronised_norm(n, Share(0, 2), x),  # type: ignore[misc]
               type(norm).__name__, "dual_gp.batch_norm=frozen", error=SettingsError)  # fmt: skip
        torch.testing.assert_close(synchronised_norm(norm.eval(), Share(0, 2), x), norm(x))


@pytest.mark.parametrize("tile", [False, True])
def test_draws_of_a_share_are_those_of_the_batch(surfaces: Manifest, tile: bool) -> None:
    chosen = tiny_settings(tile=tile)
    dataset = WeakDataset(surfaces.weak(None)[:7], new_inputs(chosen))
    indices = [3, 1, 6, 2, 0, 5, 4]

    def draw(rows: range) -> tuple[Tensor, Tensor, list[Any]]:
        images, windows = drawn_windows(
            dataset, indices[: rows.stop], seeded(0, "windows"), (4, 8, 16), rows.start
        )
        corrupted = corrupt(images, seeded(0, "x"), 0.1, 0.5, 0.5, (0.1, 0.3), rows.start)
        return jittered(images, (0.2, 0.2, 0.2, 0.1), 0, 4, rows.start), corrupted, windows

    whole = draw(range(7))
    for count in (2, 3):
        shares = [draw(Share(rank, count).rows(7)) for rank in range(count)]
        for part, parts in zip(whole[:2], list(zip(*shares, strict=True))[:2], strict=True):
            assert torch.equal(torch.cat(parts), part)
        assert [window for share in shares for window in share[2]] == whole[2]
