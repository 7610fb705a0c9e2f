"""HEAD on every route that has GET (RFC 9110, 9.3.2): the same answer without its content."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_STREAMS = "/events"


class HeadAnswers:
    """ASGI middleware: answers HEAD as GET, and sends no content. A stream of events has no HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"].endswith(_STREAMS):
            await self._app(scope, receive, send)
            return

        async def without_content(message: Message) -> None:
            scope["method"] = "HEAD"  # the server has to know why the content is shorter than announced
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        scope["method"] = "GET"
        await self._app(scope, receive, without_content)
