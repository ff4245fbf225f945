"""What every request passes: size of the body, sign-in, role, CSRF token, origin, and headers.

A request that changes something needs a session, its CSRF token and an Origin of this station; or
a line's token, which may upload and nothing else.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdgp.station import accounts
from cdgp.station.accounts import User
from cdgp.station.intake import MIB
from cdgp.station.store import Store

COOKIE = "cdgp_station"
SAFE = ("GET", "HEAD", "OPTIONS")
UPLOAD = "/api/v1/images"
FORM_BYTES = 256 * 1024
"""Largest body of everything but an upload."""
WITHOUT_OWN_PASSWORD = ("/password", "/logout")
"""What a user may do before they have set a password of their own."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: with it, browsers send "null" as the Origin of a form.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Outer:
    """Around the whole application: the headers of every answer, and the largest body."""

    def __init__(self, app: ASGIApp, image_mib: float) -> None:
        self.app, self.image_bytes = app, int(image_mib * MIB)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        upload = scope["path"] == UPLOAD and scope["method"] == "POST"
        left = self.image_bytes if upload else FORM_BYTES
        # Scripts and styles may be kept, and are asked for whether they changed.
        cached = "no-cache" if scope["path"].startswith("/static/") else "no-store"

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, "the body of the request is too large")
            return message

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                names = {name.lower() for name, _ in headers}
                extra = {**HEADERS, "Cache-Control": cached}
                headers += [
                    (name.encode(), value.encode())
                    for name, value in extra.items()
                    if name.lower().encode() not in names
                ]
            await send(message)

        await self.app(scope, counted, with_headers)


class SignInError(Exception):
    """Nobody is signed in."""


class OwnPasswordError(Exception):
    """The user has to set a password of their own first."""


def needs(role: str) -> Any:
    """The signed-in user, who has at least this role, as a dependency of a route."""

    async def check(request: Request) -> User:
        user = await signed_in(request)
        if user is None:
            raise SignInError
        if user.must_change and request.url.path not in WITHOUT_OWN_PASSWORD:
            raise OwnPasswordError
        if not user.may(role):
            raise HTTPException(403, f"this needs the role {role}; yours is {user.role}")
        await check_intended(request, user)
        return user

    return Depends(check)


async def signed_in(request: Request) -> User | None:
    """The user of a request's session; None where there is none."""
    secret = request.cookies.get(COOKIE)
    return await run_in_threadpool(_session, request.app.state.station.store, secret)


def _session(store: Store, secret: str | None) -> User | None:
    if not secret:
        return None
    with store.read() as connection:
        found = accounts.session_user(connection, secret)
    if found is None:
        return None
    user, stale = found
    if stale:
        with store.write() as connection:
            accounts.seen(connection, user)
    return user


async def check_intended(request: Request, user: User) -> None:
    """Refuse a change that a page of another site asks for, in a user's name."""
    if request.method in SAFE:
        return
    check_origin(request)
    given = request.headers.get("x-csrf-token")
    if given is None and _is_form(request):
        given = str((await request.form()).get("csrf", ""))
    if not hmac.compare_digest((given or "").encode(), user.csrf.encode()):
        raise HTTPException(403, "the CSRF token is missing or wrong; load the page again")


def check_origin(request: Request) -> None:
    """Refuse a request that comes from a page of another site."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HTTPException(403, f"a page of {origin} may not ask for this")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise HTTPException(403, "a page of another site may not ask for this")


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")


Uploader = tuple[str, int | None]
"""Who uploads, and the one line that they may upload to; None for any."""


async def _uploader(request: Request) -> Uploader:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        line = await run_in_threadpool(_line_of, request.app.state.station.store, token.strip())
        if line is None:
            raise HTTPException(401, "the token is unknown or revoked")
        return "token", line
    check: Callable[[Request], Awaitable[User]] = needs("operator").dependency
    return (await check(request)).name, None


uploader = Depends(_uploader)


def _line_of(store: Store, token: str) -> int | None:
    with store.read() as connection:
        return accounts.token_line(connection, token)
