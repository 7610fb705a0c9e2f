from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import ryzanstein.demo
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TextPrompt, TokenPrompt
from ryzanstein.worker.text.tokenizer import TextModel

DEMO = Path(next(iter(ryzanstein.demo.__path__)))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
conversations = st.lists(texts, min_size=1, max_size=5)


def talk(contents: list[str], system: str | None = None) -> list[Message]:
    turns = [Message(Role.ASSISTANT if i % 2 else Role.USER, content) for i, content in enumerate(contents)]
    return turns if system is None else [Message(Role.SYSTEM, system), *turns]


def as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role.value, "content": message.content} for message in messages]


@pytest.fixture(scope="session")
def pair(model_dir):
    return TextModel.load(model_dir), AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="session")
def demo():
    return TextModel.load(DEMO), AutoTokenizer.from_pretrained(DEMO)


@given(contents=conversations, system=st.none() | texts)
@settings(max_examples=60, deadline=None)
def test_chats_are_encoded_as_transformers_does(pair, contents, system) -> None:
    model, reference = pair
    messages = talk(contents, system)
    expected = reference.apply_chat_template(as_dicts(messages), add_generation_prompt=True)["input_ids"]
    assert model.encode_chat(messages) == expected
    assert model.encode_prompt(ChatPrompt(tuple(messages))) == expected


@given(text=texts)
@settings(max_examples=60, deadline=None)
def test_texts_are_encoded_as_transformers_does(pair, text) -> None:
    model, reference = pair
    assert model.encode_prompt(TextPrompt(text)) == reference.encode(text)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_are_decoded_as_transformers_does(pair, data) -> None:
    model, reference = pair
    token_ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=30))
    assert model.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)


@given(contents=conversations, system=st.none() | texts)
@settings(max_examples=60, deadline=None)
def test_the_demo_models_chats_are_encoded_as_transformers_does(demo, contents, system) -> None:
    model, reference = demo
    messages = talk(contents, system)
    assert (
        model.encode_chat(messages)
        == reference.apply_chat_template(as_dicts(messages), add_generation_prompt=True)["input_ids"]
    )
    assert model.encode(contents[0]) == reference.encode(contents[0])


@pytest.mark.parametrize("around", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_tokenizer_json_alone_says_what_stands_around_a_text(write_model, around, add_bos) -> None:
    directory = write_model("sentencepiece", tokenizer_config={"add_bos_token": add_bos})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = TextModel.load(directory).encode("hello fox")
    assert ids == AutoTokenizer.from_pretrained(directory).encode("hello fox")
    assert (ids[0] == 0, ids[-1] == 1) == ("<s>" in around, "</s>" in around)


def test_a_template_file_wins_over_the_configuration(write_model) -> None:
    directory = write_model()
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    model = TextModel.load(directory)
    assert (
        model.encode_chat(talk(["hi"]))
        == AutoTokenizer.from_pretrained(directory).apply_chat_template([{"role": "user", "content": "hi"}])["input_ids"]
    )


def test_of_several_named_templates_the_default_is_taken(write_model) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    model = TextModel.load(write_model(tokenizer_config={"chat_template": named}))
    assert model.decode(model.encode_chat(talk(["hi"]))) == "yes"


def test_strftime_now_is_there_for_templates(write_model) -> None:
    model = TextModel.load(write_model(tokenizer_config={"chat_template": "{{ strftime_now('%Y') }}"}))
    assert int(model.decode(model.encode_chat(talk(["hi"])))) >= 2024


def test_what_a_template_refuses_is_the_clients_mistake(pair) -> None:
    with pytest.raises(RyzansteinError, match="the user speaks first") as caught:
        pair[0].encode_chat([Message(Role.ASSISTANT, "hello")])
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content.x }}",
        "{% for i in range(999999) %}{% endfor %}",
    ],
)
def test_a_template_has_no_way_out_of_its_sandbox(write_model, template) -> None:
    model = TextModel.load(write_model(tokenizer_config={"chat_template": template}))
    with pytest.raises(RyzansteinError) as caught:
        model.encode_chat(talk(["hi"]))
    assert caught.value.code == Code.INVALID_ARGUMENT


def test_without_a_template_a_chat_is_refused_and_a_text_is_not(write_model) -> None:
    model = TextModel.load(write_model(tokenizer_config={"chat_template": None}), name="base")
    with pytest.raises(RyzansteinError, match="base has no chat template") as caught:
        model.encode_chat(talk(["hi"]))
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE")
    assert model.encode("hi")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(pair) -> None:
    model = pair[0]
    huge = "a" * (model.max_prompt_chars + 1)
    for prompt, field in [(TextPrompt(huge), "text"), (ChatPrompt((Message(Role.USER, huge),)), "messages")]:
        with pytest.raises(RyzansteinError, match=str(model.max_prompt_chars)) as caught:
            model.encode_prompt(prompt)
        assert caught.value.violations[0].field == field


def test_a_prompt_of_too_many_entries_is_refused_before_it_is_looked_at(pair) -> None:
    model = pair[0]
    with pytest.raises(RyzansteinError, match="at most 512 entries"):
        model.encode_chat([Message(Role.USER, "")] * 513)
    with pytest.raises(RyzansteinError) as caught:
        model.encode_prompt(TokenPrompt((0,) * 512))
    assert caught.value.reason == "CONTEXT_TOO_LONG"
    assert len(model.encode_prompt(TokenPrompt((0,) * 511))) == 511


def test_token_ids_outside_the_models_vocabulary_are_refused(pair) -> None:
    model = pair[0]
    assert model.encode_prompt(TokenPrompt((0, model.vocab_size - 1))) == [0, model.vocab_size - 1]
    for wrong in (-1, model.vocab_size):
        with pytest.raises(RyzansteinError, match=str(wrong)):
            model.encode_prompt(TokenPrompt((0, wrong)))


def test_every_token_that_ends_an_answer_is_known(write_model) -> None:
    directory = write_model(
        config={"eos_token_id": 7}, generation_config={"eos_token_id": 3}, tokenizer_config={"eos_token": "</s>"}
    )
    model = TextModel.load(directory, name="m")
    assert model.eos_token_ids == {7, 3, 1}
    assert (model.name, model.context_length) == ("m", 512)
    assert TextModel.load(directory).name == directory.name


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("config.json", None, "No such file"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "must be an object"),
        ("config.json", '{"vocab_size": 9}', "max_position_embeddings"),
        ("tokenizer.json", None, "No such file"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "", "the file is empty: download it again"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("tokenizer_config.json", "nope", "not valid JSON"),
        ("chat_template.jinja", "{% if %}", "line 1"),
    ],
)
def test_a_broken_directory_is_refused_naming_the_file(write_model, file, content, why) -> None:
    directory = write_model()
    if content is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(content)
    with pytest.raises(RyzansteinError, match=why) as caught:
        TextModel.load(directory)
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "MODEL_INVALID")
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "gpt2", "n_positions": 96}, 96),
        ({"model_type": "mpt", "max_seq_len": 96}, 96),
        ({"model_type": "bloom", "seq_length": 96}, 96),
        ({"model_type": "bloom"}, 2048),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 96}}, 96),
    ],
)
def test_a_context_has_the_name_that_the_architecture_gives_it(write_model, config, length) -> None:
    directory = write_model(config={"max_position_embeddings": None, **config})
    assert TextModel.load(directory).context_length == length


def test_a_decoder_that_is_not_known_is_refused(write_model) -> None:
    directory = write_model()
    state = json.loads((directory / "tokenizer.json").read_text())
    state["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(RyzansteinError, match="decoder CTC is not supported"):
        TextModel.load(directory)


def test_special_tokens_that_only_the_configuration_knows_are_not_shown(write_model) -> None:
    directory = write_model()
    state = json.loads((directory / "tokenizer.json").read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "</s>"]
    (directory / "tokenizer.json").write_text(json.dumps(state))
    model, reference = TextModel.load(directory), AutoTokenizer.from_pretrained(directory)
    ids = reference.encode("fox</s>dog")
    assert model.encode("fox</s>dog") == ids
    assert model.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "foxdog"


def test_a_tokens_own_text_is_reported_even_if_it_is_special_or_half_a_character(pair) -> None:
    model = pair[0]
    assert model.token_text(1) == "</s>"
    assert model.token_text(model.vocab_size - 1) == ""
    ids = model.encode("the quick")
    assert "".join(map(model.token_text, ids)).strip() == "the quick"


def test_half_a_character_by_itself_is_the_replacement_character(write_model) -> None:
    model = TextModel.load(write_model("byte_level"))
    assert "\ufffd" in {model.token_text(i) for i in model.encode("\U0001fae0")}


def test_defaults_of_requests_are_those_of_generation_config(write_model):
    wording = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1, "do_sample": True}
    directory = write_model(generation_config=wording)
    assert TextModel.load(directory).sampling_defaults.given == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1,
    }
    assert TextModel.load(directory, defaults=False).sampling_defaults.given == {}
    assert TextModel.load(write_model(generation_config={"top_k": -1})).sampling_defaults.given == {"top_k": 0}


def test_the_bound_of_answers_is_that_of_generation_config(write_model):
    directory = write_model(generation_config={"max_new_tokens": 40, "max_length": 20})
    assert TextModel.load(directory).answer_tokens == 40
    assert TextModel.load(directory, defaults=False).answer_tokens is None
    assert TextModel.load(write_model()).answer_tokens is None
    with pytest.raises(RyzansteinError, match="max_new_tokens cannot be 0: correct it, or set generation_config none"):
        TextModel.load(write_model(generation_config={"max_new_tokens": 0}))


@pytest.mark.parametrize("wrong", [{"temperature": 2.5}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": "a"}, {"temperature": True}])
def test_a_default_that_no_request_may_have_is_refused_with_the_way_out(wrong, write_model):
    with pytest.raises(RyzansteinError, match=r"generation_config.json: \w+ cannot be .*set generation_config none"):
        TextModel.load(write_model(generation_config=wrong))
    assert TextModel.load(write_model(generation_config=wrong), defaults=False)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_tokenizer_of_another_format_is_refused_with_the_way_out(name, write_model) -> None:
    directory = write_model()
    (directory / "tokenizer.json").rename(directory / name)
    with pytest.raises(RyzansteinError, match=f"{name} exists, but its format is not read: save it as tokenizer.json"):
        TextModel.load(directory)


def test_a_token_that_the_model_has_no_row_for_is_refused_in_a_prompt(write_model) -> None:
    """Fine-tuned models often come with a tokenizer that has more tokens than their embedding has rows."""
    directory = write_model(tokenizer_config={"eos_token": "two words"})
    whole = TextModel.load(directory)
    (added,) = whole.encode("two words")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": added}))
    model = TextModel.load(directory)
    assert model.encode("quick") == whole.encode("quick")
    assert added not in model.eos_token_ids
    for read in (lambda: model.encode("two words"), lambda: model.encode_chat([Message(Role.USER, "two words")])):
        with pytest.raises(RyzansteinError, match=f"makes token {added} of it") as caught:
            read()
        assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("where", ["config", "jinja", "json", "jinja beside named ones"])
def test_a_template_is_found_wherever_hubs_have_it(where, write_model) -> None:
    """The processor of a multimodal model has it in chat_template.json."""
    template, other = (
        "{% for m in messages %}A{{ m.content }}{% endfor %}",
        "{% for m in messages %}B{{ m.content }}{% endfor %}",
    )
    written = template if where == "config" else other if where == "jinja" else ""
    directory = write_model(tokenizer_config={"chat_template": written or None})
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template if where == "json" else other}))
    if where.startswith("jinja"):
        (directory / "chat_template.jinja").write_text(template)
    if where.endswith("named ones"):
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates/tool_use.jinja").write_text(other)
    assert TextModel.load(directory).template.source == template


def test_named_templates_in_files_leave_the_default_of_the_configuration(write_model) -> None:
    directory = write_model(tokenizer_config={"chat_template": "{{ messages }}"})
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}{{ messages }}")
    model = TextModel.load(directory)
    assert (model.template.source, model.tool_template.source) == ("{{ messages }}", "{{ tools }}{{ messages }}")


@pytest.mark.parametrize("flag", ["normalized", "lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("value", [False, True])
def test_flags_of_added_tokens_are_those_of_the_configuration(flag, value, write_model) -> None:
    """Old tokenizer.json of Llama's family have others than their tokenizer_config.json, which transformers prefers."""
    directory = write_model()
    flags = dict.fromkeys(["lstrip", "rstrip", "single_word", "normalized"], False) | {"special": True}
    state = json.loads((directory / "tokenizer.json").read_text())
    for token in state["added_tokens"]:
        token[flag] = not value
    (directory / "tokenizer.json").write_text(json.dumps(state))
    decoder = {str(token["id"]): {"content": token["content"], **flags, flag: value} for token in state["added_tokens"]}
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": decoder}))
    model, reference = TextModel.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("a <s> b", "x</s> y <|user|>z", "<s>q</s>", " two words "):
        assert model.encode(text) == reference.encode(text)
