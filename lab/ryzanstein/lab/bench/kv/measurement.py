"""The measurement: parts of small pieces, each of which is saved as soon as it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from tokenizers import Tokenizer

from ryzanstein.lab.bench.kv.attention_time import FACTORS, MOST_BYTES, SHAPES, attention_times, outlier_errors
from ryzanstein.lab.bench.kv.document import (
    GreedyRow,
    KvDocument,
    MemoryRow,
    OutlierRow,
    PassKeyRow,
    SparseRow,
    TimeRow,
    WindowRow,
)
from ryzanstein.lab.bench.kv.options import KvOption
from ryzanstein.lab.bench.kv.quality import DEPTHS, greedy_matches, judge, pass_key_prompt, says_key
from ryzanstein.lab.bench.kv.sequence import KvSequence, SharedModel
from ryzanstein.lab.bench.kv.sparse import DEPTHS as TEN_DEPTHS
from ryzanstein.lab.bench.kv.sparse import needle_prompt, needles_found, step_times
from ryzanstein.lab.bench.quality.texts import ReadText

AT_ONCE = 256
PARTS = ("memory", "times", "outliers", "greedy", "perplexity", "pass-keys", "sparse")


@dataclass(frozen=True, slots=True)
class KvWork:
    """What is measured: a model, the ways to keep its keys and values, texts."""

    model: SharedModel
    tokenizer: Tokenizer
    options: Sequence[KvOption]
    texts: Sequence[ReadText]
    rules: Sequence[KvOption] = ()


@dataclass
class KvMeasurement:
    """One run. It stops after the piece in which `seconds` have passed, and can be continued."""

    work: KvWork
    document: KvDocument
    people: Console
    save: Callable[[], None]
    seconds: float
    _sequences: dict[tuple[int, int], list[KvSequence]] = field(default_factory=dict)

    def run(self, parts: Sequence[str]) -> bool:
        """Returns whether all parts are finished."""
        began_s = time.monotonic()
        for name, piece in self._pieces(parts):
            if time.monotonic() - began_s > self.seconds:
                return False
            self.people.print(name, markup=False)
            piece()
            self.save()
        return True

    def _pieces(self, parts: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yields what is not measured yet."""
        found = {
            "memory": self._memory,
            "times": self._times,
            "outliers": self._outliers,
            "greedy": self._greedy,
            "perplexity": self._perplexity,
            "pass-keys": self._pass_keys,
            "sparse": self._sparse,
        }
        for part in parts:
            yield from found[part]()

    def _memory(self) -> Iterator[tuple[str, Callable[[], None]]]:
        def measure() -> None:
            spec = self.work.model.spec
            self.document.memory = [MemoryRow(option.name, option.bytes_per_token(spec)) for option in self.work.options]

        if not self.document.memory:
            yield "memory", measure

    def _times(self) -> Iterator[tuple[str, Callable[[], None]]]:
        done = {(row.shape, row.batch, row.context) for row in self.document.times}
        settings = self.document.settings
        for heads in SHAPES:
            for batch in settings.batches:
                for context in settings.contexts:
                    if (heads.name, batch, context) in done or heads.cache_bytes(batch, context) > MOST_BYTES:
                        continue

                    def measure(heads: object = heads, batch: int = batch, context: int = context) -> None:
                        shape = next(each for each in SHAPES if each is heads)
                        seconds = attention_times(self.work.model.kernels, shape, batch, context)
                        self.document.times.append(TimeRow(shape.name, batch, context, seconds))

                    yield f"attention: {heads.name}, batch {batch}, {context} keys", measure

    def _outliers(self) -> Iterator[tuple[str, Callable[[], None]]]:
        def measure() -> None:
            self.document.outliers = [OutlierRow(each, outlier_errors(self.work.model.kernels, each)) for each in FACTORS]

        if not self.document.outliers:
            yield "outliers", measure

    def _perplexity(self) -> Iterator[tuple[str, Callable[[], None]]]:
        done = {(row.length, row.text, row.number) for row in self.document.windows}
        settings = self.document.settings
        for length in settings.windows:
            for text in self.work.texts:
                for number, window in enumerate(text.windows(length)[: settings.num_windows]):
                    if (length, text.name, number) in done:
                        continue

                    def measure(
                        length: int = length, name: str = text.name, number: int = number, ids: Sequence[int] = window.ids
                    ) -> None:
                        sums = judge(self._opened(length), ids, settings.every, AT_ONCE)
                        self.document.windows.append(WindowRow(length, name, number, sums))

                    yield f"perplexity: {text.name}, window {number + 1} of {length} tokens", measure

    def _greedy(self) -> Iterator[tuple[str, Callable[[], None]]]:
        done = {(row.text, row.number) for row in self.document.greedy}
        settings = self.document.settings
        room = settings.prompt_tokens + settings.new_tokens
        for text in self.work.texts:
            for number, prompt in enumerate(text.prompts(settings.prompts, settings.prompt_tokens)):
                if (text.name, number) in done:
                    continue

                def measure(name: str = text.name, number: int = number, prompt: Sequence[int] = prompt) -> None:
                    matches = greedy_matches(self._opened(room), prompt, settings.new_tokens, AT_ONCE)
                    self.document.greedy.append(GreedyRow(name, number, matches))

                yield f"greedy answers: {text.name}, prompt {number + 1}", measure

    def _pass_keys(self) -> Iterator[tuple[str, Callable[[], None]]]:
        done = {(row.context, row.depth) for row in self.document.pass_keys}
        for context in self.document.settings.pass_key_contexts:
            for depth in DEPTHS:
                if (context, depth) in done:
                    continue

                def measure(context: int = context, depth: float = depth) -> None:
                    ids = self.work.texts[0].beginning(context)
                    prompt, key = pass_key_prompt(self.work.tokenizer, ids, context, depth)
                    opened = self._opened(context + AT_ONCE)
                    found = [says_key(self.work.tokenizer, each, prompt, key, AT_ONCE) for each in opened]
                    self.document.pass_keys.append(PassKeyRow(context, depth, found))

                yield f"pass key: {context} tokens, depth {depth:.0%}", measure

    def _sparse(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield from self._sparse_windows()
        done = {(row.what, row.context, row.place) for row in self.document.sparse}
        for context in self.document.settings.pass_key_contexts:
            if ("step", context, 0.0) not in done:
                yield f"sparse times: {context} tokens", partial(self._sparse_times, context)
            if ("needle", context, 0.0) not in done:
                yield f"sparse needles: {context} tokens", partial(self._sparse_needles, context)
            for depth in TEN_DEPTHS:
                if ("pass key", context, depth) not in done:
                    yield f"sparse pass key: {context} tokens, depth {depth:.0%}", partial(self._sparse_key, context, depth)

    def _sparse_windows(self) -> Iterator[tuple[str, Callable[[], None]]]:
        windows = {(row.length, row.text, row.number) for row in self.document.sparse_windows}
        for length in self.document.settings.windows:
            for text in self.work.texts:
                for number, window in enumerate(text.windows(length)[: self.document.settings.num_windows]):
                    if (length, text.name, number) not in windows:
                        piece = partial(self._sparse_window, length, text.name, number, window.ids)
                        yield f"sparse perplexity: {text.name}, window {number + 1} of {length} tokens", piece

    def _sparse_window(self, length: int, name: str, number: int, ids: Sequence[int]) -> None:
        sums = judge(self._opened(length, self.work.rules), ids, self.document.settings.every, AT_ONCE)
        self.document.sparse_windows.append(WindowRow(length, name, number, sums))

    def _sparse_times(self, context: int) -> None:
        sequences = self._opened(context + AT_ONCE, self.work.rules)
        reading, steps = step_times(sequences, self.work.texts[0].beginning(context), AT_ONCE)
        self.document.sparse += [SparseRow("reading", context, 0.0, reading), SparseRow("step", context, 0.0, steps)]

    def _sparse_needles(self, context: int) -> None:
        sequences = self._opened(context + AT_ONCE, self.work.rules)
        prompt, questions = needle_prompt(self.work.tokenizer, self.work.texts[0].beginning(context), context)
        found = [needles_found(self.work.tokenizer, each, prompt, questions, AT_ONCE) for each in sequences]
        for number, of_rules in enumerate(zip(*found, strict=True)):
            self.document.sparse.append(SparseRow("needle", context, float(number), [float(each) for each in of_rules]))

    def _sparse_key(self, context: int, depth: float) -> None:
        prompt, key = pass_key_prompt(self.work.tokenizer, self.work.texts[0].beginning(context), context, depth)
        opened = self._opened(context + AT_ONCE, self.work.rules)
        found = [float(says_key(self.work.tokenizer, each, prompt, key, AT_ONCE)) for each in opened]
        self.document.sparse.append(SparseRow("pass key", context, depth, found))

    def _opened(self, max_tokens: int, options: Sequence[KvOption] | None = None) -> list[KvSequence]:
        """Returns a sequence for each option, with room for so many tokens. Only the last ones are kept."""
        options = self.work.options if options is None else options
        if (opened := self._sequences.get((max_tokens, id(options)))) is None:
            opened = [KvSequence(self.work.model, option, max_tokens, AT_ONCE) for option in options]
            self._sequences = {(max_tokens, id(options)): opened}
        return opened
