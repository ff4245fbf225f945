"""What comes in is decoded once by a process with limits, before anything else decodes it.

An image that crashes the decoder, or makes it take memory or time without end, ends that process
and is refused; the next image gets a new one. A process that is started with this module as its
program answers each line of its input, a request in JSON, with a line.

Linux limits memory and processor time, macOS processor time alone, Windows neither; everywhere the
station waits for a bounded time.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cdgp.data.images import image_size, read_image
from cdgp.errors import ImageError

COMMAND = (sys.executable, "-m", "cdgp.station.decoding")
MEMORY, PIXEL = 768 * 2**20, 96
"""Bytes that the process may take, and those that each pixel of the image adds. The process itself
takes 120 MiB, and images 15 to 24 bytes a pixel, CMYK with a profile 59."""
SECONDS, MEGAPIXEL = 10.0, 2.0
"""Seconds of processor time an image, and those that each million pixels add. Most formats
take 0.01 to 0.08, CMYK with a profile 0.4."""
PATIENCE = 2.0
"""The station waits so many times as long."""
GRACE = 5.0
"""Seconds that it may take to end after its last word."""
RENEW = 1000
"""A process answers so many times, so that what a library never gives back does not add up."""
SECRETS = "CDGP_STATION_"
NO_MEMORY: dict[str, Any] = {
    "error": "the image needs more memory than one of its size should; save it as PNG",
    "memory": True,
}
"""The answer to an image for which there was too little."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TIFFFILE_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
"""Each thread would reserve memory, which counts, whether it uses it or not."""


class Decoder:
    """Decodes one image at a time in a process of its own. Safe in threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = 0
        self._lock = threading.Lock()

    def check(self, path: Path, megapixels: float) -> tuple[int, int]:
        """Decode an image, and give its (height, width).

        Args:
            path: of the image.
            megapixels: in millions; a larger image is not decoded, and its size is all there is.

        Raises:
            ImageError: it cannot be decoded, or not within the limits. It does not name the path.
            OSError: the process cannot be started.
        """
        with self._lock:
            if self._answered >= RENEW:
                self._end()
            alone, answer = False, NO_MEMORY
            while "memory" in answer and not alone:  # what earlier images left may have taken it
                answer = self._ask(path, megapixels)
                alone = self._answered == 1
                if "memory" in answer:
                    self._end()
        if "error" in answer:
            raise ImageError(str(answer["error"]))
        height, width = answer["size"]
        return height, width

    def close(self) -> None:
        """End the process; the next image gets a new one."""
        with self._lock:
            self._end()

    def _ask(self, path: Path, megapixels: float) -> dict[str, Any]:
        process = self._ready()
        stdin, stdout = _pipes(process)
        killing = threading.Timer(PATIENCE * seconds(megapixels * 1e6), process.kill)
        killing.daemon = True
        killing.start()
        try:
            stdin.write(json.dumps([str(path), megapixels]).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        waiting = killing.is_alive()
        killing.cancel()
        if not line.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):  # it is about to end, and tells why
                process.wait(GRACE)
            return {"error": f"the image {_ending(self._end(), waiting)}; save it as PNG"}
        self._answered += 1
        found: dict[str, Any] = json.loads(line)
        return found

    def _ready(self) -> "subprocess.Popen[bytes]":
        """The process, a new one where the last has ended."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        # Without the station's secrets, which it has no use for.
        own = {key: value for key, value in os.environ.items() if not key.startswith(SECRETS)}
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**own, **ONE_THREAD}
        )
        self._process, self._answered = process, 0
        if not _pipes(process)[1].readline():
            code = self._end()
            raise ChildProcessError(f"the process that decodes images does not start (code {code})")
        return process

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        code = process.wait()
        for pipe in _pipes(process):
            pipe.close()
        return code


def _pipes(process: "subprocess.Popen[bytes]") -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _ending(code: int, waiting: bool) -> str:
    """What an image did to the process that has ended with a code."""
    why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if not waiting or why == "SIGXCPU":
        return "takes too long to decode"
    return f"crashes the decoder ({why})"


def seconds(pixels: float) -> float:
    """How long the processor may work on an image."""
    return SECONDS + MEGAPIXEL * pixels / 1e6


# In the process


def work(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    answers.write(b"ready\n")
    answers.flush()
    for line in requests:
        path, megapixels = json.loads(line)
        answers.write(json.dumps(_answer(Path(path), megapixels)).encode() + b"\n")
        answers.flush()


def _answer(path: Path, megapixels: float) -> dict[str, Any]:
    try:
        limit(0)
        height, width = image_size(path, first_page=True)
        if height * width <= megapixels * 1e6:
            limit(height * width)
            read_image(path, 65535, first_page=True)
    except MemoryError:
        return NO_MEMORY
    except ImageError as error:
        if isinstance(error.__cause__, MemoryError):
            return NO_MEMORY
        return {"error": str(error).replace(str(path), "the image")}
    return {"size": [height, width]}


def limit(pixels: int) -> None:
    """Bound what this process takes for an image of so many pixels from now on."""
    if sys.platform == "win32":
        return
    import resource

    limits = {resource.RLIMIT_CPU: int(time.process_time() + seconds(pixels)) + 1}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = MEMORY + PIXEL * pixels
    for kind, soft in limits.items():
        hard = resource.getrlimit(kind)[1]  # of the station; it may be lower already
        most = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(kind, (most, hard))


def main() -> None:
    """Be that process."""
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the station, which ends this one
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
