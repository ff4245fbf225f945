"""The database of a station: SQLite in its home, or PostgreSQL by URL, by the same code.

SQLite: one connection of one process writes and checkpoints, and readers open the file read-only,
since some versions lose pages when several connections reset the write-ahead log. A lock of the
home, or of the PostgreSQL database, keeps a second station away.
"""

import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

from cdgp.errors import StationError
from cdgp.files import absolute
from cdgp.locks import one_writer

DATABASE = "station.db"
BACKUPS = "backups"
MIGRATIONS = Path(__file__).parent / "migrations"
NETWORK = frozenset(
    (
        "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ceph", "glusterfs",
        "lustre", "beegfs", "gpfs", "ncpfs", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph",
        "fuse.s3fs", "fuse.rclone", "fuse.davfs2",
    )
)  # fmt: skip
"""File systems on which locks and shared memory of SQLite do not hold."""
ONE_STATION = 0x63646770
"""Key of the lock of a PostgreSQL database."""
WAIT = 30.0
"""Seconds that SQLite waits for a lock of the file."""


class Store:
    """The database of a station, migrated and held until ``close``.

    Safe in threads: ``write`` lets one at a time in, ``read`` any number.
    """

    def __init__(self, home: Path, url: str | None = None) -> None:
        """Open, and migrate where needed, after a backup.

        Args:
            home: the station's folder; made where it is missing.
            url: ``postgresql://user:password@host/database``, or ``?host=/folder`` of its socket;
                SQLite in the home where None.

        Raises:
            StationError: the home lies on a network file system, the database was written by a
                newer version, or cannot be reached, or serves another station.
            OutputError: another station runs in this home.
        """
        self.home = absolute(home)
        self.url = url
        self.file = None if url else self.home / DATABASE
        self._lock = threading.Lock()
        self._held = ExitStack()
        try:
            self._held.enter_context(one_writer(self.home, "station serve", "give another --home"))
            if url:
                self._writer = self._reader = create_engine(postgresql(url), pool_pre_ping=True)
                self._held.callback(self._writer.dispose)
                self._held.enter_context(_only_station(self._writer))
            else:
                check_local(self.home)
                file = self.home / DATABASE
                self._writer = _sqlite(lambda: _open(file, "rwc"), "BEGIN IMMEDIATE", True)
                self._held.callback(self._writer.dispose)
                self._reader = read_only(file)
                self._held.callback(self._reader.dispose)
            self._migrate()
        except BaseException:
            self._held.close()
            raise

    def close(self) -> None:
        """Close all connections, and let another station in."""
        with self._lock:
            self._held.close()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write: all of it, durable when the block ends, or nothing.

        Blocks of other threads wait; so a block is short, and does not open another one.
        """
        with self._lock, self._writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database, and cannot write to SQLite."""
        with self._reader.begin() as connection:
            yield connection

    def _migrate(self) -> None:
        with self.write() as connection:
            before, newest = revision(connection), head()
            if before == newest:
                return
            if before is not None and before not in known_revisions():
                raise StationError(
                    f"{self.file or 'the database'}: was written by a newer version of cdgp "
                    f"(schema {before}, this one knows {newest}); install that version, or restore "
                    "a backup of before the upgrade"
                )
        if before is not None:
            self.backup(self.home / BACKUPS, f"{before}-before-{newest}")
        config = AlembicConfig()
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        with self.write() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def backup(self, folder: Path, name: str) -> Path:
        """Copy the database into a folder as it is now, while it is used; returns the copy.

        Raises:
            StationError: PostgreSQL's ``pg_dump`` is missing or fails.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        if self.file:
            return copy_sqlite(self.file, path.with_name(f"{path.name}.db"))
        assert self.url is not None
        return _dump(make_url(self.url), path.with_name(f"{path.name}.sql"))


def postgresql(url: str) -> URL:
    """The URL with the driver that is used here; StationError where it is of another kind."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StationError(f"--db: {error}") from error
    if parsed.get_backend_name() != "postgresql":
        raise StationError(
            f"--db: {parsed.render_as_string()} is of another kind; give "
            "postgresql://user:password@host/database, or leave it out for SQLite in the home"
        )
    host = parsed.query.get("host")
    query = {} if host is None else {"unix_sock": f"{host}/.s.PGSQL.{parsed.port or 5432}"}
    return parsed.set(drivername="postgresql+pg8000", query=query)


def check_local(folder: Path, mounts: str | None = None) -> None:
    """Raise StationError where a folder lies on a network file system.

    ``mounts`` is the text of ``/proc/self/mountinfo``; that of this machine where None. Systems
    without that file are not checked.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
    place = folder.resolve()
    kinds: dict[Path, str] = {}
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind:
            point = fields.split()[4].replace("\\040", " ")
            kinds[Path(point)] = kind.split()[0]
    kind = next((kinds[above] for above in (place, *place.parents) if above in kinds), "")
    if kind in NETWORK:
        raise StationError(
            f"{folder}: lies on a network file system ({kind}), on which SQLite loses data; give a "
            "--home on a disk of this machine, or use PostgreSQL with --db"
        )


def known_revisions() -> list[str]:
    """The schemas that this version can migrate from, newest first."""
    return [script.revision for script in _scripts().walk_revisions()]


def head() -> str:
    """The schema of this version."""
    newest = _scripts().get_current_head()
    assert newest is not None
    return newest


def revision(connection: Connection) -> str | None:
    """The schema of a database; None where it has none."""
    return MigrationContext.configure(connection).get_current_revision()


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(MIGRATIONS))


def read_only(file: Path) -> Engine:
    """Connections to an SQLite file that cannot write to it, nor checkpoint."""
    return _sqlite(lambda: _open(file, "ro"), "BEGIN", False)


def copy_sqlite(file: Path, target: Path) -> Path:
    """Copy an SQLite database as it is now, whole or not at all; returns the copy.

    Raises:
        StationError: it cannot be read, or the copy not be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        with closing(_open(file, "ro")) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
            # A copy needs no log beside it.
            copy.execute("PRAGMA journal_mode=DELETE")
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.replace(target)
    except (sqlite3.Error, OSError) as error:
        raise StationError(f"{target}: the database {file} cannot be copied: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _open(file: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(file))}?mode={mode}", uri=True, timeout=WAIT, check_same_thread=False,
        isolation_level=None,
    )  # fmt: skip
    if mode != "ro":
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # what is acknowledged outlives a power cut
        connection.execute("PRAGMA foreign_keys=ON")
    return connection


def _sqlite(opened: Callable[[], sqlite3.Connection], begin: str, one: bool) -> Engine:
    if one:
        engine = create_engine("sqlite://", creator=opened, poolclass=StaticPool)
    else:
        engine = create_engine(
            "sqlite://", creator=opened, poolclass=QueuePool, pool_size=8, max_overflow=64
        )

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        # Python's own transactions would begin late, and leave table changes out.
        connection.exec_driver_sql(begin)

    return engine


@contextmanager
def _only_station(engine: Engine) -> Iterator[None]:
    """Hold PostgreSQL's lock of the one station that uses a database."""
    try:
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    except DBAPIError as error:
        raise StationError(
            f"--db: {engine.url.render_as_string()} cannot be reached: {error.orig}; check the "
            "server, the user and the database"
        ) from error
    with connection:
        held = connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": ONE_STATION})
        if not held:
            raise StationError(
                f"--db: {engine.url.render_as_string()} serves another station; stop that one, or "
                "give another database"
            )
        yield


def _dump(url: URL, path: Path) -> Path:
    program = shutil.which("pg_dump")
    if program is None:
        raise StationError(
            "--db: a copy of the database is made before it is changed, and pg_dump is missing; "
            "install PostgreSQL's client programs"
        )
    plain = url.set(drivername="postgresql", password=None).render_as_string()
    done = subprocess.run(
        [program, "--no-password", f"--file={path}", plain],
        env={**os.environ, "PGPASSWORD": str(url.password or "")},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise StationError(f"--db: pg_dump failed: {done.stderr.strip()}")
    return path


@contextmanager
def reading(home: Path, url: str | None = None) -> Iterator[Connection]:
    """A connection that only reads, beside a station that runs or without one.

    Raises:
        StationError: there is no station, or PostgreSQL cannot be reached.
    """
    if url:
        engine = create_engine(postgresql(url))
    elif (home / DATABASE).is_file():
        engine = read_only(absolute(home / DATABASE))
    else:
        raise StationError(f"{home}: holds no {DATABASE}; give the --home of a station")
    try:
        with engine.begin() as connection:
            yield connection
    except DBAPIError as error:
        raise StationError(f"{url or home}: cannot be read: {error.orig}") from error
    finally:
        engine.dispose()
