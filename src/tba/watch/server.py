"""Serves the live page of a run on this machine's loopback address, and nowhere else."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tba.report.page import plotly_js, resource
from tba.settings import SettingsError
from tba.watch.board import FOLDER, Answer, Board

HOST = "127.0.0.1"
PORT = 7860
"""Taken unless another is asked for, or this one is taken."""
NICENESS = 10
"""By which the server stands back behind the run."""
GOODBYE_LIMIT_S = 1
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Of every answer: no script but the server's files runs, nothing is fetched elsewhere, nobody else may embed it."""
_FILES = {
    "/plotly.js": "text/javascript", "/charts.js": "text/javascript", "/watch.js": "text/javascript",
    "/page.css": "text/css", "/watch.css": "text/css",
}


class Door:
    """Lets in what is read from this machine's own names: no other host, method or page.

    A page elsewhere may give its own name the loopback address and have a browser ask here. The browser then sends
    that name, which is no name of this server.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        """`app` is asked what is let in."""
        self._app, self._names = app, {f"{name}:{port}" for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403 to a foreign host, 405 to all but GET."""
        if scope["type"] != "http":
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._names:
            refusal = PlainTextResponse(f"open http://{sorted(self._names)[0]}/", 403, HEADERS)
            await refusal(scope, receive, send)
        elif scope["method"] != "GET":
            await PlainTextResponse("only GET is answered", 405, {**HEADERS, "Allow": "GET"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def make_app(board: Board, port: int) -> ASGIApp:
    """What answers at `port`: the page, its files, the run's state, two versions side by side."""

    def page(request: Request) -> Response:
        return _send(request, board.page(), "text/html")

    def state(request: Request) -> Response:
        return _send(request, board.state(), "application/json")

    def difference(request: Request) -> Response:
        asked = request.query_params
        versions = [asked.get(name, "") for name in ("one", "other")]
        if not all(version.isascii() and version.isdigit() and len(version) < 16 for version in versions):
            return PlainTextResponse("give prompt, one and other: two versions are numbers", 400, HEADERS)
        one, other = map(int, versions)
        return _send(request, board.difference(asked.get("prompt", ""), one, other), "text/html")

    def file(request: Request) -> Response:
        return _send(request, _file(request.url.path), _FILES[request.url.path])

    routes = [Route("/", page), Route("/state", state), Route("/difference", difference)]
    return Door(Starlette(routes=[*routes, *(Route(path, file) for path in _FILES)]), port)


def _send(request: Request, answer: Answer, media_type: str) -> Response:
    tag = f'"{answer.tag}"'
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers=headers, media_type=media_type)


@cache
def _file(path: str) -> Answer:
    name = path.removeprefix("/")
    if name == "plotly.js":
        text = plotly_js()
    elif (own := resources.files(FOLDER).joinpath(name)).is_file():
        text = own.read_text(encoding="utf-8")
    else:
        text = resource(name)
    return Answer.of(text.encode())


def listen(port: int | None) -> socket.socket:
    """A socket that takes connections of this machine at `port`; without one at `PORT`, or a free one if it is taken.

    Raises:
        SettingsError: `port` is taken, or is not for this user.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, PORT if port is None else port))
        made.listen()
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            made.close()
            return listen(0)
        made.close()
        raise SettingsError([
            f"--port {port}: {HOST}:{port} cannot be had ({error.strerror}); leave --port out to take a free one."
        ]) from error
    return made


def make_server(run_dir: Path, port: int) -> uvicorn.Server:
    """A server for the run in `run_dir`, which is to be run on a socket that listens at `port`."""
    return uvicorn.Server(uvicorn.Config(
        make_app(Board(run_dir), port), log_level="warning", access_log=False, lifespan="off", ws="none",
        loop="asyncio", http="h11", server_header=False, timeout_graceful_shutdown=GOODBYE_LIMIT_S,
    ))


def serve(run_dir: Path, port: int | None, say: Callable[[str], None]) -> None:
    """Serves until Ctrl-C; `say` is told the address first.

    Raises:
        SettingsError: `port` is taken.
        KeyboardInterrupt: after Ctrl-C, when the server has ended.
    """
    with listen(port) as made:
        number = made.getsockname()[1]
        say(f"http://{HOST}:{number}/")
        server = make_server(run_dir, number)
        os.nice(NICENESS)
        server.run(sockets=[made])
