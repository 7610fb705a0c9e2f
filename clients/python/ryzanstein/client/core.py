"""What both clients have: settings, routers, and how a request becomes a flow."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar
from weakref import WeakSet

from ryzanstein.addresses import split_address
from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.calls import Steps, Unary, cancelling, learning, repeated
from ryzanstein.client.errors import Incomplete
from ryzanstein.client.following.flow import Flow
from ryzanstein.client.following.learning import Learning
from ryzanstein.client.following.retries import Bounds, Retries
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.client.following.streaming import FollowedAnswer, Request
from ryzanstein.client.requests import Messages, chat_request, complete_request
from ryzanstein.client.transport import Metadata, Tls, metadata_of
from ryzanstein.errors import Code

DEFAULT_ROUTER = "127.0.0.1:50051"
_TARGETS = ("dns:", "ipv4:", "ipv6:", "unix:", "xds:")
"""How names of gRPC begin that are no host:port (grpc/doc/naming.md)."""
T = TypeVar("T")
Asked = tuple[Flow, Request | None]
"""What a stream is made of."""


class Settings(TypedDict, total=False):
    """Settings of a client."""

    key: str | None
    """An API key. It is not sent without TLS, except to this machine or with `insecure`."""
    tls: Tls | None
    insecure: bool
    model: str
    """The model of requests that name none."""
    timeout_s: float | None
    """How long an answer may take; None: as long as the router lets it."""
    patience_s: float
    """How long no router may answer: 30. Without a deadline also how long refusals may follow one another."""
    busy_wait_s: float
    """How long another request in the same session may take: 10."""
    stall_s: float
    """How long a router may be silent in the middle of an answer, where there is another one: 10."""
    learn_routers: bool
    """Whether to ask routers for the other ones, which are used when those that were given fail: yes."""


class ClientCore:
    """What a client is, besides its connections. See `Settings`."""

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        key: str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        model: str = "",
        timeout_s: float | None = None,
        patience_s: float = 30.0,
        busy_wait_s: float = 10.0,
        stall_s: float = 10.0,
        learn_routers: bool = True,
    ) -> None:
        """Raises ValueError for a router that is no address, and for a key that would cross a network in the clear."""
        addresses = [each.strip() for each in routers.split(",")] if isinstance(routers, str) else list(routers)
        self.rng = random.Random()
        self.routers = RouterChoice([_checked(each) for each in addresses if each], self.rng)
        self.tls, self.model = tls, model
        self.metadata: Metadata = metadata_of(key, self.routers.addresses, tls, insecure=insecure)
        self._timeout_s, self._undated = timeout_s, Bounds(None, patience_s, busy_wait_s, stall_s)
        self._learning = Learning(self.routers, tls=tls is not None, on=learn_routers)
        self._pid, self._closed = os.getpid(), False
        self._lock = threading.Lock()
        self._streams: WeakSet[FollowedAnswer] = WeakSet()

    def chat(self, messages: Messages, options: Mapping[str, Any]) -> Asked:
        request = chat_request(messages, self._with_model(options))
        return self._asked(request, options)

    def complete(self, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Asked:
        request = complete_request(prompt, self._with_model(options))
        return self._asked(request, options)

    def attach(self, position: Position, timeout_s: float | None) -> Asked:
        self.check_usable()
        return Flow(self.routers, self._bounds(timeout_s), position=position, rng=self.rng), None

    def request(self, request: Request, timeout_s: float | None, *, own_key: bool = False) -> Asked:
        """Returns what a request of the wire becomes. `own_key`: its key is the client's, which may do without it."""
        self.check_usable()
        num_choices = max(1, request.sampling.n)
        flow = Flow(self.routers, self._bounds(timeout_s), num_choices=num_choices, own_key=own_key, rng=self.rng)
        return flow, request

    def repeated(self, unary: Unary[T], timeout_s: float | None = None) -> Steps[T]:
        """Returns the steps of a call that may be repeated. They raise ClientError."""
        self.check_usable()
        bounds = self._bounds(timeout_s)
        return repeated(unary, self.routers, Retries(self.routers, bounds, self.rng), bounds)

    def learns(self) -> Steps[None] | None:
        """Returns the steps that learn routers; None: it is not the time."""
        now = time.monotonic()
        return learning(self._learning, self.routers) if self._learning.asks(now) else None

    def cancelling(self, generation_id: str) -> Steps[None]:
        """Returns the steps that end a generation. They raise ClientError."""
        return cancelling(generation_id, self.routers)

    def follows(self, stream: FollowedAnswer) -> None:
        """Notes a stream that is read. Raises RuntimeError as `check_usable`."""
        self.check_usable()
        with self._lock:
            self.check_usable()
            self._streams.add(stream)

    def unused(self, channels: Mapping[str, Any]) -> list[str]:
        """Returns the addresses of channels to routers that were only asked whether they are there, or are gone.

        Many clients must not keep a connection to each of many routers: where one fails, another one is opened soon enough.
        """
        with self._lock:
            used = {*self.routers.given, *(stream.router for stream in self._streams), self.routers.current(time.monotonic())}
        return [address for address in channels if address not in used]

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the client."""
        return os.getpid() != self._pid

    def close(self) -> list[str]:
        """Ends all streams, and returns the generations that are to be cancelled. In a child of the process there are none."""
        if self.forked:
            return []
        with self._lock:
            self._closed, streams = True, list(self._streams)
        return [generation_id for stream in streams if (generation_id := stream.end_with_client())]

    def check_usable(self) -> None:
        """Raises RuntimeError for a client that is closed, and in a child of the process: connections do not survive a fork."""
        if self._closed:
            raise RuntimeError("this client is closed; make another one")
        if self.forked:
            raise RuntimeError("this client was made before a fork; make one in the child process")

    def _bounds(self, timeout_s: float | None) -> Bounds:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return replace(self._undated, deadline=deadline)

    def _with_model(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": self.model, **options} if self.model else options

    def _asked(self, request: Request, options: Mapping[str, Any]) -> Asked:
        return self.request(request, options.get("timeout_s"), own_key="request_id" not in options)


def parsed(answer: Answer, answer_as: type[Any]) -> Any:
    """Returns what a structured answer says. Raises Incomplete if it was cut."""
    from pydantic import TypeAdapter

    if answer.finish_reason == "length":
        error = Incomplete("the answer ended before it was whole: raise max_tokens", Code.OUT_OF_RANGE, "")
        error.partial = answer
        raise error
    return TypeAdapter(answer_as).validate_json(answer.text)


def schema_of(answer_as: type[Any]) -> dict[str, Any]:
    """Returns the JSON schema of a type. Raises ImportError without Pydantic."""
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise ImportError("answer_as needs Pydantic: pip install 'ryzanstein-client[pydantic]'") from None
    return TypeAdapter(answer_as).json_schema()


def _checked(router: str) -> str:
    """Returns an address that gRPC takes. Raises ValueError for one that names no port: gRPC would try that of HTTPS."""
    if "://" in router and not router.startswith(_TARGETS):
        raise ValueError(f"routers: must be host:port without a scheme, got {router[:80]!a}")
    if not router.startswith(_TARGETS):
        try:
            split_address(router)
        except ValueError as error:
            raise ValueError(f"routers: {error}") from None
    return router
