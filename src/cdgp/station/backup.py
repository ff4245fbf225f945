"""A station as a folder of files: copied while it runs, checked when it is put back."""

import shutil
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, select

from cdgp.errors import StationError
from cdgp.files import atomic_write, digest
from cdgp.station import trail
from cdgp.station.config import CONFIG
from cdgp.station.intake import IMAGES
from cdgp.station.pipeline import MODELS
from cdgp.station.schema import images, models
from cdgp.station.store import (
    DATABASE,
    Store,
    check_local,
    copy_sqlite,
    known_revisions,
    read_only,
    revision,
)


def backup(home: Path, out: Path) -> int:
    """Copy a station on SQLite into a folder, also while it runs; returns the number of files.

    Files that an earlier backup brought there are not copied again. Overlays are left out: they
    are drawn again.

    Raises:
        StationError: there is no station, or the folder holds another one's.
    """
    database = home / DATABASE
    if not database.is_file():
        raise StationError(f"{home}: holds no {DATABASE}; of PostgreSQL, use pg_dump")
    out.mkdir(parents=True, exist_ok=True)
    check_local(home)
    # The database first: every file that it names is there already.
    copy_sqlite(database, out / DATABASE)
    with read_only(out / DATABASE).begin() as connection:
        wanted = _files(connection)
    if (home / CONFIG).is_file():
        shutil.copyfile(home / CONFIG, out / CONFIG)
    return _copy(wanted, home, out, lambda path: None)


def restore(saved: Path, home: Path) -> int:
    """Put a backup into a new home; returns the number of files.

    Raises:
        StationError: no backup, a home that holds something, a newer version's database, a changed
            audit trail, or a file that is not what its name says.
    """
    if not (saved / DATABASE).is_file():
        raise StationError(f"{saved}: holds no {DATABASE}; give the folder of a backup")
    if home.exists() and any(home.iterdir()):
        raise StationError(f"{home}: holds something already; give a new --home")
    with read_only(saved / DATABASE).begin() as connection:
        if revision(connection) not in known_revisions():
            raise StationError(f"{saved}: was written by a newer version of cdgp; install that one")
        trail.verify(connection)
        wanted = _files(connection)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_local(home)
    if (saved / CONFIG).is_file():
        shutil.copyfile(saved / CONFIG, home / CONFIG)
    count = _copy(wanted, saved, home, _check)
    copy_sqlite(saved / DATABASE, home / DATABASE)  # last: a home without it is no station
    Store(home).close()  # migrated where it is older
    return count


def _files(connection: Connection) -> list[Path]:
    """The files that a database names, relative to its home."""
    kept = select(images.c.digest).where(images.c.removed_at.is_(None)).distinct()
    of_images = [Path(IMAGES) / key[:2] / key for key in connection.scalars(kept)]
    of_models = connection.execute(select(models.c.digest, models.c.suffix))
    return of_images + [Path(MODELS) / f"{row.digest}{row.suffix}" for row in of_models]


def _copy(wanted: list[Path], source: Path, out: Path, check: Callable[[Path], None]) -> int:
    count = 0
    for name in wanted:
        given, target = source / name, out / name
        if not given.exists():  # retention has removed it meanwhile
            continue
        if not target.exists() or target.stat().st_size != given.stat().st_size:
            with atomic_write(target) as temporary:
                shutil.copyfile(given, temporary)
        check(target)
        count += 1
    return count


def _check(path: Path) -> None:
    if digest(path) != path.stem:
        path.unlink()
        raise StationError(f"{path}: is not what its name says; take another backup")
