"""The tables of access: which scope a public RPC or route needs. What is not in its table is refused.

docs/reference/access.md is generated from them, and a test compares them with the services' descriptors and the
routes of the HTTP API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ryzanstein.auth.caller import Scope


@dataclass(frozen=True, slots=True)
class Need:
    """What a call needs: a scope, or only a caller that may be any. `is_open`: not even that."""

    scope: Scope | None = None
    is_open: bool = False


ANY_CALLER = Need()
OPEN = Need(is_open=True)
_INFER, _SESSIONS, _DEBUG = Need(Scope.INFER), Need(Scope.SESSIONS), Need(Scope.DEBUG)
_ADAPTERS = Need(Scope.ADAPTERS)

_V1 = "/ryzanstein.v1."
PUBLIC_METHODS: Mapping[str, Need] = MappingProxyType(
    {
        f"{_V1}InferenceService/Chat": _INFER,
        f"{_V1}InferenceService/StreamChat": _INFER,
        f"{_V1}InferenceService/Complete": _INFER,
        f"{_V1}InferenceService/StreamComplete": _INFER,
        f"{_V1}InferenceService/CountTokens": _INFER,
        f"{_V1}InferenceService/AttachGeneration": _INFER,
        f"{_V1}InferenceService/CancelGeneration": _INFER,
        f"{_V1}InferenceService/ListModels": ANY_CALLER,
        f"{_V1}SessionService/CreateSession": _SESSIONS,
        f"{_V1}SessionService/GetSession": _SESSIONS,
        f"{_V1}SessionService/ListSessions": _SESSIONS,
        f"{_V1}SessionService/DeleteSession": _SESSIONS,
        f"{_V1}EmbeddingService/Embed": _INFER,
        f"{_V1}UsageService/GetUsage": Need(Scope.USAGE),
        f"{_V1}RouterService/GetRouterStatus": Need(Scope.STATUS),
        f"{_V1}RouterService/ListRouters": ANY_CALLER,
        f"{_V1}DebugService/DumpStacks": _DEBUG,
        f"{_V1}DebugService/FindRequests": _DEBUG,
        f"{_V1}DebugService/GetDiagnostics": _DEBUG,
        "/grpc.health.v1.Health/Check": OPEN,
        "/grpc.health.v1.Health/List": OPEN,
        "/grpc.health.v1.Health/Watch": OPEN,
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": ANY_CALLER,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANY_CALLER,
    }
)
"""What each method of a router's public gRPC port needs."""

PUBLIC_ROUTES: Mapping[tuple[str, str], Need] = MappingProxyType(
    {
        ("POST", "/v1/chat/completions"): _INFER,
        ("POST", "/v1/completions"): _INFER,
        ("POST", "/v1/embeddings"): _INFER,
        ("POST", "/tokenize"): _INFER,
        ("POST", "/detokenize"): _INFER,
        ("GET", "/v1/generations/{response_id}/events"): _INFER,
        ("DELETE", "/v1/generations/{response_id}"): _INFER,
        ("POST", "/v1/responses"): _INFER,
        ("GET", "/v1/responses/{response_id}"): _SESSIONS,
        ("GET", "/v1/responses/{response_id}/input_items"): _SESSIONS,
        ("DELETE", "/v1/responses/{response_id}"): _SESSIONS,
        ("POST", "/v1/responses/{response_id}/cancel"): _INFER,
        ("GET", "/v1/models"): ANY_CALLER,
        ("GET", "/v1/models/{name:path}"): ANY_CALLER,
        ("POST", "/v1/load_lora_adapter"): _ADAPTERS,
        ("POST", "/v1/unload_lora_adapter"): _ADAPTERS,
        ("GET", "/v1/ws"): _INFER,
        ("GET", "/version"): ANY_CALLER,
        ("GET", "/openapi.json"): ANY_CALLER,
        ("GET", "/metrics"): Need(Scope.METRICS),
        ("GET", "/health"): OPEN,
        ("GET", "/healthz"): OPEN,
        ("GET", "/readyz"): OPEN,
    }
)
"""What each route of the HTTP API needs. HEAD needs what GET needs."""


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+(:path)?\}", path)
    # Of every two parts, the second is how far a parameter reaches.
    return re.compile(
        "".join(re.escape(part or "") if i % 2 == 0 else (".+" if part else "[^/]+") for i, part in enumerate(parts))
    )


_EXACT = {route: need for route, need in PUBLIC_ROUTES.items() if "{" not in route[1]}
_WITH_PARAMETERS = [(method, _pattern(path), need) for (method, path), need in PUBLIC_ROUTES.items() if "{" in path]


def need_of_route(method: str, path: str) -> Need | None:
    """Returns what a request needs, by its decoded path; None: the table has no such route."""
    method = "GET" if method == "HEAD" else method
    if (need := _EXACT.get((method, path))) is not None:
        return need
    return next((need for verb, route, need in _WITH_PARAMETERS if verb == method and route.fullmatch(path)), None)
