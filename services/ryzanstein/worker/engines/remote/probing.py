"""Finds out which server is at an address, and that it answers with token ids."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import msgspec

from ryzanstein.generation.request import MAX_LOGPROBS, SamplingParams
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.dialects.llama_cpp import LlamaCppDialect
from ryzanstein.worker.engines.remote.dialects.sglang import SglangDialect
from ryzanstein.worker.engines.remote.dialects.trtllm import TrtllmDialect
from ryzanstein.worker.engines.remote.dialects.vllm import VllmDialect
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import (
    EngineBusy,
    EngineProtocolError,
    EngineRefused,
    EngineUnreachable,
    clean,
)

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "tensorrt_llm": "tensorrt-llm"}
"""What servers write into the list of their models, and the dialect of each."""
_PROBES = ((1, 2, 3), (3, 2, 1), (2,))
"""Prompts of ids that every vocabulary has. One token is asked for each until one comes back with its id."""


class _Meta(msgspec.Struct):
    n_vocab: int = 0


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    parent: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str = ""


class _Settings(msgspec.Struct):
    n_ctx: int = 0


class _Props(msgspec.Struct):
    total_slots: int = 0
    build_info: str = ""
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)


class _State(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None


class _ServerInfo(msgspec.Struct):
    version: str = ""
    max_running_requests: int | None = None
    dp_size: int | None = None
    internal_states: list[_State] = []


Answer = TypeVar("Answer", bound=msgspec.Struct)


async def probe(client: EngineClient, dialect: str = "auto") -> ServedEngine:
    """Returns the server at the client's address. `dialect` is "auto" or one of `DIALECTS`.

    Raises EngineRefused for what does not mend itself: another kind of server, a wrong key, no token ids. Raises
    EngineUnreachable for what may: the server is not there, or still loads its model.
    """
    try:
        model = await _model(client)
        name = await _recognized(client, model) if dialect == "auto" else dialect
        if name not in DIALECTS:
            raise EngineRefused(f"engine_dialect: must be auto or one of {', '.join(DIALECTS)}, got {clean(name)!r}")
        served = await _DESCRIBED[name](client, model)
        await _require_ids(client, served)
    except EngineBusy as busy:
        raise EngineUnreachable(f"not ready yet: {busy}") from busy
    except EngineProtocolError as error:
        raise EngineRefused(f"the server at {client.address} cannot be used: {error}") from error
    return served


async def _model(client: EngineClient) -> _Model:
    """Returns the model that the server lists: the first that is no adapter of another."""
    models = (await _read(client, "/v1/models", _Models)).data
    own = [model for model in models if not model.parent]
    if not own:
        raise EngineRefused(f"the server at {client.address} lists no model in /v1/models")
    return own[0]


async def _recognized(client: EngineClient, model: _Model) -> str:
    """Returns the dialect's name, by the owner of the model, or by what only vLLM tells."""
    if model.owned_by in _OWNERS:
        return _OWNERS[model.owned_by]
    if model.max_model_len and await _has_version(client):
        return VllmDialect.name
    raise EngineRefused(
        f"the server at {client.address} is none of {', '.join(DIALECTS)}: the owner of its model is "
        f"{clean(model.owned_by)!r}. If it is one, set engine_dialect"
    )


async def _has_version(client: EngineClient) -> bool:
    try:
        return bool((await _read(client, "/version", _Version)).version)
    except (EngineRefused, EngineProtocolError):
        return False


async def _vllm(client: EngineClient, model: _Model) -> ServedEngine:
    version = (await _read(client, "/version", _Version)).version
    return ServedEngine(VllmDialect(), f"vllm {clean(version)}", model.id, model.max_model_len or 0, 0, MAX_LOGPROBS)


async def _sglang(client: EngineClient, model: _Model) -> ServedEngine:
    try:
        info = await _read(client, "/server_info", _ServerInfo)
    except EngineRefused:
        info = await _read(client, "/get_server_info", _ServerInfo)
    each = next((state.effective_max_running_requests_per_dp for state in info.internal_states), None)
    most = info.max_running_requests or (each or 0) * (info.dp_size or 1)
    return ServedEngine(SglangDialect(), f"sglang {clean(info.version)}", model.id, model.max_model_len or 0, most, 0)


async def _llama_cpp(client: EngineClient, model: _Model) -> ServedEngine:
    props = await _read(client, "/props", _Props)
    context = props.default_generation_settings.n_ctx
    if not context or not props.total_slots:
        raise EngineRefused(f"the llama.cpp at {client.address} has no model of its own: give the address of one that has")
    vocabulary = model.meta.n_vocab if model.meta else 0
    version = f"llama.cpp {clean(props.build_info)}"
    return ServedEngine(LlamaCppDialect(), version, "", context, props.total_slots, MAX_LOGPROBS, vocabulary)


async def _trtllm(client: EngineClient, model: _Model) -> ServedEngine:
    version = (await _read(client, "/version", _Version)).version
    return ServedEngine(TrtllmDialect(), f"tensorrt-llm {clean(version)}", model.id, 0, 0, 0)


_DESCRIBED: dict[str, Callable[[EngineClient, _Model], Awaitable[ServedEngine]]] = {
    VllmDialect.name: _vllm,
    SglangDialect.name: _sglang,
    LlamaCppDialect.name: _llama_cpp,
    TrtllmDialect.name: _trtllm,
}
DIALECTS = tuple(_DESCRIBED)
"""The names of all dialects."""


async def _read(client: EngineClient, path: str, kind: type[Answer]) -> Answer:
    found = await client.get(path)
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise EngineProtocolError(f"{path} is not as it must be: {error}") from None


async def _require_ids(client: EngineClient, served: ServedEngine) -> None:
    """Raises EngineRefused if no prompt of ids brings a token with its id."""
    reason = ""
    for prompt in _PROBES:
        asked = AskedChoice(prompt, len(prompt), SamplingParams(temperature=0.0), 0, 1, 0, (), request_id="probe")
        try:
            async with aclosing(computed(client, served, asked)) as parts:
                if any([part.tokens async for part in parts]):
                    return
        except EngineProtocolError as error:
            reason = str(error)
    name = served.dialect.name
    raise EngineRefused(f"the {name} at {client.address} gives no token ids{f': {reason}' if reason else ''}")


__all__ = ["DIALECTS", "ServedEngine", "probe"]
