"""Tokenizers through GGUF and back: the ids of nasty texts stay the same; what GGUF cannot name is refused."""

import json
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.checkpoints.gguf.tokenizer.score_merges import merges_of, scores_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.splitting import SPLITTINGS, name_of, splitting_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import GgufVocabulary, TokenType
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.text.model_files import ModelFiles

ROWS = 1400
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
PIECES = [
    *("the", "and", "Hello", "don't", "I'M", "'LL", "snake_case", "HelloWorld", "x" * 30, "a", "1", "23", "4567"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "...", "--", "()", "{}", "\\", "http://x.y/?q=1#z", "<0x41>", "<|", "|>"),
    *(
        "é",
        "e\u0301",
        "ß",
        "İ",
        "中文",
        "日本",
        "한국",
        "🙂",
        "👨\u200d👩\u200d👧",
        "\u200b",
        "\u00a0",
        "\u3000",
        SPACE,
        "µ",
        "ﬁ",
        "²",
        "½",
    ),
    *("العربية", "हिन्दी", "\x01", "\x7f", "\uff21", "\u202e", "\U0010ffff", "<tool>", "<|end|>"),
]


def nasty(count: int = 300) -> list[str]:
    chance = random.Random(11)
    joined = ["".join(chance.choice(PIECES) for _ in range(chance.randint(1, 20))) for _ in range(count)]
    scripts = [(0x20, 0x7E), (0xA1, 0x2FF), (0x370, 0x1FFF), (0x2000, 0x2FFF), (0x3040, 0xD7FF), (0x10000, 0x1FFFF)]
    any_letters = [
        "".join(chr(chance.randint(*chance.choice(scripts))) for _ in range(chance.randint(1, 30))) for _ in range(count // 2)
    ]
    return [*joined, *any_letters, "", " ", "\n"]


TEXTS = nasty()


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    pages = (Path(__file__).parents[4] / "docs").rglob("*.md")
    return [*(page.read_text() for page in sorted(pages)[:6]), *TEXTS]


@pytest.fixture
def with_tokenizer(tiny: Callable[..., Path]) -> Callable[..., Path]:
    """A tiny model with this tokenizer.json, `config` in tokenizer_config.json."""

    def make(tokenizer: Tokenizer, **config: Any) -> Path:
        model_dir = tiny("llama", vocab_size=ROWS)
        tokenizer.save(str(model_dir / "tokenizer.json"))
        (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
        return model_dir

    return make


def byte_level(name: str, corpus: list[str]) -> Tokenizer:
    splitting = SPLITTINGS[name]
    blank = json.loads(Tokenizer(models.BPE(ignore_merges=splitting.whole_words)).to_str())
    blank |= {"pre_tokenizer": splitting.pre_tokenizer(), "normalizer": {"type": "NFC"} if splitting.normalized else None}
    tokenizer = Tokenizer.from_str(json.dumps(blank))
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("   ", normalized=False)])
    return tokenizer


def sentencepiece(corpus: list[str], *, prefix: bool) -> Tokenizer:
    """As SentencePiece numbers its tokens: special ones, bytes, then results of merges in order, then single letters."""
    trained = Tokenizer(models.BPE())
    steps = [normalizers.Replace(" ", SPACE)]
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *steps] if prefix else steps)
    # Not texts of added tokens or of bytes: they would be learned a second time.
    plain = [text for text in corpus if "<tool>" not in text and "<0x" not in text]
    trained.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=1000, limit_alphabet=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    letters = [text for text in model["vocab"] if len(text) == 1]
    results = dict.fromkeys("".join(merge) for merge in model["merges"])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *results, *letters]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    scores = tuple(-float(max(0, token_id - 259)) for token_id in range(len(tokens)))
    merges = merges_of(GgufVocabulary("llama", "default", tuple(tokens), tuple(types), scores))
    whole = models.BPE(
        vocab={text: token_id for token_id, text in enumerate(tokens)},
        merges=[tuple(merge) for merge in merges],  # type: ignore[misc]
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(whole)
    tokenizer.normalizer = trained.normalizer
    ends = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*ends, decoders.Strip(" ", 1, 0)] if prefix else ends)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("   ", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return tokenizer


def assert_same(one: Tokenizer, other: Tokenizer) -> None:
    for text in TEXTS:
        ids = one.encode(text).ids
        assert other.encode(text).ids == ids, text
        assert other.decode(ids) == one.decode(ids)


@pytest.mark.parametrize("name", SPLITTINGS)
def test_byte_pairs_come_back(
    name: str, corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    before = byte_level(name, corpus)
    path = to_gguf(with_tokenizer(before, bos_token="<|begin|>", eos_token="<|end|>", chat_template="{{ messages }}"))
    after = from_gguf(path)
    assert_same(before, Tokenizer.from_file(str(after / "tokenizer.json")))
    with GgufFile.open(path) as file:
        message = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    assert (message["model"], message["pre"], message["bos_token_id"], message["eos_token_id"]) == ("gpt2", name, 0, 1)
    assert message["token_type"][:3].tolist() == [TokenType.CONTROL] * 3
    assert message["token_type"][-1] == TokenType.UNUSED
    assert message["tokens"][-1] == f"[PAD{ROWS - 1}]"
    config = json.loads((after / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == ("<|begin|>", "<|end|>", "{{ messages }}")
    assert json.loads((after / "generation_config.json").read_text())["eos_token_id"] == [1, before.token_to_id("<|im_end|>")]


def _steps(*steps: dict[str, Any], use_regex: bool = True) -> dict[str, Any]:
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "Sequence", "pretokenizers": [*steps, to_bytes]}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# As the tokenizer.json of these models has them.
OF_HUBS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "mpt": (_steps(), {"type": "NFC"}),
    "bloom": (_steps(_split(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"), use_regex=False), None),
    "falcon": (
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Punctuation", "behavior": "Contiguous"},
                *_steps()["pretokenizers"],
                {"type": "Digits", "individual_digits": False},
                _split("[0-9][0-9][0-9]"),
            ],
        },
        None,
    ),
}


@pytest.mark.parametrize("name", OF_HUBS)
def test_a_split_has_the_name_that_files_of_the_model_have(name: str) -> None:
    pre_tokenizer, normalizer = OF_HUBS[name]
    tokenizer = {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer, "model": {}}
    assert name_of(tokenizer, "tokenizer.json") == name
    assert name_of({**tokenizer, "normalizer": normalizer or {"type": "Sequence", "normalizers": []}}, "f") == name


def test_every_split_that_the_documentation_names_is_read() -> None:
    page = (Path(__file__).parents[4] / "docs/operate/quantize-and-convert.md").read_text()
    listed = page.split("Splits before merges:")[1].split("Another one is")[0]
    names = re.findall("`([a-z0-9-]+)`", listed)
    assert len(names) > 20
    assert all(splitting_of(name, "f") for name in names)
    assert set(SPLITTINGS) <= set(names)


def test_the_template_of_conversations_with_tools_comes_back(
    corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ messages }}{{ tools }}"}]
    directory = with_tokenizer(byte_level("qwen2", corpus), chat_template=[*named, {"name": "rag", "template": "x"}])
    path = to_gguf(directory)
    files = ModelFiles.read(path)
    assert (files.chat_template, files.tool_template) == ("{{ messages }}", "{{ messages }}{{ tools }}")
    after = from_gguf(path)
    assert json.loads((after / "tokenizer_config.json").read_text())["chat_template"] == named


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_back_with_merges_from_scores(
    prefix: bool, corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    before = sentencepiece(corpus, prefix=prefix)
    path = to_gguf(with_tokenizer(before, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    after = Tokenizer.from_file(str(from_gguf(path) / "tokenizer.json"))
    assert_same(before, after)
    assert json.loads(after.to_str())["model"]["merges"] == json.loads(before.to_str())["model"]["merges"]
    with GgufFile.open(path) as file:
        message = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    assert (message["model"], message["add_space_prefix"], message["add_bos_token"]) == ("llama", prefix, True)
    kinds = dict(zip(message["tokens"], message["token_type"].tolist(), strict=True))
    assert [kinds[text] for text in ("<unk>", "<s>", "<0x41>", "<tool>")] == [2, 3, 6, 4]
    assert [message["scores"][token_id] for token_id in (259, 260, 261)] == [0, -1, -2]


def spaced(tokenizer: Tokenizer, path: Path) -> Path:
    """A file of SentencePiece's tokens with a list of merges, as Gemma 4's have it."""
    from tests.worker.model.gguf.test_architectures import rewritten

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    listed = tuple(" ".join(pair) for pair in merges)
    changes = {"model": "gemma4", "merges": listed, "scores": None}
    return rewritten(path, {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def test_merges_of_what_sentencepiece_splits_are_read(
    corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    before = sentencepiece(corpus, prefix=False)
    path = to_gguf(with_tokenizer(before, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    after = from_gguf(spaced(before, path))
    assert_same(before, Tokenizer.from_file(str(after / "tokenizer.json")))


def test_merges_in_no_order_of_scores_are_written_as_a_list(
    corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    parsed = json.loads(sentencepiece(corpus, prefix=False).to_str())
    merges = parsed["model"]["merges"]
    results = ["".join(pair) for pair in merges]
    twice = next(index for index, result in enumerate(results) if results.count(result) > 1)
    merges.append(merges.pop(twice))  # the same result at two places
    before = Tokenizer.from_str(json.dumps(parsed))
    path = to_gguf(with_tokenizer(before, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    with GgufFile.open(path) as file:
        assert file.metadata["tokenizer.ggml.model"] == "gemma4"
    assert_same(before, Tokenizer.from_file(str(from_gguf(path) / "tokenizer.json")))


def test_our_text_side_reads_a_converted_tokenizer(
    corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    from ryzanstein.worker.text.tokenizer import TextModel

    before = sentencepiece(corpus, prefix=True)
    text = TextModel.load(from_gguf(to_gguf(with_tokenizer(before, bos_token="<s>", eos_token="</s>"))))
    ids = text.encode("Hello 中文 🙂")
    assert ids == before.encode("Hello 中文 🙂").ids
    assert text.decode(ids) == "Hello 中文 🙂"
    assert text.eos_token_ids == {2}


def test_a_text_that_merges_in_another_order_than_its_scores_has_none() -> None:
    pieces = {text: token_id for token_id, text in enumerate(["ab", "bc", "abc", "a", "b", "c"])}
    assert scores_of([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")], pieces) is not None
    assert scores_of([("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")], pieces) is None


def test_scores_are_ranks_where_ids_are_not_in_the_order_of_merges() -> None:
    pieces = {text: token_id for token_id, text in enumerate(["a", "b", "c", "bc", "ab"])}
    scores = scores_of([("a", "b"), ("b", "c")], pieces)
    assert scores is not None
    assert scores["ab"] > scores["bc"]


NAMELESS: dict[str, tuple[Callable[[Tokenizer], Any], str]] = {
    "an unknown split": (
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])),
        "so GGUF has no name for it",
    ),
    "an unknown normalizer": (lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()), "Lowercase"),
    "another model": (lambda tokenizer: setattr(tokenizer, "model", models.WordLevel({"a": 0}, "a")), "model 'WordLevel'"),
}


@pytest.mark.parametrize("case", NAMELESS)
def test_a_tokenizer_that_gguf_cannot_name_is_refused(
    case: str, corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path]
) -> None:
    change, reason = NAMELESS[case]
    tokenizer = byte_level("gpt-2", corpus)
    change(tokenizer)
    with pytest.raises(ModelRefused, match=reason):
        to_gguf(with_tokenizer(tokenizer))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"pre": "made-up"}, "tokenizer.ggml.pre 'made-up' is not supported, only command-r"),
    "no pre": ({"pre": None}, "tokenizer.ggml.pre is missing"),
    "model": ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported, only gpt2, llama and gemma4"),
    "tokens": ({"tokens": ("a",) * (ROWS + 1)}, f"has {ROWS + 1} entries, must be 1 to {ROWS}"),
    "types": ({"token_type": None, "tokens": ("a", "b")}, "which is no token"),
    "merges": ({"merges": ("nothing here",)}, "'nothing here' needs 'nothing', which is no token"),
    "special": ({"bos_token_id": "one"}, "tokenizer.ggml.bos_token_id must be a token id"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vocabulary_that_does_not_fit_is_refused_by_key(
    case: str, corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    from tests.worker.model.gguf.test_architectures import rewritten

    changes, reason = WRONG[case]
    path = to_gguf(with_tokenizer(byte_level("gpt-2", corpus)))
    with pytest.raises(ModelRefused, match=reason):
        from_gguf(rewritten(path, {f"tokenizer.ggml.{key}": value for key, value in changes.items()}))


def test_texts_are_nasty_enough() -> None:
    kinds = {unicodedata.category(letter) for text in TEXTS for letter in text}
    assert {"Mn", "So", "Cf", "Cc", "Lo", "Nd", "Zs", "Sc", "Pd"} <= kinds
