"""Images come in: counted while they stream, kept by digest, entered once.

A file lies at its digest before its row is written, so that every row has its file. File names are
labels and never paths.
"""

import errno
import hashlib
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, func, insert, select

from cdgp.errors import StationError
from cdgp.files import printable
from cdgp.station import trail
from cdgp.station.config import Config
from cdgp.station.decoding import Decoder
from cdgp.station.schema import groups, images, insert_row, lines
from cdgp.station.store import Store

IMAGES, INCOMING = "images", "incoming"
MIB, GIB = 2**20, 2**30
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST = 200
"""Characters of a part, lot, group, camera or label."""


class TooLargeError(StationError):
    """An image of too many bytes or pixels."""


class NoRoomError(StationError):
    """There is too little free space for another image."""


class BacklogFullError(StationError):
    """Too many images wait for their score."""


@dataclass(frozen=True)
class Facts:
    """What a sender says of an image; each may be empty."""

    part: str = ""
    """With the digest, what makes an image one and the same."""
    lot: str = ""
    group: str = ""
    """Images of one group share a split; the part where empty, else the image alone."""
    camera: str = ""
    label: str = ""
    """The file's name where it came from."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if len(value) > LONGEST:
                raise StationError(f"{name}: has more than {LONGEST} characters")
            if not value.isprintable():
                raise StationError(f"{name}: has characters that cannot be shown")


class Entered(NamedTuple):
    """An image that lies in the station."""

    id: int
    new: bool
    """Whether it was not there before."""
    decision: str | None


class Incoming:
    """A file that is being received: bytes are counted and digested as they come."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.most = path, most
        self.size = 0
        self._hash = hashlib.sha256()
        self._file = path.open("xb")

    def add(self, chunk: bytes) -> None:
        """Take a piece in; TooLargeError where all of them are."""
        self.size += len(chunk)
        if self.size > self.most:
            raise TooLargeError(
                f"the image has more than {self.most / MIB:g} MiB; make it smaller, or raise "
                "image_mib"
            )
        self._hash.update(chunk)
        self._file.write(chunk)

    def close(self) -> str:
        """Put it on the disk for good; returns the SHA-256 in hex."""
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        return self._hash.hexdigest()

    def drop(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class Intake:
    """The way into a station's home and store. Safe in threads."""

    def __init__(self, store: Store, config: Config) -> None:
        self.store, self.config = store, config
        self.images = store.home / IMAGES
        self.incoming = store.home / INCOMING
        self.incoming.mkdir(parents=True, exist_ok=True)
        for left in self.incoming.iterdir():  # by a process that was killed
            left.unlink()
        self.decoder = Decoder()
        self.short = threading.Event()
        """Set where an image was refused for want of space."""
        self._random = random.SystemRandom()

    @contextmanager
    def receiving(self) -> Iterator[Incoming]:
        """A place for a file that is about to come, which is removed when the block ends.

        Raises:
            NoRoomError: less than the reserve is free, or the disk is full.
        """
        self.check_room()
        file = Incoming(self.incoming / secrets.token_hex(8), int(self.config.image_mib * MIB))
        try:
            with disk_full():
                yield file
        except NoRoomError:
            self.short.set()
            raise
        finally:
            file.drop()

    def check_room(self) -> None:
        """Raise NoRoomError where less than the reserve is free."""
        free = shutil.disk_usage(self.store.home).free
        if free < self.config.reserve_gib * GIB:
            self.short.set()
            raise NoRoomError(
                f"{free / GIB:.3g} GiB are free, and {self.config.reserve_gib:g} are reserved for "
                "reviews; free some space"
            )

    def check_backlog(self) -> None:
        """Raise BacklogFullError where as many images wait as may."""
        with self.store.read() as connection:
            count = waiting(connection)
        if count >= self.config.backlog:
            raise BacklogFullError(
                f"{count} images wait for their score; send again a little later"
            )

    def enter(self, file: Incoming, line_id: int, facts: Facts) -> Entered:
        """Keep a received file and enter it, or find what was entered before.

        Args:
            file: of which all has come.
            line_id: of the line it belongs to.
            facts: of the image.

        Raises:
            ImageError: no image that can be decoded.
            TooLargeError: of too many pixels.
            NoRoomError: the disk is full.
        """
        with disk_full():
            digest = file.close()
            found = self._find(line_id, digest, facts.part)
            if found:
                return found
            height, width = self._checked_size(file.path)
            with self.store.write() as connection:
                # It may have come by another way in the meantime.
                found = _entered(connection, line_id, digest, facts.part)
                if found:
                    return found
                # Within the transaction, since retention removes files within one.
                target = self.path(digest)
                if not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.path.replace(target)
                    _sync(target.parent)
                image_id = self._insert(
                    connection, line_id, digest, facts, (file.size, width, height)
                )
        return Entered(image_id, True, None)

    def path(self, digest: str) -> Path:
        """Where the file of a digest lies."""
        return self.images / digest[:2] / digest

    def _find(self, line_id: int, digest: str, part: str) -> Entered | None:
        with self.store.read() as connection:
            return _entered(connection, line_id, digest, part)

    def _checked_size(self, path: Path) -> tuple[int, int]:
        height, width = self.decoder.check(path, self.config.megapixels)
        if height * width > self.config.megapixels * 1e6:
            raise TooLargeError(
                f"the image has {width} × {height} pixels, more than {self.config.megapixels:g} "
                "million; crop it, or raise megapixels"
            )
        return height, width

    def _insert(
        self,
        connection: Connection,
        line_id: int,
        digest: str,
        facts: Facts,
        sizes: tuple[int, int, int],
    ) -> int:
        size, width, height = sizes
        group = facts.group or facts.part or digest
        # A file that comes again stays where it was first, so that no group is in two splits; a
        # group that begins with it goes there too.
        first = connection.execute(
            select(images.c.group_name, images.c.split)
            .where(images.c.line_id == line_id, images.c.digest == digest)
            .order_by(images.c.id)
            .limit(1)
        ).first()
        split = self._split(connection, line_id, group, first.split if first else None)
        if first:
            group, split = first.group_name, first.split
        return insert_row(
            connection, images,
            line_id=line_id, digest=digest, part=facts.part, lot=facts.lot, group_name=group,
            camera=facts.camera, label=facts.label, size=size, width=width, height=height,
            split=split,
            audit=self._random.random() < self.config.audit_share,
            received_at=time.time(), attempts=0, problem="", version=0,
        )  # fmt: skip

    def _split(self, connection: Connection, line_id: int, group: str, copied: str | None) -> str:
        """The split of a group, drawn when it first enters, or that of the file it begins with."""
        known = connection.scalar(
            select(groups.c.split).where(groups.c.line_id == line_id, groups.c.name == group)
        )
        if known is not None:
            return str(known)
        drawn = self._random.random()
        test, calibration = self.config.test_share, self.config.calibration_share
        split = "test" if drawn < test else "calibration" if drawn < test + calibration else "fit"
        split = copied or split
        connection.execute(insert(groups).values(line_id=line_id, name=group, split=split))
        return split


def waiting(connection: Connection) -> int:
    """How many images wait for their score."""
    return connection.scalar(select(func.count()).where(images.c.decision.is_(None))) or 0


def line_named(connection: Connection, name: str) -> int | None:
    """The id of a line; None where there is none of this name."""
    return connection.scalar(select(lines.c.id).where(lines.c.name == name))


def add_line(connection: Connection, who: str, name: str) -> int:
    """Add a line, and return its id.

    Raises:
        StationError: the name is taken, empty, or longer than 100 characters.
    """
    name = clean(name.strip())
    if not name or len(name) > 100:
        raise StationError("a line's name has 1 to 100 characters")
    if line_named(connection, name) is not None:
        raise StationError(f"line {name}: there is one of this name already")
    trail.append(connection, who, "line added", f"line {name}")
    return insert_row(connection, lines, name=name, created_at=time.time())


def clean(text: str) -> str:
    """A name from outside as a label: shortened, without what cannot be shown."""
    return "".join(c if c.isprintable() else "�" for c in printable(text))[:LONGEST]


@contextmanager
def disk_full() -> Iterator[None]:
    """What the system raises where the disk is full, as NoRoomError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise NoRoomError(f"the disk is full ({error.strerror}); free some space") from error


def _entered(connection: Connection, line_id: int, digest: str, part: str) -> Entered | None:
    row = connection.execute(
        select(images.c.id, images.c.decision).where(
            images.c.line_id == line_id, images.c.digest == digest, images.c.part == part
        )
    ).first()
    return Entered(row.id, False, row.decision) if row else None


def _sync(folder: Path) -> None:
    """Make a rename outlive a power cut, where folders can be synchronised."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
