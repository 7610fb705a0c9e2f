"""The console over HTTP: the page's files, logging in and out, and one WebSocket for each tab."""

from __future__ import annotations

import mimetypes
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ryzanstein.client import clean
from ryzanstein.client.errors import KeyRefused
from ryzanstein.console.login import Logins, NoRoomForPeople, PagePlaces, Person
from ryzanstein.console.tabs import Tab
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import Welcome
from ryzanstein.errors import RyzansteinError

MOST_SOCKETS = 64
MOST_BODY_BYTES = 16 * 1024
MOST_ENTERING = 8
"""Keys that are checked at once."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STYLES = b'<link rel="stylesheet" href="static/app.css">'
_LOGGED_OUT, _FULL = 4401, 4429
"""Codes of sockets that the page reads."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a login: the token of a link, or a person's key."""

    token: str = ""
    key: str = ""


class Console:
    """What the routes have in common."""

    def __init__(
        self,
        logins: Logins,
        telemetry: ConsoleTelemetry,
        welcome: Welcome,
        make_person: Callable[[str], Person],
        *,
        by_link: bool,
        cookie: str,
        secure: bool,
    ) -> None:
        self.logins, self._telemetry, self._welcome, self._make_person = logins, telemetry, welcome, make_person
        self._by_link, self._cookie, self._secure = by_link, cookie, secure
        self._num_sockets = self._entering = 0

    async def me(self, request: Request) -> Response:
        """Tells the page whether it is logged in, and how to."""
        entered = self._person(request) is not None
        return JSONResponse({"login": "link" if self._by_link else "key", "entered": entered})

    async def enter(self, request: Request) -> Response:
        """Exchanges the token of a link, or a key, for a cookie."""
        try:
            entry = msgspec.json.decode(await _body(request), type=_Entry)
        except (msgspec.DecodeError, ValueError):
            return PlainTextResponse("the body must be a token or a key", 400)
        try:
            cookie = await self._cookie_for(entry)
        except NoRoomForPeople:
            return PlainTextResponse("as many people are logged in as the console takes", 503)
        except KeyRefused:
            cookie = ""
        except (RyzansteinError, ValueError) as error:
            said = clean(error.message) if isinstance(error, RyzansteinError) else "the key cannot be one"
            return PlainTextResponse(said, 502 if isinstance(error, RyzansteinError) else 400)
        self._telemetry.logins.labels("done" if cookie else "refused").inc()
        if not cookie:
            said = "the link was used, or is too old" if self._by_link else "the cluster does not take this key"
            return PlainTextResponse(said, 401)
        response = Response(status_code=204)
        response.set_cookie(self._cookie, cookie, path="/", httponly=True, samesite="strict", secure=self._secure)
        return response

    async def leave(self, request: Request) -> Response:
        """Forgets the login of this browser."""
        person = self._person(request)
        self.logins.leave(request.cookies.get(self._cookie))
        for leave in list(person.leave) if person else ():
            leave()
        response = Response(status_code=204)
        response.delete_cookie(self._cookie, path="/", httponly=True, samesite="strict", secure=self._secure)
        return response

    async def socket(self, socket: WebSocket) -> None:
        """Serves a tab."""
        person = self._person(socket)
        if person is None or self._num_sockets >= MOST_SOCKETS:
            self._telemetry.refusals.labels("login" if person is None else "sockets").inc()
            await socket.accept()  # a page reads the code of a socket that was open, and no status
            await socket.close(_LOGGED_OUT if person is None else _FULL)
            return
        self._num_sockets += 1
        try:
            with self._telemetry.sockets.track_inprogress():
                await socket.accept()
                cookie = socket.cookies.get(self._cookie)
                tab = Tab(socket, person, self._telemetry, self._welcome, lambda: self.logins.person(cookie) is not None)
                await tab.serve()
        finally:
            self._num_sockets -= 1

    async def _cookie_for(self, entry: _Entry) -> str:
        """Returns a cookie; empty: the login is refused. Raises RyzansteinError if the cluster cannot say, KeyRefused if it
        refuses."""
        if self._by_link:
            return self.logins.enter("", lambda: self._make_person("")) if self.logins.take_token(entry.token) else ""
        if not entry.key:
            return ""
        if self._entering >= MOST_ENTERING:
            raise NoRoomForPeople
        self._entering += 1
        try:
            return await self._checked(entry.key)
        finally:
            self._entering -= 1

    async def _checked(self, key: str) -> str:
        """Returns a cookie for a key that the cluster takes. Raises as `_cookie_for`."""
        person = self._make_person(key)
        try:
            await person.hub.client.models()
            made = self.logins.enter(key, lambda: person)
        except BaseException:
            await person.hub.client.close()
            raise
        if all(each is not person for each in self.logins.people):  # the same key was entered before
            await person.hub.client.close()
        return made

    def _person(self, connection: HTTPConnection) -> Person | None:
        return self.logins.person(connection.cookies.get(self._cookie))


async def _body(request: Request) -> bytes:
    """Returns the body. Raises ValueError if it is too large or its client has gone."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise ValueError("too large")
    except ClientDisconnect:
        raise ValueError("gone") from None
    return bytes(body)


class Files:
    """The page's files, read once. A browser asks each time whether it still has the newest.

    The page has its styles in itself, by their digest: it is painted as soon as it is there, and needs nothing else for that.
    """

    def __init__(self) -> None:
        folder = resources.files("ryzanstein.console") / "static"
        self.contents = {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.startswith((".", "_"))}
        styles = self.contents.pop("app.css")
        digest = b64encode(sha256(styles).digest()).decode()
        self._policy = POLICY.replace("style-src 'self'", f"style-src 'sha256-{digest}'")
        self.contents["index.html"] = self.contents["index.html"].replace(_STYLES, b"<style>%b</style>" % styles)
        self._tags = {name: f'"{sha256(content).hexdigest()[:32]}"' for name, content in self.contents.items()}

    async def page(self, request: Request) -> Response:
        response = self._answer(request, "index.html")
        response.headers["Content-Security-Policy"] = self._policy
        return response

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._answer(request, name) if name in self.contents else PlainTextResponse("there is no such file", 404)

    def _answer(self, request: Request, name: str) -> Response:
        content, tag = self.contents[name], self._tags[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(content, headers=headers, media_type=kind or "application/octet-stream")


class PageGuard:
    """Refuses requests under names that are not the page's, and those of other pages; adds the headers of every response."""

    def __init__(self, app: ASGIApp, places: PagePlaces, telemetry: ConsoleTelemetry) -> None:
        self._app, self._places, self._telemetry = app, places, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return

        async def guarded(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        if why := self._refusal(scope):
            self._telemetry.refusals.labels(why).inc()
            said = f"the console does not answer this {why}; see --public-url"
            await PlainTextResponse(said, 403)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._places.knows_host(hosts[0]):
            return "host"
        acts = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        return "origin" if acts and not self._places.knows_origin(headers.get("origin")) else ""


def build(console: Console, places: PagePlaces, telemetry: ConsoleTelemetry) -> ASGIApp:
    """Returns the application."""
    files = Files()
    routes = [
        Route("/", files.page),
        Route("/static/{name}", files.file),
        Route("/me", console.me),
        Route("/login", console.enter, methods=["POST"]),
        Route("/logout", console.leave, methods=["POST"]),
        WebSocketRoute("/socket", console.socket),
    ]
    return PageGuard(Starlette(routes=routes), places, telemetry)
