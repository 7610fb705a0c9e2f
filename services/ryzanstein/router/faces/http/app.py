"""The HTTP application: routes and error handling.

    POST /v1/chat/completions, /v1/completions      the OpenAI API, with and without streaming
    GET  /v1/generations/{id}/events                the rest of a stream, after Last-Event-ID
    DELETE /v1/generations/{id}                     cancels it
    GET  /v1/models, /v1/models/{model}             what ready nodes serve
    GET  /healthz, /readyz                          the process is alive; it has a ready node

Headers read: X-Request-Id, X-Session-Id, X-Tenant-Id, X-Request-Timeout-Ms, Idempotency-Key,
X-Cancel-On-Disconnect, X-Run-Detached, traceparent, Last-Event-ID.
Headers written: X-Request-Id, X-Ryzanstein-Node, Retry-After.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.dialect import ChatDialect, CompletionDialect, Dialect
from ryzanstein.router.faces.http.failures import (
    CLIENT_CLOSED_REQUEST,
    HttpFailure,
    HttpRefused,
    failure_from_error,
)
from ryzanstein.router.faces.http.gate import Gate, HttpLimits, call_of
from ryzanstein.router.faces.http.generate import GenerationRoutes
from ryzanstein.router.faces.http.openapi import described
from ryzanstein.router.faces.http.presence import ClientLeft
from ryzanstein.router.faces.http.prompts import chat_request, completion_request
from ryzanstein.router.faces.http.schemas import ChatCompletionRequest, CompletionRequest, GenerationOptions
from ryzanstein.router.faces.http.shown import Shown
from ryzanstein.router.nodes.served import ServedModel
from ryzanstein.router.telemetry import RouterTelemetry


def create_app(core: Core, telemetry: RouterTelemetry, limits: HttpLimits | None = None) -> FastAPI:
    """Returns an ASGI application over the core.

    It has no lifespan of its own: the core starts and ends with the router.
    """
    limits = limits or HttpLimits()
    app = FastAPI(title="Ryzanstein", docs_url=None, redoc_url=None)
    app.add_middleware(Gate, limits=limits, telemetry=telemetry)
    _handle_errors(app, telemetry)
    _add_generation_routes(app, GenerationRoutes(core, limits), limits)
    _add_model_routes(app, core)
    _add_probes(app, core)
    return app


def _add_generation_routes(app: FastAPI, generations: GenerationRoutes, limits: HttpLimits) -> None:
    reader = BodyReader()
    chat_decoder = msgspec.json.Decoder(ChatCompletionRequest)
    completion_decoder = msgspec.json.Decoder(CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatCompletionRequest))
    async def chat_completions(http: Request) -> Response:
        request_id = call_of(http.scope).request_id
        body, request = await reader.read(
            http, chat_decoder, lambda body: chat_request(body, http.headers, request_id, limits.max_messages)
        )
        if body.stream:
            return await generations.stream(http, request, _shown(body, ChatDialect()))
        return await generations.answer(http, request, ChatDialect())

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(http: Request) -> Response:
        request_id = call_of(http.scope).request_id
        body, request = await reader.read(
            http, completion_decoder, lambda body: completion_request(body, http.headers, request_id)
        )
        if body.stream:
            return await generations.stream(http, request, _shown(body, CompletionDialect()))
        return await generations.answer(http, request, CompletionDialect())

    @app.get("/v1/generations/{response_id}/events")
    async def events(
        response_id: str,
        http: Request,
        last_event_id: Annotated[str, Header()] = "",
        include_usage: bool | None = None,
    ) -> Response:
        return await generations.attach(http, response_id, last_event_id, include_usage)

    @app.delete("/v1/generations/{response_id}")
    async def cancel(response_id: str) -> Response:
        return await generations.cancel(response_id)


def _add_model_routes(app: FastAPI, core: Core) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(model) for model in core.models()]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        for model in core.models():
            if model.name == name:
                return _model(model)
        raise errors.not_found("model", name)


def _add_probes(app: FastAPI, core: Core) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Response:
        if core.ready:
            return JSONResponse({"status": "ready"})
        raise errors.no_nodes("", "no node is ready")


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


def _shown(body: GenerationOptions, dialect: Dialect) -> Shown:
    options = body.stream_options
    if options is None:
        return Shown(dialect)
    return Shown(dialect, bool(options.include_usage), bool(options.continuous_usage_stats))


def _model(model: ServedModel) -> dict[str, Any]:
    """Returns OpenAI's fields of a model, and two of our own. `created` is unknown to a router."""
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "ryzanstein",
        "context_length": model.context_length,
        "ready_nodes": model.ready_nodes,
    }
