"""The gRPC face of the session store."""

from __future__ import annotations

import uuid
from typing import Any

import grpc

from ryzanstein import errors
from ryzanstein.router.faces.grpc.call import Calls
from ryzanstein.router.sessions.names import OwnedSessions, is_reserved
from ryzanstein.router.sessions.store import Session
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import SessionServiceServicer
from ryzanstein.wire.requests import MostParts, message_to_wire, messages_from_wire, name_from_wire
from ryzanstein.wire.timestamps import timestamp

_Context = grpc.aio.ServicerContext[Any, Any]


class SessionServicer(SessionServiceServicer):
    """`SessionService` over the sessions of tenants."""

    def __init__(self, sessions: OwnedSessions, calls: Calls, most: MostParts) -> None:
        self._sessions = sessions
        self._calls = calls
        self._most = most

    async def CreateSession(
        self, request: inference.CreateSessionRequest, context: _Context
    ) -> inference.CreateSessionResponse:
        with self._calls.call("CreateSession", context) as call:
            session_id = name_from_wire(request.session_id, "session_id")
            if is_reserved(session_id):
                raise errors.invalid("session_id", "is reserved", session_id)
            model = name_from_wire(request.model, "model")
            if model:
                call.caller.check_model(model)
            messages = messages_from_wire(request.messages, self._most)
            fresh = not session_id
            session = await self._sessions.create(call.tenant, session_id or uuid.uuid4().hex, model, messages, fresh=fresh)
            return inference.CreateSessionResponse(session=session_to_wire(session))

    async def GetSession(self, request: inference.GetSessionRequest, context: _Context) -> inference.GetSessionResponse:
        with self._calls.call("GetSession", context) as call:
            session = await self._sessions.get(call.tenant, name_from_wire(request.session_id, "session_id"))
            return inference.GetSessionResponse(session=session_to_wire(session))

    async def ListSessions(self, request: inference.ListSessionsRequest, context: _Context) -> inference.ListSessionsResponse:
        with self._calls.call("ListSessions", context) as call:
            page = await self._sessions.list(call.tenant, request.page_size, request.page_token)
            return inference.ListSessionsResponse(
                sessions=[session_to_wire(session) for session in page.sessions], next_page_token=page.next_page_token
            )

    async def DeleteSession(
        self, request: inference.DeleteSessionRequest, context: _Context
    ) -> inference.DeleteSessionResponse:
        with self._calls.call("DeleteSession", context) as call:
            await self._sessions.delete(call.tenant, name_from_wire(request.session_id, "session_id"))
            return inference.DeleteSessionResponse()


def session_to_wire(session: Session) -> inference.Session:
    return inference.Session(
        session_id=session.session_id,
        model=session.model,
        create_time=timestamp(session.create_time),
        update_time=timestamp(session.update_time),
        messages=[message_to_wire(message) for message in session.messages],
        node_id=session.node_id,
    )
