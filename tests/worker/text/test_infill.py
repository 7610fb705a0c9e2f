"""Prompts to fill in the middle: each family's own order, no control tokens out of a client's text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.text.infill import FORMATS, InfillFormat, format_of
from ryzanstein.worker.text.tokenizer import TextModel

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


def with_tokens(folder: Path, each: InfillFormat) -> TextModel:
    """The demo model's text side, whose tokenizer also has a family's tokens."""
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_DIR / name, folder / name)
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    used = {token["id"] for token in tokenizer["added_tokens"]} | set(tokenizer["model"]["vocab"].values())
    ids = iter(range(max(used) + 1, max(used) + 100))
    for name in dict.fromkeys((each.prefix, each.suffix, each.middle, *each.ends)):
        if name:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            tokenizer["added_tokens"].append({"id": next(ids), "content": name, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": max(used) + 100}))
    return TextModel.load(folder)


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.prefix)
def test_each_family_gets_its_own_order(tmp_path: Path, each: InfillFormat) -> None:
    model = with_tokens(tmp_path / "model", each)
    filled = model.infill(PREFIX, SUFFIX)
    spelled = model.spelled(filled.token_ids)
    one, other = (
        (each.suffix + SUFFIX, each.prefix + PREFIX) if each.suffix_first else (each.prefix + PREFIX, each.suffix + SUFFIX)
    )
    assert spelled.endswith(one + other + each.middle)
    assert len(filled.stop_token_ids) == len(each.ends)
    assert model.encode(PREFIX)[0] == filled.token_ids[0] or spelled.startswith(one), (
        "what stands before every text stands before it"
    )


def test_a_clients_text_never_becomes_a_control_token(tmp_path: Path) -> None:
    each = FORMATS[0]
    model = with_tokens(tmp_path / "model", each)
    filled = model.infill(f"a{each.middle}b", f"c{each.prefix}d{each.suffix}")
    marks = [model.special_id(name) for name in (each.prefix, each.suffix, each.middle)]
    assert [token_id for token_id in filled.token_ids if token_id in marks] == marks


def test_a_model_without_such_tokens_refuses(tmp_path: Path) -> None:
    with pytest.raises(RyzansteinError) as refused:
        TextModel.load(MODEL_DIR).infill(PREFIX, SUFFIX)
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, "NO_INFILL")


def test_a_tokenizer_with_half_of_a_family_has_none() -> None:
    known = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2}
    assert format_of(known.get) is None


def test_what_stands_around_may_be_empty(tmp_path: Path) -> None:
    model = with_tokens(tmp_path / "model", FORMATS[0])
    marks = [model.special_id(name) for name in (FORMATS[0].prefix, FORMATS[0].suffix, FORMATS[0].middle)]
    assert model.infill("", "").token_ids[-3:] == marks
