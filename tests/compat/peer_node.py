"""`python -m tests.compat.peer_node VERSION NODE_ID ANSWER_FILE STEP_S`: a node of another version, as a process.

It answers every prompt with the tokens of the file, a list of [token id, text], one per step and from
the index at which an attempt begins. It reports what routers send.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compat.peer_server import report, report_message, serve
from tests.compat.wires import Wire

BEAT_S = 0.05
CONTEXT_LENGTH = 2048
FINISHED_BY_STOP, FINISHED_BY_LENGTH = 1, 2


@dataclass
class Attempt:
    """An attempt that runs. `left` is how many tokens it may still generate."""

    handle: int
    index: int
    left: int
    accepted: bool = False


@dataclass
class Stream:
    """What one router has running here."""

    running: dict[int, Attempt] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)


class PeerNode:
    """The node. One choice per generation."""

    def __init__(self, wire: Wire, node_id: str, answer: list[tuple[int, str]], step_s: float) -> None:
        self._wire, self._node_id, self._answer, self._step_s = wire, node_id, answer, step_s
        self._step = self._beats = 0

    async def connect(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        """Serves one router's stream."""
        frames = aiter(requests)
        report_message("hello", await anext(frames))
        stream = Stream()
        hello = {"node_id": self._node_id, "incarnation": "1", "beat": self._beat(stream)}
        yield self._frame(hello=hello)
        reader = asyncio.create_task(self._read(frames, stream))
        beat_due = 0.0
        try:
            while not reader.done():
                for sequence in stream.acknowledged:
                    yield self._frame(ack={"sequence": sequence})
                stream.acknowledged.clear()
                now = asyncio.get_running_loop().time()
                if now >= beat_due:
                    beat_due = now + BEAT_S
                    yield self._frame(beat=self._beat(stream))
                if stream.running:
                    yield self._output(stream)
                await asyncio.sleep(self._step_s if stream.running else BEAT_S)
        finally:
            reader.cancel()
            report("stream ended")

    async def _read(self, frames: AsyncIterator[Any], stream: Stream) -> None:
        async for frame in frames:
            match frame.WhichOneof("frame"):
                case "submit":
                    report_message("submit", frame.submit)
                    begun = sum(len(choice.token_ids) for choice in frame.submit.generated)
                    left = (frame.submit.sampling.max_tokens or len(self._answer)) - begun
                    stream.running[frame.submit.handle] = Attempt(frame.submit.handle, begun, left)
                case "cancel":
                    report_message("cancel", frame.cancel)
                    stream.running.pop(frame.cancel.handle, None)
                case "beat" if frame.beat.sequence:
                    stream.acknowledged.append(frame.beat.sequence)

    def _output(self, stream: Stream) -> Any:
        self._step += 1
        columns: dict[str, list[Any]] = {name: [] for name in ("handle", "choice", "index", "token_id", "text")}
        accepted, finished = [], []
        for attempt in list(stream.running.values()):
            if not attempt.accepted:
                attempt.accepted = True
                accepted.append({"handle": attempt.handle, "prompt_tokens": 7})
            token_id, text = self._answer[attempt.index]
            for name, value in zip(columns, (attempt.handle, 0, attempt.index, token_id, text), strict=True):
                columns[name].append(value)
            attempt.index, attempt.left = attempt.index + 1, attempt.left - 1
            if not attempt.left or attempt.index == len(self._answer):
                reason = FINISHED_BY_STOP if attempt.left else FINISHED_BY_LENGTH
                finished.append({"handle": attempt.handle, "reason": reason})
                del stream.running[attempt.handle]
        return self._frame(output={"step": self._step, **columns, "accepted": accepted, "finished": finished})

    def _beat(self, stream: Stream) -> dict[str, Any]:
        self._beats += 1
        load = {"running": len(stream.running), "capacity": 64, "kv_blocks_total": 64}
        return {
            "sequence": self._beats,
            "state": "NODE_STATE_READY",
            "model": "demo",
            "context_length": CONTEXT_LENGTH,
            "load": load,
            "step": self._step,
        }

    def _frame(self, **frame: Any) -> Any:
        return self._wire.parse(self._wire.message("ConnectResponse"), frame)


def main() -> None:
    version, node_id, answer, step_s = sys.argv[1:]
    wire = Wire(version)
    node = PeerNode(wire, node_id, json.loads(Path(answer).read_text()), float(step_s))
    asyncio.run(serve(wire, "WorkerService", {"Connect": node.connect}))


if __name__ == "__main__":
    main()
