"""The command line as a whole: help, further commands."""

import logging
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import typer
from tests.helpers import cdgp, plain
from typer.testing import CliRunner, Result

from cdgp.cli import common, main
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


def test_nothing_that_is_shown_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files come from anywhere; messages, warnings of the log and notes show them."""
    name = "a\x1b[31m\u202egnp.png"
    before = list(logging.getLogger().handlers)
    try:
        common.show_warnings()
        logging.getLogger("cdgp.data").warning("%s: is odd", name)
        logging.getLogger("cdgp.data").info("%s: is shown to nobody", name)
    finally:
        for handler in set(logging.getLogger().handlers) - set(before):
            logging.getLogger().removeHandler(handler)
    common.say(name)
    common.warn(f"1 of 2 cannot be used:\n  {name}")
    common.show_metrics({"computed_on": f"1 image of {name}", "notes": {"odd": [name]}})
    out, err = capsys.readouterr()
    for shown in (out, err):
        assert "\x1b" not in shown and "\u202e" not in shown
        assert shown.count(r"a\x1b[31m\u202egnp.png") == (3 if shown is err else 2)
    assert "cannot be used:\n  a" in err and "nobody" not in err


def test_errors_of_the_system_name_a_file_that_steers_no_terminal(tmp_path: Path) -> None:
    result = cdgp("check", tmp_path / "a\x1b[2J\n")
    assert result.exit_code == 3
    assert "\x1b" not in result.output and r"a\x1b[2J\n" in result.output
