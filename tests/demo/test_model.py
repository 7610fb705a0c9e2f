"""The committed model directory: small, loadable by transformers, and able to hold a conversation."""

import json
from typing import Any

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.dialogues import Dialogue, DialogueTurn, Mix
from ryzanstein.lab.demo.evaluate import EvaluationReport, as_json, as_table, evaluate, held_out

MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


def say(model: Any, tokenizer: Any, messages: list[dict[str, str]], max_new_tokens: int = 24) -> str:
    """The model's greedy answer to the messages."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    answer: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def test_the_directory_is_at_most_eight_megabytes() -> None:
    assert sum((MODEL_DIR / name).stat().st_size for name in MODEL_FILES) <= 8_000_000


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_heads_and_matrices_divide_among_ranks(num_ranks: int) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"):
        assert config[name] % num_ranks == 0, name


def test_generation_stops_at_the_end_token() -> None:
    from tokenizers import Tokenizer

    end = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).token_to_id("<|end|>")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((MODEL_DIR / name).read_text())["eos_token_id"] == end


def test_held_out_facts_are_recalled(model: Any, tokenizer: Any) -> None:
    report = evaluate(model, tokenizer.backend_tokenizer, held_out(60))
    assert report.asked["not told"] >= 20
    assert report.share("recall") >= 0.9
    assert report.share("not told") >= 0.9
    assert report.share("repeat") >= 0.9


def test_greedy_generation_gives_the_answers_that_evaluation_calls_right(model: Any, tokenizer: Any) -> None:
    one = held_out(1, Mix(max_turns=1))[0]
    report = evaluate(model, tokenizer.backend_tokenizer, [one])
    generated = say(model, tokenizer, one.messages()[:-1])
    assert report.share() == (generated == one.turns[0].assistant)


def test_a_name_survives_a_count_to_a_hundred(model: Any, tokenizer: Any) -> None:
    count = " ".join(map(str, range(1, 101)))
    messages = [
        {"role": "user", "content": "My name is Tavik."},
        {"role": "assistant", "content": "Nice to meet you, Tavik."},
        {"role": "user", "content": "Count from 1 to 100."},
    ]
    assert say(model, tokenizer, messages, max_new_tokens=128) == count
    messages += [{"role": "assistant", "content": count}, {"role": "user", "content": "What is my name?"}]
    assert say(model, tokenizer, messages) == "Your name is Tavik."
    messages[-1]["content"] = "Where do I live?"
    assert say(model, tokenizer, messages) == "You have not told me where you live."


def test_a_report_counts_per_kind_and_sums_recalls() -> None:
    report = EvaluationReport()
    for kind, right in [("recall name", 1), ("recall city", 0), ("talk", 1)]:
        report.asked[kind] += 1
        report.right[kind] += right
    assert report.rows()[-1] == ("all recalls", 1, 2, 0.5)
    assert "| recall city | 0 | 1 | 0.0% |" in as_table(report)
    assert json.loads(as_json(report))["kinds"]["recall name"] == {"right": 1, "asked": 1}


def test_a_wrong_answer_is_kept_with_its_question(model: Any, tokenizer: Any) -> None:
    impossible = Dialogue((DialogueTurn("talk", "Hello!", "Xyzzy qwv."),))
    report = evaluate(model, tokenizer.backend_tokenizer, [impossible])
    assert report.share("talk") == 0.0
    assert [(question, right) for question, right, _ in report.wrong] == [("Hello!", "Xyzzy qwv.")]
