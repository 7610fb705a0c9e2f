"""A model without tensors: each token is a hash of all earlier tokens, seed and parameters.

The mathematics is simulated; what answers depend on is real. A lost, repeated or different token,
or a wrong prompt, seed or parameter changes everything after it. `expected` returns what a cluster
without faults answers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

from ryzanstein.demo import MODEL_DIR
from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.text.choice import ChoiceText, TextOptions
from ryzanstein.worker.text.tokenizer import TextModel

ROOT = 0x6A09E667F3BCC908
"""The digest of no tokens."""
NOT_FINITE = 0
"""The digest of a history whose logits are not finite; it never changes again."""
_WORD = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_ADDEND = 0x632BE59BD9B4E019


def extended(digest: int, value: int) -> int:
    """Returns the digest of a history and one more token, or any other number."""
    mixed = ((digest ^ value) * _FACTOR + _ADDEND) & _WORD
    return mixed ^ (mixed >> 29)


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One choice as a client must see it: `texts` are parallel to `tokens`."""

    tokens: tuple[SampledToken, ...]
    texts: tuple[str, ...]
    reason: FinishReason

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """The model of all nodes that serve it alike.

    It generates one of `words`, and about once in `eos_every` tokens `eos_id` (0: never). A prompt
    or answer with `broken_id` has logits that are not finite, on every node. Models with another
    `salt` give other answers.
    """

    words: tuple[int, ...]
    eos_id: int
    eos_every: int = 200
    broken_id: int = -1
    salt: int = 0

    @classmethod
    def named(cls, name: str) -> ScriptedModel:
        """Returns a model like `demo`, with answers of its own."""
        return replace(cls.demo(), salt=int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))

    @classmethod
    def demo(cls, eos_every: int = 200, broken_id: int = -1) -> ScriptedModel:
        """Returns a model with the vocabulary of the embedded demo model.

        Agents read the text side of the demo model.
        """
        return cls(_demo_words(), min(demo_text().eos_token_ids), eos_every, broken_id)

    def draw(
        self, digest: int, sampling: SamplingParams, choice: int, index: int, banned: Collection[int] = ()
    ) -> SampledToken:
        """Returns the next token after a history.

        If greedy, it depends on neither seed, choice nor index.
        """
        x = digest ^ self.salt ^ _parameters(sampling)
        if sampling.temperature > 0:
            x = extended(extended(x, sampling.seed or 0), choice << 32 | index)
        x = extended(x, 1)
        while (token_id := self._pick(x)) in banned:
            x = extended(x, 1)
        return SampledToken(token_id) if sampling.logprobs is None else self._with_logprobs(token_id, x, sampling.logprobs)

    def expected(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        context_length: int,
        text: TextModel | None = None,
        choice: int = 0,
    ) -> ScriptedAnswer:
        """Returns what a node without faults answers with this context.

        A pure function that shares no code with engine or cache.
        """
        text = text or demo_text()
        message = ChoiceText(text, TextOptions(sampling.stop))
        limit = context_length - len(prompt_ids) if sampling.max_tokens is None else sampling.max_tokens
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else text.eos_token_ids)}
        tokens: list[SampledToken] = []
        texts: list[str] = []
        for token in self._tokens(prompt_ids, sampling, choice, stops):
            ends = len(tokens) + 1 > sampling.min_tokens and token.token_id in stops
            part, stopped = message.push(token.token_id)
            last = ends or len(tokens) + 1 >= max(1, limit)
            tokens.append(token)
            texts.append(part + message.flush() if last and not stopped else part)
            if last or stopped:
                break
        return ScriptedAnswer(tuple(tokens), tuple(texts), FinishReason.STOP if ends or stopped else FinishReason.LENGTH)

    def _tokens(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, choice: int, stops: Collection[int]
    ) -> Iterator[SampledToken]:
        """Yields tokens without end."""
        digest, index = ROOT, 0
        for token_id in prompt_ids:
            digest = extended(digest, token_id)
        while True:
            token = self.draw(digest, sampling, choice, index, stops if index < sampling.min_tokens else ())
            yield token
            digest, index = extended(digest, token.token_id), index + 1

    def _pick(self, x: int) -> int:
        if self.eos_every and (x >> 33) % self.eos_every == 0:
            return self.eos_id
        return self.words[(x >> 8) % len(self.words)]

    def _with_logprobs(self, token_id: int, x: int, num_top: int) -> SampledToken:
        """Returns the token with plausible numbers: it is the likeliest, others follow."""
        own = -0.001 * (1 + (x >> 20) % 500)
        others = [self.words[((x >> 8) + 7 * i) % len(self.words)] for i in range(1, num_top + 2)]
        ids = [token_id, *(other for other in others if other != token_id)][:num_top]
        return SampledToken(token_id, own, tuple((each, own - 0.25 * i) for i, each in enumerate(ids)))


@lru_cache(maxsize=1)
def demo_text() -> TextModel:
    """Returns the text side of the embedded demo model, read once per process."""
    return TextModel.load(MODEL_DIR)


@lru_cache(maxsize=1)
def _demo_words() -> tuple[int, ...]:
    """Returns all tokens that are not special, including parts of characters."""
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return tuple(token_id for token_id in range(demo_text().vocab_size) if token_id not in special)


@lru_cache(maxsize=4096)
def _parameters(sampling: SamplingParams) -> int:
    """Returns a digest of all parameters that influence which token is drawn."""
    shaping = (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sorted(sampling.logit_bias),
    )
    return int.from_bytes(blake2b(repr(shaping).encode(), digest_size=8).digest(), "little")
