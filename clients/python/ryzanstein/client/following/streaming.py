"""A stream as both clients have it: the answer so far, the events that nobody has taken yet, and the call that is read."""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ryzanstein.client.answer import Answer, Position
from ryzanstein.client.errors import AnswerCancelled
from ryzanstein.client.events import Event
from ryzanstein.client.following.flow import Attach, Begin, Flow
from ryzanstein.client.transport import Metadata
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

Request = pb.ChatRequest | pb.CompleteRequest
_SHORTEST_LOOK_S = 0.01


class FollowedAnswer:
    """An answer that is read, on one call after another. `request` None: it was begun elsewhere."""

    def __init__(self, flow: Flow, request: Request | None) -> None:
        self._flow, self.request = flow, request
        self._call: Any = None
        self._num_calls = 0
        self._pending: deque[Event] = deque()
        self._cancels = False

    @property
    def generation_id(self) -> str:
        """Returns the id; empty until a node has accepted the request."""
        return self.answer.generation_id

    @property
    def position(self) -> Position:
        """Returns where the answer is, for a reader that goes on from here; see `attach` of the client."""
        return self._flow.position

    @property
    def answer(self) -> Answer:
        """Returns what has arrived so far."""
        return self._flow.answer

    @property
    def router(self) -> str:
        """Returns the router that is read; empty: none is."""
        return self._flow.router if self._call is not None else ""

    def detach(self) -> Position:
        """Leaves the answer without cancelling it. Returns where another reader goes on; see `attach` of the client.

        The cluster keeps it as long as any answer without a reader.
        """
        self._give_up()
        return self.position

    def end_with_client(self) -> str:
        """Ends because the client is closed. Returns the generation that is to be cancelled; empty: none."""
        ends = self._ends_early()
        error = AnswerCancelled("the client was closed before the answer ended", Code.CANCELLED, "")
        self._flow.fail(error)
        self._give_up()
        return self.generation_id if ends else ""

    def _ends_early(self) -> bool:
        """Whether the generation goes on, and nobody has cancelled it."""
        return not self._flow.over and not self._cancels and bool(self.generation_id)

    def _cancelled(self) -> bool:
        """Notes that the reader wants no more. Returns whether there is something to cancel."""
        if self._flow.over or self._cancels:
            return False
        self._cancels = True
        self._flow.cancel()
        self._wake()
        return True

    def _reads(self, call: Any) -> None:
        """Reads this call from now on, and looks after it."""
        self._call = call
        self._num_calls += 1
        self._watch(self._num_calls)

    def _took(self, response: Any) -> None:
        """Takes a message; None: the stream has ended."""
        if response is not None:
            self._pending.extend(self._flow.got(response.event, time.monotonic()))
        else:
            self._flow.ended(time.monotonic())
            self._leave()

    def _lost(self, error: RyzansteinError) -> None:
        if self._flow.reading:
            self._flow.lost(error, time.monotonic())
        self._leave()

    def _leave(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _give_up(self) -> None:
        self._flow.give_up()
        self._wake()
        if (call := self._call) is not None:
            call.cancel()  # ends the pending read

    def _look(self, number: int) -> float | None:
        """Leaves a router that fell silent, where there is another one. `number` is that of the call that is read.

        Returns after how many seconds to look again: when it may have, not at each token. None: not at this call.
        """
        flow, now = self._flow, time.monotonic()
        if (call := self._call) is None or number != self._num_calls or flow.over or self._cancels:
            return None
        left_s = flow.stalls_in(now)
        if left_s > 0:
            return max(_SHORTEST_LOOK_S, left_s)
        flow.stalled(now)
        call.cancel()
        return None

    def _watching(self, number: int) -> Callable[[], None]:
        """Returns what looks again, and does not keep alive a stream that nobody reads any more."""
        weak = weakref.ref(self)

        def watch() -> None:
            if (stream := weak()) is not None:
                stream._watch(number)

        return watch

    def _watch(self, number: int) -> None:
        """Looks whether the router fell silent, and whether there are others now."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Ends a wait."""
        raise NotImplementedError


def open_stream(stub: InferenceServiceStub, step: Begin | Attach, request: Request | None, metadata: Metadata) -> Any:
    """Returns the call of a step of a flow."""
    if isinstance(step, Attach):
        return stub.AttachGeneration(step.request, timeout=step.timeout_s, metadata=metadata)
    if not step.keyed and request is not None:
        request = copy.deepcopy(request)
        request.request_id = ""
    if isinstance(request, pb.ChatRequest):
        return stub.StreamChat(pb.StreamChatRequest(chat=request), timeout=step.timeout_s, metadata=metadata)
    return stub.StreamComplete(pb.StreamCompleteRequest(complete=request), timeout=step.timeout_s, metadata=metadata)
