"""One writer a folder: processes, threads, deaths, and shares without locks."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cdgp.errors import OutputError
from cdgp.locks import HOLDER, LOCK, MARKER, one_writer
from cdgp.run_folder import lock

HOLD = """
import sys
from pathlib import Path
from cdgp.run_folder import lock
with lock(Path(sys.argv[1]), "train"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(folder: Path) -> subprocess.Popen[bytes]:
    """A process that holds a folder until its input ends."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    return other


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    other = holding(folder)
    facts = json.loads((folder / HOLDER).read_text())
    (tmp_path / "alias").symlink_to(folder)
    for name in (folder, tmp_path / "alias", folder / "../out"):
        with pytest.raises(OutputError, match="another process") as caught, lock(name, "predict"):
            pass
        assert f"(cdgp train, process {other.pid} on " in str(caught.value)
        assert f"since {facts['since']})" in str(caught.value)
    other.kill()  # the lock goes with its process
    other.wait()
    assert (folder / LOCK).exists()
    with lock(folder, "predict"):
        assert json.loads((folder / HOLDER).read_text())["pid"] == os.getpid()
    assert not folder.exists() or not list(folder.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OutputError), lock(tmp_path / "file"):
        pass


def test_who_is_there_is_never_read_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append((tmp_path / HOLDER).exists()))
    with lock(tmp_path, "train"):
        assert json.loads((tmp_path / HOLDER).read_text())["command"] == "train"
    assert seen == [False]


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    refused: list[str] = []

    def second() -> None:
        try:
            with lock(tmp_path, "predict"):
                pass
        except OutputError as error:
            refused.append(str(error))

    with lock(tmp_path, "predict"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        second()  # the same thread as well
    assert len(refused) == 2 and str(os.getpid()) in refused[0]
    second()
    assert len(refused) == 2


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock(tmp_path / "new/deeper"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with lock(tmp_path / "new/deeper"):
        (tmp_path / "new/deeper/a.txt").touch()
    assert [p.name for p in (tmp_path / "new/deeper").iterdir()] == ["a.txt"]
    (tmp_path / "empty").mkdir()
    with lock(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir(), "it was there before"


def test_one_writer_of_a_file(tmp_path: Path) -> None:
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    with one_writer(tmp_path, "export", "choose another --out", a):
        with (
            pytest.raises(
                OutputError, match=r"a\.onnx: another process is writing there \(cdgp exp"
            ),
            one_writer(tmp_path, "export", "choose another --out", a),
        ):
            pass
        with one_writer(tmp_path, "export", "choose another --out", b):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_share_without_locks_works_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr("cdgp.locks.SOFT_SECONDS", 0.1)
    with lock(tmp_path, "train"):
        assert (tmp_path / MARKER).exists()
        with pytest.raises(OutputError, match=f"remove .*{MARKER}"), lock(tmp_path, "predict"):
            pass
        assert (tmp_path / MARKER).exists()
    assert "this file system has no locks" in caplog.text
    assert not list(tmp_path.iterdir())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with lock(tmp_path, "train"):
        marker = (tmp_path / MARKER).read_text()
    # The marker of a process that is gone keeps nobody away.
    (tmp_path / MARKER).write_text(marker.replace(str(os.getpid()), str(gone.pid)))
    monkeypatch.setattr("cdgp.locks.SOFT_SECONDS", 5.0)
    with lock(tmp_path, "train"):
        pass


def test_other_errors_of_the_file_system_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", flock)
    told = pytest.raises(OutputError, match=f"{tmp_path}: cannot be written: Input/output")
    with told, lock(tmp_path):
        pass


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(OutputError, match="leads nowhere"), one_writer(tmp_path / "out", "", ""):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
