from __future__ import annotations

import pytest

from ryzanstein.errors import Code
from ryzanstein.generation import FinishReason


def test_a_lone_choice_gives_the_models_answer(run, group, answer) -> None:
    it = run(num_blocks=16, block_size=4)
    message = group(1, range(10), max_tokens=9)
    it.engine.submit(message)
    it.drain()
    assert (it.tokens[1, 0], FinishReason(it.ended[1, 0].reason)) == answer(message, 0)
    assert it.engine.stats().blocks_held == 0
