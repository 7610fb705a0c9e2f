from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.quality.choice_of_texts import read_texts
from ryzanstein.lab.bench.quality.texts import PlainText, TextSource, plain_text
from ryzanstein.lab.demo.encoding import encode
from ryzanstein.lab.demo.evaluate import held_out

TEXT = "My name is Tavik and I count from 1 to 20: one, two, three. " * 10


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., TextSource]:
    def write(*contents: bytes) -> TextSource:
        paths = [tmp_path / f"part{number}" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        return TextSource("mine", "here", tuple(paths))

    return write


@pytest.mark.parametrize("prefix", [(), (7,), (7, 8)])
def test_windows_have_every_token_once_and_score_all_that_have_one_before_them(prefix: tuple[int, ...]) -> None:
    text = PlainText("mine", "here", prefix, tuple(range(100, 145)))
    windows = text.windows(10)
    assert [token for window in windows for token in window.ids[len(prefix) :]] == list(text.ids)
    assert {window.ids[: len(prefix)] for window in windows} == {prefix}
    assert max(len(window.ids) for window in windows) == 10
    scored = [window.ids[place] for window in windows for place in window.scored]
    assert len(scored) == len(text.ids) - (0 if prefix else len(windows))
    assert not set(scored) & set(prefix)


def test_a_last_window_without_a_token_to_predict_is_left_out() -> None:
    assert [window.ids for window in PlainText("mine", "here", (), (1, 2, 3)).windows(2)] == [(1, 2)]


def test_prompts_are_parts_of_the_text_from_its_beginning_to_near_its_end() -> None:
    text = PlainText("mine", "here", (7,), tuple(range(100, 200)))
    prompts = text.prompts(4, 21)
    assert prompts[0] == (7, *range(100, 120))
    assert [prompt[1] for prompt in prompts] == [100, 120, 140, 160]
    assert text.prompts(3, 101) == [(7, *range(100, 200))] * 3


def test_the_tokens_are_the_tokenizers_with_what_it_puts_before_a_text(
    demo_tokenizer: Tokenizer, written: Callable[..., TextSource]
) -> None:
    half = len(TEXT) // 2
    source = written(TEXT[:half].encode(), TEXT[half:].encode())
    expected = demo_tokenizer.encode(TEXT, add_special_tokens=False).ids
    read = plain_text(demo_tokenizer, source, 50)
    assert (read.prefix, list(read.ids)) == ((), expected[:50])
    with_start = Tokenizer.from_str(demo_tokenizer.to_str())
    with_start.post_processor = TemplateProcessing(single="<|pad|> $A <|end|>", special_tokens=[("<|pad|>", 1), ("<|end|>", 0)])
    assert plain_text(with_start, source, 50).prefix == (1,)


def test_the_end_of_what_is_read_may_be_within_a_character(
    demo_tokenizer: Tokenizer, written: Callable[..., TextSource]
) -> None:
    assert len(plain_text(demo_tokenizer, written(b"a" + "ß".encode() * 1000), 2).ids) == 2  # 128 bytes, the last half a letter


def test_a_text_that_is_too_short_names_the_bound(demo_tokenizer: Tokenizer, written: Callable[..., TextSource]) -> None:
    with pytest.raises(RyzansteinError, match="text mine: must have at least the 5000 tokens of --tokens, got "):
        plain_text(demo_tokenizer, written(TEXT.encode()), 5000)


@pytest.mark.parametrize(
    ("content", "why"), [(b"abc \xff def", "must be UTF-8"), (b"", "at least"), (b"ab\xc3", "must be UTF-8")]
)
def test_what_is_no_text_is_refused(
    content: bytes, why: str, demo_tokenizer: Tokenizer, written: Callable[..., TextSource]
) -> None:
    with pytest.raises(RyzansteinError, match=why):
        plain_text(demo_tokenizer, written(content), 50)


def test_missing_files_are_named(demo_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RyzansteinError, match=r"text gone: .*/gone: No such file"):
        read_texts(demo_tokenizer, [str(tmp_path / "gone")], 10, 1)
    with pytest.raises(RyzansteinError, match="has no files here; they are of the Debian package debconf"):
        plain_text(demo_tokenizer, TextSource("program", "debconf", ()), 10)


def test_debians_texts_are_long_enough_and_of_different_kinds(demo_tokenizer: Tokenizer) -> None:
    texts = read_texts(demo_tokenizer, [], 20_000, 8)
    assert [text.name for text in texts] == ["licences", "program", "languages"]
    assert len({text.digest for text in texts}) == 3
    assert {sum(len(window.ids) for window in text.windows(2048)) for text in texts} == {20_000}


def test_a_name_stands_for_one_text(demo_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "licences").write_text(TEXT)
    with pytest.raises(RyzansteinError, match="each needs a name of its own, got 'licences'"):
        read_texts(demo_tokenizer, ["licences", str(tmp_path / "licences")], 10, 1)


def test_dialogues_score_the_tokens_of_answers(demo_tokenizer: Tokenizer) -> None:
    (text,) = read_texts(demo_tokenizer, ["dialogues"], 1000, 3)
    windows = text.windows(2048)
    first = encode(demo_tokenizer, held_out(1)[0])
    assert windows[0].ids == tuple(first.ids)
    assert list(windows[0].scored) == [place for answer in first.answers for place in range(*answer)]
    assert sum(len(window.scored) for window in windows) >= 1000 > sum(len(window.scored) for window in windows[:-1])
    assert len(text.prompts(3, 50)) == 3
    assert all(len(prompt) <= 50 for prompt in text.prompts(3, 50))
    cut = text.windows(40)
    assert max(len(window.ids) for window in cut) == 40
    assert max(max(window.scored) for window in cut) < 40


def test_dialogues_need_the_demo_models_tokenizer() -> None:
    with pytest.raises(RyzansteinError, match="dialogues are the demo model's"):
        read_texts(Tokenizer(BPE()), ["dialogues"], 10, 1)
