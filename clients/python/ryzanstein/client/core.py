"""What both clients have: settings, routers, and how a request becomes a flow."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ryzanstein.addresses import split_address
from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.errors import Incomplete
from ryzanstein.client.following.flow import Attach, Begin, Flow
from ryzanstein.client.following.retries import Bounds, Retries
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.client.requests import Messages, chat_request, complete_request
from ryzanstein.client.transport import Metadata, Tls, metadata_of
from ryzanstein.errors import Code
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

DEFAULT_ROUTER = "127.0.0.1:50051"
CANCEL_S, CANCEL_TRIES = 2.0, 3
"""How long a cancellation is tried, and how long what it ends is read on."""
_TARGETS = ("dns:", "ipv4:", "ipv6:", "unix:", "xds:")
"""How names of gRPC begin that are no host:port (grpc/doc/naming.md)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the flow of its answer. `request` None: a generation that was begun elsewhere."""

    flow: Flow
    request: pb.ChatRequest | pb.CompleteRequest | None
    stall_s: float


class ClientCore:
    """The settings of a client. `timeout_s` None: the deadline is the router's."""

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        key: str | None,
        tls: Tls | None,
        insecure: bool,
        model: str,
        timeout_s: float | None,
        patience_s: float,
        busy_wait_s: float,
        stall_s: float,
    ) -> None:
        """Raises ValueError for a key that would cross a network in the clear."""
        addresses = [each.strip() for each in routers.split(",")] if isinstance(routers, str) else list(routers)
        self.rng = random.Random()
        self.routers = RouterChoice([_checked(each) for each in addresses if each], self.rng)
        self.tls, self.model = tls, model
        self.metadata: Metadata = metadata_of(key, self.routers.addresses, tls, insecure=insecure)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._busy_wait_s, self._stall_s = busy_wait_s, stall_s
        self._pid = os.getpid()

    def chat(self, messages: Messages, options: Mapping[str, Any]) -> Asked:
        request = chat_request(messages, self._with_model(options))
        return self._asked(request, options)

    def complete(self, prompt: str | Sequence[int], options: Mapping[str, Any]) -> Asked:
        request = complete_request(prompt, self._with_model(options))
        return self._asked(request, options)

    def attach(self, position: Position, timeout_s: float | None) -> Asked:
        flow = Flow(self.routers, self.bounds(timeout_s), position=position, rng=self.rng)
        return Asked(flow, None, self._stall_s)

    def request(self, request: pb.ChatRequest | pb.CompleteRequest, timeout_s: float | None, *, own_key: bool = False) -> Asked:
        """Returns what a request of the wire becomes. `own_key`: its key is the client's, which may do without it."""
        num_choices = max(1, request.sampling.n)
        flow = Flow(self.routers, self.bounds(timeout_s), num_choices=num_choices, own_key=own_key, rng=self.rng)
        return Asked(flow, request, self._stall_s)

    def bounds(self, timeout_s: float | None = None) -> Bounds:
        """Returns the bounds of a call that begins now."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return Bounds(deadline, self._patience_s, self._busy_wait_s, self._stall_s)

    def retries(self, bounds: Bounds) -> Retries:
        return Retries(self.routers, bounds, self.rng)

    def check_process(self) -> None:
        """Raises RuntimeError in a child of the process: connections do not survive a fork."""
        if os.getpid() != self._pid:
            raise RuntimeError("this client was made before a fork; make one in the child process")

    def _with_model(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": self.model, **options} if self.model else options

    def _asked(self, request: pb.ChatRequest | pb.CompleteRequest, options: Mapping[str, Any]) -> Asked:
        return self.request(request, options.get("timeout_s"), own_key="request_id" not in options)


def open_stream(
    stub: InferenceServiceStub, step: Begin | Attach, request: pb.ChatRequest | pb.CompleteRequest | None, metadata: Metadata
) -> Any:
    """Returns the call of a step of a flow."""
    if isinstance(step, Attach):
        return stub.AttachGeneration(step.request, timeout=step.timeout_s, metadata=metadata)
    if not step.keyed and request is not None:
        request = copy.deepcopy(request)
        request.request_id = ""
    if isinstance(request, pb.ChatRequest):
        return stub.StreamChat(pb.StreamChatRequest(chat=request), timeout=step.timeout_s, metadata=metadata)
    return stub.StreamComplete(pb.StreamCompleteRequest(complete=request), timeout=step.timeout_s, metadata=metadata)


def left_s(bounds: Bounds) -> float | None:
    """Returns the seconds to the deadline, as gRPC takes them."""
    return None if bounds.deadline is None else max(0.001, bounds.deadline - time.monotonic())


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
