"""``cdgp station``: an inspection station, its backup and its audit trail."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from cdgp.cli.common import bars, handle_errors, say, warn

LOOPBACK = ("127.0.0.1", "::1", "localhost")

Home = Annotated[Path, typer.Option("--home", help="Folder of the station.")]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="CDGP_STATION_DB",
        help="postgresql://user:password@host/database; SQLite in --home where nothing is said.",
        metavar="URL",
    ),
]

station = typer.Typer(
    name="station",
    help="Score, review and keep the images of a line, in a browser.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@station.command()
@handle_errors
def serve(
    home: Home = Path("station"),
    database: Database = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8420,
) -> None:
    """Serve a station until Ctrl-C.

    The first start prints a one-time password of the user admin, and listens on this machine
    alone until it is changed. Settings are in station.toml in the home.

    Examples:

      cdgp station serve

      cdgp station serve --home /srv/station --host 0.0.0.0
    """
    import socket

    from cdgp.errors import StationError

    check_installed()
    import uvicorn

    from cdgp.station import accounts
    from cdgp.station.app import make_app
    from cdgp.station.service import Station

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise StationError(
            f"--host {host} --port {port}: {error.strerror or error}; give another port or address"
        ) from error
    with listener:
        opened = Station(home, database)
        try:
            with opened.store.write() as connection:
                password = accounts.first_password(connection)
            if password and host not in LOOPBACK:
                raise StationError(
                    f"--host {host}: until the first password is changed, a station listens on "
                    "this machine alone; leave --host out, sign in, and start again"
                )
            app = make_app(opened)
        except BaseException:
            opened.close()
            raise
        if password:
            say(f"user {accounts.ADMINISTRATOR}, one-time password: {password}")
        say(f"station {home}: http://{f'[{host}]' if ':' in host else host}:{port}/")
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False,
            # A proxy on this machine may say whom it speaks for.
            proxy_headers=True, forwarded_allow_ips=["127.0.0.1", "::1"],
            timeout_graceful_shutdown=10,
        )  # fmt: skip
        with suppress(KeyboardInterrupt):  # the way to end it
            uvicorn.Server(settings).run(sockets=[listener])


@station.command()
@handle_errors
def backup(
    out: Annotated[Path, typer.Argument(help="Folder for the copy; a second one adds to it.")],
    home: Home = Path("station"),
) -> None:
    """Copy a station on SQLite, also while it runs."""
    check_installed()
    from cdgp.station.backup import backup as copy

    say(f"{copy(home, out)} files and the database: {out}")


@station.command()
@handle_errors
def restore(
    saved: Annotated[Path, typer.Argument(help="Folder of a backup.")],
    home: Home = Path("station"),
) -> None:
    """Put a backup into a new home, and check every file and the audit trail."""
    check_installed()
    from cdgp.station.backup import restore as put_back

    say(f"{put_back(saved, home)} files and the database: {home}")


@station.command(name="verify-audit")
@handle_errors
def verify_audit(home: Home = Path("station"), database: Database = None) -> None:
    """Check that no entry of the audit trail was changed, added, moved or removed.

    Keep the hash that is printed outside of the station: with it, entries that were cut off at the
    end are found too.
    """
    check_installed()
    from cdgp.station import trail
    from cdgp.station.store import reading

    with reading(home, database) as connection:
        count, last = trail.verify(connection)
    say(f"{count} entries, all sound; the last hash is {last or 'none'}")


@station.command(name="reset-password")
@handle_errors
def reset_password(
    name: Annotated[str, typer.Argument(help="Name of the user.")],
    home: Home = Path("station"),
    database: Database = None,
) -> None:
    """Give a user a new one-time password; their sessions end.

    On the station's machine, whether the station runs or not.

    Examples:

      cdgp station reset-password admin --home /srv/station
    """
    check_installed()
    from cdgp.station.resetting import reset

    say(f"user {name}, one-time password: {reset(home, database, name)}")


@station.command()
@handle_errors
def dashboard() -> None:
    """Print a Grafana dashboard of what Prometheus reads at /metrics, as JSON.

    Examples:

      cdgp station dashboard > station.json
    """
    from importlib.resources import files

    typer.echo(files("cdgp.station").joinpath("dashboard.json").read_text("utf-8"), nl=False)


@station.command()
@handle_errors
def demo(
    home: Home = Path("station-demo"),
    model: Annotated[
        Path | None,
        typer.Option(help="A model of solar cells, from cdgp demo; trained where none is given."),
    ] = None,
) -> None:
    """Fill a new station with solar cells, so that there is something to look at.

    Examples:

      cdgp station demo --model runs/demo

      cdgp station serve --home station-demo
    """
    check_installed()
    from cdgp.cli.demo import new_cells, short_training, train_demo
    from cdgp.errors import StationError
    from cdgp.run_folder import model_file
    from cdgp.station.demo import DEFECTIVE, GOOD, configure, fill
    from cdgp.station.service import Station

    if home.exists() and any(home.iterdir()):
        raise StationError(f"{home}: holds something already; give a new --home")
    if model is None:
        warn("training a small model first, as cdgp demo does")
        train_demo(home.with_name(f"{home.name}-run"), bars(False))
        model = home.with_name(f"{home.name}-run")
    configure(home, short_training())
    opened = Station(home)
    try:
        password = fill(opened, model_file(model), new_cells(GOOD, DEFECTIVE))
    finally:
        opened.close()
    say(f"station {home} is filled: cdgp station serve --home {home}")
    say(f"user engineer, one-time password: {password}")


def check_installed() -> None:
    """Raise SettingsError where the extra is not installed."""
    from importlib.util import find_spec

    from cdgp.errors import SettingsError

    for name in ("alembic", "argon2", "fastapi", "prometheus_client", "sqlalchemy", "uvicorn"):
        if find_spec(name) is None:
            raise SettingsError(
                f"station: {name} is not installed: pip install 'cdgp[station]', or in a clone "
                "pip install -e '.[station]'"
            )
