"""SentencePiece's scores as byte-pair merges, and back.

SentencePiece joins the two neighbours whose joint text has the highest score. A merge list says the
same: every way in which a token splits into two others, in the order of the joint tokens' scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import GgufVocabulary, TokenType

_MAX_PIECE_CHARS = 512
"""A longer token cannot be the result of a merge here: known ones have 93 characters at most.

Without a bound, a file of long tokens would take quadratic time.
"""


def merges_of(vocabulary: GgufVocabulary) -> list[list[str]]:
    """Returns the merges, first ones first. Only normal tokens are pieces or results."""
    normal = vocabulary.ids(TokenType.NORMAL)
    pieces = {vocabulary.tokens[token_id]: token_id for token_id in reversed(normal)}
    ranked = sorted(pieces.values(), key=lambda token_id: (-vocabulary.scores[token_id], token_id))
    return _merges((vocabulary.tokens[token_id] for token_id in ranked), pieces)


def scores_of(merges: Sequence[Sequence[str]], pieces: Mapping[str, int]) -> dict[str, float] | None:
    """Returns the score of each normal token, so that `merges_of` returns these merges; None if there is no such score.

    `pieces` has the normal tokens' ids by text. Scores are ids' ranks where the order of merges is
    that of ids, as SentencePiece numbers its tokens.
    """
    kept = [(left, right) for left, right in merges if left in pieces and right in pieces and left + right in pieces]
    results = dict.fromkeys(left + right for left, right in kept)
    by_id = sorted(pieces, key=pieces.__getitem__)
    if list(results) != [text for text in by_id if text in results]:
        by_id = [*results, *(text for text in by_id if text not in results)]
    if _by_result(_merges(by_id, pieces)) != _by_result(kept):
        return None
    return {text: -float(rank) for rank, text in enumerate(by_id)}


def _by_result(merges: Iterable[Sequence[str]]) -> list[tuple[str, list[str]]]:
    """Returns runs of merges with the same result: the result, and where it splits in any order."""
    runs = groupby(merges, key="".join)
    return [(result, sorted(left for left, _ in run)) for result, run in runs]


def _merges(ranked: Iterable[str], pieces: Mapping[str, int]) -> list[list[str]]:
    found = []
    for text in ranked:
        if len(text) > _MAX_PIECE_CHARS:
            continue
        splits = [
            (pieces[text[:at]], pieces[text[at:]], at)
            for at in range(1, len(text))
            if text[:at] in pieces and text[at:] in pieces
        ]
        # The order in which transformers lists the splits of one token.
        found += [[text[:at], text[at:]] for _, _, at in sorted(splits, key=lambda split: (-split[2], split))]
    return found
