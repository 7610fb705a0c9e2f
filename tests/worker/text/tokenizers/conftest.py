"""Real tokenizers with their chat templates, each in a directory without weights: `bash .ci/parts tokenizers` fetches them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ryzanstein.worker.text.tokenizer import TextModel

FETCHED = Path(__file__).parents[4] / "build/tokenizers"
# Two come without a template: these are of the kind that their models have.
_LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{%- set system_message = false %}{% endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system_message != false %}
{%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
_HARMONY = """{% for message in messages %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
TEMPLATES = {"llama2": _LLAMA2, "gptoss": _HARMONY}
NAMES = ("qwen3", "gemma3", "llama3_1", "deepseek_v3", "gptoss", "llama2")


@dataclass(frozen=True)
class Real:
    """A real tokenizer, as we read it and as transformers does."""

    name: str
    directory: Path
    model: TextModel
    reference: Any


@pytest.fixture(scope="session", params=NAMES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    source = FETCHED / request.param / "models"
    if not (source / "tokenizer.json").exists():
        pytest.fail(f"{source} is missing: `bash .ci/parts tokenizers` fetches real tokenizers")
    directory = tmp_path_factory.mktemp(request.param)
    shutil.copy(source / "tokenizer.json", directory)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    if request.param in TEMPLATES:
        settings["chat_template"] = TEMPLATES[request.param]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    state = json.loads((source / "tokenizer.json").read_text())
    ids = [*state["model"]["vocab"].values(), *(token["id"] for token in state["added_tokens"])]
    config = {"model_type": "llama", "max_position_embeddings": 32768, "vocab_size": max(ids) + 1}
    (directory / "config.json").write_text(json.dumps(config))
    # The class LlamaTokenizer of transformers 5 makes a pipeline of its own, which drops a first space: the file's own counts.
    kind = PreTrainedTokenizerFast if settings["tokenizer_class"] == "LlamaTokenizer" else AutoTokenizer
    return Real(request.param, directory, TextModel.load(directory), kind.from_pretrained(directory))
