"""Each family's calls are read, and what is read after some text is the same however the text was divided."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.generation.prompts import Message, ToolCall
from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.replies.families import FAMILIES
from ryzanstein.replies.parts import CallDelta, Content, Part, Reasoning
from ryzanstein.replies.reader import ReplyReader, joined, read_message
from ryzanstein.replies.source import MAX_HELD_CHARS

TOOLS = ("weather", "add", "f")
ARGUMENTS = '{"city": "K\\u00f6ln \\"}{", "days": [1, {"a": null}]}'
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"


def call(name: str = "weather", arguments: str = ARGUMENTS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


W, ADD = ("weather", ARGUMENTS), ("add", '{"a":1,"b":[2]}')
# Family, text, the content and the calls in it.
READ = {
    "hermes": ("hermes", f"I look.\n{tagged(call(*W))}", "I look.", [W]),
    "hermes, several": ("hermes", f"{tagged(call(*W))}\n{tagged(call(*ADD))}", "", [W, ADD]),
    "hermes, one line": ("hermes", f"<tool_call>{call(*ADD)}</tool_call> done", " done", [ADD]),
    "hermes, arguments first": ("hermes", tagged(f'{{"arguments": {ADD[1]}, "name": "add"}}'), "", [ADD]),
    "hermes, as a string": ("hermes", tagged('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    "hermes, none": ("hermes", tagged('{"name": "f"}'), "", [("f", "{}")]),
    "hermes, null": ("hermes", tagged('{"name": "f", "arguments": null}'), "", [("f", "{}")]),
    "hermes, more keys": ("hermes", tagged('{"name": "f", "why": "so", "arguments": {}, "x": [1]}'), "", [("f", "{}")]),
    "hermes, as OpenAI": ("hermes", tagged(f'{{"type": "function", "function": {call(*ADD)}}}'), "", [ADD]),
    "hermes, unknown between": (
        "hermes",
        tagged(call(*ADD)) + tagged(call("nope", "{}")) + tagged(call(*W)),
        tagged(call("nope", "{}")),
        [ADD, W],
    ),
    "hermes, broken before": (
        "hermes",
        '<tool_call>{"name" "f"}</tool_call>' + tagged(call(*W)),
        '<tool_call>{"name" "f"}</tool_call>',
        [W],
    ),
    "hermes, no JSON": ("hermes", "<tool_call>weather()</tool_call>", "<tool_call>weather()</tool_call>", []),
    "hermes, cut in the name": ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    "hermes, cut in the arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\', "", [("f", '{"a": "x\\')]),
    "hermes, not closed": ("hermes", f"<tool_call>{call(*ADD)}", "", [ADD]),
    "hermes, cut in the end": ("hermes", f"<tool_call>{call(*ADD)}\n</tool_ca", "", [ADD]),
    "hermes, another end": ("hermes", f"<tool_call>{call(*ADD)}\n</table>", "</table>", [ADD]),
    "llama, bare": ("llama3", call(*ADD, "parameters"), "", [ADD]),
    "llama, tagged": ("llama3", f"<|python_tag|>{call(*ADD, 'parameters')}; {call(*W, 'parameters')}", "", [ADD, W]),
    "llama, a JSON answer": ("llama3", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    "llama, a name": ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "llama, code": ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "mistral, list": ("mistral", f"[TOOL_CALLS] [{call(*ADD)}, {call(*W)}]", "", [ADD, W]),
    "mistral, an unknown one": (
        "mistral",
        f"[TOOL_CALLS][{call(*ADD)},{call('no', '{}')},{call(*W)}]",
        f",{call('no', '{}')}",
        [ADD, W],
    ),
    "mistral, named": ("mistral", f"Hm.[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]weather{ARGUMENTS}", "Hm.", [ADD, W]),
    "mistral, an empty list": ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    "deepseek": (
        "deepseek",
        f"Hm.\n\n{DEEPSEEK}function<\uff5ctool\u2581sep\uff5c>add\n```json\n{ADD[1]}\n```{DEEPSEEK_END}",
        "Hm.",
        [ADD],
    ),
    "deepseek 3.1": (
        "deepseek",
        f"{DEEPSEEK}add<\uff5ctool\u2581sep\uff5c>{ADD[1]}<\uff5ctool\u2581call\u2581end\uff5c>\n<\uff5ctool\u2581call\u2581begin\uff5c>weather<\uff5ctool\u2581sep\uff5c>{ARGUMENTS}{DEEPSEEK_END}",
        "",
        [ADD, W],
    ),
    "deepseek, cut in the end": ("deepseek", f"{DEEPSEEK}add<\uff5ctool\u2581sep\uff5c>{ADD[1]}{DEEPSEEK_END[:-3]}", "", [ADD]),
    "deepseek, cut in the block": ("deepseek", f"{DEEPSEEK}add\n```json\n{ADD[1]}\n``", "", [ADD]),
    "deepseek, none": ("deepseek", f"{DEEPSEEK}??", f"{DEEPSEEK}??", []),
    "gemma": (
        "gemma",
        "<start_function_call>call:weather{city:<escape>K}öln, so<escape>,days:[1,{a:true}],n:-2.5}<end_function_call>",
        "",
        [("weather", '{"city": "K}öln, so", "days": [1, {"a": true}], "n": -2.5}')],
    ),
    "gemma, broken": (
        "gemma",
        "<start_function_call>call:f{a<end_function_call>",
        "<start_function_call>call:f{a<end_function_call>",
        [],
    ),
    "lfm2, mixed": (
        "lfm2",
        "Hm. <|tool_call_start|>[add(a=1, b=[2]), nope(a='), b=('), weather(city='it\\'s')]<|tool_call_end|> So.",
        "Hm., nope(a='), b=(') So.",
        [("add", '{"a": 1, "b": [2]}'), ("weather", '{"city": "it\'s"}')],
    ),
    "lfm2, a text": (
        "lfm2",
        "<|tool_call_start|>[f(a='it\\'s \\u00e4 \\x41\\n', b=\"\")]<|tool_call_end|>",
        "",
        [("f", '{"a": "it\'s \u00e4 A\\n", "b": ""}')],
    ),
    "lfm2, objects": ("lfm2", f"<|tool_call_start|>[{call(*ADD)}, {call(*W)}]<|tool_call_end|>", "", [ADD, W]),
    "lfm2, by position": (
        "lfm2",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        [],
    ),
    "lfm2, a nested text": (
        "lfm2",
        "<|tool_call_start|>[f(a={'b': ['x)', True, 'it\\'s']}, c=(1, 2))]<|tool_call_end|>",
        "",
        [("f", '{"a": {"b": ["x)", true, "it\'s"]}, "c": [1, 2]}')],
    ),
    "lfm2, a bare word": ("lfm2", "<|tool_call_start|>[f(a=Rome)]<|tool_call_end|>", "", [("f", '{"a": "Rome"}')]),
    "lfm2, cut in a text": ("lfm2", "<|tool_call_start|>[f(a='x", "", [("f", '{"a": "x')]),
    "lfm2, cut in the name": ("lfm2", "<|tool_call_start|>[f", "<|tool_call_start|>[f", []),
    "olmo3, no call": ("olmo3", "<function_calls>\nweather</function_calls>", "<function_calls>\nweather</function_calls>", []),
    "qwen, without the outer tag": (
        "qwen_xml",
        "<function=f>\n<parameter=a>\n[1,\n2]\n</parameter>\n</function>",
        "",
        [("f", '{"a": [1, 2]}')],
    ),
    "qwen, an object": ("qwen_xml", tagged(call(*ADD)), "", [ADD]),
    "qwen, python": (
        "qwen_xml",
        "<tool_call><function=f><parameter=a>True</parameter><parameter=b>{'c': None}</parameter></function></tool_call>",
        "",
        [("f", '{"a": true, "b": {"c": null}}')],
    ),
    "qwen, broken": ("qwen_xml", "<tool_call>\n<function f>\n</tool_call>", "<tool_call>\n<function f>\n</tool_call>", []),
    "qwen, words between": (
        "qwen_xml",
        "<tool_call><function=f>\n<parameter=a>1</parameter>\nwell</function></tool_call>",
        "well</function></tool_call>",
        [("f", '{"a": 1}')],
    ),
    "qwen, cut in a value": ("qwen_xml", "<tool_call><function=f><parameter=a>\n12", "", [("f", '{"a": 12')]),
    "glm, none": ("glm", "<tool_call>now\n</tool_call>", "<tool_call>now\n</tool_call>", []),
    "glm, cut in a key": ("glm", "<tool_call>f\n<arg_key>ci", "", [("f", "")]),
    "glm, an object": ("glm", tagged(call(*ADD)), "", [ADD]),
    "cohere, unknown": (
        "cohere",
        '<|START_ACTION|>[{"tool_name": "no", "parameters": {}}, '
        f'{{"tool_name": "add", "parameters": {ADD[1]}}}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_name": "no", "parameters": {}}',
        [ADD],
    ),
    "hunyuan, one": ("hunyuan", f"<tool_call>add\n```json\n{ADD[1]}\n```\n</tool_call>", "", [ADD]),
    "gemma4": (
        "gemma4",
        '<|tool_call>call:f{a:<|"|>x}<|"|>,<|"|>b c<|"|>:{d:[]}}<tool_call|>So.',
        "So.",
        [("f", '{"a": "x}", "b c": {"d": []}}')],
    ),
    "harmony, plain": ("harmony", "Yes to=all.", "Yes to=all.", []),
    "harmony, the recipient first": (
        "harmony",
        f" to=functions.add<|channel|>commentary json<|message|>{ADD[1]}<|call|>",
        "",
        [ADD],
    ),
    "harmony, an unknown function": (
        "harmony",
        "<|channel|>commentary to=functions.no<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.no<|message|>{}<|call|>",
        [],
    ),
    "harmony, cut in the header": ("harmony", "<|channel|>analysis", "", []),
    "harmony, cut in the arguments": (
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": ',
        "",
        [("f", '{"a": ')],
    ),
    "generic, bare": ("generic", f" \n{call(*ADD)}", "", [ADD]),
    "generic, list": ("generic", f"[{call(*ADD)}, {call(*W)}]\n", "", [ADD, W]),
    "generic, fenced": ("generic", f"```json\n{call(*ADD)}\n```", "", [ADD]),
    "generic, cut in the fence": ("generic", f"```json\n{call(*ADD)}\n``", "", [ADD]),
    "generic, tagged": ("generic", f"Well: {tagged(call(*ADD))}", "Well:", [ADD]),
    "generic, an answer": ("generic", "[1, 2] is a list {}\n", "[1, 2] is a list {}\n", []),
}


def read(family: str, text: str, **format: object) -> Message:
    return read_message(ReplyFormat(calls=family, tools=TOOLS, **format), "g", 0, text)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", READ)
def test_calls_are_read_and_all_else_is_content(case: str) -> None:
    family, text, content, calls = READ[case]
    message = read(family, text)
    assert message.content == content
    assert [(each.name, each.arguments) for each in message.tool_calls] == calls
    assert len({each.id for each in message.tool_calls}) == len(calls)


def delta(parts: list[Part]) -> tuple[object, ...]:
    """What parts say together, in order, with neighbours of one kind joined."""
    found: list[tuple[object, ...]] = []
    for part in parts:
        kind = (type(part), part.index) if isinstance(part, CallDelta) else (type(part), -1)
        text = part.arguments if isinstance(part, CallDelta) else part.text
        if found and found[-1][0] == kind:
            found[-1] = (*found[-1][:3], str(found[-1][3]) + text)
        else:
            found.append((kind, getattr(part, "id", ""), getattr(part, "name", ""), text))
    return tuple(found)


def pieces_read(format: ReplyFormat, pieces: list[str]) -> tuple[list[tuple[object, ...]], tuple[object, ...]]:
    """What was read after each piece, and at the end."""
    reader, parts, after = ReplyReader(format, "g", 0), [], []
    for piece in pieces:
        parts += reader.push(piece)
        after.append(delta(parts))
    return after, delta(parts + reader.end())


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("case", READ)
def test_every_division_of_a_text_reads_the_same(case: str, thinking: bool) -> None:
    """At every pair of cuts, and after every beginning: what was read depends on the text so far alone."""
    family, text, _, _ = READ[case]
    text = f"<think>\nLet me see: {{</think>\n\n{text}" if thinking else text
    format = ReplyFormat(calls=family, tools=TOOLS, thinking=thinking)
    by_char, whole = pieces_read(format, list(text))
    for cut in range(len(text) + 1):
        (begun, _), end = pieces_read(format, [text[:cut], text[cut:]])
        assert end == whole, f"cut at {cut}"
        assert begun == (by_char[cut - 1] if cut else ()), f"after {cut} characters"
    draw = random.Random(case)
    for _ in range(50):
        cuts = sorted(draw.sample(range(1, len(text)), min(6, len(text) - 1)))
        assert pieces_read(format, [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)])[1] == whole


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *'{}[],:;"\\ \n`ax0<',
            *(
                '{"name": "f"',
                '"arguments": {',
                '"name"',
                '"add"',
                "}}",
                '"x"',
                "null",
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
            ),
            *(
                "<|python_tag|>",
                DEEPSEEK,
                DEEPSEEK_END,
                "<\uff5ctool\u2581sep\uff5c>",
                "```json",
                "<start_function_call>call:f{",
                "<end_function_call>",
            ),
            *("<escape>", "<think>", "</think>", "[ARGS]", "f"),
            *("<|tool_call_start|>[", "add(", "a=", "'", "\\'", ")", "]<|tool_call_end|>", "<function_calls>f(", "True"),
            *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "<seed:tool_call>", "</seed:tool_call>"),
            *("<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<tool_calls>", "</tool_calls>"),
            *("<|tool_call|>[", "<|START_ACTION|>[", '"tool_name": "f"', "<|END_ACTION|>", "<|tool_call>call:f{", '<|"|>'),
            *("<tool_call|>", "<|start|>assistant", "<|channel|>final", "<|channel|>analysis", "<|message|>", "<|end|>"),
            *(" to=functions.f", "<|call|>", "<answer>", "</answer>", "[THINK]", "[/THINK]", "<|channel>thought", "<channel|>"),
        ]
    ),
    max_size=30,
)


TAGS_OF = {
    "harmony": "harmony",
    "seed": "seed",
    "cohere": "cohere",
    "hunyuan": "answer",
    "granite": "response",
    "ministral": "mistral",
    "gemma4": "gemma4",
}


@pytest.mark.parametrize("family", FAMILIES)
@given(pieces=FRAGMENTS, opened=st.booleans())
@settings(max_examples=150, deadline=None)
def test_whatever_a_model_writes_reads_the_same_in_any_pieces(family: str, pieces: list[str], opened: bool) -> None:
    tags = TAGS_OF.get(family, "think")
    format = ReplyFormat(calls=family, tools=TOOLS, thinking=True, opened=opened, tags=tags, texts=("f:a",), nullable=("f:a",))
    text = "".join(pieces)
    after, whole = pieces_read(format, pieces)
    by_char, end = pieces_read(format, list(text))
    assert end == whole == pieces_read(format, [text])[1]
    at = 0
    for piece, read_so_far in zip(pieces, after, strict=True):
        at += len(piece)
        assert read_so_far == by_char[at - 1]


@given(pieces=FRAGMENTS)
@settings(max_examples=200, deadline=None)
def test_text_without_calls_is_never_lost(pieces: list[str]) -> None:
    """No function may be called, so all of it is content, to the last space. Channels are no text of the model's."""
    text = "".join(pieces)
    for family in FAMILIES.keys() - {"harmony"}:
        assert read_message(ReplyFormat(calls=family, tools=()), "g", 0, text).content == text


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm <b>\n</think>\n\nyes", False, "hm <b>", "yes"),
        ("hm\n</think>\n\nyes ", True, "hm", "yes "),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("still thinking ", True, "still thinking", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning_is_apart(text: str, opened: bool, reasoning: str, content: str) -> None:
    message = read_message(ReplyFormat(thinking=True, opened=opened), "g", 0, text)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_arguments_arrive_while_they_are_written() -> None:
    reader = ReplyReader(ReplyFormat(calls="hermes", tools=TOOLS), "g", 0)
    assert reader.push('Hm. <tool_call>{"name": "f", "arguments": ') == [Content("Hm.")]
    first, second = reader.push('{"a": "b'), reader.push('c"')
    assert [type(part) for part in (*first, *second)] == [CallDelta, CallDelta]
    assert first[0] == CallDelta(0, first[0].id, "f", '{"a": "b')  # type: ignore[union-attr]
    assert second == [CallDelta(0, "", "", 'c"')]


def test_ids_are_the_same_for_every_reader_and_differ_between_calls_choices_and_generations() -> None:
    format, text = ReplyFormat(calls="hermes", tools=TOOLS), tagged(call(*ADD)) * 2
    ids = [
        each.id
        for generation, choice in (("g", 0), ("g", 1), ("h", 0))
        for each in read_message(format, generation, choice, text).tool_calls
    ]
    assert len(set(ids)) == 6
    assert [each.id for each in read_message(format, "g", 0, text).tool_calls] == ids[:2]
    assert all(len(each) == 9 and each.isalnum() for each in ids), "as Mistral's templates demand"


def test_more_calls_than_are_allowed_are_content() -> None:
    message = read("hermes", tagged(call(*ADD)) * 3, max_calls=1)
    assert len(message.tool_calls) == 1
    assert message.content == tagged(call(*ADD)) * 2


@pytest.mark.parametrize(("family", "begin"), [("generic", "{"), ("hermes", "<tool_call>"), ("deepseek", DEEPSEEK + "f")])
@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_white_space_is_held_for_a_bounded_text_only(family: str, begin: str, size: int) -> None:
    text, reader = begin + " " * 2 * MAX_HELD_CHARS, ReplyReader(ReplyFormat(family, tools=TOOLS), "g", 0)
    parts = [part for i in range(0, len(text), size) for part in reader.push(text[i : i + size])]
    assert joined(parts).content == text
    assert joined([*parts, *reader.end()]).content == text


def test_what_may_become_a_call_is_held_for_a_bounded_text_only() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * 2 * MAX_HELD_CHARS + '"}, "name": "f"}</tool_call>'
    reader = ReplyReader(ReplyFormat(calls="hermes", tools=TOOLS), "g", 0)
    assert joined(reader.push(text[: MAX_HELD_CHARS + 100])).content
    assert read("hermes", text) == Message(read("hermes", text).role, text)
    assert (
        pieces_read(ReplyFormat(calls="hermes", tools=TOOLS), [text[:99], text[99:30_000], text[30_000:]])[1]
        == pieces_read(ReplyFormat(calls="hermes", tools=TOOLS), [text])[1]
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 40_000,
        '<tool_call>{"arguments": {' * 20_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a": [' * 60_000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * 200_000,
        "[TOOL_CALLS]" * 40_000,
        " " * 400_000,
        "{" * 400_000,
        "<start_function_call>call:f{a:" * 15_000,
        "<tool_call>f<arg_key>a</arg_key><arg_value>" + "\n" * 400_000,
        "<tool_call><function=f><parameter=a>" + "<" * 400_000,
        "<|tool_call_start|>[f(a='" + "' " * 200_000,
        "<|tool_call_start|>[f(a=" + "[" * 400_000,
        "<|tool_call_start|>[f(a=" + "['" * 200_000,
        "<|tool_call_start|>[f(a=1)" + ", f(a=1)" * 50_000,
        "<|channel|>" * 40_000,
        "<|channel|>final<|message|>" + " " * 400_000,
        "<|channel|>analysis<|message|>x<|end|>" * 10_000,
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long
def test_the_time_grows_with_the_text_and_not_faster(family: str, text: str) -> None:
    """Of the longest answers: some 100,000 tokens. With a quadratic reader the ratio is 16, and the whole takes minutes."""

    def in_one(length: int) -> None:
        read(family, text[:length])

    def in_tokens(length: int) -> None:
        reader = ReplyReader(ReplyFormat(calls=family, tools=TOOLS), "g", 0)
        for start in range(0, length, 4):
            reader.push(text[start : start + 4])

    for reads, length in ((in_one, len(text)), (in_tokens, min(len(text), 100_000))):
        quarter = cpu_s(reads, length // 4)
        assert cpu_s(reads, length) < 8 * quarter + 0.1


def cpu_s(reads: Callable[[int], None], length: int) -> float:
    begun = time.process_time()
    reads(length)
    return time.process_time() - begun


def test_a_reader_may_be_shown_every_kind_of_part() -> None:
    text = f"<think>hm</think>Yes.\n{tagged(call(*ADD))}"
    parts = ReplyReader(ReplyFormat(calls="hermes", tools=TOOLS, thinking=True), "g", 0).push(text)
    assert [type(part) for part in parts] == [Reasoning, Content, CallDelta]
    assert json.loads(joined(parts).tool_calls[0].arguments) == {"a": 1, "b": [2]}
    assert joined(parts).tool_calls == (ToolCall(joined(parts).tool_calls[0].id, *ADD),)


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("hermes", tagged('{"name": "f", "arguments": "\\ud800"}'), "?"),
        ("gemma", '<start_function_call>call:f{a:"\\ud800"}<end_function_call>', '{"a": "?"}'),
        ("gemma", "<start_function_call>call:f{a:NaN,b:1e999}<end_function_call>", '{"a": "NaN", "b": "1e999"}'),
    ],
)
def test_arguments_are_text_that_can_be_sent(family: str, text: str, arguments: str) -> None:
    assert [call.arguments for call in read(family, text).tool_calls] == [arguments]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("family", ["", *FAMILIES])
def test_a_null_character_ends_no_content(family: str, thinking: bool) -> None:
    """Vocabularies with bytes have a token for it."""
    delta = read_message(ReplyFormat(calls=family, thinking=thinking, tools=TOOLS), "g", 0, "one\0two\0")
    assert (delta.content, delta.tool_calls) == ("one\0two\0", ())
