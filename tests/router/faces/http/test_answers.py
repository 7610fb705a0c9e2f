"""What /openapi.json says of answers is what answers are: each is read as its type, and no field is left over."""

from __future__ import annotations

import msgspec
import pytest

from ryzanstein.router.faces.http.embeddings import EmbeddingList
from ryzanstein.router.faces.openai.answers import types as answers

ROUTES = [
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}]}, answers.ChatCompletion),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a b"}], "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
        answers.ChatCompletion,
    ),
    ("POST", "/v1/completions", {"prompt": ["a b", "c"], "logprobs": 1}, answers.TextCompletion),
    ("POST", "/v1/completions", {"prompt": "a b", "prompt_logprobs": 0, "echo": True, "logprobs": 1}, answers.TextCompletion),
    ("POST", "/v1/responses", {"input": "a b", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}, answers.ResponseAnswer),
    ("POST", "/v1/embeddings", {"input": ["a", "b"]}, EmbeddingList),
    ("POST", "/v1/embeddings", {"input": "a", "encoding_format": "base64"}, EmbeddingList),
    ("POST", "/tokenize", {"prompt": "a b", "return_token_strs": True}, answers.TokenizeAnswer),
    ("POST", "/detokenize", {"tokens": [1, 2]}, answers.DetokenizeAnswer),
    ("GET", "/v1/models", None, answers.ModelList),
    ("GET", "/v1/models/echo", None, answers.ModelAnswer),
]


@pytest.mark.parametrize(("method", "path", "body", "kind"), ROUTES, ids=lambda value: str(value)[:40])
@pytest.mark.long
async def test_an_answer_is_of_the_type_that_openapi_describes(http, method, path, body, kind):
    answer = await http.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=kind)
    described = (await http.get("/openapi.json")).json()["paths"]
    route = path.replace("/models/echo", "/models/{name}")
    schema = described[route][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(answer.json()) <= set(schema["properties"])
    assert set(schema["required"]) <= set(answer.json())


async def test_a_kept_response_its_end_and_errors_are_described_too(http):
    made = (await http.post("/v1/responses", json={"input": "a"})).json()
    kept, gone = await http.get(f"/v1/responses/{made['id']}"), await http.delete(f"/v1/responses/{made['id']}")
    assert msgspec.json.decode(kept.content, type=answers.ResponseAnswer).id == made["id"]
    assert msgspec.json.decode(gone.content, type=answers.DeletedResponse).id == made["id"]
    for refused in (await http.get("/v1/models/none"), await http.post("/v1/embeddings", json={"input": 5})):
        assert msgspec.json.decode(refused.content, type=answers.ErrorAnswer).error.message
