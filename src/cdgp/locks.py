"""One writer a folder or a file: a second one is refused, and told who is there, since when.

The operating system frees a lock when its process ends, in whatever way (``flock``). A share
without such locks gets a marker file in place of the lock, and the user is told.
"""

import errno
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cdgp.errors import OutputError
from cdgp.files import write_text

LOCK = ".lock"
HOLDER = ".lock.json"
"""Who holds the lock; a file of its own, since filelock empties the other one."""
MARKER = ".lock.soft"
"""In place of the lock, on a file system without locks."""
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
HOLDER_TRIES = 5
SOFT_SECONDS = 1.0
"""So long filelock may take to see that the process of a marker is gone."""

log = logging.getLogger(__name__)


@contextmanager
def one_writer(
    folder: Path, command: str, instead: str, file: Path | None = None
) -> Iterator[None]:
    """Hold a folder, or one file in it, for this call.

    The folder is made where it is missing, and removed again where nothing was written into it.

    Args:
        folder: to hold; the one that ``file`` is written into.
        command: which command it is, for the message to a second one.
        instead: what a second one can do instead of waiting.
        file: to hold instead of the folder as a whole.

    Raises:
        OutputError: another process or thread holds it, or it cannot be written.
    """
    what, prefix = (folder, "") if file is None else (file, f".{file.name}")
    lock, holder = folder / f"{prefix}{LOCK}", folder / f"{prefix}{HOLDER}"
    new: list[Path] = []
    try:
        try:
            new = [place for place in (folder, *folder.parents) if not place.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            held = _acquired(what, lock, holder, instead)
        except FileExistsError as error:
            raise OutputError(
                f"{what}: cannot be written: {error.filename} is no folder, or a link that leads "
                f"nowhere; {instead}"
            ) from error
        except OSError as error:
            raise OutputError(f"{what}: cannot be written: {error.strerror or error}") from error
        try:
            _write_holder(holder, command)
            yield
        finally:
            # Before the release: afterwards they may be those of the next process.
            for path in (holder, lock):
                with suppress(OSError):
                    path.unlink()
            held.release()
    finally:
        with suppress(OSError):
            for place in new:
                place.rmdir()


def _acquired(what: Path, lock: Path, holder: Path, instead: str) -> Any:
    """The lock, held, or the marker of a file system without locks."""
    from filelock import FileLock, SoftFileLock, Timeout

    refused = f"{what}: another process is writing there"
    native = FileLock(lock, timeout=0, fallback_to_soft=False)
    try:
        native.acquire()
    except Timeout as error:
        raise OutputError(f"{refused}{_holder(holder)}; wait for it, or {instead}") from error
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    else:
        return native
    marker = lock.with_name(f"{lock.name.removesuffix(LOCK)}{MARKER}")
    log.warning(
        "%s: this file system has no locks; %s keeps other processes away instead",
        what, marker.name,
    )  # fmt: skip
    soft = SoftFileLock(marker, timeout=SOFT_SECONDS)
    try:
        soft.acquire()
    except Timeout as error:
        raise OutputError(
            f"{refused}{_holder(holder)}; wait for it, or {instead}; where that process is gone, "
            f"remove {marker}"
        ) from error
    return soft


def _write_holder(path: Path, command: str) -> None:
    facts = {
        "pid": os.getpid(),
        "host": platform.node(),
        "command": command,
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
    write_text(path, json.dumps(facts) + "\n")


def _holder(path: Path) -> str:
    """Who holds a lock, in words; nothing where that cannot be read."""
    for _ in range(HOLDER_TRIES):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            command = f"cdgp {facts['command']}".strip()
            return (
                f" ({command}, process {facts['pid']} on {facts['host']}, since {facts['since']})"
            )
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(0.05)  # it may be just about to write them
    return ""
