"""The slots of states: what layers that keep no keys and values have of a sequence, of fixed size.

Keys and values of a prompt are pages that another sequence can begin with at any of them. A state is that
after all tokens so far, and the next token changes it. So some states are kept as they were: *snapshots*,
found under the key of the page with whose last token they end. A sequence can begin where there is a
snapshot, and all its pages.

A step reads a sequence's state from one slot and writes it to another. So a step that does not count can
be computed again, and a snapshot costs no copy: a slot that was written becomes one, and the next step
writes elsewhere. Where a step goes past a page that is worth a snapshot, its tokens are divided into runs.

Snapshots are taken of every `INTERVAL` tokens of a prompt, at its last whole pages, where an earlier
prompt left what it shares with this one (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid
LLMs", MLSys 2025), and at the last whole pages of what is written. They are idle slots, of which the
least recently used is evicted first, those within a prompt before all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from ryzanstein.worker.engine.extents import SLACK, Extents
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.plan import StateRun
from ryzanstein.worker.engine.sequence import Sequence, SequenceState

INTERVAL = 512  # tokens of a prompt between snapshots


class StateSlots:
    """The slots of all sequences: at least two for each that runs, the others for snapshots.

    The memory of a sequence between two steps is two slots, of which one may be a snapshot that others read too. With
    three for each of `max_sequences` no step lacks one.
    """

    def __init__(self, num_slots: int, extents: Extents) -> None:
        self.pool = BlockPool(num_slots)
        self._size, self._pages_between = extents.block_size, max(1, INTERVAL // extents.block_size)
        self._num_running = 0

    def resumable(self, keys: SequenceOf[bytes], num_pages: int) -> int:
        """Returns the most pages, at most so many, after which there is a snapshot."""
        while num_pages and keys[num_pages - 1] not in self.pool:
            num_pages -= 1
        return num_pages

    def start(self, sequence: Sequence) -> None:
        """Gives a sequence the snapshot after its computed tokens, if there are any, and a slot of its own."""
        source = None
        if sequence.num_computed:
            source = self.pool.block_of(sequence.keys[sequence.num_computed // self._size - 1])
            assert source is not None, "a sequence begins where there is a snapshot"
            self.pool.share(source)
        sequence.state = SequenceState(source, self.pool.allocate(1)[0])
        self._num_running += 1

    def settle(self, running: Iterable[Sequence]) -> None:
        """Takes back what sequences were given for a step that did not count."""
        for sequence in running:
            self._forget_step(_state_of(sequence))

    def runs(self, sequence: Sequence, num: int) -> Iterator[StateRun]:
        """Yields the runs of the sequence's next `num` tokens.

        A snapshot within them takes a slot more, and is left out where running sequences may need those
        that are left.
        """
        state, begin = _state_of(sequence), sequence.num_computed
        self._forget_step(state)
        end, source, target = begin + num, state.source, state.target
        for position in self._worthwhile(sequence, end):
            if position == end:
                state.ends_worthwhile = True
            elif self.pool.num_available > self._num_running:
                yield position - begin, -1 if source is None else source, target
                state.written.append((position, target))
                begin, source, target = position, target, self.pool.allocate(1)[0]
        yield end - begin, -1 if source is None else source, target
        state.written.append((end, target))

    def advance(self, sequence: Sequence) -> None:
        """Records that the step with the sequence's last runs has been computed, and publishes its snapshots."""
        state = _state_of(sequence)
        *passed, (end, last) = state.written
        for position, slot in passed:
            self.pool.publish(slot, self._key(sequence, position))
            self.pool.free([slot], soon=not self._is_end(sequence, position))
        before, is_shared, soon = state.source, state.source_is_shared, state.source_goes_soon
        state.source, state.source_is_shared = last, state.ends_worthwhile
        if state.ends_worthwhile:
            self.pool.publish(last, self._key(sequence, end))
            state.source_goes_soon = not self._is_end(sequence, end) and not self._is_written(sequence, end)
            self._supersede(sequence, end)
        state.written, state.ends_worthwhile = [], False
        if before is not None and not is_shared:
            state.target = before
            return
        self.pool.free([] if before is None else [before], soon=soon)
        [state.target] = self.pool.allocate(1)

    def release(self, sequence: Sequence) -> None:
        """Takes the slots of a sequence."""
        if (state := sequence.state) is None:
            return
        self._forget_step(state)
        self.pool.free([state.target])
        self.pool.free([] if state.source is None else [state.source], soon=state.source_goes_soon)
        sequence.state = None
        self._num_running -= 1

    def _forget_step(self, state: SequenceState) -> None:
        self.pool.free([slot for _, slot in state.written[1:]])
        state.written, state.ends_worthwhile = [], False

    def _worthwhile(self, sequence: Sequence, end: int) -> Iterator[int]:
        """Yields after how many tokens, up to `end`, a step takes a snapshot."""
        for page in range(sequence.num_computed // self._size + 1, end // self._size + 1):
            position = page * self._size
            within = page % self._pages_between == 0
            if within or self._is_end(sequence, position) or self._is_written(sequence, position):
                yield position

    def _is_end(self, sequence: Sequence, position: int) -> bool:
        """Returns whether others are likely to begin here: near the end of the prompt, or where an earlier one differed."""
        page = position // self._size
        ends = sequence.group.num_prompt // self._size, sequence.num_tokens // self._size
        return page == sequence.num_known or any(end - SLACK <= page <= end for end in ends)

    def _is_written(self, sequence: Sequence, position: int) -> bool:
        """Returns whether the page ends within the answer, while it is written."""
        return position > sequence.group.num_prompt and position >= sequence.num_tokens - 1

    def _supersede(self, sequence: Sequence, position: int) -> None:
        """Lets the snapshots of an answer go that newer ones have superseded."""
        if not self._is_written(sequence, position):
            return
        older = position - (SLACK + 1) * self._size
        if older > (sequence.group.num_prompt // self._size) * self._size:
            self.pool.supersede(self._key(sequence, older))

    def _key(self, sequence: Sequence, position: int) -> bytes:
        return sequence.keys[position // self._size - 1]


def _state_of(sequence: Sequence) -> SequenceState:
    assert sequence.state is not None, "it runs"
    return sequence.state
