"""A chat template from a file that an operator names: Gemma's turns, as transformers writes them, and refused files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.text.tokenizer import TextModel

GEMMA = Path(__file__).parents[3] / "docs" / "operate" / "gemma.jinja"
# As its model card writes a conversation; system messages have no turn of their own.
TURNS = (
    "<s><start_of_turn>user\nBe brief.\n\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>model\nFour.<end_of_turn>\n"
    "<start_of_turn>user\nAnd 3?<end_of_turn>\n<start_of_turn>model\n"
)
MESSAGES = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, " What is 2 + 2?\n"),
    Message(Role.ASSISTANT, "Four."),
    Message(Role.USER, "And 3?"),
)


@pytest.fixture
def bare(write_model: Callable[..., Path]) -> Path:
    """A model without a chat template."""
    return write_model("byte_level", tokenizer_config={"chat_template": None})


def assert_refused(model: Path, file: Path) -> str:
    with pytest.raises(RyzansteinError) as error:
        TextModel.load(model, template_file=file)
    assert error.value.reason == "MODEL_INVALID"
    assert str(file) in error.value.message
    return error.value.message


def test_gemmas_turns_are_written_as_its_model_card_does(bare: Path) -> None:
    model = TextModel.load(bare, template_file=GEMMA)
    reference = AutoTokenizer.from_pretrained(bare)
    dicts = [{"role": each.role.name.lower(), "content": each.content} for each in MESSAGES]
    expected = reference.apply_chat_template(dicts, chat_template=GEMMA.read_text(), add_generation_prompt=True)["input_ids"]
    assert model.encode_chat(MESSAGES) == expected
    assert model.spelled(expected).removeprefix("<s>") == TURNS.removeprefix("<s>")


def test_gemmas_turns_must_alternate(bare: Path) -> None:
    model = TextModel.load(bare, template_file=GEMMA)
    with pytest.raises(RyzansteinError, match="alternate"):
        model.encode_chat([Message(Role.ASSISTANT, "Hi.")])
    whole = ChatPrompt(MESSAGES[:3], template=TemplateOptions(add_generation_prompt=False))
    assert model.spelled(model.encode_prompt(whole)).endswith("Four.<end_of_turn>\n")


def test_a_file_replaces_the_models_own_template(write_model: Callable[..., Path], tmp_path: Path) -> None:
    (file := tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    model = TextModel.load(write_model("byte_level"), template_file=file)
    assert model.spelled(model.encode_chat([Message(Role.USER, "abc")])) == "abc!"


def test_without_a_file_such_a_model_has_no_chat(bare: Path) -> None:
    with pytest.raises(RyzansteinError) as error:
        TextModel.load(bare).encode_chat(MESSAGES)
    assert error.value.reason == "NO_CHAT_TEMPLATE"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{% for %}", "line 1"),
        (b"\xff", "utf-8"),
        (b"x" * (2**20 + 1), "characters, more than"),
        (b"x" * (2**22 + 1), "more than 4194304 bytes"),
        ("{% if a %}" * 3000 + "{% endif %}" * 3000, "nested"),
    ],
    ids=["syntax", "encoding", "characters", "bytes", "depth"],
)
def test_what_is_no_template_is_refused_with_its_file(bare: Path, tmp_path: Path, content: bytes | str, why: str) -> None:
    (file := tmp_path / "bad.jinja").write_bytes(content.encode() if isinstance(content, str) else content)
    assert why in assert_refused(bare, file)


def test_what_is_no_file_is_refused_at_once(bare: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (tmp_path, pipe, tmp_path / "missing"):
        assert_refused(bare, path)


def settings(**fields: str) -> WorkerSettings:
    return WorkerSettings(**fields)


def test_each_model_has_a_file_of_its_own() -> None:
    own = settings(model="/m/first", more_models="two=/m/2", chat_template="/t/1.jinja, two=/t/2.jinja,later=/t/3.jinja")
    files = {name: own.template_file(name) for name in ("first", "two", "later", "other")}
    paths = {"first": Path("/t/1.jinja"), "two": Path("/t/2.jinja"), "later": Path("/t/3.jinja"), "other": None}
    assert files == paths
    assert settings(model="/m/first", model_name="n", chat_template="/t/1").template_file("n") == Path("/t/1")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"chat_template": "/t/1"}, "names no model"),
        ({"model": "/m/a", "chat_template": "/t/1,a=/t/2"}, "more than one file for model 'a'"),
        ({"model": "/m/a", "chat_template": "a="}, "1 to 1024"),
        ({"model": "/m/a", "chat_template": "x" * 1025}, "1 to 1024"),
        ({"model": "/m/a", "chat_template": "/etc/x=y/t.jinja"}, "'/etc/x' is no name of a model"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(fields: dict[str, str], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        settings(**fields)
