"""Reads the table of a large vocabulary before the ranks start, so that rank 0 has it before the node is READY.

Rank 0 stands still while it takes the table: a second or more for 150,000 tokens. With the first
constraint every stream would stand still as long.
"""

from __future__ import annotations

import structlog

from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.text.grammars.judge import ConstraintJudge
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

LARGE_VOCABULARY = 32_768
"""Of smaller vocabularies the table is read in less than a tenth of a second, with the first constraint."""


async def early_tokens(judge: ConstraintJudge, text: TextModel) -> bytes:
    """Returns the packed table; nothing if the vocabulary is small, or if the first constraint must bring it."""
    if not judge.able or text.embedding is not None or text.vocab_size <= LARGE_VOCABULARY:
        return b""
    try:
        return await judge.tokens(text)
    except RyzansteinError as error:
        log.warning("tokens not read early", model=text.name, reason=error.message)
        return b""
