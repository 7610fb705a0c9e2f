"""The tables of access are what the services and routes are: nothing is left out, and nothing is there twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from tests.router.faces.http.conftest import EchoCore, open_app

from ryzanstein.auth.rules import OPEN, PUBLIC_METHODS, PUBLIC_ROUTES, need_of_route
from ryzanstein.router.access.authenticator import Anonymous
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.faces.http import app as http_app
from ryzanstein.router.faces.http.lora.routes import AdapterAccess
from ryzanstein.survey.adapters import AdapterClient
from ryzanstein.v1 import debug_pb2, embedding_pb2, inference_pb2, router_pb2, usage_pb2

PUBLIC = (inference_pb2, embedding_pb2, router_pb2, usage_pb2, debug_pb2, health_pb2, reflection_pb2)


def methods() -> Iterator[str]:
    for each in PUBLIC:
        for service in each.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        assert isinstance(route, APIRoute | Route), route
        for method in (route.methods or set()) - {"HEAD"}:
            yield method, route.path


def test_every_public_method_is_in_the_table_and_no_other() -> None:
    v1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"  # the newer name of v1alpha
    assert set(methods()) | {v1} == set(PUBLIC_METHODS)


def test_every_route_is_in_the_table_and_no_other() -> None:
    app = open_app(
        EchoCore(), socket_path="/v1/ws", adapters=AdapterAccess(lambda: AdapterClient("127.0.0.1:1"), lambda _: None)
    )
    assert set(routes(app)) == set(PUBLIC_ROUTES)
    switched = {("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}
    assert set(routes(open_app(EchoCore(), socket_path="/v1/ws"))) == set(PUBLIC_ROUTES) - switched


def test_an_application_with_a_route_that_is_not_in_the_table_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(app: FastAPI, *_: object) -> None:
        @app.get("/v1/dump")
        async def dump() -> None: ...

    monkeypatch.setattr(http_app, "_add_probes", add)
    with pytest.raises(LookupError, match="GET /v1/dump"):
        open_app(EchoCore())


def test_a_method_that_is_not_in_the_table_is_refused_even_without_keys() -> None:
    entrance = Entrance(Anonymous(), CollectorRegistry())
    with pytest.raises(Exception, match="nobody may call this"):
        entrance.admit("/ryzanstein.v1.InferenceService/Dump", ())


def test_only_probes_are_open() -> None:
    assert [route for route, need in PUBLIC_ROUTES.items() if need == OPEN] == [
        ("GET", "/health"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
    ]
    assert {method for method, need in PUBLIC_METHODS.items() if need == OPEN} == {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }


@pytest.mark.parametrize(
    "path",
    ["//health", "/health/", "/Health", "/healthz/x", "/HEALTHZ", "/readyz?", "/health\x00", "/v1/../health", "/%68ealth", ""],
)
def test_what_only_looks_like_a_probe_is_not_open(path: str) -> None:
    need = need_of_route("GET", path)
    assert need is None or not need.is_open


def test_parameters_of_routes_reach_as_far_as_they_do_in_the_application() -> None:
    assert need_of_route("GET", "/v1/models/org/name") == need_of_route("HEAD", "/v1/models/org/name") is not None
    assert need_of_route("GET", "/v1/generations/a/b/events") is None
    assert need_of_route("POST", "/v1/models") is None
