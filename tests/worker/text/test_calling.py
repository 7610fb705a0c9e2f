"""How a template's calls are known, and what a model is told whose template knows none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from ryzanstein.constraints import MAX_CONSTRAINT_BYTES, Constraint
from ryzanstein.demo import MODEL_DIR
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, ToolCall
from ryzanstein.generation.reply_format import ReplyFormat, ReplyStyle
from ryzanstein.generation.tools import Tool, ToolMode, Tools
from ryzanstein.replies.reader import read_message
from ryzanstein.worker.constraints.lark import grammar
from ryzanstein.worker.text.call_grammar import ALONE, MAX_CALLS, call_constraint, form_or_calls
from ryzanstein.worker.text.calling import ENFORCED, PYTHON, Calling, enforceable, instructions
from ryzanstein.worker.text.tokenizer import TextModel

SCHEMA = '{"type": "object", "properties": {"city": {"enum": ["Rome", "K\\u00f6ln"]}}, "required": ["city"]}'
TOOLS = Tools((Tool("weather", "The weather.", SCHEMA), Tool("now")))
PLAIN = "PLAIN{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
WITH_TOOLS = """TOOLS{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"""
TALK = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, "weather?"),
    Message(Role.ASSISTANT, "I look.", (ToolCall("1", "weather", '{"city": "Rome"}'), ToolCall("2", "now", ""))),
    Message(Role.TOOL, "sunny", tool_call_id="1"),
    Message(Role.TOOL, "noon", tool_call_id="2"),
)


@pytest.mark.parametrize(
    ("template", "family", "native", "thinking"),
    [
        ("{{ messages }}", "generic", False, False),
        ("{% if tools %}{{ tools }}{% endif %}", "generic", True, False),
        ("{% if tools %}<tool_call>{% endif %}<think>", "hermes", True, True),
        ("{{ tools }}<tool_call>\n<function=", "generic", False, False),
        ("{{ tools }}<tool_call>\n<function=x>\n<parameter=", "qwen_xml", True, False),
        ("{{ tools }}<tool_call>name\n<arg_key>", "glm", True, False),
        ("{{ tools }}<tool_calls>\n<tool_call>name", "hunyuan", True, False),
        ("{{ tools }}List of tools: [", "lfm2", True, False),
        ("{{ message.content.split('</think>')[-1] }}", "generic", False, True),
        ("{{ tools }}[TOOL_CALLS]", "mistral", True, False),
        ("{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek", True, False),
        ("{{ tools }}Environment: ipython", "llama3", True, False),
        ("{{ tools }}<start_function_call>", "gemma", True, False),
        (
            "{% for m in messages %}{% if 'tools' in m %}{{ m['tools'] }}{{ m.tools }}{% endif %}{% endfor %}",
            "generic",
            False,
            False,
        ),
    ],
)
def test_the_family_is_read_from_the_template(template: str, family: str, native: bool, thinking: bool) -> None:
    assert Calling.of(template) == Calling(family, native, thinking)


def test_settings_override_the_template() -> None:
    assert Calling.of("{{ tools }}<tool_call><think>", "llama3", "none") == Calling("llama3", True, False)
    assert Calling.of("{{ tools }}<function=", "hermes") == Calling("hermes", True, False)
    assert Calling.of("{{ messages }}", "llama3", "think") == Calling("generic", False, True), "it is told the generic form"


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    given = Calling().described(ChatPrompt(TALK, tools=TOOLS))
    assert given.is_plain
    roles = [message.role for message in given.messages]
    assert roles == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER], "two results are one message, so that roles alternate"
    assert given.messages[0].content == f"Be brief.\n\n{instructions(TOOLS)}"
    calls = read_message(ReplyFormat(calls="generic", tools=("weather", "now")), "g", 0, given.messages[2].content)
    assert [(call.name, call.arguments) for call in calls.tool_calls] == [("weather", '{"city": "Rome"}'), ("now", "{}")]
    assert "weather: sunny" in given.messages[3].content
    assert "now: noon" in given.messages[3].content


def test_functions_that_may_not_be_called_are_not_told() -> None:
    prompt = ChatPrompt(TALK[:2], tools=Tools(TOOLS.offered, ToolMode.NONE))
    for calling in (Calling(), Calling("hermes", native=True)):
        assert calling.described(prompt).tools.offered == ()
        assert calling.described(prompt).messages == prompt.messages
        assert calling.style(prompt, "") is None


@pytest.mark.parametrize(
    "where", ["{% if m.tools %}{{ m.tools }}{% endif %}", "{% if tools and m.tools %}{{ tools }}{% endif %}"]
)
def test_tools_that_a_template_reads_elsewhere_are_told_in_words(where: str, write_model: Callable[..., Path]) -> None:
    """Phi 4 mini's reads them in a system message, where clients put none."""
    template = "{% for m in messages %}" + where + "{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    model = TextModel.load(write_model(tokenizer_config={"chat_template": template}))
    text = model.decode(model.encode_prompt(ChatPrompt(TALK, tools=TOOLS)))
    assert instructions(TOOLS) in text
    assert "<tool_response>weather: sunny" in text


NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]


def _of_list(write_model: Callable[..., Path]) -> Path:
    return write_model(tokenizer_config={"chat_template": NAMED})


def _of_files(write_model: Callable[..., Path]) -> Path:
    directory = write_model(tokenizer_config={"chat_template": None})
    (directory / "chat_template.jinja").write_text(PLAIN)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    return directory


@pytest.mark.parametrize("written", [_of_list, _of_files])
def test_with_tools_the_template_of_that_name_is_used(
    written: Callable[[Callable[..., Path]], Path], write_model: Callable[..., Path]
) -> None:
    directory = written(write_model)
    model = TextModel.load(directory)
    assert model.calling == Calling("hermes", native=True)
    reference = AutoTokenizer.from_pretrained(directory)
    plain = [{"role": message.role.value, "content": message.content} for message in TALK[:2]]
    offered = [{"type": "function", "function": {"name": "now", "description": ""}}]
    for tools, offers in ((Tools(), None), (Tools((Tool("now"),)), offered)):
        expected = reference.apply_chat_template(plain, tools=offers, add_generation_prompt=True)["input_ids"]
        assert model.encode_prompt(ChatPrompt(TALK[:2], tools=tools)) == expected
    assert "TOOLS" in model.decode(expected)
    without = model.decode(model.encode_prompt(ChatPrompt(TALK, tools=Tools(TOOLS.offered, ToolMode.NONE))))
    assert "PLAIN" in without
    assert '<tool_call>{"name": "weather"' in without, "the other template knows no calls"


def test_the_demo_model_gets_a_prompt_with_tools() -> None:
    model = TextModel.load(MODEL_DIR)
    assert "weather" in model.decode(model.encode_prompt(ChatPrompt(TALK, tools=TOOLS)))


@pytest.mark.parametrize(("template", "opened"), [("<think>", True), ("x<think>\n", True), ("<think></think>\n\n", False)])
def test_reasoning_is_open_where_the_prompt_ends_in_it(template: str, opened: bool) -> None:
    assert Calling(thinking=True).style(ChatPrompt(TALK[:2]), template) == ReplyStyle(thinking=True, opened=opened)


def admits(tools: Tools, family: str, text: str) -> bool:
    """Whether an answer that must be a call may be this text, and end after it."""
    return satisfies(call_constraint(tools, ReplyStyle(family), lambda text: None), text)


def satisfies(constraint: Constraint, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    tried = LLMatcher(tokenizer, grammar(constraint, lambda text: None))
    ids = tokenizer.tokenize_str(text)
    return tried.validate_tokens(ids) == len(ids) and tried.consume_tokens(ids) and tried.is_accepting()


# What stands before the calls, how each is written, what stands between two, and behind them.
_DEEPSEEK = [
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]
_OBJECT = '{{"name": "{0}", "arguments": {1}}}'
_TAGGED = ("", f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n", "")
WRITTEN = {
    "generic": _TAGGED,
    "hermes": _TAGGED,
    "llama3": ("", '{{"name": "{0}", "parameters": {1}}}', "; ", ""),
    "mistral": ("[TOOL_CALLS][", _OBJECT, ", ", "]"),
    "ministral": ("", "[TOOL_CALLS]{0}[ARGS]{1}", "", ""),
    "granite": ("<|tool_call|>[", _OBJECT, ", ", "]"),
    "hunyuan": ("<tool_calls>[", _OBJECT, ", ", "]</tool_calls>"),
    "lfm2": ("<|tool_call_start|>[", "{0}({1})", ", ", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "{0}({1})", "\n", "</function_calls>"),
    "cohere": ("<|START_ACTION|>[", '{{"tool_name": "{0}", "parameters": {1}}}', ", ", "]<|END_ACTION|>"),
    "deepseek": (_DEEPSEEK[0], f"{_DEEPSEEK[1]}{{0}}{_DEEPSEEK[2]}{{1}}{_DEEPSEEK[3]}", "\n", _DEEPSEEK[4]),
    "harmony": (
        "",
        "<|channel|>commentary to=functions.{0} <|constrain|>json<|message|>{1}",
        "<|call|><|start|>assistant",
        "",
    ),
}


def written(family: str, *calls: tuple[str, str]) -> str:
    before, call, between, behind = WRITTEN[family]
    if family in PYTHON:
        members = [", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(args).items()) for _, args in calls]
        calls = tuple((name, each) for (name, _), each in zip(calls, members, strict=True))
    return before + between.join(call.format(*each) for each in calls) + behind


@pytest.mark.parametrize("family", sorted(ENFORCED))
def test_what_the_grammar_admits_is_what_the_family_reads(family: str) -> None:
    rome, now = ("weather", '{"city":"Rome"}'), ("now", "{}")
    must, one = Tools(TOOLS.offered, ToolMode.REQUIRED), Tools(TOOLS.offered, ToolMode.REQUIRED, parallel=False)
    named = Tools(TOOLS.offered, ToolMode.NAMED, "now")
    for calls in ([rome], [now], [rome, now]):
        text = written(family, *calls)
        assert admits(must, family, text) is (family not in ALONE or len(calls) == 1)
        assert admits(one, family, text) is (len(calls) == 1)
        assert admits(named, family, text) is (calls == [now])
        read = read_message(ReplyFormat(calls=family, tools=("weather", "now")), "g", 0, text)
        assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [
            (name, json.loads(arguments)) for name, arguments in calls
        ]
        assert read.content == ""
    assert not admits(must, family, written(family, ("weather", '{"city":"Paris"}')))
    assert not admits(must, family, written(family, ("nope", "{}")))
    assert not admits(must, family, "Hello")
    assert admits(must, family, written(family, *[now] * MAX_CALLS)) is (family not in ALONE)
    assert not admits(must, family, written(family, *[now] * (MAX_CALLS + 1)))
    assert json.loads(SCHEMA)


FORM = Constraint.json_schema('{"type": "object", "properties": {"days": {"enum": [1]}}, "required": ["days"]}')


@pytest.mark.parametrize("family", sorted(ENFORCED))
@pytest.mark.parametrize("form", [FORM, Constraint.json_object()], ids=["schema", "object"])
def test_an_answer_with_a_form_may_be_a_call_instead(family: str, form: Constraint) -> None:
    both = form_or_calls(form, TOOLS, ReplyStyle(family), lambda text: None)
    assert satisfies(both, '{"days": 1}')
    assert satisfies(both, written(family, ("weather", '{"city":"Rome"}')))
    assert satisfies(both, written(family, ("now", "{}"), ("now", "{}"))) is (family not in {*ALONE, "llama3"})
    assert satisfies(both, '{"days": 2}') is (form is not FORM)
    assert not satisfies(both, "Hello")
    if family != "llama3" or form is FORM:  # there a call is an object
        assert not satisfies(both, written(family, ("nope", "{}")))
        assert not satisfies(both, written(family, ("weather", '{"city":"Paris"}')))


def test_a_form_is_alone_where_calls_have_no_grammar_or_both_are_too_long() -> None:
    choice = Constraint.choice(["a", "b"])
    many = Tools(tuple(Tool(f"{i:03}" + "x" * 60) for i in range(128)))
    long = Constraint.json_schema(json.dumps({"enum": ["x" * (MAX_CONSTRAINT_BYTES - 1000)]}))
    for form, tools, family in (
        (choice, TOOLS, "hermes"),
        (FORM, TOOLS, "gemma"),
        (FORM, TOOLS, "glm"),
        (long, many, "hermes"),
    ):
        assert form_or_calls(form, tools, ReplyStyle(family), lambda text: None) is form


def test_arguments_are_an_object_also_where_the_schema_allows_null() -> None:
    tools = Tools(
        (Tool("now", "", '{"type": ["object", "null"], "properties": {}, "additionalProperties": false}'),), ToolMode.REQUIRED
    )
    assert admits(tools, "deepseek", written("deepseek", ("now", "{}")))
    assert not admits(tools, "deepseek", written("deepseek", ("now", "null")))


MIXED = """{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"enum": [true, null]},
"d": {"type": "array", "items": {"type": "integer"}}}, "required": ["b"], "additionalProperties": false}"""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('a=1, b="x, \\"y\\")"', True),
        ('b=""', True),
        ('b="x", c=null, d=[1,2]', True),
        ('a=1, b="x", d=[]', True),
        ("a=1", False),
        ('b="x", a=1', False),
        ('b="x",', False),
        ('b="x", e=1', False),
        ("b=1", False),
        ("", False),
    ],
)
def test_arguments_in_python_are_those_of_the_schema(text: str, right: bool) -> None:
    tools = Tools((Tool("f", "", MIXED),), ToolMode.REQUIRED)
    answer = f"<|tool_call_start|>[f({text})]<|tool_call_end|>"
    assert admits(tools, "lfm2", answer) is right
    if right:
        (call,) = read_message(ReplyFormat(calls="lfm2", tools=("f",)), "g", 0, answer).tool_calls
        jsonschema.validate(json.loads(call.arguments), json.loads(MIXED))


@pytest.mark.parametrize(
    "parameters",
    [
        '{"type": "object", "properties": {"a b": {}}}',
        '{"type": "object", "properties": {"a": {}}, "required": ["b"]}',
        '{"type": "object", "anyOf": [{"required": ["a"]}]}',
        '{"type": "object", "properties": {"a": {"$ref": "#"}}}',
    ],
)
def test_arguments_that_python_has_no_grammar_for_are_generic(parameters: str) -> None:
    tools = Tools((Tool("f", "", parameters),), ToolMode.REQUIRED)
    assert enforceable("hermes", tools)
    assert not enforceable("lfm2", tools)
    style = Calling("lfm2", native=True).style(ChatPrompt(TALK[:2], tools=tools), "")
    assert style == ReplyStyle("generic")
    assert form_or_calls(FORM, tools, ReplyStyle("lfm2"), lambda text: None) is FORM
