"""`python -m tests.hostile.grpc_cost`: for how long one gRPC request holds a router's loop, read, converted and passed on.

The worst of each kind: what is refused, and the largest that is not. Processor time of this thread, so that a busy machine does
not count; the best of a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.faces.request_key import keyed
from ryzanstein.router.tuning import RouterTuning
from ryzanstein.rpc.reading import RequestReading, readable
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.attempts import attempt_to_wire
from ryzanstein.wire.requests import MostParts, chat_from_wire, complete_from_wire

ROUNDS = 3
MAX_BYTES = RouterSettings.model_fields["max_request_bytes"].default
MAX_RECORDS = RouterTuning().max_request_records
MOST = MostParts(RouterSettings.model_fields["max_messages"].default, RouterSettings.model_fields["max_prompt_tokens"].default)
_USER = inference.ROLE_USER

Steps = list[tuple[str, float]]


def _full_sampling() -> inference.SamplingParams:
    return inference.SamplingParams(
        stop=["s" * 256] * 16, stop_token_ids=[2**32 - 1] * 64, logit_bias=dict.fromkeys(range(1024), 1.0)
    )


def requests() -> dict[str, tuple[type[Any], bytes]]:
    """By name: the type, and what comes over the wire."""
    chat, complete = inference.ChatRequest, inference.CompleteRequest

    def message(text: str) -> inference.Message:
        return inference.Message(role=_USER, content=text)

    made: dict[str, Any] = {
        "2,048 messages, 1,000,000 characters": chat(messages=[message("x" * 488)] * 2048, sampling=_full_sampling()),
        "2,049 messages": chat(messages=[message("x" * 488)] * 2049),
        "5,000 messages": chat(messages=[message("x")] * 5000),
        "text of 1,000,000 characters, 4 MB": complete(text="\U0001f600" * 1_000_000),
        "262,144 token ids": complete(token_ids=inference.TokenIds(ids=[150_000] * 262_144)),
        "4,000,000 token ids": complete(token_ids=inference.TokenIds(ids=[1] * 4_000_000)),
        "4,000,000 stop tokens": chat(messages=[message("x")], sampling={"stop_token_ids": [1] * 4_000_000}),
        "100,000 logit biases": chat(messages=[message("x")], sampling={"logit_bias": dict.fromkeys(range(100_000), 1.0)}),
    }
    raw = {"2,000,000 empty messages": b"\x12\x00", "600,000 small messages": b"\x12\x05\x08\x02\x12\x01a"}
    raw |= {"2,000,000 times one number": b"\x30\x01", "380,000 long numbers": b"\x30" + b"\x80" * 9 + b"\x00"}
    found = {name: (type(request), request.SerializeToString()) for name, request in made.items()}
    return found | {name: (chat, record * (MAX_BYTES // len(record))) for name, record in raw.items()}


def cost(kind: type[Any], data: bytes) -> tuple[str, Steps]:
    """What became of it, and the seconds of each step that stands in one turn of the loop."""
    outcomes, rounds = zip(*(_once(kind, data) for _ in range(ROUNDS)), strict=True)
    return outcomes[0], [(steps[0][0], min(seconds for _, seconds in steps)) for steps in zip(*rounds, strict=True)]


def _once(kind: type[Any], data: bytes) -> tuple[str, Steps]:
    steps: Steps = []

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return work()
        finally:
            steps.append((name, time.thread_time() - began))

    read = RequestReading(MAX_RECORDS).deserializer("/service/method", kind.FromString)
    convert = chat_from_wire if kind is inference.ChatRequest else complete_from_wire
    assert read is not None
    try:
        request = readable(timed("read", lambda: read(data)))
        domain: GenerationRequest = timed("convert", lambda: keyed(convert(request, MOST), "key", "request_id"))
    except RyzansteinError as error:
        return error.reason, steps
    timed("pass on", lambda: attempt_to_wire(Attempt("g", 0, domain, (ChoiceProgress(),)), 1).SerializeToString())
    return "accepted", steps


def main() -> None:
    print("| request | bytes | answer | read ms | convert ms | pass on ms |")
    print("|---|---:|---|---:|---:|---:|")
    for name, (kind, data) in requests().items():
        answer, steps = cost(kind, data)
        times = [f"{1000 * seconds:.1f}" for _, seconds in steps]
        print(f"| {name} | {len(data)} | {answer} | {' | '.join(times + [''] * (3 - len(times)))} |")


if __name__ == "__main__":
    main()
