"""A vocabulary as the files of a tokenizer in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ryzanstein.worker.checkpoints.gguf.tokenizer.score_merges import merges_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.splitting import splitting_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import BPE, SENTENCEPIECE, GgufVocabulary, TokenType
from ryzanstein.worker.refusal import CheckpointError, excerpt

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""

_PADDING = "[PAD"
"""llama.cpp's converter gives ids without a token this name, a number and a bracket."""
_ENDINGS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|END_OF_TURN_TOKEN|>",
    "<turn|>",
)
"""Control tokens that end a turn, whatever the file says of them: those llama.cpp looks for that our models have."""


def tokenizer_json(vocabulary: GgufVocabulary, file: str) -> dict[str, Any]:
    """Returns tokenizer.json. Raises CheckpointError, which names the key of the file."""
    parts = _byte_pairs(vocabulary, file) if vocabulary.model == BPE else _sentencepiece(vocabulary, file)
    added = [_added(vocabulary, token_id) for token_id in vocabulary.ids(*_ADDED_TYPES)]
    post = _around(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": post,
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def tokenizer_config(vocabulary: GgufVocabulary, context_length: int) -> dict[str, Any]:
    """Returns tokenizer_config.json."""
    names = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token", "sep": "sep_token"}
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
    }
    found |= {key: vocabulary.tokens[vocabulary.special[name]] for name, key in names.items() if name in vocabulary.special}
    if vocabulary.chat_template is not None:
        found["chat_template"] = vocabulary.chat_template
    if vocabulary.tool_template is not None:
        named = {"default": vocabulary.chat_template, "tool_use": vocabulary.tool_template}
        found["chat_template"] = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    return found


def generation_config(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Returns generation_config.json: which tokens begin a text, end an answer and fill a batch."""
    special = vocabulary.special
    control = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.ids(TokenType.CONTROL, TokenType.USER_DEFINED)}
    ends = {special[name]: None for name in ("eos", "eot", "eom") if name in special}
    ends |= {control[name]: None for name in _ENDINGS if name in control}
    found: dict[str, Any] = {"eos_token_id": list(ends)}
    found |= {key: special[name] for name, key in (("bos", "bos_token_id"), ("pad", "pad_token_id")) if name in special}
    return found


_ADDED_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED)


def _added(vocabulary: GgufVocabulary, token_id: int) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": vocabulary.tokens[token_id],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": vocabulary.types[token_id] == TokenType.CONTROL,
    }


def _byte_pairs(vocabulary: GgufVocabulary, file: str) -> dict[str, Any]:
    splitting = splitting_of(vocabulary.pre, file)
    # Entries are looked up by text: a second one of the same text is never found.
    entries = _entries(vocabulary)
    merges = [_pair(merge, entries, file) for merge in vocabulary.merges]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if splitting.normalized else None,
        "pre_tokenizer": splitting.pre_tokenizer(),
        "decoder": to_bytes,
        "model": _model(entries, merges, None, ignore_merges=splitting.whole_words),
    }


def _pair(merge: str, entries: Mapping[str, int], file: str) -> list[str]:
    left, _, right = merge.partition(" ")
    for piece in (left, right, left + right):
        if piece not in entries:
            raise CheckpointError(f"{file}: tokenizer.ggml.merges: {excerpt(merge)} needs {excerpt(piece)}, which is no token")
    return [left, right]


def _sentencepiece(vocabulary: GgufVocabulary, file: str) -> dict[str, Any]:
    unknown = next(iter(vocabulary.ids(TokenType.UNKNOWN)), vocabulary.special.get("unk"))
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    from_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers, decoders = [from_spaces], [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if vocabulary.add_space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    entries = _entries(vocabulary)
    scored = vocabulary.model == SENTENCEPIECE
    merges = merges_of(vocabulary) if scored else [_pair(merge, entries, file) for merge in vocabulary.merges]
    model = _model(entries, merges, None if unknown is None else vocabulary.tokens[unknown], bytes_=True)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _model(
    entries: Mapping[str, int],
    merges: list[list[str]],
    unknown: str | None,
    *,
    bytes_: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bytes_,
        "byte_fallback": bytes_,
        "ignore_merges": ignore_merges,
        "vocab": entries,
        "merges": merges,
    }


def _entries(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Returns ids by text, without the names of ids that have no token. Of two equal texts the first counts."""
    found: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind != TokenType.UNUSED or not text.startswith(_PADDING):
            found.setdefault(text, token_id)
    return found


def _around(vocabulary: GgufVocabulary) -> dict[str, Any] | None:
    """Returns what puts special tokens around a text, or None."""
    before = _special(vocabulary, "bos") if vocabulary.add_bos else []
    after = _special(vocabulary, "eos") if vocabulary.add_eos else []
    if not before + after:
        return None
    single = [*_pieces(before, 0), _sequence("A", 0), *_pieces(after, 0)]
    pair = [*single, *_pieces(before, 1), _sequence("B", 1), *_pieces(after, 1)]
    ids = {text: {"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in before + after}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ids}


def _special(vocabulary: GgufVocabulary, name: str) -> list[tuple[str, int]]:
    token_id = vocabulary.special.get(name)
    return [] if token_id is None else [(vocabulary.tokens[token_id], token_id)]


def _pieces(tokens: list[tuple[str, int]], type_id: int) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": text, "type_id": type_id}} for text, _ in tokens]


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
