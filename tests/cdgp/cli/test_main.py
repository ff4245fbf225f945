"""The command line as a whole: help, further commands."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import typer
from tests.helpers import cdgp, plain
from typer.testing import CliRunner, Result

from cdgp.cli import main
from cdgp.cli.train import train


def test_help_names_every_command_and_shows_examples() -> None:
    assert all(word in plain(cdgp("--help")) for word in ("train", "predict", "evaluate", "demo"))
    for command in ("train", "predict", "evaluate", "demo"):
        result = cdgp(command, "--help")
        assert result.exit_code == 0
        assert f"cdgp {command}" in plain(result).split("Examples:")[1]


def hello(name: str, loud: bool = False) -> None:
    """Say hello."""
    if name == "nobody":
        raise typer.Exit(3)
    typer.echo(f"hello {name}{'!' if loud else ''}")


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """A command line with a command of another package."""
    found = EntryPoints([EntryPoint("say-hello", "somewhere:hello", main.COMMANDS)])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **wanted: found.select(**wanted))
    monkeypatch.setattr(EntryPoint, "load", lambda self: hello)
    app = typer.Typer()
    app.command()(train)
    main.add_further(app, "say-hello", "Greets.")
    main.add_further(app, "say-goodbye", "Is not installed.")
    return app


def test_commands_of_other_packages(further: typer.Typer) -> None:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(further, arguments)

    assert "Greets." in plain(call("--help"))
    assert call("say-hello", "you", "--loud").output == "hello you!\n"
    assert "Say hello." in plain(call("say-hello", "--help"))
    for option in ("--help", "-h"):
        assert call("say-hello", option).exit_code == 0
    assert call("say-hello", "nobody").exit_code == 3
    assert call("say-hello", "you", "--nonsense").exit_code == 2
    assert call("say-goodbye").exit_code == 2
