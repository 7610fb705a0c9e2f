"""Whole answers are written in pieces, and large ones in a thread: the event loop goes on."""

from __future__ import annotations

import json
import threading

from ryzanstein.router.faces.openai.answers import writing
from ryzanstein.router.faces.openai.answers.writing import OneByOne, written


def test_what_is_written_is_json():
    rows = [{"a": [i], "b": "ü\ud800"} for i in range(100)]
    body = {"choices": OneByOne({"n": i, "rows": iter(rows)} for i in range(2)), "none": {}, "empty": [], "usage": {"x": 1.5}}
    eager = {"choices": [{"n": i, "rows": rows} for i in range(2)], "none": {}, "empty": [], "usage": {"x": 1.5}}
    assert written(body) == json.dumps(eager, ensure_ascii=False).encode("utf-8", "replace")


async def test_no_call_of_the_encoder_is_long(http, chat, monkeypatch):
    calls: list[tuple[int, int]] = []
    encode = writing._encoded

    def recorded(value: object) -> str:
        text = encode(value)
        calls.append((len(text), threading.get_ident()))
        return text

    monkeypatch.setattr(writing, "_encoded", recorded)
    words = "word " * 2000
    for path, body in (
        ("/v1/chat/completions", chat(words, logprobs=True, top_logprobs=2)),
        ("/v1/chat/completions", chat(words, prompt_logprobs=1)),
        ("/v1/chat/completions", chat(words)),
        ("/v1/completions", {"prompt": words, "logprobs": 2, "max_tokens": 2000, "echo": True}),
    ):
        calls.clear()
        answer = await http.post(path, json=body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert max(length for length, _ in calls) < 32_768  # a text is one string, whatever its length
        assert threading.get_ident() not in {thread for _, thread in calls}
