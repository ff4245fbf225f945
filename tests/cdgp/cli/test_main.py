"""The command line as a whole: help, further commands."""

from tests.helpers import cdgp, plain


def test_help_names_every_command_and_shows_examples() -> None:
    assert all(word in plain(cdgp("--help")) for word in ("train", "predict", "evaluate", "demo"))
    for command in ("train", "predict", "evaluate", "demo"):
        result = cdgp(command, "--help")
        assert result.exit_code == 0
        assert f"cdgp {command}" in plain(result).split("Examples:")[1]
