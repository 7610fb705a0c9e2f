"""Batches: each row one dialogue, only answers have weight."""

import pytest
import torch
from tokenizers import Tokenizer

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.demo.dialogues import dialogue
from ryzanstein.lab.demo.encoding import Encoded, batches, encode, token_id
from ryzanstein.lab.demo.tokenizer import PAD
from ryzanstein.lab.demo.words import Split

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
ROWS = [encode(TOKENIZER, dialogue(Split.TRAIN, seed)) for seed in range(50)]


def test_every_dialogue_is_one_row_of_one_batch() -> None:
    pad = token_id(TOKENIZER, PAD)
    rows = [row[row != pad].tolist() for batch in batches(ROWS, TOKENIZER, 1024) for row in batch.ids_RT]
    assert sorted(rows) == sorted(row.ids for row in ROWS)


def test_a_batch_keeps_to_its_tokens_with_padding() -> None:
    assert all(batch.ids_RT.numel() <= 1024 for batch in batches(ROWS, TOKENIZER, 1024))


def test_a_row_longer_than_the_limit_is_a_batch_alone() -> None:
    shapes = [tuple(batch.ids_RT.shape) for batch in batches([Encoded([5] * 40, []), Encoded([5] * 9, [])], TOKENIZER, 16)]
    assert shapes == [(1, 9), (1, 40)]


def test_only_answers_have_weight_and_long_ones_less_per_token() -> None:
    row = Encoded(list(range(5, 30)), [(3, 7), (9, 25)])
    (batch,) = batches([row], TOKENIZER, 64)
    expected = torch.zeros(25)
    expected[3:7] = 1 / 2
    expected[9:25] = 1 / 4
    assert torch.equal(batch.weights_RT[0], expected)


def test_a_token_that_is_not_in_the_vocabulary_is_an_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        token_id(TOKENIZER, "<|nobody|>")
