"""A router that answers what a script says, over a real connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc as rpc

NODES = ("node-0", "node-1", "node-2")


@dataclass
class Script:
    """What the router answers: pieces, each a token, of a node; a question that has no script is answered with itself."""

    pieces: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    step_s: float = 0.0
    cancelled: set[str] = field(default_factory=set)
    asked: list[pb.ChatRequest] = field(default_factory=list)
    sent: list[tuple[int, float]] = field(default_factory=list)
    sent_of: dict[str, dict[int, float]] = field(default_factory=dict)
    """When each token of an answer was given to the connection, in Unix seconds, by question."""
    keys: list[str] = field(default_factory=list)
    refused_key: str = "Bearer wrong"
    attached: list[str] = field(default_factory=list)


class ScriptedRouter(rpc.InferenceServiceServicer, rpc.SessionServiceServicer):
    """A router over a real connection. It keeps sessions in memory, and moves from node to node as its script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.sessions: dict[str, pb.Session] = {}
        self.server = grpc.server(ThreadPoolExecutor(32))
        rpc.add_InferenceServiceServicer_to_server(self, self.server)
        rpc.add_SessionServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def close(self) -> None:
        self.server.stop(0).wait()

    def StreamChat(self, request: Any, context: Any) -> Iterator[Any]:
        self._check(context)
        self.script.asked.append(request.chat)
        for event in self._events(len(self.script.asked), 0):
            yield pb.StreamChatResponse(event=event)

    def AttachGeneration(self, request: Any, context: Any) -> Iterator[Any]:
        self._check(context)
        number = int(request.generation_id.removeprefix("generation-"))
        if number > len(self.script.asked):
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such generation")
        self.script.attached.append(request.generation_id)
        for event in self._events(number, request.from_index.get(0, 0)):
            yield pb.AttachGenerationResponse(event=event)

    def _events(self, number: int, first: int) -> Iterator[pb.GenerationEvent]:
        chat, script, generation = self.script.asked[number - 1], self.script, f"generation-{number}"
        question = chat.messages[-1].content
        pieces = script.pieces.get(question) or [(NODES[0], each) for each in question.split(" ")]
        yield pb.GenerationEvent(
            started=pb.GenerationStarted(generation_id=generation, model="m", node_id=pieces[0][0], prompt_tokens=7)
        )
        before, text, reason = pieces[0][0], "", pb.FINISH_REASON_STOP
        for index, (node, piece) in enumerate(pieces):
            if generation in script.cancelled:
                reason = pb.FINISH_REASON_CANCELLED
                break
            text += piece
            delta = pb.GenerationDelta(first_index=index, token_ids=[index], text=piece, node_id=node)
            if node != before:
                delta.moved.from_node_id, delta.moved.cause = before, "link_lost"
                delta.moved.silence.FromMilliseconds(212)
            before = node
            if index < first:
                continue
            now = time.time()
            script.sent.append((index, now))
            script.sent_of.setdefault(question, {})[index] = now
            yield pb.GenerationEvent(delta=delta)
            time.sleep(script.step_s)
        if chat.session_id:
            session = self.sessions.setdefault(chat.session_id, pb.Session(session_id=chat.session_id))
            session.messages.extend(chat.messages)
            session.messages.add(role=pb.ROLE_ASSISTANT, content=text)
            session.update_time.GetCurrentTime()
        usage = pb.Usage(completion_tokens=len(pieces))
        yield pb.GenerationEvent(finished=pb.GenerationFinished(finish_reason=reason, usage=usage))

    def CancelGeneration(self, request: Any, context: Any) -> Any:
        self.script.cancelled.add(request.generation_id)
        return pb.CancelGenerationResponse()

    def ListModels(self, request: Any, context: Any) -> Any:
        self._check(context)
        return pb.ListModelsResponse(models=[pb.Model(name="m", ready_nodes=2)])

    def CreateSession(self, request: Any, context: Any) -> Any:
        session = pb.Session(session_id=request.session_id, messages=request.messages)
        self.sessions[request.session_id] = session
        return pb.CreateSessionResponse(session=session)

    def GetSession(self, request: Any, context: Any) -> Any:
        if request.session_id not in self.sessions:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
        return pb.GetSessionResponse(session=self.sessions[request.session_id])

    def ListSessions(self, request: Any, context: Any) -> Any:
        return pb.ListSessionsResponse(sessions=list(self.sessions.values()))

    def DeleteSession(self, request: Any, context: Any) -> Any:
        self.sessions.pop(request.session_id, None)
        return pb.DeleteSessionResponse()

    def _check(self, context: Any) -> None:
        key = dict(context.invocation_metadata()).get("authorization", "")
        self.script.keys.append(key)
        if key == self.script.refused_key:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the key is not known")
