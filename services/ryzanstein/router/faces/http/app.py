"""The HTTP application: routes and error handling.

    POST /v1/chat/completions, /v1/completions      the OpenAI API, with and without streaming
    GET  /v1/generations/{id}/events                the rest of a stream, after Last-Event-ID
    DELETE /v1/generations/{id}                     cancels it
    POST /v1/responses                              the Responses API, with and without streaming
    GET, DELETE /v1/responses/{id}, POST .../cancel  a response that is kept, or runs
    POST /v1/embeddings                             vectors of texts
    POST /tokenize, /detokenize                     tokens of a prompt and back
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter  adapters, where the settings say so
    GET  /v1/models, /v1/models/{model}             what ready nodes serve
    GET  /health, /healthz, /readyz                 the process is alive (twice); it has a ready node
    GET  /version, /metrics                         of this router

Headers read: X-Request-Id, X-Session-Id, X-Tenant-Id, X-Request-Timeout-Ms, Idempotency-Key,
X-Cancel-On-Disconnect, X-Run-Detached, traceparent, Last-Event-ID.
Headers written: X-Request-Id, X-Ryzanstein-Node, Retry-After.

HEAD on every route that has GET (RFC 9110, 9.3.2): the same answer without its content.
The metrics are also on a port of their own; here they are for scrapers that reach no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ryzanstein import errors
from ryzanstein.auth.rules import PUBLIC_ROUTES
from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.tracing import Tracing
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.embeddings import add_embedding_routes
from ryzanstein.router.faces.http.gate import Gate, HttpLimits, call_of
from ryzanstein.router.faces.http.generate import GenerationRoutes
from ryzanstein.router.faces.http.late import begun, within
from ryzanstein.router.faces.http.lora.routes import AdapterAccess, LoraRoutes, add_lora_routes
from ryzanstein.router.faces.http.responses.kept import KeptResponses
from ryzanstein.router.faces.http.responses.routes import ResponseRoutes, add_response_routes
from ryzanstein.router.faces.http.serving.host_names import HostNames
from ryzanstein.router.faces.http.serving.presence import ClientLeft
from ryzanstein.router.faces.http.stream import error_event
from ryzanstein.router.faces.http.texts import add_text_routes
from ryzanstein.router.faces.openai.answers.dialect import ChatDialect, CompletionDialect, form_for
from ryzanstein.router.faces.openai.answers.failures import CLIENT_CLOSED_REQUEST, HttpFailure, HttpRefused, failure_from_error
from ryzanstein.router.faces.openai.answers.types import CancelledWork, ChatCompletion, ModelAnswer, ModelList, TextCompletion
from ryzanstein.router.faces.openai.openapi import described
from ryzanstein.router.faces.openai.requests.prompts import chat_request, completion_requests
from ryzanstein.router.faces.openai.requests.response_format import naming_the_constraint
from ryzanstein.router.faces.openai.requests.schemas import ChatCompletionRequest, CompletionRequest
from ryzanstein.router.nodes.table import ServedModel
from ryzanstein.router.sessions.store import SessionBounds, SessionStore
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.telemetry import RouterTelemetry


def add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    """Adds `/metrics`. One answer at a time is written, in a thread."""
    turn = asyncio.Lock()

    @app.get("/metrics")
    async def metrics(http: Request) -> Response:
        encode, content_type = choose_encoder(http.headers.get("accept", ""))
        async with turn:
            content = await asyncio.to_thread(encode, registry)
        return Response(content, headers={"Content-Type": content_type})


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


_MAX_SEEN = 1024
_METHODS = ["GET", "HEAD", "POST", "DELETE"]
_SHOWN = ["X-Request-Id", "X-Ryzanstein-Node", "Retry-After", "Retry-After-Ms", "X-Should-Retry"]
_LIMITS = [f"X-RateLimit-{what}-{rate}" for what in ("Limit", "Remaining", "Reset") for rate in ("Requests", "Tokens")]
_CORS: dict[str, Any] = {
    "allow_headers": ["*"],
    "expose_headers": [*_SHOWN, *_LIMITS],
    "max_age": 3600,
}


def create_app(
    core: Core,
    telemetry: RouterTelemetry,
    entrance: Entrance,
    limits: HttpLimits | None = None,
    origins: Sequence[str] = (),
    *,
    sessions: SessionStore | None = None,
    hosts: HostNames | None = None,
    metrics: bool = True,
    socket_path: str = "",
    tracing: Tracing | None = None,
    adapters: AdapterAccess | None = None,
) -> FastAPI:
    """Returns an ASGI application over the core.

    It has no lifespan of its own: the core starts and ends with the router. `entrance` lets requests
    in. `origins` may read answers from a browser (CORS); none: no other origin may. `sessions` keep the
    conversations of responses, by default in memory. `hosts` are its names, by default any. `metrics`:
    they are served here too. `socket_path` is where the server takes WebSockets; empty: nowhere.
    `tracing` records requests. `adapters`: for those who may have nodes load adapters; None: nobody may.
    """
    limits = limits or HttpLimits()
    app = FastAPI(title="Ryzanstein", docs_url=None, redoc_url=None)
    app.add_middleware(HeadAnswers)
    hosts, tracing = hosts or HostNames(any_name=True), tracing or Tracing("router")
    app.add_middleware(Gate, limits=limits, telemetry=telemetry, entrance=entrance, hosts=hosts, tracing=tracing)
    if origins:  # around the gate: a page may read why it was refused
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=_METHODS, **_CORS)
    _handle_errors(app, telemetry)
    reader = BodyReader()
    _add_generation_routes(app, GenerationRoutes(core, limits, entrance.live), reader, limits)
    _add_model_routes(app, core)
    kept = KeptResponses(sessions or MemorySessions(SessionBounds(), lambda _: None), telemetry)
    add_response_routes(app, ResponseRoutes(core, kept, limits), reader, limits)
    add_text_routes(app, core, reader, limits.max_messages)
    add_embedding_routes(app, core, reader)
    if adapters is not None:
        add_lora_routes(app, LoraRoutes(core, adapters), reader)
    _add_probes(app, core)
    if metrics:
        add_metrics(app, telemetry.registry)
    if socket_path:
        _add_upgrade(app, socket_path)
    _check_listed(app)
    return app


def _check_listed(app: FastAPI) -> None:
    """Raises LookupError for a route that the table of access does not have: nobody has decided who may call it."""
    for route in app.routes:
        for method in (getattr(route, "methods", None) or {""}) - {"HEAD"}:
            if (method, getattr(route, "path", "")) not in PUBLIC_ROUTES:
                raise LookupError(f"{method} {getattr(route, 'path', route)} is not in the table of access")


def _add_generation_routes(app: FastAPI, generations: GenerationRoutes, reader: BodyReader, limits: HttpLimits) -> None:
    chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
    completion_decoder = msgspec.json.Decoder(CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatCompletionRequest, ChatCompletion))
    async def chat_completions(http: Request) -> Response:
        origin = call_of(http.scope).origin
        body, request = await reader.read(
            http, chat_decoder, lambda body: chat_request(body, http.headers, origin, limits.max_messages)
        )
        with naming_the_constraint(body):
            if body.stream:
                opening = generations.stream(http, request, form_for(body, ChatDialect()))
                return await begun(within(naming_the_constraint(body), opening), limits, error_event)
            return await generations.answer(http, request, ChatDialect())

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest, TextCompletion))
    async def completions(http: Request) -> Response:
        origin = call_of(http.scope).origin
        body, asked = await reader.read(http, completion_decoder, lambda body: completion_requests(body, http.headers, origin))
        with naming_the_constraint(body):
            if body.stream:
                opening = generations.stream_all(http, asked, form_for(body, CompletionDialect()))
                return await begun(within(naming_the_constraint(body), opening), limits, error_event)
            return await generations.complete(http, asked)

    @app.get("/v1/generations/{response_id}/events")
    async def events(
        response_id: str,
        http: Request,
        last_event_id: Annotated[str, Header()] = "",
        include_usage: bool | None = None,
    ) -> Response:
        return await generations.attach(http, response_id, last_event_id, include_usage)

    @app.delete("/v1/generations/{response_id}", openapi_extra=described(None, CancelledWork))
    async def cancel(response_id: str, http: Request) -> Response:
        return await generations.cancel(http, response_id)


def _add_model_routes(app: FastAPI, core: Core) -> None:
    seen = FirstSeen()

    @app.get("/v1/models", openapi_extra=described(None, ModelList))
    async def list_models(http: Request) -> dict[str, Any]:
        may_use = call_of(http.scope).caller.may_use
        return {"object": "list", "data": [_model(model, seen) for model in core.models() if may_use(model.name)]}

    @app.get("/v1/models/{name:path}", openapi_extra=described(None, ModelAnswer))
    async def retrieve_model(name: str, http: Request) -> dict[str, Any]:
        call_of(http.scope).caller.check_model(name)
        for model in core.models():
            if model.name == name:
                return _model(model, seen)
        raise errors.not_found("model", name)


def _add_probes(app: FastAPI, core: Core) -> None:
    @app.get("/health")
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("ryzanstein")}

    @app.get("/readyz")
    async def readyz() -> Response:
        if core.ready:
            return JSONResponse({"status": "ready"})
        raise errors.no_nodes("", "no node is ready")


def _add_upgrade(app: FastAPI, path: str) -> None:
    """Tells who asks for the WebSocket without asking for one (RFC 9110, 15.5.22)."""

    @app.get(path, include_in_schema=False)
    async def upgrade() -> Response:
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        message = f"{path} is a WebSocket: connect with Upgrade: websocket, see docs/build/websocket.md"
        return HttpFailure(426, message, "Upgrade", "upgrade_required", headers).response()


def _handle_errors(app: FastAPI, telemetry: RouterTelemetry) -> None:
    @app.exception_handler(RyzansteinError)
    async def domain_error(_: Request, error: RyzansteinError) -> Response:
        return failure_from_error(error).response()

    @app.exception_handler(HttpRefused)
    async def refused(_: Request, error: HttpRefused) -> Response:
        telemetry.http_refused.labels(error.reason).inc()
        return error.failure.response()

    @app.exception_handler(RequestValidationError)
    async def bad_query(_: Request, error: RequestValidationError) -> Response:
        where = str(error.errors()[0]["loc"][-1])
        return HttpFailure(400, f"{where}: {error.errors()[0]['msg']}"[:512], where, "invalid_argument").response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path[:256]}"
        return HttpFailure(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(ClientLeft)
    async def client_left(_: Request, __: ClientLeft) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


class FirstSeen:
    """When this router was first asked for its models while a node served one, in Unix time.

    Of models that are gone it forgets the first.
    """

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def at(self, model: str) -> int:
        if model not in self._at and len(self._at) >= _MAX_SEEN:
            del self._at[next(iter(self._at))]
        return self._at.setdefault(model, int(time.time()))


def _model(model: ServedModel, seen: FirstSeen) -> dict[str, Any]:
    """Returns OpenAI's fields of a model, vLLM's, and three of our own."""
    return {
        "id": model.name,
        "object": "model",
        "created": seen.at(model.name),
        "owned_by": "ryzanstein",
        "root": model.parent or model.name,
        "parent": model.parent or None,
        "max_model_len": model.context_length,
        "context_length": model.context_length,
        "ready_nodes": model.ready_nodes,
    } | ({"sampling_defaults": text} if (text := model.sampling_defaults.given) else {})
