"""Gives ranks the table of a large vocabulary before the first constraint needs it.

Rank 0 stands still while it reads the table: about a second for 262,144 tokens. So it gets the
table when nothing runs on it: with its start if the table is known by then, else as soon as it is
idle. A constraint that comes earlier does not wait for that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from ryzanstein.background import Background
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.text.grammars.judge import ConstraintJudge
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

LARGE_VOCABULARY = 32_768
"""Of smaller vocabularies the table is read in less than a tenth of a second, with the first constraint."""


class EarlyTokens:
    """The table of one model's tokens.

    `idle` returns when nothing runs. `tell` sends the table to the ranks that serve the model.
    """

    def __init__(
        self,
        judge: ConstraintJudge,
        background: Background,
        idle: Callable[[], Awaitable[None]],
        tell: Callable[[TextModel, bytes], None],
    ) -> None:
        self._judge, self._background, self._idle, self._tell = judge, background, idle, tell
        self._known: tuple[TextModel, bytes] | None = None

    def expect(self, text: TextModel) -> None:
        """Begins to read the table of a model that is being loaded."""
        self._known = None
        if self._judge.able and text.embedding is None and text.vocab_size > LARGE_VOCABULARY:
            self._background.once("tokens", self._read(text))

    def known(self, text: TextModel | None) -> bytes | None:
        """Returns the table, if it is known."""
        return self._known[1] if self._known is not None and self._known[0] is text else None

    async def _read(self, text: TextModel) -> None:
        try:
            table = await self._judge.tokens(text)
        except RyzansteinError as error:
            log.warning("tokens not read early", model=text.name, reason=error.message)
            return
        self._known = text, table
        await self._idle()
        self._tell(text, table)
