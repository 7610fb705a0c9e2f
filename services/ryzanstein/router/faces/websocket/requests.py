"""Converts messages of clients to what the core is asked: with the decoders and checks of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers

from ryzanstein import errors
from ryzanstein.auth.caller import Caller
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.request_id import request_id
from ryzanstein.router.faces.disconnect import CANCEL_ON_DISCONNECT, RUN_DETACHED, on_disconnect
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.gate import REQUEST_ID
from ryzanstein.router.faces.openai.answers.dialect import AnswerDialect, ChatDialect, CompletionDialect, form_for
from ryzanstein.router.faces.openai.answers.failures import HttpFailure, HttpRefused
from ryzanstein.router.faces.openai.requests.prompts import Completions, chat_request, completion_requests
from ryzanstein.router.faces.openai.requests.response_format import naming_the_constraint
from ryzanstein.router.faces.openai.requests.schemas import ChatCompletionRequest, CompletionRequest, GenerationOptions
from ryzanstein.router.faces.origin import RequestOrigin
from ryzanstein.router.faces.request_key import HEADER as IDEMPOTENCY_KEY
from ryzanstein.router.faces.websocket.frames import Attach, Cancel, ClientFrame, CreditFrame, Submit
from ryzanstein.router.faces.websocket.stream import Submission

# Those of a POST that a message may set. The caller is that of the socket.
_OF_A_MESSAGE = {
    name.lower(): name
    for name in (
        REQUEST_ID,
        IDEMPOTENCY_KEY,
        CANCEL_ON_DISCONNECT,
        RUN_DETACHED,
        "X-Session-Id",
        "X-Request-Timeout-Ms",
        "traceparent",
    )
}
# Those of the handshake that hold for all messages, unless a message says otherwise.
_OF_THE_SOCKET = (CANCEL_ON_DISCONNECT, RUN_DETACHED, "X-Request-Timeout-Ms", "traceparent")
_NO_OBJECT = HttpFailure(400, "a message must be a JSON object with a type", None, "invalid_body")


class _Id(msgspec.Struct):
    id: str = ""


class SocketRequests:
    """Reads the messages of one router's sockets. Large ones take turns, as over HTTP."""

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._reader = BodyReader()
        self._frames: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ClientFrame)
        self._ids = msgspec.json.Decoder(_Id)
        self._chats = msgspec.json.Decoder(ChatCompletionRequest)
        self._completions = msgspec.json.Decoder(CompletionRequest)

    async def frame(self, raw: bytes) -> Submit | Attach | Cancel | CreditFrame:
        """Returns a client's message. Raises HttpRefused with the field and the bound."""
        try:
            frame, _ = await self._reader.parse(raw, self._frames, lambda frame: frame)
        except HttpRefused as refused:
            if refused.failure.code == _NO_OBJECT.code:
                raise HttpRefused(_NO_OBJECT, refused.reason) from None
            raise
        return frame  # type: ignore[no-any-return]

    def id_of(self, raw: bytes) -> str | None:
        """Returns the id of a message that is not valid, if it has one that can be repeated."""
        try:
            return self._ids.decode(raw).id[:64] or None
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    async def submission(self, submit: Submit, socket_headers: Mapping[str, str], caller: Caller) -> Submission:
        """Returns what a submit asks for. Raises HttpRefused or INVALID_ARGUMENT, as a POST does."""
        headers = _headers(submit, socket_headers)
        origin = RequestOrigin(caller, request_id(headers.get(REQUEST_ID, "")))
        match submit.url:
            case "/v1/chat/completions":
                return await self._chat(submit, headers, origin)
            case "/v1/completions":
                return await self._completion(submit, headers, origin)
        raise errors.invalid("url", "must be /v1/chat/completions or /v1/completions", submit.url[:64])

    async def _chat(self, submit: Submit, headers: Headers, origin: RequestOrigin) -> Submission:
        def converted(body: ChatCompletionRequest) -> GenerationRequest:
            return chat_request(_streaming(body), headers, origin, self._max_messages)

        body, request = await self._parsed(submit, self._chats, converted)
        return _submission(body, request, ChatDialect(), headers)

    async def _completion(self, submit: Submit, headers: Headers, origin: RequestOrigin) -> Submission:
        def converted(body: CompletionRequest) -> GenerationRequest:
            return _only(completion_requests(_streaming(body), headers, origin))

        body, request = await self._parsed(submit, self._completions, converted)
        return _submission(body, request, CompletionDialect(), headers)

    async def _parsed(
        self, submit: Submit, decoder: msgspec.json.Decoder[Any], convert: Callable[[Any], GenerationRequest]
    ) -> tuple[Any, GenerationRequest]:
        return await self._reader.parse(bytes(submit.body), decoder, convert)


def _submission(body: GenerationOptions, request: GenerationRequest, dialect: AnswerDialect, headers: Headers) -> Submission:
    return Submission(request, form_for(body, dialect), on_disconnect(headers), partial(naming_the_constraint, body))


def _only(asked: Completions) -> GenerationRequest:
    """Returns the one generation that is asked for: on a socket, each is a stream of its own."""
    if len(asked.requests) > 1:
        raise errors.invalid("prompt", "must be one prompt: submit each on its own", len(asked.requests))
    if asked.echo:
        raise errors.invalid("echo", "is not supported on a socket")
    return asked.requests[0]


def _streaming(body: Any) -> Any:
    """Returns the body of a stream: over a socket there is nothing else."""
    if body.stream is False:
        raise errors.invalid("stream", "must be true or absent: a socket has only streams", False)
    return msgspec.structs.replace(body, stream=True)


def _headers(submit: Submit, socket_headers: Mapping[str, str]) -> Headers:
    unknown = [name for name in submit.headers if name.lower() not in _OF_A_MESSAGE]
    if unknown:
        raise errors.invalid(f"headers.{unknown[0][:64]}", f"must be one of {', '.join(_OF_A_MESSAGE.values())}")
    own = {name.lower(): value for name, value in submit.headers.items()}
    # A choice of the message replaces the socket's other choice, which would contradict it.
    chosen = {name.lower() for name in (CANCEL_ON_DISCONNECT, RUN_DETACHED)}
    dropped = chosen if chosen & own.keys() else set()
    shared = {name.lower(): socket_headers[name] for name in _OF_THE_SOCKET if name in socket_headers}
    return Headers({name: value for name, value in shared.items() if name not in dropped} | own)
