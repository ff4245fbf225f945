"""Who may do what: users and roles, passwords, sessions, and the upload tokens of lines.

Most functions take a connection of the store. Random secrets are kept as SHA-256, passwords as
argon2.
"""

import hashlib
import secrets
import time
from typing import NamedTuple

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerifyMismatchError
from sqlalchemy import (
    ColumnElement,
    Connection,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from cdgp.errors import StationError
from cdgp.station import trail
from cdgp.station.schema import AnyRow, lines, login_failures, sessions, tokens, users
from cdgp.station.store import Store

ROLES = ("viewer", "operator", "engineer", "administrator")
"""Each may do what those before it may: look; review and upload; lines, models and policies; users
and tokens."""
ADMINISTRATOR = "admin"
LEAST_PASSWORD, MOST_PASSWORD = 10, 1000
SESSION_IDLE, SESSION_LIFE = 12 * 3600.0, 7 * 86400.0
SEEN_EVERY = 60.0
"""A session is written again at most so often."""
FAILURE_WINDOW = 300.0
FAILURES_A_NAME, FAILURES_AN_ADDRESS = 10, 30
"""So many wrong passwords in the window lock a name, or an address, until the window has passed."""
HASHER = PasswordHasher()
NOBODY = HASHER.hash(secrets.token_urlsafe())
"""Checked where there is no such user, so that the answer takes as long."""


class User(NamedTuple):
    """Somebody who is signed in."""

    id: int
    name: str
    role: str
    must_change: bool
    """Whether they have to set a password of their own first."""
    csrf: str
    session: str
    """Digest of the session."""

    def may(self, role: str) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)


class TooManyFailuresError(StationError):
    """Too many wrong passwords; no password is checked for a while."""


def digest_of(secret: str) -> str:
    """SHA-256 of a random secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def first_password(connection: Connection) -> str | None:
    """A new one-time password of ``ADMINISTRATOR``; None once an administrator has their own."""
    own = users.c.role == "administrator", ~users.c.must_change
    if connection.execute(select(users.c.id).where(*own)).first():
        return None
    known = connection.scalar(select(users.c.id).where(users.c.name == ADMINISTRATOR))
    if known is None:
        return add_user(connection, trail.STATION, ADMINISTRATOR, "administrator")
    return reset_password(connection, trail.STATION, known)


def add_user(connection: Connection, who: str, name: str, role: str) -> str:
    """Add a user, and return the password that they have to change.

    Raises:
        StationError: an unknown role, a name that is taken, empty or longer than 100 characters.
    """
    name = name.strip()
    if role not in ROLES:
        raise StationError(f"role {role!r}: give one of {', '.join(ROLES)}")
    if not name or len(name) > 100:
        raise StationError("a user's name has 1 to 100 characters")
    if connection.execute(select(users.c.id).where(users.c.name == name)).first():
        raise StationError(f"user {name}: there is one of this name already")
    password = secrets.token_urlsafe(12)
    connection.execute(
        insert(users).values(
            name=name, role=role, password_hash=HASHER.hash(password), must_change=True,
            disabled=False, created_at=time.time(),
        )
    )  # fmt: skip
    trail.append(connection, who, "user added", f"user {name}", after={"role": role})
    return password


def reset_password(connection: Connection, who: str, user_id: int) -> str:
    """A new password, which the user has to change; their sessions end."""
    password = secrets.token_urlsafe(12)
    set_one_time(connection, who, user_id, HASHER.hash(password))
    return password


def set_one_time(
    connection: Connection, who: str, user_id: int, password_hash: str, why: str = ""
) -> None:
    """Set a password, by its hash, that the user has to change; their sessions end."""
    row = user_row(connection, user_id)
    connection.execute(
        update(users)
        .where(users.c.id == user_id)
        .values(password_hash=password_hash, must_change=True)
    )
    connection.execute(delete(sessions).where(sessions.c.user_id == user_id))
    connection.execute(delete(login_failures).where(login_failures.c.name == row.name))
    trail.append(connection, who, "password reset", f"user {row.name}", why=why)


def change_user(
    connection: Connection, who: str, user_id: int, role: str, disabled: bool, why: str
) -> None:
    """Change a user's role, or lock them out; their sessions end.

    Raises:
        StationError: no such user or role, or no administrator would be left.
    """
    row = user_row(connection, user_id)
    if role not in ROLES:
        raise StationError(f"role {role!r}: give one of {', '.join(ROLES)}")
    connection.execute(
        update(users).where(users.c.id == user_id).values(role=role, disabled=disabled)
    )
    able = select(users.c.id).where(users.c.role == "administrator", ~users.c.disabled).limit(1)
    if connection.execute(able).first() is None:
        raise StationError("an administrator has to be left; make another user one first")
    connection.execute(delete(sessions).where(sessions.c.user_id == user_id))
    trail.append(
        connection, who, "user changed", f"user {row.name}",
        before={"role": row.role, "disabled": row.disabled},
        after={"role": role, "disabled": disabled}, why=why,
    )  # fmt: skip


def user_row(connection: Connection, user_id: int) -> AnyRow:
    """A user's row; StationError where there is none."""
    row = connection.execute(select(users).where(users.c.id == user_id)).first()
    if row is None:
        raise StationError(f"user {user_id}: there is none")
    return row


def sign_in(store: Store, name: str, password: str, address: str) -> str | None:
    """A new session's secret; None, and a note of it, where name and password do not fit.

    Raises:
        TooManyFailuresError: for this name, or from this address.
    """
    with store.read() as connection:
        _check_failures(connection, name, address)
        able = select(users).where(users.c.name == name, ~users.c.disabled)
        row = connection.execute(able).first()
    # Outside of the transaction that all others wait for: it is made to take long.
    fits = _fits(row.password_hash if row else NOBODY, password[: MOST_PASSWORD + 1])
    now = time.time()
    with store.write() as connection:
        # Again, for guesses that are made at the same time.
        _check_failures(connection, name, address)
        connection.execute(delete(login_failures).where(login_failures.c.at < now - FAILURE_WINDOW))
        connection.execute(delete(sessions).where(_expired(now)))
        if row is None or not fits:
            failure = {"name": name[:100], "address": address, "at": now}
            connection.execute(insert(login_failures).values(**failure))
            return None
        secret = secrets.token_urlsafe(32)
        connection.execute(
            insert(sessions).values(
                digest=digest_of(secret), user_id=row.id, csrf=secrets.token_urlsafe(32),
                created_at=now, seen_at=now,
            )
        )  # fmt: skip
        trail.append(connection, row.name, "signed in", f"user {row.name}", after={"from": address})
    return secret


def _check_failures(connection: Connection, name: str, address: str) -> None:
    recent = login_failures.c.at > time.time() - FAILURE_WINDOW
    of_name = select(func.count()).where(recent, login_failures.c.name == name[:100])
    of_address = select(func.count()).where(recent, login_failures.c.address == address)
    if (
        connection.execute(of_name).scalar_one() >= FAILURES_A_NAME
        or connection.execute(of_address).scalar_one() >= FAILURES_AN_ADDRESS
    ):
        raise TooManyFailuresError("too many wrong passwords; wait five minutes and try again")


def sign_out(connection: Connection, user: User) -> None:
    """End a session."""
    connection.execute(delete(sessions).where(sessions.c.digest == user.session))


def session_user(connection: Connection, secret: str) -> tuple[User, bool] | None:
    """Whose session it is, and whether it is time to call ``seen``; None where it is over."""
    now = time.time()
    row = connection.execute(
        select(users, sessions.c.csrf, sessions.c.digest, sessions.c.seen_at)
        .join(sessions, sessions.c.user_id == users.c.id)
        .where(sessions.c.digest == digest_of(secret), ~_expired(now), ~users.c.disabled)
    ).first()
    if row is None:
        return None
    user = User(row.id, row.name, row.role, row.must_change, row.csrf, row.digest)
    return user, now - row.seen_at > SEEN_EVERY


def seen(connection: Connection, user: User) -> None:
    """Keep a session alive."""
    connection.execute(
        update(sessions).where(sessions.c.digest == user.session).values(seen_at=time.time())
    )


def set_password(connection: Connection, user: User, old: str, new: str) -> None:
    """Set a user's own password; their other sessions end.

    Raises:
        StationError: the old one is wrong, or the new one too short, too long, or the same.
    """
    row = user_row(connection, user.id)
    if not _fits(row.password_hash, old):
        raise StationError("the old password is another one")
    if not LEAST_PASSWORD <= len(new) <= MOST_PASSWORD or new == old:
        raise StationError(
            f"a new password has {LEAST_PASSWORD} to {MOST_PASSWORD} characters, and is not the old"
            " one"
        )
    connection.execute(
        update(users)
        .where(users.c.id == user.id)
        .values(password_hash=HASHER.hash(new), must_change=False)
    )
    connection.execute(
        delete(sessions).where(sessions.c.user_id == user.id, sessions.c.digest != user.session)
    )
    trail.append(connection, user.name, "password changed", f"user {user.name}")


def add_token(connection: Connection, who: str, line_id: int, label: str) -> str:
    """A new token that may upload images to a line, and nothing else.

    Raises:
        StationError: no such line, or a label that is empty or longer than 100 characters.
    """
    line = connection.execute(select(lines).where(lines.c.id == line_id)).first()
    if line is None:
        raise StationError(f"line {line_id}: there is none")
    label = label.strip()
    if not label or len(label) > 100:
        raise StationError("a token's label has 1 to 100 characters")
    token = f"cdgp_{secrets.token_urlsafe(32)}"
    connection.execute(
        insert(tokens).values(
            digest=digest_of(token), line_id=line_id, label=label, created_at=time.time()
        )
    )
    trail.append(connection, who, "token added", f"line {line.name}", after={"label": label})
    return token


def revoke_token(connection: Connection, who: str, token_id: int) -> None:
    """End a token; StationError where there is none."""
    row = connection.execute(select(tokens).where(tokens.c.id == token_id)).first()
    if row is None:
        raise StationError(f"token {token_id}: there is none")
    connection.execute(update(tokens).where(tokens.c.id == token_id).values(revoked_at=time.time()))
    trail.append(connection, who, "token revoked", f"token {row.label}")


def token_line(connection: Connection, token: str) -> int | None:
    """The line that a token may upload to; None where it is unknown or revoked."""
    return connection.scalar(
        select(tokens.c.line_id).where(
            tokens.c.digest == digest_of(token), tokens.c.revoked_at.is_(None)
        )
    )


def _expired(now: float) -> ColumnElement[bool]:
    return or_(sessions.c.seen_at < now - SESSION_IDLE, sessions.c.created_at < now - SESSION_LIFE)


def _fits(password_hash: str, password: str) -> bool:
    try:
        return HASHER.verify(password_hash, password)
    except (VerifyMismatchError, InvalidHashError):
        return False
