"""HTTP bodies that once held a router's event loop, or were meant to. Each is within the bound on a body's size, and is built
when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
BOUND = 4 * 2**20
_USER = b'{"role":"user","content":"%s"}'


@dataclass(frozen=True)
class HostileBody:
    """`status` and `param` are what it is answered; no param for what is not JSON, or is fine."""

    name: str
    path: str
    make: Callable[[], bytes]
    status: int
    param: str | None = None

    @cached_property
    def content(self) -> bytes:
        return self.make()


def _messages(inner: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"scripted","max_tokens":2,%s"messages":[%s]}' % (more, inner)


def _prompt(inner: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"scripted","max_tokens":2,%s"prompt":%s}' % (more, inner)


def _many(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


def _with(more: bytes) -> bytes:
    return _messages(_USER % b"0.001", more)


def _biases(count: int) -> bytes:
    return json.dumps({str(i): 1 for i in range(count)}).encode()


def _wide() -> bytes:
    return b"{%s}" % b",".join(b'"key%d":1' % i for i in range(250_000))


def _parts(count: int) -> bytes:
    return b'{"role":"user","content":[%s]}' % _many(b'{"type":"text","text":"a"}', count)


def _ids(count: int) -> bytes:
    return b"[%s]" % b",".join(b"%d" % (2**32 - 1 - i % 999) for i in range(count))


_PREVIOUS = "previous_response_id"


def _input(inner: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"scripted","max_output_tokens":2,%s"input":%s}' % (more, inner)


def _previous(length: int) -> bytes:
    return b'"%s":"%s",' % (_PREVIOUS.encode(), b"r" * length)


BODIES: tuple[HostileBody, ...] = (
    # What held a router for seconds.
    HostileBody("200,000 floats as prompt", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b"1.5", 200_000)), 400, "prompt"),
    HostileBody("10,000 floats as prompt", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b"1.5", 10_000)), 400, "prompt[0]"),
    HostileBody("100,000 numbers as messages", CHAT, lambda: _messages(_many(b"1", 100_000)), 400, "messages[0]"),
    HostileBody("4 MiB of valid messages", CHAT, lambda: _messages(_many(_USER % b"hello", 120_000)), 400, "messages"),
    HostileBody("a million empty messages", CHAT, lambda: _messages(_many(b"{}", 1_000_000)), 400, "messages"),
    # Counts.
    HostileBody("20,000 empty messages", CHAT, lambda: _messages(_many(b"{}", 20_000)), 400, "messages[0].role"),
    HostileBody("8,000 valid messages", CHAT, lambda: _messages(_many(_USER % b"hi", 8_000)), 400, "messages"),
    HostileBody("2,049 valid messages", CHAT, lambda: _messages(_many(_USER % b"hi", 2049)), 400, "messages"),
    HostileBody("60,000 text parts", CHAT, lambda: _messages(_parts(60_000)), 400, "messages"),
    HostileBody("100,000 stop strings", CHAT, lambda: _with(b'"stop":[%s],' % _many(b'"a"', 100_000)), 400, "stop"),
    HostileBody("30,000 stop strings", CHAT, lambda: _with(b'"stop":[%s],' % _many(b'"a"', 30_000)), 400, "stop"),
    HostileBody(
        "200,000 stop token ids", CHAT, lambda: _with(b'"stop_token_ids":[%s],' % _many(b"1", 200_000)), 400, "stop_token_ids"
    ),
    HostileBody("100,000 biases", CHAT, lambda: _with(b'"logit_bias":%s,' % _biases(100_000)), 400, "logit_bias"),
    HostileBody("20,000 biases", CHAT, lambda: _with(b'"logit_bias":%s,' % _biases(20_000)), 400, "logit_bias"),
    HostileBody("200,000 tools", CHAT, lambda: _with(b'"tools":[%s],' % _many(b"{}", 200_000)), 400, "tools"),
    HostileBody(
        "30,000 tools with names", CHAT, lambda: _with(b'"tools":[%s],' % _many(b'{"name":"f"}', 30_000)), 400, "tools"
    ),
    HostileBody("a million prompts", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b'""', 1_000_000)), 400, "prompt"),
    HostileBody("50,000 prompts", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b'"a"', 50_000)), 400, "prompt"),
    HostileBody(
        "a million prompts of no token", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b"[]", 1_000_000)), 400, "prompt"
    ),
    HostileBody("2 million token ids", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b"1", 2_000_000)), 400, "prompt"),
    HostileBody("250,000 keys", CHAT, _wide, 400, "body"),
    HostileBody("one key 400,000 times", CHAT, lambda: b'{%s,"messages":[]}' % _many(b'"n":1', 400_000), 400, "body"),
    HostileBody(
        "a million alternatives", CHAT, lambda: _with(b'"guided_choice":[%s],' % _many(b'"a"', 900_000)), 400, "guided_choice"
    ),
    HostileBody(
        "a schema of 200,000 values",
        CHAT,
        lambda: _with(b'"guided_json":{"enum":[%s]},' % _many(b'"value"', 200_000)),
        400,
        "guided_json",
    ),
    HostileBody(
        "4 MB of a regular expression",
        CHAT,
        lambda: _with(b'"guided_regex":"%s",' % (b"(" * 3_900_000)),
        400,
        "guided_regex",
    ),
    # Depth and length.
    HostileBody("60,000 open brackets as a schema", CHAT, lambda: _with(b'"guided_json":%s,' % (b"[" * 60_000)), 400),
    HostileBody(
        "a schema 60,000 deep",
        CHAT,
        lambda: _with(
            b'"response_format":{"type":"json_schema","json_schema":{"schema":%s{}%s}},'
            % (b'{"items":' * 60_000, b"}" * 60_000)
        ),
        400,
        "response_format",
    ),
    HostileBody("2 million open brackets", CHAT, lambda: b"[" * 2_000_000, 400, "body"),
    HostileBody("60,000 open brackets as metadata", CHAT, lambda: _with(b'"metadata":%s,' % (b"[" * 60_000)), 400),
    HostileBody("50,000 objects in each other", CHAT, lambda: b'{"messages":' + b'{"a":' * 50_000, 400, "messages"),
    HostileBody("a key of 4 MB", CHAT, lambda: b'{"%s":1}' % (b"k" * 4_000_000), 400, "k" * 128),
    HostileBody(
        "a model's name of 4 MB", CHAT, lambda: b'{"model":"%s","messages":[%s]}' % (b"m" * 4_000_000, _USER), 400, "model"
    ),
    HostileBody("a role of 4 MB", CHAT, lambda: _messages(b'{"role":"%s"}' % (b"r" * 4_000_000)), 400, "messages[0].role"),
    HostileBody("a user of 4 MB", CHAT, lambda: _with(b'"user":"%s",' % (b"u" * 4_000_000)), 400, "user"),
    HostileBody("a text of 4 MB", CHAT, lambda: _messages(_USER % (b"a" * 4_000_000)), 400, "messages"),
    HostileBody("4 MB of quotation marks", CHAT, lambda: _messages(_USER % (b'\\"' * 2_000_000)), 400, "messages"),
    HostileBody("4 MB of backslashes", CHAT, lambda: _messages(_USER % (b"\\\\" * 2_000_000)), 400, "messages"),
    HostileBody("4 MB of escaped characters", CHAT, lambda: _messages(_USER % (b"\\u00e4" * 690_000)), 200),
    HostileBody(
        "4 MB of three-byte characters", CHAT, lambda: _messages(_USER % ("\u20ac".encode() * 1_390_000)), 400, "messages"
    ),
    HostileBody("4 MB of white space", CHAT, lambda: b" " * 4_000_000 + _with(b""), 200),
    # Numbers.
    HostileBody("a number of 100,000 digits", CHAT, lambda: _with(b'"n":%s,' % (b"9" * 100_000)), 400, "n"),
    HostileBody("a fraction of 4 million digits", CHAT, lambda: _with(b'"temperature":0.%s,' % (b"3" * 4_000_000)), 200),
    HostileBody("a seed of 4 million digits", CHAT, lambda: _with(b'"seed":%s,' % (b"7" * 4_000_000)), 400, "seed"),
    HostileBody("a token id of 4,000 digits", COMPLETIONS, lambda: _prompt(b"[%s]" % (b"9" * 4000)), 400, "prompt[0]"),
    HostileBody("an exponent of 300,000 digits", CHAT, lambda: _with(b'"top_p":1e%s,' % (b"9" * 300_000)), 400, "top_p"),
    HostileBody("NaN", CHAT, lambda: _with(b'"temperature":NaN,'), 400),
    # Not JSON, but only at its end.
    HostileBody("half a surrogate pair behind 3 MB", CHAT, lambda: _messages(_USER % (b"a" * 3_000_000 + b"\\ud800")), 400),
    HostileBody("no UTF-8 behind 3 MB", CHAT, lambda: _messages(_USER % (b"a" * 3_000_000 + b"\xff")), 400),
    HostileBody("a comma too many behind 130,000 ids", COMPLETIONS, lambda: _prompt(b"[%s,]" % _many(b"1", 130_000)), 400),
    # The other routes, and vLLM's options.
    HostileBody("255 empty prompts", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b'""', 255)), 400, "prompt"),
    HostileBody("30,000 prompts", COMPLETIONS, lambda: _prompt(b"[%s]" % _many(b'"a"', 30_000)), 400, "prompt"),
    HostileBody("20,000 bad words", CHAT, lambda: _with(b'"bad_words":[%s],' % _many(b'"a"', 20_000)), 400, "bad_words"),
    HostileBody(
        "130,000 allowed tokens", CHAT, lambda: _with(b'"allowed_token_ids":%s,' % _ids(130_000)), 400, "allowed_token_ids"
    ),
    HostileBody(
        "variables of 4 MB",
        CHAT,
        lambda: _with(b'"reasoning_effort":"high","chat_template_kwargs":{"a":"%s"},' % (b"a" * 4_000_000)),
        400,
        "chat_template_kwargs",
    ),
    HostileBody(
        "variables 1,900 deep",
        CHAT,
        lambda: _with(b'"chat_template_kwargs":{"a":%s%s},' % (b"[" * 1_900, b"]" * 1_900)),
        400,
    ),
    HostileBody("30,000 items", RESPONSES, lambda: _input(b"[%s]" % _many(_USER % b"hi", 15_000)), 400, "input"),
    HostileBody("200,000 items", RESPONSES, lambda: _input(b"[%s]" % _many(b"{}", 200_000)), 400, "input"),
    HostileBody("an input of 4 MB", RESPONSES, lambda: _input(b'"%s"' % (b"a" * 4_000_000)), 400, "messages"),
    HostileBody("60,000 pairs of metadata", RESPONSES, lambda: _input(b'"a"', b'"metadata":%s,' % _wide()), 400, "metadata"),
    HostileBody("a response that names 4 MB", RESPONSES, lambda: _input(b'"a"', _previous(4_000_000)), 400, _PREVIOUS),
    HostileBody("a text of 4 MB to tokenize", TOKENIZE, lambda: b'{"prompt":"%s"}' % (b"a" * 4_000_000), 400, "text"),
    HostileBody("2 million tokens", DETOKENIZE, lambda: b'{"tokens":[%s]}' % _many(b"1", 2_000_000), 400, "tokens"),
    HostileBody("brackets as tokens", DETOKENIZE, lambda: b'{"tokens":' + b"[" * 1_000_000, 400, "tokens"),
    # Large, and fine.
    HostileBody("32,768 token ids near the limit", COMPLETIONS, lambda: _prompt(_ids(32_768)), 200),
    HostileBody("131,000 token ids near the limit", COMPLETIONS, lambda: _prompt(_ids(131_000)), 200),
    HostileBody("2,048 messages", CHAT, lambda: _messages(_many(_USER % b"0.001", 2048)), 200),
    HostileBody("a text of a million characters", CHAT, lambda: _messages(_USER % (b"a" * 1_000_000)), 200),
    HostileBody("a prompt of a million characters", COMPLETIONS, lambda: _prompt(b'"%s"' % (b"a" * 1_000_000)), 200),
    HostileBody("8,000 text parts", CHAT, lambda: _messages(_parts(8_000)), 200),
)
