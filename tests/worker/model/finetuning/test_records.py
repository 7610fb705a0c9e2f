"""Data files: formats, and every line that cannot be used with its number and what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.finetuning.conftest import DEMO, chats

from ryzanstein.tools.finetune.data import lines
from ryzanstein.tools.finetune.data.chats import Encoder
from ryzanstein.tools.finetune.data.examples import examples_of, read_examples
from ryzanstein.tools.finetune.refusal import DataRefused
from ryzanstein.worker.text.tokenizer import TextModel

GOOD = json.dumps(chats(1)[0]).encode()
USER = {"role": "user", "content": "Hi."}
SAID = {"role": "assistant", "content": "Hello."}


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(DEMO)


def read(tmp_path: Path, content: bytes, text: TextModel, max_length: int = 256) -> Any:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    return read_examples(file, Encoder(text), max_length)


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ({"messages": [USER, SAID]}, "chat"),
        ({"instruction": "Greet.", "input": "Anna", "output": "Hello, Anna."}, "alpaca"),
        ({"prompt": "One, two,", "completion": " three"}, "prompt/completion"),
        ({"prompt": [USER], "completion": [SAID]}, "prompt/completion"),
        ({"text": "A text that is learned as a whole."}, "text"),
    ],
)
def test_each_format_is_known_by_its_keys(value: dict[str, Any], form: str, tmp_path: Path, text: TextModel) -> None:
    found = read(tmp_path, json.dumps(value).encode(), text)
    assert (found.form, len(found.examples)) == (form, 1)
    assert found.examples[0].num_learned > 0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "is not JSON"),
        (b'{"text": "a\x00b"}', "is not JSON"),
        (b'{"text": "a\\u0000b"}', "text has a NUL character"),
        (b'{"text": "\xff"}', "is not UTF-8: byte 11 is 0xff"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "a", "text": "b"}', "the key 'text' is there twice"),
        (b'{"text": ""}', "text is empty"),
        (b'{"text": 3}', "text must be a text, got 3"),
        (b'{"text": "a", "score": NaN}', "NaN is no JSON number"),
        (b'{"text": "a", "label": 1}', "has the unknown key 'label'"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"prompt": "a", "completion": "b"}', "lacks text"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_number(line: bytes, what: str, tmp_path: Path, text: TextModel) -> None:
    with pytest.raises(DataRefused) as refused:
        read(tmp_path, b'{"text": "good"}\n\n' + line + b"\n", text)
    assert "data.jsonl: line 3: " in str(refused.value)
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"messages": []}, "messages must be a list with messages"),
        ({"messages": [USER]}, "has no assistant message to learn from"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1]: an assistant's message without content"),
        ({"messages": [{"role": "human", "content": "Hi."}]}, "messages[0].role must be one of"),
        ({"messages": [USER, {**SAID, "mood": "good"}]}, "messages[1] has the unknown key 'mood'"),
        ({"messages": [USER, {**SAID, "weight": 2}]}, "messages[1].weight must be 0 or 1"),
        ({"messages": [USER, {**SAID, "weight": 0}]}, "has no assistant message to learn from"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}, SAID]}, "messages[0].content[0] must be a part of type"),
        (
            {"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}, SAID]},
            "messages[0].tool_calls: is only for the role",
        ),
        ({"messages": [USER, SAID], "tools": [{"type": "retrieval"}]}, "tools[0] must be a function"),
        ({"messages": [USER, SAID], "tools": [{"function": {"name": "no name"}}]}, "tools[0].function.name"),
        ({"conversations": [{"from": "human"}]}, "of no known format (chat: messages;"),
        ({"instruction": "Greet.", "output": ""}, "output is empty"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
    ],
)
def test_an_object_that_is_no_example_is_refused(value: dict[str, Any], what: str, tmp_path: Path, text: TextModel) -> None:
    with pytest.raises(DataRefused) as refused:
        read(tmp_path, json.dumps(value).encode(), text)
    assert f"line 1: {what}" in str(refused.value).replace("line 1: has the keys ['conversations'], ", "line 1: ")


def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(tmp_path: Path, text: TextModel) -> None:
    plain = read(tmp_path, GOOD + b"\n" + GOOD, text)
    other = read(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD, text)
    assert [each.ids for each in other.examples] == [each.ids for each in plain.examples]


def test_one_list_of_all_objects_is_read_too(tmp_path: Path, text: TextModel) -> None:
    assert len(read(tmp_path, json.dumps(chats(3), indent=1).encode(), text).examples) == 3
    with pytest.raises(DataRefused, match="entry 2: must be a JSON object"):
        read(tmp_path, b"[" + GOOD + b", 7]", text)


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_examples_is_refused(content: bytes, tmp_path: Path, text: TextModel) -> None:
    with pytest.raises(DataRefused, match="has no examples"):
        read(tmp_path, content, text)


def test_faults_are_listed_up_to_ten_and_counted(tmp_path: Path, text: TextModel) -> None:
    with pytest.raises(DataRefused) as refused:
        read(tmp_path, b"{\n" * 14, text)
    listed = str(refused.value).splitlines()
    assert len(listed) == 11
    assert listed[-1].endswith("and 4 more lines that cannot be used")


def test_a_line_that_is_too_long_is_not_read_and_the_next_one_is(
    tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    with pytest.raises(DataRefused) as refused:
        read(tmp_path, GOOD + b"\n" + b"x" * 1000 + b"\n{\n" + GOOD, text)
    assert "line 2: is longer than 200 bytes" in str(refused.value)
    assert "line 3: is not JSON" in str(refused.value)


def test_what_is_cut_is_counted_and_nothing_learned_is_refused(tmp_path: Path, text: TextModel) -> None:
    found = read(tmp_path, GOOD, text, max_length=24)
    assert (found.cut, len(found.examples[0].ids)) == (1, 24)
    assert "1 of 1 examples are longer than --max-length" in examples_of(found, None, 0).notes[0]
    with pytest.raises(DataRefused, match=r"line 1: has .* tokens before the first that is learned, and --max-length is 8"):
        read(tmp_path, GOOD, text, max_length=8)


def test_a_share_is_held_out_and_equal_lines_stay_together(tmp_path: Path, text: TextModel) -> None:
    found = read(tmp_path, b"\n".join(json.dumps(each).encode() for each in chats(60)), text)
    parts = examples_of(found, 0.2, seed=3)
    training, held = ({bytes(each.digest) for each in some} for some in (parts.training, parts.validation))
    assert not training & held
    assert len(parts.training) + len(parts.validation) == 60
    assert len(held) == round(0.2 * len(training | held))
    assert examples_of(found, 0.2, seed=3) == parts
    assert examples_of(found, 0.2, seed=4) != parts
    assert any("are there before" in note for note in parts.notes)
    with pytest.raises(DataRefused, match="1 different lines cannot be divided"):
        examples_of(read(tmp_path, GOOD, text), 0.2, seed=3)


def test_examples_of_validation_that_are_trained_on_are_counted(tmp_path: Path, text: TextModel) -> None:
    found = read(tmp_path, GOOD, text)
    assert any("1 of 1 examples of validation are trained on too" in note for note in examples_of(found, found, 0).notes)
