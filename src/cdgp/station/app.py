"""The web application of a station: its routes, and what an error becomes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from markupsafe import escape
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from cdgp.errors import CdgpError, ImageError
from cdgp.station import api, learning, pages
from cdgp.station.accounts import TooManyFailuresError
from cdgp.station.intake import BacklogFullError, NoRoomError, TooLargeError
from cdgp.station.review import LostRaceError
from cdgp.station.security import Outer, OwnPasswordError, SignInError
from cdgp.station.service import Station

STATIC = Path(__file__).parent / "templates" / "static"
STATUS: list[tuple[type[CdgpError], int, dict[str, str]]] = [
    (LostRaceError, 409, {}),
    (TooLargeError, 413, {}),
    (ImageError, 422, {}),
    (BacklogFullError, 429, {"Retry-After": "5"}),
    (TooManyFailuresError, 429, {"Retry-After": "300"}),
    (NoRoomError, 507, {"Retry-After": "60"}),
    (CdgpError, 400, {}),
]
"""The status and headers of an error: of the first class that it belongs to."""


def make_app(station: Station) -> FastAPI:
    """The application of a station, which starts and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        station.start()
        yield
        station.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.station = station
    app.include_router(api.router)
    app.include_router(pages.router)
    app.include_router(learning.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(Outer, image_mib=station.config.image_mib)
    app.add_exception_handler(CdgpError, _known)
    app.add_exception_handler(DBAPIError, _database)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(SignInError, _sign_in)
    app.add_exception_handler(OwnPasswordError, _own_password)
    return app


def told(
    request: Request,
    status: int,
    text: str,
    headers: dict[str, str] | None = None,
    images: list[int] | None = None,
) -> Response:
    """An error as JSON, as the piece of a page that asked for it, or as a page."""
    if request.url.path.startswith("/api/"):
        body = {"detail": text} | ({} if images is None else {"images": images})
        return JSONResponse(body, status, headers)
    if request.headers.get("hx-request"):
        return Response(str(escape(text)), status, headers, media_type="text/html")
    return pages.message(request, status, text, headers)


def _known(request: Request, error: Exception) -> Response:
    status, headers = next(
        (status, headers) for kind, status, headers in STATUS if isinstance(error, kind)
    )
    lost = error.images if isinstance(error, LostRaceError) else None
    return told(request, status, str(error), headers, lost)


def _database(request: Request, error: Exception) -> Response:
    """A disk that is full for the database too; any other error of it is one of ours."""
    if "full" not in str(getattr(error, "orig", "")):
        raise error
    return told(request, 507, "the disk is full; free some space", {"Retry-After": "60"})


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return told(request, error.status_code, str(error.detail), dict(error.headers or {}))


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:]) or "the request"
    return told(request, 422, f"{name}: {first['msg']}")


def _sign_in(request: Request, error: Exception) -> Response:
    if request.method == "GET" and not request.url.path.startswith("/api/"):
        if request.headers.get("hx-request"):  # a piece of a page: the whole of it goes
            return Response(status_code=401, headers={"HX-Redirect": "/login"})
        return RedirectResponse("/login", 303)
    return told(request, 401, "sign in first")


def _own_password(request: Request, error: Exception) -> Response:
    if request.method == "GET" and not request.url.path.startswith("/api/"):
        return RedirectResponse("/password", 303)
    return told(request, 403, "set a password of your own first")
