"""`ryzanstein chat` shows calls as they are written, and keeps them."""

from __future__ import annotations

from ryzanstein.cli.answers import ChatAnswer, visible
from ryzanstein.v1 import inference_pb2 as pb


def test_calls_are_shown_and_kept() -> None:
    first = pb.GenerationDelta(text="I look.", token_ids=[1])
    first.tool_calls.add(index=0, id="x", name="weather", arguments='{"city": ')
    second = pb.GenerationDelta(first_index=1, token_ids=[2])
    second.tool_calls.add(index=0, arguments='"Rome"}')
    finished = pb.GenerationFinished(finish_reason=pb.FINISH_REASON_TOOL_CALLS, text=" Done.")
    events = [
        pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g")),
        pb.GenerationEvent(delta=first),
        pb.GenerationEvent(delta=second),
        pb.GenerationEvent(finished=finished),
    ]
    answer = ChatAnswer(0.0)
    for event in events:
        answer.apply(event)
    assert "".join(map(visible, events)) == 'I look.\nweather {"city": "Rome"} Done.'
    assert (answer.text, answer.finish_reason) == ("I look. Done.", "tool_calls")
    assert answer.tool_calls == [pb.ToolCall(id="x", name="weather", arguments='{"city": "Rome"}')]
