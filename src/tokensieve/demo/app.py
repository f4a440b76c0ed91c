"""The server of the page: which address gives what."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import resources
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from tokensieve.demo.guard import LOCAL, Guard
from tokensieve.demo.session import BATCHES, MAX_PLANS, Session, describe_error
from tokensieve.demo.uploads import MAX_UPLOAD, GoneError, preview
from tokensieve.demo.worker import BusyError, GoneAwayError, Worker
from tokensieve.errors import UserError, one_line
from tokensieve.plan.grammar import MAX_LENGTH
from tokensieve.report.page import STYLE

T = TypeVar("T")
MAX_REQUEST = 200_000  # bytes of a request that holds no image
PICTURES = (
    64  # requests for images, which wait for each other and not for the model; a page has 20, a browser asks for 6 at once
)
SAMPLE_AGE = 3600  # seconds for which a browser may keep the picture of a sample, which never changes
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = ("index.html", "page.js", "plans.js", "drawing.js", "results.js", "state.js", "demo.css", "icon.svg")  # all there is

Name = Annotated[str, Field(max_length=300)]


class RunRequest(BaseModel):
    """What the page sends: images by slot, the text that goes with them, and plans."""

    model_config = ConfigDict(extra="forbid")

    model: Name
    images: Annotated[dict[Name, Name], Field(max_length=16)]
    files: Annotated[dict[Name, Name], Field(max_length=16)] = {}
    prompt: Annotated[str, Field(max_length=20_000)] = ""
    plans: Annotated[list[Annotated[str, Field(max_length=2 * MAX_LENGTH)]], Field(min_length=1, max_length=MAX_PLANS)]


class MeasureRequest(RunRequest):
    """What the page sends for a timing."""

    batch: int = 1


class UnexpectedError(Exception):
    """An error that is ours, in one line."""


class TooLargeError(Exception):
    """A request of more bytes than it may have."""


def make_app(session: Session, *, hosts: tuple[str, ...] = LOCAL, takes_numbers: bool = False, waiting: int = 8) -> FastAPI:
    """The server. waiting: requests that may wait for the model or run; one more is refused with 503. The rest is Guard's."""
    app = FastAPI(title="tokensieve demo", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, hosts=hosts, takes_numbers=takes_numbers)
    worker, drawer = Worker(waiting), Worker(PICTURES)
    app.state.workers = (worker, drawer)
    files = {name: _page_file(name) for name in FILES} | {"look.css": STYLE.encode()}

    async def in_turn(request: Request, call: Callable[[], T], queue: Worker = worker) -> T:
        try:
            return await queue.run(call, request.is_disconnected)
        except (UserError, BusyError, GoneAwayError):
            raise
        except Exception as error:
            reason = one_line(f"unexpected error: {type(error).__name__}: {error}", 300)
            print(f"tokensieve: {reason}", file=sys.stderr)
            raise UnexpectedError(reason) from error

    async def read(request: Request, kind: type[RunRequest]) -> Any:
        content = await _body(request, MAX_REQUEST)
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(one_line(f"the request is wrong: {where + ': ' if where else ''}{first['msg']}", 300)) from error

    @app.get("/")
    async def page() -> Response:
        return Response(files["index.html"], media_type=TYPES[".html"])

    @app.get("/page/{name}")
    async def page_file(name: str) -> Response:
        if name not in files or name == "index.html":
            return _problem("there is no such file", 404)
        return Response(files[name], media_type=TYPES[f".{name.rpartition('.')[2]}"])

    @app.get("/api/setup")
    async def setup(request: Request, model: str = "") -> Any:
        return await in_turn(request, lambda: session.setup(model))

    @app.get("/api/sample")
    async def sample(request: Request, model: str, number: int, slot: str) -> Response:
        if not session.is_loaded(model):
            await in_turn(request, lambda: session.subject(model))
        content = await in_turn(request, lambda: session.sample_image(model, number, slot), drawer)
        return Response(content, media_type="image/png", headers={"Cache-Control": f"private, max-age={SAMPLE_AGE}"})

    @app.post("/api/images")
    async def upload(request: Request) -> dict[str, Any]:
        content = await _body(request, MAX_UPLOAD)
        name, image = await in_turn(request, lambda: session.uploads.add(content), drawer)
        return {"image": name, "width": image.width, "height": image.height}

    @app.get("/api/images/{name}")
    async def uploaded(request: Request, name: str) -> Response:
        return Response(await in_turn(request, lambda: preview(session.uploads.get(name)), drawer), media_type="image/png")

    @app.post("/api/run")
    async def run(request: Request) -> Any:
        asked = await read(request, RunRequest)
        return await in_turn(request, lambda: session.run(**asked.model_dump()))

    @app.post("/api/measure")
    async def measure(request: Request) -> Any:
        asked = await read(request, MeasureRequest)
        if asked.batch not in BATCHES:
            raise UserError(f"batch {asked.batch} is not one of {', '.join(map(str, BATCHES))}")
        return await in_turn(request, lambda: session.measure(**asked.model_dump()))

    @app.post("/api/picture")
    async def picture(request: Request) -> Response:
        asked = await read(request, RunRequest)
        return Response(await in_turn(request, lambda: session.picture(**asked.model_dump())), media_type="image/png")

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        return JSONResponse({"error": describe_error(error, "")}, 410 if isinstance(error, GoneError) else 422)

    @app.exception_handler(TooLargeError)
    async def too_large(request: Request, error: TooLargeError) -> Response:
        return _problem(str(error), 413)

    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> Response:
        return _problem("the model is busy with other requests: try again in a moment", 503, {"Retry-After": "1"})

    @app.exception_handler(GoneAwayError)
    async def gone_away(request: Request, error: GoneAwayError) -> Response:
        return _problem("the client went away", 499)

    @app.exception_handler(UnexpectedError)
    async def unexpected(request: Request, error: UnexpectedError) -> Response:
        return _problem(str(error), 500)

    return app


def _problem(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "position": None, "meant": ""}}, status, headers)


async def _body(request: Request, most: int) -> bytes:
    """The body of a request; a TooLargeError as soon as it is too long."""
    message = f"{most / 1e6:g} MB at most"
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise TooLargeError(f"this is too large: {message}")
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > most:
                raise TooLargeError(f"this is too large: {message}")
    except ClientDisconnect:
        raise GoneAwayError from None
    return bytes(content)


def _page_file(name: str) -> bytes:
    return (resources.files("tokensieve.demo") / "page" / name).read_bytes()
