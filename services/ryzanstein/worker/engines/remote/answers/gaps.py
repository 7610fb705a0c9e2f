"""Tokens whose ids a stream of llama.cpp leaves out.

Its server sends an event only where the text so far ends with a whole character. A token in the middle of one has no event:
the next event has the text of both, the id of its own token alone, and a count that tells how many are missing. Nothing else
it offers names them: read in its `process_token`, and seen in the build of October 2026.

The ids are those of the text of that event, by the server's own tokenizer, if that gives as many tokens, the same last one and
the same bytes. Two tokens are certain then. Of more, the model may have split the bytes in another way than the tokenizer
would; the text is the same. Where the tokenizer cannot tell, the tokens are computed anew without a stream: nobody has seen
them yet.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, EngineRefused, EngineUnreachable

_TOKENIZE_S = 10.0
_PER_TOKEN_S = 10.0
"""For each of the few tokens that are computed anew; the first needs the prompt again where it is not cached."""
_PROMPT_S = 120.0


class _Piece(msgspec.Struct):
    id: int
    piece: str | list[int]

    @property
    def spelled(self) -> bytes:
        return self.piece.encode() if isinstance(self.piece, str) else bytes(self.piece)


class _Pieces(msgspec.Struct):
    tokens: list[_Piece]


async def respelled(client: EngineClient, part: ComputedPart, count: int) -> list[ComputedToken]:
    """Returns the `count` tokens whose text the event has, those that it names last; empty: they cannot be told.

    Tokens that it does not name have no log probability.
    """
    if not part.text or not part.tokens:
        return []
    asked = {"content": part.text, "add_special": False, "parse_special": False, "with_pieces": True}
    try:
        found = msgspec.convert(await client.post("/tokenize", asked, _TOKENIZE_S), _Pieces).tokens
        spelled = b"".join(each.spelled for each in found)
    except (EngineRefused, EngineProtocolError, msgspec.ValidationError, ValueError):
        return []
    ids, named = [each.id for each in found], [token.token_id for token in part.tokens]
    if len(ids) != count or ids[-len(named) :] != named or spelled != part.text.encode():
        return []
    return [*(ComputedToken(token_id) for token_id in ids[: -len(named)]), *part.tokens]


async def recomputed(client: EngineClient, served: ServedEngine, asked: AskedChoice, count: int) -> ComputedPart:
    """Returns at most `count` further tokens, computed without a stream, so that each has its id."""
    path, body = served.dialect.body(replace(asked, max_tokens=count), served)
    answer = await client.post(path, {**body, "stream": False, "return_progress": False}, _PROMPT_S + count * _PER_TOKEN_S)
    part = served.dialect.part(msgspec.json.encode(answer))
    if part is None or not part.finish:
        raise EngineUnreachable(f"{client.address} did not finish what it was asked without a stream")
    if len(part.tokens) != part.num_generated or not 1 <= len(part.tokens) <= count:
        raise EngineProtocolError(f"{len(part.tokens)} of {count} tokens came with their ids")
    return part
