"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's servers have them.

They deploy and withdraw an adapter at the orchestrator, so all nodes of the model have it, not the
one behind this router alone. The answer comes when this router's requests may name it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.caller import Caller
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import name_fault
from ryzanstein.generation.request import AdapterRef
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.gate import call_of
from ryzanstein.router.faces.openai.openapi import described
from ryzanstein.router.faces.openai.requests.schemas import Body, Whole
from ryzanstein.survey.adapters import AdapterClient, AdapterView

log = structlog.get_logger(__name__)

WAIT_S = 60.0
# Tools look for the first words.
_LOADED = "the lora adapter '{name}' has already been loaded; with load_inplace it is replaced"
_LOOK_EVERY_S = 0.05
_FIELDS = {"adapter.name": "lora_name", "adapter.path": "lora_path", "adapter.model": "base_model_name"}


class LoadLoraBody(Body, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter. `lora_path` is absolute, as the nodes find it."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadLoraBody(Body, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter. `lora_int_id` is ignored."""

    lora_name: str
    lora_int_id: Whole | None = None


@dataclass(frozen=True, slots=True)
class AdapterAccess:
    """What has nodes load adapters, and what they have told this router.

    `new_client` opens a client of the orchestrator; `known` returns the model and the content that a name stands for here.
    """

    new_client: Callable[[], AdapterClient]
    known: Callable[[str], tuple[str, AdapterRef] | None]


class LoraRoutes:
    """Loads and unloads adapters for callers."""

    def __init__(self, core: Core, access: AdapterAccess, wait_s: float = WAIT_S) -> None:
        self._core, self._access, self._wait_s = core, access, wait_s

    async def load(self, body: LoadLoraBody, caller: Caller) -> str:
        """Returns what vLLM says. Nothing changes where any node refuses the adapter.

        Raises INVALID_ARGUMENT for a name that has one already or an adapter that does not fit,
        NOT_FOUND for a base that is not served, DEADLINE_EXCEEDED where nodes take too long.
        """
        if fault := name_fault(body.lora_name):
            raise errors.invalid("lora_name", fault)
        caller.check_model(body.lora_name)
        adapter = DeployedAdapter(body.lora_name, self._base(body.base_model_name or "", caller), body.lora_path)
        async with self._access.new_client() as client:
            before = await client.find(adapter.name)
            if before is not None and not body.load_inplace:
                raise errors.invalid(
                    "lora_name", f"The lora adapter '{adapter.name}' has already been loaded; see load_inplace"
                )
            view = await client.settle(await client.deploy(adapter), self._wait_s)
            if view.refused:
                await _undo(client, adapter, before)
        self._check(view)
        contents = {node.digest for node in view.ready}
        await self._until(lambda: self._content(adapter.name) in contents)
        log.info("adapter loaded", adapter=adapter.name, model=adapter.model, path=adapter.path, key_id=caller.key_id)
        return f"Success: LoRA adapter '{adapter.name}' added successfully."

    async def unload(self, body: UnloadLoraBody, caller: Caller) -> str:
        """Returns what vLLM says. Raises NOT_FOUND if there is no such adapter."""
        caller.check_model(body.lora_name)
        async with self._access.new_client() as client:
            await client.remove(body.lora_name)
        await self._until(lambda: all(model.name != body.lora_name for model in self._core.models()))
        log.info("adapter unloaded", adapter=body.lora_name, key_id=caller.key_id)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _base(self, name: str, caller: Caller) -> str:
        base = self._core.model_of(name)
        caller.check_model(name or base)
        if name and base != name:
            raise errors.invalid("base_model_name", f"must not be an adapter; its model is {base!r}"[:256], name)
        return base

    def _check(self, view: AdapterView) -> None:
        for node in view.refused:
            raise errors.adapter_unfit(view.adapter.name, "lora_path", f"node {node.node_id}: {node.refusal}")
        if not view.settled:
            ready = f"{len(view.ready)} of {len(view.nodes)} nodes have it after {self._wait_s:.0f} s; it stays deployed"
            raise errors.deadline_exceeded(f"the adapter {view.adapter.name!r} is not yet ready: {ready}")

    def _content(self, name: str) -> str:
        """Returns the digest of what this router's requests get under a name; empty: nothing."""
        known = self._access.known(name)
        return "" if known is None else known[1].digest.hex()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Waits until this router's nodes have told it."""
        ends_s = time.monotonic() + self._wait_s
        while not holds():
            if time.monotonic() > ends_s:
                raise errors.deadline_exceeded(f"this router has not heard of it within {self._wait_s:.0f} s")
            await asyncio.sleep(_LOOK_EVERY_S)


async def _undo(client: AdapterClient, adapter: DeployedAdapter, before: DeployedAdapter | None) -> None:
    """Has the nodes keep what they had: the path in force is the one of before."""
    if before is None:
        await client.remove(adapter.name)
    else:
        await client.deploy(before)


def add_lora_routes(app: FastAPI, routes: LoraRoutes, reader: BodyReader) -> None:
    load_decoder, unload_decoder = msgspec.json.Decoder(LoadLoraBody), msgspec.json.Decoder(UnloadLoraBody)

    @app.post("/v1/load_lora_adapter", openapi_extra=described(LoadLoraBody))
    async def load_lora_adapter(http: Request) -> Response:
        body, _ = await reader.read(http, load_decoder, lambda _: None)
        try:
            return PlainTextResponse(await routes.load(body, call_of(http.scope).caller))
        except RyzansteinError as error:
            raise error.with_fields(_as_written) from None

    @app.post("/v1/unload_lora_adapter", openapi_extra=described(UnloadLoraBody))
    async def unload_lora_adapter(http: Request) -> Response:
        body, _ = await reader.read(http, unload_decoder, lambda _: None)
        return PlainTextResponse(await routes.unload(body, call_of(http.scope).caller))


def _as_written(field: str) -> str:
    """Returns a field of DeployAdapterRequest as a body has it."""
    return _FIELDS.get(field, field)
