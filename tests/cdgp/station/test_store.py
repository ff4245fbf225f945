"""The database: migrated, backed up, one writer, the same on SQLite and PostgreSQL."""

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError
from tests.helpers import raised

from cdgp.errors import OutputError, StationError
from cdgp.station import schema, store, trail
from cdgp.station.schema import lines
from cdgp.station.store import DATABASE, Store


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A fresh store of each kind."""
    url = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    made = Store(tmp_path / "home", url)
    yield made
    made.close()


both = pytest.mark.parametrize("opened", ["sqlite", "postgresql"], indirect=True)


@both
def test_the_migrations_make_the_tables_of_the_schema(opened: Store) -> None:
    with opened.read() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), schema.metadata)
    assert differences == []


@both
def test_a_block_is_written_whole_or_not_at_all(opened: Store) -> None:
    with pytest.raises(ZeroDivisionError), opened.write() as connection:
        connection.execute(insert(lines).values(name="a", created_at=0))
        1 / 0  # noqa: B018
    with opened.write() as connection:
        connection.execute(insert(lines).values(name="b", created_at=0.1 + 0.2))
    with opened.read() as connection:
        assert [
            tuple(row) for row in connection.execute(select(lines.c.name, lines.c.created_at))
        ] == [("b", 0.1 + 0.2)]


@both
def test_many_threads_write_and_read_at_the_same_time(opened: Store) -> None:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                with opened.write() as connection:
                    connection.execute(insert(lines).values(name=f"{number} {i}", created_at=0))
                    trail.append(connection, "x", "line added", f"{number} {i}")
                with opened.read() as connection:
                    connection.scalar(select(func.count()).select_from(lines))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    with opened.read() as connection:
        assert connection.scalar(select(func.count()).select_from(lines)) == 120
        assert trail.verify(connection)[0] == 120


@both
def test_the_audit_trail_cannot_be_changed(opened: Store) -> None:
    with opened.write() as connection:
        trail.append(connection, "x", "did", "it", before={"a": 1}, after={"ä": "ö"}, why="so")
    for statement in (update(schema.trail).values(why="else"), schema.trail.delete()):
        with pytest.raises(DBAPIError, match="append-only"), opened.write() as connection:
            connection.execute(statement)
    with opened.read() as connection:
        assert trail.verify(connection)[0] == 1


def test_a_second_station_of_a_postgresql_database_is_refused(
    tmp_path: Path, postgres: str
) -> None:
    first = Store(tmp_path / "a", postgres)
    raised(lambda: Store(tmp_path / "b", postgres), "serves another station", error=StationError)
    first.close()
    Store(tmp_path / "b", postgres).close()


def test_readers_of_sqlite_cannot_write(tmp_path: Path) -> None:
    opened = Store(tmp_path)
    with pytest.raises(DBAPIError, match="readonly"), opened.read() as connection:
        connection.execute(insert(lines).values(name="a", created_at=0))
    opened.close()


def test_a_second_station_in_a_home_is_refused(tmp_path: Path) -> None:
    first = Store(tmp_path)
    raised(lambda: Store(tmp_path), "another process", "--home", error=OutputError)
    first.close()
    Store(tmp_path).close()


def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    raised(lambda: Store(tmp_path), "newer version", "9999", error=StationError)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [
            ("9999",)
        ]
    connection.close()


NEXT = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9998", "{head}"

def upgrade():
    op.add_column("lines", sa.Column("note", sa.Text()))
    {last}
"""


@both
def test_a_migration_comes_after_a_backup_and_is_whole(
    opened: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with opened.write() as connection:
        connection.execute(insert(lines).values(name="kept", created_at=0))
    opened.close()
    url = None if opened.file else request.getfixturevalue("postgres")
    migrations = tmp_path / "migrations"
    shutil.copytree(store.MIGRATIONS, migrations)
    monkeypatch.setattr(store, "MIGRATIONS", migrations)
    script = migrations / "versions" / "9998_next.py"
    head = store.head()
    script.write_text(NEXT.format(head=head, last="1 / 0"))
    with pytest.raises(ZeroDivisionError):
        Store(opened.home, url)
    (backup,) = (opened.home / "backups").iterdir()
    if opened.file:
        with sqlite3.connect(backup) as copy:
            assert copy.execute("SELECT name FROM lines").fetchall() == [("kept",)]
        copy.close()
    else:
        assert "kept" in backup.read_text()
    script.write_text(NEXT.format(head=head, last=""))
    again = Store(opened.home, url)
    with again.read() as connection:
        assert connection.execute(text("SELECT name, note FROM lines")).fetchall() == [
            ("kept", None)
        ]
    again.close()


EARLIER = {
    "0001": """
        INSERT INTO users VALUES (1, 'anna', 'x', 'operator', false, false, 0);
        INSERT INTO lines VALUES (1, 'a', 0);
        INSERT INTO models VALUES (1, 'm', 'model', '.onnx', 'probability', 0.5, 0);
        INSERT INTO policies VALUES (1, 1, 1, 0.3, 0.7, 'so', 1, 0);
        INSERT INTO images VALUES (1, 1, 'd', 'p', '', 'p', '', 'p.png', 9, 20, 16, 'test', true, 0,
            1, 'unsure', 0, '', 'defective', 1, NULL);
        INSERT INTO scores (id, image_id, model_id, policy_id, score, decision, regions, warnings,
            at) VALUES (1, 1, 1, 1, 0.5, 'unsure', '[]', '[]', 0);
        INSERT INTO reviews VALUES (1, 1, 1, 'defective', 1, 0, 'b', NULL);
    """,
    "0002": "INSERT INTO candidates VALUES (1, 1, 1, 'next.onnx', 0);",
    "0003": "INSERT INTO outbox VALUES (1, 'k', 0, 'review', '{}');",
}
"""Rows as each schema before the newest has them, on top of those of the schema before it."""


@both
@pytest.mark.parametrize("start", sorted(EARLIER))
def test_a_database_of_an_earlier_schema_is_migrated_with_its_rows(
    opened: Store, start: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.close()
    url = None if opened.file else request.getfixturevalue("postgres")
    if opened.file:
        opened.file.unlink()
    else:
        engine = create_engine(store.postgresql(str(url)))
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
    with monkeypatch.context() as patch:
        patch.setattr(store, "head", lambda: start)
        upgrade = command.upgrade
        patch.setattr(command, "upgrade", lambda config, to: upgrade(config, start))
        earlier = Store(opened.home, url)
        with earlier.write() as connection:
            for step in sorted(key for key in EARLIER if key <= start):
                for statement in EARLIER[step].split(";")[:-1]:
                    connection.execute(text(statement))
        earlier.close()
    again = Store(opened.home, url)
    with again.write() as connection:
        assert store.revision(connection) == store.head()
        migrated = MigrationContext.configure(connection)
        assert compare_metadata(migrated, schema.metadata) == []
        row = connection.execute(select(schema.images)).one()
        assert (row.verdict, row.version, row.split, row.audit) == ("defective", 1, "test", True)
        assert connection.execute(select(schema.scores.c.score)).one() == (0.5,)
        connection.execute(
            insert(schema.drawings).values(image_id=1, version=1, shapes="[]", user_id=1, at=0)
        )
    assert len(list((again.home / "backups").iterdir())) == 1
    again.close()


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / {share} rw - {kind} server:/share rw
"""


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_network_file_systems_are_refused(tmp_path: Path, kind: str) -> None:
    mounts = MOUNTS.format(share=tmp_path / "share", kind=kind)
    home = tmp_path / "share" / "station"
    raised(lambda: store.check_local(home, mounts), kind, "--home", error=StationError)
    store.check_local(tmp_path / "shared", mounts)
    store.check_local(home, MOUNTS.format(share=tmp_path / "share", kind="ext4"))


def test_a_url_of_another_kind_is_refused(tmp_path: Path) -> None:
    for url in ("mysql://u:secret@h/d", "station.db"):
        message = raised(lambda url=url: Store(tmp_path, url), "--db", error=StationError)  # type: ignore[misc]
        assert "secret" not in message


def tampered(tmp_path: Path, *statements: str) -> Path:
    """A home whose trail of five entries somebody changed behind the station's back."""
    opened = Store(tmp_path)
    with opened.write() as connection:
        for number in range(5):
            trail.append(connection, "x", "did", f"it {number}")
    opened.close()
    with sqlite3.connect(tmp_path / DATABASE) as file:
        for name in ("UPDATE", "DELETE"):
            file.execute(f"DROP TRIGGER trail_kept_{name}")
        for statement in statements:
            file.execute(statement)
    file.close()
    return tmp_path / DATABASE


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE trail SET who = 'y' WHERE id = 3", "entry 3 was changed"),
        ("DELETE FROM trail WHERE id = 2", "entry 2 is missing"),
        ("DELETE FROM trail WHERE id = 1", "entry 1 is missing"),
        ("UPDATE trail SET previous = '' WHERE id = 4", "entry 4 does not follow"),
    ],
)
def test_a_changed_trail_is_found(tmp_path: Path, statement: str, words: str) -> None:
    file = tampered(tmp_path, statement)
    with store.read_only(file).begin() as connection:
        raised(lambda: trail.verify(connection), words, error=StationError)


def test_an_untouched_trail_is_sound(tmp_path: Path) -> None:
    with store.read_only(tampered(tmp_path)).begin() as connection:
        count, last = trail.verify(connection)
        assert count == 5
        assert last == connection.scalar(select(schema.trail.c.hash).where(schema.trail.c.id == 5))
