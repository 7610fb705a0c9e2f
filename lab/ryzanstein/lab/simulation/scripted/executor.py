"""The engine's executor over a scripted model, with a KV cache of digests.

The digests replace keys and values.

Every slot of every block holds the digest of all tokens up to its own. A step reads through the
block tables of its plan. So a wrong table, a block freed too early or a false hit in the prefix
cache yields wrong tokens, as it would with tensors. The plan and its meaning are real; the numbers
and the duration of a step are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ryzanstein.lab.simulation.scripted.model import NOT_FINITE, ROOT, ScriptedModel, extended
from ryzanstein.worker.engine.plan import (
    OutOfMemory,
    PageMove,
    Rearrangement,
    SampledToken,
    SampleRow,
    SequencesFailed,
    StepPlan,
)

_STALE = 1
_WRONG = 2  # before a block that holds what no sequence should read
_LINKS = 8  # links of a block table checked in a decode step; all of them over time


@dataclass(frozen=True, slots=True)
class Execution:
    """One executed step: its tokens and how long it takes. `failed`: its result does not count."""

    step: int
    num_tokens: int
    duration_s: float
    failed: bool = False


@dataclass(slots=True)
class StepFaults:
    """Faults of the next steps; the numbers count down.

    `over_tokens`: only larger steps fail, and each of them does. `unsound`: logits are never
    finite. `tamper` changes plans on their way, to show that this is detected.
    """

    shortages: int = 0
    over_tokens: int = 0
    bad_rows: int = 0
    unsound: bool = False
    tamper: Callable[[StepPlan], StepPlan] | None = None


class DigestCache:
    """The simulated KV cache.

    It holds for each slot the digest up to it, and for each block the digest before it.
    """

    def __init__(self, num_blocks: int, block_size: int, broken_id: int = -1) -> None:
        self._size = block_size
        self._broken_id = broken_id
        self._digests = [_STALE] * (num_blocks * block_size)
        self._before = [_WRONG] * num_blocks
        self._filled = [0] * num_blocks

    def read(self, table: Sequence[int], num_context: int, *, thorough: bool) -> int:
        """Returns the digest of the first `num_context` tokens.

        A broken chain of blocks gives another digest. `thorough` checks all of the chain, otherwise
        only some blocks, and others the next time.
        """
        if num_context == 0:
            return ROOT
        last, slot = divmod(num_context - 1, self._size)
        digest = self._digests[table[last] * self._size + slot]
        if slot >= self._filled[table[last]]:
            return extended(digest, _WRONG)
        num = last + 1
        start = 0 if thorough or num <= _LINKS else (num_context * _LINKS) % num
        end = num if thorough else min(num, start + _LINKS)
        return digest if self._is_linked(table, start, end) else extended(digest, _WRONG)

    def append(self, table: Sequence[int], start: int, token_ids: Sequence[int], digest: int) -> int:
        """Stores tokens from position `start` on after `digest`. Returns the digest of all."""
        if self._broken_id in token_ids:
            digest = NOT_FINITE
        done = 0
        while done < len(token_ids):
            index, slot = divmod(start + done, self._size)
            part = token_ids[done : done + self._size - slot]
            digest = self._fill(table[index], slot, part, digest)
            done += len(part)
        return digest

    def rearrange(self, change: Rearrangement) -> None:
        """Copies blocks; those whose memory is released hold what no sequence should read."""
        size = self._size
        for source, target in change.moves:
            self._digests[target * size : (target + 1) * size] = self._digests[source * size : (source + 1) * size]
            self._before[target], self._filled[target] = self._before[source], self._filled[source]
        for block in range(change.num_blocks, len(self._before)):
            self._digests[block * size : (block + 1) * size] = [_STALE] * size
            self._before[block], self._filled[block] = _WRONG, 0

    def _is_linked(self, table: Sequence[int], start: int, end: int) -> bool:
        """Returns whether each block was computed after the one before it in the table."""
        before, digests, filled, size = self._before, self._digests, self._filled, self._size
        for i in range(start, end):
            if i == 0:
                if before[table[0]] != ROOT:
                    return False
            elif before[table[i]] != digests[(table[i - 1] + 1) * size - 1] or filled[table[i - 1]] < size:
                return False
        return True

    def _fill(self, block: int, slot: int, token_ids: Sequence[int], digest: int) -> int:
        """Fills slots within one block.

        Overwriting what others may read, or leaving a hole, spoils it.
        """
        at = block * self._size + slot
        if slot == 0:
            self._before[block] = digest
        new = []
        for token_id in token_ids:
            digest = extended(digest, token_id) if digest != NOT_FINITE else NOT_FINITE
            new.append(digest)
        end = slot + len(new)
        if slot > self._filled[block] or (0 < slot < self._filled[block] and self._digests[at : at + len(new)] != new):
            self._before[block] = _WRONG
        self._digests[at : at + len(new)] = new
        self._filled[block] = end if slot == 0 else max(end, self._filled[block])
        return digest


class ScriptedExecutor:
    """The engine's `Executor`.

    `duration` returns how long a step with these numbers of prompt and decoded tokens takes;
    `elapsed_s` is the sum, by which the engine's timer runs ahead. `take` returns what was executed
    since the last call.
    """

    def __init__(
        self, model: ScriptedModel, cache: DigestCache, faults: StepFaults, duration: Callable[[int, int], float]
    ) -> None:
        self._model, self._cache, self._faults, self._duration = model, cache, faults, duration
        self._executed: list[Execution] = []
        self.elapsed_s = 0.0

    def take(self) -> list[Execution]:
        executed, self._executed = self._executed, []
        return executed

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> Sequence[SampledToken]:
        """See `Executor`."""
        num_tokens = len(plan.token_ids)
        num_decodes = plan.num_new.count(1)
        duration_s = self._duration(num_tokens - num_decodes, num_decodes)
        self.elapsed_s += duration_s
        short = self._is_short(num_tokens)
        self._executed.append(Execution(plan.step, num_tokens, duration_s, short))
        if short:
            raise OutOfMemory(f"no memory for {num_tokens} tokens")
        if self._faults.tamper is not None:
            plan = self._faults.tamper(plan)
        digests = self._forward(plan)
        self._refuse_invalid([digests[s] for s in plan.sampled])
        return [self._sample(plan, s, digests[s], row) for s, row in zip(plan.sampled, rows, strict=True)]

    def rearrange(self, change: Rearrangement) -> None:
        """See `Executor`. It takes no time."""
        self._cache.rearrange(change)

    def move_pages(self, move: PageMove) -> None:
        """See `Executor`. Simulated ranks have no pages."""

    def _is_short(self, num_tokens: int) -> bool:
        faults = self._faults
        if faults.over_tokens and num_tokens > faults.over_tokens:
            return True
        if faults.shortages > 0:
            faults.shortages -= 1
            return True
        return False

    def _forward(self, plan: StepPlan) -> list[int]:
        """Returns the digest of each sequence with its new tokens.

        All are read before any is written, as layers do.
        """
        cache, tables = self._cache, plan.block_tables
        reads = [
            cache.read(table, num_context, thorough=num_new > 1)
            for table, num_context, num_new in zip(tables, plan.num_context, plan.num_new, strict=True)
        ]
        digests, first = [], 0
        for table, num_context, num_new, digest in zip(tables, plan.num_context, plan.num_new, reads, strict=True):
            digests.append(cache.append(table, num_context, plan.token_ids[first : first + num_new], digest))
            first += num_new
        return digests

    def _refuse_invalid(self, digests: Sequence[int]) -> None:
        bad = [i for i, digest in enumerate(digests) if digest == NOT_FINITE or self._faults.unsound]
        if self._faults.bad_rows > 0 and digests and not bad:
            self._faults.bad_rows -= 1
            bad = [0]
        if bad:
            raise SequencesFailed(dict.fromkeys(bad, "the model's logits are not finite"))

    def _sample(self, plan: StepPlan, s: int, digest: int, row: SampleRow) -> SampledToken:
        """Draws a token. A row that does not match the fed tokens draws a wrong one."""
        known = len(row.prompt_ids) + len(row.generated_ids)
        if plan.num_context[s] + plan.num_new[s] != known or row.index != len(row.generated_ids):
            digest = extended(digest, _WRONG)
        return self._model.draw(digest, row.sampling, row.choice, row.index, row.banned_ids)
