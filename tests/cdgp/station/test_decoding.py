"""An image that the decoder cannot bear costs that image, whatever it does to the process."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from PIL import Image
from sqlalchemy import select
from tests.cdgp.station.serving import Served, grey, serving
from tests.helpers import raised

from cdgp.errors import ImageError
from cdgp.station import accounts, decoding
from cdgp.station.api import ENTERING
from cdgp.station.decoding import Decoder
from cdgp.station.schema import watched

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")

EVIL = """
import ctypes, mmap, os, sys, time
from cdgp.station import decoding

decoding.SECONDS, decoding.MEGAPIXEL = 0.2, 0
read = decoding.read_image
kept = []

def evil(path, white, first_page):
    pixels = read(path, white, first_page)
    level = round(float(pixels.mean()) * 255)
    if level == 10:
        ctypes.string_at(0)  # reads where no memory is
    if level == 20:
        raise decoding.ImageError("no") from MemoryError()
    if level == 25:  # a library that never gives back
        try:
            kept.append(mmap.mmap(-1, 500 * 2**20))
        except OSError:
            raise MemoryError
    if level == 35:
        with open(sys.argv[1], "w") as file:
            file.write(" ".join(os.environ))
    if level == 30:
        while True:
            pass
    if level == 40:
        os._exit(3)
    if level == 50:
        time.sleep(60)
    if level == 60:
        print("noise of a library", flush=True)
    return pixels

decoding.read_image = evil
decoding.main()
"""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    """A decoder to which images of some brightness do harm."""
    script = tmp_path / "evil.py"
    script.write_text(EVIL)
    command = (sys.executable, str(script), str(tmp_path / "environment"))
    monkeypatch.setattr(decoding, "COMMAND", command)
    found = Decoder()
    yield found
    found.close()


def flat(folder: Path, level: int) -> Path:
    path = folder / f"flat-{level}.png"
    Image.fromarray(np.full((16, 20), level, np.uint8)).save(path)
    return path


@POSIX
def test_harm_is_done_to_one_image_alone(
    evil: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = flat(tmp_path, 60)
    assert evil.check(fine, 1) == (16, 20), "what a library prints is no answer"
    told = {10: "crashes the decoder (SIGSEGV)", 30: "too long", 40: "exit code 3"}
    for level, words in told.items():
        path = flat(tmp_path, level)
        message = raised(lambda path=path: evil.check(path, 1), words, error=ImageError)  # type: ignore[misc]
        assert str(tmp_path) not in message
        assert evil.check(fine, 1) == (16, 20)
    monkeypatch.setattr(decoding, "SECONDS", 0.05)
    monkeypatch.setattr(decoding, "MEGAPIXEL", 0)
    raised(lambda: evil.check(flat(tmp_path, 50), 1), "too long", error=ImageError)
    monkeypatch.setattr(decoding, "SECONDS", 10)
    assert evil.check(fine, 1) == (16, 20)


@LINUX
def test_memory_is_bounded_and_what_leaked_is_given_back(evil: Decoder, tmp_path: Path) -> None:
    leaking, fine = flat(tmp_path, 25), flat(tmp_path, 60)
    for _ in range(3):  # the second does not fit into the same process
        assert evil.check(leaking, 1) == (16, 20)
    monstrous = tmp_path / "monstrous.png"
    Image.fromarray(np.zeros((3000, 3000), np.uint8)).save(monstrous)
    raised(lambda: evil.check(flat(tmp_path, 20), 1), "memory", error=ImageError)
    assert evil._process is None
    assert evil.check(fine, 1) == (16, 20)
    assert evil.check(monstrous, 10) == (3000, 3000), "it is large, and honest"


def test_a_process_is_renewed_and_has_no_secrets(
    evil: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDGP_STATION_DB", "postgresql://me:secret@host/x")
    monkeypatch.setattr(decoding, "RENEW", 2)
    evil.check(flat(tmp_path, 35), 1)
    known = (tmp_path / "environment").read_text().split()
    assert "PATH" in known
    assert not [name for name in known if name.startswith("CDGP_STATION_")]
    first = evil._process
    evil.check(flat(tmp_path, 60), 1)
    assert evil._process is first
    evil.check(flat(tmp_path, 60), 1)
    assert evil._process is not first


@POSIX
def test_a_process_that_was_killed_between_images_is_replaced(
    decoder: Decoder, tmp_path: Path
) -> None:
    path = grey(tmp_path, 10)
    decoder.check(path, 1)
    assert decoder._process
    os.kill(decoder._process.pid, signal.SIGKILL)
    decoder._process.wait()
    assert decoder.check(path, 1) == (16, 20)


def test_sizes_and_refusals_are_those_of_reading(decoder: Decoder, tmp_path: Path) -> None:
    turned = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((16, 32), np.uint8)).save(turned, exif=exif)
    assert decoder.check(turned, 1) == (32, 16)
    torn = tmp_path / "torn.jpg"  # its header is sound
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(torn)
    torn.write_bytes(torn.read_bytes()[:-500])
    message = raised(lambda: decoder.check(torn, 1), "the image", "Premature", error=ImageError)
    assert str(torn) not in message
    assert decoder.check(torn, 0.001) == (64, 64), "it is too large, and so not decoded"


def test_a_process_that_does_not_start_is_no_fault_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "COMMAND", (sys.executable, "-c", "raise SystemExit(5)"))
    with pytest.raises(OSError, match="does not start"):
        Decoder().check(grey(tmp_path, 10), 1)


@POSIX
def test_uploads_and_watched_files_go_on_after_a_crash(
    evil: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdgp.station.watching.Watcher.run", lambda self, stop: None)
    monkeypatch.setattr("cdgp.station.intake.Decoder", lambda: evil)
    folder = tmp_path / "camera"
    folder.mkdir()
    flat(folder, 10)
    grey(folder, 100)
    config = f'[[watch]]\nfolder = "{folder}"\nline = "b"\n'
    with serving(tmp_path / "home", config) as served:
        operator = served.person("operator")
        told: list[int] = []
        threads = [
            threading.Thread(target=lambda path=path: told.append(operator.upload(path)["status"]))
            for path in [flat(tmp_path, 10), *(grey(tmp_path, level) for level in range(70, 76))]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(told) == [202] * 6 + [422]
        served.station.watcher.look(0.0)
        assert served.station.watcher.look(2.0) == 2
        page = served.person("engineer").get("/settings").text
        assert "flat-10.png: the image crashes the decoder (SIGSEGV)" in page
        assert "cdgp_station_watched_refused 1.0" in operator.get("/metrics").text
        assert kept(served) == [("100-0.png", ""), ("flat-10.png", "crashes the decoder")]
    assert evil._process is None


def kept(served: Served) -> list[tuple[str, str]]:
    """Watched files with what was wrong, in short."""
    with served.station.store.read() as connection:
        rows = connection.execute(select(watched).order_by(watched.c.path)).fetchall()
    return [(Path(row.path).name, row.problem[10:29]) for row in rows]


def test_slow_images_leave_threads_for_everybody_else(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, changed, inside = threading.Event(), threading.Condition(), [0, 0]

    def slow(path: Path, megapixels: float) -> tuple[int, int]:
        with changed:
            inside[0] += 1
            inside[1] = max(inside)
            changed.notify_all()
        go.wait()
        with changed:
            inside[0] -= 1
        return 16, 20

    monkeypatch.setattr(
        served.station.intake,
        "decoder",
        type("Slow", (), {"check": staticmethod(slow), "close": staticmethod(lambda: None)}),
    )
    with served.station.store.write() as connection:
        token = accounts.add_token(connection, "test", served.line, "camera")
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(served.app, log_level="warning", lifespan="off"))
    serving_thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    serving_thread.start()
    told: list[int] = []
    headers = {"Authorization": f"Bearer {token}"}
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def upload(content: bytes) -> None:
        url = f"{address}/api/v1/images"
        told.append(httpx.post(url, content=content, headers=headers, timeout=60).status_code)

    contents = [grey(tmp_path, level).read_bytes() for level in range(100, 150)]
    threads = [threading.Thread(target=upload, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    with changed:
        changed.wait_for(lambda: inside[0] >= ENTERING)
    assert httpx.get(f"{address}/login", timeout=60).status_code == 200
    go.set()
    for thread in threads:
        thread.join()
    server.should_exit = True
    serving_thread.join()
    listener.close()
    assert told == [202] * 50
    assert inside == [0, ENTERING]
