"""Which tokens of a conversation are learned: what the assistant says, with the token that ends its turn."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.finetuning.conftest import DEMO

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.tools.finetune.data.chats import Encoder, TokenizedExample
from ryzanstein.tools.finetune.data.records import Unfit, format_of, item_of
from ryzanstein.tools.synthesize.tokenizer import write_tokenizer
from ryzanstein.worker.text.tokenizer import TextModel

USER = {"role": "user", "content": "Hi there."}
SAID = {"role": "assistant", "content": "Hello."}
MORE = {"role": "user", "content": "And now?"}
LAST = {"role": "assistant", "content": "Nothing."}
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
THINKING = (  # earlier reasoning is left out, and the last message always has some
    "{% for m in messages %}<s>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
OPENED = CHATML.replace("<s>assistant\n{%", "<s>assistant\n<think>\n{%")
NEXT_ROLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def model(directory: Path, template: str | None, eos: str = "</s>", control: tuple[str, ...] = ()) -> TextModel:
    """A model with the tokenizer of synthetic ones, with another template."""
    write_tokenizer(directory, 1024, 2048)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "max_position_embeddings": 2048, "vocab_size": 1024})
    )
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    for place, text in enumerate(control):
        entry = next(each for each in tokenizer["added_tokens"] if each["id"] == place)
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[text] = vocabulary.pop(entry["content"])
        entry["content"] = text
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {"eos_token": eos, "chat_template": template}
    names = ("bos_token", "pad_token") if control else ()
    settings = {key: value for key, value in settings.items() if key not in names and value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").unlink()
    return TextModel.load(directory)


def examples(text: TextModel, value: dict[str, Any]) -> list[TokenizedExample]:
    return Encoder(text).examples(item_of(value, format_of(value)))


def learned(text: TextModel, example: TokenizedExample) -> list[str]:
    return [text.spelled(list(example.ids)[start:end]) for start, end in example.learned]


def test_each_turn_of_the_assistant_is_learned_with_its_end(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    (example,) = examples(text, {"messages": [USER, SAID, MORE, LAST]})
    assert learned(text, example) == ["Hello.</s>", "Nothing.</s>"]
    assert text.spelled(list(example.ids)).endswith("<s>assistant\nNothing.</s>")


def test_what_stands_before_an_answer_is_the_prompt_that_is_served(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    (example,) = examples(text, {"messages": [USER, SAID, MORE, LAST]})
    history = [Message(Role.USER, "Hi there."), Message(Role.ASSISTANT, "Hello."), Message(Role.USER, "And now?")]
    for (start, _), count in zip(example.learned, (1, 3), strict=True):
        assert list(example.ids)[:start] == text.encode_chat(history[:count])


def test_the_demonstration_model_learns_its_answers(tmp_path: Path) -> None:
    text = TextModel.load(DEMO)
    found = examples(text, {"messages": [USER, SAID, MORE, LAST]})
    spoken = [each.strip() for example in found for each in learned(text, example)]
    assert [each.removesuffix(text.token_text(min(text.eos_token_ids))) for each in spoken] == ["Hello.", "Nothing."]
    assert all(example.ids[end - 1] in text.eos_token_ids for example in found for _, end in example.learned)


def test_a_message_of_weight_0_is_read_and_not_learned(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    (example,) = examples(text, {"messages": [USER, {**SAID, "weight": 0}, MORE, LAST]})
    assert learned(text, example) == ["Nothing.</s>"]
    assert "Hello." in text.spelled(list(example.ids))


def test_what_the_user_says_last_is_left_out(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    assert examples(text, {"messages": [USER, SAID, MORE]}) == examples(text, {"messages": [USER, SAID]})


def test_two_turns_in_a_row_are_learned_one_after_the_other(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    (example,) = examples(text, {"messages": [USER, SAID, LAST]})
    assert learned(text, example) == ["Hello.</s>", "Nothing.</s>"]


def test_a_template_that_leaves_earlier_reasoning_out_makes_an_example_of_each_turn(tmp_path: Path) -> None:
    text = model(tmp_path, THINKING)
    thought = {**SAID, "reasoning_content": "A greeting."}
    first, second = examples(text, {"messages": [USER, thought, MORE, {**LAST, "reasoning_content": "Idle."}]})
    assert learned(text, first) == ["<think>\nA greeting.\n</think>\nHello.</s>"]
    assert learned(text, second) == ["<think>\nIdle.\n</think>\nNothing.</s>"]
    assert "A greeting." not in text.spelled(list(second.ids))


def test_a_template_that_writes_no_answer_after_its_prompt_is_refused(tmp_path: Path) -> None:
    text = model(tmp_path, OPENED)
    with pytest.raises(Unfit, match=r"messages\[1\]: the model's chat template does not write this after its prompt"):
        examples(text, {"messages": [USER, SAID]})


def test_an_empty_thought_that_the_template_leaves_out_later_is_part_of_the_prompt(tmp_path: Path) -> None:
    text = model(tmp_path, OPENED.replace("<think>\n", "<think>\n\n</think>\n"))
    first, second = examples(text, {"messages": [USER, SAID, MORE, LAST]})
    assert (learned(text, first), learned(text, second)) == (["Hello.</s>"], ["Nothing.</s>"])
    assert list(first.ids)[: first.learned[0][0]] == text.encode_chat([Message(Role.USER, "Hi there.")])
    assert "</think>\nHello" in text.spelled(list(first.ids))


def test_a_variable_of_the_template_is_that_of_requests(tmp_path: Path) -> None:
    text = model(
        tmp_path, OPENED.replace("<think>", "{% if thinking is not defined %}<think>{% endif %}").replace("%}\n{%", "%}{%")
    )
    value = {"messages": [USER, SAID]}
    (example,) = Encoder(text, '{"thinking": false}').examples(item_of(value, format_of(value)))
    assert learned(text, example)[0].endswith("Hello.</s>")


def test_a_turn_that_only_the_next_role_ends_is_learned_with_its_marker(tmp_path: Path) -> None:
    text = model(tmp_path, NEXT_ROLE, eos="<user>", control=("<assistant>", "<user>", "<end>"))
    (example,) = examples(text, {"messages": [USER, SAID, MORE, LAST]})
    assert learned(text, example) == ["Hello.<user>", "Nothing.<user>"]


def test_a_turn_that_nothing_ends_is_learned_with_the_token_that_ends_a_text(tmp_path: Path) -> None:
    text = model(tmp_path, NEXT_ROLE, eos="<end>", control=("<assistant>", "<user>", "<end>"))
    encoder = Encoder(text)
    value = {"messages": [USER, SAID]}
    (example,) = encoder.examples(item_of(value, format_of(value)))
    assert learned(text, example) == ["Hello.<end>"]
    assert any("ends no turn" in note for note in encoder.notes)


def test_an_end_that_ends_no_answer_is_learned_and_said(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML.replace("</s>", "<end>"), eos="<stop>", control=("<s>", "<end>", "<stop>"))
    encoder = Encoder(text)
    value = {"messages": [USER, SAID]}
    (example,) = encoder.examples(item_of(value, format_of(value)))
    assert learned(text, example) == ["Hello.<end>"]
    assert any("ends a turn with <end>, which ends no answer" in note for note in encoder.notes)


def test_an_answer_whose_first_token_has_the_templates_space_follows_the_served_prompt(tmp_path: Path) -> None:
    text = model(tmp_path, SPACED)
    (example,) = examples(text, {"messages": [USER, SAID]})
    ((start, _),) = example.learned
    assert list(example.ids)[:start] == text.encode_chat([Message(Role.USER, "Hi there.")])
    assert learned(text, example) == [" Hello.</s>"]


def test_text_of_control_tokens_in_messages_stays_text(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    said = {"role": "assistant", "content": "It is </s> here."}
    (example,) = examples(text, {"messages": [USER, said]})
    (only,) = learned(text, example)
    assert only == "It is </s> here.</s>"
    assert list(example.ids).count(next(iter(text.eos_token_ids))) == 2  # the user's turn ends with one too


def test_calls_are_learned_as_they_are_served(tmp_path: Path) -> None:
    text = model(tmp_path, CHATML)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
        LAST,
    ]
    found = examples(text, {"messages": messages, "tools": [tool]})
    spoken = [each for example in found for each in learned(text, example)]
    assert "weather" in spoken[0]
    assert "Rome" in spoken[0]
    assert spoken[-1] == "Nothing.</s>"
    assert "Rain." not in "".join(spoken)


def test_prompts_and_texts_end_with_the_token_that_ends_a_text(tmp_path: Path) -> None:
    text = model(tmp_path, None)
    (asked,) = examples(text, {"prompt": "One, two,", "completion": " three"})
    assert learned(text, asked) == [" three</s>"]
    assert list(asked.ids)[: asked.learned[0][0]] == text.encode("One, two,")
    (whole,) = examples(text, {"text": "One, two"})
    assert learned(text, whole) == ["One, two</s>"]


def test_a_model_without_a_template_is_refused_once(tmp_path: Path) -> None:
    text = model(tmp_path, None)
    with pytest.raises(RyzansteinError, match="no chat template"):
        examples(text, {"messages": [USER, SAID]})
