"""Folders of results: files are whole or absent, here and elsewhere."""

from pathlib import Path

import fsspec
import pytest
from tests.helpers import raised

from cdgp.cluster.store import Store, as_place
from cdgp.errors import OutputError, SettingsError


@pytest.fixture(params=["here", "elsewhere"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "here":
        return Store(str(tmp_path / "new/out"))
    return Store(f"memory://{tmp_path.name}/out")


def test_file_has_its_name_once_it_is_whole(store: Store) -> None:
    assert store.names() == set() and not store.has("a")
    with store.writing("a") as file:
        file.write(b"first")
        assert "a" not in store.names()
    with store.writing("a") as file:
        file.write(b"second")
    assert store.names() == {"a"} and store.has("a")
    with store.reading("a") as file:
        assert file.read() == b"second"
    with pytest.raises(ZeroDivisionError if store.local else OutputError), store.writing("a"):
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), store.writing("b"):
        raise KeyboardInterrupt
    assert store.names() == {"a"}
    store.remove("a")
    store.remove("a")
    assert store.names() == set()
    raised(lambda: store.reading("a").__enter__(), store.place, error=OutputError)


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_place("s3://bucket/a/") == "s3://bucket/a"
    assert as_place("a/../b") == str(tmp_path / "b") == as_place(f"file://{tmp_path}/b")


@pytest.mark.parametrize("place", ["/proc/out", "/dev/null/out"])
def test_places_that_cannot_be_written(place: str) -> None:
    raised(lambda: Store(place).writing("a").__enter__(), place, "cannot be written",
           error=OutputError)  # fmt: skip


def test_store_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file system raises errors of its own."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("AccessDenied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", refuse)
    raised(lambda: Store("memory://x").writing("a").__enter__(),
           "memory://x", "cannot be written", "AccessDenied", error=OutputError)  # fmt: skip


def test_file_system_that_is_not_installed() -> None:
    raised(lambda: Store("nonesuch://x").names(), "nonesuch://x", "cannot be opened",
           error=SettingsError)  # fmt: skip
