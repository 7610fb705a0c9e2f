"""Golden conversations: how the models of each format write, and what that says.

The templates are ours, the shortest that write a format as its models' own do; those themselves are in
`tokenizers/test_real_templates.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ryzanstein.generation.prompts import Message, Role, ToolCall
from ryzanstein.generation.tools import Tool, Tools

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "at": {"type": "object"},
    },
    "required": ["city"],
}
TOOLS = Tools((Tool("weather", "The weather of a city.", json.dumps(SCHEMA)), Tool("now", "The time.")))
NAMES = tuple(tool.name for tool in TOOLS.offered)
ARGUMENTS = {
    "city": 'Köln, "it\'s" {x}\n</b>',
    "code": "007",
    "days": 3,
    "exact": True,
    "at": {"lat": -1.5, "tags": ["a, b", None]},
}
CALLS = [("weather", ARGUMENTS), ("now", {})]


@dataclass(frozen=True)
class Golden:
    """A format: the names of its calls and tags, a template, and an answer with reasoning `Hm.`, content and both calls.

    `content` is what the answer says besides.
    """

    calls: str
    tags: str
    answer: str
    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    think: tuple[str, str] = ("<think>", "</think>")
    content: str = "I look."
    signs: str = ""

    @property
    def template(self) -> str:
        think = f"{self.think[0]}{{{{ m.reasoning_content }}}}{self.think[1]}" if self.think[0] else ""
        calls = (
            f"{{% if m.tool_calls %}}{self.begin}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{self.call}"
            f"{{% if not loop.last %}}{self.between}{{% endif %}}{{% endfor %}}{self.end}{{% endif %}}"
        )
        return (
            f"{{# {self.signs} #}}{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}"
            "{% for m in messages %}<|{{ m.role }}|>"
            f"{{% if m.reasoning_content %}}{think}{{% endif %}}{{{{ m.content or '' }}}}{calls}</s>{{% endfor %}}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _markup(name: str, key: str, keyed: str, valued: str, *, lines: str = "", nothing: str = "") -> str:
    members = (
        f"{key}{each}{keyed}{lines}{value if isinstance(value, str) else dumped(value)}{lines}{valued}\n"
        for each, value in ARGUMENTS.items()
    )
    return name.format("weather") + "".join(members) + nothing


_ITEMS = "{% for k, v in f.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_PYTHON = ", ".join(f"{key}={value!r}" for key, value in ARGUMENTS.items())
_JSON_PYTHON = ", ".join(f"{key}={dumped(value)}" for key, value in ARGUMENTS.items())
_PYTHON_CALL = "{{ f.name }}(" + _ITEMS + "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"
_OBJECT = '{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}'
_TAGGED = f"<tool_call>\n{_OBJECT}\n</tool_call>"
_WRITTEN = [f'{{"name": "{name}", "arguments": {dumped(arguments)}}}' for name, arguments in CALLS]
_HERMES = "".join(f"\n<tool_call>\n{each}\n</tool_call>" for each in _WRITTEN)
_GEMMA = ",".join(
    (
        'at:{lat:-1.5,tags:[<|"|>a, b<|"|>,null]}',
        f'city:<|"|>{ARGUMENTS["city"]}<|"|>',
        'code:<|"|>007<|"|>',
        "days:3",
        "exact:true",
    )
)
_GEMMA_TEXT = '<|"|>{{ v }}<|"|>'
_XML = "<function={{ f.name }}>\n" + _ITEMS + f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n{{% endfor %}}</function>"
_XML_ANSWER = _markup("<function={}>\n", "<parameter=", ">", "</parameter>", lines="\n", nothing="</function>")
_HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
GOLDEN = {
    "hermes": Golden("hermes", "think", f"<think>\nHm.\n</think>\n\nI look.{_HERMES}", _TAGGED, between="\n"),
    "ernie": Golden(
        "hermes",
        "response",
        f"<think>Hm.\n</think>\n\n<response>\nI look.\n</response>\n{_HERMES}\n",
        _TAGGED,
        signs="<response>",
    ),
    "lfm2": Golden(
        "lfm2",
        "think",
        f"<think>Hm.</think>I look.<|tool_call_start|>[weather({_PYTHON}), now()]<|tool_call_end|>",
        _PYTHON_CALL,
        "<|tool_call_start|>[",
        ", ",
        "]<|tool_call_end|>",
    ),
    "olmo3": Golden(
        "olmo3",
        "think",
        f"<think>Hm.</think>\n\nI look. <function_calls>weather({_JSON_PYTHON})\nnow()</function_calls>",
        _PYTHON_CALL,
        "<function_calls>",
        "\n",
        "</function_calls>",
    ),
    "glm": Golden(
        "glm",
        "think",
        "\n<think>Hm.</think>\nI look.\n<tool_call>"
        + _markup("{}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
        + "</tool_call>\n<tool_call>now\n</tool_call>",
        "<tool_call>{{ f.name }}\n"
        + _ITEMS
        + f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n{{% endfor %}}</tool_call>",
        between="\n",
    ),
    "glm, one line": Golden(
        "glm",
        "think",
        "<think>Hm.</think>I look.<tool_call>"
        + _markup("{}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>").replace("</arg_value>\n", "</arg_value>")
        + "</tool_call><tool_call>now</tool_call>",
        "<tool_call>{{ f.name }}"
        + _ITEMS
        + f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{_VALUE}</arg_value>{{% endfor %}}</tool_call>",
    ),
    "qwen_xml": Golden(
        "qwen_xml",
        "think",
        f"<think>\nHm.\n</think>\n\nI look.\n\n<tool_call>\n{_XML_ANSWER}\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        f"<tool_call>\n{_XML}\n</tool_call>",
        between="\n",
    ),
    "seed": Golden(
        "seed",
        "seed",
        "<seed:think>Hm.</seed:think>\nI look.\n<seed:tool_call>\n"
        + _markup("<function={}>\n", "<parameter=", ">", "</parameter>")
        + "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        f"<seed:tool_call>\n{_XML}\n</seed:tool_call>",
        between="\n",
        think=("<seed:think>", "</seed:think>"),
    ),
    "granite": Golden(
        "granite",
        "response",
        f"<think>Hm.</think><response>I look.</response><|tool_call|>[{', '.join(_WRITTEN)}]",
        _OBJECT,
        "<|tool_call|>[",
        ", ",
        "]",
        signs="<response>",
    ),
    "ministral": Golden(
        "ministral",
        "mistral",
        "[THINK]Hm.[/THINK]I look." + "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in CALLS),
        "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
        think=("[THINK]", "[/THINK]"),
    ),
    "cohere": Golden(
        "cohere",
        "cohere",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    "
        + ",\n    ".join(
            f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {dumped(arguments)}}}'
            for i, (name, arguments) in enumerate(CALLS)
        )
        + "\n]<|END_ACTION|>",
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}',
        "<|START_ACTION|>[",
        ", ",
        "]<|END_ACTION|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        content="",
    ),
    "hunyuan": Golden(
        "hunyuan",
        "answer",
        "<think>\nHm.\n</think>\n<answer>\nI look.\n</answer>\n<tool_calls>\n"
        + "\n".join(f"<tool_call>{name}\n```json\n{dumped(arguments)}\n```\n</tool_call>" for name, arguments in CALLS)
        + "\n</tool_calls>",
        "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```\n</tool_call>",
        "<tool_calls>\n",
        "\n",
        "\n</tool_calls>",
        signs="<answer>",
    ),
    "hunyuan, a list": Golden(
        "hunyuan",
        "think",
        f"<think>Hm.</think>I look.<tool_calls>[{', '.join(_WRITTEN)}]</tool_calls>",
        _OBJECT,
        "<tool_calls>[",
        ", ",
        "]</tool_calls>",
    ),
    "gemma4": Golden(
        "gemma4",
        "gemma4",
        f"<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather{{{_GEMMA}}}<tool_call|>"
        "<|tool_call>call:now{}<tool_call|>",
        "<|tool_call>call:{{ f.name }}{ {%- for k, v in f.arguments | dictsort %}{% if not loop.first %},{% endif %}{{ k }}:"
        f'{{% if v is string %}}{_GEMMA_TEXT}{{% elif v is mapping %}}{{lat:-1.5,tags:[<|"|>a, b<|"|>,null]}}'
        "{% else %}{{ v | tojson }}{% endif %}{% endfor %}}<tool_call|>",
        think=("<|channel>thought\n", "\n<channel|>"),
    ),
    "harmony": Golden(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        + "<|call|>".join(_HARMONY_CALL.format(name, dumped(arguments)) for name, arguments in CALLS),
        "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} json<|message|>{{ f.arguments | tojson }}<|call|>",
        think=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
}


def asked(*, content: str = "", reasoning: str = "Hm.") -> tuple[Message, ...]:
    """A question, calls and their results."""
    calls = tuple(ToolCall(f"call{i}xxxx", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(CALLS))
    return (
        Message(Role.USER, "Is it sunny in Rome?"),
        Message(Role.ASSISTANT, content, calls, reasoning=reasoning),
        Message(Role.TOOL, "sunny over there", tool_call_id=calls[0].id),
        Message(Role.TOOL, "noon is past now", tool_call_id=calls[1].id),
    )
